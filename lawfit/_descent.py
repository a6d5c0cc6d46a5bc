"""The minimum of the sum objective of a fit, from many starts at once.

The objective is ``sum_r w_r h(log L(x_r) - log L_r)``, with Huber's ``h`` of half-width `delta`
(``q |r| - q^2 / 2`` with ``q = min(|r|, delta)``; Huber, Ann. Math. Statist. 35:73, 1964), or half
the square where `delta` is inf. It is a sum and not a mean, and nothing here stops on a small
change of it.

Each start takes damped Newton steps of its own (Levenberg, Q. Appl. Math. 2:164, 1944; Marquardt,
SIAM J. 11:431, 1963) with the exact second derivative, its eigenvalues replaced by their sizes,
in coordinates scaled by the weighted Gauss-Newton diagonal. A step is tried straight in the
parameters and straight in the terms and their slopes (`lawfit._newton.along_terms`), in which
ridges between terms are straight; the lower end counts. Parameters at a bound that the gradient
pushes against are held there (Bertsekas, SIAM J. Control 20:221, 1982). Where `delta` is small
the starts first descend objectives of a larger one.

A compiled kernel (:mod:`lawfit._newton`) moves a start, threads take batches of starts, and the
starts do not depend on each other. No BLAS or LAPACK is called, so its threads cannot slow a fit,
nor its version change one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lawfit._posynomial import Posynomial
from lawfit._values import FloatArray

if TYPE_CHECKING:
    from lawfit._newton import Before, Limits

GRADIENT = 1e-7
"""Largest relative projected gradient of a start that has converged; see `Found`."""

DECREMENT = 1e-9
"""Largest share of the objective that one more Newton step could take from it."""

MOST_STEPS = 2000
"""Steps of a start at the objective asked for."""

_WIDE, _SHRINK, _STEPS_BEFORE = 0.03, 3.0, 40
"""First half-width of a fit with a smaller one, its division from stage to stage, steps of each."""

_LOOSE = 1e-3
"""Gradient at which such a stage has done enough."""

_TRACE = 10.0
"""Height of the logarithm of a term over its bound, below which it is a trace."""

_ROUNDING = 1e-9
"""Residual below which cancellation in the gradient is rounding."""

_BATCH = 8
"""Starts that a thread takes at once."""


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
        from lawfit._newton import derivatives, terms_of  # numba takes a second to import

        terms, (number, size) = terms_of(self.form), points.shape
        hessian, vectors = np.empty((number, size, size)), np.empty((number, 3, size))
        for i, point in enumerate(points):
            one = self.at(slice(i, i + 1))
            derivatives(
                terms,
                one.log_loss[0],
                one.weight[0],
                self.delta,
                _ROUNDING,
                point,
                hessian[i],
                vectors[i],
            )
        gradient, diagonal, forces = vectors.swapaxes(0, 1)
        return Derivatives(gradient, hessian, diagonal, forces)


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
    enough: float = -1.0,
    warm: bool = False,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Found:
    """Descend from every start, shape (starts, parameters).

    Parameters
    ----------
    problem : Problem
        What to minimise.
    starts : ndarray of shape (starts, parameters)
        Where from; moved inside the bounds.
    enough : float
        Objective at which a start stops where it is, and counts as not converged.
    warm : bool
        No start descends objectives of a larger half-width first, as for starts near their
        optimum.
    workers : int or None
        Threads, or None for one each core; the ends do not depend on it.
    progress : callable, optional
        Called with the starts that have ended, and their number.
    """
    from lawfit._newton import Before, Limits

    limits = Limits(GRADIENT, DECREMENT, MOST_STEPS, float(enough))
    loose = Limits(_LOOSE, DECREMENT, _STEPS_BEFORE, -1.0)
    before = Before(0.0 if warm else _WIDE, _SHRINK, loose, _TRACE)
    return _run(problem, starts, limits, before, workers, progress)


def stationarity(problem: Problem, points: FloatArray) -> Found:
    """Return of points where they are whether they count as converged by the rules of `descend`."""
    from lawfit._newton import Before, Limits

    # these limits are met at once, and nothing is a trace of a term
    limits = Limits(np.inf, np.inf, 1, -1.0)
    return _run(problem, points, limits, Before(0.0, _SHRINK, limits, 0.0), None, None)


def _run(
    problem: Problem,
    starts: FloatArray,
    limits: Limits,
    before: Before,
    workers: int | None,
    progress: Callable[[int, int], None] | None,
) -> Found:
    """Run the kernel on every start, batches of them in threads."""
    from lawfit._newton import descend_many, terms_of  # numba takes a second to import

    points = np.ascontiguousarray(np.clip(starts, problem.lower, problem.upper), dtype=np.float64)
    ends = np.full((len(points), 3), np.inf)
    terms = terms_of(problem.form)

    def some(part: slice) -> int:
        own = problem.at(part)
        descend_many(
            terms,
            own.log_loss,
            own.weight,
            own.delta,
            _ROUNDING,
            own.lower,
            own.upper,
            points[part],
            limits,
            before,
            ends[part],
        )
        return int(part.stop)

    parts = [slice(i, min(i + _BATCH, len(points))) for i in range(0, len(points), _BATCH)]
    pool = ThreadPoolExecutor(workers or os.cpu_count() or 1, thread_name_prefix="lawfit")
    try:
        for done in pool.map(some, parts):
            if progress is not None:
                progress(done, len(points))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    value, gradient, decrement = ends.T.copy()
    return Found(points, value, gradient, (gradient <= GRADIENT) & (decrement <= DECREMENT))
