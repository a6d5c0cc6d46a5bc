"""The bilevel problem of an envelope, as pure functions of a candidate's index.

Upper level: which architecture and how many tokens. Lower level: which layout. For a candidate
the best layout is the feasible one with the shortest step; its tokens follow in closed form, and
its loss from the law:

    D* = T_train eta_good B_global T_seq / min over feasible P of t_iter(Z, P)          (25)
    loss = L(N_tot, N_act, min(D*, caps), G)                                            (10)
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from math import inf, nan
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from mosaic_opt.envelope import Envelope
from mosaic_opt.errors import MosaicError
from mosaic_opt.outcome import Counts, Discarded, Outcome, Priced, Sizes, Tokens
from mosaic_opt.rejection import Rejection, without_layout, without_tokens
from mosaic_opt.token_efficiency import TokenEfficiency
from perfmodel.architecture import Architecture
from perfmodel.batch import alike_of, loads_of, plan_matrix, price
from perfmodel.bounds import BLOCK_COLUMNS, Blocks, blocks_of
from perfmodel.calibration.stacks import StackProfile, load_stack
from perfmodel.hardware import Hardware
from perfmodel.memory import OptimizerDims
from perfmodel.mesh import PlanDims
from perfmodel.plan import Plan
from perfmodel.plan_table import PlanTable, RuleMasks
from perfmodel.records import as_records
from perfmodel.stack import Stack
from perfmodel.step import StepEstimate, estimate, legal_model


class RunArguments(TypedDict):
    """Arguments of the kernels that follow from the envelope alone."""

    hardware: Hardware
    optimizer: OptimizerDims
    seq_len: int
    global_batch: int
    alike: PlanDims


class Problem:
    """An envelope with its candidates, layouts, constants and law at hand."""

    def __init__(self, envelope: Envelope) -> None:
        if envelope.global_batches is not None:
            raise MosaicError(
                "global_batches lists several batches, and this answers for one: solve_batches, or "
                "mosaic solve, takes each in turn."
            )
        self.envelope = envelope
        self.architectures: tuple[Architecture, ...] = envelope.candidates.architectures()
        self.profile: StackProfile = load_stack(envelope.stack)
        self.table: PlanTable = envelope.plans.skeleton(
            envelope.cluster.n_devices, envelope.batch.seq_len, envelope.batch.global_batch
        )

    @property
    def size(self) -> int:
        """Number of (architecture, layout) pairs."""
        return len(self.architectures) * len(self.table)

    @cached_property
    def matrix(self) -> NDArray[np.float64]:
        """Every layout in the form that the kernels read, one row a layout."""
        return plan_matrix(self.table)

    @cached_property
    def run(self) -> RunArguments:
        """What every price of the problem has in common."""
        envelope = self.envelope
        return {
            "hardware": envelope.cluster.constants_for(envelope.batch.precision),
            "optimizer": envelope.batch.optimizer.dims,
            "seq_len": envelope.batch.seq_len,
            "global_batch": envelope.batch.global_batch,
            "alike": self.alike,
        }

    @cached_property
    def alike(self) -> PlanDims:
        """What all layouts have in common, as the formulas take it."""
        return alike_of(self.table, self.envelope.batch.precision)

    @cached_property
    def loads(self) -> NDArray[np.float64]:
        """Load of the fullest rank of EP under each layout, shape (layouts,) [-]."""
        return loads_of(self.table, self.envelope.batch.routing)

    @cached_property
    def _refused(self) -> NDArray[np.bool_]:
        """Rows that ask for an all-to-all over more ranks than the pack answers for."""
        return self.table.ep > self.largest_ep

    @property
    def largest_ep(self) -> float:
        """Largest expert-parallel group that the envelope admits; inf where it refuses none [-]."""
        return inf if self.envelope.extrapolation == "flag" else self.largest_all_to_all

    @property
    def largest_all_to_all(self) -> float:
        """Largest expert-parallel group that the pack prices; inf where it refuses none [-]."""
        return self.envelope.cluster.pack.refused_above("all_to_all", "size")

    @cached_property
    def blocks(self) -> Blocks:
        """Blocks of layouts that share a bound."""
        return blocks_of(self.table, self.loads)

    @cached_property
    def block_rules(self) -> RuleMasks:
        """What the rules say of whole blocks: those that read what its layouts have in common."""
        table, values = self.table, self.blocks.values
        alike = {n: int(c[0]) for n, c in table.columns.items() if len(c) and (c == c[0]).all()}
        columns = {n: np.full(len(values), value) for n, value in (alike | table.codes).items()}
        degrees = {
            name: values[:, place].astype(np.int64)
            for place, name in enumerate(BLOCK_COLUMNS)
            if name in table.columns
        }
        return RuleMasks(columns | degrees)

    @cached_property
    def rule_values(self) -> tuple[dict[str, int], ...]:
        """What the rules read of each candidate."""
        return tuple(a.rule_variables() for a in self.architectures)

    @cached_property
    def records(self) -> NDArray[np.void]:
        """The sizes of each candidate as compiled kernels read them, shape (candidates,)."""
        return as_records([a.dims for a in self.architectures])

    def n_active(self, index: int) -> int:
        """Return the active parameters under the envelope's convention [-]."""
        return self.architectures[index].n_active(self.envelope.parameter_convention)

    def n_total(self, index: int) -> int:
        """Return the stored parameters under the envelope's convention [-]."""
        return self.architectures[index].n_total(self.envelope.parameter_convention)

    def legal_rows(self, index: int) -> NDArray[np.int64]:
        """Return the rows of the table that are legal for a candidate, ascending."""
        return np.flatnonzero(self.table.legal(self.rule_values[index])).astype(np.int64)

    def price(
        self, index: int, rows: NDArray[np.int64], stack: Stack | None = None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return step times [s] and memory [B] of a candidate under the given layouts.

        ``stack`` stands in for the constants of the envelope's profile.
        """
        return price(
            self.architectures[index],
            self.matrix,
            rows,
            stack=stack or self.profile.stack(),
            loads=self.loads,
            **self.run,
        )

    def reprice(self, index: int, plan: Plan) -> StepEstimate:
        """Price one candidate and layout with the scalar model."""
        envelope = self.envelope
        return estimate(
            self.architectures[index],
            plan,
            envelope.cluster,
            envelope.batch,
            stack=self.profile,
            mfu_convention=envelope.mfu_convention,
        )

    def scalar_price(self, index: int, plan: Plan) -> tuple[float, float]:
        """Return step [s] and memory [B] of one candidate and layout, by the scalar model."""
        envelope, architecture = self.envelope, self.architectures[index]
        model = legal_model(architecture, plan, envelope.cluster, envelope.batch, self.profile)
        return model.step_s, max(model.memory_by_stage_bytes)

    def tokens(self, index: int, step_s: float) -> Tokens:
        """Return the token budget of a candidate whose step takes ``step_s`` [s]."""
        envelope, rule = self.envelope, self.envelope.tokens
        goodput = envelope.goodput_of(self.architectures[index]).value or 0.0
        available = envelope.window_s * goodput * envelope.batch.tokens / step_s
        if not available > 0.0:  # failures leave nothing of the window
            return Tokens(float("nan"), available, "window")
        n_active = float(self.n_active(index))
        budget = float(rule.budget(available, n_active))
        return Tokens(budget, available, rule.binding(budget, available, n_active))

    def loss(self, index: int, tokens: float) -> float:
        """Return the law's loss of a candidate after ``tokens`` tokens [nats/token].

        Under a critical batch the law sees the tokens that they count as (`efficiency`).
        """
        worth = self.efficiency(index, tokens)
        return float(
            self.envelope.law.loss(
                n_total=float(self.n_total(index)),
                n_active=float(self.n_active(index)),
                tokens=tokens if worth is None else worth.tokens_effective,
                expert_split=self.expert_split(index),
            )
        )

    def efficiency(self, index: int, tokens: float) -> TokenEfficiency | None:
        """Return what the tokens of a candidate are worth; None where each is worth the same."""
        rule, law = self.envelope.critical_batch, self.envelope.law
        if rule is None:
            return None
        b, beta = law.token_term
        floor = law.floor(
            n_total=float(self.n_total(index)),
            n_active=float(self.n_active(index)),
            expert_split=self.expert_split(index),
        )
        batch = float(self.envelope.batch.tokens)
        return rule.efficiency(tokens, batch, lambda effective: floor + b * effective**-beta)

    def expert_split(self, index: int) -> float:
        """G of a candidate; 1 for a dense model, which has no split [-]."""
        return self.architectures[index].expert_split or 1.0

    def peak_step_s(self, index: int) -> float:
        """Return a step time that no layout beats: every device at its peak [s].

        The peak is that of the batch's precision, and of bf16 where that is greater.
        """
        batch, cluster = self.envelope.batch, self.envelope.cluster
        ratio = max(1.0, cluster.pack.device.peak_ratio(batch.precision))
        peak = cluster.n_devices * cluster.peak_flops * ratio
        return float(self.architectures[index].flops_per_token()) * batch.tokens / peak

    def optimistic_loss(self, index: int) -> float:
        """Return a lower bound of a candidate's loss: every device at its peak [nats/token]."""
        tokens = self.tokens(index, self.peak_step_s(index)).tokens
        return float("inf") if np.isnan(tokens) else self.loss(index, tokens)

    def priced(self, index: int, rows: NDArray[np.int64] | None = None) -> Priced:
        """Price layouts that are legal for a candidate: the given rows, or all of them."""
        rows = self.legal_rows(index) if rows is None else rows
        return Priced(rows, *self.price(index, rows))

    def allowed(self, priced: Priced) -> NDArray[np.bool_]:
        """Mark the layouts that fit and need no surface beyond a range that the envelope keeps."""
        fits = priced.memory_bytes <= self.envelope.memory_cap_bytes
        return fits & ~self._refused[priced.rows]

    @cached_property
    def sizes(self) -> Sizes:
        """What the losses of all candidates depend on beside their steps."""
        n = range(len(self.architectures))
        goodputs = [self.envelope.goodput_of(a).value or 0.0 for a in self.architectures]
        return Sizes(
            n_total=np.array([self.n_total(i) for i in n], dtype=np.float64),
            n_active=np.array([self.n_active(i) for i in n], dtype=np.float64),
            expert_split=np.array([self.expert_split(i) for i in n], dtype=np.float64),
            tokens=self.envelope.window_s * self.envelope.batch.tokens * np.array(goodputs),
        )

    def losses(
        self, indices: NDArray[np.int64], step_s: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return the losses of candidates with these steps [nats/token]; inf without tokens.

        Parameters
        ----------
        indices : array of int, shape (n,)
        step_s : array of shape (n,)
            Step times [s]; inf gives no tokens.
        """
        sizes = self.sizes
        budget = self.envelope.tokens.budget(
            sizes.tokens[indices] / step_s, sizes.n_active[indices]
        )
        found = np.full(len(indices), inf)
        some = budget > 0.0  # False for NaN
        if self.envelope.critical_batch is not None:
            for i in np.flatnonzero(some):
                found[i] = self.loss(int(indices[i]), float(budget[i]))
        elif some.any():
            at = indices[some]
            found[some] = self.envelope.law.loss(
                n_total=sizes.n_total[at],
                n_active=sizes.n_active[at],
                tokens=budget[some],
                expert_split=sizes.expert_split[at],
            )
        return found

    def loss_tolerance(self, best: Outcome) -> float:
        """Return what the stated MFU error can move a candidate's loss by [nats/token].

        The window's tokens are proportional to MFU, so with an MFU lower by e it delivers
        ``(1 - e) D*``; a cap that still binds then leaves the loss where it is.
        """
        available = self.tokens(best.index, best.step_s).available
        fewer = min(best.tokens, available * (1.0 - self.envelope.mfu_error))
        return self.loss(best.index, fewer) - best.loss

    def solve_candidate(self, index: int) -> Outcome:
        """Find the best layout of a candidate, its tokens and its loss."""
        priced = self.priced(index)
        return self.outcome(index, priced, self.best_of(priced))

    def best_of(self, priced: Priced) -> int | None:
        """Return the place of the layout with the shortest step that is allowed, or None."""
        allowed = self.allowed(priced)
        if not allowed.any():
            return None
        return int(np.argmin(np.where(allowed, priced.step_s, np.inf)))  # the first of equals

    def outcome(
        self,
        index: int,
        priced: Priced,
        best: int | None,
        *,
        legal: int | None = None,
        cutoff_s: float = inf,
    ) -> Outcome:
        """Say what follows for a candidate from its best layout.

        Parameters
        ----------
        index : int
            The candidate.
        priced : Priced
            Its legal layouts, or those in blocks whose bound is at most ``cutoff_s``.
        best : int, optional
            Place of the best layout in ``priced``; None if none fits, and the outcome says why.
        legal : int, optional
            Number of its legal layouts; those of ``priced`` unless given.
        cutoff_s : float
            See `Outcome`.
        """
        counts = self.counts(priced, legal)
        if best is None:
            why = without_layout(
                self.envelope,
                self.table,
                self.architectures[index],
                priced.memory_bytes,
                self._refused[priced.rows],
                self.largest_all_to_all,
            )
            return self._outcome(index, cutoff_s, counts, why)
        step_s, memory = float(priced.step_s[best]), float(priced.memory_bytes[best])
        row = int(priced.rows[best])
        budget = self.tokens(index, step_s)
        if np.isnan(budget.tokens):
            why = without_tokens(self.envelope, float(self.n_active(index)), budget.available)
            rejected = self._outcome(index, cutoff_s, counts, why)
            return replace(rejected, step_s=step_s, memory_bytes=memory, nearest_row=row)
        return replace(
            self._outcome(index, cutoff_s, counts, Rejection("", "", nan)),
            row=row,
            step_s=step_s,
            memory_bytes=memory,
            tokens=budget.tokens,
            loss=self.loss(index, budget.tokens),
            binding=budget.binding,
        )

    @staticmethod
    def _outcome(index: int, cutoff_s: float, counts: Counts, why: Rejection) -> Outcome:
        """Return an outcome without a layout."""
        return Outcome(index, cutoff_s, -1, nan, nan, nan, nan, "", *why, counts)

    def discarded_whole(self, index: int, bound_s: float) -> Discarded:
        """Return a candidate none of whose layouts was looked at; ``bound_s`` of its step."""
        return Discarded(index, 0.0, bound_s, self.all_discarded)

    @cached_property
    def all_discarded(self) -> Counts:
        """Counts of a candidate none of whose layouts was looked at."""
        return Counts(len(self.table), 0, 0, len(self.table), 0, 0)

    def counts(self, priced: Priced, legal: int | None = None) -> Counts:
        """Count how the layouts of a candidate fared; ``legal`` as in `outcome`."""
        fits = priced.memory_bytes <= self.envelope.memory_cap_bytes
        legal = len(priced.rows) if legal is None else legal
        return Counts(
            plans=len(self.table),
            infeasible=len(self.table) - legal,
            priced=len(priced.rows),
            discarded=legal - len(priced.rows),
            over_memory=int(np.count_nonzero(~fits)),
            refused=int(np.count_nonzero(fits & self._refused[priced.rows])),
        )

    def least_steps(self, index: int, caps_bytes: tuple[float, ...]) -> NDArray[np.float64]:
        """Return a candidate's shortest step under each memory cap [s]; inf where none fits."""
        rows, step_s, memory = self.priced(index)
        allowed = np.where(self._refused[rows], np.inf, step_s)
        return np.array(
            [np.min(allowed[memory <= cap], initial=np.inf) for cap in caps_bytes], dtype=np.float64
        )
