"""Which coefficients the runs determine, and which only trade off along a ridge.

A fit may be as good as the optimum at coefficients that are far from it. The scan descends from
random starts and stops each as soon as its objective is within a hundredth of the least: where
the descents enter that region shows how far it reaches, coefficient by coefficient. They may all
enter at one side, so a small spread alone does not make a coefficient identified.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict

from lawfit._descent import descend
from lawfit._intervals import NORMAL
from lawfit._refit import at_optimum
from lawfit._values import LawError
from lawfit.fitting import starting_points
from lawfit.result import FitResult

__all__ = ["RidgeRow", "RidgeScan", "ridge_scan"]

WITHIN = 0.01
"""Share of the least objective within which a restart counts."""

SPREAD = 0.2
"""Spread over the restarts, relative to the coefficient, up to which it is identified."""

HALF_WIDTH = 0.4
"""Half-width of the 95 % interval, relative to the coefficient, up to which it is identified."""

RULE = (
    f"identified: over the restarts that come within {WITHIN:.0%} of the least objective the "
    f"coefficient spreads by at most {SPREAD:.0%} of its value, and 1.96 standard errors are at "
    f"most {HALF_WIDTH:.0%} of it; else ridge"
)


class RidgeRow(BaseModel):
    """One coefficient of a scan.

    Attributes
    ----------
    name : str
        The coefficient.
    value : float
        Of the fit, in the units of the law.
    spread : float
        Largest less smallest over the restarts within reach, over the size of `value` [-]; an
        exponent near 0 is a ridge by this measure, however well it is known.
    half_width : float or None
        1.96 standard errors over the size of `value` (of a prefactor: of its logarithm) [-]; None
        where the fit has no covariance for it.
    identified : bool
        By the rule of the scan.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    value: float
    spread: float
    half_width: float | None
    identified: bool


class RidgeScan(BaseModel):
    """A scan of restarts.

    Attributes
    ----------
    rows : tuple of RidgeRow
        One for each coefficient that was not fixed.
    starts, within : int
        Restarts, and those that came within reach of the optimum.
    rule : str
        What identified means.
    seed : int
        Of the restarts.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    basis: ClassVar[str] = "FITTED"

    rows: tuple[RidgeRow, ...]
    starts: int
    within: int
    rule: str
    seed: int

    @property
    def identified(self) -> tuple[str, ...]:
        """Names of the identified coefficients."""
        return tuple(row.name for row in self.rows if row.identified)


def ridge_scan(
    found: FitResult,
    *,
    starts: int = 400,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> RidgeScan:
    """Scan how far coefficients can move at nearly the same objective.

    Parameters
    ----------
    found : FitResult
        The fit.
    starts : int
        Restarts, at least 2.
    seed : int
        Of the restarts, drawn as those of `fit`.
    progress : callable, optional
        Called with the restarts that have ended, and their number.

    Raises
    ------
    LawError
        ``starts`` is out of range, or fewer than two restarts come within reach.
    """
    if starts < 2:
        raise LawError(f"starts is {starts}, but a scan needs at least 2; the nearest is 2.")
    fit = at_optimum(found)
    form, problem = fit.form, fit.problem
    middle = float(np.median(problem.log_loss))
    points = starting_points(form, middle, starts, np.random.default_rng(seed))
    reach = found.objective * (1.0 + WITHIN) + float(problem.rounding[0])
    # no wider objective first: its optimum is one place, from which all would enter at one side
    ended = descend(problem, points, enough=reach, warm=True, progress=progress)
    near = ended.points[ended.value <= reach]
    if len(near) < 2:
        raise LawError(
            f"{len(near)} of {starts} restarts came within {WITHIN:.0%} of the objective, but a "
            "spread needs two; ask for more starts."
        )
    raw = np.array([list(form.raw(point).values()) for point in near])
    rows = [
        _row(found, name, float(spread))
        for name, spread in zip(form.names, np.ptp(raw, axis=0), strict=True)
        if name in found.moving
    ]
    return RidgeScan(rows=tuple(rows), starts=starts, within=len(near), rule=RULE, seed=seed)


def _row(found: FitResult, name: str, spread: float) -> RidgeRow:
    coefficient = found.coefficients[name]
    size = max(abs(coefficient.value), 1e-300)
    width = _half_width(found, name, size)
    clear = coefficient.at_bound is None and width is not None and width <= HALF_WIDTH
    return RidgeRow(
        name=name,
        value=coefficient.value,
        spread=spread / size,
        half_width=width,
        identified=clear and spread / size <= SPREAD,
    )


def _half_width(found: FitResult, name: str, size: float) -> float | None:
    covariance = found.covariance
    key = None if covariance is None else covariance.listed(name)
    if covariance is None or key is None:
        return None
    return NORMAL * covariance.std_error(key) / (size if key == name else 1.0)
