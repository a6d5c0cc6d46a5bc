"""Profile likelihood: how much worse a fit gets as one coefficient is held away from its value.

The other coefficients are fitted anew at each value, to convergence, so a ridge is followed and not
cut across. The statistic is a signed t, ``sign(x - x_hat) sqrt(2 (Q(x) - Q(x_hat)) s)``, with the
sum objective ``Q`` and the scale ``s`` of `lawfit._refit.AtOptimum.deviance_scale`; the interval
is where its size is at most that of Student's t with ``n - p`` degrees of freedom (Bates and
Watts, Nonlinear Regression Analysis, 1988, section 6.1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict

from lawfit._descent import descend
from lawfit._intervals import checked_level, student
from lawfit._refit import AtOptimum, BoolArray, at_optimum
from lawfit._values import FloatArray, LawError
from lawfit.result import FitResult
from lawfit.runs import Remark

__all__ = ["ProfileCurve", "profile", "profile_statistic"]

_REACH = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 15.0, 30.0)
"""Where a side is looked at first, in standard errors."""

_CLOSE = 1e-3
"""Difference of the statistic between the two points around an end, below which it is a line."""

_ROUNDS = 12
"""Rounds, at most, that close in on an end, each between the two nearest points."""

_MARGIN = 1.3
"""The curve goes on beyond the ends, by this factor of the interval."""

_FLAT = 0.99
"""Share of the last statistic on an open side at which its curve may end."""

_LOWER = 1e-3
"""Squared t by which a fit must be lower than the optimum to be named."""


class ProfileCurve(BaseModel):
    """The profile of one coefficient.

    Attributes
    ----------
    name : str
        The coefficient.
    estimate : float
        Of the fit, in the units of the law.
    values : tuple of float
        Where it was held, rising.
    statistic : tuple of float
        Signed t there [-]: a straight line where the coefficient acts as in a linear model.
    threshold : float
        Size of t at the ends of the interval.
    low, high : float or None
        Ends of the region around the estimate in which the statistic stays within the threshold;
        None where it does so up to the bound of the fit, so that the runs set no such end.
    level : float
        Nominal coverage [-].
    remarks : tuple of Remark
        ``open``: no end on a side. ``not_converged``: of values of the curve no fit converged, so
        that the statistic may be too large there. ``lower_elsewhere``: a lower objective than that
        of the fit.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    basis: ClassVar[str] = "FITTED"

    name: str
    estimate: float
    values: tuple[float, ...]
    statistic: tuple[float, ...]
    threshold: float
    low: float | None
    high: float | None
    level: float
    remarks: tuple[Remark, ...]


class _Ends(NamedTuple):
    """Fits with the coefficient held at some values, outwards on one side.

    ``size`` is that of t; with the points of the fits, and whether they converged.
    """

    size: FloatArray
    points: FloatArray
    converged: BoolArray

    def or_lower(self, other: _Ends) -> _Ends:
        """Return of each value the lower of two fits."""
        lower = other.size < self.size
        return _Ends(
            np.where(lower, other.size, self.size),
            np.where(lower[:, None], other.points, self.points),
            np.where(lower, other.converged, self.converged),
        )


