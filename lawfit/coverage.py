"""How often intervals hold the truth: simulated, on the design at hand.

A nominal level is a promise. It is kept where the runs are many and the loss bends little in the
coefficients, and broken where coefficients trade off or a term is near zero. `interval_coverage`
simulates runs of a known law at the design of a table, fits each set, and counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from lawfit._intervals import NORMAL, checked_level, student
from lawfit._refit import at_optimum
from lawfit._values import LawError
from lawfit.fitting import fit
from lawfit.laws import AnyLaw
from lawfit.profiling import profile_statistic
from lawfit.refits import LEAST_REFITS, Bootstrap
from lawfit.resampling import bootstrap
from lawfit.result import FitResult
from lawfit.runs import Runs

__all__ = ["Coverage", "CoverageRow", "interval_coverage", "simulated_runs"]

Method = Literal["percentile", "bca", "profile", "covariance", "early_stop"]

METHODS: tuple[Method, ...] = ("percentile", "bca", "profile", "covariance", "early_stop")


class CoverageRow(BaseModel):
    """Coverage of one coefficient by one method.

    Attributes
    ----------
    name : str
        The coefficient.
    method : str
        Of the interval.
    covered, sets : int
        Sets whose interval held the truth, and sets.
    share : float
        Their ratio [-].
    low, high : float
        95 % interval of the share over sets (Wilson, J. Am. Stat. Assoc. 22:209, 1927) [-].
    width : float or None
        Median width of the intervals, of the logarithm for a prefactor; None for "profile", which
        is tested at the truth alone.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    method: Method
    covered: int
    sets: int
    share: float
    low: float
    high: float
    width: float | None


