"""What a refit of the runs of a fit starts from: its problem, its optimum, its residuals."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from lawfit._descent import Problem
from lawfit._misfit import curvature
from lawfit._posynomial import Posynomial, posynomial
from lawfit._values import FloatArray
from lawfit.result import FitResult

BoolArray = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]

_MOST_LEVERAGE = 0.99
"""Leverage above which a run counts with this one: its residual says nothing of its noise."""


class AtOptimum(NamedTuple):
    """A fit, ready to be fitted again.

    Attributes
    ----------
    problem : Problem
        As it was fitted.
    point : ndarray of shape (parameters,)
        The optimum, exactly at a bound where the fit is.
    free : ndarray of bool, shape (parameters,)
        What is neither fixed, nor at a bound, nor of a term that vanished.
    log_loss : ndarray of shape (runs,)
        Fitted.
    residual : ndarray of shape (runs,)
        Measured minus fitted ``log L``.
    slopes : ndarray of shape (runs, parameters)
        Derivatives of ``log L``.
    """

    problem: Problem
    point: FloatArray
    free: BoolArray
    log_loss: FloatArray
    residual: FloatArray
    slopes: FloatArray

    @property
    def form(self) -> Posynomial:
        """The parametrisation."""
        return self.problem.form

    @property
    def freedom(self) -> int:
        """Runs less free coefficients."""
        return len(self.residual) - int(self.free.sum())

    def leverage(self) -> FloatArray:
        """Return the diagonal of the hat matrix, shape (runs,), at most 0.99."""
        columns = self.slopes[:, self.free] * np.sqrt(self.problem.weight[0])[:, None]
        basis, _ = np.linalg.qr(columns / np.sqrt((columns * columns).sum(axis=0)))
        return np.asarray(np.minimum((basis * basis).sum(axis=1), _MOST_LEVERAGE))

    def noise_residuals(self) -> FloatArray:
        """Return residuals of the size of the noise, ``r / sqrt(1 - leverage)``, shape (runs,).

        Where noise is equal, their variance is its own (HC2; MacKinnon and White,
        J. Econometrics 29:305, 1985).
        """
        return self.residual / np.sqrt(1.0 - self.leverage())

    def wild_residuals(self) -> FloatArray:
        """Return residuals for the wild bootstrap, ``r / (1 - leverage)``, shape (runs,).

        HC3, as Davidson and Flachaire recommend (J. Econometrics 146:162, 2008): somewhat more
        than the noise, for what the fit takes from few runs.
        """
        return self.residual / (1.0 - self.leverage())

    def density(self) -> float:
        """Return the mean of ``psi'`` over the runs, 1 for least squares [-]."""
        ones = np.ones_like(self.residual)
        return float(curvature(self.residual, ones, self.problem.delta).mean())

    def deviance_scale(self) -> float:
        r"""Return what turns twice a rise of the objective into a squared t.

        ``sum psi' / n`` over ``sum w psi^2 / (n - p)``: for least squares one over the variance
        of a run of weight 1. A likelihood ratio of an M-estimator: Schrader and Hettmansperger,
        Biometrika 67:93 (1980).
        """
        pull = np.clip(self.residual, -self.problem.delta, self.problem.delta)
        middle = float((self.problem.weight[0] * pull * pull).sum()) / max(self.freedom, 1)
        return self.density() / max(middle, 1e-300)


def at_optimum(found: FitResult, origin: Collection[str] = ()) -> AtOptimum:
    """Return a fit ready to be fitted again.

    Parameters
    ----------
    found : FitResult
        Of `lawfit.fit`.
    origin : collection of str
        Prefactors whose logarithm is to be a parameter itself, and not the term at the centre.
    """
    logs = found.train.logs()
    form = posynomial(found.law, logs.variables, logs.loss, found.fixed, origin)
    delta = math.inf if found.delta is None else found.delta
    problem = Problem.of(form, logs.loss, found.train.column("weight"), delta)
    point = form.point({name: each.value for name, each in found.coefficients.items()})
    bounds = {"lower": form.lower, "upper": form.upper}
    for k, name in enumerate(form.names):
        side = found.coefficients[name].at_bound
        if side is not None and name not in origin:
            point[k] = bounds[side][k]  # the way through the units of the law rounds
    return at_point(problem, point)


def at_point(problem: Problem, point: FloatArray) -> AtOptimum:
    """Return a problem ready to be solved again from a point."""
    log_loss, slopes, _ = problem.form.slopes(point[None])
    return AtOptimum(
        problem=problem,
        point=point,
        free=problem.form.free(point),
        log_loss=log_loss[0],
        residual=problem.log_loss[0] - log_loss[0],
        slopes=slopes[0],
    )
