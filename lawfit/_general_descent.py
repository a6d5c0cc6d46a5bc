"""The minimum of the sum objective of a fit of any law, from many starts.

The objective and what counts as converged are those of :mod:`lawfit._descent`; but here a law is
only a function of its coefficients (:mod:`lawfit._curve`).

Coefficients above 0 move in their logarithms, others as they are. A start first takes damped
Gauss-Newton steps (Levenberg, Q. Appl. Math. 2:164, 1944; Marquardt, SIAM J. 11:431, 1963), with
the residuals weighted so that half their squares bound Huber's function from above; then damped
Newton steps, the second derivatives of the law from differences of its first, and eigenvalues
replaced by their sizes. Where `delta` is below the residuals it is lowered to that in stages.
At last Newton steps go on for as long as they shrink the gradient: an objective is flat at its
minimum, and says nothing of the last half of the digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from lawfit._curve import BoolArray, Curve
from lawfit._descent import DECREMENT, GRADIENT, Found
from lawfit._values import FloatArray

_LONGEST = 3.0
"""Longest step of a logarithm [-]."""

_GAUSS, _NEWTON, _POLISH, _STEPS_BEFORE = 400, 200, 20, 20
"""Most steps of each kind, the last of those at a half-width on the way."""

_HOPE = 1.5
"""Objective over the least after the Gauss-Newton steps, above which a start is left there."""

_CLOSE = 1e-4
"""Share of the objective that a step could take, from which Newton's method takes over."""

_SHRINK = 3.0
"""Division of a half-width from stage to stage."""

_ROUNDING = 1e-9
"""Residual below which cancellation in the gradient is rounding, over the size of the data."""

_TRACE = 0.02
"""Influence on the curve below which a coefficient that may be 0 is tried at 0."""

_AHEAD, _BEND = 0.1, 0.75
"""Share of a step over which its bend is measured, and most of it that the bend may add."""

_RANK = 1e-10
"""Singular value over the largest, below which a direction is not scaled to its own curvature."""

_NONE = 1e-14
"""The same, below which nothing moves in it: the direction of a coefficient that is held."""

_LEAST = 1e-140
"""Scale below which a coordinate has no influence that a float could square."""

_NUMBERS = 30_000
"""Slopes of the starts that descend together."""


