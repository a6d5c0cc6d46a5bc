r"""The best design of fractions of runs, and the bound that it sets to designs of whole ones.

With ``n`` any numbers of at least 0 in the budget the problem is convex, so at every ``n``

    psi(n*) >= psi(n) - max_v d(n)' (v - n),      d = -dpsi/dn,

over the corners ``v`` of the budget: the equivalence theorem (Kiefer and Wolfowitz, Canad. J.
Math. 12:363, 1960) says that the maximum is 0 where ``n`` is best, and elsewhere the line is still
a bound. It is minimised by Frank and Wolfe's method with pairwise steps (Lacoste-Julien and Jaggi,
NIPS 2015).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lawfit._criteria import LogVariance
from lawfit._search import Purse
from lawfit._values import FloatArray

_CORNERS, _STEPS = 200, 60
"""Corners that are looked for at most, and steps among those found before the next."""

_CLOSE = 1e-4
"""Gap in the mean log variance at which the bound is good enough [-]."""


class Relaxed(NamedTuple):
    """A design of fractions of runs.

    Attributes
    ----------
    counts : ndarray of shape (candidates,)
        How often each is run.
    bound : float
        No design in the budget, of fractions or of whole runs, has a lower criterion.
    """

    counts: FloatArray
    bound: float


def relaxed(criterion: LogVariance, purse: Purse) -> Relaxed:
    """Return the best design of fractions of runs, of candidates that the budget can buy whole."""
    corners = np.zeros((1, len(purse.cost)))
    weights = np.ones(1)
    bound, best, least = -np.inf, corners[0], np.inf
    for _ in range(_CORNERS):
        counts = weights @ corners
        value = criterion.value(counts)
        if value < least:
            best, least = counts, value
        slope = criterion.sensitivity(counts)
        corner = _corner(slope, purse)
        gap = float(slope @ (corner - counts))
        bound = max(bound, value - gap)
        if least - bound <= _CLOSE:
            break
        if not (corners == corner).all(axis=1).any():
            corners, weights = np.vstack([corners, corner]), np.append(weights, 0.0)
        weights = _mixed(criterion, corners, weights, 0.2 * gap)
        corners, weights = corners[weights > 0.0], weights[weights > 0.0]
    return Relaxed(best, min(bound, least))


def _mixed(
    criterion: LogVariance, corners: FloatArray, weights: FloatArray, close: float
) -> FloatArray:
    """Return better weights of corners, by steps from the worst to the best of them.

    They end where the gap among these corners is `close`.
    """
    used = np.flatnonzero(corners.any(axis=0))
    few, ends = LogVariance(criterion.runs[:, used], criterion.goal), corners[:, used]
    weights = weights.copy()
    for _ in range(_STEPS):
        slope = ends @ few.sensitivity(weights @ ends)
        toward = int(np.argmax(slope))
        away = int(np.argmin(np.where(weights > 0.0, slope, np.inf)))
        if slope[toward] - slope[away] <= close:
            break
        step = _step(few, weights @ ends, ends[toward] - ends[away], weights[away])
        weights[toward] += step
        weights[away] = 0.0 if step == weights[away] else weights[away] - step
    return weights


def _step(criterion: LogVariance, counts: FloatArray, direction: FloatArray, most: float) -> float:
    """Return the step to the least criterion on a line, at most `most`."""
    from scipy.optimize import brentq

    def fall(step: float) -> float:
        at = np.maximum(counts + step * direction, 0.0)
        return float(criterion.sensitivity(at) @ direction)

    if fall(most) >= 0.0:
        return most
    if fall(0.0) <= 0.0:
        return 0.0
    return float(brentq(fall, 0.0, most, xtol=1e-12 * most, rtol=1e-3))


def _corner(slope: FloatArray, purse: Purse) -> FloatArray:
    """Return the design of most ``slope' n`` in the budget; slopes are at least 0.

    With a limit on the number of runs it mixes the two ends of an edge of the concave envelope of
    slopes over costs, at the cost of a run that spends both.
    """
    able = np.flatnonzero(purse.cost <= purse.budget * (1.0 + 1e-12))
    found = np.zeros_like(slope)
    if purse.most_runs is None:
        rich = able[np.argmax(slope[able] / purse.cost[able])]
        found[rich] = purse.budget / purse.cost[rich]
        return found
    mean = purse.budget / purse.most_runs
    edge = [-1]  # the first is no run at all, of no cost and no gain
    for at in able[np.lexsort((slope[able], purse.cost[able]))]:
        if slope[at] <= _of(slope, edge[-1]):
            continue
        while len(edge) > 1 and _rate(slope, purse, edge[-2], edge[-1]) <= _rate(
            slope, purse, edge[-2], at
        ):
            edge.pop()
        edge.append(int(at))
    above = next((k for k, at in enumerate(edge) if _of(purse.cost, at) > mean), len(edge))
    first = edge[above - 1]
    share = 0.0
    if above < len(edge):
        low, high = _of(purse.cost, first), _of(purse.cost, edge[above])
        share = (mean - low) / (high - low)
        found[edge[above]] = purse.most_runs * share
    if first >= 0:
        found[first] = purse.most_runs * (1.0 - share)
    return found


def _of(values: FloatArray, at: int) -> float:
    return 0.0 if at < 0 else float(values[at])


def _rate(slope: FloatArray, purse: Purse, low: int, high: int) -> float:
    return (_of(slope, high) - _of(slope, low)) / (_of(purse.cost, high) - _of(purse.cost, low))
