"""What speaks against a fit, in words: bounds, trading coefficients, designs, lack of fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lawfit._posynomial import Posynomial
from lawfit._values import FloatArray
from lawfit.runs import Remark, Runs

CONDITION = 1e4
"""Condition of the scaled information from which coefficients are said to trade off."""

PROBABILITY = 1e-3
"""Chance of a true law failing a test of fit, below which the fit is said to lack."""

OUTLIER = 6.0
"""Robust standard deviations from which a residual is named."""

LEVELS = 3
"""Levels of a covariate that a power law beside a constant needs."""

_TRADES = 0.3
"""Share of a direction from which a coefficient is named in it."""


class Optimum(NamedTuple):
    """A fitted law on its runs.

    Attributes
    ----------
    form : Posynomial
        The parametrisation.
    point : ndarray of shape (parameters,)
        The optimum.
    free : ndarray of bool, shape (parameters,)
        Parameters at no bound and not fixed, of terms that have not vanished.
    slopes : ndarray of shape (runs, parameters)
        Derivatives of ``log L``.
    residual : ndarray of shape (runs,)
        Fitted minus measured ``log L``.
    """

    form: Posynomial
    point: FloatArray
    free: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
    slopes: FloatArray
    residual: FloatArray


def robust_scale(residual: FloatArray) -> float:
    """Return the median size of a residual as a standard deviation, ``1.4826 med |r|``."""
    return float(1.4826 * np.median(np.abs(residual)))


def curvature(residual: FloatArray, weight: FloatArray, delta: float) -> FloatArray:
    """Return weight times ``psi'`` of each run, the curvature of the objective in its residual.

    For a small delta ``psi'`` is a density of the residuals at 0, run by run: it is taken over a
    width of at least ``1.06 s n^(-1/5)`` (Powell, in Barnett et al., Nonparametric and
    Semiparametric Methods, 1991, with Silverman's width). Arrays of shape (runs,).
    """
    if not math.isfinite(delta):
        return weight
    width = max(delta, 1.06 * robust_scale(residual) * len(residual) ** -0.2)
    return np.asarray(weight * (np.abs(residual) <= width) * delta / width)


def remarks(optimum: Optimum, runs: Runs, noise: float | None) -> list[Remark]:
    """Return what speaks against a fit to these runs."""
    found = [*_bounds(optimum), *_levels(optimum), *_fixed_ratio(optimum, runs)]
    found += [*_condition(optimum, runs), *_few(optimum, runs)]
    found += [*_lack_of_fit(optimum, runs, noise), *_outliers(optimum, runs)]
    return found


def _bounds(optimum: Optimum) -> list[Remark]:
    form, point, found = optimum.form, optimum.point, []
    for k, name in enumerate(form.names):
        if form.lower[k] == form.upper[k] or form.lower[k] < point[k] < form.upper[k]:
            continue
        side = "lower" if point[k] <= form.lower[k] else "upper"
        if k < form.terms and side == "lower":
            text = (
                f"The term of {name} vanished: its prefactor stands at the lower bound of the fit"
            )
            text += ", so its exponents mean nothing" if len(form.own[k]) > 1 else ""
        else:
            text = f"{name} stands at the {side} bound of the fit"
            text += f", {point[k]:g}" if k >= form.terms else ""
        sentence = f"{text}; intervals around it are one-sided."
        found.append(Remark(reason="parameter_at_bound", sentence=sentence))
    return found


def _levels(optimum: Optimum) -> list[Remark]:
    form, found = optimum.form, []
    for k in range(form.terms, len(form.names)):
        if form.lower[k] == form.upper[k]:
            continue
        levels = max(_count(form.design[t, :, k]) for t, own in enumerate(form.own) if k in own)
        if levels < LEVELS:
            sentence = (
                f"The runs have {levels} {'level' if levels == 1 else 'levels'} of what the "
                f"exponent {form.names[k]} acts on, but a power law beside a constant needs "
                f"{LEVELS}."
            )
            found.append(Remark(reason="too_few_levels", sentence=sentence))
    return found


def _count(logs: FloatArray) -> int:
    """Return the number of levels, values within 2 % of the one before counted as one."""
    return 1 + int((np.diff(np.sort(logs)) > 0.02).sum())


def _fixed_ratio(optimum: Optimum, runs: Runs) -> list[Remark]:
    tokens = np.log(runs.column("tokens"))
    for name in ("n_active", "n_total"):
        ratio = tokens - np.log(runs.column(name))
        if len(runs) > 1 and ratio.std() <= 0.1 * tokens.std():
            sentence = (
                f"Tokens are {math.exp(float(np.median(ratio))):.3g} per parameter of {name} in "
                "nearly all runs, so that a term in parameters and one in tokens are hardly told "
                "apart; add runs with other tokens per parameter."
            )
            return [Remark(reason="fixed_tokens_per_parameter", sentence=sentence)]
    return []


def _condition(optimum: Optimum, runs: Runs) -> list[Remark]:
    size, direction = condition(optimum, runs.column("weight"))
    return trading(optimum.form.names, size, direction)


def trading(names: Sequence[str], size: float, direction: FloatArray) -> list[Remark]:
    """Return what to say of a condition of the scaled information and its weakest direction."""
    if size < CONDITION:
        return []
    names = [n for n, share in zip(names, direction, strict=True) if share >= _TRADES]
    sentence = (
        f"The runs hardly tell some coefficients apart (condition {size:.2g} of the scaled "
        f"information, over {CONDITION:g}): {', '.join(names)} trade off against each other, and "
        "mean little one at a time."
    )
    return [Remark(reason="ill_conditioned", sentence=sentence)]


def condition(optimum: Optimum, weight: FloatArray) -> tuple[float, FloatArray]:
    """Return the condition of the scaled information, and the sizes of its weakest direction.

    The information is ``sum_r w_r m_r m_r'`` of the free parameters at the centre, scaled to a
    diagonal of 1; the direction has shape (parameters,) and length 1.
    """
    direction = np.zeros(len(optimum.point))
    if not optimum.free.any():
        return 1.0, direction
    size, direction[optimum.free] = condition_of(optimum.slopes[:, optimum.free], weight)
    return size, direction


def condition_of(slopes: FloatArray, weight: FloatArray) -> tuple[float, FloatArray]:
    """Return the same from the slopes of the free parameters, shape (runs, free)."""
    slopes = slopes * np.sqrt(weight)[:, None]
    scale = np.sqrt((slopes * slopes).sum(axis=0))
    slopes = slopes / np.where(scale > 0.0, scale, 1.0)
    values, vectors = np.linalg.eigh(np.einsum("rp,rq->pq", slopes, slopes))
    return float(values[-1] / max(values[0], 1e-300)), np.abs(vectors[:, 0])


def _few(optimum: Optimum, runs: Runs) -> list[Remark]:
    return few(len(runs), int(optimum.free.sum()))


def few(runs: int, free: int) -> list[Remark]:
    """Return what to say of so many runs for so many coefficients."""
    if runs >= 3 * free:
        return []
    sentence = f"{runs} runs fit {free} coefficients; fewer than three each leave little to test."
    return [Remark(reason="too_few_runs", sentence=sentence)]


def _lack_of_fit(optimum: Optimum, runs: Runs, noise: float | None) -> list[Remark]:
    slopes = optimum.slopes[:, optimum.free]
    weight = runs.column("weight")
    return lacking(slopes, optimum.residual, weight, runs.logs().variables, noise)


def lacking(
    slopes: FloatArray,
    residual: FloatArray,
    weight: FloatArray,
    logs: FloatArray,
    noise: float | None,
) -> list[Remark]:
    """Return what to say of residuals of shape (runs,) that chance does not explain.

    ``slopes`` are those of the free parameters, (runs, free); ``logs`` the logarithms of the
    variables, (variables, runs).
    """
    from scipy.special import chdtrc, fdtrc

    runs, free = slopes.shape
    freedom = runs - free
    if freedom < 1 or free == 0:
        return []
    if noise is not None:
        square = float((weight * residual**2).sum()) / noise**2
        if chdtrc(freedom, square) >= PROBABILITY:
            return []
        sentence = (
            f"The residuals are {math.sqrt(square / freedom):.2f} times the noise of {noise:.3g} "
            "in log L that was given, more than chance allows: the form lacks something."
        )
        return [Remark(reason="lack_of_fit", sentence=sentence)]
    # without a known noise: do covariates, squares and products explain the residuals?
    # (Ramsey, J. R. Stat. Soc. B 31:350, 1969; residuals clipped so that no single run decides)
    scale = robust_scale(residual)
    if scale < 1e-12:
        return []
    root = np.sqrt(weight)
    residual = root * np.clip(residual, -3.0 * scale, 3.0 * scale)
    moving = [x - x.mean() for x in logs if _count(x) > 1]
    extra = [root * x for x in moving]
    extra += [root * moving[i] * x for i in range(len(moving)) for x in moving[i:]]
    first = slopes * root[:, None]
    before, rank = _rest(first, residual)
    after, more = _rest(np.column_stack([first, *extra]), residual)
    freedom = runs - more
    if more == rank or freedom < 1:
        return []
    ratio = ((before - after) / (more - rank)) / max(after / freedom, 1e-300)
    if fdtrc(more - rank, freedom, ratio) >= PROBABILITY:
        return []
    sentence = (
        f"The logarithms of the variables, their squares and products explain "
        f"{1.0 - after / before:.0%} of the squared residuals (F = {ratio:.1f} on {more - rank} "
        f"and {freedom}), more than chance allows: the form lacks something."
    )
    return [Remark(reason="lack_of_fit", sentence=sentence)]


def _rest(columns: FloatArray, target: FloatArray) -> tuple[float, int]:
    """Return the sum of squares that columns leave of a target, and their rank."""
    size = np.sqrt((columns * columns).sum(axis=0))
    vectors, values, _ = np.linalg.svd(columns / np.where(size > 0, size, 1.0), full_matrices=False)
    rank = int((values > 1e-8 * values[0]).sum())
    rest = target - vectors[:, :rank] @ (vectors[:, :rank].T @ target)
    return float(rest @ rest), rank


def _outliers(optimum: Optimum, runs: Runs) -> list[Remark]:
    return outlying(optimum.residual, runs.column("weight"), runs.id)


def outlying(
    residual: FloatArray, weight: FloatArray, names: Sequence[str], unit: str = "log L"
) -> list[Remark]:
    """Return what to say of residuals that lie far off all others."""
    sizes = np.abs(residual) * np.sqrt(weight)
    scale = robust_scale(sizes)
    far = np.flatnonzero(sizes > OUTLIER * scale)
    if scale < 1e-12 or not far.size:
        return []
    far = far[np.argsort(-sizes[far], kind="stable")]
    shown = ", ".join(f"{names[k]} ({residual[k]:+.3g})" for k in far[:5])
    more = f" and {far.size - 5} more" if far.size > 5 else ""
    sentence = (
        f"{far.size} of {len(names)} runs lie more than {OUTLIER:g} robust standard deviations "
        f"({scale:.3g} in {unit}) off: {shown}{more}; they stay in the fit."
    )
    return [Remark(reason="outliers", sentence=sentence)]
