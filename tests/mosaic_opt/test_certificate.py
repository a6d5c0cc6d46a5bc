"""The certificate: an honest report passes, and a report with any claim changed does not."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic_opt.backends.base import Limits, Progress, Report
from mosaic_opt.backends.branch import BranchAndBound
from mosaic_opt.backends.enumerate import Enumerate
from mosaic_opt.bounds import BlockBounds
from mosaic_opt.certificate import RELATIVE_TOLERANCE, certify
from mosaic_opt.envelope import parse_envelope
from mosaic_opt.outcome import Counts, Discarded, Outcome
from mosaic_opt.problem import Problem
from perfmodel.errors import IllegalPlanError

from .strategies import small_envelopes, tiny_ladder, tiny_problem

replace = dataclasses.replace
NUDGE = 1.0 + 1e-6


@cache
def honest() -> tuple[Problem, Report]:
    problem = tiny_problem()
    return problem, Enumerate(workers=1).search(problem, Limits())


def with_incumbent(report: Report, everywhere: bool, **changes: Any) -> Report:
    """Change the incumbent; with ``everywhere``, in the list of outcomes and the bound too."""
    assert report.incumbent is not None
    changed = replace(report.incumbent, **changes)
    if not everywhere:
        return replace(report, incumbent=changed)
    outcomes = tuple(changed if o.index == report.incumbent.index else o for o in report.outcomes)
    return replace(report, incumbent=changed, outcomes=outcomes, dual_bound=changed.loss)


def with_counts(report: Report, position: int, **changes: int) -> Report:
    outcomes = list(report.outcomes)
    counts = outcomes[position].counts
    moved = {name: getattr(counts, name) + by for name, by in changes.items()}
    outcomes[position] = replace(outcomes[position], counts=counts._replace(**moved))
    return replace(report, outcomes=tuple(outcomes))


def cut(report: Report, position: int, by: float) -> Report:
    """Claim that an outcome's layouts in blocks with high bounds were not priced."""
    problem, _ = honest()
    outcome = report.outcomes[position]
    counts = outcome.counts._replace(priced=1, discarded=outcome.counts.priced - 1)
    cutoff = by * outcome.step_s
    assert len(problem.legal_rows(outcome.index)) == outcome.counts.priced
    changed = replace(outcome, cutoff_s=cutoff, counts=counts)
    outcomes = [changed if i == position else o for i, o in enumerate(report.outcomes)]
    return replace(report, outcomes=tuple(outcomes))


def as_discarded(outcome: Outcome) -> Discarded:
    """Claim that a bound of the step equal to its best one ruled a candidate out."""
    plans = outcome.counts.plans
    return Discarded(outcome.index, 0.0, outcome.step_s, Counts(plans, 0, 0, plans, 0, 0))


def best(report: Report) -> Outcome:
    assert report.incumbent is not None
    return report.incumbent


def other_row(report: Report) -> int:
    """Another layout that is legal for the incumbent's architecture."""
    problem, _ = honest()
    rows = problem.legal_rows(best(report).index)
    return int(next(row for row in rows if row != best(report).row))


