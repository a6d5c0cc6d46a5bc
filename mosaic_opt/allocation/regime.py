"""The allocation law of Appendix D.3 at an envelope's optimum, and how far it holds."""

from __future__ import annotations

from math import log
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import ConfigDict

from lawfit import JointLaw
from lawfit.laws import kind_of
from mosaic_opt.allocation import kkt
from mosaic_opt.allocation.curves import Curve, Pieces, survey
from mosaic_opt.allocation.phases import window_optima
from mosaic_opt.allocation.variants import changed
from mosaic_opt.backends.base import ProgressCallback
from mosaic_opt.envelope import SECONDS_PER_DAY, Envelope, TokenRule
from mosaic_opt.errors import MosaicError
from mosaic_opt.problem import Problem
from mosaic_opt.solver import provenance
from perfmodel.frozen import Frozen
from perfmodel.plan import Plan

DECADES = 3.0
POINTS = 13


class _Finite(Frozen):
    model_config = ConfigDict(allow_inf_nan=False)


class SlopeFit(_Finite):
    """Slopes of log MFU* at the optimum, their standard errors, and what the fit leaves over.

    ``w_n`` and ``w_s`` are along log N_tot and log(1 - S), ``w_g`` is against log G. ``rms`` is of
    log MFU, over ``points`` candidates with the optimum's layout.
    """

    w_n: float
    w_s: float
    w_g: float
    w_n_error: float
    w_s_error: float
    w_g_error: float
    rms: float
    points: int
    bandwidth: float


class Triple(_Finite):
    """A number for each coordinate, or each equation of (28)."""

    n_total: float
    one_minus_s: float
    expert_split: float


class LawExponents(_Finite):
    """Exponents of (29) in N_tot, and nu of (30); the last is None without slopes."""

    p: float
    rho: float
    g: float
    nu: float | None


class PathPoint(_Finite):
    """A model, its tokens and its loss on a path."""

    n_total: float
    one_minus_s: float
    expert_split: float
    tokens: float
    loss: float


class PathRow(_Finite):
    """The exact optimum at one budget, beside the path's.

    ``predicted`` is None without a path, and where the path would leave 1 - S < 1. ``edges`` are
    sides of the grid that the exact optimum lies on, ``no_layout_beyond`` those of the candidates
    that have a layout. ``in_regime`` says whether it
    has the layout of the optimum, slack memory, and lies on no side of the grid.
    """

    budget_flop: float
    days: float
    architecture: str
    exact: PathPoint
    predicted: PathPoint | None
    same_layout: bool
    memory_binds: bool
    edges: tuple[str, ...]
    no_layout_beyond: tuple[str, ...]
    in_regime: bool


class RegimeEnd(_Finite):
    """Where the regime ends on one side, and what ends it."""

    days: float
    budget_flop: float
    cause: Literal["layout", "memory", "grid", "window"]
    detail: str


class AllocationLaw(_Finite):
    """The allocation law at an envelope's optimum.

    The token rule plays no part: Appendix D has none, so every number is without it.

    Attributes
    ----------
    name : str
        The envelope's.
    architecture : str
        The exact optimum at the envelope's window.
    plan : Plan
        Its layout, which defines the regime.
    days, budget_flop : float
        Window [day] and C_peak [FLOP].
    optimum : PathPoint
    inside : bool
        Whether the optimum is inside a regime: slack memory, no side of the grid.
    violated : tuple of str
        What it is not inside of.
    slopes : SlopeFit or None
        None where the candidates with its layout do not determine them.
    conditions : Triple or None
        Sign conditions of (28): all must be above 0.
    residuals : Triple or None
        What (28) misses by at the exact optimum, in shares of ``beta L_data``.
    exponents : LawExponents
    stationary_point : PathPoint or None
        Continuous optimum at the same budget, where there is one.
    no_path : str or None
        Why there is no stationary point, hence no path.
    regime_from, regime_to : RegimeEnd or None
        Ends of the regime along the exact optima; None where the optimum is not inside one.
    path : tuple of PathRow
        Three decades of budget, the envelope's in the middle: exact optima beside the path (30)
        from the stationary point, where there is one.
    loss_source : str
        What the losses rest on.
    provenance : dict
        Packs, law, versions, and the envelope.
    """

    schema_version: Literal[1] = 1
    name: str
    architecture: str
    plan: Plan
    days: float
    budget_flop: float
    optimum: PathPoint
    inside: bool
    violated: tuple[str, ...]
    slopes: SlopeFit | None
    conditions: Triple | None
    residuals: Triple | None
    exponents: LawExponents
    stationary_point: PathPoint | None
    no_path: str | None
    regime_from: RegimeEnd | None
    regime_to: RegimeEnd | None
    path: tuple[PathRow, ...]
    loss_source: str
    provenance: dict[str, Any]


