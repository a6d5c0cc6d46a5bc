"""What no layout of a candidate can beat, and what loss follows: the bounds that a search uses.

The bounds are of blocks of layouts (:mod:`perfmodel.bounds`). A search that discards on them and
the certificate that checks the discarding both go through here, and through no backend.
"""

from __future__ import annotations

from math import inf

import numpy as np
from numpy.typing import NDArray

from mosaic_opt.outcome import Discarded, Outcome
from mosaic_opt.problem import Problem
from perfmodel.bounds import EP, block_floors

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

ROUNDING = 1e-12
"""By how much a loss may be above the bar, relative, before it counts as above."""


class BlockBounds:
    """Bounds of the candidates of a problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.blocks = problem.blocks

    def floors(self, indices: Indices) -> Floats:
        """Bound the step of every block under some candidates, shape (candidates, blocks) [s].

        inf where no layout of a block is legal, fits or may be chosen.
        """
        problem = self.problem
        if not len(self.blocks.values) or not len(indices):
            return np.empty((len(indices), len(self.blocks.values)))
        possible = np.stack([problem.block_rules.mask(problem.rule_values[i]) for i in indices])
        possible &= self.blocks.values[:, EP] <= problem.largest_ep
        return block_floors(
            problem.records[indices],
            self.blocks,
            possible,
            stack=problem.profile.stack(),
            n_devices=problem.envelope.cluster.n_devices,
            memory_cap_bytes=problem.envelope.memory_cap_bytes,
            **problem.run,
        )

    def losses(self, indices: Indices, floor_s: Floats) -> Floats:
        """Return the least loss that matters of candidates with no shorter steps [nats/token].

        Of two: the loss as the token rule has it, and the loss with an MFU higher by the stated
        error where only that error keeps a candidate from its least tokens. inf where neither can
        be.
        """
        problem = self.problem
        found = problem.losses(indices, floor_s)
        least = problem.envelope.tokens.least_tokens_per_parameter
        if least > 0.0:
            sizes = problem.sizes
            shortest = sizes.tokens[indices] / (least * sizes.n_active[indices])
            missed = np.maximum(floor_s, shortest) / (1.0 + problem.envelope.mfu_error)
            found = np.fmin(found, problem.losses(indices, missed))
        return found

    def bar(self, best: Outcome | None) -> float:
        """Return the loss above which a candidate is told apart from the best one [nats/token]."""
        if best is None:
            return inf
        return (best.loss + self.problem.loss_tolerance(best)) * (1.0 + ROUNDING)

    def cutoffs_s(self, indices: Indices, floors: Floats, bar: float) -> Floats:
        """Return a time that parts each candidate's blocks, those that may still matter below [s].

        0 where none does; inf where all of those do that can be chosen. It lies halfway between two
        bounds, so that another machine's rounding of them moves no block to the other side.

        Parameters
        ----------
        floors : array of shape (candidates, blocks)
            Of `floors`.
        bar : float
            Losses above it do not matter [nats/token].
        """
        losses = self.losses(np.repeat(indices, floors.shape[1]), floors.ravel())
        possible = floors < inf
        matters = possible & (losses.reshape(floors.shape) <= bar)
        return _parting(floors, matters)

    def rows(self, index: int, floors: Floats, cutoff_s: float) -> tuple[Indices, int]:
        """Return the legal rows in blocks whose bound is at most a cutoff, and how many are legal.

        All legal rows with a cutoff of inf, those included that may not be chosen.
        """
        legal = self.problem.legal_rows(index)
        return legal[floors[self.blocks.of_row[legal]] <= cutoff_s], len(legal)

    def examine(self, index: int, floors: Floats, cutoff_s: float) -> Outcome | Discarded:
        """Price the layouts of a candidate in blocks whose bound is at most a cutoff.

        Returns
        -------
        Outcome or Discarded
            Discarded if the best of them is not better than the bounds of the others; whole, with
            no rule read, where the cutoff is 0. Its cutoff is that of `cutoffs_s` for these blocks.
        """
        problem = self.problem
        if cutoff_s <= 0.0:
            return problem.discarded_whole(index, float(floors.min(initial=inf)))
        cutoff_s = float(_parting(floors[None], floors[None] <= cutoff_s)[0])
        rows, legal = self.rows(index, floors, cutoff_s)
        priced = problem.priced(index, rows)
        best = problem.best_of(priced)
        step_s = inf if best is None else float(priced.step_s[best])
        ahead_s = float(floors[floors > cutoff_s].min(initial=inf))
        if cutoff_s == inf or step_s < ahead_s:
            return problem.outcome(index, priced, best, legal=legal, cutoff_s=cutoff_s)
        return Discarded(index, cutoff_s, ahead_s, problem.counts(priced, legal))


def _parting(floors: Floats, below: NDArray[np.bool_]) -> Floats:
    """Return what parts the bounds of each candidate below from the others; see `cutoffs_s`."""
    possible = floors < inf
    last = np.where(below & possible, floors, 0.0).max(axis=1, initial=0.0)
    following = np.where(possible & ~below, floors, inf).min(axis=1, initial=inf)
    halfway = np.where(last > 0.0, 0.5 * (last + following), 0.0)
    return np.where(following == inf, inf, halfway)
