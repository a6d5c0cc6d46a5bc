"""What no layout of a candidate can beat, and what loss follows: the bounds that a search uses.

The bounds are of blocks of layouts (:mod:`perfmodel.bounds`). A search that discards on them and
the certificate that checks the discarding both go through here, and through no backend.
"""

from __future__ import annotations

from functools import cached_property
from math import inf

import numpy as np
from numpy.typing import NDArray

from mosaic_opt.problem import Outcome, Problem
from perfmodel.bounds import Blocks, block_floors, blocks_of
from perfmodel.plan import RuleMasks
from perfmodel.rules import architecture_values

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

ROUNDING = 1e-12
"""By how much a loss may be above the bar, relative, before it counts as above."""


class Bounds:
    """Bounds of the candidates of a problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.blocks: Blocks = blocks_of(problem.table, problem.loads)

    @cached_property
    def _rules(self) -> RuleMasks:
        """What the rules say of whole blocks: those that read what its layouts have in common."""
        table, n = self.problem.table, len(self.blocks.values)
        alike = {name: int(c[0]) for name, c in table.columns.items() if (c == c[0]).all()}
        whole = self.blocks.values[:, 1:5].astype(np.int64)
        columns = {name: np.full(n, value) for name, value in (alike | table.codes).items()}
        return RuleMasks(columns | dict(zip(("etp", "ep", "pp", "vpp"), whole.T, strict=True)))

    def floors(self, indices: Indices) -> Floats:
        """Bound the step of every block under some candidates, shape (candidates, blocks) [s].

        inf where no layout of a block is legal, fits or may be chosen.
        """
        problem = self.problem
        envelope = problem.envelope
        if not len(self.blocks.values):
            return np.empty((len(indices), 0))
        architectures = [problem.architectures[i] for i in indices]
        values = [architecture_values(a.rule_variables()) for a in architectures]
        possible = np.stack([self._rules.mask(of_one) for of_one in values])
        possible &= self.blocks.values[:, 2] <= problem.largest_ep
        return block_floors(
            architectures,
            self.blocks,
            possible,
            hardware=envelope.cluster.constants_for(envelope.batch.precision),
            stack=problem.profile.stack(),
            optimizer=envelope.batch.optimizer.dims,
            seq_len=envelope.batch.seq_len,
            global_batch=envelope.batch.global_batch,
            n_devices=envelope.cluster.n_devices,
            memory_cap_bytes=envelope.memory_cap_bytes,
            alike=problem.alike,
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
        """Return the largest bound of a block of each candidate that may still matter [s].

        0 where none does; inf where all of those do that can be chosen.

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
        cutoffs = np.where(matters, floors, 0.0).max(axis=1, initial=0.0)
        return np.where((matters == possible).all(axis=1), inf, cutoffs)

    def rows(self, index: int, floors: Floats, cutoff_s: float) -> tuple[Indices, int]:
        """Return the legal rows in blocks whose bound is at most a cutoff, and how many are legal.

        All legal rows with a cutoff of inf, those included that may not be chosen.
        """
        legal = self.problem.legal_rows(index)
        return legal[floors[self.blocks.of_row[legal]] <= cutoff_s], len(legal)
