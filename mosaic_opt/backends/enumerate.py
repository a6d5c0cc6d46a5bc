"""Exhaustive search: every legal layout of every candidate, through the compiled kernel."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar, final

from mosaic_opt.backends.base import (
    Availability,
    Backend,
    Capability,
    Limits,
    Progress,
    ProgressCallback,
    Report,
    Termination,
    better,
    bounds_of_the_rest,
    check_workers,
    dual_bound,
    rank,
)
from mosaic_opt.outcome import Outcome
from mosaic_opt.problem import Problem
from perfmodel.threads import in_order


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Enumerate(Backend):
    """Price every pair; the reference of truth.

    Attributes
    ----------
    workers : int, optional
        Threads (the kernel holds no lock); all cores unless given. The answer does not depend
        on their number.
    """

    name: ClassVar[str] = "enumerate"
    provides: ClassVar[Capability] = Capability.EXACT

    workers: int | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        check_workers(self.workers)

    @classmethod
    def availability(cls) -> Availability:
        """Numba is a core dependency."""
        return Availability.AVAILABLE

    def search(
        self, problem: Problem, limits: Limits, *, progress: ProgressCallback | None = None
    ) -> Report:
        """Examine the candidates in order; a keyboard interrupt keeps what was done."""
        n = len(problem.architectures)
        outcomes: dict[int, Outcome] = {}
        termination = Termination.EXHAUSTED
        deadline = None if limits.time_s is None else time.monotonic() + limits.time_s
        results = in_order(problem.solve_candidate, range(n), self.workers)
        best: Outcome | None = None
        ahead = bounds_of_the_rest(problem) if progress is not None else []
        try:
            for outcome in results:
                outcomes[outcome.index] = outcome
                if better(outcome, best):
                    best = outcome
                if progress is not None:
                    done = len(outcomes)
                    bound = ahead[done] if best is None else min(best.loss, ahead[done])
                    progress(Progress(done=done, of=n, incumbent=best, bound=bound))
                if deadline is not None and time.monotonic() > deadline and len(outcomes) < n:
                    termination = Termination.TIME_LIMIT
                    break
        except KeyboardInterrupt:
            termination = Termination.INTERRUPTED
        finally:
            results.close()
        feasible = [outcome for outcome in outcomes.values() if outcome.feasible]
        best = min(feasible, key=rank, default=None)
        unexamined = tuple(i for i in range(n) if i not in outcomes)
        if not unexamined:
            termination = Termination.EXHAUSTED
        return Report(
            incumbent=best,
            dual_bound=dual_bound(problem, best, unexamined),
            termination=termination,
            outcomes=tuple(outcomes[i] for i in sorted(outcomes)),
            unexamined=unexamined,
            discarded=(),
        )
