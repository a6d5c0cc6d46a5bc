"""The convex relaxation: its bounds hold, whatever a solver says, and its prices are right."""

from __future__ import annotations

import dataclasses
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lawfit import CHINCHILLA_EPOCH, MOSAIC_TABLE2, ScalingLaw
from mosaic_opt.backends.base import Limits, Termination
from mosaic_opt.backends.gp import GeometricProgram, minimise, relax
from mosaic_opt.envelope import parse_envelope
from mosaic_opt.errors import MosaicError
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
    without_opposites,
)
from mosaic_opt.relaxation_result import Relaxation, RelaxationStatus
from mosaic_opt.relaxation_steps import floor_steps, peak_steps, steps_of_mfu
from mosaic_opt.solver import solve

from .relaxations import (
    FEW,
    MANY,
    best_steps,
    exact_optimum,
    relaxed_tiny,
    small_problem,
    small_steps,
)
from .strategies import small_envelopes, tiny_envelope, tiny_ladder, tiny_problem

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
    problem = small_problem()
    points = points_of(problem, small_steps())
    program = program_of(problem, points)
    rng = np.random.default_rng(seed)
    x = points.x.mean(axis=0) + scale * rng.normal(size=4)
    y = scale * rng.normal(size=len(program.limits))
    least = points.loss.min()
    assert certified_bound(program, x, y) <= least
    assert hull_bound(program.terms, points.x, x) <= least


def test_the_checked_bound_is_lost_with_wrong_multipliers_and_never_wrong() -> None:
    problem = small_problem()
    program = program_of(problem, points_of(problem, small_steps()))
    answer = minimise(program, "clarabel")
    good = certified_bound(program, answer.x, answer.multipliers)
    assert good == pytest.approx(answer.value, abs=1e-6)
    assert certified_bound(program, answer.x, 0.0 * answer.multipliers) < good - 1e-3
    assert certified_bound(program, answer.x, 1.1 * answer.multipliers) < good
    assert certified_bound(program, answer.x * np.nan, answer.multipliers) == -inf
    assert certified_bound(program, answer.x, np.full_like(answer.multipliers, inf)) == -inf


def test_the_margin_is_taken_off() -> None:
    problem = small_problem()
    points = points_of(problem, small_steps())
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
    mfu = 6.0 * active * envelope.batch.tokens / (small_steps() * peak)
    assert steps_of_mfu(problem, mfu) == pytest.approx(small_steps(), rel=1e-12)
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