class _Held:
    """Fits with one coefficient held; its logarithm, if it is a prefactor."""

    def __init__(self, found: FitResult, name: str) -> None:
        coefficient = found.coefficients.get(name)
        if coefficient is None:
            known = ", ".join(found.coefficients)
            raise LawError(f"name is {name!r}, but the coefficients are {known}.")
        if coefficient.fixed:
            raise LawError(f"name is {name!r}, but the fit held it fixed, so it has no profile.")
        centred = at_optimum(found)
        self.name = name
        self.at = centred.form.names.index(name)
        self.log = self.at < centred.form.terms
        self.fit: AtOptimum = at_optimum(found, [name]) if self.log else centred
        self.centre = float(self.fit.point[self.at])
        self.least = float(self.fit.problem.value(self.fit.point[None])[0])
        self.scale, self.freedom = centred.deviance_scale(), centred.freedom
        self.not_converged = 0
        self.lowest = 0.0

    def ends(self, values: FloatArray, starts: FloatArray) -> _Ends:
        """Fit with the coefficient at each value, from starts of shape (values, parameters)."""
        starts = starts.copy()
        starts[:, self.at] = values
        problem = self.fit.problem
        lower = np.repeat(problem.lower, len(values), axis=0)
        upper = np.repeat(problem.upper, len(values), axis=0)
        lower[:, self.at] = upper[:, self.at] = values
        found = descend(problem._replace(lower=lower, upper=upper), starts, warm=True)
        rise = 2.0 * (found.value - self.least) * self.scale
        self.lowest = min(self.lowest, float(rise.min()))
        return _Ends(np.sqrt(np.maximum(rise, 0.0)), found.points, found.converged)

    def from_optimum(self, values: FloatArray) -> _Ends:
        """Fit from the optimum and from where a first-order step of the others leads."""
        at = np.repeat(self.fit.point[None], len(values), axis=0)
        return self.ends(values, at).or_lower(self.ends(values, self._shifted(values)))

    def outwards(self, values: FloatArray) -> FloatArray:
        """Return the size of t at values that lead away from the optimum.

        All are fitted from the optimum, and then each from where its inner neighbour ended.
        """
        first = self.from_optimum(values)
        inner = np.concatenate([self.fit.point[None], first.points[:-1]])
        found = first.or_lower(self.ends(values, inner))
        self.not_converged += int((~found.converged).sum())
        return found.size

    def error(self) -> float:
        """Return a first guess of the standard error, from the curvature."""
        mine = self._slopes[:, self.at] - self._slopes[:, self._others] @ self._answers
        size = float(np.sqrt((mine * mine).sum() * self.fit.density() * self.scale))
        return min(1.0 / max(size, 1e-6), 3.0)

    def bound(self, side: float) -> float:
        """Return the bound of the fit on a side, -1 or 1."""
        problem = self.fit.problem
        return float((problem.lower if side < 0.0 else problem.upper)[0, self.at])

    def raw(self, value: float) -> float:
        """Return a value in the units of the law."""
        return float(np.exp(value)) if self.log else float(value)

    @cached_property
    def _slopes(self) -> FloatArray:
        """Weighted slopes of the runs."""
        return np.asarray(self.fit.slopes * np.sqrt(self.fit.problem.weight[0])[:, None])

    @cached_property
    def _others(self) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        """Which parameters may answer a move."""
        return np.flatnonzero(self.fit.free & (np.arange(len(self.fit.point)) != self.at))

    @cached_property
    def _answers(self) -> FloatArray:
        """What the others would have to move to undo a unit of the coefficient."""
        slopes, others = self._slopes, self._others
        size = np.maximum(np.sqrt((slopes[:, others] ** 2).sum(axis=0)), 1e-300)
        answer = np.linalg.lstsq(slopes[:, others] / size, slopes[:, self.at], rcond=1e-10)[0]
        return np.asarray(answer / size)

    def _shifted(self, values: FloatArray) -> FloatArray:
        """Return the optimum with the others moved to first order with the coefficient."""
        found = np.repeat(self.fit.point[None], len(values), axis=0)
        move = -np.outer(values - self.centre, self._answers)
        found[:, self._others] += np.clip(move, -3.0, 3.0)
        return np.clip(found, self.fit.form.lower, self.fit.form.upper)


def profile_statistic(found: FitResult, name: str, value: float) -> float:
    """Return the signed t of one value of a coefficient [-].

    Parameters
    ----------
    found : FitResult
        The fit.
    name : str
        A coefficient that was not fixed.
    value : float
        In the units of the law, inside the bounds of the fit; above 0 for a prefactor.

    Raises
    ------
    LawError
        There is no such free coefficient, or the value is illegal.
    """
    held = _Held(found, name)
    if held.log and not value > 0.0:
        raise LawError(f"value is {value:g}, but the prefactor {name} must be above 0.")
    at = float(np.log(value)) if held.log else value
    low, high = held.bound(-1.0), held.bound(1.0)
    if not low <= at <= high:
        near = held.raw(min(max(at, low), high))
        raise LawError(
            f"value is {value:g}, but the fit looks at {name} from {held.raw(low):g} to "
            f"{held.raw(high):g} only; the nearest is {near:g}."
        )
    size = held.from_optimum(np.array([at])).size[0]
    return float(np.copysign(size, at - held.centre))


