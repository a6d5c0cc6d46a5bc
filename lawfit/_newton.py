r"""The compiled descent of one start, for all of :mod:`lawfit._descent`; see there for the method.

A law is ``log L_r = log sum_t exp(sum_k z_trk x_i(t,k))``: of each term ``t`` only the parameters
``i(t, 0), i(t, 1), ...`` that move it are visited. Everything is in this one file, because numba
takes a cached kernel for stale by the file of the kernel alone.

Arrays are of one start: ``point, lower, upper`` of shape (parameters,), ``log_loss, weight`` of
shape (runs,). `Terms` is shared by all starts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numba import njit

from lawfit._posynomial import Posynomial
from lawfit._values import FloatArray

F = TypeVar("F", bound=Callable[..., Any])

_LONGEST = 3.0
"""Longest step of a parameter, of a logarithm or an exponent [-]."""

_FLAT = 1e-13
"""Smallest curvature, in scaled coordinates, that a step divides by."""

_ROUNDED = 4e-15
"""Rounding of ``log L``: an objective cannot tell points apart that differ by less."""

_STIFF = 1e12
"""Largest damping: where no step of it gains, none does."""

_SWEEPS = 30
"""Sweeps of Jacobi's method at most; it converges quadratically, in six or so."""


def _compiled(function: F) -> F:
    """Compile without the interpreter's lock, cached on disk where some place is writable."""
    try:
        compiled = njit(function, cache=True, nogil=True, error_model="numpy")
    except RuntimeError:  # numba: "cannot cache function: no locator available"
        compiled = njit(function, nogil=True, error_model="numpy")
    return cast("F", compiled)


class Terms(NamedTuple):
    """The form of a law as the kernel reads it.

    Attributes
    ----------
    z : ndarray of shape (runs, terms, widest)
        What a parameter adds to the logarithm of a term.
    own : ndarray of int, shape (terms, widest)
        Which parameter that is; the first is the term's prefactor.
    width : ndarray of int, shape (terms,)
        How many of them a term has.
    """

    z: FloatArray
    own: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    width: np.ndarray[tuple[int, ...], np.dtype[np.int64]]


def terms_of(form: Posynomial) -> Terms:
    """Return the form of a law as the kernel reads it."""
    width = np.array([len(own) for own in form.own], dtype=np.int64)
    own = np.zeros((form.terms, int(width.max())), dtype=np.int64)
    z = np.zeros((form.design.shape[1], form.terms, own.shape[1]))
    for t, mine in enumerate(form.own):
        own[t, : len(mine)] = mine
        z[:, t, : len(mine)] = form.design[t][:, mine]
    return Terms(z, own, width)


class Limits(NamedTuple):
    """When a descent stops: gradient, decrement, steps, and the objective that is enough."""

    gradient: float
    decrement: float
    steps: int
    enough: float


class Before(NamedTuple):
    """What comes before and after the objective asked for.

    The first half-width of Huber's function, its division from stage to stage, and the limits of
    each stage; the height of a term over its bound below which it is a trace.
    """

    wide: float
    shrink: float
    limits: Limits
    trace: float


@_compiled
def _log_loss(terms: Terms, run: int, point: FloatArray, shares: FloatArray) -> float:
    """Return ``log L`` of a run, and write the shares of its terms."""
    top = -np.inf
    for t in range(len(terms.width)):
        at = 0.0
        for k in range(terms.width[t]):
            at += terms.z[run, t, k] * point[terms.own[t, k]]
        shares[t] = at
        top = max(top, at)
    total = 0.0
    for t in range(len(terms.width)):
        shares[t] = np.exp(shares[t] - top)
        total += shares[t]
    for t in range(len(terms.width)):
        shares[t] /= total
    return float(top + np.log(total))


@_compiled
def value(
    terms: Terms, log_loss: FloatArray, weight: FloatArray, delta: float, point: FloatArray
) -> float:
    """Return the objective at a point."""
    shares = np.empty(len(terms.width))
    total = 0.0
    for r in range(len(log_loss)):
        if weight[r] > 0.0:
            size = abs(_log_loss(terms, r, point, shares) - log_loss[r])
            near = min(size, delta)
            total += weight[r] * near * (size - 0.5 * near)
    return total


