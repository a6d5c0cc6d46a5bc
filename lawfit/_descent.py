"""The minimum of the sum objective of a fit, from many starts at once.

The objective is ``sum_r w_r h(log L(x_r) - log L_r)``, with Huber's ``h`` of half-width `delta`
(``q |r| - q^2 / 2`` with ``q = min(|r|, delta)``; Huber, Ann. Math. Statist. 35:73, 1964), or half
the square where `delta` is inf. It is a sum and not a mean, and nothing here stops on a small
change of it.

Each start takes damped Newton steps of its own (Levenberg, Q. Appl. Math. 2:164, 1944; Marquardt,
SIAM J. 11:431, 1963) with the exact second derivative, its eigenvalues replaced by their sizes,
in coordinates scaled by the weighted Gauss-Newton diagonal. A step is tried straight in the
parameters and straight in the terms and their slopes (`Posynomial.along_terms`), in which ridges
between terms are straight; the lower end counts. Parameters at a bound that the
gradient pushes against are held there (Bertsekas, SIAM J. Control 20:221, 1982). Where `delta` is
small the starts first descend objectives of a larger one.

All products are of small matrices or sums over runs: no call is one that a threaded BLAS would
split, so its threads neither help nor slow it, and the starts do not depend on each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from lawfit._posynomial import Posynomial
from lawfit._values import FloatArray

GRADIENT = 1e-7
"""Largest relative projected gradient of a start that has converged; see `Found`."""

DECREMENT = 1e-9
"""Largest share of the objective that one more Newton step could take from it."""

MOST_STEPS = 2000
"""Steps of a start at the objective asked for."""

_WIDE, _SHRINK, _STEPS_BEFORE = 0.03, 3.0, 40
"""First half-width of a fit with a smaller one, its division from stage to stage, steps of each."""

_LONGEST = 3.0
"""Longest step of a parameter, of a logarithm or an exponent [-]."""

_TRACE = 10.0
"""Height of the logarithm of a term over its bound, below which it is a trace."""

_ROUNDING = 1e-9
"""Residual below which cancellation in the gradient is rounding."""

_CHUNK = 4_000_000
"""Numbers in the largest array of a batch."""


class Problem(NamedTuple):
    """What is minimised.

    Attributes
    ----------
    form : Posynomial
        The law's parametrisation on the runs.
    log_loss, weight : ndarray of shape (1, runs) or (starts, runs)
        Of the runs; one row for all starts, or one for each.
    delta : float
        Half-width of Huber's function.
    lower, upper : ndarray of shape (1, parameters) or (starts, parameters)
        Bounds of the parameters.
    """

    form: Posynomial
    log_loss: FloatArray
    weight: FloatArray
    delta: float
    lower: FloatArray
    upper: FloatArray

    @classmethod
    def of(
        cls, form: Posynomial, log_loss: FloatArray, weight: FloatArray, delta: float
    ) -> Problem:
        """Return the problem of arrays of one axis or two, with the bounds of the form."""
        rows = np.atleast_2d(log_loss), np.atleast_2d(weight)
        return cls(form, *rows, delta, form.lower[None], form.upper[None])

    def at(self, starts: slice | np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Problem:
        """Return the problem of some of the starts."""
        names = ("log_loss", "weight", "lower", "upper")
        rows = {name: getattr(self, name) for name in names}
        return self._replace(
            **{name: row if len(row) == 1 else row[starts] for name, row in rows.items()}
        )

    @property
    def rounding(self) -> FloatArray:
        """The objective of runs that miss by rounding alone, shape (1,) or (starts,)."""
        return np.asarray(self.weight.sum(axis=1) * min(self.delta, _ROUNDING) * _ROUNDING)

    def value(self, points: FloatArray) -> FloatArray:
        """Return the objective, shape (points,)."""
        size = np.abs(self.form.log_loss(points) - self.log_loss)
        near = np.minimum(size, self.delta)
        return np.asarray((self.weight * near * (size - 0.5 * near)).sum(axis=1))

    def derivatives(self, points: FloatArray) -> Derivatives:
        """Return gradient, second derivative and scales."""
        log_loss, slopes, shares = self.form.slopes(points)
        residual = log_loss - self.log_loss
        size = np.abs(residual)
        pull = self.weight * np.clip(residual, -self.delta, self.delta)
        soft = self.weight * np.minimum(1.0, self.delta / np.maximum(size, 1e-300))
        inside = self.weight * (size <= self.delta)
        turned = slopes.swapaxes(1, 2)
        hessian = np.matmul(turned * (inside - pull)[:, None], slopes)
        hessian += self.form.bend(shares, pull)
        floor = np.maximum(np.abs(pull), self.weight * min(self.delta, _ROUNDING))
        return Derivatives(
            gradient=np.einsum("sr,srp->sp", pull, slopes),
            hessian=hessian,
            diagonal=np.einsum("sr,srp->sp", soft, slopes * slopes),
            forces=np.einsum("sr,srp->sp", floor, np.abs(slopes)),
        )


class Derivatives(NamedTuple):
    """Of the objective in the parameters; arrays of points.

    ``forces`` is the sum over runs of the sizes of what the gradient is the sum of.
    """

    gradient: FloatArray
    hessian: FloatArray
    diagonal: FloatArray
    forces: FloatArray


class Found(NamedTuple):
    """Where the starts ended.

    Attributes
    ----------
    points : ndarray of shape (starts, parameters)
        Ends.
    value : ndarray of shape (starts,)
        Objective there.
    gradient : ndarray of shape (starts,)
        Largest component of the projected gradient, each over the sum of the sizes of the runs'
        contributions to it [-]: 0 at a stationary point, 1 where all runs pull one way. It has no
        unit, and does not depend on the scale of objective or coefficients.
    converged : ndarray of bool, shape (starts,)
        `gradient` is at most `GRADIENT` and the Newton decrement at most `DECREMENT` of the
        objective.
    """

    points: FloatArray
    value: FloatArray
    gradient: FloatArray
    converged: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]


def descend(
    problem: Problem,
    starts: FloatArray,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Found:
    """Descend from every start, shape (starts, parameters)."""
    most = max(1, _CHUNK // (problem.log_loss.shape[1] * len(problem.form.names)))
    found: list[Found] = []
    for first in range(0, len(starts), most):
        part = slice(first, min(first + most, len(starts)))
        found.append(_descend(problem.at(part), starts[part]))
        if progress is not None:
            progress(part.stop, len(starts))
    return Found(*(np.concatenate(column) for column in zip(*found, strict=True)))


def _descend(problem: Problem, starts: FloatArray) -> Found:
    points = np.clip(starts, problem.lower, problem.upper)
    delta = _WIDE
    while delta > problem.delta:
        points = _stage(problem._replace(delta=delta), points, _STEPS_BEFORE, 1e-3).points
        delta /= _SHRINK
    found = _stage(problem, points, MOST_STEPS, GRADIENT)
    return _without_traces(problem, found)


def _without_traces(problem: Problem, found: Found) -> Found:
    """Take terms that fade to their bound at once: a logarithm creeps there.

    They are held at the bound while the rest descends. A start keeps its place where that does
    not end as low, or where the gradient would lift such a term again.
    """
    terms = problem.form.terms
    lower, upper = (
        np.broadcast_to(bound, found.points.shape) for bound in (problem.lower, problem.upper)
    )
    slope = problem.derivatives(found.points).gradient
    here, least = found.points[:, :terms], lower[:, :terms]
    fading = (here > least) & (here < least + _TRACE) & (slope[:, :terms] > 0.0)
    fading &= least < upper[:, :terms]
    moved = np.flatnonzero(fading.any(axis=1))
    if not moved.size:
        return found
    fading, least = fading[moved], least[moved]
    points, highest = found.points[moved], upper[moved]
    points[:, :terms] = np.where(fading, least, points[:, :terms])
    highest[:, :terms] = np.where(fading, least, highest[:, :terms])
    problem = problem.at(moved)
    ended = _stage(problem._replace(upper=highest), points, MOST_STEPS, GRADIENT)
    lifted = (problem.derivatives(ended.points).gradient[:, :terms] < 0.0) & fading
    better = ~lifted.any(axis=1)
    better &= ended.value <= found.value[moved] + 1e-9 * found.value[moved] + problem.rounding
    taken = moved[better]
    kept = Found(
        found.points.copy(), found.value.copy(), found.gradient.copy(), found.converged.copy()
    )
    kept.points[taken], kept.value[taken] = ended.points[better], ended.value[better]
    kept.gradient[taken], kept.converged[taken] = ended.gradient[better], ended.converged[better]
    return kept


def _stage(problem: Problem, starts: FloatArray, most: int, tolerance: float) -> Found:
    """Take damped Newton steps until the projected gradient of each start is small enough."""
    points, value = starts.copy(), problem.value(starts)
    whole = problem
    damping = np.full(len(points), 1e-2)
    gradient = np.full(len(points), np.inf)
    decrement = np.full(len(points), np.inf)
    active = np.arange(len(points))
    for _ in range(most):
        at, problem = points[active], whole.at(active)
        lower, upper = problem.lower, problem.upper
        found = problem.derivatives(at)
        slope, scale = found.gradient, np.sqrt(np.maximum(found.diagonal, 1e-300))
        held = ((at <= lower) & (slope >= 0.0)) | ((at >= upper) & (slope <= 0.0))
        slope = np.where(held, 0.0, slope)
        gradient[active] = (np.abs(slope) / np.maximum(found.forces, 1e-300)).max(axis=1)
        free = ~held
        hessian = found.hessian / (scale[:, :, None] * scale[:, None, :])
        hessian = np.where(free[:, :, None] & free[:, None, :], hessian, np.eye(at.shape[1]))
        sizes, vectors = np.linalg.eigh(hessian)
        sizes = np.maximum(np.abs(sizes), 1e-13)
        along = np.einsum("spk,sp->sk", vectors, slope / scale)
        # the decrease that the quadratic model still sees, as a share of the objective
        decrement[active] = (along * along / sizes).sum(axis=1) / (
            2.0 * value[active] + problem.rounding
        )
        step = -np.einsum("spk,sk->sp", vectors, along / (sizes + damping[active, None])) / scale
        step = np.clip(step, -_LONGEST, _LONGEST)
        trial = np.clip(at + step, lower, upper)
        there = problem.value(trial)
        bent = np.clip(problem.form.along_terms(at, step), lower, upper)
        other = problem.value(bent)
        trial = np.where((other < there)[:, None], bent, trial)
        there = np.minimum(there, other)
        before = value[active]
        better = there <= before * (1.0 + 1e-15)
        moved = active[better]
        stop = (gradient[active] <= tolerance) & (decrement[active] <= DECREMENT)
        points[moved], value[moved] = trial[better], there[better]
        kept = along * sizes / (sizes + damping[active, None])
        hoped = (along * kept / sizes - 0.5 * kept * kept / sizes).sum(axis=1)
        gain = (before - there) / np.maximum(hoped, 1e-300)
        factor = np.where(better, np.clip(1.0 - (2.0 * gain - 1.0) ** 3, 0.2, 2.0), 5.0)
        damping[active] = np.clip(damping[active] * factor, 1e-15, 1e12)
        active = active[~(stop | (~better & (damping[active] >= 1e12)))]
        if not active.size:
            break
    converged = (gradient <= tolerance) & (decrement <= DECREMENT)
    return Found(points, value, gradient, converged)
