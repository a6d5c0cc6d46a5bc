"""Runs for a choice: designs of least expected regret."""

from __future__ import annotations

import numpy as np

from lawfit._criteria import LogVariance, Regret
from lawfit._relaxed import relaxed
from lawfit._search import Purse, exchange, fill
from lawfit._values import FloatArray

_RIVALS = 5
"""Rivals of the best architecture for which a design of their own is tried."""

_GREEDY = 200
"""Runs of a design beyond which none is sought run by run by its regret."""

_SWEEPS = 4
"""Rounds of exchanges on a regret, which costs more than a variance."""

_TRACE = 1e-3
"""Share of the runs of a relaxed design below which a candidate is not in it."""

_WAYS = (True, False)
"""Gain over cost, and gain."""


def for_choice(criterion: Regret, purse: Purse) -> FloatArray:
    """Return the design of least regret that exchanges lead to, shape (candidates,).

    A regret is not convex: runs too small to change the choice gain nothing, and a greedy start
    may see no way to begin. So the starts, and the candidates of the exchanges, are those of
    designs that tighten the difference of the best architecture to one rival, or to all; and one
    that begins with nothing.
    """
    goals = _differences(criterion)
    ends = [relaxed(each, purse).counts for each in goals]
    floors = [np.floor(end + 1e-9) for end in ends]
    tight = [
        fill(each, purse, floor, per_cost=True) for each, floor in zip(goals, floors, strict=True)
    ]
    used = np.any([end > _TRACE * end.sum() for end in (*ends, *tight)], axis=0)
    short = np.flatnonzero(used)
    few = criterion._replace(runs=criterion.runs[:, short])
    little = purse._replace(cost=purse.cost[short])
    begin = [floor[short] for floor in floors]
    if min(floor.sum() for floor in floors) <= _GREEDY:
        begin.append(np.zeros(len(short)))
    starts = [fill(few, little, floor, per_cost=way) for floor in begin for way in _WAYS]
    starts = sorted([*starts, *(each[short] for each in tight)], key=few.value)[:2]
    designs = [exchange(few, little, start, _SWEEPS) for start in starts]
    counts = np.zeros_like(purse.cost)
    counts[short] = min(designs, key=few.value)
    return counts


def _differences(criterion: Regret) -> list[LogVariance]:
    """Return criteria of the differences to the likeliest rivals, one each and one of all."""
    lead = int(np.argmin(criterion.mean))
    apart = criterion.spread - criterion.spread[:, [lead]]
    size = np.sqrt((apart * apart).sum(axis=2)).mean(axis=0)
    gap = (criterion.mean - criterion.mean[lead]) / np.maximum(size, 1e-300)
    rivals = [int(k) for k in np.argsort(gap, kind="stable") if size[k] > 0.0][:_RIVALS]
    goals = [LogVariance(criterion.runs, apart[:, [k]]) for k in rivals]
    together = LogVariance(
        np.concatenate([each.runs for each in goals]), np.concatenate([each.goal for each in goals])
    )
    return [*goals, together]