@_compiled
def derivatives(
    terms: Terms,
    log_loss: FloatArray,
    weight: FloatArray,
    delta: float,
    rounding: float,
    point: FloatArray,
    hessian: FloatArray,
    vectors: FloatArray,
) -> float:
    """Return the objective; write the second derivative, gradient, diagonal, forces.

    The last three are rows of `vectors`, of shape (3, parameters); the diagonal is that of Gauss
    and Newton, and forces are sums over runs of the sizes of what the gradient is the sum of.
    """
    size = len(point)
    shares, slopes = np.empty(len(terms.width)), np.empty(size)
    hessian[:] = 0.0
    vectors[:] = 0.0
    total = 0.0
    for r in range(len(log_loss)):
        if weight[r] <= 0.0:
            continue
        residual = _log_loss(terms, r, point, shares) - log_loss[r]
        near = min(abs(residual), delta)
        total += weight[r] * near * (abs(residual) - 0.5 * near)
        slopes[:] = 0.0
        for t in range(len(terms.width)):
            for k in range(terms.width[t]):
                slopes[terms.own[t, k]] += shares[t] * terms.z[r, t, k]
        pull = weight[r] * min(max(residual, -delta), delta)
        soft = weight[r] * min(1.0, delta / max(abs(residual), 1e-300))
        bend = (weight[r] if abs(residual) <= delta else 0.0) - pull
        force = max(abs(pull), weight[r] * min(delta, rounding))
        for i in range(size):
            vectors[0, i] += pull * slopes[i]
            vectors[1, i] += soft * slopes[i] * slopes[i]
            vectors[2, i] += force * abs(slopes[i])
            along = bend * slopes[i]
            for k in range(i + 1):
                hessian[i, k] += along * slopes[k]
        for t in range(len(terms.width)):
            share = pull * shares[t]
            for i in range(terms.width[t]):
                along = share * terms.z[r, t, i]
                for k in range(i + 1):  # the parameters of a term are in rising order
                    hessian[terms.own[t, i], terms.own[t, k]] += along * terms.z[r, t, k]
    for i in range(size):
        for k in range(i):
            hessian[k, i] = hessian[i, k]
    return total


@_compiled
def _cholesky(matrix: FloatArray, extra: float, root: FloatArray) -> bool:
    """Write the lower root of ``matrix + extra I``; say whether it is safely positive."""
    size = len(matrix)
    for i in range(size):
        for k in range(i + 1):
            left = matrix[i, k] + (extra if i == k else 0.0)
            for m in range(k):
                left -= root[i, m] * root[k, m]
            if i == k:
                if not left > _FLAT:
                    return False
                root[i, i] = np.sqrt(left)
            else:
                root[i, k] = left / root[k, k]
    return True


@_compiled
def _solve(root: FloatArray, right: FloatArray, out: FloatArray) -> None:
    """Write the solution of ``root root' out = right``."""
    size = len(right)
    for i in range(size):
        left = right[i]
        for k in range(i):
            left -= root[i, k] * out[k]
        out[i] = left / root[i, i]
    for i in range(size - 1, -1, -1):
        left = out[i]
        for k in range(i + 1, size):
            left -= root[k, i] * out[k]
        out[i] = left / root[i, i]


@_compiled
def jacobi(matrix: FloatArray, vectors: FloatArray) -> None:
    """Turn a symmetric matrix to its diagonal, and write the vectors (columns).

    Cyclic rotations (Jacobi, J. reine angew. Math. 30:51, 1846; Golub and Van Loan, section 8.5).
    """
    size = len(matrix)
    vectors[:] = 0.0
    for i in range(size):
        vectors[i, i] = 1.0
    for _ in range(_SWEEPS):
        off, on = 0.0, 0.0
        for i in range(size):
            on += matrix[i, i] * matrix[i, i]
            for k in range(i):
                off += matrix[i, k] * matrix[i, k]
        if off <= 1e-30 * on:
            return
        for p in range(size - 1):
            for q in range(p + 1, size):
                if matrix[p, q] == 0.0:
                    continue
                ratio = (matrix[q, q] - matrix[p, p]) / (2.0 * matrix[p, q])
                sign = 1.0 if ratio >= 0.0 else -1.0
                tangent = sign / (abs(ratio) + np.sqrt(1.0 + ratio * ratio))
                cosine = 1.0 / np.sqrt(1.0 + tangent * tangent)
                sine = tangent * cosine
                for i in range(size):
                    a, b = matrix[i, p], matrix[i, q]
                    matrix[i, p], matrix[i, q] = cosine * a - sine * b, sine * a + cosine * b
                for i in range(size):
                    a, b = matrix[p, i], matrix[q, i]
                    matrix[p, i], matrix[q, i] = cosine * a - sine * b, sine * a + cosine * b
                for i in range(size):
                    a, b = vectors[i, p], vectors[i, q]
                    vectors[i, p], vectors[i, q] = cosine * a - sine * b, sine * a + cosine * b


