"""The layout of every candidate by CP-SAT, posted from the declared rules.

The solver owns legality: degrees are variables over the domains of the plan space, and every rule
of :data:`perfmodel.rules.RULES` is posted from its declaration (:mod:`.posting`).

Step time and memory come from one table over the degrees that they depend on: all but dp, which
follows. Component tables would not be smaller: a step is a makespan, neither a sum nor a product of
its parts, what the exchange of gradients hides behind depends on the slowest stage, and the memory
is that of the heaviest. A row over the memory cap is not in the table; one that is illegal for a
candidate costs 0 s and 0 B there, so that only the posted rules keep the solver from it; the tests
rest on that.

Integers are rounded outward, in units of 2^-k of the largest entry (:class:`Scale`): times and
bytes down. So no plan that fits is lost, and the bound on time stays below every true time. Plans
that the rounding makes equal are told apart by their order in exact (time, row) in the low bits of
the objective; a plan that only the rounding lets under the memory cap is forbidden and the search
goes on. The answer is therefore the enumerator's, with no error left from rounding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from math import floor, inf, isfinite
from typing import ClassVar, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

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
    dual_bound,
)
from mosaic_opt.backends.cpsat.posting import Poster
from mosaic_opt.backends.cpsat.rounding import Scale
from mosaic_opt.backends.cpsat.running import run
from mosaic_opt.errors import MosaicError
from mosaic_opt.outcome import Outcome, Priced
from mosaic_opt.problem import Problem
from perfmodel.constraints import AtMost, Divides, OneOf
from perfmodel.rules import (
    DERIVED,
    LAYOUT_CODES,
    LAYOUT_VARIABLES,
    RULES,
    architecture_values,
    option_values,
    run_values,
)

OLDEST = (9, 11)
"""The first version of ortools that has what this needs."""

DEGREES = ("tp", "cp", "dp", "pp", "etp", "ep", "vpp", "micro_batch", "recompute", "layout")
TABLED = tuple(name for name in DEGREES if name != "dp")
"""The degrees that time and memory are tabled by."""

BITS = 52
"""Bits of the objective: what a double holds exactly, in which CP-SAT reports bounds."""


MEMORY_BITS = 40
"""Bits of memory, whose unit is then of the order of a byte."""


class LayoutAnswer(NamedTuple):
    """What the search of one candidate's layout found."""

    row: int | None  # of the problem's table; None without a layout that is legal and fits
    bound_s: float  # no layout that is legal and fits has a shorter step [s]; inf if there is none
    proved: bool
    time_scale: Scale
    memory_scale: Scale


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CpSat(Backend):
    """Search each candidate's layout with OR-Tools CP-SAT.

    Slower than enumeration on spaces that can be enumerated: it is there to disagree if one of
    the two is wrong.

    Attributes
    ----------
    workers : int
        Search threads of CP-SAT. The answer does not depend on their number.
    seed : int
        Of CP-SAT's random choices.
    """

    name: ClassVar[str] = "cpsat"
    provides: ClassVar[Capability] = Capability.EXACT
    workers: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the options."""
        if self.workers < 1:
            raise MosaicError(f"workers={self.workers} must be at least 1.")
        if not 0 <= self.seed < 2**31:
            raise MosaicError(f"seed={self.seed} must be from 0 to {2**31 - 1}.")

    @classmethod
    def availability(cls) -> Availability:
        """Read the installed version of ortools, without importing it."""
        try:
            parts = version("ortools").split(".")
        except PackageNotFoundError:
            return Availability.NOT_INSTALLED
        new = tuple(int(part) for part in parts[:2] if part.isdigit()) >= OLDEST
        return Availability.AVAILABLE if new else Availability.BAD_VERSION

    def search(
        self, problem: Problem, limits: Limits, *, progress: ProgressCallback | None = None
    ) -> Report:
        """Examine the candidates in order; a keyboard interrupt keeps what was done."""
        n = len(problem.architectures)
        deadline = None if limits.time_s is None else time.monotonic() + limits.time_s
        model = LayoutModel(problem)
        outcomes: list[Outcome] = []
        best: Outcome | None = None
        termination = Termination.EXHAUSTED
        left_bound: list[float] = []

        def tell(incumbent: Outcome | None) -> None:
            if progress is not None:  # of the candidates with a proof; a better layout moves it not
                bound = min(inf if best is None else best.loss, left_bound[len(outcomes)])
                progress(Progress(done=len(outcomes), of=n, incumbent=incumbent, bound=bound))

        def found(outcome: Outcome) -> None:
            if better(outcome, best):
                tell(outcome)

        try:
            if progress is not None:
                left_bound.extend(bounds_of_the_rest(problem))
            for index in range(n):
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0.0:
                    termination = Termination.TIME_LIMIT
                    break
                outcome = model.solve(index, self, left, found)
                if outcome is None:  # Ctrl-C would have been raised
                    limited = limits.time_s is not None  # else CP-SAT gave up by itself
                    termination = Termination.TIME_LIMIT if limited else Termination.INTERRUPTED
                    break
                outcomes.append(outcome)
                if better(outcome, best):
                    best = outcome
                tell(best)
        except KeyboardInterrupt:
            termination = Termination.INTERRUPTED
        unexamined = tuple(range(len(outcomes), n))
        if not unexamined:
            termination = Termination.EXHAUSTED
        return Report(
            incumbent=best,
            dual_bound=dual_bound(problem, best, unexamined),
            termination=termination,
            outcomes=tuple(outcomes),
            unexamined=unexamined,
            discarded=(),
        )


class LayoutModel:
    """The layouts of a problem as a CP-SAT model, one for each candidate."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    @cached_property
    def _tuples(self) -> NDArray[np.int64]:
        """The degrees of `TABLED` on each row of the problem's table, shape (rows, 9)."""
        columns = self.problem.table.columns
        return np.stack([columns[name] for name in TABLED], axis=1)

    @cached_property
    def _domains(self) -> dict[str, list[int]]:
        """Values of every variable, from the plan space alone."""
        plans, world = self.problem.envelope.plans, self.problem.envelope.cluster.n_devices
        found = {
            "dp": [d for d in range(1, world + 1) if world % d == 0],
            "recompute": [mode.code for mode in plans.recompute],
            "layout": [LAYOUT_CODES[kind] for kind in plans.layouts],
        }
        return {n: found.get(n) or plans.domain(n, world).tolist() for n in DEGREES}

    def constants(self, index: int) -> dict[str, int]:
        """Return the names that the rules read and a candidate fixes."""
        envelope = self.problem.envelope
        return {
            **architecture_values(self.problem.architectures[index].rule_variables()),
            **run_values(
                envelope.cluster.n_devices, envelope.batch.seq_len, envelope.batch.global_batch
            ),
            **option_values(envelope.plans),
        }

    def post_rules(self, poster: Poster) -> None:
        """Post every rule that concerns plans of a space, and the variables that follow."""
        explicit = {*LAYOUT_VARIABLES}  # a space has no explicit layouts
        rules = [r.constraint for r in RULES if not r.constraint.variables & explicit]
        known = {*poster.terms, *poster.constants}
        poster.require_all(c for c in rules if c.variables <= known)
        for name, quotient in DERIVED.items():
            if any(name in constraint.variables for constraint in rules):
                poster.derive(name, quotient)
        poster.require_all(c for c in rules if not c.variables <= known)
        if len(self._domains["layout"]) > 1:  # a balanced layout of equal stages is the equal one
            same = poster.truth(Divides(("pp", "vpp"), ("n_layers",)))
            balanced = poster.truth(OneOf("layout", (LAYOUT_CODES["balanced"],)))
            poster.forbid_together(same, balanced)
        if isfinite(self.problem.largest_ep):
            poster.require(AtMost(("ep",), (floor(self.problem.largest_ep),)))

    def poster(self, index: int) -> Poster:
        """Return the rules of a candidate, posted, without time and memory."""
        from ortools.sat.python.cp_model import CpModel

        poster = Poster(CpModel(), self._domains, self.constants(index))
        self.post_rules(poster)
        return poster

    def solve(
        self,
        index: int,
        options: CpSat,
        time_s: float | None,
        found: Callable[[Outcome], None] | None = None,
    ) -> Outcome | None:
        """Return the outcome of a candidate, or None if the time was up before its proof.

        ``found`` is called with the outcome of each better layout on the way.

        Raises
        ------
        KeyboardInterrupt
            Ctrl-C came, or ``found`` raised it.
        """
        priced = self.problem.priced(index)

        def on_row(row: int) -> None:
            if found is not None:
                found(self._outcome(index, priced, row))

        answer = self.answer(index, priced, options, time_s, on_row)
        return self._outcome(index, priced, answer.row) if answer.proved else None

    def _outcome(self, index: int, priced: Priced, row: int | None) -> Outcome:
        if row is None:
            return self.problem.outcome(index, priced, None)
        at = int(np.searchsorted(priced.rows, row))
        if at == len(priced.rows) or priced.rows[at] != row:
            plan = self.problem.table.plan(row)
            raise AssertionError(f"the posted rules let an illegal layout pass: {plan}")
        return self.problem.outcome(index, priced, at)

    def answer(
        self,
        index: int,
        priced: Priced,
        options: CpSat,
        time_s: float | None = None,
        on_row: Callable[[int], None] | None = None,
    ) -> LayoutAnswer:
        """Search one candidate's shortest step among the layouts that are legal and fit."""
        table, order, low, times, sizes = self._table(priced)
        if not len(table):
            return LayoutAnswer(None, inf, True, times, sizes)
        cap = self.problem.envelope.memory_cap_bytes
        poster = self.poster(index)
        model = poster.model
        score = model.new_int_var(0, int(table[:, -1].max()), "score")
        degrees = [poster.variable(name) for name in TABLED]
        model.add_allowed_assignments([*degrees, score], table.tolist())
        model.minimize(score)

        def row_of(number: int) -> int:
            return int(order[number & ((1 << low) - 1)])

        def fits(row: int) -> bool:
            at = int(np.searchsorted(priced.rows, row))
            return at == len(priced.rows) or priced.memory_bytes[at] <= cap

        def told(_: Mapping[str, int], number: int, __: int) -> None:
            if on_row is not None and fits(row_of(number)):
                on_row(row_of(number))

        deadline = None if time_s is None else time.monotonic() + time_s
        while True:
            left = None if deadline is None else deadline - time.monotonic()
            ran = run(
                model,
                {"score": score},
                workers=options.workers,
                seed=options.seed,
                time_s=left,
                on_solution=told,
                linear=False,
            )
            if ran.interrupted:
                raise KeyboardInterrupt
            if ran.values is None:
                return LayoutAnswer(None, inf if ran.proved else 0.0, ran.proved, times, sizes)
            row = row_of(ran.values["score"])
            if fits(row):
                bound = (ran.bound >> low) * times.unit
                return LayoutAnswer(row, bound, ran.proved, times, sizes)
            model.add(score != ran.values["score"])  # over the cap by less than a unit

    def _table(
        self, priced: Priced
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], int, Scale, Scale]:
        """Return the rows of (degrees, score) within the cap, how scores order them, the scales.

        A score has the whole units of time in its high bits and, in its ``low`` ones, the place in
        the order of exact (time, row).
        """
        rows = len(self.problem.table)
        step_s, memory = np.zeros(rows), np.zeros(rows)
        step_s[priced.rows], memory[priced.rows] = priced.step_s, priced.memory_bytes
        order = np.lexsort((np.arange(rows), step_s))
        low = max(1, (rows - 1).bit_length())
        cap = self.problem.envelope.memory_cap_bytes
        times = Scale.of(float(step_s.max(initial=0.0)), BITS - low)
        sizes = Scale.of(float(max(memory.max(initial=0.0), cap)), MEMORY_BITS)
        units = np.floor(step_s / times.unit).astype(np.int64)
        score = np.empty(rows, dtype=np.int64)
        score[order] = (units[order] << low) | np.arange(rows)
        within = np.floor(memory / sizes.unit) <= sizes.down(cap)
        return np.column_stack([self._tuples, score])[within], order, low, times, sizes
