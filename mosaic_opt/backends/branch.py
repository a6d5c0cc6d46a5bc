"""Best-first branch and bound: the enumerator's answer, with most layouts never priced.

Two levels. Bounds of the blocks of a candidate's layouts (:mod:`perfmodel.bounds`) bound its loss,
and candidates are taken in that order. Of the one at hand, only layouts in blocks that may still
matter are priced. What matters is set by the bar: the loss of the incumbent, and what the stated
MFU error can move it by. So every near-tie is priced, and not the optimum alone. Candidates are
examined in rounds of fixed sizes under one bar, so the answer and every count are the same with any
number of workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from math import inf
from typing import ClassVar, TypeVar, final

import numpy as np

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
    check_workers,
    rank,
)
from mosaic_opt.bounds import BlockBounds, Floats
from mosaic_opt.outcome import Discarded, Outcome
from mosaic_opt.problem import Problem
from perfmodel.threads import in_order

_AT_ONCE = 32
"""Candidates that are bounded in one call, and examined in one round at most."""

_KEPT = 4_000_000
"""Bounds of blocks that are kept; beyond, those of a candidate are computed again when it opens."""

_SHARED = 20_000
"""Layouts from which on a candidate's kernels take longer than what threads wait for each other."""

Item = TypeVar("Item")
Result = TypeVar("Result")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BranchAndBound(Backend):
    """Discard candidates and blocks of layouts by bounds, and price the rest.

    Attributes
    ----------
    workers : int, optional
        Threads (the kernels hold no lock); all cores unless given. The answer does not depend
        on their number.
    """

    name: ClassVar[str] = "branch"
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
        """Examine the candidates, the most promising first; an interrupt keeps what was done."""
        deadline = inf if limits.time_s is None else time.monotonic() + limits.time_s
        search = _Search(problem, self.workers, deadline, progress)
        termination = Termination.EXHAUSTED
        try:
            search.bound()
            search.branch()
        except KeyboardInterrupt:
            termination = Termination.INTERRUPTED
        except _TimeLimitError:
            termination = Termination.TIME_LIMIT
        return search.report(termination)


class _TimeLimitError(Exception):
    pass