@_compiled
def _newton_step(
    hessian: FloatArray, slope: FloatArray, damping: float, step: FloatArray
) -> tuple[float, float]:
    """Write a damped step; return the decrement and the gain that the quadratic model sees.

    A negative curvature counts by its size.
    """
    size = len(slope)
    root = np.empty((size, size))
    decrement, positive = 0.0, True
    for extra in (0.0, damping):
        positive = positive and _cholesky(hessian, extra, root)
        if positive:
            _solve(root, slope, step)
            if extra == 0.0:
                for i in range(size):
                    decrement += 0.5 * slope[i] * step[i]
    gain = 0.0
    if positive:
        for i in range(size):
            step[i] = -step[i]
            gain -= slope[i] * step[i]
        for i in range(size):
            for k in range(size):
                gain -= 0.5 * step[i] * hessian[i, k] * step[k]
        return decrement, gain
    vectors, matrix = root, np.empty((size, size))
    for i in range(size):
        step[i] = 0.0
        for k in range(size):
            matrix[i, k] = hessian[i, k]
    jacobi(matrix, vectors)
    decrement = 0.0
    for k in range(size):
        curvature = max(abs(matrix[k, k]), _FLAT)
        along = 0.0
        for i in range(size):
            along += vectors[i, k] * slope[i]
        kept = along / (curvature + damping)
        decrement += 0.5 * along * along / curvature
        gain += along * kept - 0.5 * kept * kept * curvature
        for i in range(size):
            step[i] -= vectors[i, k] * kept
    return decrement, gain


@_compiled
def along_terms(terms: Terms, point: FloatArray, step: FloatArray, out: FloatArray) -> None:
    """Write where a step leads that is straight in the terms and in their slopes.

    The coordinates are the terms ``A_i`` at the centre and ``A_i theta_f``, in which ``L`` is
    linear to first order, so that terms which trade off do so along a straight line. A term
    loses at most nine tenths of itself.
    """
    count = len(terms.width)
    before, after = np.zeros(len(point)), np.zeros(len(point))
    top = -np.inf
    for t in range(count):
        top = max(top, point[t])
    for t in range(count):
        left = max(1.0 + step[t], 0.1)
        out[t] = point[t] + np.log(left)
        size = np.exp(point[t] - top)
        for k in range(1, terms.width[t]):
            before[terms.own[t, k]] += size
            after[terms.own[t, k]] += size * left
    for i in range(count, len(point)):
        ratio = after[i] / before[i] if before[i] > 0.0 else 1.0
        out[i] = point[i] + step[i] / ratio


@_compiled
def _scaled(
    hessian: FloatArray,
    vectors: FloatArray,
    point: FloatArray,
    lower: FloatArray,
    upper: FloatArray,
    slope: FloatArray,
    scale: FloatArray,
) -> float:
    """Scale gradient and second derivative, and hold what is pushed against a bound.

    Returns the relative projected gradient.
    """
    size = len(point)
    gradient = 0.0
    held = np.zeros(size, dtype=np.bool_)
    for i in range(size):
        pushed = vectors[0, i]
        scale[i] = np.sqrt(max(vectors[1, i], 1e-300))
        low, high = point[i] <= lower[i], point[i] >= upper[i]
        held[i] = (low and pushed >= 0.0) or (high and pushed <= 0.0)
        slope[i] = 0.0 if held[i] else pushed / scale[i]
        if not held[i]:
            gradient = max(gradient, abs(pushed) / max(vectors[2, i], 1e-300))
    for i in range(size):
        for k in range(size):
            if held[i] or held[k]:
                hessian[i, k] = 1.0 if i == k else 0.0
            else:
                hessian[i, k] /= scale[i] * scale[k]
    return gradient


