"""The certificate: an honest report passes, and a report with any claim changed does not."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic_opt.backends.base import Limits, Progress, Report
from mosaic_opt.backends.enumerate import Enumerate
from mosaic_opt.certificate import RELATIVE_TOLERANCE, certify
from mosaic_opt.envelope import parse_envelope
from mosaic_opt.problem import Outcome, Problem
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
    "discarded_pairs": lambda r: replace(r, discarded_pairs=1),
    "discarded_pairs, negative": lambda r: replace(r, discarded_pairs=-1),
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
        "discarded",
        "runners_up",
        "incumbent_is_best",
        "nothing_left",
        "step_time",
        "memory",
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
    assert [c.name for c in certificate.checks if not c.passed] == ["runners_up"]
    assert problem.architectures[second.index].name in str(certificate)


@pytest.mark.parametrize("row", [10**9, -(10**9)])
def test_row_outside_the_table_is_an_error(row: int) -> None:
    problem, report = honest()
    with pytest.raises(IndexError):
        certify(problem, with_incumbent(report, True, row=row))


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
    assert [c.name for c in certificate.checks if not c.passed] == ["memory", "runners_up"]


def test_rounding_is_forgiven() -> None:
    problem, report = honest()
    step_s = best(report).step_s * (1.0 + 0.1 * RELATIVE_TOLERANCE)
    assert certify(problem, with_incumbent(report, True, step_s=step_s)).certified


@pytest.mark.parametrize("pairs", [1, 10])
def test_discarded_pairs_need_more_than_a_matching_count(pairs: int) -> None:
    """Pairs that were not priced, on the word of the backend alone, prove nothing."""
    problem, report = honest()
    skipped = replace(with_counts(report, 0, priced=-pairs), discarded_pairs=pairs)
    assert not certify(problem, skipped).certified


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
