"""Which training steps are measured: shapes, batches, recompute and ranks, drawn from ranges."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from random import Random

from pydantic import Field

from moe_ref.errors import MoeRefError
from perfmodel import Architecture, Batch, Plan, Recompute
from perfmodel.cluster import Cluster
from perfmodel.frozen import Frozen
from perfmodel.step import check

__all__ = ["CPU", "CUDA", "Cases", "Design", "StepCase", "cases_of"]

VOCABULARY = 512
HEAD_DIM = 64

MOST_DRAWS = 100_000
"""For the steps of one kind."""

ANY_PACK = "h100"
"""Rules of layouts ask a cluster for its number of devices alone."""


class StepCase(Frozen):
    """One optimizer step of the reference model.

    Layers after the first are sparse, with one shared expert of an expert's width; a dense block is
    four times as wide as the residual stream; one key and value head serves two query heads where
    their number is even, else all of them.

    Attributes
    ----------
    d_model, n_layers, n_experts, top_k, expert_split : int
        d, L, E, K and G [-].
    micro_batch, seq_len, microbatches : int
        Sequences of a microbatch, tokens of a sequence, microbatches of a rank.
    recompute : bool
        Whether every layer is computed again in the backward pass.
    ranks : int
        Processes, each with its own sequences.
    expert_parallel : bool
        Whether each rank holds a part of the experts, or all of them.
    apart : bool
        Whether ranks train models of their own and exchange nothing: what a busy neighbour costs.
    """

    d_model: int = Field(ge=HEAD_DIM, multiple_of=HEAD_DIM)
    n_layers: int = Field(ge=2)
    n_experts: int = Field(ge=2)
    top_k: int = Field(ge=1)
    expert_split: int = Field(ge=1)
    micro_batch: int = Field(ge=1)
    seq_len: int = Field(ge=1)
    microbatches: int = Field(default=1, ge=1)
    recompute: bool = False
    ranks: int = Field(default=1, ge=1)
    expert_parallel: bool = False
    apart: bool = False

    @property
    def id(self) -> str:
        """Name of the case in tables."""
        words = [
            f"d{self.d_model}-L{self.n_layers}-E{self.n_experts}-K{self.top_k}"
            f"-G{self.expert_split}-B{self.micro_batch}x{self.microbatches}-S{self.seq_len}"
        ]
        words += ["full"] * self.recompute
        if self.ranks > 1:
            kind = "ep" if self.expert_parallel else "dp"
            words.append(f"{'apart' if self.apart else kind}{self.ranks}")
        return "-".join(words)

    @cached_property
    def architecture(self) -> Architecture:
        """The model."""
        heads, d_ff = self.d_model // HEAD_DIM, 4 * self.d_model
        width = d_ff // self.expert_split
        return Architecture(
            name=f"d{self.d_model}-L{self.n_layers}-E{self.n_experts}",
            n_layers=self.n_layers,
            d_model=self.d_model,
            n_heads=heads,
            n_kv_heads=1 if heads % 2 else heads // 2,
            head_dim=HEAD_DIM,
            d_ff=d_ff,
            vocab_size=VOCABULARY,
            n_experts=self.n_experts,
            top_k=self.top_k,
            d_expert=width,
            d_shared=width,
            first_k_dense=1,
        )

    @property
    def plan(self) -> Plan:
        """The layout: replicas of everything, or of all but the experts; no sharded optimizer."""
        return Plan(
            dp=self.ranks,
            ep=self.ranks if self.expert_parallel else 1,
            micro_batch=self.micro_batch,
            recompute=Recompute.FULL if self.recompute else Recompute.NONE,
            zero=0,
        )

    @property
    def batch(self) -> Batch:
        """What a step of all ranks works on."""
        sequences = self.ranks * self.micro_batch * self.microbatches
        return Batch(global_batch=sequences, seq_len=self.seq_len)

    def cluster(self, pack: str) -> Cluster:
        """Return as many devices of one node as there are ranks."""
        return Cluster(hardware=pack, nodes=1, devices=self.ranks)

    @property
    def flop(self) -> float:
        """``6 N_act D`` of one rank's part, and a forward pass more where it is recomputed."""
        tokens = self.micro_batch * self.microbatches * self.seq_len
        passes = 8.0 if self.recompute else 6.0
        return passes * self.architecture.n_active() * tokens


