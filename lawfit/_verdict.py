"""What the ends of the starts of a fit amount to: the best one, and whether it is the optimum.

Both engines end here: `lawfit.fit`'s and `lawfit.fit_general`'s.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from lawfit._descent import GRADIENT
from lawfit._values import FloatArray
from lawfit.runs import Remark

AGREEMENT = 1e-6
"""Relative difference in objective within which two starts agree."""

_AS_GOOD = 1e-9
"""The same within which a stationary end is as good as the lowest."""

_AGREE_LEAST, _AGREE_SHARE = 2, 0.05
"""Starts that must agree, at least, and as a share of all."""


def best_end(
    value: FloatArray, stationary: NDArray[np.bool_], rounding: float, by: FloatArray
) -> int:
    """Return the end of least objective, a stationary one where it is as good.

    Parameters
    ----------
    value : ndarray of shape (starts,)
        Objective at the ends.
    stationary : ndarray of bool, shape (starts,)
        Which ends are stationary points.
    rounding : float
        The objective of runs that miss by rounding alone.
    by : ndarray of shape (starts,)
        What decides among stationary ends that are as good; the least.
    """
    least = int(np.argmin(value))
    margin = _AS_GOOD * value[least] + rounding
    good = np.flatnonzero(stationary & (value <= value[least] + margin))
    return int(good[np.argmin(by[good])]) if good.size else least


def agreeing(value: FloatArray, stationary: NDArray[np.bool_], rounding: float, best: int) -> int:
    """Return how many starts ended at a stationary point as low as the best; see `best_end`."""
    margin = AGREEMENT * value[best] + rounding
    return int((stationary & (value <= value[best] + margin)).sum())


def starts_needed(starts: int) -> int:
    """Return how many of the starts must agree before the best counts as the optimum."""
    return max(_AGREE_LEAST, math.ceil(_AGREE_SHARE * starts))


def doubts(stationary: bool, gradient: float, agree: int, starts: int, advice: str) -> list[Remark]:
    """Return what speaks against the best end being the optimum.

    Parameters
    ----------
    stationary, gradient : bool, float
        Of the best end.
    agree, starts : int
        Starts that agree with it, and all.
    advice : str
        What to do where too few agree.
    """
    found = []
    if not stationary:
        sentence = (
            "No start of the best objective reached a stationary point: the relative projected "
            f"gradient is {gradient:.2g} (limit {GRADIENT:g}), or a step still gains."
        )
        found.append(Remark(reason="not_stationary", sentence=sentence))
    if agree < starts_needed(starts):
        sentence = (
            f"{agree} of {starts} starts end at the best objective, but {starts_needed(starts)} "
            f"must agree before it counts as the optimum; {advice}."
        )
        found.append(Remark(reason="few_starts_agree", sentence=sentence))
    return found


def provenance(rows: int, source: str, delta: float, what: str) -> str:
    """Return the source of a fitted law: runs, loss function (of half-width `delta`), residual."""
    how = f"Huber(delta={delta:g})" if math.isfinite(delta) else "least squares"
    return f"fit of {rows} runs ({source}), sum of {how} on {what}"


def weighted_rms(miss: FloatArray, weight: FloatArray) -> float:
    """Return the weighted root mean square of misses, arrays of shape (runs,)."""
    return float(np.sqrt(np.average(miss * miss, weights=weight)))