class Task(NamedTuple):
    """What is minimised.

    Attributes
    ----------
    curve : Curve
        The law on the runs.
    target, weight : ndarray of shape (runs,)
        What the curve should be, and the weights.
    lower, upper : ndarray of shape (coefficients,)
        Bounds.
    delta : ndarray of shape (1,) or (starts,)
        Half-width of Huber's function, or inf.
    logged : ndarray of bool, shape (coefficients,) or (starts, coefficients)
        Which coefficients move in their logarithms.
    """

    curve: Curve
    target: FloatArray
    weight: FloatArray
    lower: FloatArray
    upper: FloatArray
    delta: FloatArray
    logged: BoolArray

    @classmethod
    def of(
        cls,
        curve: Curve,
        loss: FloatArray,
        weight: FloatArray,
        bounds: tuple[FloatArray, FloatArray],
        delta: float,
    ) -> Task:
        """Return the task of a curve on losses, no coefficient in its logarithm."""
        target = np.log(loss) if curve.logs else loss
        none = np.zeros(len(curve.names), dtype=bool)
        return cls(curve, target, weight, *bounds, np.array([delta]), none)

    def at(self, starts: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Task:
        """Return the task of some of the starts."""
        return self._replace(
            delta=self.delta if len(self.delta) == 1 else self.delta[starts],
            logged=self.logged if self.logged.ndim == 1 else self.logged[starts],
        )

    @property
    def rounding(self) -> FloatArray:
        """The objective of runs that miss by rounding alone, shape (1,) or (starts,)."""
        least = self._least
        return np.asarray(self.weight.sum() * np.minimum(self.delta, least) * least)

    def value(self, points: FloatArray) -> FloatArray:
        """Return the objective, shape (points,); inf where the law has no value."""
        with np.errstate(all="ignore"):
            size = np.abs(self.curve.values(points) - self.target)
            near = np.minimum(size, self.delta[:, None])
            value = (self.weight * near * (size - 0.5 * near)).sum(axis=1)
        legal = np.isfinite(value)
        legal[legal] = self.curve.legal(points[legal])
        return np.where(legal, value, np.inf)

    def moved(self, points: FloatArray, steps: FloatArray) -> FloatArray:
        """Return where steps of the coordinates lead, inside the bounds."""
        short = np.where(self.logged, np.clip(steps, -_LONGEST, _LONGEST), 0.0)
        ends = np.where(self.logged, points * np.exp(short), points + steps)
        return np.asarray(np.clip(ends, self.lower, self.upper))

    def unit(self, points: FloatArray) -> FloatArray:
        """Return how far a coefficient goes with its coordinate."""
        return np.where(self.logged, points, 1.0)

    def derivatives(self, points: FloatArray, exact: bool) -> Slopes:
        """Return the derivatives in the coordinates.

        The second is Gauss and Newton's with residuals weighted, or the exact one.
        """
        delta = self.delta[:, None]
        residual = self.curve.values(points) - self.target
        slopes = self.curve.slopes(points) * self.unit(points)[:, None]
        pull = self.weight * np.clip(residual, -delta, delta)
        soft = self.weight * np.minimum(1.0, delta / np.maximum(np.abs(residual), 1e-300))
        gradient = np.einsum("sr,srp->sp", pull, slopes)
        bend = self._bend(points, slopes, pull, gradient) if exact else None
        floor = np.maximum(np.abs(pull), self.weight * np.minimum(delta, self._least))
        forces = np.einsum("sr,srp->sp", floor, np.abs(slopes))
        return Slopes(gradient, forces, residual, np.sqrt(soft), slopes, bend)

    def _bend(
        self, points: FloatArray, slopes: FloatArray, pull: FloatArray, gradient: FloatArray
    ) -> FloatArray:
        """Return ``sum_r pull_r`` times the second derivative of the curve in the coordinates."""
        unit = self.unit(points)
        size = points.shape[1]
        width = 1e-4 * self.curve.reach(points, slopes / unit[:, None])
        found = np.empty((len(points), size, size))
        for k in range(size):
            step = np.zeros_like(points)
            step[:, k] = width[:, k]
            above, below = (self.curve.slopes(points + sign * step) for sign in (1.0, -1.0))
            bent = np.einsum("sr,srp->sp", pull, above - below) / (2.0 * width[:, k, None])
            found[:, k] = bent * unit * unit[:, k, None]
        found = 0.5 * (found + found.swapaxes(1, 2))
        diagonal = np.arange(size)
        found[:, diagonal, diagonal] += np.where(self.logged, gradient, 0.0)
        return found

    @property
    def _least(self) -> float:
        return _ROUNDING * self.curve.size


class Slopes(NamedTuple):
    """Derivatives at points, in the coordinates.

    ``gradient`` and ``forces``, the sum over runs of the sizes of what it is the sum of, have
    shape (points, coordinates); ``residual`` and ``root``, of the weights with which half the
    squares bound the objective, (points, runs); ``slopes`` of the curve (points, runs,
    coordinates); ``bend``, what the second derivative of the law adds to that of the objective,
    where it was asked for, (points, coordinates, same).
    """

    gradient: FloatArray
    forces: FloatArray
    residual: FloatArray
    root: FloatArray
    slopes: FloatArray
    bend: FloatArray | None


class _Model(NamedTuple):
    """The objective near points, in scaled coordinates: what a step is taken from.

    ``across`` takes what a run adds to the curve to the directions of Gauss-Newton steps.
    """

    measure: FloatArray
    decrement: FloatArray
    scale: FloatArray
    sizes: FloatArray
    vectors: FloatArray
    along: FloatArray
    across: FloatArray

    def step(self, damping: FloatArray, along: FloatArray | None = None) -> FloatArray:
        share = (self.along if along is None else along) / (self.sizes + damping[:, None])
        return np.asarray(-np.einsum("spk,sk->sp", self.vectors, share) / self.scale)

    def hoped(self, damping: FloatArray) -> FloatArray:
        """Return the decrease that a step should bring."""
        kept = self.along * self.sizes / (self.sizes + damping[:, None])
        return np.asarray(((self.along - 0.5 * kept) * kept / self.sizes).sum(axis=1))


@np.errstate(all="ignore")
def descend_any(
    task: Task,
    starts: FloatArray,
    *,
    vanishing: BoolArray,
    progress: Callable[[int, int], None] | None = None,
) -> Found:
    """Descend from every start, shape (starts, coefficients).

    Parameters
    ----------
    task : Task
        With ``delta`` of shape (1,) and ``logged`` of shape (coefficients,).
    starts : ndarray
        Where the law has a value and accepts the coefficients.
    vanishing : ndarray of bool, shape (coefficients,)
        Coefficients that move in their logarithms and may be 0.
    progress : callable, optional
        Called with the starts that have ended, and their number.
    """
    points = np.clip(starts, task.lower, task.upper)
    logged = task.logged & (points > 0.0)
    task = task._replace(logged=logged, delta=np.repeat(task.delta, len(points)))
    arrived = np.zeros(len(points), dtype=bool)
    chunks = np.array_split(np.arange(len(points)), math.ceil(len(points) / _chunk(task)))
    for chunk in chunks:
        points[chunk], arrived[chunk] = _approach(task.at(chunk), points[chunk])
        if progress is not None:
            progress(int(chunk[-1]) + 1, len(points))
    if arrived.sum() < 2:  # too few to agree
        points = _by_ratio(task, starts, points)
    value = task.value(points)
    hopeful = value <= _HOPE * (value.min() + task.rounding)
    found = Found(points, value, np.ones(len(points)), np.zeros(len(points), dtype=bool))
    for chunk in chunks:
        rows = chunk[hopeful[chunk]]
        if rows.size:
            ended = _finish(task.at(rows), points[rows], vanishing)
            for whole, part in zip(found, ended, strict=True):
                whole[rows] = part
    return found


def _chunk(task: Task) -> int:
    """Return how many starts may descend together."""
    return int(np.clip(_NUMBERS / (task.curve.rows * len(task.curve.names)), 1, 100))


def _approach(task: Task, points: FloatArray) -> tuple[FloatArray, BoolArray]:
    """Take Gauss-Newton steps."""
    return _stage(task, points, exact=False, most=_GAUSS, share=_CLOSE)


def _by_ratio(task: Task, starts: FloatArray, points: FloatArray) -> FloatArray:
    """Approach again with all coefficients moving by ratio, and return the lower ends.

    Their signs then stay, and a valley that is bent for the coefficients may be straight for
    their logarithms.
    """
    logged = task.logged | ((starts != 0.0) & ~np.isfinite(task.lower) & ~np.isfinite(task.upper))
    if (logged == task.logged).all():
        return points
    again = task._replace(logged=logged)
    other, _ = _approach(again, np.clip(starts, task.lower, task.upper))
    lower = task.value(other) < task.value(points)
    return np.where(lower[:, None], other, points)


def _finish(task: Task, points: FloatArray, vanishing: BoolArray) -> Found:
    """Take Newton steps to the end, first with a half-width as large as the residuals."""
    spread = np.median(np.abs(task.curve.values(points) - task.target), axis=1)
    while (spread > task.delta).any():
        near = task._replace(delta=np.maximum(task.delta, spread))
        points, _ = _stage(near, points, exact=True, most=_STEPS_BEFORE, share=_CLOSE)
        spread = spread / _SHRINK
    points, _ = _stage(task, points, exact=True, most=_NEWTON, share=0.0)
    points = _without_traces(task, points, vanishing)
    return _polish(task._replace(logged=task.logged & (points > 0.0)), points)


def _without_traces(task: Task, points: FloatArray, vanishing: BoolArray) -> FloatArray:
    """Try coefficients that fade at 0, where a logarithm cannot get.

    The others descend on with those held there; the better end counts.
    """
    slopes = np.abs(task.curve.slopes(points) * points[:, None]).max(axis=1)
    fading = vanishing & task.logged & (slopes < _TRACE * task.curve.size) & (task.lower <= 0.0)
    rows = np.flatnonzero(fading.any(axis=1))
    if not rows.size:
        return points
    fading = fading[rows]
    part = task.at(rows)._replace(logged=task.logged[rows] & ~fading)
    trial = np.where(fading, 0.0, points[rows])
    before, there = part.value(points[rows]), part.value(trial)
    able = np.isfinite(there)
    rows, part, trial = rows[able], part.at(np.flatnonzero(able)), trial[able]
    trial, _ = _stage(part, trial, exact=True, most=_NEWTON, share=0.0)
    better = part.value(trial) <= before[able] * (1.0 + 1e-9) + part.rounding
    found = points.copy()
    found[rows[better]] = trial[better]
    return found


def _stage(
    task: Task, starts: FloatArray, *, exact: bool, most: int, share: float
) -> tuple[FloatArray, BoolArray]:
    """Take damped steps until one could gain no more than a share of the objective.

    A share of 0 asks for `GRADIENT` and `DECREMENT` instead. Returned is where the starts end, and
    whether they got that far.
    """
    points, value = starts.copy(), task.value(starts)
    damping = np.full(len(points), 1e-2)
    scale = np.zeros_like(points)
    arrived = np.zeros(len(points), dtype=bool)
    active = np.flatnonzero(np.isfinite(value))
    for _ in range(most):
        if not active.size:
            break
        here, part = points[active], task.at(active)
        found = part.derivatives(here, exact)
        model = _model(part, here, value[active], found, scale[active])
        scale[active] = model.scale
        if share > 0.0:
            stop = model.decrement <= share
        else:
            stop = (model.measure <= GRADIENT) & (model.decrement <= DECREMENT)
        arrived[active] = stop
        step = model.step(damping[active])
        if not exact:
            step += _bent(part, here, found, model, step, damping[active])
        trial = part.moved(here, step)
        there = part.value(trial)
        before = value[active]
        better = there <= before
        gain = (before - there) / np.maximum(model.hoped(damping[active]), 1e-300)
        points[active[better]], value[active[better]] = trial[better], there[better]
        eased = np.clip(1.0 - (2.0 * np.clip(gain, -9.0, 9.0) - 1.0) ** 3, 0.2, 2.0)
        damping[active] = np.clip(damping[active] * np.where(better, eased, 5.0), 1e-15, 1e12)
        active = active[~(stop | (~better & (damping[active] >= 1e12)))]
    return points, arrived


def _bent(
    task: Task,
    points: FloatArray,
    found: Slopes,
    model: _Model,
    step: FloatArray,
    damping: FloatArray,
) -> FloatArray:
    """Return what to add to a step so that it follows a bent valley, 0 where it bends too much.

    The geodesic acceleration of Transtrum and Sethna (arXiv 1201.5885): half the step that makes
    up for the second derivative of the curve along the first one.
    """
    curve = task.curve
    here = found.residual + task.target
    ahead, behind = (curve.values(task.moved(points, sign * _AHEAD * step)) for sign in (1.0, -1.0))
    bend = (ahead - 2.0 * here + behind) / _AHEAD**2
    along = np.einsum("srk,sr->sk", model.across, found.root * np.nan_to_num(bend))
    extra = 0.5 * model.step(damping, along)
    length, first = ((np.square(x * model.scale)).sum(axis=1) for x in (extra, step))
    small = np.isfinite(bend).all(axis=1) & (length <= (0.5 * _BEND) ** 2 * first)
    return np.where(small[:, None], extra, 0.0)


def _model(
    task: Task, points: FloatArray, value: FloatArray, found: Slopes, scale: FloatArray
) -> _Model:
    """Return the model of damped steps, scaled by the largest diagonal so far."""
    slope = found.gradient
    held = (points <= task.lower) & (slope >= 0.0) | (points >= task.upper) & (slope <= 0.0)
    held |= ~np.isfinite(slope)
    slope = np.where(held, 0.0, slope)
    measure = (np.abs(slope) / np.maximum(found.forces, 1e-300)).max(axis=1)
    root = np.where(held[:, None], 0.0, found.root[:, :, None] * found.slopes)
    now = np.sqrt(np.square(root).sum(axis=1))
    scale = np.maximum(now, scale)
    scale = np.where(scale > _LEAST, scale, 1.0)
    # by singular values, which lose half as many digits as the product of the slopes
    across, sizes, turned = np.linalg.svd(root / scale[:, None], full_matrices=False)
    vectors = np.where(held[:, :, None], 0.0, turned.swapaxes(1, 2))
    along = sizes * np.einsum("srk,sr->sk", across, found.root * found.residual)
    dead = sizes <= _NONE * np.maximum(sizes[:, :1], 1e-6)
    along = np.where(dead, 0.0, along)
    if found.bend is None:
        across, sizes = across * sizes[:, None], np.maximum(sizes**2, 1e-30)
    else:
        least = np.maximum(sizes, _RANK * np.maximum(sizes[:, :1], 1e-6))
        vectors, along = vectors / least[:, None], along / least
        across = across * (sizes / least)[:, None]
        inside = np.abs(found.residual) <= task.delta[:, None]
        hessian = np.einsum("srk,sr,srl->skl", across, inside, across)
        bend = np.where(held[:, :, None] | held[:, None], 0.0, found.bend)
        bend = np.nan_to_num(np.clip(bend / scale[:, :, None] / scale[:, None], -1e60, 1e60))
        hessian += np.einsum("spk,spq,sql->skl", vectors, bend, vectors)
        hessian += dead[:, :, None] * np.eye(points.shape[1])
        sizes, rotation = np.linalg.eigh(hessian)
        sizes = np.maximum(np.abs(sizes), 1e-12)
        vectors = np.einsum("spk,skl->spl", vectors, rotation)
        along = np.einsum("skl,sk->sl", rotation, along)
    decrement = (along * along / sizes).sum(axis=1) / (2.0 * value + task.rounding)
    return _Model(measure, decrement, scale, sizes, vectors, along, across)


def _polish(task: Task, points: FloatArray) -> Found:
    """Take Newton steps for as long as they shrink the gradient, and judge the ends."""
    points, value = points.copy(), task.value(points)
    scale = np.zeros_like(points)
    model = _model(task, points, value, task.derivatives(points, exact=True), scale)
    measure, decrement = model.measure.copy(), model.decrement.copy()
    active = np.flatnonzero(np.isfinite(value))
    for _ in range(_POLISH):
        if not active.size:
            break
        part, here = task.at(active), points[active]
        now = _model(part, here, value[active], part.derivatives(here, True), scale[active])
        trial = part.moved(here, now.step(np.zeros(len(here))))
        there = part.value(trial)
        ahead = _model(part, trial, there, part.derivatives(trial, True), scale[active])
        low = there <= value[active] * (1.0 + 1e-9) + 1e-6 * part.rounding
        better = low & (ahead.measure < now.measure)
        moved = active[better]
        points[moved], value[moved] = trial[better], there[better]
        measure[moved], decrement[moved] = ahead.measure[better], ahead.decrement[better]
        active = moved
    measure = np.where(np.isfinite(value), measure, np.inf)
    stationary = (measure <= GRADIENT) & (decrement <= DECREMENT)
    return Found(points, value, measure, stationary)
