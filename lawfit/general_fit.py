"""Fits of any law to any columns: laws of other papers, and classes of the user's own.

`lawfit.fit` is for the laws in the variables of a run; `fit_general` takes every `GeneralLaw` and
every `ScalingLaw`. Of a law that lists terms whose coefficients are fields and whose exponents are
linear in them, the exact engine of `fit` finds the optimum (:mod:`lawfit._descent`); of any other,
one that knows nothing but its value (:mod:`lawfit._general_descent`). Statements about the end are
the same: a projected gradient and the number of starts that agree.

Examples
--------
>>> import numpy as np
>>> from lawfit import CLARK_SBASE, ClarkLaw, fit_general
>>> size, experts = (x.ravel() for x in np.meshgrid([2e7, 1e8, 1e9], [1, 4, 32, 128, 512]))
>>> loss = CLARK_SBASE.loss(n=size, experts=experts)
>>> found = fit_general(ClarkLaw, {"n": size, "experts": experts}, loss, starts=20)
>>> found.converged, round(found.law.most, 3)
(True, 314.478)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from lawfit._curve import AnyForm, Curve
from lawfit._descent import Problem, descend
from lawfit._form import Form, form_of, posynomial_of
from lawfit._general_descent import Task, descend_any
from lawfit._posynomial import Posynomial
from lawfit._values import FloatArray, LawError, finite, log_point, positive
from lawfit.fitting import starting_points, width_of
from lawfit.general import GeneralLaw
from lawfit.general_result import Ends, GeneralFit, Table, result_of
from lawfit.runs import RUN_VARIABLES

__all__ = ["fit_general"]

_DRAWS = 20
"""Random points of which a start is the best."""

_PROBES = 8
"""Starts at which is found out what the code of a law takes."""


def fit_general(
    law: type[AnyForm] | AnyForm,
    columns: Mapping[str, Any],
    loss: Any,
    *,
    weight: Any = None,
    objective: Literal["huber", "least_squares"] = "huber",
    delta: float = 1e-3,
    on: Literal["log", "loss"] = "log",
    starts: int | Sequence[AnyForm] = 50,
    ranges: Mapping[str, tuple[float, float]] | None = None,
    bounds: Mapping[str, tuple[float, float]] | None = None,
    fixed: Mapping[str, float] | None = None,
    rng: int | np.random.Generator = 0,
    source: str = "runs given",
    progress: Callable[[int, int], None] | None = None,
) -> GeneralFit:
    """Fit any law to any columns: minimise ``sum_r weight_r h(f(x_r) - f_r)``, f = log L or L.

    The coefficients are the fields of the law that are floats. Those that it wants above 0, or
    at least 0, move in their logarithms; others are free in sign. What the law refuses as a
    whole, such as a start that is not below an end, no step leads to.

    Parameters
    ----------
    law : class or law
        A `GeneralLaw` or `ScalingLaw`, or its class; a law is one more start.
    columns : mapping of str to array of shape (runs,)
        Each variable of the law; a scalar where all runs have the same.
    loss : array of shape (runs,)
        What the law should give.
    weight : array of shape (runs,), optional
        How much a run counts [-], above 0.
    objective : {"huber", "least_squares"}
        ``h``: Huber's function, or half the square.
    delta : float
        Half-width of Huber's function, in units of the residual, above 0.
    on : {"log", "loss"}
        Whether residuals are of the natural logarithm or of the value itself.
    starts : int or sequence of laws
        How many random starts, or the starts themselves.
    ranges : mapping, optional
        Where random starts have a coefficient: its least and largest value. Without, coefficients
        above 0 are log-uniform on 0.001 to 1000, three in ten of them to 1e15, and others are of
        either sign and a size of 0.001 to 5. Each start is the best of 20 draws.
    bounds : mapping, optional
        Least and largest legal value of a coefficient, beyond what the law says itself.
    fixed : mapping, optional
        Coefficients to hold, with their values.
    rng : int or numpy.random.Generator
        Of the random starts.
    source : str
        Where the runs come from, for the law's own `source`.
    progress : callable, optional
        Called with the starts that have ended, and their number.

    Returns
    -------
    GeneralFit
        Law, coefficients, whether the fit converged, and its warnings.

    Raises
    ------
    LawError
        An argument is illegal, there are fewer runs than free coefficients, or the law has no
        value at any start.
    """
    fixed, bounds, ranges = fixed or {}, bounds or {}, ranges or {}
    if on not in ("log", "loss"):
        raise LawError(f"on is {on!r}, but must be 'log' or 'loss'.")
    width = width_of(objective, delta)
    form = form_of(law, fixed, bounds)
    table = _table(form, columns, loss, weight, on)
    if len(table.loss) < len(form.names):
        raise LawError(
            f"{len(table.loss)} runs are given for {len(form.names)} coefficients, but a fit needs "
            f"at least as many runs; the nearest legal number is {len(form.names)}."
        )
    _check_starts(form, starts, ranges)
    curve = Curve(form.kind, form.rest, form.names, table.columns, len(table.loss), on == "log")
    if on == "loss":
        curve = curve._replace(size=max(float(np.sqrt((table.loss**2).mean())), 1e-300))
    terms = None
    if on == "log" and not bounds and not ranges:
        terms = posynomial_of(form, table.columns, np.log(table.loss))
    generator = np.random.default_rng(rng)
    if terms is not None:
        ends = _by_terms(terms, form, table, width, starts, generator, progress)
        curve = curve.probed(ends.points[[ends.best]])
    else:
        task = Task.of(curve, table.loss, table.weight, (form.lower, form.upper), width)
        task = task._replace(logged=form.logged)
        first = _first(form, task, starts, ranges, generator)
        curve = curve.probed(first[:_PROBES])
        ends = _by_values(form, task._replace(curve=curve), first, progress)
        if curve.turned and not curve.agrees(ends.points[ends.best]):
            curve = curve._replace(turned=False)
            ends = _by_values(form, task._replace(curve=curve), first, progress)
    engine: Literal["terms", "values"] = "values" if terms is None else "terms"
    return result_of(form, curve, table, ends, width, objective, source, engine)


def _table(form: Form, columns: Mapping[str, Any], loss: Any, weight: Any, on: str) -> Table:
    """Return the columns as arrays of one length, checked."""
    losses = np.atleast_1d((positive if on == "log" else finite)("loss", loss))
    if losses.ndim != 1 or not losses.size:
        raise LawError(f"loss has the shape {losses.shape}, but must have one axis and a run.")
    weights = np.ones(len(losses)) if weight is None else np.atleast_1d(positive("weight", weight))
    prototype = form.prototype()
    given = {name: np.asarray(column) for name, column in columns.items()}
    if isinstance(prototype, GeneralLaw):
        checked = prototype._checked(given)
    else:
        if set(given) != set(RUN_VARIABLES):
            raise LawError(
                f"the columns are {', '.join(given)}, but this law takes {', '.join(RUN_VARIABLES)}"
                " by name."
            )
        log_point(**given)
        checked = {name: np.asarray(column, dtype=np.float64) for name, column in given.items()}
    for name, column in (*checked.items(), ("weight", weights)):
        if np.shape(column) not in ((), losses.shape):
            raise LawError(
                f"{name} has the shape {np.shape(column)} and loss {losses.shape}, but all columns "
                "must have one length, or be a single number."
            )
    ones = np.ones(len(losses))
    return Table({name: ones * column for name, column in checked.items()}, losses, weights)


def _check_starts(
    form: Form, starts: int | Sequence[AnyForm], ranges: Mapping[str, tuple[float, float]]
) -> None:
    if isinstance(starts, int):
        if starts < 1:
            raise LawError(f"starts is {starts}, but must be at least 1; the nearest is 1.")
    elif not starts:
        raise LawError("starts is empty, but a fit needs at least 1 start.")
    elif any(not isinstance(each, form.kind) for each in starts):
        raise LawError("starts holds a law of another kind than the one to fit.")
    for name, (least, most) in ranges.items():
        if name not in form.names:
            raise LawError(
                f"ranges names {name!r}, but the coefficients are {', '.join(form.names)}."
            )
        if not (math.isfinite(least) and math.isfinite(most) and least <= most):
            raise LawError(
                f"the range of {name} is {least:g} to {most:g}, but must ascend and be finite."
            )


def _by_terms(
    terms: Posynomial,
    form: Form,
    table: Table,
    width: float,
    starts: int | Sequence[AnyForm],
    generator: np.random.Generator,
    progress: Callable[[int, int], None] | None,
) -> Ends:
    """Descend with the terms of the law."""
    logs = np.log(table.loss)
    problem = Problem.of(terms, logs, table.weight, width)
    held = {name: form.rest[name] for name in form.held}

    def point(values: Mapping[str, float]) -> FloatArray:
        return terms.point({**held, **values})

    if isinstance(starts, int):
        first = starting_points(terms, float(np.median(logs)), starts, generator)
    else:
        first = np.array([point({n: getattr(law, n) for n in form.names}) for law in starts])
    if form.given is not None:
        one = point(dict(zip(form.names, form.given.tolist(), strict=True)))
        first = np.concatenate([one[None], first])
    found = descend(problem, first, progress=progress)
    raw = [terms.raw(end) for end in found.points]
    order = [terms.names.index(name) for name in form.names]
    sides = 1.0 * (found.points >= terms.upper) - 1.0 * (found.points <= terms.lower)
    return Ends(
        np.array([[values[name] for name in form.names] for values in raw]),
        found.value,
        found.gradient,
        found.converged,
        sides[:, order],
        float(problem.rounding[0]),
    )


def _first(
    form: Form,
    task: Task,
    starts: int | Sequence[AnyForm],
    ranges: Mapping[str, tuple[float, float]],
    generator: np.random.Generator,
) -> FloatArray:
    """Return the starts: the given ones, and random ones, each the best of some draws."""
    first = [] if form.given is None else [form.given]
    if isinstance(starts, int):
        for _ in range(starts):
            draws = form.draw(_DRAWS, ranges, generator)
            value = task.value(draws)
            if np.isfinite(value).any():
                first.append(draws[np.argmin(value)])
    else:
        first += [form.point(law) for law in starts]
    points = np.array(first).reshape(-1, len(form.names))
    points = points[np.isfinite(task.value(points))]
    if not len(points):
        raise LawError(
            "the law has no value at any start; give laws as starts, or ranges for its "
            f"coefficients {', '.join(form.names)}."
        )
    return points


def _by_values(
    form: Form, task: Task, first: FloatArray, progress: Callable[[int, int], None] | None
) -> Ends:
    """Descend with the values of the law."""
    found = descend_any(task, first, vanishing=form.vanishing, progress=progress)
    sides = 1.0 * (found.points >= form.upper) - 1.0 * (found.points <= form.lower)
    return Ends(*found, sides, float(task.rounding[0]))
