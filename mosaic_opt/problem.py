"""The bilevel problem of an envelope, as pure functions of a candidate's index.

Upper level: which architecture and how many tokens. Lower level: which layout. For a candidate
the best layout is the feasible one with the shortest step; its tokens follow in closed form, and
its loss from the law:

    D* = T_train eta_good B_global T_seq / min over feasible P of t_iter(Z, P)          (25)
    loss = L(N_tot, N_act, min(D*, caps), G)                                            (10)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, floor, inf, isfinite, log10
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mosaic_opt.envelope import SECONDS_PER_DAY, Envelope
from mosaic_opt.errors import MosaicError
from mosaic_opt.token_efficiency import TokenEfficiency
from perfmodel.architecture import Architecture
from perfmodel.batch import alike_of, loads_of, plan_matrix, price
from perfmodel.calibration.stacks import StackProfile, load_stack
from perfmodel.layout_search import nearest_to_legal
from perfmodel.mesh import PlanDims
from perfmodel.plan import Plan, PlanTable, legal_mask
from perfmodel.step import StepEstimate, estimate


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
    def _matrix(self) -> NDArray[np.float64]:
        return plan_matrix(self.table)

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

    def n_active(self, index: int) -> int:
        """Return the active parameters under the envelope's convention [-]."""
        return self.architectures[index].n_active(self.envelope.parameter_convention)

    def n_total(self, index: int) -> int:
        """Return the stored parameters under the envelope's convention [-]."""
        return self.architectures[index].n_total(self.envelope.parameter_convention)

    def legal_rows(self, index: int) -> NDArray[np.int64]:
        """Return the rows of the table that are legal for a candidate, ascending."""
        mask = legal_mask(self.table, self.architectures[index].rule_variables())
        return np.flatnonzero(mask).astype(np.int64)

    def price(
        self, index: int, rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return step times [s] and memory [B] of a candidate under the given layouts."""
        envelope = self.envelope
        return price(
            self.architectures[index],
            self._matrix,
            rows,
            hardware=envelope.cluster.constants_for(envelope.batch.precision),
            stack=self.profile.stack(),
            optimizer=envelope.batch.optimizer.dims,
            seq_len=envelope.batch.seq_len,
            global_batch=envelope.batch.global_batch,
            alike=self.alike,
            loads=self.loads,
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

    def tokens(self, index: int, step_s: float) -> Tokens:
        """Return the token budget of a candidate whose step takes ``step_s`` [s]."""
        envelope, rule = self.envelope, self.envelope.tokens
        goodput = envelope.goodput_of(self.architectures[index]).value or 0.0
        available = envelope.window_s * goodput * envelope.batch.tokens / step_s
        if not available > 0.0:  # failures leave nothing of the window
            return Tokens(float("nan"), available, "window")
        n_active = float(self.n_active(index))
        return Tokens(
            float(rule.budget(available, n_active)),
            available,
            rule.binding(available, n_active),
        )

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
        rows, step_s, memory = priced
        fits = memory <= self.envelope.memory_cap_bytes
        refused = self._refused[rows]
        counts = self.counts(priced, legal)
        if best is None:
            return self._without_layout(index, counts, memory, fits, refused)
        budget = self.tokens(index, float(step_s[best]))
        if np.isnan(budget.tokens):
            rejected = self._without_tokens(index, counts, budget)
            return replace(
                rejected,
                step_s=float(step_s[best]),
                memory_bytes=float(memory[best]),
                nearest_row=int(rows[best]),
                cutoff_s=cutoff_s,
            )
        return Outcome(
            index=index,
            cutoff_s=cutoff_s,
            row=int(rows[best]),
            step_s=float(step_s[best]),
            memory_bytes=float(memory[best]),
            tokens=budget.tokens,
            loss=self.loss(index, budget.tokens),
            binding=budget.binding,
            reason="",
            detail="",
            shortfall=float("nan"),
            counts=counts,
        )

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

    def _without_layout(
        self,
        index: int,
        counts: Counts,
        memory: NDArray[np.float64],
        fits: NDArray[np.bool_],
        refused: NDArray[np.bool_],
    ) -> Outcome:
        cap = self.envelope.memory_cap_bytes
        short = float("nan")
        if not len(memory):
            reason, detail = "no_legal_layout", self._why_illegal(index)
        elif not fits.any():
            leanest = float((memory if refused.all() else memory[~refused]).min())
            short = leanest - cap
            reason = "memory"
            detail = (
                f"the leanest layout needs {leanest / 1e9:.1f} GB of {cap / 1e9:.1f} GB: "
                f"{short / 1e9:.1f} GB short on every device"
            )
        else:
            reason = "beyond_measured_range"
            detail = (
                f"every layout that fits needs expert parallelism over more than "
                f"{self.largest_all_to_all:g} ranks, which nobody measured; "
                "extrapolation: flag would admit it"
            )
        return self._failed(index, counts, reason, detail, short)

    def _why_illegal(self, index: int) -> str:
        """Name the rules that a candidate breaks in the layout, of a sample, that breaks fewest."""
        envelope = self.envelope
        return nearest_to_legal(
            self.table,
            self.architectures[index].rule_variables(),
            envelope.cluster.n_devices,
            envelope.batch.seq_len,
            envelope.batch.global_batch,
        )

    def _without_tokens(self, index: int, counts: Counts, budget: Tokens) -> Outcome:
        rule, n_active = self.envelope.tokens, float(self.n_active(index))
        least = rule.least_tokens_per_parameter
        if rule.max_tokens is not None and rule.max_tokens < least * n_active:
            detail = (
                f"max_tokens={rule.max_tokens:g} is less than the {least * n_active:.4g} tokens "
                f"that {least:g} tokens per parameter ask for"
            )
            return self._failed(index, counts, "tokens", detail, float("nan"))
        reached = budget.available / n_active
        more_days = self.envelope.window_days * (least / reached - 1.0) if reached else inf
        if not isfinite(more_days):
            window = f"a window of {self.envelope.window_days:g} days"
            detail = f"its best layout sees next to no tokens in {window}"
            return self._failed(index, counts, "tokens", detail, float("nan"))
        more_days = max(more_days, 1e-9 * self.envelope.window_days)  # short by a rounding
        detail = (
            f"its best layout sees {reached:.4g} tokens per parameter in the window, of at least "
            f"{least:g}: {_at_least(more_days)} more days would do"
        )
        return self._failed(index, counts, "tokens", detail, more_days * SECONDS_PER_DAY)

    @staticmethod
    def _failed(index: int, counts: Counts, reason: str, detail: str, shortfall: float) -> Outcome:
        nan = float("nan")
        return Outcome(index, inf, -1, nan, nan, nan, nan, "", reason, detail, shortfall, counts)


def _at_least(value: float) -> str:
    """Write a positive number with two digits, rounded up."""
    step = 10.0 ** (floor(log10(value)) - 1)
    return f"{ceil(value / step * (1.0 - 1e-12)) * step:.6g}"