class Coverage(BaseModel):
    """A simulation of coverage.

    Attributes
    ----------
    rows : tuple of CoverageRow
        By method and coefficient.
    level : float
        Nominal [-].
    sets, draws : int
        Sets of runs, and refits of each.
    noise : float
        Standard deviation of ``log L`` that was simulated [-].
    not_converged : int
        Sets whose fit did not converge; they count.
    refits_not_converged : int
        Refits of "percentile" and "bca" that did not, over all sets.
    seed : int
        Of the first set; the others follow.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    basis: ClassVar[str] = "FITTED"

    rows: tuple[CoverageRow, ...]
    level: float
    sets: int
    draws: int
    noise: float
    not_converged: int
    refits_not_converged: int
    seed: int

    def of(self, method: Method) -> dict[str, float]:
        """Return the share covered by coefficient [-].

        Raises
        ------
        LawError
            The method was not simulated.
        """
        found = {row.name: row.share for row in self.rows if row.method == method}
        if not found:
            raise LawError(f"method is {method!r}, which was not simulated.")
        return found


def simulated_runs(law: AnyLaw, runs: Runs, noise: float, seed: int) -> Runs:
    """Return runs of a law at the places of a table, their ``log L`` off by normal noise.

    Parameters
    ----------
    law : JointLaw, PerSplitLaw or ChinchillaLaw
        The truth.
    runs : Runs
        Where; their losses play no part.
    noise : float
        Standard deviation of ``log L`` of a run of weight 1 [-]; ``noise / sqrt(weight)`` of
        others.
    seed : int
        Of the noise.
    """
    loss = np.asarray(law.loss(**runs.point()))
    size = noise / np.sqrt(runs.column("weight"))
    error = size * np.random.default_rng(seed).standard_normal(len(runs))
    update = {
        "loss": tuple((loss * np.exp(error)).tolist()),
        "source": f"a simulation of {law.source}",
    }
    return runs.model_copy(update=update)


def interval_coverage(
    law: AnyLaw,
    runs: Runs,
    *,
    noise: float,
    sets: int = 200,
    draws: int = 200,
    level: float = 0.95,
    methods: Sequence[Method] = ("percentile", "bca", "profile"),
    starts: int = 10,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    objective: Literal["huber", "least_squares"] = "huber",
    delta: float = 1e-3,
    holdout: str | Sequence[str] | None = None,
    fixed: Mapping[str, float] | None = None,
) -> Coverage:
    """Simulate how often intervals hold the truth.

    A set of which a method has no interval counts as one whose interval misses.

    Parameters
    ----------
    law : JointLaw, PerSplitLaw or ChinchillaLaw
        The truth.
    runs : Runs
        The design.
    noise : float
        As for `simulated_runs`, above 0.
    sets, draws : int
        Sets of runs, and bootstrap refits of each, at least 1 and 20.
    level : float
        Nominal, between 0 and 1.
    methods : sequence of str
        Of "percentile" and "bca" (wild bootstrap; BCa where it exists, else percentiles),
        "profile" (whether the statistic at the truth is within the threshold), "covariance"
        (Student's t times the standard error of the sandwich, of the logarithm for a prefactor)
        and "early_stop" (mode "paper" of `bootstrap`, percentiles).
    starts : int
        Random starts of each fit, besides the truth.
    seed : int
        Of the first set.
    progress : callable, optional
        Called with the sets that are done, and their number.
    objective, delta, holdout, fixed
        As for `fit`.

    Raises
    ------
    LawError
        An argument is illegal.
    """
    level = checked_level(level)
    unknown = [method for method in methods if method not in METHODS]
    if unknown or not methods:
        raise LawError(f"methods is {methods!r}, but may hold only {', '.join(METHODS)}.")
    for name, value, least in (("sets", sets, 1), ("draws", draws, 20)):
        if value < least:
            raise LawError(
                f"{name} is {value}, but must be at least {least}; the nearest is {least}."
            )
    if not (math.isfinite(noise) and noise > 0.0):
        raise LawError(f"noise is {noise:g}, but must be a finite number above 0, such as 0.003.")
    inside: dict[tuple[Method, str], list[bool]] = {}
    widths: dict[tuple[Method, str], list[float]] = {}
    failed = lost = 0
    for k in range(sets):
        found = fit(
            law,
            simulated_runs(law, runs, noise, seed + k),
            objective=objective,
            delta=delta,
            starts=starts,
            holdout=holdout,
            fixed=fixed,
            rng=seed + k,
        )
        failed += not found.converged
        refits = _refits(found, methods, draws, seed + k)
        lost += refits["percentile"].not_converged if "percentile" in refits else 0
        threshold = student(at_optimum(found).freedom, level)
        for method in methods:
            for name in found.moving:
                truth = float(getattr(law, name))
                hit, width = _holds(found, refits, name, method, level, threshold, truth)
                inside.setdefault((method, name), []).append(hit)
                if width is not None:
                    widths.setdefault((method, name), []).append(width)
        if progress is not None:
            progress(k + 1, sets)
    return Coverage(
        rows=tuple(_row(*key, hits, widths.get(key)) for key, hits in inside.items()),
        level=level,
        sets=sets,
        draws=draws,
        noise=noise,
        not_converged=failed,
        refits_not_converged=lost,
        seed=seed,
    )


def _refits(
    found: FitResult, methods: Sequence[Method], draws: int, seed: int
) -> dict[Method, Bootstrap]:
    """Return the refits that each method takes its percentiles of."""
    refits: dict[Method, Bootstrap] = {}
    if "percentile" in methods or "bca" in methods:
        refits["percentile"] = refits["bca"] = bootstrap(found, draws=draws, seed=seed)
    if "early_stop" in methods:
        refits["early_stop"] = bootstrap(found, draws=draws, seed=seed, mode="paper")
    return refits


def _holds(
    found: FitResult,
    refits: Mapping[Method, Bootstrap],
    name: str,
    method: Method,
    level: float,
    threshold: float,
    truth: float,
) -> tuple[bool, float | None]:
    """Return whether an interval holds the truth, and its width."""
    if method == "profile":
        return abs(profile_statistic(found, name, truth)) <= threshold, None
    if method == "covariance":
        ends = _wald(found, name, threshold)
    elif len(refits[method]) < LEAST_REFITS:
        ends = None
    else:
        way: Literal["percentile", "bca"] = "bca" if method == "bca" else "percentile"
        interval = refits[method].interval(name, level=level, method=way)
        ends = interval.low, interval.high
    if ends is None:
        return False, None
    low, high = ends
    log = list(found.coefficients).index(name) < len(found.law.terms)
    width = math.log(high / max(low, 1e-300)) if log else high - low
    return low <= truth <= high, width


def _wald(found: FitResult, name: str, threshold: float) -> tuple[float, float] | None:
    """Return the interval of a standard error, None where there is none."""
    value, covariance = found.coefficients[name].value, found.covariance
    key = None if covariance is None else covariance.listed(name)
    if covariance is None or key is None:
        return None
    reach = threshold * covariance.std_error(key)
    if key == name:
        return value - reach, value + reach
    return value * math.exp(-reach), value * math.exp(min(reach, 700.0))


def _row(method: Method, name: str, hits: list[bool], widths: list[float] | None) -> CoverageRow:
    sets, covered = len(hits), sum(hits)
    share, z = covered / sets, NORMAL
    middle = (share + z * z / (2 * sets)) / (1 + z * z / sets)
    reach = z / (1 + z * z / sets) * math.sqrt(share * (1 - share) / sets + z * z / (4 * sets**2))
    return CoverageRow(
        name=name,
        method=method,
        covered=covered,
        sets=sets,
        share=share,
        low=max(middle - reach, 0.0),
        high=min(middle + reach, 1.0),
        width=None if widths is None else float(np.median(widths)),
    )