class _Survey(NamedTuple):
    """Candidates with a layout, as curves and in the coordinates of the law."""

    problem: Problem
    law: JointLaw
    curves: tuple[Curve, ...]
    geometry: kkt.Geometry
    all_logs: np.ndarray[Any, np.dtype[np.float64]]  # of every candidate, those without one last
    flop_per_day: float


def allocation_law(
    envelope: Envelope,
    *,
    bandwidth: float = log(2.0),
    workers: int | None = None,
    progress: ProgressCallback | None = None,
) -> AllocationLaw:
    """Derive the allocation law at an envelope's optimum, and set it beside the exact optima.

    Parameters
    ----------
    envelope : Envelope
        With the joint law; its token rule plays no part.
    bandwidth : float
        Width of the neighbourhood that slopes are fitted in, in natural logarithms [-].
    workers : int, optional
        Threads; all cores unless given.
    progress : callable, optional
        Called after each candidate.

    Returns
    -------
    AllocationLaw

    Raises
    ------
    MosaicError
        Another law than the joint one, a critical batch, no feasible mixture of experts, or a
        bandwidth that is not above 0.
    """
    law = envelope.law
    if not isinstance(law, JointLaw):
        raise MosaicError(
            f"law {kind_of(law)!r} must be 'joint': Appendix D derives from its terms."
        )
    if envelope.critical_batch is not None:
        raise MosaicError(
            "critical_batch is not part of Appendix D, which knows tokens of one worth; leave it "
            "out for an allocation law."
        )
    if not 0.0 < bandwidth < 100.0:
        raise MosaicError(f"bandwidth={bandwidth:g} must be above 0 and below 100; nearest: 0.7.")
    s = _surveyed(envelope, law, workers, progress)
    budget = s.flop_per_day * envelope.window_days
    row, best = kkt.best_at_budget(law, s.geometry, budget)
    memory = _MemoryBinds(s)
    violated = _violated(s, memory, row)
    slopes = _slopes(s, memory, row, bandwidth)
    p, rho, g, nu = kkt.exponents(law, slopes or _FLAT)
    centre, no_path = _centre(law, slopes, best)
    ends = (None, None) if violated else _ends(s, memory, row, envelope.window_days)
    return AllocationLaw(
        name=envelope.name,
        architecture=s.problem.architectures[s.curves[row].candidate].name,
        plan=s.problem.table.plan(s.curves[row].row),
        days=envelope.window_days,
        budget_flop=budget,
        optimum=_path_point(law, best),
        inside=not violated,
        violated=violated,
        slopes=None if slopes is None else _slope_fit(slopes, bandwidth),
        conditions=None if slopes is None else _triple(kkt.conditions(law, slopes)),
        residuals=None if slopes is None else _triple(kkt.residuals(law, slopes, best)),
        exponents=LawExponents(p=p, rho=rho, g=g, nu=None if slopes is None else nu),
        stationary_point=None if centre is None else _path_point(law, centre),
        no_path=no_path,
        regime_from=ends[0],
        regime_to=ends[1],
        path=_path(s, memory, row, budget, slopes, centre),
        loss_source=law.basis,
        provenance=provenance(Problem(envelope), "enumerate"),
    )


_FLAT = kkt.Slopes(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0)


