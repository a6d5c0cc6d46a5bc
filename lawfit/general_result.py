"""What a fit of any law returns, and what speaks against it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny

from lawfit._covariance import classical, sandwich
from lawfit._curve import BoolArray, Curve
from lawfit._form import Form
from lawfit._misfit import condition_of, few, lacking, outlying, trading
from lawfit._values import FloatArray
from lawfit._verdict import (
    agreeing,
    best_end,
    doubts,
    provenance,
    starts_needed,
    weighted_rms,
)
from lawfit.base import ScalingLaw
from lawfit.general import GeneralLaw
from lawfit.result import Coefficient, Covariance
from lawfit.runs import Remark

__all__ = ["GeneralFit"]

_MOVES = 1e-7
"""Influence of a coefficient on the fitted function, over its size, below which it has none."""


class GeneralFit(BaseModel):
    """A fitted law of any kind and what is known of the fit.

    Attributes
    ----------
    law : GeneralLaw or ScalingLaw
        With the coefficients found.
    coefficients : dict of str to Coefficient
        By the field of the law.
    objective : float
        Sum over the runs of weight times the loss function of the residual.
    loss_function : {"huber", "least_squares"}
        As in `FitResult`.
    delta : float or None
        Half-width of Huber's function, in units of the residual; None for least squares.
    on : {"log", "loss"}
        What a residual is: of ``log L`` [-], or of ``L`` [its unit].
    engine : {"terms", "values"}
        What the optimum was found with: the terms of the law, or its values alone.
    stationary : bool
        The projected gradient vanishes at the best end, by `gradient_norm` and by the Newton
        decrement.
    converged : bool
        It is stationary, and enough starts agree on it.
    gradient_norm : float
        Largest component of the projected gradient over the sum of the sizes of the runs'
        contributions to it [-].
    starts, starts_agreeing : int
        Starts, and those of them that are stationary at an objective within 1e-6 of the best.
    n_runs : int
        Runs in the fit.
    rmse : float
        Weighted root mean square of predicted minus measured ``L`` [its unit].
    rmse_log : float or None
        The same of ``log L`` [-]; None where a value is not above 0.
    covariance : Covariance or None
        Of the coefficients that are free, as they stand in the law; None where it is singular.
        For least squares ``s^2 (sum w m m')^-1``, for Huber's function the sandwich.
    warnings : tuple of Remark
        What speaks against the fit.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    basis: ClassVar[Literal["FITTED"]] = "FITTED"

    law: SerializeAsAny[GeneralLaw | ScalingLaw]
    coefficients: dict[str, Coefficient]
    objective: float = Field(ge=0)
    loss_function: Literal["huber", "least_squares"]
    delta: float | None
    on: Literal["log", "loss"]
    engine: Literal["terms", "values"]
    stationary: bool
    converged: bool
    gradient_norm: float
    starts: int
    starts_agreeing: int
    n_runs: int
    rmse: float
    rmse_log: float | None
    covariance: Covariance | None
    warnings: tuple[Remark, ...]


class Table(NamedTuple):
    """Columns, losses and weights, checked; arrays of shape (runs,)."""

    columns: Mapping[str, FloatArray]
    loss: FloatArray
    weight: FloatArray


class Ends(NamedTuple):
    """Where the starts ended, in the coefficients of the law.

    ``sides`` is -1 where a coefficient is at its lower bound, 1 at its upper one, and 0 elsewhere.
    """

    points: FloatArray
    value: FloatArray
    gradient: FloatArray
    stationary: BoolArray
    sides: FloatArray
    rounding: float

    @property
    def best(self) -> int:
        """The end of least objective, of stationary ones as good the one of least gradient."""
        return best_end(self.value, self.stationary, self.rounding, by=self.gradient)


def result_of(
    form: Form,
    curve: Curve,
    table: Table,
    ends: Ends,
    width: float,
    objective: Literal["huber", "least_squares"],
    source: str,
    engine: Literal["terms", "values"],
) -> GeneralFit:
    """Return the fit of the best end, with what speaks against it."""
    best = ends.best
    point, sides = ends.points[best], ends.sides[best]
    agree = agreeing(ends.value, ends.stationary, ends.rounding, best)
    stationary, gradient = bool(ends.stationary[best]), float(ends.gradient[best])
    starts, rows = len(ends.value), len(table.loss)
    target = np.log(table.loss) if curve.logs else table.loss
    residual = curve.values(point[None])[0] - target
    slopes = curve.slopes(point[None])[0]
    reach = np.abs(slopes).max(axis=0) * np.where(form.logged, np.abs(point), 1.0)
    free = (sides == 0.0) & (reach > np.where(form.logged, _MOVES * curve.size, 0.0))
    names = [name for name, moves in zip(form.names, free, strict=True) if moves]
    matrix = _covariance(slopes[:, free], residual, table.weight, width)
    advice = "ask for more starts, or give ranges"
    warnings = doubts(stationary, gradient, agree, starts, advice)
    warnings += _at_bounds(form, point, sides, free)
    warnings += few(rows, len(names))
    if names:
        warnings += trading(names, *condition_of(slopes[:, free], table.weight))
    if matrix is None:
        sentence = "The information at the optimum is singular, so there is no covariance."
        warnings.append(Remark(reason="no_covariance", sentence=sentence))
    logs = [np.log(column) for column in table.columns.values() if (column > 0.0).all()]
    if logs:
        warnings += lacking(slopes[:, free], residual, table.weight, np.array(logs), None)
    ids = [f"run {k}" for k in range(rows)]
    what = "log L" if curve.logs else "L"
    warnings += outlying(residual, table.weight, ids, what)
    law = curve.law(point)
    predicted = curve._replace(logs=False).values(point[None])[0]
    return GeneralFit(
        law=law.model_copy(update={"source": provenance(rows, source, width, what)}),
        coefficients=_coefficients(form, point, sides),
        objective=float(ends.value[best]),
        loss_function=objective,
        delta=width if objective == "huber" else None,
        on="log" if curve.logs else "loss",
        engine=engine,
        stationary=stationary,
        converged=stationary and agree >= starts_needed(starts),
        gradient_norm=gradient,
        starts=starts,
        starts_agreeing=agree,
        n_runs=rows,
        rmse=weighted_rms(predicted - table.loss, table.weight),
        rmse_log=None
        if min(predicted.min(), table.loss.min()) <= 0.0
        else weighted_rms(np.log(predicted / table.loss), table.weight),
        covariance=None
        if matrix is None
        else Covariance(names=tuple(names), matrix=tuple(tuple(row) for row in matrix.tolist())),
        warnings=tuple(warnings),
    )


def _covariance(
    slopes: FloatArray, residual: FloatArray, weight: FloatArray, width: float
) -> FloatArray | None:
    if math.isfinite(width):
        return sandwich(slopes, residual, weight, width)
    return classical(slopes, residual, weight)


def _coefficients(form: Form, point: FloatArray, sides: FloatArray) -> dict[str, Coefficient]:
    names: dict[float, Literal["lower", "upper"]] = {-1.0: "lower", 1.0: "upper"}
    found = {
        name: Coefficient(value=value, at_bound=names.get(side), fixed=False)
        for name, value, side in zip(form.names, point.tolist(), sides.tolist(), strict=True)
    }
    for name in form.held:
        found[name] = Coefficient(value=float(form.rest[name]), at_bound=None, fixed=True)
    return found


def _at_bounds(form: Form, point: FloatArray, sides: FloatArray, free: BoolArray) -> list[Remark]:
    found = []
    for name, value, side, moves in zip(form.names, point, sides, free, strict=True):
        if side:
            text = f"{name} stands at the {'lower' if side < 0 else 'upper'} bound of the fit"
            text += f", {value:g}; intervals around it are one-sided."
            found.append(Remark(reason="parameter_at_bound", sentence=text))
        elif not moves:
            text = f"{name} moves no prediction at the optimum, so its value means nothing."
            found.append(Remark(reason="no_influence", sentence=text))
    return found
