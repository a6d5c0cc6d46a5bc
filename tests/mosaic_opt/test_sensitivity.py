"""What budgets are worth: multipliers and differences are the slopes that they say they are."""

from __future__ import annotations

import dataclasses
from math import exp, inf, log, log1p
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mosaic_opt.backends.base import Limits
from mosaic_opt.backends.enumerate import Enumerate
from mosaic_opt.backends.gp import GeometricProgram, minimise
from mosaic_opt.envelope import parse_envelope
from mosaic_opt.errors import EnvelopeError
from mosaic_opt.problem import Problem
from mosaic_opt.relaxation import (
    certified_bound,
    points_of,
    program_of,
    token_caps,
)
from mosaic_opt.relaxation_steps import GB
from mosaic_opt.sensitivity import exact_loss
from mosaic_opt.solver import solve

from .relaxations import (
    FEW,
    MEMORY_GB,
    best_steps,
    elasticity,
    exact_optimum,
    relaxed_tiny,
    small_problem,
    small_steps,
)
from .strategies import small_envelopes, tiny, tiny_ladder, tiny_problem


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
    best = Enumerate(workers=1).search(small_problem(), Limits()).incumbent
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
    problem, steps = small_problem(), small_steps()
    for days in (0.3, 4.0):
        expected = exact_optimum(tiny_problem(window_days=days))
        assert exact_loss(problem, steps, {"window_days": days}) == pytest.approx(
            expected, rel=1e-12
        )
    assert exact_loss(problem, steps, {"min_tokens_per_parameter": 1e9}) == inf
    assert problem.envelope.window_days == 1.0