def profile(
    found: FitResult,
    names: Sequence[str] | None = None,
    *,
    level: float = 0.95,
    points: int = 21,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, ProfileCurve]:
    """Profile coefficients of a fit.

    Parameters
    ----------
    found : FitResult
        The fit.
    names : sequence of str, optional
        Coefficients; without it all that were not fixed.
    level : float
        Nominal coverage of the intervals, between 0 and 1.
    points : int
        Of each curve, at least 3: the estimate, and half of the others on each side that has room.
    progress : callable, optional
        Called with the coefficients that are done, and their number.

    Returns
    -------
    dict of str to ProfileCurve

    Raises
    ------
    LawError
        An argument is illegal, or a name is that of no free coefficient.
    """
    level = checked_level(level)
    if points < 3:
        raise LawError(f"points is {points}, but a curve needs at least 3; the nearest is 3.")
    if names is None:
        names = found.moving
    elif isinstance(names, str):
        names = [names]
    curves = {}
    for done, held in enumerate([_Held(found, name) for name in names]):
        curves[held.name] = _curve(held, level, points)
        if progress is not None:
            progress(done + 1, len(names))
    return curves


def _curve(held: _Held, level: float, points: int) -> ProfileCurve:
    threshold = student(held.freedom, level)
    error = held.error()
    values, statistic = [held.centre], [0.0]
    ends = []
    for side in (-1.0, 1.0):
        end, last = _end(held, side, error, threshold)
        ends.append(None if end is None else held.raw(end))
        reach = last if end is None else held.centre + _MARGIN * (end - held.centre)
        stop = side * min(side * reach, side * held.bound(side))
        if stop != held.centre:
            steps = np.linspace(held.centre, stop, points // 2 + 1)[1:]
            values += steps.tolist()
            statistic += (side * held.outwards(steps)).tolist()
    order = np.argsort(values, kind="stable")
    low, high = ends
    return ProfileCurve(
        name=held.name,
        estimate=held.raw(held.centre),
        values=tuple(held.raw(values[i]) for i in order),
        statistic=tuple(statistic[i] for i in order),
        threshold=threshold,
        low=low,
        high=high,
        level=level,
        remarks=tuple(_remarks(held, low, high)),
    )


def _end(held: _Held, side: float, error: float, threshold: float) -> tuple[float | None, float]:
    """Return where the statistic first crosses the threshold on a side, or None.

    And up to where an open side is worth showing.
    """
    bound = held.bound(side)
    steps = held.centre + side * error * np.array(_REACH)
    steps = steps[side * (bound - steps) > 0.0]
    size = held.outwards(steps) if steps.size else np.empty(0)
    if not (size > threshold).any() and bound != held.centre:
        steps = np.append(steps, bound)
        size = np.append(size, held.outwards(steps[-1:]))
    over = np.flatnonzero(size > threshold)
    if not over.size:
        flat = np.flatnonzero(size >= _FLAT * size[-1]) if size.size else size
        return None, float(steps[int(flat[0])]) if size.size else held.centre
    first = int(over[0])
    inside = (held.centre, 0.0) if first == 0 else (float(steps[first - 1]), float(size[first - 1]))
    return _crossing(held, inside, (float(steps[first]), float(size[first])), threshold)


def _crossing(
    held: _Held, inner: tuple[float, float], outer: tuple[float, float], threshold: float
) -> tuple[float, float]:
    """Return where the statistic crosses the threshold between two points, and the outer one."""
    for _ in range(_ROUNDS):
        (x0, t0), (x1, t1) = inner, outer
        if t1 - t0 <= _CLOSE or abs(x1 - x0) <= 1e-12 * max(abs(x1), 1e-3):
            break
        guess = x0 + (x1 - x0) * (threshold - t0) / (t1 - t0)
        tried = np.array([0.5 * (x0 + guess), guess, 0.5 * (guess + x1)])  # outwards
        for x, t in zip(tried.tolist(), held.outwards(tried).tolist(), strict=True):
            if t > threshold:
                outer = (x, t)
                break
            inner = (x, t)
    (x0, t0), (x1, t1) = inner, outer
    return x0 + (x1 - x0) * (threshold - t0) / (t1 - t0), x1


def _remarks(held: _Held, low: float | None, high: float | None) -> list[Remark]:
    name, found = held.name, []
    for end, word in ((low, "lower"), (high, "upper")):
        if end is None:
            sentence = (
                f"The runs set no {word} end for {name}: the fit with it at its bound is within "
                "the confidence asked for."
            )
            found.append(Remark(reason="open", sentence=sentence))
    if held.not_converged:
        sentence = (
            f"At {held.not_converged} values along the profile of {name} no fit converged, so the "
            "statistic may be too large there, and the interval too narrow."
        )
        found.append(Remark(reason="not_converged", sentence=sentence))
    if held.lowest < -_LOWER:
        sentence = (
            f"A fit along the profile of {name} is lower than the optimum, by {-held.lowest:.2g} "
            "of a squared t; fit again with more starts."
        )
        found.append(Remark(reason="lower_elsewhere", sentence=sentence))
    return found
