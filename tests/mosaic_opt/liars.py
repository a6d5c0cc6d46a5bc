"""Backends that report another thing than the truth, and what each is to be blamed for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from math import inf, nan
from typing import Any, ClassVar

from mosaic_opt.backends.base import (
    Availability,
    Backend,
    Capability,
    Limits,
    ProgressCallback,
    Report,
)
from mosaic_opt.backends.enumerate import Enumerate
from mosaic_opt.problem import Problem

Change = Callable[[Problem, Report], Any]


@dataclasses.dataclass(frozen=True)
class Altered(Backend):
    """Reports another thing than the truth, made from it."""

    name: ClassVar[str] = "altered"
    provides: ClassVar[Capability] = Capability.EXACT
    state: ClassVar[Availability] = Availability.AVAILABLE
    change: Change

    @classmethod
    def availability(cls) -> Availability:
        return cls.state

    def search(
        self, problem: Problem, limits: Limits, *, progress: ProgressCallback | None = None
    ) -> Report:
        honest = Enumerate(workers=1).search(problem, limits, progress=progress)
        changed: Report = self.change(problem, honest)
        return changed


def altered(change: Change, **said: Any) -> Altered:
    """Return such a backend that says another thing of itself."""
    return type("Another", (Altered,), said)(change)


def same(report: Report, **changes: Any) -> Report:
    return dataclasses.replace(report, **changes)


def worst(problem: Problem, report: Report) -> Report:
    last = max((o for o in report.outcomes if o.feasible), key=lambda o: o.loss)
    return same(report, incumbent=last, dual_bound=last.loss)


def hides_the_best(problem: Problem, report: Report) -> Report:
    """Says that the best candidate has no layout that fits, so that its own numbers add up."""
    best = report.incumbent
    reason = dataclasses.replace(best, row=-1, loss=nan, reason="memory", detail="none fits")
    others = tuple(reason if o is best or o.index == best.index else o for o in report.outcomes)
    second = min((o for o in others if o.feasible), key=lambda o: (o.loss, o.index))
    return same(report, incumbent=second, outcomes=others, dual_bound=second.loss)


def flatters(problem: Problem, report: Report) -> Report:
    """Says that its optimum has a loss below the true one."""
    best = dataclasses.replace(report.incumbent, loss=0.9 * report.incumbent.loss)
    others = tuple(best if o.index == best.index else o for o in report.outcomes)
    return same(report, incumbent=best, outcomes=others, dual_bound=best.loss)


def high_bound(problem: Problem, report: Report) -> Report:
    return same(
        report,
        incumbent=None,
        outcomes=(),
        unexamined=tuple(range(len(problem.architectures))),
        dual_bound=report.dual_bound * (1.0 + 1e-6),
    )


def nothing_fits(problem: Problem, report: Report) -> Report:
    nothing = tuple(
        dataclasses.replace(o, row=-1, loss=nan, reason="memory", detail="none fits")
        for o in report.outcomes
    )
    return same(report, incumbent=None, outcomes=nothing, dual_bound=inf)


def another_layout(problem: Problem, report: Report) -> Report:
    """Names the right candidate with its second-best layout, priced honestly."""
    best = report.incumbent
    priced = problem.priced(best.index)
    cap = problem.envelope.memory_cap_bytes
    fits = [
        (priced.step_s[at], at)
        for at in range(len(priced.rows))
        if priced.memory_bytes[at] <= cap and priced.rows[at] != best.row
    ]
    second = problem.outcome(best.index, priced, min(fits)[1])
    assert second.step_s > best.step_s
    others = tuple(second if o.index == best.index else o for o in report.outcomes)
    return same(report, incumbent=second, outcomes=others, dual_bound=second.loss)


def loses_pairs(problem: Problem, report: Report) -> Report:
    return same(report, outcomes=report.outcomes[:-1])


LIES: dict[str, tuple[Change, Capability, set[str]]] = {
    "worst": (worst, Capability.EXACT, {"checks", "point", "bound"}),
    "hides the best": (hides_the_best, Capability.EXACT, {"point", "bound"}),
    "flatters": (flatters, Capability.EXACT, {"checks", "point"}),
    "bound above the optimum": (high_bound, Capability.BOUND, {"bound"}),
    "bound is no number": (
        lambda problem, report: same(high_bound(problem, report), dual_bound=nan),
        Capability.BOUND,
        {"bound", "checks"},
    ),
    "nothing fits": (nothing_fits, Capability.EXACT, {"point", "bound"}),
    "another layout": (another_layout, Capability.EXACT, {"point", "bound", "checks"}),
    "loses pairs": (loses_pairs, Capability.INCUMBENT, {"checks"}),
}
