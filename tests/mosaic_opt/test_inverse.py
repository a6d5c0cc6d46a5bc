"""What a target loss takes, fed back to the search that it inverts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mosaic_opt.allocation.curves import survey
from mosaic_opt.allocation.inverse import Inverse, Objective, invert, least_days
from mosaic_opt.allocation.phases import phases
from mosaic_opt.backends.base import Limits
from mosaic_opt.backends.enumerate import Enumerate
from mosaic_opt.envelope import MAX_WINDOW_DAYS, parse_envelope
from mosaic_opt.errors import MosaicError
from mosaic_opt.problem import Problem
from mosaic_opt.result import Status
from mosaic_opt.solver import solve

from .strategies import small_envelopes, tiny, tiny_envelope, tiny_ladder

WIDE = tiny_ladder(q=[1, 2, 3], n_experts=[4, 8, 16])
BIG = tiny(
    candidates=WIDE,
    batch={"global_batch": 64, "seq_len": 1024, "optimizer": "adamw"},
)


def lowest_at(spec: dict[str, Any], days: float) -> float:
    problem = Problem(parse_envelope(spec | {"window_days": days}))
    best = Enumerate(workers=1).search(problem, Limits()).incumbent
    return float("inf") if best is None else best.loss


@settings(max_examples=30)
@given(small_envelopes(), st.floats(0.0, 1.0))
def test_the_days_reach_the_target_and_fewer_do_not(spec: dict[str, Any], share: float) -> None:
    envelope = parse_envelope(spec)
    assume(Problem(envelope).architectures)
    found = phases(envelope, days_from=1e-3, days_to=1e4, workers=1).phases
    assume(found)
    highest, lowest = found[0].loss_from or found[0].loss_to, found[-1].loss_to
    target = lowest + share * (highest - lowest)
    best = invert(envelope, target, workers=1).best
    assert best is not None
    assert best.loss <= target
    assert lowest_at(spec, best.days) <= target
    assert lowest_at(spec, best.days * (1.0 - 1e-7)) > target


def test_solve_agrees_with_what_it_is_fed_back() -> None:
    target = 2.6
    found = invert(parse_envelope(BIG), target)
    assert found.best is not None
    assert found.value == found.best.days
    solution = solve(parse_envelope(BIG | {"window_days": found.best.days}))
    assert solution.status is Status.OPTIMAL
    assert solution.optimum is not None
    assert solution.optimum.loss <= target
    assert solution.optimum.loss == pytest.approx(target, rel=1e-12)
    assert solution.optimum.plan == found.best.plan
    assert solution.optimum.tokens == pytest.approx(found.best.tokens, rel=1e-12)
    assert solution.optimum.mfu == found.best.mfu


def test_the_closed_form_is_equation_27_inverted() -> None:
    problem = Problem(parse_envelope(BIG))
    beta = problem.envelope.law.beta
    for curve in survey(problem)[::3]:
        target = 1.05 * curve.floor
        c_peak_per_day = problem.envelope.cluster.peak_flops * problem.envelope.cluster.n_devices
        step = problem.reprice(curve.candidate, problem.table.plan(curve.row))
        flops = problem.architectures[curve.candidate].flops_per_token(
            problem.envelope.mfu_convention, problem.envelope.batch.seq_len
        )
        psi = problem.envelope.law.b * (flops / step.mfu) ** beta
        budget = (psi / (target - curve.floor)) ** (1.0 / beta)
        assert least_days(problem, curve, target, beta) == pytest.approx(
            budget / (86400.0 * c_peak_per_day), rel=1e-9
        )


def test_a_target_at_a_cap_is_reached_and_one_below_is_not() -> None:
    one = tiny_ladder(q=[2], n_experts=[8], top_k=[1], expert_split=[1])
    envelope = tiny_envelope(candidates=one, tokens={"max_tokens_per_parameter": 100.0})
    (phase,) = phases(envelope).phases
    at_cap = invert(envelope, phase.loss_to)
    assert at_cap.value == pytest.approx(phase.capped_from_days, rel=1e-9)
    below = invert(envelope, phase.loss_to * (1.0 - 1e-12))
    assert below.value is None
    assert below.best is None
    (missed,) = below.missed
    assert missed.lowest_loss == phase.loss_to
    assert "no candidate reaches" in missed.detail


def test_an_easy_target_takes_the_least_tokens_of_the_rule() -> None:
    one = tiny_ladder(q=[2], n_experts=[8], top_k=[1], expert_split=[1])
    envelope = tiny_envelope(candidates=one, tokens={"min_tokens_per_parameter": 50.0})
    best = invert(envelope, 20.0).best
    assert best is not None
    assert best.tokens_per_parameter == pytest.approx(50.0)
    assert best.tokens_per_parameter >= 50.0


def test_a_grid_rounds_the_tokens_up() -> None:
    one = tiny_ladder(q=[2], n_experts=[8], top_k=[1], expert_split=[1])
    ratios = [10.0, 20.0, 40.0]
    envelope = tiny_envelope(
        candidates=one, tokens={"kind": "grid", "tokens_per_parameter": ratios}
    )
    problem = Problem(envelope)
    halfway = problem.loss(0, 15.0 * problem.n_active(0))
    best = invert(envelope, halfway).best
    assert best is not None
    assert best.tokens == 20.0 * problem.n_active(0)


# ---------------------------------------------------------------- node counts, cost, energy


def test_least_gpu_hours_cost_and_energy_are_on_the_same_nodes() -> None:
    envelope = parse_envelope(BIG | {"cluster": "p6-b200:4"})
    options: dict[str, Any] = {"price_per_gpu_hour": 2.5, "watts_per_device": 1200.0}
    objectives: tuple[Objective, ...] = ("gpu_hours", "cost", "energy")
    found = {o: invert(envelope, 2.6, o, **options) for o in objectives}
    hours = found["gpu_hours"]
    assert [r.nodes for r in hours.by_nodes] == [1, 2, 4]
    assert hours.value == min(r.gpu_hours for r in hours.by_nodes)
    assert hours.value is not None
    assert found["cost"].value == pytest.approx(2.5 * hours.value)
    assert found["energy"].value == pytest.approx(1200.0 * 3600.0 * hours.value)
    for reach in hours.by_nodes:
        assert reach.gpu_hours == pytest.approx(24.0 * reach.n_devices * reach.days)
        fewer = parse_envelope(BIG | {"cluster": f"p6-b200:{reach.nodes}"})
        assert invert(fewer, 2.6).value == reach.days


def test_least_nodes_within_the_window() -> None:
    target = 2.6
    days = {r.nodes: r.days for r in invert(tiny4(), target, nodes=[1, 2, 4]).by_nodes}
    between = (days[1] * days[2]) ** 0.5
    envelope = tiny4(window_days=between)
    found = invert(envelope, target, "nodes")
    assert found.value == 2.0
    assert [m.nodes for m in found.missed] == [1]
    assert found.within_days == between
    assert "more than the" in found.missed[0].detail
    assert invert(envelope, target).value is not None  # four nodes do too
    assert invert(envelope, target, "nodes", within_days=1e-6).best is None


def test_least_nodes_are_least_of_all_counts_between() -> None:
    """A batch that three nodes share out as well, and a window that two cannot meet."""
    spec = BIG | {"cluster": "p6-b200:4", "batch": BIG["batch"] | {"global_batch": 192}}
    target = 2.6
    every = invert(parse_envelope(spec), target, nodes=[1, 2, 3, 4], within_days=36000.0)
    days = {r.nodes: r.days for r in every.by_nodes}
    assert days[4] < days[3] < days[2]
    between = (days[2] * days[3]) ** 0.5
    found = invert(parse_envelope(spec | {"window_days": between}), target, "nodes")
    assert found.value == 3.0
    assert [m.nodes for m in found.missed] == [1, 2]
    assert [r.nodes for r in found.by_nodes] == [3, 4]


def tiny4(**changes: Any) -> Any:
    return parse_envelope(BIG | {"cluster": "p6-b200:4"} | changes)


def test_nodes_without_a_layout_say_so() -> None:
    found = invert(tiny_envelope(memory_fraction=0.001), 2.6)
    assert found.missed[0].detail == "no candidate has a layout that is legal and fits"
    assert found.missed[0].lowest_loss is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"objective": "cost"}, "needs price_per_gpu_hour, which has no default"),
        ({"objective": "energy"}, "needs watts_per_device"),
        ({"objective": "hours"}, "must be one of days, gpu_hours, nodes, cost, energy"),
        ({"target_loss": 0.0}, "target_loss=0 must be a finite number above 0"),
        ({"target_loss": float("nan")}, "target_loss=nan must be"),
        ({"price_per_gpu_hour": -1.0}, "price_per_gpu_hour=-1 must be"),
        ({"within_days": float("inf")}, "within_days=inf must be"),
        ({"nodes": [0]}, "nodes=0 must be from 1"),
        ({"nodes": []}, "nodes is empty"),
    ],
)
def test_bad_input_is_one_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(MosaicError, match=words):
        invert(tiny_envelope(), **({"target_loss": 2.5} | options))


def test_a_target_below_every_floor_is_out_of_reach() -> None:
    found = invert(tiny_envelope(), 0.1)
    lowest = phases(tiny_envelope()).phases[-1].loss_to
    assert found.best is None
    assert found.missed[0].lowest_loss == pytest.approx(lowest, rel=1e-12)
    assert f"{MAX_WINDOW_DAYS:g} days" in found.missed[0].detail


def test_the_document_reads_back() -> None:
    found = invert(tiny_envelope(), 4.0, "cost", price_per_gpu_hour=2.0)
    assert Inverse.model_validate_json(found.model_dump_json()) == found
    assert found.price_source == "ASSUMED"