@dataclass(frozen=True)
class Design:
    """Ranges that cases are drawn from.

    Attributes
    ----------
    axes : dict of str to tuple of int
        Values of each size of `StepCase`.
    flop : (float, float)
        Least and most of one step of a rank [FLOP].
    parameters : float
        Most of a model, without embedding and head.
    fitted, scored, parallel : int
        Steps that fit the stack, steps that score it, and steps over two ranks, half of them with
        expert parallelism.
    beside : int
        Of the steps that fit the stack, those that are timed beside a busy neighbour as well.
    """

    axes: dict[str, tuple[int, ...]]
    flop: tuple[float, float]
    parameters: float
    fitted: int = 24
    scored: int = 36
    parallel: int = 12
    beside: int = 8


CPU = Design(
    axes={
        "d_model": (64, 128, 192, 256, 384),
        "n_layers": (2, 3, 4, 6, 8),
        "n_experts": (4, 8, 16, 32, 64),
        "top_k": (1, 2, 4, 8),
        "expert_split": (1, 2, 4),
        "micro_batch": (1, 2, 4, 8),
        "seq_len": (128, 256, 512),
        "microbatches": (1, 2),
    },
    flop=(1e9, 2.5e10),
    parameters=2e7,
)
"""Steps of 30 ms to a second on a core."""

CUDA = Design(
    axes={
        "d_model": (512, 1024, 1536, 2048, 3072),
        "n_layers": (4, 6, 8, 12),
        "n_experts": (8, 16, 32, 64),
        "top_k": (1, 2, 4, 8),
        "expert_split": (2, 4, 8),
        "micro_batch": (1, 2, 4, 8),
        "seq_len": (1024, 2048, 4096),
        "microbatches": (1, 2),
    },
    flop=(5e12, 2e14),
    parameters=3e9,
    parallel=0,
    beside=0,
)
"""Steps of tens of milliseconds to a second on an accelerator."""


@dataclass(frozen=True)
class Cases:
    """Steps by what they are for; no two are equal."""

    fitted: tuple[StepCase, ...]
    scored: tuple[StepCase, ...]
    parallel: tuple[StepCase, ...]
    beside: tuple[StepCase, ...]


def cases_of(design: Design, seed: int = 0) -> Cases:
    """Draw the steps of a design; the same ones for the same seed.

    They have each width in turn, and every second one recomputes. Those that break a rule, or are
    smaller or larger than the design allows, are drawn again.

    Raises
    ------
    MoeRefError
        A design that allows too few.
    """
    draw, found = Random(f"steps {seed}"), dict[str, StepCase]()
    widths = design.axes["d_model"]

    def add(count: int, **fixed: int | bool) -> tuple[StepCase, ...]:
        cases: list[StepCase] = []
        for _ in range(MOST_DRAWS):
            if len(cases) == count:
                return tuple(cases)
            sizes: dict[str, int | bool] = {k: draw.choice(v) for k, v in design.axes.items()}
            sizes["d_model"] = widths[len(cases) % len(widths)]
            sizes["recompute"] = len(cases) % 2 == 1
            sizes |= fixed
            if sizes["top_k"] >= sizes["n_experts"]:
                continue
            case = StepCase.model_validate(sizes)
            if case.id not in found and _allowed(case, design):
                found[case.id] = case
                cases.append(case)
        raise MoeRefError(
            f"the design gives {len(cases)} of {count} steps after {MOST_DRAWS} draws: widen its "
            "axes, its flop or its parameters."
        )

    fitted, scored = add(design.fitted), add(design.scored)
    half = design.parallel // 2
    parallel = add(half, ranks=2) + add(design.parallel - half, ranks=2, expert_parallel=True)
    beside = [case.model_copy(update={"ranks": 2, "apart": True}) for case in fitted]
    return Cases(fitted, scored, parallel, tuple(beside[: design.beside]))


def _allowed(case: StepCase, design: Design) -> bool:
    """Say whether a case is within the limits and the rules of layouts."""
    low, high = design.flop
    if not low <= case.flop <= high or case.architecture.n_total() > design.parameters:
        return False
    return not check(case.architecture, case.plan, case.cluster(ANY_PACK), case.batch)
