"""Running a CP-SAT model: statuses, limits, interrupts, and what a callback raises."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
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

OnSolution = Callable[[Mapping[str, int], int, int], None]
"""Told the values of a new incumbent, its objective and the bound so far."""

OnBound = Callable[[int], None]
"""Told a bound that is higher than those before; ortools has the callback from 9.10 on."""

POLL_S = 0.1
"""How often the waiting thread looks for Ctrl-C where a wait cannot be interrupted [s]."""


class Ran(NamedTuple):
    """How a search ended."""

    values: dict[str, int] | None  # of the incumbent
    objective: int | None  # of the incumbent
    bound: int  # no solution has a lower objective; meaningless if infeasible
    proved: bool  # optimal, or infeasible where there are no values
    interrupted: bool  # Ctrl-C came, or a callback raised KeyboardInterrupt


def _solve(solver: CpSolver, model: CpModel, told: CpSolverSolutionCallback) -> tuple[Any, bool]:
    """Return the status of a model, and whether Ctrl-C was seen meanwhile.

    CP-SAT's own handler of SIGINT ends the search as a limit does and tells nobody, so it is
    turned off. The search runs in a thread of its own; the main thread, the only one that Python
    gives signals to, waits for it and stops it. From another thread there is nothing to see.
    """
    solver.parameters.catch_sigint_signal = False
    if threading.current_thread() is not threading.main_thread():
        return solver.solve(model, told), False
    ended: list[Any] = []
    failed: list[BaseException] = []
    done = threading.Event()

    def work() -> None:
        try:
            ended.append(solver.solve(model, told))
        except BaseException as error:  # raised again below
            failed.append(error)
        finally:
            done.set()

    interrupted = False
    threading.Thread(target=work, name="cp-sat", daemon=True).start()
    while True:
        try:
            while not done.is_set():
                if interrupted:
                    solver.stop_search()  # each time: before the search begins it does nothing
                done.wait(POLL_S)
            break
        except KeyboardInterrupt:
            interrupted = True
    if failed:
        raise failed[0]
    return ended[0], interrupted


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
    on_bound: OnBound | None = None,
) -> Ran:
    """Solve a model and return the incumbent.

    ``effort`` limits CP-SAT's own deterministic measure of work, so that the answer of a search
    that it ends is the same on every machine.

    ``linear`` asks for the bound of the linear relaxation, which one table has no use for.

    An interrupt (Ctrl-C, or a KeyboardInterrupt that a callback raises) ends the search as a limit
    does, and :attr:`Ran.interrupted` says so. Anything else that a callback raises stops the search
    and is raised here: an exception must not cross the solver's own frames. Callbacks are called
    one at a time, from threads of the search.

    Raises
    ------
    MosaicError
        CP-SAT refuses the model: its status says so and no exception would.
    """
    from ortools.sat.python import cp_model

    raised: list[BaseException] = []
    one_at_a_time = threading.Lock()
    solver = cp_model.CpSolver()

    def guarded(tell: Callable[[], None], stop: Callable[[], None]) -> None:
        with one_at_a_time:
            if raised:
                return
            try:
                tell()
            except BaseException as error:  # raised again below
                raised.append(error)
                stop()

    class Told(cp_model.CpSolverSolutionCallback):  # type: ignore[misc, unused-ignore]
        def on_solution_callback(self) -> None:
            guarded(self.tell, self.stop_search)

        def tell(self) -> None:
            if on_solution is not None:
                values = {name: int(self.value(v)) for name, v in variables.items()}
                on_solution(values, round(self.objective_value), round(self.best_objective_bound))

    highest: list[int] = []

    def rises(bound: float) -> None:
        whole = round(bound)
        if on_bound is not None and (not highest or whole > highest[-1]):
            highest[:] = [whole]
            on_bound(whole)

    if on_bound is not None:
        solver.best_bound_callback = lambda bound: guarded(lambda: rises(bound), solver.stop_search)
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = seed
    if time_s is not None:
        solver.parameters.max_time_in_seconds = max(time_s, 1e-3)
    if effort is not None:
        solver.parameters.max_deterministic_time = effort
    if not linear:
        solver.parameters.linearization_level = 0
    status, interrupted = _solve(solver, model, Told())
    for error in raised:
        if not isinstance(error, KeyboardInterrupt):
            raise error
    if status == cp_model.MODEL_INVALID:
        raise MosaicError(f"CP-SAT refuses the model: {model.validate().strip()}.")
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return Ran(
        values={n: int(solver.value(v)) for n, v in variables.items()} if found else None,
        objective=round(solver.objective_value) if found else None,
        bound=round(solver.best_objective_bound),
        proved=status in (cp_model.OPTIMAL, cp_model.INFEASIBLE),
        interrupted=interrupted or bool(raised),
    )
