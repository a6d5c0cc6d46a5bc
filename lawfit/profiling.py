"""Profile likelihood: how much worse a fit gets as one coefficient is held away from its value.

The other coefficients are fitted anew at each value, to convergence, so a ridge is followed and not
cut across. The statistic is a signed t, ``sign(x - x_hat) sqrt(2 (Q(x) - Q(x_hat)) s)``, with the
sum objective ``Q`` and the scale ``s`` of `lawfit._refit.AtOptimum.deviance_scale`; the interval
is where its size is at most that of Student's t with ``n - p`` degrees of freedom (Bates and
Watts, Nonlinear Regression Analysis, 1988, section 6.1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict

from lawfit._descent import descend
from lawfit._refit import AtOptimum, at_optimum
from lawfit._values import FloatArray, LawError
from lawfit.result import FitResult
from lawfit.runs import Remark

__all__ = ["ProfileCurve", "profile", "profile_statistic"]

_REACH = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 15.0, 30.0)
"""Where a side is looked at first, in standard errors."""

_ROUNDS = 4
"""Rounds that close in on an end, each between the two nearest points."""

_MARGIN = 1.3
"""The curve goes on beyond the ends, by this factor of the interval."""


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
        Signed t there [-]; the squares of a straight line are a parabola.
    threshold : float
        Size of t at the ends of the interval.
    low, high : float or None
        Ends; None where the statistic stays below the threshold up to the bound of the fit, so
        that the runs set no such end.
    level : float
        Nominal coverage [-].
    remarks : tuple of Remark
        ``open``: no end on a side. ``not_converged``: fits on the curve that did not converge.
        ``lower_elsewhere``: a lower objective than that of the fit.
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


class _Held:
    """Fits with one coefficient held; its logarithm, if it is a prefactor."""

    def __init__(self, found: FitResult, name: str) -> None:
        coefficient = found.coefficients.get(name)
        if coefficient is None:
            known = ", ".join(found.coefficients)
            raise LawError(f"name is {name!r}, but the coefficients are {known}.")
        if coefficient.fixed:
            raise LawError(f"name is {name!r}, but the fit held it fixed, so it has no profile.")
        names = at_optimum(found).form.names
        log = names.index(name) < at_optimum(found).form.terms
        self.fit: AtOptimum = at_optimum(found, [name] if log else [])
        self.log = log
        self.at = names.index(name)
        self.least = float(self.fit.problem.value(self.fit.point[None])[0])
        self.scale = self.fit.deviance_scale()
        self.not_converged = 0
        self.lowest = 0.0

    def statistic(self, values: FloatArray, starts: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return signed t and the points, from starts of shape (values, parameters)."""
        starts = starts.copy()
        starts[:, self.at] = values
        problem = self.fit.problem
        lower = np.repeat(problem.lower, len(values), axis=0)
        upper = np.repeat(problem.upper, len(values), axis=0)
        lower[:, self.at] = upper[:, self.at] = values
        found = descend(problem._replace(lower=lower, upper=upper), starts, warm=True)
        self.not_converged += int((~found.converged).sum())
        rise = 2.0 * (found.value - self.least) * self.scale
        self.lowest = min(self.lowest, float(rise.min()))
        size = np.sqrt(np.maximum(rise, 0.0))
        return np.sign(values - self.fit.point[self.at]) * size, found.points

    def error(self) -> float:
        """Return a first guess of the standard error, from the curvature."""
        columns = self.fit.slopes * np.sqrt(self.fit.problem.weight[0])[:, None]
        other = self.fit.free.copy()
        other[self.at] = False
        mine, rest = columns[:, self.at], columns[:, other]
        if rest.shape[1]:
            rest = rest / np.maximum(np.sqrt((rest * rest).sum(axis=0)), 1e-300)
            basis, _ = np.linalg.qr(rest)
            mine = mine - basis @ (basis.T @ mine)
        size = float(np.sqrt((mine * mine).sum() * self.scale))
        return min(1.0 / max(size, 1e-6), 3.0)

    def raw(self, value: float) -> float:
        """Return a value in the units of the law."""
        return float(np.exp(value)) if self.log else float(value)


def profile_statistic(found: FitResult, name: str, value: float) -> float:
    """Return the signed t of one value of a coefficient [-].

    Parameters
    ----------
    found : FitResult
        The fit.
    name : str
        A coefficient that was not fixed.
    value : float
        In the units of the law; above 0 for a prefactor.

    Raises
    ------
    LawError
        There is no such free coefficient, or the value is illegal.
    """
    held = _Held(found, name)
    if held.log and not value > 0.0:
        raise LawError(f"value is {value:g}, but the prefactor {name} must be above 0.")
    at = np.array([np.log(value) if held.log else value])
    # from the optimum, and from where a straight step of the others leads
    best = np.inf
    for start in (held.fit.point, _shifted(held, float(at[0]))):
        t, _ = held.statistic(at, start[None])
        best = min(best, abs(float(t[0])))
    return float(np.copysign(best, at[0] - held.fit.point[held.at]))


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
        Of each curve, at least 3.
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
    from scipy.special import stdtrit

    if not 0.0 < level < 1.0:
        raise LawError(f"level is {level:g}, but must lie between 0 and 1, such as 0.95.")
    if points < 3:
        raise LawError(f"points is {points}, but a curve needs at least 3; the nearest is 3.")
    if names is None:
        names = [name for name, each in found.coefficients.items() if not each.fixed]
    freedom = max(at_optimum(found).freedom, 1)
    threshold = float(stdtrit(freedom, 0.5 + 0.5 * level))
    curves = {}
    for done, name in enumerate(names):
        curves[name] = _curve(_Held(found, name), name, level, threshold, points)
        if progress is not None:
            progress(done + 1, len(names))
    return curves


