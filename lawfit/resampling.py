"""Refits of a law to runs that might have been: intervals, bands and draws that rest on them.

Every refit goes to its own optimum, and is counted as not converged where it does not get there.
Refits that stop early stay near the fit, and their intervals are far too narrow; `mode="paper"`
stops early on purpose, to show by how much.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from lawfit._descent import Found, Problem, descend
from lawfit._refit import AtOptimum, at_optimum
from lawfit._values import FloatArray, LawError, Quantity
from lawfit.ensemble import LawEnsemble
from lawfit.result import MAX_DRAWS, FitResult
from lawfit.runs import Remark

__all__ = ["Bootstrap", "CoefficientInterval", "bootstrap"]

Progress = Callable[[int, int], None]

_LEAST_REFITS = 20
"""Converged refits below which no interval is given."""

_SHARE_LOST = 0.05
"""Share of refits that did not converge, from which an interval says so."""


class CoefficientInterval(BaseModel):
    """Where a coefficient lies, with a stated confidence.

    Attributes
    ----------
    name : str
        The coefficient.
    low, high : float
        Ends, in the units of the law.
    level : float
        Nominal coverage [-].
    method : {"percentile", "bca"}
        How the ends were taken from the refits.
    remarks : tuple of Remark
        What speaks against reading it as it stands: ``boundary``, ``vanished``, ``refits_lost``,
        ``not_converged``, ``no_bca``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    low: float
    high: float
    level: float
    method: Literal["percentile", "bca"]
    remarks: tuple[Remark, ...]


