"""What a search says of one candidate, in plain records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Tokens(NamedTuple):
    """Token budget of a candidate, or why it has none."""

    tokens: float  # NaN if the rule cannot be met
    available: float  # D*: all that the window allows
    binding: str  # "window", "max_tokens_per_parameter", "max_tokens", "grid", or the broken rule


class Counts(NamedTuple):
    """How the (architecture, layout) pairs of a candidate fared.

    ``plans = infeasible + priced + discarded``.
    """

    plans: int  # layouts of the space
    infeasible: int  # that break a rule of the architecture; not priced
    priced: int
    discarded: int  # ruled out by a bound of their block; not priced
    over_memory: int  # of the priced: more than the memory cap
    refused: int  # of the priced: fit, but need a surface beyond its range


class Sizes(NamedTuple):
    """What the losses of all candidates depend on beside their steps; arrays of shape (n,)."""

    n_total: NDArray[np.float64]  # [-]
    n_active: NDArray[np.float64]  # [-]
    expert_split: NDArray[np.float64]  # [-]
    tokens: NDArray[np.float64]  # that the window delivers, times the step's time [s]


class Priced(NamedTuple):
    """Layouts that are legal for a candidate, with their prices; arrays of shape (rows,)."""

    rows: NDArray[np.int64]  # of the problem's table, ascending
    step_s: NDArray[np.float64]  # [s]
    memory_bytes: NDArray[np.float64]  # [B]


@dataclass(frozen=True)
class Outcome:
    """What the lower level found for one candidate.

    ``row`` is the best layout's row in the problem's table, or -1; ``nearest_row`` is then the best
    layout of a candidate that only lacks tokens. ``reason`` and ``detail`` say why, and
    ``shortfall`` what the smallest help would be: bytes a device (reason "memory") or seconds of
    window ("tokens"); NaN where no number says it. Layouts in blocks whose bound is above
    ``cutoff_s`` were not priced; inf where all legal ones were.
    """

    index: int
    cutoff_s: float
    row: int
    step_s: float
    memory_bytes: float
    tokens: float
    loss: float
    binding: str
    reason: str
    detail: str
    shortfall: float
    counts: Counts
    nearest_row: int = -1

    @property
    def feasible(self) -> bool:
        """Whether the candidate has a layout and a token budget."""
        return self.row >= 0


@dataclass(frozen=True)
class Discarded:
    """A candidate that is worse than every answer, by the bounds of its blocks of layouts.

    Layouts in blocks whose bound is at most ``cutoff_s`` were priced, and those in the others have
    no shorter step than ``bound_s``; neither have the priced ones. inf where nothing fits.
    """

    index: int
    cutoff_s: float  # [s]
    bound_s: float  # no layout has a shorter step [s]
    counts: Counts


Settled = Outcome | Discarded
"""A candidate that a search is done with."""