def _shifted(held: _Held, value: float) -> FloatArray:
    """Return the optimum with the coefficient moved, and the others to first order with it."""
    fit = held.fit
    columns = fit.slopes * np.sqrt(fit.problem.weight[0])[:, None]
    others = np.flatnonzero(fit.free & (np.arange(len(fit.point)) != held.at))
    scale = np.maximum(np.sqrt((columns[:, others] ** 2).sum(axis=0)), 1e-300)
    move = np.linalg.lstsq(columns[:, others] / scale, -columns[:, held.at], rcond=1e-10)[0] / scale
    found = fit.point.copy()
    found[others] += np.clip(move * (value - fit.point[held.at]), -3.0, 3.0)
    found[held.at] = value
    return np.clip(found, fit.form.lower, fit.form.upper)


def _curve(held: _Held, name: str, level: float, threshold: float, points: int) -> ProfileCurve:
    centre, error = float(held.fit.point[held.at]), held.error()
    sides = [_end(held, side, error, threshold) for side in (-1.0, 1.0)]
    reach = [(end if end is not None else last) - centre for (end, last) in sides]
    reach = [max(abs(x), 1e-9) * _MARGIN for x in reach]
    lower, upper = held.fit.problem.lower[0, held.at], held.fit.problem.upper[0, held.at]
    half = points // 2
    # outwards from the centre, each fit from its neighbour
    values, statistic = [centre], [0.0]
    for side, far in zip((-1.0, 1.0), reach, strict=True):
        stop = float(np.clip(centre + side * far, lower, upper))
        steps = np.linspace(centre, stop, half + 1)[1:]
        found = _walk(held, steps)
        values += steps.tolist()
        statistic += found.tolist()
    order = np.argsort(values, kind="stable")
    low, high = (None if end is None else held.raw(end) for end, _ in sides)
    return ProfileCurve(
        name=name,
        estimate=held.raw(centre),
        values=tuple(held.raw(values[i]) for i in order),
        statistic=tuple(statistic[i] for i in order),
        threshold=threshold,
        low=low,
        high=high,
        level=level,
        remarks=tuple(_remarks(held, name, low, high)),
    )


def _walk(held: _Held, steps: FloatArray) -> FloatArray:
    """Return the statistic at values that lead away from the optimum.

    All are fitted from the optimum and from a first-order step; then each from where its inner
    neighbour ended. The lowest counts.
    """
    at = np.repeat(held.fit.point[None], len(steps), axis=0)
    best, points = held.statistic(steps, at)
    for starts in (np.array([_shifted(held, x) for x in steps]), None):
        from_ = np.concatenate([held.fit.point[None], points[:-1]]) if starts is None else starts
        other, ends = held.statistic(steps, from_)
        better = np.abs(other) < np.abs(best)
        best = np.where(better, other, best)
        points = np.where(better[:, None], ends, points)
    return best


def _end(held: _Held, side: float, error: float, threshold: float) -> tuple[float | None, float]:
    """Return where the statistic crosses the threshold on a side, and the last value seen."""
    centre = float(held.fit.point[held.at])
    bound = float((held.fit.problem.lower if side < 0 else held.fit.problem.upper)[0, held.at])
    steps = centre + side * error * np.array(_REACH)
    steps = steps[side * (bound - steps) > 0.0]
    if np.isfinite(bound):
        steps = np.append(steps, bound) if abs(bound - centre) < 100.0 * error else steps
    if not steps.size:
        return None, centre
    size = np.abs(_walk(held, steps))
    over = np.flatnonzero(size > threshold)
    if not over.size:
        return None, float(steps[-1])
    first = int(over[0])
    inner = (centre, 0.0) if first == 0 else (float(steps[first - 1]), float(size[first - 1]))
    outer = (float(steps[first]), float(size[first]))
    for _ in range(_ROUNDS):
        (x0, t0), (x1, t1) = inner, outer
        guess = x0 + (x1 - x0) * (threshold - t0) / (t1 - t0)
        tried = np.sort(side * np.array([0.5 * (x0 + guess), guess, 0.5 * (x1 + guess)])) * side
        for x, t in zip(tried, np.abs(_walk(held, tried)), strict=True):
            if t <= threshold and side * (x - inner[0]) > 0:
                inner = (float(x), float(t))
            elif t > threshold and side * (outer[0] - x) > 0:
                outer = (float(x), float(t))
                break
    (x0, t0), (x1, t1) = inner, outer
    return x0 + (x1 - x0) * (threshold - t0) / (t1 - t0), outer[0]


def _remarks(held: _Held, name: str, low: float | None, high: float | None) -> list[Remark]:
    found = []
    for end, word in ((low, "lower"), (high, "upper")):
        if end is None:
            sentence = (
                f"The runs set no {word} end for {name}: the fit with it at its bound is within "
                "the confidence asked for."
            )
            found.append(Remark(reason="open", sentence=sentence))
    if held.not_converged:
        sentence = f"{held.not_converged} fits along the profile of {name} did not converge."
        found.append(Remark(reason="not_converged", sentence=sentence))
    if held.lowest < -1e-3:
        sentence = (
            f"A fit along the profile of {name} is lower than the optimum, by {-held.lowest:.2g} "
            "of a squared t; fit again with more starts."
        )
        found.append(Remark(reason="lower_elsewhere", sentence=sentence))
    return found