class Bootstrap(BaseModel):
    """Refits of one fit.

    Attributes
    ----------
    fit : FitResult
        What was refitted.
    kind : {"wild", "pairs"}
        How runs were made.
    mode : {"converged", "paper"}
        How they were refitted.
    seed : int
        Of the generator.
    names : tuple of str
        Coefficients, in the order of `values`.
    values : tuple of tuple of float
        Of each refit that counts, in the units of the law: those that converged, or all of them
        where ``mode`` is "paper".
    at_bound : tuple of tuple of bool
        Of each refit, which coefficients stand at a bound.
    vanished : tuple of tuple of bool
        And which are exponents of a term that vanished, and mean nothing.
    draws, not_converged : int
        Refits made, and those of them that did not reach a stationary point.
    gradient_median, gradient_largest : float
        Of the relative projected gradient over all refits [-].
    jackknife : tuple of tuple of float
        The coefficients without each run in turn.
    estimate : tuple of float
        The coefficients that the refits started from: those of the fit, or in mode "paper" of one
        that stopped early.
    objective : float
        Of the fit's runs there [-].
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    basis: ClassVar[Literal["FITTED"]] = "FITTED"

    fit: FitResult
    kind: Literal["wild", "pairs"]
    mode: Literal["converged", "paper"]
    seed: int
    names: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]
    at_bound: tuple[tuple[bool, ...], ...]
    vanished: tuple[tuple[bool, ...], ...]
    draws: int
    not_converged: int
    gradient_median: float
    gradient_largest: float
    jackknife: tuple[tuple[float, ...], ...]
    estimate: tuple[float, ...]
    objective: float

    def __len__(self) -> int:
        """Return the number of refits that count."""
        return len(self.values)

    def coefficients(self, name: str) -> FloatArray:
        """Return one coefficient of every refit that counts, shape (refits,).

        Raises
        ------
        LawError
            The law has no such coefficient.
        """
        return np.array([row[self._at(name)] for row in self.values])

    def interval(
        self,
        name: str,
        *,
        level: float = 0.95,
        method: Literal["percentile", "bca"] = "percentile",
    ) -> CoefficientInterval:
        """Return the interval of one coefficient.

        Percentiles are those of the refits. BCa (Efron, J. Am. Stat. Assoc. 82:171, 1987) moves
        them by the bias and the acceleration, the latter from refits without each run in turn; of
        a prefactor both are in its logarithm. Near a boundary and along ridges BCa falls short of
        its level, and percentiles do not: see the page on intervals.

        Parameters
        ----------
        name : str
            A coefficient.
        level : float
            Nominal coverage, between 0 and 1.
        method : {"percentile", "bca"}
            As above.

        Raises
        ------
        LawError
            The name or the level is illegal, or fewer than 20 refits count.
        """
        level = _level(level)
        if method not in ("percentile", "bca"):
            raise LawError(f"method is {method!r}, but must be 'percentile' or 'bca'.")
        values = self.coefficients(name)
        if len(values) < _LEAST_REFITS:
            raise LawError(
                f"{len(values)} of {self.draws} refits converged, but an interval needs at least "
                f"{_LEAST_REFITS}."
            )
        ends = np.array([0.5 - 0.5 * level, 0.5 + 0.5 * level])
        remarks = self._remarks(name)
        taken = method
        if method == "bca":
            moved = self._bca(name, values, ends)
            if moved is None:
                taken = "percentile"
                sentence = (
                    f"BCa has no bias or acceleration for {name}, because refits stand at one "
                    "value; these are percentiles."
                )
                remarks.append(Remark(reason="no_bca", sentence=sentence))
            else:
                ends = moved
        low, high = np.quantile(values, ends)
        return CoefficientInterval(
            name=name,
            low=float(low),
            high=float(high),
            level=level,
            method=taken,
            remarks=tuple(remarks),
        )

    def band(
        self,
        *,
        n_total: Quantity,
        n_active: Quantity,
        tokens: Quantity,
        expert_split: Quantity = 1.0,
        level: float = 0.95,
        of: Literal["mean", "run"] = "mean",
    ) -> tuple[FloatArray, FloatArray]:
        """Return where the loss lies at points, as percentiles over the refits.

        Parameters
        ----------
        n_total, n_active, tokens, expert_split : float or ndarray
            As `ScalingLaw.loss` takes them; they broadcast.
        level : float
            Nominal coverage, between 0 and 1, of each point by itself.
        of : {"mean", "run"}
            The expected loss, or that of one run more, whose noise is drawn from the residuals
            (HC2) of the fit.

        Returns
        -------
        low, high : ndarray
            Loss [nats/token].

        Raises
        ------
        LawError
            An argument is illegal.
        """
        level = _level(level)
        if of not in ("mean", "run"):
            raise LawError(f"of is {of!r}, but must be 'mean' or 'run'.")
        point = {"n_total": n_total, "n_active": n_active, "tokens": tokens}
        laws = self.ensemble().laws
        losses = np.array(
            [np.asarray(law.loss(**point, expert_split=expert_split)) for law in laws]
        )
        if of == "run":
            noise = at_optimum(self.fit).noise_residuals()
            drawn = np.random.default_rng(self.seed).choice(noise, losses.shape)
            losses = losses * np.exp(drawn)
        low, high = np.quantile(losses, [0.5 - 0.5 * level, 0.5 + 0.5 * level], axis=0)
        return np.asarray(low), np.asarray(high)

    def ensemble(self) -> LawEnsemble:
        """Return the refits as draws of the law, equally likely.

        Raises
        ------
        LawError
            No refit counts.
        """
        if not self.values:
            raise LawError(f"none of {self.draws} refits converged, so there is nothing to draw.")
        law = self.fit.law
        return LawEnsemble(
            laws=tuple(
                law.model_copy(update=dict(zip(self.names, row, strict=True)))
                for row in self.values
            ),
            source=law.source,
            method=f"{self.kind} bootstrap of {len(self.fit.train)} runs, {self.mode} refits",
            basis="FITTED",
            seed=self.seed,
        )

    def _at(self, name: str) -> int:
        if name not in self.names:
            raise LawError(f"name is {name!r}, but the coefficients are {', '.join(self.names)}.")
        return self.names.index(name)

    def _remarks(self, name: str) -> list[Remark]:
        at, found = self._at(name), []
        bound = sum(row[at] for row in self.at_bound)
        if bound:
            sentence = (
                f"{name} stands at a bound of the fit in {bound} of {len(self)} refits, so the "
                "interval ends at the bound there and its coverage is not the nominal one."
            )
            found.append(Remark(reason="boundary", sentence=sentence))
        gone = sum(row[at] for row in self.vanished)
        if gone:
            sentence = (
                f"The term of {name} vanished in {gone} of {len(self)} refits, where the exponent "
                "means nothing; it counts there with the value at which the term vanished."
            )
            found.append(Remark(reason="vanished", sentence=sentence))
        if self.not_converged:
            share = self.not_converged / self.draws
            reason = "not_converged" if self.mode == "paper" else "refits_lost"
            sentence = f"{self.not_converged} of {self.draws} refits did not converge"
            sentence += (
                ", and count all the same: the interval is too narrow."
                if self.mode == "paper"
                else " and are left out."
            )
            if self.mode == "paper" or share > _SHARE_LOST:
                found.append(Remark(reason=reason, sentence=sentence))
        return found

    def _bca(self, name: str, values: FloatArray, ends: FloatArray) -> FloatArray | None:
        """Return the moved ends of BCa, or None where it has none."""
        from scipy.special import ndtr, ndtri

        at = self._at(name)
        form = at_optimum(self.fit).form
        estimate = self.estimate[at]
        left = np.array([row[at] for row in self.jackknife])
        if name in form.names[: form.terms]:
            left = np.log(left)
        below = np.mean(values < estimate) + 0.5 * np.mean(values == estimate)
        pull = left.mean() - left
        spread = float((pull * pull).sum())
        if not 0.0 < below < 1.0 or not spread > 0.0:
            return None
        acceleration = float((pull**3).sum()) / (6.0 * spread**1.5)
        bias = float(ndtri(below))
        z = bias + ndtri(ends)
        scale = 1.0 - acceleration * z
        if not (scale > 0.0).all():
            return None
        return np.asarray(ndtr(bias + z / scale))


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
    without = fit.problem.weight[0] * (1.0 - np.eye(len(fit.residual)))
    jackknife = _from(fit, fit.problem.log_loss, without, refit, None)
    counts = np.ones(draws, dtype=bool) if mode == "paper" else refits.converged
    form = fit.form
    points = refits.points[counts]
    moving = form.lower < form.upper
    bound = ((points <= form.lower) | (points >= form.upper)) & moving
    vanished = np.array([moving & ~form.free(point) for point in points], dtype=bool) & ~bound

    def raw(each: FloatArray) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple({**form.raw(x), **fixed}.values()) for x in each)

    fixed = {name: each.value for name, each in found.coefficients.items() if each.fixed}
    return Bootstrap(
        fit=found,
        kind=kind,
        mode=mode,
        seed=seed,
        names=form.names,
        values=raw(points),
        at_bound=tuple(tuple(row) for row in bound.tolist()),
        vanished=tuple(tuple(row) for row in vanished.reshape(bound.shape).tolist()),
        draws=draws,
        not_converged=int((~refits.converged).sum()),
        gradient_median=float(np.median(refits.gradient)),
        gradient_largest=float(refits.gradient.max()),
        jackknife=raw(jackknife.points),
        estimate=raw(fit.point[None])[0],
        objective=float(fit.problem.value(fit.point[None])[0]),
    )


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


def _level(level: float) -> float:
    if not 0.0 < level < 1.0:
        raise LawError(f"level is {level:g}, but must lie between 0 and 1, such as 0.95.")
    return level