def _surveyed(
    envelope: Envelope,
    law: JointLaw,
    workers: int | None,
    progress: ProgressCallback | None,
) -> _Survey:
    problem = Problem(changed(envelope, tokens=TokenRule()))
    sparse = {i for i, a in enumerate(problem.architectures) if a.expert_split is not None}
    found = survey(problem, workers=workers, progress=progress)
    curves = tuple(c for c in found if c.candidate in sparse)
    if not curves:
        raise MosaicError(
            f"{envelope.name}: no mixture of experts among the candidates has a layout that is "
            "legal and fits, so there is no optimum to derive a law at."
        )
    have = [c.candidate for c in curves]
    order = [*have, *sorted(sparse - set(have))]
    n_total = np.array([problem.n_total(i) for i in order], dtype=np.float64)
    n_active = np.array([problem.n_active(i) for i in order], dtype=np.float64)
    split = np.array([problem.expert_split(i) for i in order])
    n = len(curves)
    per_day = envelope.cluster.peak_flops * envelope.cluster.n_devices * SECONDS_PER_DAY
    speed = np.array([c.tokens_per_day for c in curves])
    mfu = 6.0 * n_active[:n] * speed / per_day
    return _Survey(
        problem=problem,
        law=law,
        curves=curves,
        geometry=kkt.Geometry(n_total[:n], n_active[:n] / n_total[:n], split[:n], mfu),
        all_logs=np.log(np.column_stack([n_total, n_active / n_total, split])),
        flop_per_day=per_day,
    )


class _MemoryBinds:
    """Whether a candidate has a faster layout that is legal and does not fit; computed once."""

    def __init__(self, survey_: _Survey) -> None:
        self._survey, self._known = survey_, dict[int, bool]()

    def __call__(self, row: int) -> bool:
        if row not in self._known:
            problem, curve = self._survey.problem, self._survey.curves[row]
            rows = problem.legal_rows(curve.candidate)
            step_s, memory = problem.price(curve.candidate, rows)
            faster = (step_s < curve.step_s) & (memory > problem.envelope.memory_cap_bytes)
            if problem.envelope.extrapolation == "refuse":
                faster &= problem.table.ep[rows] <= problem.largest_all_to_all
            self._known[row] = bool(faster.any())
        return self._known[row]


def _violated(s: _Survey, memory: _MemoryBinds, row: int) -> tuple[str, ...]:
    """Name what a candidate is not inside of: memory, or sides of the grid."""
    grid, shrunk = _sides(s, row)
    found = [f"grid: {side}" for side in grid]
    if memory(row):
        found.append("memory: a faster layout does not fit")
    return (*found, *(f"memory or rules: no layout beyond {side}" for side in shrunk))