TAMPERINGS: dict[str, Callable[[Report], Report]] = {
    "loss": lambda r: with_incumbent(r, False, loss=best(r).loss / NUDGE),
    "loss, consistently": lambda r: with_incumbent(r, True, loss=best(r).loss / NUDGE),
    "loss, higher": lambda r: with_incumbent(r, True, loss=best(r).loss * NUDGE),
    "step_s": lambda r: with_incumbent(r, False, step_s=best(r).step_s / NUDGE),
    "step_s, consistently": lambda r: with_incumbent(r, True, step_s=best(r).step_s / NUDGE),
    "memory_bytes": lambda r: with_incumbent(r, True, memory_bytes=best(r).memory_bytes / NUDGE),
    "tokens": lambda r: with_incumbent(r, True, tokens=best(r).tokens * NUDGE),
    "row": lambda r: with_incumbent(r, True, row=other_row(r)),
    "index": lambda r: with_incumbent(r, False, index=(best(r).index + 1) % len(r.outcomes)),
    "no incumbent": lambda r: replace(r, incumbent=None),
    "no incumbent, no bound": lambda r: replace(r, incumbent=None, dual_bound=float("inf")),
    "dual_bound, lower": lambda r: replace(r, dual_bound=r.dual_bound / NUDGE),
    "dual_bound, higher": lambda r: replace(r, dual_bound=r.dual_bound * NUDGE),
    "dual_bound, not a number": lambda r: replace(r, dual_bound=float("nan")),
    "an outcome dropped": lambda r: replace(r, outcomes=r.outcomes[:-1]),
    "an outcome twice": lambda r: replace(r, outcomes=(*r.outcomes, r.outcomes[-1])),
    "an outcome for another": lambda r: replace(r, outcomes=(*r.outcomes[:-1], r.outcomes[0])),
    "no outcomes": lambda r: replace(r, outcomes=()),
    "unexamined, and examined": lambda r: replace(r, unexamined=(0,)),
    "unexamined, not dropped": lambda r: replace(
        r, outcomes=r.outcomes[1:], unexamined=(r.outcomes[0].index,)
    ),
    "unexamined, out of range": lambda r: replace(r, unexamined=(len(r.outcomes),)),
    "discarded layouts": lambda r: with_counts(r, 0, priced=-1, discarded=1),
    "discarded layouts, below a bound": lambda r: cut(r, 0, 0.5),
    "discarded, and examined": lambda r: replace(r, discarded=(as_discarded(r.outcomes[1]),)),
    "discarded, not examined": lambda r: replace(
        r, outcomes=r.outcomes[1:], discarded=(as_discarded(r.outcomes[0]),)
    ),
    "priced": lambda r: with_counts(r, 3, priced=1),
    "priced, fewer": lambda r: with_counts(r, 3, priced=-1),
    "infeasible": lambda r: with_counts(r, 0, infeasible=1),
}


def test_honest_report_is_certified() -> None:
    certificate = certify(*honest())
    assert certificate.certified
    assert {check.name for check in certificate.checks} == {
        "candidates",
        "pairs",
        "well_formed",
        "discarded_bounds",
        "priced_layouts",
        "layout_counts",
        "runners_up",
        "incumbent_is_best",
        "bound",
        "nothing_left",
        "step_time",
        "memory",
        "tokens",
        "loss",
    }
    assert all(check.passed and check.detail for check in certificate.checks)


@pytest.mark.parametrize("what", TAMPERINGS)
def test_changed_claim_is_not_certified(what: str) -> None:
    problem, report = honest()
    certificate = certify(problem, TAMPERINGS[what](report))
    assert not certificate.certified
    assert not all(check.passed for check in certificate.checks)


@pytest.mark.parametrize(
    "changes",
    [{"step_s": 0.999}, {"memory_bytes": 0.999}, {"tokens": 1.001}, {"loss": 1.0 + 1e-6}],
    ids=lambda changes: next(iter(changes)),
)
def test_changed_second_best_is_not_certified(changes: dict[str, float]) -> None:
    problem, report = honest()
    second = sorted((o for o in report.outcomes if o.feasible), key=lambda o: o.loss)[1]
    wrong = replace(second, **{name: getattr(second, name) * by for name, by in changes.items()})
    outcomes = tuple(wrong if o.index == second.index else o for o in report.outcomes)
    certificate = certify(problem, replace(report, outcomes=outcomes))
    failed = {c.name for c in certificate.checks if not c.passed}
    assert {"runners_up"} <= failed <= {"runners_up", "priced_layouts"}
    assert problem.architectures[second.index].name in str(certificate)


