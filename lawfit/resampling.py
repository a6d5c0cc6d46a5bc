"""Refits of a law to runs that might have been: intervals, bands and draws that rest on them.

Every refit goes to its own optimum, and is counted as not converged where it does not get there.
Refits that stop early stay near the fit, and their intervals are far too narrow; `mode="paper"`
stops early on purpose, to show by how much.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np

from lawfit._descent import Found, Problem, descend
from lawfit._refit import AtOptimum, at_optimum
from lawfit._values import FloatArray, LawError
from lawfit.ensemble import LawEnsemble
from lawfit.refits import Bootstrap
from lawfit.result import MAX_DRAWS, FitResult

__all__ = ["bootstrap"]

Progress = Callable[[int, int], None]

_HARDLY = 0.5
"""Share of refits that must converge before more are made to replace the others."""

GROUPS = 500
"""Most fits without some of the runs, for the acceleration of BCa."""


def bootstrap(
    found: FitResult,
    *,
    kind: Literal["wild", "pairs"] = "wild",
    draws: int = 500,
    seed: int = 0,
    mode: Literal["converged", "paper"] = "converged",
    progress: Progress | None = None,
) -> Bootstrap:
    """Fit the law again to runs that might have been.

    Parameters
    ----------
    found : FitResult
        The fit.
    kind : {"wild", "pairs"}
        "wild": the same runs, their ``log L`` the fitted one plus or minus the residual of the run
        with equal chance (Rademacher signs; Liu, Ann. Stat. 16:1696, 1988), after division by
        ``1 - leverage`` (HC3; Davidson and Flachaire, J. Econometrics 146:162, 2008). "pairs": as
        many runs as there are, drawn with replacement; for designs that were not planned.
    draws : int
        Refits, 1 to 100000.
    seed : int
        Of the generator; the same seed and number give the same refits.
    mode : {"converged", "paper"}
        "converged": each refit descends from the fit to an optimum by the rules of `fit`, and does
        not count where it fails. "paper": the fit itself and each refit from it take SciPy's
        L-BFGS-B with its default tolerances and the sum objective, and count however early they
        stop. Its intervals have about the widths that arXiv 2608.10605, Table 2, prints, and next
        to no coverage.
    progress : callable, optional
        Called with the refits that have ended, and their number.

    Raises
    ------
    LawError
        An argument is illegal, or no coefficient is free.
    """
    if not 1 <= draws <= MAX_DRAWS:
        near = min(max(draws, 1), MAX_DRAWS)
        raise LawError(f"draws is {draws}, but must be 1 to {MAX_DRAWS}; the nearest is {near}.")
    if kind not in ("wild", "pairs"):
        raise LawError(f"kind is {kind!r}, but must be 'wild' or 'pairs'.")
    if mode not in ("converged", "paper"):
        raise LawError(f"mode is {mode!r}, but must be 'converged' or 'paper'.")
    fit = at_optimum(found)
    if not fit.free.any() or fit.freedom < 1:
        raise LawError(
            f"{len(fit.residual)} runs leave nothing to resample: the fit has "
            f"{int(fit.free.sum())} free coefficients, and needs at least 1, and more runs."
        )
    refit = _refit
    if mode == "paper":
        from lawfit._early_stop import early_fit, early_stops

        fit, refit = early_fit(found, seed), early_stops
    target, weight = _resampled(fit, kind, draws, np.random.default_rng(seed))
    refits = _from(fit, target, weight, refit, progress)
    without = fit.problem.weight[0] * all_but_a_group(len(fit.residual), seed)
    jackknife = _from(fit, fit.problem.log_loss, without, refit, None)
    counts = np.ones(draws, dtype=bool) if mode == "paper" else refits.converged
    form = fit.form
    points = refits.points[counts]
    moving = form.lower < form.upper
    bound = ((points <= form.lower) | (points >= form.upper)) & moving
    free = np.array([form.free(point) for point in points], dtype=bool).reshape(bound.shape)
    vanished = moving & ~free & ~bound

    held = found.fixed

    def raw(each: FloatArray) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple({**form.raw(x), **held}.values()) for x in each)

    return Bootstrap(
        fit=found,
        kind=kind,
        mode=mode,
        seed=seed,
        names=form.names,
        values=raw(points),
        at_bound=tuple(tuple(row) for row in bound.tolist()),
        vanished=tuple(tuple(row) for row in vanished.tolist()),
        draws=draws,
        not_converged=int((~refits.converged).sum()),
        gradient_median=float(np.median(refits.gradient)),
        gradient_largest=float(refits.gradient.max()),
        jackknife=raw(jackknife.points),
        jackknife_not_converged=int((~jackknife.converged).sum()),
        estimate=raw(fit.point[None])[0],
        objective=float(fit.problem.value(fit.point[None])[0]),
    )


def refitted_ensemble(
    found: FitResult, kind: Literal["wild", "pairs"], draws: int, seed: int
) -> LawEnsemble:
    """Return the laws of exactly so many converged refits; see `FitResult.ensemble`.

    They are the first that converge of a longer bootstrap of the same seed.
    """
    asked = draws
    while True:
        way = bootstrap(found, kind=kind, draws=asked, seed=seed)
        if len(way) >= draws:
            return way.ensemble().first(draws)
        more = math.ceil(1.05 * asked * draws / max(len(way), 1)) + 1
        if len(way) < _HARDLY * asked or more > MAX_DRAWS:
            raise LawError(
                f"only {len(way)} of {asked} refits converged, too few to draw {draws} laws from; "
                'draw with method="laplace", or fit a law with fewer coefficients.'
            )
        asked = more


def _resampled(
    fit: AtOptimum, kind: str, draws: int, generator: np.random.Generator
) -> tuple[FloatArray, FloatArray]:
    """Return the ``log L`` and the weights of resampled runs, one row or one of each refit."""
    rows, weight = len(fit.residual), fit.problem.weight
    if kind == "pairs":
        counts = generator.multinomial(rows, np.full(rows, 1.0 / rows), draws)
        return fit.problem.log_loss, np.asarray(weight * counts)
    sign = 2.0 * generator.integers(0, 2, (draws, rows)) - 1.0
    return fit.log_loss + sign * fit.wild_residuals(), weight


def all_but_a_group(runs: int, seed: int) -> FloatArray:
    """Return flags of shape (groups, runs), 0 where a run is in the group, at random.

    Groups are of one run up to `GROUPS` runs. With influences that are independent their sums over
    m runs are less skew by ``sqrt(m)``, and there are m times fewer: BCa's acceleration, skewness
    over ``6 sqrt(groups)``, is the same.
    """
    if runs <= GROUPS:
        return 1.0 - np.eye(runs)
    order = np.random.default_rng([seed, 2]).permutation(runs)
    flags = np.ones((GROUPS, runs))
    flags[order % GROUPS, np.arange(runs)] = 0.0
    return flags


def _from(
    fit: AtOptimum,
    target: FloatArray,
    weight: FloatArray,
    refit: Callable[[Problem, FloatArray, Progress | None], Found],
    progress: Progress | None,
) -> Found:
    """Refit from the optimum to each row of targets or weights."""
    problem = fit.problem._replace(log_loss=target, weight=weight)
    starts = np.repeat(fit.point[None], max(len(target), len(weight)), axis=0)
    return refit(problem, starts, progress)


def _refit(problem: Problem, starts: FloatArray, progress: Progress | None) -> Found:
    """Descend from points near an optimum; one that fails tries from a larger half-width."""
    found = descend(problem, starts, warm=True, progress=progress)
    lost = np.flatnonzero(~found.converged)
    if lost.size and math.isfinite(problem.delta):
        again = descend(problem.at(lost), starts[lost])
        for old, new in zip(found, again, strict=True):
            old[lost] = new
    return found