class _Search:
    """What is known so far."""

    def __init__(
        self,
        problem: Problem,
        workers: int | None,
        deadline: float,
        progress: ProgressCallback | None,
    ) -> None:
        n = len(problem.architectures)
        self.problem = problem
        self.workers = workers if len(problem.table) >= _SHARED else 1
        self.deadline, self.progress = deadline, progress
        self.bounds = BlockBounds(problem)
        self.kept: dict[int, Floats] = {}
        self.least = np.zeros(n)  # bound of each candidate's step [s]
        self.optimistic = np.full(n, -inf)  # bound of its loss [nats/token]
        self.matters = np.full(n, -inf)  # the same, with what only the error of MFU keeps out
        self.outcomes: dict[int, Outcome] = {}
        self.discarded: dict[int, Discarded] = {}
        self.best: Outcome | None = None
        self.bar = inf

    def bound(self) -> None:
        """Bound every candidate."""
        everyone = np.arange(len(self.least))
        keep = len(everyone) * len(self.bounds.blocks.values) <= _KEPT
        chunks = [everyone[i : i + _AT_ONCE] for i in range(0, len(everyone), _AT_ONCE)]
        for chunk, floors in zip(chunks, self._each(self.bounds.floors, chunks), strict=True):
            self.least[chunk] = floors.min(axis=1, initial=inf)
            self.optimistic[chunk] = self.problem.losses(chunk, self.least[chunk])
            self.matters[chunk] = self.bounds.losses(chunk, self.least[chunk])
            if keep:
                self.kept.update(zip(chunk.tolist(), floors, strict=True))

    def branch(self) -> None:
        """Examine candidates until none is left that matters."""
        order = np.argsort(self.matters, kind="stable")
        sorted_matters = self.matters[order]
        # the least bound among the candidates from each place on
        ahead = np.minimum.accumulate(self.optimistic[order][::-1])[::-1]
        place, size = 0, 1
        while place < (last := int(np.searchsorted(sorted_matters, self.bar, side="right"))):
            batch = order[place : min(place + size, last)].tolist()
            for found in self._examined(batch):
                self._take(found)
                place += 1
                self._tell(place, float(ahead[place]) if place < len(ahead) else inf)
            self.bar = self.bounds.bar(self.best)
            size = min(2 * size, _AT_ONCE)
        while again := self._below_the_bar():
            for found in self._examined(again):
                self._take(found)
            self.bar = self.bounds.bar(self.best)

    def report(self, termination: Termination) -> Report:
        """Say what was found, and what was not; at any time, also in the middle of a round."""
        feasible = (outcome for outcome in self.outcomes.values() if outcome.feasible)
        self.best = min(feasible, key=rank, default=None)
        self.bar = self.bounds.bar(self.best)
        for index in self._below_the_bar():
            del self.discarded[index]
        unexamined = []
        for index in range(len(self.least)):
            if index in self.outcomes:
                self.discarded.pop(index, None)
                continue
            if index in self.discarded:
                continue
            if self.matters[index] > self.bar:
                bound_s = float(self.least[index])
                self.discarded[index] = self.problem.discarded_whole(index, bound_s)
            else:
                unexamined.append(index)
        primal = self.best.loss if self.best is not None else inf
        return Report(
            incumbent=self.best,
            dual_bound=min([primal, *map(self._bound_of, unexamined)]),
            termination=termination if unexamined else Termination.EXHAUSTED,
            outcomes=tuple(self.outcomes[i] for i in sorted(self.outcomes)),
            discarded=tuple(self.discarded[i] for i in sorted(self.discarded)),
            unexamined=tuple(unexamined),
        )

    def _examined(self, batch: list[int]) -> Generator[Outcome | Discarded, None, None]:
        """Price the layouts of candidates that may matter under the bar."""
        indices = np.array(batch, dtype=np.int64)
        if self.kept:
            floors = np.stack([self.kept[index] for index in batch])
        else:
            floors = self.bounds.floors(indices)
        cutoffs_s = self.bounds.cutoffs_s(indices, floors, self.bar).tolist()
        opened = zip(batch, floors, cutoffs_s, strict=True)
        return self._each(lambda candidate: self.bounds.examine(*candidate), opened)

    def _bound_of(self, index: int) -> float:
        """Return a bound of a candidate's loss, from its peak where there is no better one."""
        bound = float(self.optimistic[index])
        return bound if bound > -inf else self.problem.optimistic_loss(index)

    def _take(self, found: Outcome | Discarded) -> None:
        if isinstance(found, Discarded):
            self.discarded[found.index] = found
            return
        self.outcomes[found.index] = found
        self.discarded.pop(found.index, None)
        if better(found, self.best):
            self.best = found

    def _below_the_bar(self) -> list[int]:
        """List candidates that were discarded under a lower bar than there is now."""
        indices = np.array(sorted(self.discarded), dtype=np.int64)
        bounds_s = np.array([self.discarded[i].bound_s for i in indices])
        return [int(i) for i in indices[self.bounds.losses(indices, bounds_s) <= self.bar]]

    def _tell(self, examined: int, ahead: float) -> None:
        if self.progress is None:
            return
        n = len(self.least)
        settled = n if ahead > self.bar else examined
        primal = self.best.loss if self.best is not None else inf
        bound = min(primal, ahead)
        self.progress(Progress(done=settled, of=n, incumbent=self.best, bound=bound))

    def _each(
        self, work: Callable[[Item], Result], items: Iterable[Item]
    ) -> Generator[Result, None, None]:
        """Yield the results in the order of the items, until the time is over."""
        results = in_order(work, items, self.workers)
        try:
            for result in results:
                yield result
                if time.monotonic() > self.deadline:
                    raise _TimeLimitError
        finally:
            results.close()
