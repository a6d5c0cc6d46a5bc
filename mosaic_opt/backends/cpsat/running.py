"""Running a CP-SAT model: statuses, limits, and what a callback raises."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from mosaic_opt.errors import MosaicError

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import (
        CpModel,
        CpSolver,
        CpSolverSolutionCallback,
        IntVar,
    )

__all__ = ["Ran", "run"]

OnSolution = Callable[[int, int], None]
"""Told the objective of a new incumbent and the bound so far."""


class Ran(NamedTuple):
    """How a search ended."""

    values: dict[str, int] | None  # of the incumbent
    bound: int  # no solution has a lower objective; meaningless if infeasible
    proved: bool  # optimal, or infeasible where there are no values


def _solve(solver: CpSolver, model: CpModel, told: CpSolverSolutionCallback) -> Any:
    """Solve, and leave the handler of Ctrl-C as it was: CP-SAT leaves none, and the next one kills.

    Outside of the main thread no handler can be set, so the solver takes none there.
    """
    if threading.current_thread() is not threading.main_thread():
        solver.parameters.catch_sigint_signal = False
        return solver.solve(model, told)
    handler = signal.getsignal(signal.SIGINT)
    try:
        return solver.solve(model, told)
    finally:
        if handler is not None:
            signal.signal(signal.SIGINT, handler)


def run(
    model: CpModel,
    variables: dict[str, IntVar],
    *,
    workers: int,
    seed: int,
    time_s: float | None = None,
    effort: float | None = None,
    linear: bool = True,
    on_solution: OnSolution | None = None,
) -> Ran:
    """Solve a model and return the incumbent.

    ``effort`` limits CP-SAT's own deterministic measure of work, so that the answer of a search
    that it ends is the same on every machine.

    ``linear`` asks for the bound of the linear relaxation, which one table has no use for.

    An interrupt (Ctrl-C) ends the search as a time limit does. What ``on_solution`` raises stops
    the search and is raised here: an exception must not cross the solver's own frames.

    Raises
    ------
    MosaicError
        CP-SAT refuses the model: its status says so and no exception would.
    """
    from ortools.sat.python import cp_model

    raised: list[BaseException] = []

    class Told(cp_model.CpSolverSolutionCallback):  # type: ignore[misc, unused-ignore]
        def on_solution_callback(self) -> None:
            if on_solution is None or raised:
                return
            try:
                on_solution(round(self.objective_value), round(self.best_objective_bound))
            except BaseException as error:  # raised again below
                raised.append(error)
                self.stop_search()

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = seed
    if time_s is not None:
        solver.parameters.max_time_in_seconds = max(time_s, 1e-3)
    if effort is not None:
        solver.parameters.max_deterministic_time = effort
    if not linear:
        solver.parameters.linearization_level = 0
    status = _solve(solver, model, Told())
    if raised:
        raise raised[0]
    if status == cp_model.MODEL_INVALID:
        raise MosaicError(f"CP-SAT refuses the model: {model.validate().strip()}.")
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return Ran(
        values={n: int(solver.value(v)) for n, v in variables.items()} if found else None,
        bound=round(solver.best_objective_bound),
        proved=status in (cp_model.OPTIMAL, cp_model.INFEASIBLE),
    )
