"""Designs of whole runs under a budget: greedy, and exchange until no exchange gains.

Fedorov (Theory of Optimal Experiments, 1972) exchanges one run for another of equal cost; here
what a run leaves is filled again with whatever the budget buys.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lawfit._criteria import Criterion
from lawfit._values import FloatArray

_SWEEPS = 20
"""Rounds of exchanges at most."""

_GREEDY = 1000
"""Runs of a start beyond which none is sought from nothing, run by run."""

_GAIN = 1e-12
"""Share of the first gain below which an exchange gains nothing."""


class Purse(NamedTuple):
    """What may be spent.

    Attributes
    ----------
    cost : ndarray of shape (candidates,)
        Of one run.
    budget : float
        Of all runs, in the same unit.
    most_runs : int or None
        How many, at most.
    """

    cost: FloatArray
    budget: float
    most_runs: int | None

    def fits(self, counts: FloatArray) -> NDArray[np.bool_]:
        """Say which candidates may be run once more, shape (candidates,)."""
        left = self.budget * (1.0 + 1e-12) - float(counts @ self.cost)
        room = self.most_runs is None or counts.sum() < self.most_runs
        return np.asarray((self.cost <= left) & room)


def fill(criterion: Criterion, purse: Purse, counts: FloatArray, *, per_cost: bool) -> FloatArray:
    """Return the counts with what the budget still buys, run by run the most gain.

    Parameters
    ----------
    per_cost : bool
        Gain over cost, or gain.
    """
    counts = counts.copy()
    value = criterion.value(counts)
    while (fits := purse.fits(counts)).any():
        after = criterion.after_each(counts)
        gain = np.where(fits, value - after, -np.inf)
        best = int(np.argmax(gain / purse.cost if per_cost else gain))
        if not gain[best] > 0.0:
            break
        counts[best] += 1.0
        value = float(after[best])
    return counts


def exchange(
    criterion: Criterion, purse: Purse, counts: FloatArray, sweeps: int = _SWEEPS
) -> FloatArray:
    """Return counts that no exchange of one run for what it frees makes better."""
    value = criterion.value(counts)
    least = _GAIN * max(criterion.value(np.zeros_like(counts)) - value, 1e-300)
    for _ in range(sweeps):
        before = value
        for at in np.flatnonzero(counts):
            for per_cost in (True, False):
                if counts[at] == 0.0:
                    break
                without = counts.copy()
                without[at] -= 1.0
                trial = fill(criterion, purse, without, per_cost=per_cost)
                found = criterion.value(trial)
                if found < value - least:
                    counts, value = trial, found
        if not value < before:
            break
    return counts


def best_of(criterion: Criterion, designs: list[FloatArray]) -> FloatArray:
    """Return the first design of least criterion."""
    values = [criterion.value(design) for design in designs]
    return designs[int(np.argmin(values))]


def whole(criterion: Criterion, purse: Purse, starts: list[FloatArray]) -> FloatArray:
    """Return the best design of whole runs that these, rounded down, and nothing lead to."""
    floors = [np.floor(start + 1e-9) for start in starts]
    if all(floor.sum() <= _GREEDY for floor in floors):
        floors.append(np.zeros_like(purse.cost))
    filled = [
        fill(criterion, purse, floor, per_cost=per_cost)
        for floor in floors
        for per_cost in (True, False)
    ]
    ordered = sorted(filled, key=criterion.value)
    return best_of(criterion, [exchange(criterion, purse, design) for design in ordered[:2]])
