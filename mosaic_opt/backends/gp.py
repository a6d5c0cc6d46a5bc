"""Convex relaxation as a geometric program, through any conic solver that cvxpy finds.

Variables are logarithms, so the program is convex as written: a sum of exponentials under linear
rows (:mod:`mosaic_opt.relaxation`). What a solver says is a proposal: a point and multipliers, from
which the bound is evaluated again without it. cvxpy is imported where it is used.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from math import inf
from typing import Any, ClassVar, Literal, NamedTuple, final

import numpy as np

from mosaic_opt.backends.base import (
    Availability,
    Backend,
    Capability,
    Limits,
    ProgressCallback,
    Report,
    Termination,
    dual_bound,
)
from mosaic_opt.envelope import Envelope
from mosaic_opt.errors import MosaicError
from mosaic_opt.problem import Problem
from mosaic_opt.relaxation import (
    Array,
    Points,
    Program,
    Terms,
    certified_bound,
    compute_row,
    hull_bound,
    points_of,
    program_of,
    terms_of,
    without_opposites,
)
from mosaic_opt.relaxation_result import Relaxation, RelaxationStatus, SolverRun
from mosaic_opt.relaxation_steps import Steps, best_steps, floor_steps, steps_of_mfu
from mosaic_opt.relaxation_summary import (
    Answer,
    agreements,
    best_bound,
    binding,
    gap_split,
    relaxed_point,
    run_of,
    useful_shares,
    weights_of,
)
from mosaic_opt.sensitivity import elasticities

# What a solver leaves open, the checked bound loses.
_OPTIONS: dict[str, dict[str, Any]] = {
    "CLARABEL": {"tol_gap_abs": 1e-12, "tol_gap_rel": 1e-12, "tol_feas": 1e-12},
    "SCS": {"eps_abs": 1e-9, "eps_rel": 1e-9, "max_iters": 50_000},
}
_HULL_OPTIONS: dict[str, dict[str, Any]] = {
    # many weights that are nearly 0: the program above is better conditioned
    **_OPTIONS,
    "CLARABEL": {"tol_gap_abs": 1e-10, "tol_gap_rel": 1e-10, "tol_feas": 1e-10},
}


_FIRST_POINTS, _MORE_POINTS, _ROUNDS = 40, 10, 30  # of the program over the convex hull
_CLOSE = 1e-8  # [nats/token] between its point and its bound


class _Tried(NamedTuple):
    """The monomial program, and what the solvers made of it."""

    program: Program
    answers: tuple[Answer, ...]
    runs: tuple[SolverRun, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GeometricProgram(Backend):
    """A lower bound from the convex relaxation; it finds no incumbent.

    Attributes
    ----------
    solver : str
        A conic solver with exponential cones, of those that ``cvxpy.installed_solvers()`` lists,
        in any case of letters.
    check : str, optional
        A second solver; the better of two checked bounds counts, and the result says whether their
        optima agree. None for no second one.
    mfu : {"exact", "bound"}
        Rest on the best layout of each candidate, or on the admissible bounds of blocks of layouts
        alone, without a layout that is priced.
    pieces : int
        Monomials whose least is the envelope of MFU*. Its inverse is the maximum of their inverses,
        which is a generalised posynomial, and not a posynomial unless there is one piece; it enters
        as one monomial constraint for each. Each further piece is the tightest at the relaxed point
        so far.
    workers : int, optional
        Threads of the lower level; all cores unless given.
    """

    name: ClassVar[str] = "gp"
    provides: ClassVar[Capability] = Capability.BOUND

    solver: str = "clarabel"
    check: str | None = "scs"
    mfu: Literal["exact", "bound"] = "exact"
    pieces: int = 1
    workers: int | None = None

    def __post_init__(self) -> None:
        """Check the options that need no solver."""
        if self.workers is not None and self.workers < 1:
            raise MosaicError(f"workers={self.workers} must be at least 1, or None for all cores.")
        if self.pieces < 1:
            raise MosaicError(f"pieces={self.pieces} must be at least 1.")
        if self.mfu not in ("exact", "bound"):
            raise MosaicError(f"mfu={self.mfu!r} must be exact or bound.")

    @classmethod
    def availability(cls) -> Availability:
        """Tell whether cvxpy is installed, without importing it."""
        return Availability.AVAILABLE if find_spec("cvxpy") else Availability.NOT_INSTALLED

    def search(
        self, problem: Problem, limits: Limits, *, progress: ProgressCallback | None = None
    ) -> Report:
        """Bound the loss of every candidate; all of them count as unexamined.

        Where the time ran out, or no solver gave a bound, it is that of the device's peak.

        Raises
        ------
        MosaicError
            No such solver is installed, or the loss is no posynomial.
        """
        self._require_solvers()
        terms_of(problem.envelope.law)
        start = time.monotonic()
        steps = self._steps(problem, limits, progress)
        everything = tuple(range(len(problem.architectures)))
        points = points_of(problem, steps.now)
        bound = dual_bound(problem, None, everything) if len(points.candidate) else inf
        in_time = limits.time_s is None or time.monotonic() - start < limits.time_s
        if len(points.candidate) and in_time:
            runs = self._try(problem, points).runs
            bound = max(bound, runs[best_bound(runs)].bound or -inf)
        return Report(
            incumbent=None,
            dual_bound=bound,
            termination=steps.termination,
            outcomes=(),
            unexamined=everything,
            discarded=(),
        )

    def relax(
        self,
        problem: Problem,
        *,
        mfu: Array | None = None,
        limits: Limits | None = None,
        progress: ProgressCallback | None = None,
    ) -> Relaxation:
        """Solve the relaxation and say what it means.

        Parameters
        ----------
        problem : Problem
        mfu : ndarray, optional
            Values that no layout of a candidate exceeds, shape (candidates,) [-]: MFU of
            ``6 N_act`` with N as the envelope counts it; 0 where there is no layout. In place of
            the backend's own.
        limits : Limits, optional
            For the lower level; what it does not reach has the device's peak.
        progress : callable, optional
            Called after each candidate of the lower level.

        Returns
        -------
        Relaxation
            A failed solver is a status with its words.

        Raises
        ------
        MosaicError
            No such solver is installed; a law that is no posynomial; MFU values that are none.
        """
        self._require_solvers()
        if mfu is not None:
            given = steps_of_mfu(problem, mfu)
            steps = Steps(given, given, given, len(given), Termination.EXHAUSTED)
            return self._relax(problem, steps, "given")
        steps = self._steps(problem, limits or Limits(), progress)
        whole = steps.done == len(problem.architectures)
        return self._relax(problem, steps, self.mfu if whole else "partial")

    def _require_solvers(self) -> None:
        for name in (self.solver, self.check):
            if name is not None:
                _installed(name)

    def _steps(self, problem: Problem, limits: Limits, progress: ProgressCallback | None) -> Steps:
        """Solve the lower level, or bound it."""
        if problem.envelope.critical_batch is not None:
            raise MosaicError(
                "critical_batch makes the loss no posynomial of the tokens, so there is no convex "
                "relaxation; leave it out for a bound."
            )
        find = floor_steps if self.mfu == "bound" else best_steps
        return find(problem, limits, self.workers, progress)

    def _relax(
        self, problem: Problem, steps: Steps, kind: Literal["exact", "partial", "bound", "given"]
    ) -> Relaxation:
        terms = terms_of(problem.envelope.law)
        points = points_of(problem, steps.now)
        blank: dict[str, Any] = {
            "name": problem.envelope.name,
            "mfu": kind,
            "candidates": len(problem.architectures),
            "points": len(points.candidate),
            "lower_bound": None,
            "primal": None,
            "point": None,
            "useful_share": (),
            "binding": (),
            "elasticities": (),
            "split": None,
            "solvers": (),
            "agreements": (),
        }
        if not len(points.candidate):
            return Relaxation(
                **blank
                | {
                    "status": RelaxationStatus.INFEASIBLE,
                    "words": "No candidate has both a layout and enough tokens, so there is "
                    "nothing to bound.",
                }
            )
        program, answers, runs = self._try(problem, points)
        place = best_bound(runs)
        lower, answer = runs[place].bound, answers[place]
        hull, hull_runs = self._hull(terms, points) if kind == "exact" else (None, ())
        blank |= {
            "solvers": (*runs, *hull_runs),
            "agreements": agreements((*runs, *hull_runs)),
            "useful_share": useful_shares(problem, points, program),
        }
        if lower is None:
            said = "; ".join(f"{r.solver}: {r.status}. {r.words}".rstrip(". ") for r in runs)
            return Relaxation(
                **blank
                | {
                    "status": RelaxationStatus.FAILED,
                    "words": f"No solver gave a point and multipliers to check ({said}).",
                }
            )
        x = np.clip(answer.x, program.lower, program.upper)
        primal = float(program.terms.values(x).sum())
        point = relaxed_point(problem, program, x, primal)
        weights = weights_of(program, answer.multipliers)
        measured = (steps.now, steps.more, steps.less) if kind == "exact" else None
        least = float(points.loss.min())
        return Relaxation(
            **blank
            | {
                "status": RelaxationStatus.BOUND,
                "words": f"No candidate has a loss below {lower:.6f} nats/token, of the model.",
                "lower_bound": lower,
                "primal": primal,
                "point": point,
                "binding": binding(weights),
                "elasticities": elasticities(problem, weights, point, measured),
                "split": None if hull is None else gap_split(least, max(hull, lower), lower),
            }
        )

    def _try(self, problem: Problem, points: Points) -> _Tried:
        """Solve the monomial program, with further pieces at the relaxed points."""
        program = program_of(problem, points)
        first = minimise(program, self.solver)
        for _ in range(self.pieces - 1):
            if not np.isfinite(first.x).all():
                break
            program = program.with_row("compute", *compute_row(problem, points, first.x))
            first = minimise(program, self.solver)
        answers = (first, *([] if self.check is None else [minimise(program, self.check)]))
        bounds = [certified_bound(program, a.x, a.multipliers) for a in answers]
        runs = (run_of("monomial", a, b) for a, b in zip(answers, bounds, strict=True))
        return _Tried(program, answers, tuple(runs))

    def _hull(self, terms: Terms, points: Points) -> tuple[float | None, tuple[SolverRun, ...]]:
        """Bound the loss over the convex hull of the candidates: the envelope without error."""
        names = [name for name in (self.solver, self.check) if name is not None]
        runs = [bound_over_hull(terms, points, name) for name in names]
        bound = max((r.bound for r in runs if r.bound is not None), default=None)
        return bound, tuple(runs)


def relax(envelope: Envelope, *, backend: GeometricProgram | None = None) -> Relaxation:
    """Return a lower bound of the loss of every candidate, and what the budgets are worth.

    Raises
    ------
    MosaicError
        cvxpy or the solver is not installed, or the law is no posynomial.
    """
    if not GeometricProgram.availability():
        raise MosaicError("The relaxation needs cvxpy, which is not installed.")
    return (backend or GeometricProgram()).relax(Problem(envelope))


# ---------------------------------------------------------------- solvers


def _cvxpy() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import cvxpy
    return cvxpy


def _installed(name: str) -> str:
    """Return a solver's name as cvxpy has it.

    Raises
    ------
    MosaicError
        It is not installed; the sentence lists those that are.
    """
    known = _cvxpy().installed_solvers()
    if name.upper() not in known:
        listed = ", ".join(sorted(k.lower() for k in known))
        raise MosaicError(f"There is no solver {name!r} here; cvxpy finds {listed}.")
    return name.upper()


def minimise(program: Program, solver: str) -> Answer:
    """Minimise a program; whatever a solver does, it ends in an answer.

    Raises
    ------
    MosaicError
        The solver is not installed.
    """
    cp, name = _cvxpy(), _installed(solver)
    centre = 0.5 * (program.lower + program.upper)
    moved = cp.Variable(4)
    rows = program.rows @ moved <= program.limits - program.rows @ centre
    logs = program.terms.logs + program.terms.powers @ centre
    objective = cp.Minimize(cp.sum(cp.exp(logs + program.terms.powers @ moved)))
    status, words, value = _ask(cp.Problem(objective, [rows]), name, _OPTIONS)
    multipliers = _vector(rows.dual_value, len(program.limits))
    return Answer(
        name,
        status,
        words,
        value,
        centre + _vector(moved.value, 4),
        without_opposites(program, multipliers),
    )


def bound_over_hull(terms: Terms, points: Points, solver: str) -> SolverRun:
    """Bound a posynomial over the convex hull of points by column generation.

    The program holds the points with the least loss and, round by round, those where the tangent at
    its optimum is lowest; the bound is checked against all of them in every round.

    Raises
    ------
    MosaicError
        The solver is not installed.
    """
    chosen = np.zeros(len(points.x), dtype=np.bool_)
    chosen[np.argsort(points.loss, kind="stable")[:_FIRST_POINTS]] = True
    best: SolverRun | None = None
    for _ in range(_ROUNDS):
        answer = minimise_over_hull(terms, points.x[chosen], solver)
        run = run_of("hull", answer, hull_bound(terms, points.x, answer.x))
        if best is None or (run.bound is not None and run.bound > (best.bound or -inf)):
            best = run
        if run.bound is None:
            break
        values = terms.values(answer.x)
        lowest = np.argsort(points.x @ (values @ terms.powers), kind="stable")[:_MORE_POINTS]
        if values.sum() - run.bound < _CLOSE or chosen[lowest].all():
            break
        chosen[lowest] = True
    assert best is not None
    return best


def minimise_over_hull(terms: Terms, points: Array, solver: str) -> Answer:
    """Minimise a posynomial over the convex hull of points (n, 4); as :func:`minimise`."""
    cp, name = _cvxpy(), _installed(solver)
    weights = cp.Variable(len(points), nonneg=True)
    centre = points.mean(axis=0)
    logs = terms.logs + terms.powers @ centre
    moved = ((points - centre) @ terms.powers.T).T @ weights
    objective = cp.Minimize(cp.sum(cp.exp(logs + moved)))
    asked = cp.Problem(objective, [cp.sum(weights) == 1.0])
    status, words, value = _ask(asked, name, _HULL_OPTIONS)
    share = np.maximum(_vector(weights.value, len(points)), 0.0)
    x = share @ points / share.sum() if share.sum() > 0.0 else np.full(4, np.nan)
    return Answer(name, status, words, value, x, np.empty(0))


def _ask(problem: Any, name: str, options: dict[str, dict[str, Any]]) -> tuple[str, str, float]:
    """Run a solver and return its status, its words where it failed, and its value."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            problem.solve(solver=name, **options.get(name, {}))
    except Exception as error:  # a solver may raise anything, and all of it is a status
        return "error", _one_line(f"{type(error).__name__}: {error}"), float("nan")
    status = str(problem.status)
    value = problem.value
    failed = status != "optimal"
    words = f"{name} ended with {status}" if failed else ""
    return status, words, float("nan") if value is None else float(value)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 300 else f"{line[:297]}..."


def _vector(value: Any, size: int) -> Array:
    if value is None:
        return np.full(size, np.nan)
    return np.asarray(value, dtype=np.float64).reshape(size)
