"""The convex relaxation: its bounds hold, whatever a solver says, and its prices are right."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from math import exp, inf, log, log1p
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from lawfit import CHINCHILLA_EPOCH, MOSAIC_TABLE2, ScalingLaw
from mosaic_opt.backends import gp
from mosaic_opt.backends.base import Limits, Termination
from mosaic_opt.backends.enumerate import Enumerate
from mosaic_opt.backends.gp import GeometricProgram, minimise, relax
from mosaic_opt.envelope import parse_envelope
from mosaic_opt.errors import EnvelopeError, MosaicError
from mosaic_opt.problem import Problem
from mosaic_opt.relaxation import (
    MARGIN,
    N,
    Program,
    certified_bound,
    hull_bound,
    monomial_above,
    points_of,
    program_of,
    terms_of,
    token_caps,
    without_opposites,
)
from mosaic_opt.relaxation_result import Relaxation, RelaxationStatus
from mosaic_opt.relaxation_steps import GB, floor_steps, peak_steps, steps_of_mfu
from mosaic_opt.sensitivity import exact_loss
from mosaic_opt.solver import solve

from .strategies import small_envelopes, tiny, tiny_envelope, tiny_ladder, tiny_problem

FEW = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
MANY = settings(max_examples=200, deadline=None)


MEMORY_GB = tiny_envelope().cluster.device_memory_bytes / GB


def exact_optimum(problem: Problem) -> float:
    best = Enumerate(workers=1).search(problem, Limits()).incumbent
    return inf if best is None else best.loss


def best_steps(problem: Problem) -> np.ndarray:
    cap = problem.envelope.memory_cap_bytes
    n = len(problem.architectures)
    return np.array([problem.least_steps(i, (cap,))[0] for i in range(n)])


@cache
def relaxed_tiny() -> Relaxation:
    return GeometricProgram(workers=1).relax(tiny_problem())


def elasticity(found: Relaxation, budget: str) -> Any:
    return next(e for e in found.elasticities if e.budget == budget)


# ---------------------------------------------------------------- monomials above data


@st.composite
def clouds(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    n, k = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    number = st.floats(-30.0, 30.0)
    features = np.array(
        draw(st.lists(st.lists(number, min_size=k, max_size=k), min_size=n, max_size=n))
    )
    return features, np.array(draw(st.lists(number, min_size=n, max_size=n)))


@MANY
@given(clouds())
def test_a_monomial_is_nowhere_below_the_data(cloud: tuple[np.ndarray, np.ndarray]) -> None:
    features, values = cloud
    for at in (None, features[0]):
        assert np.all(monomial_above(features, values, at).at(features) >= values)


def test_a_monomial_is_found_exactly_where_the_data_are_one() -> None:
    rng = np.random.default_rng(3)
    features = rng.normal(20.0, 2.0, (30, 3))
    powers = np.array([0.4, -0.7, 0.2])
    above = monomial_above(features, 1.5 + features @ powers)
    assert above.powers == pytest.approx(powers, abs=1e-6)
    assert above.constant == pytest.approx(1.5, abs=1e-4)


def test_the_tightest_monomial_touches_as_many_points_as_it_has_numbers() -> None:
    rng = np.random.default_rng(4)
    features, values = rng.normal(0.0, 1.0, (40, 2)), rng.normal(0.0, 1.0, 40)
    excess = monomial_above(features, values).at(features) - values
    assert np.count_nonzero(excess < 1e-6) == 3
    point = features[7]
    at_point = monomial_above(features, values, point)
    mean = monomial_above(features, values)
    assert at_point.at(point[None])[0] <= mean.at(point[None])[0] + 1e-9


# ---------------------------------------------------------------- laws


@pytest.mark.parametrize("law", [MOSAIC_TABLE2, CHINCHILLA_EPOCH, MOSAIC_TABLE2.at_split(4.0)])
def test_terms_are_the_law(law: ScalingLaw) -> None:
    total, active, tokens = 3e10, 2e9, 4e11
    x = np.log([total, active / total, tokens, 4.0])
    loss = law.loss(n_total=total, n_active=active, tokens=tokens, expert_split=4.0)
    assert terms_of(law).values(x).sum() == pytest.approx(loss, rel=1e-12)


def test_a_law_that_is_no_posynomial_is_refused_in_one_sentence() -> None:
    law = MOSAIC_TABLE2.model_copy(update={"c": -0.1})
    with pytest.raises(MosaicError, match=r"'sparsity' has the coefficient -0\.1, .*posynomial"):
        terms_of(law)


# ---------------------------------------------------------------- the program


def test_every_candidate_is_a_point_of_the_program() -> None:
    rule = {
        "kind": "saturate",
        "max_tokens": 9e9,
        "max_tokens_per_parameter": 90.0,
        "min_tokens_per_parameter": 3.0,
    }
    problem = tiny_problem(tokens=rule)
    points = points_of(problem, best_steps(problem))
    program = program_of(problem, points)
    assert len(points.candidate)
    assert np.all(program.rows @ points.x.T <= program.limits[:, None])
    assert np.all((program.lower <= points.x) & (points.x <= program.upper))
    assert {"compute", "max_tokens", "max_tokens_per_parameter", "min_tokens_per_parameter"} <= set(
        program.names
    )
    assert any(name.startswith("ladder cut") for name in program.names)


@MANY
@given(st.integers(0, 2**32 - 1), st.floats(0.0, 3.0))
def test_the_checked_bound_holds_for_any_point_and_multipliers(seed: int, scale: float) -> None:
    problem = _tiny()
    points = points_of(problem, _tiny_steps())
    program = program_of(problem, points)
    rng = np.random.default_rng(seed)
    x = points.x.mean(axis=0) + scale * rng.normal(size=4)
    y = scale * rng.normal(size=len(program.limits))
    least = points.loss.min()
    assert certified_bound(program, x, y) <= least
    assert hull_bound(program.terms, points.x, x) <= least


def test_the_checked_bound_is_lost_with_wrong_multipliers_and_never_wrong() -> None:
    problem = _tiny()
    program = program_of(problem, points_of(problem, _tiny_steps()))
    answer = minimise(program, "clarabel")
    good = certified_bound(program, answer.x, answer.multipliers)
    assert good == pytest.approx(answer.value, abs=1e-6)
    assert certified_bound(program, answer.x, 0.0 * answer.multipliers) < good - 1e-3
    assert certified_bound(program, answer.x, 1.1 * answer.multipliers) < good
    assert certified_bound(program, answer.x * np.nan, answer.multipliers) == -inf
    assert certified_bound(program, answer.x, np.full_like(answer.multipliers, inf)) == -inf


def test_the_margin_is_taken_off() -> None:
    problem = _tiny()
    points = points_of(problem, _tiny_steps())
    alone = points.x[:1]
    terms = terms_of(problem.envelope.law)
    value = terms.values(alone[0]).sum()
    assert value * (1.0 - 3.0 * MARGIN) < hull_bound(terms, alone, alone[0]) < value


@MANY
@given(st.lists(st.floats(0.0, 5.0), min_size=5, max_size=5), st.integers(0, 2**32 - 1))
def test_opposite_rows_share_no_price(multipliers: list[float], seed: int) -> None:
    rng = np.random.default_rng(seed)
    row, other = rng.normal(size=(2, 4))
    rows = np.array([row, -row, other, row, -row])
    limits = rows @ rng.normal(size=4) + rng.uniform(0.0, 1.0, 5)
    lower, upper = -5.0 * np.ones(4), 5.0 * np.ones(4)
    terms = terms_of(MOSAIC_TABLE2)
    program = Program(terms, tuple("abcde"), rows, limits, lower, upper)
    y = np.array(multipliers)
    kept, x = without_opposites(program, y), rng.normal(size=4)
    assert kept[2] == y[2]
    assert np.all((kept >= 0.0) & (kept <= y))
    assert min(kept[0], kept[1]) == min(kept[3], kept[4]) == 0.0
    assert kept @ rows == pytest.approx(y @ rows, abs=1e-12)
    bound = certified_bound(program, x, y)
    assert certified_bound(program, x, kept) >= bound - 1e-9 * (1.0 + abs(bound))


@cache
def _tiny() -> Problem:
    return tiny_problem()


@cache
def _tiny_steps() -> np.ndarray:
    return best_steps(_tiny())


# ---------------------------------------------------------------- bounds


@pytest.mark.slow
@FEW
@given(
    small_envelopes(),
    st.integers(1, 4),
    st.sampled_from(["mosaic-table2", "chinchilla-epoch", "per split"]),
)
def test_no_random_envelope_has_a_better_optimum_than_its_bounds(
    content: dict[str, Any], pieces: int, law: str
) -> None:
    split = float(content["candidates"]["expert_split"][0])
    one_split = MOSAIC_TABLE2.at_split(split).model_dump(mode="json")
    content = content | {"law": one_split if law == "per split" else law}
    problem = Problem(parse_envelope(content))
    optimum = exact_optimum(problem)
    exact = GeometricProgram(workers=1, pieces=pieces).relax(problem)
    assert exact.status is not RelaxationStatus.FAILED, exact.words
    assert (exact.status is RelaxationStatus.INFEASIBLE) == (optimum == inf)
    if exact.lower_bound is not None:
        assert exact.lower_bound <= optimum
        assert exact.primal is not None
        assert exact.lower_bound >= exact.primal * (1.0 - 1e-3)  # strong duality
        assert exact.lower_bound <= exact.primal <= optimum * (1.0 + 1e-6)
        parts = exact.split
        assert parts is not None
        assert parts.exact == pytest.approx(optimum, rel=1e-12)
        assert exact.lower_bound <= parts.hull <= optimum
        assert parts.integrality + parts.envelope == pytest.approx(parts.gap, abs=1e-12)
        for run in exact.solvers:
            assert run.bound is None or run.bound <= optimum
    crude = GeometricProgram(mfu="bound", check=None, workers=1).search(problem, Limits())
    assert crude.dual_bound <= optimum
    floors, best = floor_steps(problem, Limits(), 1, None).now, best_steps(problem)
    assert np.all(floors <= best)  # whoever has no block has no layout
    assert np.all(floors >= peak_steps(problem))
    losses = (problem.optimistic_loss(i) for i in range(len(problem.architectures)))
    peak = min(losses, default=inf)
    assert crude.dual_bound >= peak


def test_more_pieces_close_the_part_of_the_envelope() -> None:
    one = relaxed_tiny()
    many = GeometricProgram(workers=1, pieces=6).relax(tiny_problem())
    assert one.split is not None
    assert many.split is not None
    assert len(many.useful_share) == 6
    assert many.split.envelope < 0.2 * one.split.envelope
    assert many.split.integrality == pytest.approx(one.split.integrality, abs=1e-6)


def test_one_candidate_is_bounded_by_its_own_loss() -> None:
    ladder = tiny_ladder(q=[2], n_experts=[8], top_k=[2], expert_split=[2])
    problem = tiny_problem(candidates=ladder)
    found = GeometricProgram(workers=1).relax(problem)
    assert found.lower_bound == pytest.approx(exact_optimum(problem), abs=1e-7)
    assert found.point is not None
    assert found.point.n_total == pytest.approx(problem.n_total(0), rel=1e-6)


def test_a_better_bound_of_mfu_can_be_plugged_in() -> None:
    problem = tiny_problem()
    envelope = problem.envelope
    active = np.array([problem.n_active(i) for i in range(len(problem.architectures))])
    peak = envelope.cluster.n_devices * envelope.cluster.peak_flops
    mfu = 6.0 * active * envelope.batch.tokens / (_tiny_steps() * peak)
    assert steps_of_mfu(problem, mfu) == pytest.approx(_tiny_steps(), rel=1e-12)
    backend = GeometricProgram(workers=1)
    same = backend.relax(problem, mfu=mfu)
    assert same.mfu == "given"
    assert same.lower_bound == pytest.approx(relaxed_tiny().lower_bound, abs=1e-7)
    looser = backend.relax(problem, mfu=1.5 * mfu)
    assert looser.lower_bound is not None
    assert same.lower_bound is not None
    assert looser.lower_bound < same.lower_bound < exact_optimum(problem)
    assert same.split is None
    with pytest.raises(MosaicError, match=r"mfu=-0\.1 must be at least 0"):
        backend.relax(problem, mfu=np.full(len(mfu), -0.1))
    with pytest.raises(MosaicError, match=r"mfu=inf must be at least 0 and finite"):
        backend.relax(problem, mfu=np.full(len(mfu), np.inf))
    with pytest.raises(MosaicError, match="one value for each of the 16 candidates"):
        backend.relax(problem, mfu=mfu[:3])


@pytest.mark.parametrize("precision", ["bf16", "fp8", "nvfp4"])
def test_no_step_is_shorter_than_at_the_peak_of_its_precision(precision: str) -> None:
    batch = {"global_batch": 32, "seq_len": 1024, "precision": precision}
    problem = tiny_problem(batch=batch)
    assert np.all(peak_steps(problem) <= best_steps(problem))


def test_blocks_of_layouts_bound_the_loss_better_than_the_peak() -> None:
    problem = tiny_problem()
    blocks = GeometricProgram(mfu="bound", workers=1).relax(problem)
    peak = GeometricProgram(workers=1).relax(problem, limits=Limits(time_s=1e-9))
    assert (blocks.mfu, peak.mfu) == ("bound", "partial")
    assert blocks.lower_bound is not None
    assert peak.lower_bound is not None
    assert relaxed_tiny().lower_bound is not None
    assert peak.lower_bound + 0.02 < blocks.lower_bound < relaxed_tiny().lower_bound
    assert blocks.split is None
    assert all(e.exact is None for e in blocks.elasticities)


def test_a_candidate_without_a_block_within_memory_is_left_out() -> None:
    problem = tiny_problem(memory_fraction=0.014)
    floors, best = floor_steps(problem, Limits(), 1, None).now, best_steps(problem)
    assert 0 < np.count_nonzero(np.isinf(floors)) < len(floors)
    assert np.all(np.isinf(best[np.isinf(floors)]))
    found = GeometricProgram(mfu="bound", workers=1).relax(problem)
    assert found.points == np.count_nonzero(np.isfinite(floors))
    assert found.lower_bound is not None
    assert found.lower_bound < exact_optimum(problem) < inf


def test_goodput_that_differs_between_candidates_is_part_of_the_envelope() -> None:
    facts = {"mtbf_node_hours": 30.0, "storage_bytes_per_s": 5e7, "restart_s": 600.0}
    problem = tiny_problem(goodput=facts)
    shares = {problem.envelope.goodput_of(a).value for a in problem.architectures}
    assert len(shares) > 1
    found = GeometricProgram(workers=1).relax(problem)
    assert found.lower_bound is not None
    assert found.lower_bound <= exact_optimum(problem)


# ---------------------------------------------------------------- what budgets are worth


def test_the_worth_of_a_day_is_the_slope_of_the_relaxed_optimum() -> None:
    days, step = 1.0, 1e-3
    losses = [
        GeometricProgram(workers=1).relax(tiny_problem(window_days=days * f)).primal
        for f in (1.0 - step, 1.0 + step)
    ]
    slope = log(losses[1] / losses[0]) / log((1.0 + step) / (1.0 - step))
    day = elasticity(relaxed_tiny(), "window_days")
    assert day.relaxed == pytest.approx(slope, rel=1e-3)
    assert day.relaxed_per_unit == pytest.approx(slope * relaxed_tiny().primal / days, rel=1e-3)


def test_the_worth_of_a_day_is_near_that_of_the_exact_optimum() -> None:
    day = elasticity(relaxed_tiny(), "window_days")
    step = 1e-3
    losses = [exact_optimum(tiny_problem(window_days=1.0 + s)) for s in (-step, step)]
    slope = log(losses[1] / losses[0]) / log((1.0 + step) / (1.0 - step))
    assert day.exact == pytest.approx(slope, rel=1e-3)
    assert day.relaxed == pytest.approx(slope, rel=0.1)
    more = exact_optimum(tiny_problem(window_days=2.0)) - exact_optimum(tiny_problem())
    assert day.one_more == pytest.approx(more, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_tokens", 2e9), ("max_tokens_per_parameter", 8.0), ("min_tokens_per_parameter", 60.0)],
)
def test_the_worth_of_a_cap_is_that_of_the_exact_optimum(name: str, value: float) -> None:
    ladder = tiny_ladder(q=[2], n_experts=[8], top_k=[2], expert_split=[2])
    rule = {"kind": "saturate", name: value}
    if name == "min_tokens_per_parameter":  # one that a single model only just meets is no price
        ladder = tiny_ladder()
    problem = tiny_problem(candidates=ladder, tokens=rule)
    found = GeometricProgram(workers=1).relax(problem)
    worth = elasticity(found, name)
    assert worth.exact is not None
    if name == "min_tokens_per_parameter":
        assert worth.relaxed >= 0.0
        return
    assert worth.relaxed < -1e-3
    assert worth.relaxed == pytest.approx(worth.exact, rel=1e-4)
    assert elasticity(found, "window_days").relaxed == pytest.approx(0.0, abs=1e-6)
    step = 1e-3
    losses = [
        exact_optimum(tiny_problem(candidates=ladder, tokens={"kind": "saturate", name: value * f}))
        for f in (1.0 - step, 1.0 + step)
    ]
    slope = log(losses[1] / losses[0]) / log((1.0 + step) / (1.0 - step))
    assert worth.exact == pytest.approx(slope, rel=1e-3)


def test_the_worth_of_a_gigabyte_is_the_difference_of_two_searches() -> None:
    fraction = 0.028
    problem = tiny_problem(memory_fraction=fraction)
    device = problem.envelope.cluster.device_memory_bytes
    found = elasticity(GeometricProgram(workers=1).relax(problem), "memory")
    now, more, less = (
        exact_optimum(tiny_problem(memory_fraction=fraction + s * GB / device)) for s in (0, 1, -1)
    )
    assert more < now < less
    assert found.one_more == pytest.approx(more - now, rel=1e-6)
    assert found.one_less == pytest.approx(less - now, rel=1e-6)
    assert found.value == pytest.approx(fraction * device / GB)


def moved(content: dict[str, Any], budget: str, value: float) -> Problem | None:
    """Return a problem with another budget; None for a rule that no candidate could meet."""
    if budget == "window_days":
        changes: dict[str, Any] = {"window_days": value}
    elif budget == "memory":
        device = parse_envelope(content).cluster.device_memory_bytes
        changes = {"memory_fraction": value * GB / device}
    else:
        changes = {"tokens": content["tokens"] | {budget: value}}
    try:
        return Problem(parse_envelope(content | changes))
    except EnvelopeError:
        return None


@pytest.mark.slow
@FEW
@given(small_envelopes(), st.sampled_from([1e-4, 1e-2, 0.3]))
def test_multipliers_are_slopes_of_the_relaxed_optimum(
    content: dict[str, Any], step: float
) -> None:
    """Its optimum is convex in the logarithms of the limits, so a slope lies below to both sides.

    Of the program with the same candidates: it is convex, and has no jumps.
    """
    problem = Problem(parse_envelope(content))
    steps = best_steps(problem)
    points = points_of(problem, steps)
    assume(len(points.candidate))
    found = GeometricProgram(workers=1, check=None).relax(problem)
    assert found.primal is not None
    program = program_of(problem, points)
    for row in found.elasticities:
        if row.relaxed is None:
            continue
        constraint = "compute" if row.budget == "window_days" else row.budget
        sign = -1.0 if row.budget == "min_tokens_per_parameter" else 1.0
        of_row = np.array([name == constraint for name in program.names])
        assert of_row.any()
        assert row.relaxed * sign <= 0.0
        for change in (log1p(step), log1p(-step)):
            limits = program.limits + sign * change * of_row
            other = minimise(dataclasses.replace(program, limits=limits), "clarabel")
            if not other.status.startswith("optimal"):
                continue  # nothing is left within the limits
            line = found.primal + row.relaxed * found.primal * change
            assert other.value >= line - 1e-6
            same = moved(content, row.budget, row.value * exp(change))
            listed = row.remarks and row.remarks[0].reason == "listed"
            if same is None or listed:
                continue
            there = points_of(same, steps)
            if np.array_equal(there.candidate, points.candidate):  # the envelope says the same
                moved_program = program_of(same, there)
                assert np.allclose(moved_program.limits, limits, rtol=0.0, atol=1e-6)
                assert np.allclose(moved_program.rows, program.rows, rtol=0.0, atol=1e-6)


@pytest.mark.slow
@FEW
@given(small_envelopes())
def test_exact_slopes_are_differences_of_exact_searches(content: dict[str, Any]) -> None:
    def optimum(budget: str, value: float) -> float:
        problem = moved(content, budget, value) if value > 0.0 else None
        return inf if problem is None else exact_optimum(problem)

    problem = Problem(parse_envelope(content))
    now = exact_optimum(problem)
    found = GeometricProgram(workers=1, check=None).relax(problem)
    for row in found.elasticities:
        if any(r.reason == "listed" for r in row.remarks):
            assert (row.exact, row.exact_wide, row.one_more, row.one_less) == (None,) * 4
            continue
        changes = [(row.one_more, row.one), (row.one_less, -row.one)]
        for change, one in changes:
            if row.budget == "memory" and row.value + one > MEMORY_GB:
                continue
            then = optimum(row.budget, row.value + one)
            assert (change is None) == (then == inf)
            if change is not None:
                assert change == pytest.approx(then - now, abs=1e-9)
        if row.budget == "memory":
            continue
        for slope, step in ((row.exact, row.exact_step), (row.exact_wide, row.wide_step)):
            below, above = (optimum(row.budget, row.value * (1.0 + s)) for s in (-step, step))
            assert (slope is None) == (max(below, above) == inf)
            if slope is not None:
                expected = (log(above) - log(below)) / (log1p(step) - log1p(-step))
                assert slope == pytest.approx(expected, abs=1e-9)
        assert row.relaxed is not None
        if row.exact is not None and abs(row.exact - row.relaxed) > 0.01:
            far = abs(row.exact - row.relaxed) > 0.2 * max(abs(row.exact), abs(row.relaxed))
            reasons = {r.reason for r in row.remarks}
            assert not far or reasons & {"constraint", "point", "grid", "filter", "candidate"}


def reasons(row: Any) -> list[str]:
    return [remark.reason for remark in row.remarks]


def test_a_cap_that_the_relaxed_point_alone_reaches_is_said_to_be_one() -> None:
    best = Enumerate(workers=1).search(_tiny(), Limits()).incumbent
    assert best is not None
    cap = 1.001 * best.tokens
    rule = {"kind": "saturate", "max_tokens": cap}
    found = GeometricProgram(workers=1).relax(tiny_problem(tokens=rule))
    window, tokens = elasticity(found, "window_days"), elasticity(found, "max_tokens")
    assert window.exact < -0.05  # each number is right for its own optimum
    assert tokens.exact == 0.0
    assert tokens.relaxed < -0.001
    assert reasons(tokens)[0] == "constraint"
    assert "exact optimum are set by the window" in tokens.remarks[0].words
    assert "relaxed point by max_tokens." in tokens.remarks[0].words
    assert tokens.remarks[0].words in " ".join(str(found).split())
    # over a wider step the cap does bind
    assert tokens.exact_wide < -0.001


def test_the_largest_listed_ratio_within_the_most_is_the_cap() -> None:
    rule = {
        "kind": "grid",
        "max_tokens_per_parameter": 60.0,
        "tokens_per_parameter": [10.0, 40.0, 90.0],
    }
    assert token_caps(tiny_problem(tokens=rule)) == {
        "max_tokens_per_parameter": 40.0,
        "min_tokens_per_parameter": 10.0,
    }


def test_a_listed_ratio_moves_the_exact_optimum_by_jumps() -> None:
    rule = {"kind": "grid", "tokens_per_parameter": [20.0, 80.0]}
    problem = tiny_problem(tokens=rule)
    window = elasticity(GeometricProgram(workers=1).relax(problem), "window_days")
    near = [exact_optimum(tiny_problem(tokens=rule, window_days=1.0 + s)) for s in (-1e-3, 1e-3)]
    far = [exact_optimum(tiny_problem(tokens=rule, window_days=1.0 + s)) for s in (-0.1, 0.1)]
    assert near[0] == near[1] == exact_optimum(problem)
    assert far[1] < far[0]
    assert window.exact == 0.0
    assert window.exact_wide == pytest.approx(log(far[1] / far[0]) / log(1.1 / 0.9), rel=1e-9)
    assert window.relaxed < -0.05
    assert reasons(window)[0] == "grid"


def test_the_only_listed_ratio_is_a_cap_and_no_least_ratio() -> None:
    rule = {"kind": "grid", "tokens_per_parameter": [40.0]}
    found = GeometricProgram(workers=1).relax(tiny_problem(tokens=rule))
    more, less = (elasticity(found, f"{m}_tokens_per_parameter") for m in ("max", "min"))
    assert more.relaxed < -0.01
    assert less.relaxed == 0.0
    assert reasons(more) == reasons(less) == ["listed"]


def test_ratios_far_apart_leave_the_tokens_of_the_relaxed_point_free() -> None:
    rule = {"kind": "grid", "tokens_per_parameter": [1.0, 1e6]}
    problem = tiny_problem(tokens=rule, window_days=10.0)
    points = points_of(problem, best_steps(problem))
    program = program_of(problem, points)
    answer = minimise(program, "clarabel")
    assert answer.x[2] > points.x[:, 2].max() + 4.0
    assert answer.x[2] < program.upper[2]
    assert certified_bound(program, answer.x, answer.multipliers) == pytest.approx(
        answer.value, abs=1e-6
    )


@pytest.mark.parametrize(
    ("budget", "name", "unit", "value", "more"),
    [
        (
            {"cost": 9600.0, "price_per_gpu_hour": 50.0},
            "budget.cost",
            "cost",
            9600.0,
            {"cost": 10600.0, "price_per_gpu_hour": 50.0},
        ),
        (
            {"energy_kwh": 2880.0, "watts_per_device": 15000.0},
            "budget.energy_kwh",
            "kWh",
            2880.0,
            {"energy_kwh": 3880.0, "watts_per_device": 15000.0},
        ),
    ],
)
def test_a_budget_has_a_price_in_its_own_unit(
    budget: dict[str, Any], name: str, unit: str, value: float, more: dict[str, Any]
) -> None:
    content = {k: v for k, v in tiny().items() if k != "window_days"}
    now = parse_envelope(content | {"budget": budget})
    found = GeometricProgram(workers=1).relax(Problem(now))
    row, day = elasticity(found, name), elasticity(found, "window_days")
    assert (row.value, row.unit, row.one) == (value, unit, 1000.0)
    assert (row.relaxed, row.exact_wide) == (day.relaxed, pytest.approx(day.exact_wide, rel=1e-9))
    days_a_unit = now.window_days / value
    assert row.relaxed_per_unit == pytest.approx(day.relaxed_per_unit * days_a_unit, rel=1e-12)
    losses = [
        solve(e, backend=Enumerate(workers=1)).bounds.primal
        for e in (now, parse_envelope(content | {"budget": more}))
    ]
    assert losses[0] is not None
    assert losses[1] is not None
    assert row.one_more == pytest.approx(losses[1] - losses[0], rel=1e-9)
    assert 1.0 < 1000.0 * row.relaxed_per_unit / row.one_more < 1.25  # it is convex
    assert row.one_less > 0.0
    assert name in str(found)
    assert f"1000 {'kWh' if unit == 'kWh' else 'of cost'}" in " ".join(str(found).split())


def test_exact_loss_is_the_optimum_under_changed_budgets() -> None:
    problem, steps = _tiny(), _tiny_steps()
    for days in (0.3, 4.0):
        expected = exact_optimum(tiny_problem(window_days=days))
        assert exact_loss(problem, steps, {"window_days": days}) == pytest.approx(
            expected, rel=1e-12
        )
    assert exact_loss(problem, steps, {"min_tokens_per_parameter": 1e9}) == inf
    assert problem.envelope.window_days == 1.0


# ---------------------------------------------------------------- solvers


@pytest.mark.parametrize("solver", ["clarabel", "scs"])
def test_report_83_the_compute_optimum_of_a_dense_law_is_its_closed_form(solver: str) -> None:
    law, compute = CHINCHILLA_EPOCH, 5.76e23
    dense = [[0.0, 1.0, 0.0, 0.0], [0.0, -1.0, 0.0, 0.0]]  # 1 - S = 1
    program = Program(
        terms_of(law),
        ("compute", "dense", "dense"),
        np.array([[1.0, 1.0, 1.0, 0.0], *dense]),  # 6 N_act D <= C
        np.array([log(compute / 6.0), 0.0, 0.0]),
        np.array([log(1e8), 0.0, log(1e8), 0.0]),
        np.array([log(1e13), 0.0, log(1e15), 0.0]),
    )
    power = 1.0 / (law.alpha + law.beta)
    n = (law.alpha * law.a / (law.beta * law.b)) ** power * (compute / 6.0) ** (law.beta * power)
    loss = law.loss(n_total=n, n_active=n, tokens=compute / 6.0 / n, expert_split=1.0)
    assert n == pytest.approx(7.22487e10, rel=1e-5)
    answer = minimise(program, solver)
    # where the loss is flat the point has half of its digits; the value has all
    assert np.exp(answer.x[0] + answer.x[1]) == pytest.approx(n, rel=1e-4)
    assert answer.value == pytest.approx(loss, rel=1e-8)
    bound = certified_bound(program, answer.x, answer.multipliers)
    assert loss * (1.0 - 2e-6) < bound <= loss * (1.0 + 1e-12)
    slope = -answer.multipliers[0]  # d L / d log C, by the envelope theorem
    assert slope == pytest.approx(-law.beta * law.b * (compute / 6.0 / n) ** -law.beta, rel=1e-5)


def test_two_solvers_agree() -> None:
    runs = [run for run in relaxed_tiny().solvers if run.program == "monomial"]
    assert [run.solver for run in runs] == ["clarabel", "scs"]
    assert all(run.status == "optimal" for run in runs)
    assert runs[0].bound == pytest.approx(runs[1].bound, abs=1e-6)
    assert relaxed_tiny().lower_bound == max(run.bound for run in runs)


def test_any_installed_solver_by_name_in_any_case() -> None:
    found = GeometricProgram(workers=1, solver="SCS", check=None).relax(tiny_problem())
    assert found.lower_bound == pytest.approx(relaxed_tiny().lower_bound, abs=1e-6)
    assert {run.solver for run in found.solvers} == {"scs"}


def test_an_unknown_solver_lists_those_that_there_are() -> None:
    with pytest.raises(MosaicError, match=r"no solver 'simplex' here; cvxpy finds .*clarabel"):
        GeometricProgram(solver="simplex").relax(tiny_problem())


def test_a_solver_without_exponential_cones_is_a_status_with_its_words() -> None:
    problem = tiny_problem()
    found = GeometricProgram(workers=1, solver="osqp", check=None).relax(problem)
    assert found.status is RelaxationStatus.FAILED
    assert found.lower_bound is None
    assert "osqp: error" in found.words
    assert all(run.words for run in found.solvers)
    json.loads(found.to_json())
    report = GeometricProgram(workers=1, solver="osqp", check=None).search(problem, Limits())
    crude = min(problem.optimistic_loss(i) for i in range(len(problem.architectures)))
    assert report.dual_bound == pytest.approx(crude)


def test_the_second_solver_stands_in_for_one_that_failed() -> None:
    found = GeometricProgram(workers=1, solver="osqp", check="scs").relax(tiny_problem())
    assert found.status is RelaxationStatus.BOUND
    assert found.lower_bound == pytest.approx(relaxed_tiny().lower_bound, abs=1e-6)


def test_a_solver_that_lies_gives_no_better_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = minimise

    def liar(program: Any, solver: str) -> Any:
        answer = honest(program, solver)
        return answer._replace(value=9.9, multipliers=3.0 * answer.multipliers, x=answer.x + 0.5)

    monkeypatch.setattr(gp, "minimise", liar)
    found = GeometricProgram(workers=1).relax(tiny_problem())
    assert found.lower_bound is not None
    assert relaxed_tiny().lower_bound is not None
    assert found.lower_bound < relaxed_tiny().lower_bound


def test_solvers_that_agree_are_said_to() -> None:
    seen = relaxed_tiny().agreements
    assert [a.program for a in seen] == ["monomial", "hull"]
    assert all(a.agree and a.solvers == ("clarabel", "scs") for a in seen)
    assert "scs on the monomial program agree within 1e-06" in str(relaxed_tiny())
    alone = GeometricProgram(workers=1, check=None).relax(tiny_problem())
    assert alone.agreements == ()
    failed = GeometricProgram(workers=1, solver="osqp", check="scs").relax(tiny_problem())
    assert [a.agree for a in failed.agreements] == [None, None]
    assert "cannot be compared" in str(failed)


def test_a_second_solver_with_another_optimum_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = minimise

    def liar(program: Any, solver: str) -> Any:
        answer = honest(program, solver)
        return answer._replace(value=answer.value + 3e-6) if solver == "scs" else answer

    monkeypatch.setattr(gp, "minimise", liar)
    found = GeometricProgram(workers=1).relax(tiny_problem())
    first, hull = found.agreements
    assert first.agree is False
    assert hull.agree is True
    assert first.difference == pytest.approx(3e-6, abs=1e-7)
    assert first.tolerance < first.difference
    page = " ".join(str(found).split())
    assert "clarabel and scs on the monomial program DIFFER by 3.0" in page
    assert found.lower_bound == pytest.approx(relaxed_tiny().lower_bound, abs=1e-9)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"workers": 0}, "workers=0 must be at least 1"),
        ({"pieces": 0}, "pieces=0 must be at least 1"),
        ({"mfu": "guess"}, "mfu='guess' must be exact or bound"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(MosaicError, match=sentence):
        GeometricProgram(**options)


# ---------------------------------------------------------------- as a backend, and its page


def test_solve_returns_a_bound_and_no_incumbent() -> None:
    solution = solve(tiny_envelope(), backend="gp")
    assert solution.status == "unknown"
    assert solution.optimum is None
    assert solution.bounds.primal is None
    assert solution.bounds.dual == pytest.approx(relaxed_tiny().lower_bound, abs=1e-9)
    assert solution.counts.unexamined == solution.counts.plans
    assert "Bound only: no candidate has a loss below 2.35" in str(solution)


def test_nothing_feasible_is_a_status() -> None:
    found = relax(tiny_envelope(memory_fraction=1e-6))
    assert found.status is RelaxationStatus.INFEASIBLE
    assert found.lower_bound is None
    assert "nothing to bound" in str(found)
    assert GeometricProgram().search(tiny_problem(memory_fraction=1e-6), Limits()).dual_bound == inf


def test_a_search_cut_short_keeps_a_bound() -> None:
    problem = tiny_problem()
    found = GeometricProgram(workers=1).relax(problem, limits=Limits(time_s=1e-9))
    assert found.mfu == "partial"
    assert found.split is None
    assert found.lower_bound is not None
    assert found.lower_bound < exact_optimum(problem)
    report = GeometricProgram(workers=1).search(problem, Limits(time_s=1e-9))
    assert report.termination is Termination.TIME_LIMIT


def test_json_and_page_say_the_same() -> None:
    found = relaxed_tiny()
    again = Relaxation.model_validate_json(found.to_json())
    assert again == found
    page = str(found)
    for word in ("integrality", "window_days", "memory", "clarabel", f"{found.lower_bound:.6f}"):
        assert word in page
    assert found.split is not None
    assert f"{found.split.integrality:.6f}" in page


def test_backend_options_are_its_fields() -> None:
    assert {f.name for f in dataclasses.fields(GeometricProgram)} == {
        "solver", "check", "mfu", "pieces", "workers",
    }  # fmt: skip
    assert N == 0