def _sides(s: _Survey, row: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Name the sides of the grid that a candidate lies on, and those of what has a layout."""
    grid = kkt.edges(s.all_logs, row)
    shrunk = [edge for edge in kkt.edges(s.geometry.logs, row) if edge not in grid]
    return tuple(map(_side, grid)), tuple(map(_side, shrunk))


def _side(edge: kkt.Edge) -> str:
    words = {"n_total": "N_tot", "one_minus_s": "1 - S", "expert_split": "G"}[edge.coordinate]
    return f"{words} does not vary" if edge.side == "fixed" else f"{edge.side} {words}"


def _slopes(s: _Survey, memory: _MemoryBinds, row: int, bandwidth: float) -> kkt.Slopes | None:
    """Fit the slopes on the candidates with the same layout, as slack in memory as the optimum."""
    logs = s.geometry.logs
    near = np.sum((logs - logs[row]) ** 2, axis=1) < (5.3 * bandwidth) ** 2
    same = [
        i
        for i in np.flatnonzero(near).tolist()
        if s.curves[i].row == s.curves[row].row and memory(i) == memory(row)
    ]
    members = kkt.Geometry(*(column[same] for column in s.geometry))
    return kkt.fit_slopes(members, same.index(row), bandwidth)


def _ends(
    s: _Survey, memory: _MemoryBinds, row: int, days: float
) -> tuple[RegimeEnd | None, RegimeEnd | None]:
    """Walk along the exact optima in both directions until something ends the regime."""
    pieces = window_optima(s.problem, s.curves)
    at = max(i for i, p in enumerate(pieces) if p.days_from <= days)
    down = _walk(s, memory, row, pieces[: at + 1][::-1], longer=False)
    return down, _walk(s, memory, row, pieces[at:], longer=True)


def _walk(
    s: _Survey, memory: _MemoryBinds, row: int, pieces: Pieces, *, longer: bool
) -> RegimeEnd | None:
    rows = {c.candidate: i for i, c in enumerate(s.curves)}
    days = 0.0
    for piece in pieces:
        other = rows[piece.candidate]
        begins = piece.days_from if longer else piece.days_to
        name = s.problem.architectures[piece.candidate].name
        if s.curves[other].row != s.curves[row].row:
            plan = s.problem.table.plan(s.curves[other].row)
            return _end(s, begins, "layout", f"{name} has its best layout at {plan}")
        violated = _violated(s, memory, other)
        if violated:
            cause: Literal["grid", "memory"] = "grid" if "grid" in violated[0] else "memory"
            return _end(s, begins, cause, f"{name}, {'; '.join(violated)}")
        days = piece.days_to if longer else piece.days_from
    return _end(s, days, "window", "no window beyond")


def _end(
    s: _Survey, days: float, cause: Literal["layout", "memory", "grid", "window"], detail: str
) -> RegimeEnd:
    return RegimeEnd(days=days, budget_flop=days * s.flop_per_day, cause=cause, detail=detail)


def _path(
    s: _Survey,
    memory: _MemoryBinds,
    anchor: int,
    budget: float,
    slopes: kkt.Slopes | None,
    centre: kkt.Point | None,
) -> tuple[PathRow, ...]:
    rows = []
    for shift in np.linspace(-0.5 * DECADES, 0.5 * DECADES, POINTS).tolist():
        c = budget * 10.0**shift
        row, exact = kkt.best_at_budget(s.law, s.geometry, c)
        predicted = None
        if slopes is not None and centre is not None:
            predicted = kkt.along(kkt.exponents(s.law, slopes), centre, c)
            if predicted.one_minus_s >= 1.0:
                predicted = None
        same = s.curves[row].row == s.curves[anchor].row
        grid, shrunk = _sides(s, row)
        rows.append(
            PathRow(
                budget_flop=c,
                days=c / s.flop_per_day,
                architecture=s.problem.architectures[s.curves[row].candidate].name,
                exact=_path_point(s.law, exact),
                predicted=None if predicted is None else _path_point(s.law, predicted),
                same_layout=same,
                memory_binds=memory(row),
                edges=grid,
                no_layout_beyond=shrunk,
                in_regime=same and not (memory(row) or grid or shrunk),
            )
        )
    return tuple(rows)


def _path_point(law: JointLaw, point: kkt.Point) -> PathPoint:
    n, r, split, tokens, _ = point
    loss = law.loss(n_total=n, n_active=n * r, tokens=tokens, expert_split=split)
    return PathPoint(n_total=n, one_minus_s=r, expert_split=split, tokens=tokens, loss=loss)


def _centre(
    law: JointLaw, slopes: kkt.Slopes | None, best: kkt.Point
) -> tuple[kkt.Point | None, str | None]:
    """Return the continuous optimum, or why there is none."""
    if slopes is None:
        return None, "the candidates with this layout do not determine the slopes"
    found = kkt.stationary_point(law, slopes, best)
    if found is None:
        signs = kkt.conditions(law, slopes)._asdict()
        wrong = [f"{name} {value:.3g}" for name, value in signs.items() if value <= 0.0]
        return None, f"sign conditions of (28) fail: {', '.join(wrong) or 'a term of the law is 0'}"
    if found.one_minus_s >= 1.0:
        return None, (
            f"(28) is met at 1 - S = {found.one_minus_s:.3g}, and no model activates more "
            "parameters than it has"
        )
    return found, None


def _slope_fit(slopes: kkt.Slopes, bandwidth: float) -> SlopeFit:
    kept = slopes._asdict()
    del kept["log_mfu"]
    return SlopeFit(**kept, bandwidth=bandwidth)


def _triple(values: kkt.Conditions) -> Triple:
    return Triple(**values._asdict())
