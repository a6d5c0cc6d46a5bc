"""Levels and thresholds that the intervals of every method share."""

from __future__ import annotations

import numpy as np

from lawfit._values import FloatArray, LawError

NORMAL = 1.959964
"""Size of a standard normal that holds 95 % [-]."""


def checked_level(level: float) -> float:
    """Return a nominal coverage [-].

    Raises
    ------
    LawError
        It does not lie between 0 and 1.
    """
    if not 0.0 < level < 1.0:
        raise LawError(f"level is {level:g}, but must lie between 0 and 1, such as 0.95.")
    return level


def tails(level: float) -> FloatArray:
    """Return the two shares that a symmetric interval cuts at."""
    return np.array([0.5 - 0.5 * level, 0.5 + 0.5 * level])


def student(freedom: int, level: float) -> float:
    """Return the size of Student's t that holds a share of the level, for at least one degree."""
    from scipy.special import stdtrit

    return float(stdtrit(max(freedom, 1), tails(level)[1]))


def bca_tails(
    values: FloatArray, estimate: float, without: FloatArray, level: float
) -> FloatArray | None:
    """Return the shares that the interval of BCa cuts at (Efron, J. Am. Stat. Assoc. 82:171, 1987).

    Parameters
    ----------
    values : ndarray of shape (refits,)
        Bootstrap replicates.
    estimate : float
        Of the fit.
    without : ndarray of shape (runs,)
        Estimates without each run in turn.
    level : float
        Nominal coverage [-].

    Returns
    -------
    ndarray of shape (2,) or None
        None where the bias is infinite, the acceleration 0/0, or so large that BCa turns over.
    """
    from scipy.special import ndtr, ndtri

    below = float(np.mean(values < estimate) + 0.5 * np.mean(values == estimate))
    pull = without.mean() - without
    spread = float((pull * pull).sum())
    rounding = len(without) * (1e-12 * float(np.abs(without).max())) ** 2
    if not 0.0 < below < 1.0 or not spread > rounding:
        return None
    bias, acceleration = float(ndtri(below)), float((pull**3).sum()) / (6.0 * spread**1.5)
    z = bias + ndtri(tails(level))
    scale = 1.0 - acceleration * z
    if not (scale > 0.0).all():
        return None
    return np.asarray(ndtr(bias + z / scale))
