"""How often intervals hold the truth: simulated, on the design at hand.

A nominal level is a promise. It is kept where the runs are many and the loss bends little in the
coefficients, and broken where coefficients trade off or a term is near zero. `interval_coverage`
simulates runs of a known law at the design of a table, fits each set, and counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from lawfit._refit import at_optimum
from lawfit._values import LawError
from lawfit.fitting import fit
from lawfit.laws import AnyLaw
from lawfit.profiling import profile_statistic
from lawfit.resampling import Bootstrap, bootstrap
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
    names = ("n_total", "n_active", "tokens", "expert_split")
    loss = np.asarray(law.loss(**{name: runs.column(name) for name in names}))
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
    methods: tuple[Method, ...] = ("percentile", "bca", "profile"),
    starts: int = 10,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    **fit_options: Any,
) -> Coverage:
    """Simulate how often intervals hold the truth.

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
    methods : tuple of str
        Of "percentile" and "bca" (wild bootstrap), "profile", "covariance" (normal, from the
        sandwich) and "early_stop" (mode "paper" of `bootstrap`, percentiles).
    starts : int
        Random starts of each fit, besides the truth.
    seed : int
        Of the first set.
    progress : callable, optional
        Called with the sets that are done, and their number.
    **fit_options
        Of `fit`, such as ``holdout`` and ``objective``.

    Raises
    ------
    LawError
        An argument is illegal.
    """
    unknown = [method for method in methods if method not in METHODS]
    if unknown or not methods:
        raise LawError(f"methods is {methods!r}, but may hold only {', '.join(METHODS)}.")
    if sets < 1:
        raise LawError(f"sets is {sets}, but must be at least 1; the nearest is 1.")
    if not (math.isfinite(noise) and noise > 0.0):
        raise LawError(f"noise is {noise:g}, but must be a finite number above 0, such as 0.003.")
    covered: dict[tuple[Method, str], list[bool]] = {}
    widths: dict[tuple[Method, str], list[float]] = {}
    failed = lost = 0
    for k in range(sets):
        table = simulated_runs(law, runs, noise, seed + k)
        found = fit(law, table, starts=starts, rng=seed + k, **fit_options)
        failed += not found.converged
        ways: dict[Method, Bootstrap] = {}
        if "percentile" in methods or "bca" in methods:
            ways["percentile"] = bootstrap(found, draws=draws, seed=seed + k)
            lost += ways["percentile"].not_converged
        if "early_stop" in methods:
            ways["early_stop"] = bootstrap(found, draws=draws, seed=seed + k, mode="paper")
        for method in methods:
            for name, (inside, width) in _intervals(found, law, method, ways, level).items():
                covered.setdefault((method, name), []).append(inside)
                if width is not None:
                    widths.setdefault((method, name), []).append(width)
        if progress is not None:
            progress(k + 1, sets)
    return Coverage(
        rows=tuple(_row(*key, hits, widths.get(key)) for key, hits in covered.items()),
        level=level,
        sets=sets,
        draws=draws,
        noise=noise,
        not_converged=failed,
        refits_not_converged=lost,
        seed=seed,
    )


def _intervals(
    found: FitResult,
    law: AnyLaw,
    method: Method,
    ways: dict[Method, Bootstrap],
    level: float,
) -> dict[str, tuple[bool, float | None]]:
    """Return of each free coefficient whether its interval holds the truth, and its width."""
    from scipy.special import stdtrit

    form = at_optimum(found).form
    prefactors = form.names[: form.terms]
    threshold = float(stdtrit(found.n_train - len(found.coefficients), 0.5 + 0.5 * level))
    result: dict[str, tuple[bool, float | None]] = {}
    for name, each in found.coefficients.items():
        truth = float(getattr(law, name))
        if each.fixed:
            continue
        if method == "profile":
            result[name] = abs(profile_statistic(found, name, truth)) <= threshold, None
            continue
        low, high = _ends(found, name, method, ways, level, threshold)
        width = math.log(high / max(low, 1e-300)) if name in prefactors else high - low
        result[name] = low <= truth <= high, width
    return result


def _ends(
    found: FitResult,
    name: str,
    method: Method,
    ways: dict[Method, Bootstrap],
    level: float,
    threshold: float,
) -> tuple[float, float]:
    if method != "covariance":
        way = ways["early_stop" if method == "early_stop" else "percentile"]
        interval = way.interval(
            name, level=level, method="bca" if method == "bca" else "percentile"
        )
        return interval.low, interval.high
    value = found.coefficients[name].value
    for key, log in ((f"log {name}", True), (name, False)):
        if found.covariance is not None and key in found.covariance.names:
            reach = threshold * found.covariance.std_error(key)
            if log:
                return value * math.exp(-reach), value * math.exp(min(reach, 700.0))
            return value - reach, value + reach
    return value, value  # at a bound: no spread at all


def _row(method: Method, name: str, hits: list[bool], widths: list[float] | None) -> CoverageRow:
    sets, covered = len(hits), sum(hits)
    share, z = covered / sets, 1.959964
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
