"""Rows of a plan table with what they cost: the shortest, the lightest, and the Pareto front.

Each operation may be applied block by block, to what was kept so far joined with the next block,
and keeps the same rows as over all blocks at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

__all__ = ["NO_ROWS", "PricedRows"]


@dataclass(frozen=True, eq=False)
class PricedRows:
    """Rows of a table and what they cost; arrays of shape (n,).

    Attributes
    ----------
    rows : array of int64
        Indices in the table, all different.
    step_s, memory : array of float64
        Step time [s] and memory of the heaviest stage [B].
    """

    rows: NDArray[np.int64]
    step_s: NDArray[np.float64]
    memory: NDArray[np.float64]

    def joined(self, other: Self) -> Self:
        """Return the rows of both."""
        return type(self)(
            np.concatenate([self.rows, other.rows]),
            np.concatenate([self.step_s, other.step_s]),
            np.concatenate([self.memory, other.memory]),
        )

    def take(self, kept: NDArray[np.bool_] | NDArray[np.intp]) -> Self:
        """Keep the places of a mask or of an index."""
        return type(self)(self.rows[kept], self.step_s[kept], self.memory[kept])

    def shortest(self, top: int) -> Self:
        """Return the shortest steps in order; of equals less memory first, then the lower row."""
        return self.take(np.lexsort((self.rows, self.memory, self.step_s))[:top])

    def lightest(self, top: int) -> Self:
        """Return the least memory in order; of equals the shorter step, then the lower row."""
        return self.take(np.lexsort((self.rows, self.step_s, self.memory))[:top])

    def front(self) -> Self:
        """Return what no other row beats or equals in both, least memory first.

        Of rows that are equal in both, the lowest is kept.
        """
        ordered = self.lightest(len(self.rows))
        before = np.concatenate([[np.inf], np.minimum.accumulate(ordered.step_s)])
        return ordered.take(ordered.step_s < before[: len(ordered.rows)])


NO_ROWS = PricedRows(np.empty(0, dtype=np.int64), np.empty(0), np.empty(0))
