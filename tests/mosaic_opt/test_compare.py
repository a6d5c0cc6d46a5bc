"""Backends side by side: honest ones agree on random envelopes; a lie is laid to the liar."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic_opt.agreement import Agreement, Claim, agreement
from mosaic_opt.backends.base import (
    Availability,
    Backend,
    Capability,
    Limits,
    Progress,
    Report,
    Termination,
)
from mosaic_opt.backends.cpsat.search import CpSat
from mosaic_opt.backends.entries import BACKENDS
from mosaic_opt.backends.enumerate import Enumerate
from mosaic_opt.certificate import certify
from mosaic_opt.comparison import Comparison, Row, State, compare
from mosaic_opt.envelope import parse_envelope
from mosaic_opt.errors import MosaicError
from mosaic_opt.problem import Problem
from mosaic_opt.result import Status

from .liars import LIES, Altered, Change, altered, flatters, same
from .strategies import small_envelopes, solved_tiny, tiny_envelope, tiny_ladder


def by_name(found: Comparison) -> dict[str, Row]:
    return {row.backend: row for row in found.rows}


def blamed(found: Comparison) -> set[tuple[str, str]]:
    return {(d.backend, d.about) for d in found.agreement.disagreements}


# ---------------------------------------------------------------- honest backends agree


@settings(max_examples=12)
@given(small_envelopes())
def test_exact_backends_agree_on_random_envelopes(spec: dict[str, Any]) -> None:
    spec["candidates"]["q"] = spec["candidates"]["q"][:1]  # cpsat takes its time
    found = compare(parse_envelope(spec), backends=["enumerate", "cpsat", "gp"])
    assert found.agreement.agree, found.agreement.disagreements
    assert found.agreement.exact == ("enumerate", "cpsat")
    one, other, bound = found.rows
    assert (one.status, one.bound) == (other.status, other.bound)
    assert one.status in (Status.OPTIMAL, Status.INFEASIBLE)
    assert one.incumbent == other.incumbent
    if one.incumbent is not None:
        assert one.incumbent.priced_again
        assert one.gap == 0.0
        assert bound.bound is not None
        assert bound.bound <= one.incumbent.loss
        assert found.agreement.best_of == ("enumerate", "cpsat")


def assert_adds_up(found: Comparison) -> None:
    assert found.candidates * found.layouts == found.plans
    for row in found.rows:
        if row.effort is not None:
            e = row.effort
            assert e.priced + e.infeasible + e.discarded + e.unexamined == found.plans


def test_every_registered_backend_has_a_row() -> None:
    found = compare(tiny_envelope())
    assert [row.backend for row in found.rows] == list(BACKENDS)
    assert {row.state for row in found.rows} == {State.RAN}
    assert found.agreement.agree
    assert_adds_up(found)
    rows, solution = by_name(found), solved_tiny()
    best, row = solution.optimum, rows["enumerate"]
    assert best is not None
    assert row.incumbent is not None
    assert row.effort is not None
    assert row.status is solution.status
    assert row.incumbent.name == best.architecture["name"]
    assert (row.incumbent.plan, row.incumbent.tokens) == (best.plan, best.tokens)
    assert row.incumbent.loss == best.loss == row.bound
    assert row.effort.priced == solution.counts.priced
    assert row.effort.candidates == 16
    assert found.loss_source == best.loss_source
    assert rows["gp"].incumbent is None
    assert rows["gp"].status is Status.UNKNOWN
    for each in found.rows:
        assert each.search_s is not None
        assert each.search_s > 0.0


def test_all_but_the_seconds_is_the_same_twice() -> None:
    one, two = (compare(tiny_envelope(), backends=["gp", "enumerate"]) for _ in range(2))
    clock = {"search_s": None, "checks_s": None}
    assert [r.model_copy(update=clock) for r in one.rows] == [
        r.model_copy(update=clock) for r in two.rows
    ]
    assert one.agreement == two.agreement
    assert one.provenance == two.provenance


def test_nothing_feasible_is_agreed_on() -> None:
    found = compare(tiny_envelope(memory_fraction=1e-6))
    assert found.agreement.agree
    assert found.agreement.best_of == ()
    rows = by_name(found)
    assert {rows[name].status for name in found.agreement.exact} == {Status.INFEASIBLE}
    for row in found.rows:
        assert row.claims_infeasible
        assert (row.incumbent, row.bound, row.gap) == (None, None, None)


def test_a_time_limit_leaves_a_row_with_a_gap() -> None:
    class Slow(Altered):
        """Examines half of the candidates: stopped by its time."""

        name = "slow"

        def search(self, problem: Problem, limits: Limits, *, progress: Any = None) -> Report:
            assert limits.time_s == 5.0

            def stop(state: Progress) -> None:
                if state.done == 8:
                    raise KeyboardInterrupt

            report = Enumerate(workers=1).search(problem, Limits(), progress=stop)
            return same(report, termination=Termination.TIME_LIMIT)

    slow = Slow(lambda problem, report: report)
    found = compare(tiny_envelope(), backends=["enumerate", slow], limits=Limits(time_s=5.0))
    assert found.agreement.agree, found.agreement.disagreements
    assert not found.interrupted
    assert found.agreement.exact == ("enumerate",)
    row = by_name(found)["slow"]
    assert (row.status, row.termination) == (Status.FEASIBLE, "time_limit")
    assert row.incumbent is not None
    assert row.effort is not None
    assert row.bound is not None
    assert row.gap == row.incumbent.loss - row.bound > 0.0
    assert row.effort.candidates == 8
    assert row.effort.unexamined == found.plans // 2
    assert_adds_up(found)


def test_a_heuristic_need_not_find_the_optimum() -> None:
    def second(problem: Problem, report: Report) -> Report:
        (best,) = [o for o in report.outcomes if o.index == report.incumbent.index]
        kept = tuple(o for o in report.outcomes if o is not best)
        low = min(problem.optimistic_loss(best.index), best.loss)
        return same(
            report,
            incumbent=min((o for o in kept if o.feasible), key=lambda o: (o.loss, o.index)),
            outcomes=kept,
            unexamined=(best.index,),
            dual_bound=low,
        )

    one = altered(second, provides=Capability.INCUMBENT)
    found = compare(tiny_envelope(), backends=[one, "enumerate"])
    assert found.agreement.agree, found.agreement.disagreements
    assert found.agreement.best_of == found.agreement.exact == ("enumerate",)
    both = compare(tiny_envelope(), backends=[altered(second), "enumerate"])
    assert ("altered", "point") in blamed(both)  # as an exact one it should have


# ---------------------------------------------------------------- lies


@pytest.mark.parametrize("first", [True, False], ids=["liar first", "liar last"])
@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_laid_to_the_liar_alone(lie: str, first: bool) -> None:
    change, provides, about = LIES[lie]
    envelope = tiny_envelope(candidates=tiny_ladder(q=[2, 3], n_experts=[8]))
    liar = altered(change, name="liar", provides=provides)
    backends: list[Backend | str] = [liar, "enumerate"] if first else ["enumerate", liar]
    found = compare(envelope, backends=backends)
    assert not found.agreement.agree
    assert blamed(found) == {("liar", each) for each in about}
    assert by_name(found)["enumerate"].status is Status.OPTIMAL
    assert "enumerate" in found.agreement.best_of
    for each in found.agreement.disagreements:
        assert "liar" in each.detail
        assert each.detail.endswith(".")
        assert "\n" not in each.detail


def test_a_flattered_loss_lowers_nobody_s_bound() -> None:
    found = compare(tiny_envelope(), backends=["enumerate", "gp", altered(flatters, name="liar")])
    row = by_name(found)["liar"]
    assert row.incumbent is not None
    assert not row.incumbent.priced_again
    assert row.status is Status.FEASIBLE
    assert {"loss"} <= set(row.failed_checks)
    assert {d.backend for d in found.agreement.disagreements} == {"liar"}


@pytest.mark.parametrize("first", [True, False], ids=["liar first", "liar last"])
def test_a_slower_layout_of_the_same_loss_is_another_point(first: bool) -> None:
    """All layouts reach the cap on tokens, so the loss tells none of them apart."""
    envelope = tiny_envelope(tokens={"max_tokens": 1e6})
    liar = altered(LIES["another layout"][0], name="liar")
    backends: list[Backend | str] = [liar, "enumerate"] if first else ["enumerate", liar]
    found = compare(envelope, backends=backends)
    losses = {row.incumbent.loss for row in found.rows if row.incumbent is not None}
    assert len(losses) == 1
    assert blamed(found) == {("liar", "point"), ("liar", "checks")}
    assert found.agreement.best_of == ("enumerate",)


def test_a_tie_goes_to_the_first_candidate() -> None:
    models = [
        json.loads(a.model_dump_json()) | {"name": name}
        for name in ("first", "second")
        for a in tiny_envelope(
            candidates=tiny_ladder(q=[2], n_experts=[8], top_k=[1], expert_split=[1])
        ).candidates.architectures()
    ]
    envelope = tiny_envelope(candidates={"kind": "explicit", "models": models})
    last = altered(lambda problem, report: same(report, incumbent=report.outcomes[-1]))
    found = compare(envelope, backends=["cpsat", "enumerate", last])
    assert blamed(found) == {("altered", "point"), ("altered", "checks")}
    (point,) = (d for d in found.agreement.disagreements if d.about == "point")
    assert "names second" in point.detail
    assert "first" in point.detail


@given(st.permutations(["worst", "flatters", "nothing fits", "another layout"]), st.booleans())
@settings(max_examples=10)
def test_the_verdict_does_not_depend_on_the_order(lies: list[str], with_honest: bool) -> None:
    problem = Problem(
        tiny_envelope(candidates=tiny_ladder(q=[2, 3], n_experts=[8], top_k=[1], expert_split=[1]))
    )
    honest = Enumerate(workers=1).search(problem, Limits())
    reports = {lie: LIES[lie][0](problem, honest) for lie in lies}
    if with_honest:
        reports["honest"] = honest

    def judged(names: list[str]) -> Agreement:
        return agreement(
            problem,
            [Claim(n, Capability.EXACT, reports[n], certify(problem, reports[n])) for n in names],
        )

    one, other = judged(list(reports)), judged(sorted(reports))
    assert {(d.backend, d.about) for d in one.disagreements} == {
        (d.backend, d.about) for d in other.disagreements
    }
    assert set(one.best_of) == set(other.best_of)
    if with_honest:
        assert "honest" not in {d.backend for d in one.disagreements}
        assert one.best_of == ("honest",)


# ---------------------------------------------------------------- those that give no answer


def fails(problem: Problem, report: Report) -> Report:
    raise RuntimeError("the\nlicence ran out.")


def refuses(problem: Problem, report: Report) -> Report:
    raise MosaicError("This envelope is not for me.")


def leaves(problem: Problem, report: Report) -> Report:
    sys.exit(3)


def test_a_failure_is_a_row_with_its_words() -> None:
    backends = [altered(fails, name="broken"), altered(leaves, name="leaving"), "enumerate"]
    found = compare(tiny_envelope(), backends=backends)
    rows = by_name(found)
    assert rows["enumerate"].status is Status.OPTIMAL
    assert rows["broken"].state is rows["leaving"].state is State.FAILED
    assert rows["broken"].words == "RuntimeError: the licence ran out"
    assert rows["leaving"].words == "SystemExit: 3"
    assert rows["broken"].incumbent is rows["broken"].bound is rows["broken"].effort is None
    assert blamed(found) == {("broken", "failure"), ("leaving", "failure")}
    assert found.agreement.exact == ("enumerate",)


@pytest.mark.parametrize(
    "change",
    [
        lambda problem, report: None,
        lambda problem, report: same(report, outcomes=None),
        lambda problem, report: same(report, incumbent=report.incumbent.index),
        lambda problem, report: same(
            report, incumbent=dataclasses.replace(report.incumbent, row=10**9)
        ),
        lambda problem, report: same(
            report, incumbent=dataclasses.replace(report.incumbent, index=10**9)
        ),
    ],
    ids=["nothing", "no outcomes", "no outcome", "no such layout", "no such candidate"],
)
def test_a_report_that_cannot_be_read_is_a_failure(change: Change) -> None:
    found = compare(tiny_envelope(), backends=[altered(change), "enumerate"])
    assert by_name(found)["altered"].state is State.FAILED
    assert by_name(found)["altered"].words
    assert by_name(found)["enumerate"].status is Status.OPTIMAL
    assert blamed(found) == {("altered", "failure")}


def test_a_refusal_is_a_row_and_no_contradiction() -> None:
    found = compare(tiny_envelope(), backends=[altered(refuses), "enumerate"])
    row = by_name(found)["altered"]
    assert (row.state, row.words) == (State.REFUSED, "This envelope is not for me")
    assert found.agreement.agree


def test_one_that_is_not_available_is_a_row_and_no_contradiction() -> None:
    absent = altered(fails, name="absent", state=Availability.NOT_INSTALLED)
    found = compare(tiny_envelope(), backends=["enumerate", absent])
    row = by_name(found)["absent"]
    assert (row.state, row.words) == (State.UNAVAILABLE, "not installed")
    assert row.status is row.search_s is None
    assert found.agreement.agree


def test_a_backend_cannot_spoil_the_problem_of_the_next() -> None:
    def spoil(problem: Problem, report: Report) -> Report:
        problem.architectures = problem.architectures[:1]
        problem.envelope = tiny_envelope(window_days=9.0)
        return report

    found = compare(tiny_envelope(), backends=[altered(spoil), "enumerate"])
    assert found.agreement.agree
    assert by_name(found)["enumerate"].incumbent == by_name(found)["altered"].incumbent


def test_bad_arguments_are_one_sentence() -> None:
    envelope = tiny_envelope()
    with pytest.raises(MosaicError, match="no backend 'simplex'; there are enumerate"):
        compare(envelope, backends=["enumerate", "simplex"])
    with pytest.raises(MosaicError, match="Backend enumerate is named twice"):
        compare(envelope, backends=["enumerate", Enumerate(workers=1)])
    with pytest.raises(MosaicError, match="No backend is named"):
        compare(envelope, backends=[])


def test_options_are_shown_and_used() -> None:
    found = compare(tiny_envelope(), backends=[CpSat(workers=2, seed=3), Enumerate(workers=1)])
    assert [row.options for row in found.rows] == ["workers=2, seed=3", "workers=1"]
    assert found.agreement.agree


# ---------------------------------------------------------------- progress and interrupts


def test_progress_names_the_backend() -> None:
    seen: list[tuple[str, Progress]] = []
    compare(
        tiny_envelope(),
        backends=["enumerate", "gp"],
        progress=lambda name, state: seen.append((name, state)),
    )
    assert [name for name, _ in seen] == sorted((n for n, _ in seen), key=["enumerate", "gp"].index)
    for name in ("enumerate", "gp"):
        assert max(state.done for n, state in seen if n == name) == 16


def test_an_error_of_the_callback_is_not_the_backend_s() -> None:
    def fail(name: str, state: Progress) -> None:
        raise MosaicError(name)

    with pytest.raises(MosaicError, match=r"^enumerate$"):
        compare(tiny_envelope(), backends=["enumerate"], progress=fail)


def interrupted_in(backend: str, at: int) -> Comparison:
    def stop(name: str, state: Progress) -> None:
        if name == backend and state.done == at:
            raise KeyboardInterrupt

    backends = ["enumerate", "gp", altered(lambda p, r: r, name="last")]
    return compare(tiny_envelope(), backends=backends, progress=stop)


def test_an_interrupt_keeps_what_was_done() -> None:
    first = interrupted_in("enumerate", 5)
    assert first.interrupted
    row = by_name(first)["enumerate"]
    assert row.effort is not None
    assert (row.termination, row.effort.candidates) == ("interrupted", 5)
    assert row.incumbent is not None
    assert [r.state for r in first.rows] == [State.RAN, State.NOT_RUN, State.NOT_RUN]
    assert first.agreement.agree

    second = interrupted_in("gp", 3)
    assert by_name(second)["enumerate"].status is Status.OPTIMAL
    assert [r.state for r in second.rows] == [State.RAN, State.RAN, State.NOT_RUN]


def test_an_interrupt_that_a_backend_does_not_catch_ends_it() -> None:
    def stopped(problem: Problem, report: Report) -> Report:
        raise KeyboardInterrupt

    found = compare(tiny_envelope(), backends=["enumerate", altered(stopped), "gp"])
    assert found.interrupted
    assert [r.state for r in found.rows] == [State.RAN, State.NOT_RUN, State.NOT_RUN]
    assert by_name(found)["enumerate"].status is Status.OPTIMAL