@pytest.mark.parametrize("row", [10**9, -(10**9)])
def test_row_outside_the_table_is_not_certified(row: int) -> None:
    problem, report = honest()
    certificate = certify(problem, with_incumbent(report, True, row=row))
    assert [c.name for c in certificate.checks if not c.passed] == ["well_formed"]


@pytest.mark.parametrize("what", ["loss", "step_s", "tokens", "memory_bytes", "cutoff_s"])
@pytest.mark.parametrize("value", [math.nan, -1.0])
def test_what_no_number_can_be_is_not_certified(what: str, value: float) -> None:
    problem, report = honest()
    for position in range(len(report.outcomes)):
        outcomes = list(report.outcomes)
        outcomes[position] = replace(outcomes[position], **{what: value})
        assert not certify(problem, replace(report, outcomes=tuple(outcomes))).certified


def slowest(problem: Problem, outcome: Outcome) -> Outcome:
    """Claim that the slowest layout that fits is a candidate's best, and price it honestly."""
    priced = problem.priced(outcome.index)
    steps = np.where(problem.allowed(priced), priced.step_s, -1.0)
    return problem.outcome(outcome.index, priced, int(np.argmax(steps)))


def test_a_slower_layout_is_not_certified() -> None:
    """Its price holds, and it is not the best one."""
    problem, report = honest()
    everywhere = tuple(slowest(problem, o) for o in report.outcomes)
    alone = tuple(
        slowest(problem, o) if o.index == best(report).index else o for o in report.outcomes
    )
    for outcomes in (everywhere, alone):
        least = min(outcomes, key=lambda o: (o.loss, o.index))
        claimed = replace(report, outcomes=outcomes, incumbent=least, dual_bound=least.loss)
        certificate = certify(problem, claimed)
        assert not certificate.certified
        assert "priced_layouts" in [c.name for c in certificate.checks if not c.passed]


def test_illegal_row_is_an_error() -> None:
    problem = tiny_problem(candidates=tiny_ladder(n_experts=[4]))
    report = Enumerate(workers=1).search(problem, Limits())
    legal = set(problem.legal_rows(best(report).index).tolist())
    illegal = set(range(len(problem.table))) - legal
    with pytest.raises(IllegalPlanError):
        certify(problem, with_incumbent(report, True, row=min(illegal)))


def test_layout_that_does_not_fit_is_not_certified() -> None:
    """A search that forgot the memory: every claim is right but for the cap."""
    _, report = honest()
    tight = tiny_problem(memory_fraction=0.5 * best(report).memory_bytes / 179e9)
    certificate = certify(tight, report)
    failed = {c.name for c in certificate.checks if not c.passed}
    assert failed == {"memory", "runners_up", "priced_layouts", "layout_counts"}


def test_rounding_is_forgiven() -> None:
    problem, report = honest()
    step_s = best(report).step_s * (1.0 + 0.1 * RELATIVE_TOLERANCE)
    assert certify(problem, with_incumbent(report, True, step_s=step_s)).certified


@pytest.mark.parametrize("pairs", [1, 10])
def test_discarded_layouts_need_more_than_a_matching_count(pairs: int) -> None:
    """Pairs that were not priced, on the word of the backend alone, prove nothing."""
    problem, report = honest()
    skipped = with_counts(report, 0, priced=-pairs, discarded=pairs)
    outcomes = (replace(skipped.outcomes[0], cutoff_s=1e9), *skipped.outcomes[1:])
    certificate = certify(problem, replace(skipped, outcomes=outcomes))
    assert [c.name for c in certificate.checks if not c.passed] == ["layout_counts"]


# ---------------------------------------------------------------- what bounds discarded


