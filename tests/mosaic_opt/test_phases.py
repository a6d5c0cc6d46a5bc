"""The optimum of every window at once, held against `solve` and against brute force."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lawfit import ChinchillaLaw, JointLaw, Monomial, load_law
from mosaic_opt.allocation.curves import Piece, best_at, lower_envelope, survey, token_form
from mosaic_opt.allocation.phases import (
    Phases,
    phases,
    phases_by_nodes,
    window_optima,
)
from mosaic_opt.allocation.variants import node_counts, with_nodes
from mosaic_opt.backends.base import Limits
from mosaic_opt.backends.enumerate import Enumerate
from mosaic_opt.envelope import MAX_WINDOW_DAYS, Envelope, parse_envelope
from mosaic_opt.errors import EnvelopeError, MosaicError
from mosaic_opt.problem import Problem
from mosaic_opt.result import Status
from mosaic_opt.solver import solve
from perfmodel.sources import Source

from .strategies import small_envelopes, tiny, tiny_envelope, tiny_ladder

DAYS = st.floats(-4.0, 4.5).map(lambda x: 10.0**x)


def solved_at(spec: dict[str, Any], days: float) -> tuple[str | None, float | None]:
    """Name and loss of the optimum that the exhaustive search finds at one window."""
    problem = Problem(parse_envelope(spec | {"window_days": days}))
    best = Enumerate(workers=1).search(problem, Limits()).incumbent
    return (None, None) if best is None else (problem.architectures[best.index].name, best.loss)


# ---------------------------------------------------------------- against solve


@settings(max_examples=40)
@given(small_envelopes(), st.lists(DAYS, min_size=1, max_size=2))
def test_agrees_with_solve_at_any_window(spec: dict[str, Any], windows: list[float]) -> None:
    problem = Problem(parse_envelope(spec))
    assume(problem.architectures)
    beta = problem.envelope.law.beta
    found = window_optima(problem, survey(problem, workers=1))
    for days in windows:
        ends = [end for piece in found for end in (piece.days_from, piece.days_to)]
        if any(abs(days / end - 1.0) < 1e-9 for end in ends if end):
            continue
        piece = best_at(found, days)
        name, loss = solved_at(spec, days)
        if piece is None:
            assert name is None
            continue
        assert name == problem.architectures[piece.candidate].name
        assert loss == pytest.approx(piece.floor + piece.slope * days**-beta, rel=1e-12, abs=1e-12)


@settings(max_examples=10)
@given(small_envelopes())
def test_both_sides_of_every_breakpoint_agree_with_solve(spec: dict[str, Any]) -> None:
    found = phases(parse_envelope(spec), workers=1)
    for phase in found.phases[:2]:
        begin, end = phase.days_from, phase.days_to
        assert begin < end
        if end - begin > 1e-6 * end:
            inside = begin + 1e-7 * end, end - 1e-7 * end
            assert {solved_at(spec, days)[0] for days in inside} == {phase.architecture}
        if begin > 0.0 and phase is found.phases[0]:
            assert solved_at(spec, begin * (1.0 - 1e-9)) == (None, None)
        assert solved_at(spec, end * (1.0 - 1e-12))[1] == pytest.approx(phase.loss_to, rel=1e-11)


def test_a_window_of_each_phase_of_a_small_envelope() -> None:
    spec = tiny(candidates=tiny_ladder(q=[1, 2, 3, 4], n_experts=[4, 8, 16]))
    found = phases(parse_envelope(spec))
    assert len(found.phases) >= 4  # or the case says little
    for phase in found.phases:
        days = (max(phase.days_from, 1e-3 * phase.days_to) * phase.days_to) ** 0.5
        solution = solve(parse_envelope(spec | {"window_days": days}))
        best = solution.optimum
        assert best is not None
        assert solution.status is Status.OPTIMAL
        assert (best.step.architecture["name"], best.plan) == (phase.architecture, phase.plan)
        assert (best.step_time_s, best.mfu) == (phase.step_time_s, phase.mfu)
        assert phase.loss_to <= best.loss <= (phase.loss_from or float("inf"))


def test_phases_follow_each_other_and_the_loss_falls() -> None:
    found = phases(tiny_envelope(candidates=tiny_ladder(q=[1, 2, 3, 4])))
    assert found.phases[0].days_from == 0.0
    assert found.phases[0].loss_from is None
    assert found.phases[-1].days_to == MAX_WINDOW_DAYS
    for one, next_ in pairwise(found.phases):
        assert one.days_to == next_.days_from
        assert next_.loss_from == pytest.approx(one.loss_to, rel=1e-13)
        assert next_.loss_to < one.loss_to
        assert one.architecture != next_.architecture


# ---------------------------------------------------------------- the token rule, as pieces


def test_a_cap_ends_what_more_days_bring() -> None:
    ratio = 100.0
    one = tiny_ladder(q=[2], n_experts=[8], top_k=[1], expert_split=[1])
    envelope = tiny_envelope(
        candidates=one,
        tokens={"min_tokens_per_parameter": 20.0, "max_tokens_per_parameter": ratio},
    )
    (phase,) = phases(envelope).phases
    assert phase.capped_from_days == pytest.approx(5.0 * phase.days_from)
    assert (phase.binding_from, phase.binding_to) == ("window", "max_tokens_per_parameter")
    assert phase.tokens_from == pytest.approx(20.0 * phase.n_active)
    assert phase.tokens_to == ratio * phase.n_active
    assert phase.days_to == MAX_WINDOW_DAYS


def test_a_grid_of_ratios_is_a_staircase() -> None:
    one = tiny_ladder(q=[2], n_experts=[8], top_k=[1], expert_split=[1])
    envelope = tiny_envelope(
        candidates=one, tokens={"kind": "grid", "tokens_per_parameter": [10.0, 40.0, 20.0]}
    )
    problem = Problem(envelope)
    found = window_optima(problem, survey(problem))
    assert [p.binding for p in found] == ["grid"] * 3
    assert all(p.slope == 0.0 for p in found)
    starts = [p.days_from for p in found]
    assert starts == pytest.approx([starts[0], 2.0 * starts[0], 4.0 * starts[0]])
    (phase,) = phases(envelope).phases
    assert phase.tokens_to == 40.0 * phase.n_active
    assert phase.tokens_from == 10.0 * phase.n_active


def test_a_rule_that_no_window_meets_leaves_no_phase() -> None:
    envelope = tiny_envelope(tokens={"min_tokens_per_parameter": 50.0, "max_tokens": 1e3})
    found = phases(envelope)
    assert found.phases == ()
    assert found.with_layout == found.candidates == 16


def test_the_range_asked_for_cuts_the_phases() -> None:
    envelope = tiny_envelope(candidates=tiny_ladder(q=[1, 2, 3, 4]))
    every, part = phases(envelope), phases(envelope, days_from=0.5, days_to=2.0)
    assert part.phases[0].days_from == 0.5
    assert part.phases[-1].days_to == 2.0
    kept = [p for p in every.phases if p.days_from < 2.0 and p.days_to > 0.5]
    assert [p.architecture for p in part.phases] == [p.architecture for p in kept]
    assert part.phases[0].loss_from == solved_at(envelope.model_dump(mode="json"), 0.5)[1]


@pytest.mark.parametrize(("low", "high"), [(2.0, 1.0), (-1.0, 1.0), (0.0, 1e6), (1.0, 1.0)])
def test_a_range_that_cannot_be_is_one_sentence(low: float, high: float) -> None:
    with pytest.raises(MosaicError, match="must ascend"):
        phases(tiny_envelope(), days_from=low, days_to=high)


# ---------------------------------------------------------------- the lower envelope itself


@st.composite
def step_curves(draw: st.DrawFn) -> list[tuple[Piece, ...]]:
    curves = []
    for index in range(draw(st.integers(1, 12))):
        floor, slope = draw(st.floats(0.5, 3.0)), draw(st.floats(0.0, 2.0))
        start = draw(st.sampled_from([0.0, 0.0, 0.1, 1.0, 30.0]))
        bend = draw(st.sampled_from([0.5, 2.0, 100.0, MAX_WINDOW_DAYS]))
        if bend <= start:
            bend = MAX_WINDOW_DAYS
        made = [Piece(start, bend, index, floor, slope, "window", None)]
        if bend < MAX_WINDOW_DAYS:
            level = floor + slope * bend**-0.2
            made.append(Piece(bend, MAX_WINDOW_DAYS, index, level, 0.0, "max_tokens", 1.0))
        curves.append(tuple(made))
    return curves


def at(curve: tuple[Piece, ...], days: float) -> float:
    piece = best_at(curve, days)
    return float("inf") if piece is None else piece.floor + piece.slope * days**-0.2


@given(step_curves(), st.lists(DAYS, min_size=1, max_size=20))
def test_the_lower_envelope_is_the_least_of_its_curves(
    curves: list[tuple[Piece, ...]], windows: list[float]
) -> None:
    found = lower_envelope(curves, 0.2)
    for one, next_ in pairwise(found):
        assert one.days_to == next_.days_from
    for days in windows:
        if days <= MAX_WINDOW_DAYS:
            assert at(found, days) == pytest.approx(
                min(at(curve, days) for curve in curves), rel=1e-12
            )


def test_of_equal_curves_the_first_wins() -> None:
    line = (Piece(0.0, MAX_WINDOW_DAYS, 3, 1.0, 1.0, "window", None),)
    twin = (line[0]._replace(candidate=1),)
    assert lower_envelope([line, twin], 0.2) == twin
    assert lower_envelope([twin, line], 0.2) == twin


# ---------------------------------------------------------------- laws


@pytest.mark.parametrize("law", ["mosaic-table2", "chinchilla-epoch"])
def test_every_law_of_the_library_has_the_form(law: str) -> None:
    spec = tiny(law=law, candidates=tiny_ladder(q=[1, 2, 3, 4]))
    found = phases(parse_envelope(spec))
    phase = found.phases[len(found.phases) // 2]
    days = phase.days_from + 0.5 * (phase.days_to - phase.days_from)
    assert solved_at(spec, days)[0] == phase.architecture


def test_a_law_without_the_form_is_one_sentence() -> None:
    class Mixed(ChinchillaLaw):
        @property
        def terms(self) -> tuple[Monomial, ...]:
            return (*super().terms, Monomial("more", 1.0, n_active=-0.1, tokens=-0.3))

    law = Mixed(**load_law("chinchilla-epoch").model_dump())
    with pytest.raises(MosaicError, match=r"powers of the tokens: -0\.3.*, -0\.3.*one power"):
        token_form(law)


def test_a_law_whose_loss_is_not_its_terms_is_one_sentence() -> None:
    class Bent(JointLaw):
        def loss(self, **point: Any) -> Any:
            return 1.01 * super().loss(**point)

    law = Bent(**load_law("mosaic-table2").model_dump())
    envelope = tiny_envelope().model_copy(update={"law": law})
    with pytest.raises(MosaicError, match="not the sum of its terms"):
        survey(Problem(envelope))


def test_goodput_may_depend_on_the_candidate() -> None:
    facts = {"mtbf_device_hours": 5000.0, "storage_bytes_per_s": 1e9, "restart_s": 600.0}
    spec = tiny(goodput=facts, candidates=tiny_ladder(q=[1, 2, 3, 4]))
    found = phases(parse_envelope(spec))
    phase = found.phases[-2]
    assert solved_at(spec, 0.5 * (phase.days_from + phase.days_to))[0] == phase.architecture


# ---------------------------------------------------------------- node counts, JSON


def test_one_answer_for_each_node_count() -> None:
    envelope = tiny_envelope()
    both = phases_by_nodes(envelope, [2, 1, 2])
    assert [(p.nodes, p.n_devices) for p in both.clusters] == [(1, 8), (2, 16)]
    assert both.clusters[0].phases == phases(envelope).phases
    spec = tiny(cluster="p6-b200:2")
    assert both.clusters[1].phases == phases(parse_envelope(spec)).phases


def test_other_nodes_keep_the_rest_of_the_envelope() -> None:
    envelope = parse_envelope(tiny(cluster={"hardware": "p6-b200", "nodes": 2, "devices": 8}))
    more = with_nodes(envelope, 4)
    assert (more.cluster.devices, more.cluster.n_devices) == (16, 16)
    assert envelope.peak_compute_flop * 2 == more.peak_compute_flop
    assert isinstance(more, Envelope)
    assert more.model_dump(exclude={"cluster"}) == envelope.model_dump(exclude={"cluster"})


def test_impossible_node_counts_are_one_sentence() -> None:
    with pytest.raises(MosaicError, match="nodes is empty"):
        node_counts([])
    with pytest.raises(MosaicError, match="nodes=0 must be from 1"):
        node_counts([4, 0])
    with pytest.raises(EnvelopeError, match="nodes=1000000"):
        with_nodes(tiny_envelope(), 1000000)


def test_the_document_reads_back_and_says_what_it_rests_on() -> None:
    found = phases(tiny_envelope())
    again = Phases.model_validate_json(found.model_dump_json())
    assert again == found
    assert found.schema_version == 1
    assert found.loss_source == "FITTED"
    assert all(isinstance(p.step_source, Source) for p in found.phases)
    assert found.provenance["envelope"] == tiny_envelope().model_dump(mode="json")
