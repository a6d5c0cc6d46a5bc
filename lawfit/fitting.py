"""Fits of laws to runs: the minimum of a robust sum objective, from many starts.

A fit says of itself whether it is the optimum: by the projected gradient and by the number of
starts that agree, and not by the word of an optimizer (:mod:`lawfit._descent`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from lawfit._covariance import sandwich
from lawfit._descent import Found, Problem, descend
from lawfit._misfit import Optimum, remarks
from lawfit._posynomial import Posynomial, posynomial
from lawfit._values import FloatArray, LawError
from lawfit._verdict import (
    agreeing,
    best_end,
    doubts,
    provenance,
    starts_needed,
    weighted_rms,
)
from lawfit.laws import AnyLaw, ChinchillaLaw, JointLaw, PerSplitLaw
from lawfit.result import Coefficient, Covariance, FitResult
from lawfit.runs import Remark, Runs, held_out
from lawfit.validity import ValidRange

__all__ = ["fit", "starting_points"]

KINDS: Mapping[str, type[JointLaw] | type[PerSplitLaw] | type[ChinchillaLaw]] = {
    "joint": JointLaw,
    "per_split": PerSplitLaw,
    "chinchilla": ChinchillaLaw,
}

_FLAT = 1e-9
"""Range of ``log L`` below which the losses of runs are all the same."""


def fit(
    law: str | type[JointLaw | PerSplitLaw | ChinchillaLaw] | AnyLaw,
    runs: Runs,
    *,
    objective: Literal["huber", "least_squares"] = "huber",
    delta: float = 1e-3,
    starts: int | Sequence[AnyLaw] = 100,
    holdout: str | Sequence[str] | None = None,
    outliers: str | Sequence[str] | None = None,
    fixed: Mapping[str, float] | None = None,
    noise: float | None = None,
    rng: int | np.random.Generator = 0,
    progress: Callable[[int, int], None] | None = None,
) -> FitResult:
    """Fit a law to runs: minimise ``sum_r weight_r h(log L(x_r) - log L_r)``.

    Parameters
    ----------
    law : str, class or law
        The form: "joint", "per_split", "chinchilla", the class, or a law, whose coefficients are
        then one more start. `PerSplitLaw` by name or class takes the one expert split of the runs.
    runs : Runs
        What to fit.
    objective : {"huber", "least_squares"}
        ``h``: Huber's function, or half the square.
    delta : float
        Half-width of Huber's function in ``log L`` [-], above 0. Hoffmann et al. (arXiv
        2203.15556) use 1e-3, which for residuals of 1e-2 is nearly least absolute deviations; at
        1e-8 it is. The fit depends on it: state it with the coefficients.
    starts : int or sequence of laws
        How many random starts, or the starts themselves.
    holdout : str, sequence of str or None
        Runs to keep out of the fit; see `held_out`.
    outliers : str, sequence of str or None
        Runs to drop before anything else: "highest:5", the five of highest loss (what
        Besiroglu et al., arXiv 2404.10102, drop), the ids themselves, or None. Runs that lie far
        off the fit are named in the warnings, and stay.
    fixed : mapping, optional
        Fields of the law to hold, with their values.
    noise : float, optional
        Known standard deviation of ``log L`` between seeds [-], of a run of weight 1 (that of
        weight w has ``noise / sqrt(w)``), for the test of fit.
    rng : int or numpy.random.Generator
        Of the random starts.
    progress : callable, optional
        Called with the starts that have ended, and their number.

    Returns
    -------
    FitResult
        Law, coefficients, whether the fit converged, and its warnings.

    Raises
    ------
    LawError
        An argument is illegal, fewer runs are left than the law has coefficients, or they all
        have one loss.
    """
    width = width_of(objective, delta)
    if noise is not None and not (math.isfinite(noise) and noise > 0):
        raise LawError(f"noise is {noise:g}, but must be a finite number above 0, such as 0.003.")
    dropped, outlier_rule = _dropped(runs, outliers)
    kept = runs.where(~dropped)
    out = held_out(kept, holdout)
    train = kept.where(~out)
    prototype = _prototype(law, train)
    logs = train.logs()
    if np.ptp(logs.loss) < _FLAT:
        raise LawError(
            f"the losses of all {len(train)} runs are {train.loss[0]:g}, so they say nothing of a "
            "law; a fit needs runs that differ."
        )
    form = posynomial(prototype, logs.variables, logs.loss, fixed)
    _check_levels(form)
    moving = int((form.lower < form.upper).sum())
    if len(train) < moving:
        raise LawError(
            f"{len(train)} runs are left for {moving} coefficients, but a fit needs at least as "
            f"many runs; the nearest legal number is {moving}."
        )
    problem = Problem.of(form, logs.loss, train.column("weight"), width)
    first = _starts(form, starts, float(np.median(logs.loss)), rng)
    if not isinstance(law, str | type):
        first = np.concatenate([[form.point(law.model_dump())], first])
    found = descend(problem, first, progress=progress)
    return _result(
        problem,
        found,
        prototype,
        train,
        held=kept.where(out) if out.any() else None,
        fixed=dict(fixed or {}),
        noise=noise,
        objective=objective,
        holdout_rule=_holdout_rule(holdout, int(out.sum())),
        outlier_rule=outlier_rule,
        remarks_of_table=runs.remarks,
    )


def _check_levels(form: Posynomial) -> None:
    """Refuse runs that say nothing at all of an exponent."""
    for k in range(form.terms, len(form.names)):
        # the levels differ by rounding alone; a term whose prefactor is fixed is not centred
        if form.lower[k] < form.upper[k] and np.ptp(form.design[:, :, k], axis=1).max() < 1e-9:
            terms = [form.names[t] for t, own in enumerate(form.own) if k in own]
            raise LawError(
                f"what the exponent {form.names[k]} acts on is the same in all runs, so they say "
                f"nothing of it; hold it and {', '.join(terms)} with fixed, or add other runs."
            )


def starting_points(
    form: Posynomial, middle: float, number: int, generator: np.random.Generator
) -> FloatArray:
    """Return random starts, shape (number, parameters).

    The terms at the centre share a loss of ``exp(middle)`` evenly at random (Dirichlet);
    exponents that must be above 0 are log-uniform on 0.03 to 1, others uniform on -0.3 to 1.2.
    """
    shares = generator.dirichlet(np.ones(form.terms), number)
    above = form.lower[form.terms :] > 0.0
    unit = generator.random((number, len(above)))
    exponents = np.where(above, np.exp(np.log(0.03) * (1.0 - unit)), 1.5 * unit - 0.3)
    points = np.concatenate([np.log(shares + 1e-4) + middle, exponents], axis=1)
    return np.asarray(np.clip(points, form.lower, form.upper))


def _result(
    problem: Problem,
    found: Found,
    prototype: AnyLaw,
    train: Runs,
    *,
    held: Runs | None,
    fixed: dict[str, float],
    noise: float | None,
    objective: Literal["huber", "least_squares"],
    holdout_rule: str,
    outlier_rule: str,
    remarks_of_table: tuple[Remark, ...],
) -> FitResult:
    form = problem.form
    ends = found.value, found.converged, float(problem.rounding[0])
    best = best_end(*ends, by=found.value)
    point, stationary = found.points[best], bool(found.converged[best])
    gradient = float(found.gradient[best])
    starts, agree = len(found.value), agreeing(*ends, best)
    warnings = [*remarks_of_table]
    warnings += doubts(stationary, gradient, agree, starts, "ask for more starts")
    log_loss, slopes, _ = form.slopes(point[None])
    residual = log_loss[0] - problem.log_loss[0]
    optimum = Optimum(form, point, form.free(point), slopes[0], residual)
    warnings += remarks(optimum, train, noise)
    covariance = _covariance(optimum, problem)
    if covariance is None and optimum.free.any():
        sentence = "The information at the optimum is singular, so there is no covariance."
        warnings.append(Remark(reason="no_covariance", sentence=sentence))
    values = {**form.raw(point), **fixed}
    law = type(prototype).model_validate(
        {
            **prototype.model_dump(),
            **values,
            "source": provenance(len(train), train.source, problem.delta, "log L"),
            "convention": train.convention,
            "valid_range": _range(train),
        }
    )
    rmse_train = _rmse(law, train)
    rmse_holdout = None if held is None else _rmse(law, held)
    if rmse_holdout is not None and rmse_holdout > 2.0 * rmse_train:
        sentence = (
            f"The runs held out miss by {rmse_holdout:.3g} nats/token, more than twice the "
            f"{rmse_train:.3g} of the runs of the fit: do not trust the law beyond them."
        )
        warnings.append(Remark(reason="holdout_misses", sentence=sentence))
    total, active, tokens, split = train.logs().variables.mean(axis=1).tolist()
    return FitResult(
        law=law,
        coefficients={
            name: Coefficient(
                value=values[name], at_bound=_side(form, point, k), fixed=name in fixed
            )
            for k, name in enumerate(form.names)
        },
        objective=float(found.value[best]),
        loss_function=objective,
        delta=problem.delta if objective == "huber" else None,
        converged=stationary and agree >= starts_needed(starts),
        gradient_norm=gradient,
        starts=starts,
        starts_agreeing=agree,
        n_train=len(train),
        n_holdout=0 if held is None else len(held),
        rmse_train=rmse_train,
        rmse_holdout=rmse_holdout,
        held_out=() if held is None else held.id,
        holdout_rule=holdout_rule,
        outlier_rule=outlier_rule,
        convention=train.convention,
        warnings=tuple(warnings),
        covariance=covariance,
        centre=(total, active, tokens, split),
        train=train,
        held=held,
    )


def _side(form: Posynomial, point: FloatArray, k: int) -> Literal["lower", "upper"] | None:
    if form.lower[k] == form.upper[k] or form.lower[k] < point[k] < form.upper[k]:
        return None
    return "lower" if point[k] <= form.lower[k] else "upper"


def _covariance(optimum: Optimum, problem: Problem) -> Covariance | None:
    """Return the sandwich of the free coefficients; prefactors by their logarithms."""
    form, free = optimum.form, optimum.free
    found = sandwich(optimum.slopes[:, free], optimum.residual, problem.weight[0], problem.delta)
    if found is None:
        return None
    raw = form.raw_map()[:, free]
    raw = raw @ found @ raw.T
    # a held parameter has no variance of its own, and what the others lend its prefactor is theirs
    kept = np.flatnonzero(free)
    names = [f"log {form.names[k]}" if k < form.terms else form.names[k] for k in kept]
    matrix = raw[np.ix_(kept, kept)]
    matrix = 0.5 * (matrix + matrix.T)
    return Covariance(names=tuple(names), matrix=tuple(tuple(row) for row in matrix.tolist()))


def _rmse(law: AnyLaw, runs: Runs) -> float:
    return weighted_rms(law.loss(**runs.point()) - runs.column("loss"), runs.column("weight"))


def _range(runs: Runs) -> ValidRange:
    total, active = runs.column("n_total"), runs.column("n_active")
    tokens = runs.column("tokens")

    def ends(values: FloatArray) -> tuple[float, float]:
        return float(values.min()), float(values.max())

    return ValidRange(
        n_total=ends(total),
        n_active=ends(active),
        sparsity=ends(1.0 - active / total),
        expert_split=ends(runs.column("expert_split")),
        tokens=ends(tokens),
        tokens_per_parameter=ends(tokens / active),
    )


def width_of(objective: str, delta: float) -> float:
    """Return the half-width of the loss function, inf for least squares, checked."""
    if objective == "least_squares":
        return math.inf
    if objective != "huber":
        raise LawError(f"objective is {objective!r}, but must be 'huber' or 'least_squares'.")
    if not (math.isfinite(delta) and delta > 0):
        raise LawError(
            f"delta is {delta:g}, but must be a finite number above 0; the one in use is 0.001."
        )
    return delta


def _prototype(
    law: str | type[JointLaw | PerSplitLaw | ChinchillaLaw] | AnyLaw, runs: Runs
) -> AnyLaw:
    """Return a law of the kind, its coefficients without meaning."""
    splits = sorted(set(runs.expert_split))
    if isinstance(law, JointLaw | PerSplitLaw | ChinchillaLaw):
        if isinstance(law, PerSplitLaw) and splits != [law.expert_split]:
            raise LawError(
                f"the runs have expert splits {', '.join(f'{x:g}' for x in splits)}, but this law "
                f"holds at {law.expert_split:g} only."
            )
        return law
    kind = KINDS.get(law) if isinstance(law, str) else law
    if kind is None or kind not in KINDS.values():
        said = repr(law) if isinstance(law, str) else getattr(law, "__name__", type(law).__name__)
        raise LawError(
            f"law is {said}, but fit takes one of {', '.join(KINDS)}, by name, class or value; "
            "fit_general fits the class of any other law."
        )
    fields: dict[str, float] = {
        name: 1.0 for name, field in kind.model_fields.items() if field.annotation is float
    }
    if kind is PerSplitLaw:
        if len(splits) > 1:
            raise LawError(
                f"the runs have {len(splits)} expert splits, but PerSplitLaw is for one; fit "
                "each with Runs.where, or JointLaw."
            )
        fields["expert_split"] = splits[0]
    return kind.model_validate({**fields, "source": "a form without coefficients"})


def _starts(
    form: Posynomial,
    starts: int | Sequence[AnyLaw],
    middle: float,
    rng: int | np.random.Generator,
) -> FloatArray:
    if not isinstance(starts, int):
        if not starts:
            raise LawError("starts is empty, but a fit needs at least 1 start.")
        if any(not set(form.names) <= set(type(each).model_fields) for each in starts):
            raise LawError("starts holds a law of another kind than the one to fit.")
        return np.array([form.point(each.model_dump()) for each in starts])
    if starts < 1:
        raise LawError(f"starts is {starts}, but must be at least 1; the nearest is 1.")
    return starting_points(form, middle, starts, np.random.default_rng(rng))


def _dropped(
    runs: Runs, rule: str | Sequence[str] | None
) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.bool_]], str]:
    """Return which runs are dropped, and the rule in words."""
    out = np.zeros(len(runs), dtype=bool)
    if rule is None:
        return out, "none dropped"
    if not isinstance(rule, str):
        unknown = sorted(set(rule) - set(runs.id))
        if unknown:
            raise LawError(f"outliers names {unknown[0]!r}, which is the id of no run.")
        return np.isin(np.array(runs.id), list(rule)), f"dropped by name: {', '.join(rule)}"
    kind, _, text = rule.partition(":")
    if kind != "highest" or not text.isdigit() or not 0 < int(text) < len(runs):
        raise LawError(
            f"outliers is {rule!r}, but must be 'highest:' with a number of runs from 1 to "
            f"{len(runs) - 1}, such as 'highest:5', or the ids of runs."
        )
    out[np.argsort(-runs.column("loss"), kind="stable")[: int(text)]] = True
    names = ", ".join(name for name, drop in zip(runs.id, out, strict=True) if drop)
    return out, f"dropped the {int(text)} of highest loss: {names}"


def _holdout_rule(rule: str | Sequence[str] | None, number: int) -> str:
    if rule is None:
        return "none held out"
    if not isinstance(rule, str):
        return f"{number} runs held out by name"
    share = f"{float(rule.partition(':')[2]):g}"
    if rule.startswith("nact"):
        return f"{number} runs: the share {share} with most active parameters, at each expert split"
    return f"{number} runs: the share {share} with most compute 6 N_act D"