@cache
def pruned() -> tuple[Problem, Report]:
    """Search with bounds, so that some candidates and some layouts are discarded."""
    problem = tiny_problem(
        cluster={"hardware": "p6-b200", "nodes": 4},
        window_days=10.0,
        tokens={"min_tokens_per_parameter": 50.0},
        memory_fraction=0.03,
        mfu_error=0.4,
        candidates=tiny_ladder(
            q=[1, 2, 3, 4], n_experts=[8, 32, 64], top_k=[1, 4], expert_split=[1, 4]
        ),
    )
    return problem, BranchAndBound(workers=1).search(problem, Limits())


def with_discarded(report: Report, index: int, **changes: Any) -> Report:
    changed = tuple(replace(d, **changes) if d.index == index else d for d in report.discarded)
    assert changed != report.discarded
    return replace(report, discarded=changed)


def partly(report: Report) -> Discarded:
    return next(d for d in report.discarded if d.counts.priced)


def whole(report: Report) -> Discarded:
    return next(d for d in report.discarded if not d.counts.priced)


def cut_outcome(report: Report) -> Outcome:
    return next(o for o in report.outcomes if o.counts.discarded)


def with_outcome(report: Report, outcome: Outcome, **changes: Any) -> Report:
    changed = replace(outcome, **changes)
    outcomes = tuple(changed if o.index == outcome.index else o for o in report.outcomes)
    incumbent = report.incumbent
    if incumbent is not None and incumbent.index == outcome.index:
        incumbent = changed
    return replace(report, outcomes=outcomes, incumbent=incumbent)


def unfounded(report: Report) -> Report:
    """Discard an examined near-tie whole, with its own step as the bound."""
    second = sorted((o for o in report.outcomes if o.feasible), key=lambda o: o.loss)[1]
    left = tuple(o for o in report.outcomes if o.index != second.index)
    discarded = sorted((*report.discarded, as_discarded(second)), key=lambda d: d.index)
    return replace(report, outcomes=left, discarded=tuple(discarded))


def without_the_optimum(report: Report, whole: bool) -> Report:
    """Discard the optimum, with true counts and a true bound of what was not priced of it."""
    problem, _ = pruned()
    optimum = best(report)
    if whole:
        every = problem.solve_candidate(optimum.index)
        gone = Discarded(optimum.index, math.inf, math.inf, every.counts)
    else:
        bounds = BlockBounds(problem)
        floors = bounds.floors(np.array([optimum.index]))[0]
        ahead = float(floors[floors > optimum.cutoff_s].min(initial=math.inf))
        gone = Discarded(optimum.index, optimum.cutoff_s, ahead, optimum.counts)
    left = tuple(o for o in report.outcomes if o.index != optimum.index)
    second = min((o for o in left if o.feasible), key=lambda o: (o.loss, o.index))
    discarded = tuple(sorted((*report.discarded, gone), key=lambda d: d.index))
    return replace(
        report, outcomes=left, discarded=discarded, incumbent=second, dual_bound=second.loss
    )