@_compiled
def _newton(
    terms: Terms,
    log_loss: FloatArray,
    weight: FloatArray,
    delta: float,
    rounding: float,
    floor: float,
    lower: FloatArray,
    upper: FloatArray,
    point: FloatArray,
    limits: Limits,
) -> tuple[float, float, float]:
    """Move a point by damped Newton steps; return objective, gradient and decrement.

    Stops where the relative projected gradient and the decrement are at most their limits, where
    the objective is at most what is enough, after the most steps, or where no step gains.
    """
    size = len(point)
    hessian, vectors = np.empty((size, size)), np.empty((3, size))
    slope, step, scale = np.empty(size), np.empty(size), np.empty(size)
    tried = np.empty((2, size))
    here, damping, gradient, decrement = 0.0, 1e-2, np.inf, np.inf
    moved, total = True, 0.0
    for r in range(len(weight)):
        total += weight[r]
    for _ in range(limits.steps):
        if moved:
            here = derivatives(terms, log_loss, weight, delta, rounding, point, hessian, vectors)
            gradient = _scaled(hessian, vectors, point, lower, upper, slope, scale)
        left, hoped = _newton_step(hessian, slope, damping, step)
        decrement = left / (here + 0.5 * floor)
        done = gradient <= limits.gradient and decrement <= limits.decrement
        if done or here <= limits.enough:
            break
        for i in range(size):
            step[i] = min(max(step[i] / scale[i], -_LONGEST), _LONGEST)
            tried[0, i] = point[i] + step[i]
        along_terms(terms, point, step, tried[1])
        there, best = np.inf, 0
        for way in range(2):
            for i in range(size):
                tried[way, i] = min(max(tried[way, i], lower[i]), upper[i])
            other = value(terms, log_loss, weight, delta, tried[way])
            if other < there:
                there, best = other, way
        # Cauchy and Schwarz: of the sum of w |r|, what a rounding of every r moves the objective by
        moved = there <= here + _ROUNDED * np.sqrt(2.0 * here * total)
        factor = 5.0
        if there < here:
            gain = (here - there) / max(hoped, 1e-300)
            factor = min(max(1.0 - (2.0 * gain - 1.0) ** 3, 0.2), 2.0)
        elif damping >= _STIFF:
            break
        if moved:
            here = there
            for i in range(size):
                point[i] = tried[best, i]
        damping = min(max(damping * factor, 1e-15), _STIFF)
    return here, gradient, decrement


@_compiled
def descend_many(
    terms: Terms,
    log_loss: FloatArray,
    weight: FloatArray,
    delta: float,
    rounding: float,
    lower: FloatArray,
    upper: FloatArray,
    points: FloatArray,
    limits: Limits,
    before: Before,
    ends: FloatArray,
) -> None:
    """Move starts, shape (starts, parameters), to where they end.

    Targets, weights and bounds have a row for each start, or one for all. Objective, gradient and
    decrement go to `ends`, of shape (starts, 3). A start first descends objectives of a larger
    half-width; then its own; and then, with terms that fade held at their bound, once more,
    because a logarithm creeps there. It keeps its place where that does not end as low, or where
    the gradient would lift such a term again.
    """
    size, count = points.shape[1], len(terms.width)
    hessian, vectors = np.empty((size, size)), np.empty((3, size))
    at, low, high = np.empty(size), np.empty(size), np.empty(size)
    fading = np.zeros(count, dtype=np.bool_)
    for i in range(len(points)):
        target = log_loss[i if len(log_loss) > 1 else 0]
        share = weight[i if len(weight) > 1 else 0]
        for k in range(size):
            at[k] = points[i, k]
            low[k] = lower[i if len(lower) > 1 else 0, k]
            high[k] = upper[i if len(upper) > 1 else 0, k]
        floor = 0.0
        for r in range(len(share)):
            floor += share[r] * min(delta, rounding) * rounding
        width, last = max(before.wide, delta), False
        while True:
            own = width <= delta
            found = _newton(
                terms, target, share, delta if own else width, rounding, floor, low, high, at,
                limits if own else before.limits,
            )  # fmt: skip
            if not own:
                width = max(width / before.shrink, delta)
                continue
            if last and found[0] > ends[i, 0] * (1.0 + 1e-9) + floor:
                break
            derivatives(terms, target, share, delta, rounding, at, hessian, vectors)
            lifted, some = False, False
            for t in range(count):
                lifted = lifted or (last and fading[t] and vectors[0, t] < 0.0)
                near = low[t] < at[t] < low[t] + before.trace and low[t] < high[t]
                fading[t] = near and vectors[0, t] > 0.0
                some = some or fading[t]
            if lifted:
                break
            for k in range(size):
                points[i, k] = at[k]
            ends[i, 0], ends[i, 1], ends[i, 2] = found
            if last or not some or found[0] <= limits.enough:
                break
            for t in range(count):
                if fading[t]:
                    at[t] = high[t] = low[t]
            last = True
