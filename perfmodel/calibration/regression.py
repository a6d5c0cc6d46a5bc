"""Least squares on relative errors: how every surface is fitted, and how its errors are stated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from perfmodel.calibration.packs import FitErrors
from perfmodel.calibration.tables import BoolArray, FloatArray, TableError

Parameters = Mapping[str, float]

LOSS_SCALE = 0.1  # relative error at which a row begins to count as an outlier [-]
TOLERANCE = 1e-13
DIGITS = 9  # significant digits of a parameter in a pack


@dataclass(frozen=True)
class Bound:
    """Where a positive parameter starts and how far it may go; the fit is in its logarithm."""

    start: float
    low: float
    high: float


@dataclass(frozen=True)
class Fit:
    """Parameters, the relative errors of the rows they saw, and of rows that a fit did not see."""

    params: dict[str, float]
    inside: FloatArray
    outside: FloatArray  # empty where no row was held out
    held_out: str

    @property
    def errors(self) -> FitErrors:
        """The errors as a pack states them."""
        return pooled([self])


@dataclass(frozen=True)
class Regression:
    """Times that were measured, a prediction of them, and the parameters that are free.

    ``predict`` maps parameters to the times of all rows [s]. ``held_out`` marks the rows that
    the held-out errors are stated on.
    """

    bounds: Mapping[str, Bound]
    predict: Callable[[Parameters], FloatArray]
    observed_s: FloatArray
    held_out: BoolArray
    held_out_text: str

    def solve(self) -> Fit:
        """Fit all rows, and the rest without the held-out rows."""
        everything = np.ones(len(self.observed_s), dtype=np.bool_)
        fitted = self.fit(everything)
        outside = np.array([])
        if self.held_out.any() and not self.held_out.all():
            outside = self.relative_errors(self.fit(~self.held_out))[self.held_out]
        return Fit(fitted, self.relative_errors(fitted), outside, self.held_out_text)

    def fit(self, rows: BoolArray) -> dict[str, float]:
        """Fit the marked rows: soft-L1 on the logarithm of predicted over measured time."""
        if rows.sum() < len(self.bounds):
            raise TableError(
                f"{rows.sum()} rows cannot determine {len(self.bounds)} parameters "
                f"({', '.join(self.bounds)})."
            )
        names = list(self.bounds)
        low = np.log([self.bounds[name].low for name in names])
        high = np.log([self.bounds[name].high for name in names])
        observed = np.log(self.observed_s[rows])

        def residuals(x: FloatArray) -> FloatArray:
            predicted = self.predict(dict(zip(names, np.exp(x).tolist(), strict=True)))
            return np.asarray(np.log(predicted[rows]) - observed)

        best = None
        for start in self._starts():
            solution = least_squares(
                residuals,
                np.clip(start, low + 1e-6, high - 1e-6),
                bounds=(low, high),
                jac="3-point",
                loss="soft_l1",
                f_scale=LOSS_SCALE,
                xtol=TOLERANCE,
                ftol=TOLERANCE,
                gtol=TOLERANCE,
            )
            if best is None or solution.cost < best.cost * (1.0 - 1e-9):
                best = solution
        assert best is not None
        return {
            name: float(f"{value:.{DIGITS}g}")
            for name, value in zip(names, np.exp(best.x), strict=True)
        }

    def relative_errors(self, parameters: Parameters) -> FloatArray:
        """Return |predicted / measured - 1| of every row [-]."""
        return np.abs(self.predict(parameters) / self.observed_s - 1.0)

    def _starts(self) -> list[FloatArray]:
        """Return the given start, and it with the odd and the even parameters moved threefold."""
        start = np.log([bound.start for bound in self.bounds.values()])
        odd = np.arange(len(start)) % 2 == 1
        step = np.log(3.0)
        return [start, start + step * np.where(odd, 1.0, -1.0), start - step * np.where(odd, 1, -1)]


def pooled(fits: Iterable[Fit]) -> FitErrors:
    """State the errors of several fits as one, in percent, rounded to a hundredth."""
    fits = list(fits)
    inside = np.concatenate([fit.inside for fit in fits])
    outside = np.concatenate([fit.outside for fit in fits])
    tested = len(outside) > 0
    return FitErrors(
        n=len(inside),
        median_in=_percent(inside, 0.5),
        p90_in=_percent(inside, 0.9),
        median_out=_percent(outside, 0.5) if tested else None,
        p90_out=_percent(outside, 0.9) if tested else None,
        held_out="; ".join(dict.fromkeys(fit.held_out for fit in fits)) if tested else "none",
    )


def evaluate(formula: Callable[..., float], *arguments: FloatArray | float) -> FloatArray:
    """Return the scalar formula at every row; an argument is a column or the same for all."""
    rows = np.broadcast(*arguments)
    return np.array([formula(*map(float, row)) for row in rows])


def _percent(errors: FloatArray, quantile: float) -> float:
    return round(100.0 * float(np.quantile(errors, quantile)), 2)