PRUNED_TAMPERINGS: dict[str, Callable[[Report], Report]] = {
    "bound, higher": lambda r: with_discarded(r, whole(r).index, bound_s=whole(r).bound_s * NUDGE),
    "bound, lower": lambda r: with_discarded(r, whole(r).index, bound_s=whole(r).bound_s / NUDGE),
    "bound of a part, higher": lambda r: with_discarded(
        r, partly(r).index, bound_s=partly(r).bound_s * NUDGE
    ),
    "cutoff, as if more was priced": lambda r: with_discarded(r, partly(r).index, cutoff_s=1e9),
    "cutoff, as if less was priced": lambda r: with_discarded(
        r, partly(r).index, cutoff_s=partly(r).cutoff_s / 4.0
    ),
    "priced": lambda r: with_discarded(
        r, partly(r).index, counts=moved(partly(r).counts, priced=1, discarded=-1)
    ),
    "infeasible": lambda r: with_discarded(
        r, whole(r).index, counts=moved(whole(r).counts, infeasible=1, discarded=-1)
    ),
    "cutoff of an outcome, as if less was priced": lambda r: with_outcome(
        r, cut_outcome(r), cutoff_s=cut_outcome(r).cutoff_s / 4.0
    ),
    "cutoff of an outcome, as if all was priced": lambda r: with_outcome(
        r, cut_outcome(r), cutoff_s=1e9
    ),
    "layouts of an outcome": lambda r: with_outcome(
        r, cut_outcome(r), counts=moved(cut_outcome(r).counts, priced=1, discarded=-1)
    ),
    "a near-tie discarded": unfounded,
    "the optimum discarded in part": lambda r: without_the_optimum(r, whole=False),
    "the optimum discarded after all was priced": lambda r: without_the_optimum(r, whole=True),
    "plans, with the rest to match": lambda r: with_discarded(
        r,
        whole(r).index,
        counts=Counts(7, whole(r).counts.plans - 7, 0, 7, 0, 0),
    ),
    "cutoff, not a number": lambda r: with_discarded(r, whole(r).index, cutoff_s=math.nan),
    "bound, not a number": lambda r: with_discarded(r, whole(r).index, bound_s=math.nan),
    "refused, more than was priced": lambda r: with_discarded(
        r, whole(r).index, counts=whole(r).counts._replace(refused=1)
    ),
    "a discarded candidate dropped": lambda r: replace(r, discarded=r.discarded[1:]),
    "a discarded candidate twice": lambda r: replace(r, discarded=(r.discarded[0], *r.discarded)),
}


def moved(counts: Counts, **by: int) -> Counts:
    return counts._replace(**{name: getattr(counts, name) + n for name, n in by.items()})


def test_pruned_search_is_certified() -> None:
    problem, report = pruned()
    assert certify(problem, report).certified
    assert partly(report)
    assert whole(report)
    assert cut_outcome(report)


@pytest.mark.parametrize("what", PRUNED_TAMPERINGS)
def test_changed_evidence_is_not_certified(what: str) -> None:
    problem, report = pruned()
    assert not certify(problem, PRUNED_TAMPERINGS[what](report)).certified


def test_a_lower_optimum_leaves_more_that_bounds_do_not_discard() -> None:
    """Bounds that were enough for the best incumbent are not for a worse one."""
    problem, report = pruned()
    feasible = sorted((o for o in report.outcomes if o.feasible), key=lambda o: o.loss)
    worst = feasible[-1]
    only = replace(
        report,
        incumbent=worst,
        dual_bound=worst.loss,
        outcomes=tuple(o for o in report.outcomes if o not in feasible[:-1]),
    )
    failed = {c.name for c in certify(problem, only).checks if not c.passed}
    assert "candidates" in failed
    dropped = [
        problem.discarded_whole(o.index, float(floors.min()))
        for o in feasible[:-1]
        for floors in BlockBounds(problem).floors(np.array([o.index]))
    ]
    every = tuple(sorted((*only.discarded, *dropped), key=lambda d: d.index))
    certificate = certify(problem, replace(only, discarded=every))
    assert [c.name for c in certificate.checks if not c.passed] == ["discarded_bounds"]


@settings(max_examples=25)
@given(small_envelopes(), st.integers(1, 4))
def test_only_a_finished_search_is_certified(spec: dict[str, Any], n: int) -> None:
    problem = Problem(parse_envelope(spec))

    def interrupt(state: Progress) -> None:
        if state.done >= n:
            raise KeyboardInterrupt

    report = Enumerate(workers=1).search(problem, Limits(), progress=interrupt)
    assert certify(problem, report).certified == (len(problem.architectures) <= n)


def test_certificate_imports_no_backend() -> None:
    root = Path(__file__).resolve().parent.parent.parent
    code = (
        "import sys, mosaic_opt.certificate\n"
        "found = [m for m in sys.modules if m.startswith('mosaic_opt.backends')]\n"
        "sys.stdout.write(' '.join(found))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
