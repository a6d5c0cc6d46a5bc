"""Random models, runs and legal plans, and machines simple enough to predict by hand."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from math import inf
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import strategies as st

from perfmodel.architecture import Architecture
from perfmodel.calibration.stacks import StackProfile, load_stack
from perfmodel.cluster import Batch, Cluster, Optimizer
from perfmodel.collectives import AllToAllSurface, Fabric, RingSurface
from perfmodel.hardware import Hardware
from perfmodel.kernels import (
    AttentionSurface,
    DeviceRates,
    ElementwiseSurface,
    GemmSurface,
    GroupedGemmSurface,
    HeadSurface,
    TopKSurface,
)
from perfmodel.mesh import PlanDims
from perfmodel.plan import Plan, PlanSpace, PlanTable, Recompute, legal_mask
from perfmodel.stack import Stack
from perfmodel.step import StepModel, plan_dims

PACK = "p6-b200"
STACK = "megatron-eager"


# ---------------------------------------------------------------- models


def moe(**changes: Any) -> Architecture:
    """Build a small sparse model, with one dense layer of four unless told otherwise."""
    fields: dict[str, Any] = {
        "n_layers": 4,
        "d_model": 512,
        "n_heads": 8,
        "n_kv_heads": 4,
        "head_dim": 64,
        "d_ff": 1536,
        "vocab_size": 32000,
        "n_experts": 16,
        "top_k": 2,
        "d_expert": 384,
        "d_shared": 256,
        "first_k_dense": 1,
    }
    return Architecture(**(fields | changes))


def dense(**changes: Any) -> Architecture:
    """Build a small dense model."""
    none = {"n_experts": 0, "top_k": 0, "d_expert": 0, "d_shared": 0, "first_k_dense": 0}
    return moe(**(none | changes))


@st.composite
def architectures(draw: st.DrawFn, *, sparse: bool | None = None) -> Architecture:
    """Draw a model: dense or sparse, any number of leading dense layers, GQA, tied, ungated.

    Sizes are multiples of small powers of 2, so that plenty of layouts are legal for it.
    """
    n_layers = draw(st.sampled_from((1, 2, 3, 4, 6, 8, 12)))
    n_kv_heads = draw(st.sampled_from((1, 2, 3, 4, 8)))
    fields: dict[str, Any] = {
        "n_layers": n_layers,
        "d_model": draw(st.integers(1, 24)) * 32,
        "n_heads": n_kv_heads * draw(st.sampled_from((1, 2, 4))),
        "n_kv_heads": n_kv_heads,
        "head_dim": draw(st.sampled_from((16, 64, 96, 128))),
        "vocab_size": draw(st.integers(1, 5000)),
        "gated": draw(st.booleans()),
        "tied_embeddings": draw(st.booleans()),
    }
    if sparse is None:
        sparse = draw(st.booleans())
    first_k_dense = 0
    if sparse:
        first_k_dense = draw(st.integers(0, n_layers))
        n_experts = draw(st.sampled_from((1, 4, 6, 8, 16, 32)))
        fields |= {
            "first_k_dense": first_k_dense,
            "n_experts": n_experts,
            "top_k": draw(st.integers(1, n_experts)),
            "d_expert": draw(st.integers(1, 24)) * 16,
            "d_shared": draw(st.sampled_from((0, 16, 160))),
        }
    if first_k_dense or not sparse or draw(st.booleans()):
        fields["d_ff"] = draw(st.integers(1, 24)) * 32
    return Architecture(**fields)


# ---------------------------------------------------------------- runs


class Run(NamedTuple):
    """A model, a layout that is legal for it, and what it runs on."""

    architecture: Architecture
    plan: Plan
    cluster: Cluster
    batch: Batch

    @property
    def model(self) -> StepModel:
        """The run, ready to be priced."""
        return self.under(profile())

    def under(self, stack: StackProfile) -> StepModel:
        """Return the run under another stack, ready to be priced."""
        return StepModel(*self, stack)

    @property
    def dims(self) -> PlanDims:
        """The layout as the formulas take it."""
        return plan_dims(self.plan)


SPACE = PlanSpace(etp=(1, 2, 4), vpp=(1, 2, 3), micro_batch=(1, 2, 4))


@lru_cache
def profile() -> StackProfile:
    """Read the stack profile once."""
    return load_stack(STACK)


@lru_cache
def fast_profile() -> StackProfile:
    """Take the host's time out of the profile, so that mostly the device sets the pace."""
    nothing = {"value": 0.0, "low": 0.0, "high": 0.0}
    constants = {
        name: constant.model_copy(update=nothing if name.endswith("_s") else {})
        for name, constant in profile().constants.items()
    }
    return profile().model_copy(update={"name": "fast-host", "constants": constants})


profiles = st.sampled_from((profile, fast_profile)).map(lambda read: read())


@lru_cache
def cluster(nodes: int) -> Cluster:
    """Read the pack of a cluster once."""
    return Cluster(hardware=PACK, nodes=nodes)


@lru_cache
def skeleton(nodes: int, seq_len: int, global_batch: int) -> PlanTable:
    """List every plan of `SPACE` on nodes of 8 devices."""
    return SPACE.skeleton(8 * nodes, seq_len, global_batch)


def legal_rows(architecture: Architecture, table: PlanTable) -> np.ndarray:
    """Return the rows of a table that are legal for a model."""
    return np.flatnonzero(legal_mask(table, architecture.rule_variables()))


batches = st.builds(
    Batch,
    global_batch=st.sampled_from((16, 32, 96)),
    seq_len=st.sampled_from((256, 2048, 4096)),
    optimizer=st.sampled_from(Optimizer),
)


@st.composite
def runs(draw: st.DrawFn, *, sparse: bool | None = None) -> Run:
    """Draw a legal run on one or two nodes, every degree and recompute mode included."""
    architecture = draw(architectures(sparse=sparse))
    batch = draw(batches)
    nodes = draw(st.sampled_from((1, 2)))
    table = skeleton(nodes, batch.seq_len, batch.global_batch)
    rows = legal_rows(architecture, table)
    row = rows[draw(st.integers(0, len(rows) - 1))]
    return Run(architecture, table.plan(int(row)), cluster(nodes), batch)


def dims(**degrees: float) -> PlanDims:
    """Build a layout as the formulas take it; what is not given is 1, and no recomputation."""
    fields = dict.fromkeys(PlanDims._fields, 1.0) | {"recompute": 0.0} | degrees
    return PlanDims(**{name: float(value) for name, value in fields.items()})


plans = st.builds(
    Plan,
    **{
        name: st.sampled_from((1, 1, 1, 2, 3, 4, 8))
        for name in ("tp", "etp", "ep", "pp", "vpp", "cp", "dp", "micro_batch")
    },
    recompute=st.sampled_from(Recompute),
)
"""Layouts of any kind: hardly one is legal for a given run."""


# ---------------------------------------------------------------- an independent count


class Tensor(NamedTuple):
    """One parameter tensor of a model, and how its elements are divided."""

    layer: int | str  # "embedding", "head" and "final" are outside of the layers
    shape: tuple[int, ...]
    split: str  # "tp", "kv", "none" or "expert"

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))


def tensors(a: Architecture) -> list[Tensor]:
    """List every parameter tensor of a model, one by one; a tied head is not one."""
    found = [Tensor("embedding", (a.vocab_size, a.d_model), "tp")]
    if not a.tied_embeddings:
        found.append(Tensor("head", (a.d_model, a.vocab_size), "tp"))
    found.append(Tensor("final", (a.d_model,), "none"))
    for layer in range(a.n_layers):
        query = (a.d_model, a.n_heads * a.head_dim)
        found += [Tensor(layer, (a.d_model,), "none")] * 2  # norms
        found += [Tensor(layer, query, "tp"), Tensor(layer, query[::-1], "tp")]
        found += [Tensor(layer, (a.d_model, a.n_kv_heads * a.head_dim), "kv")] * 2
        ups = 2 if a.gated else 1
        if a.n_experts == 0 or layer < a.first_k_dense:
            found += [Tensor(layer, (a.d_model, a.d_ff), "tp")] * ups
            found.append(Tensor(layer, (a.d_ff, a.d_model), "tp"))
            continue
        found.append(Tensor(layer, (a.d_model, a.n_experts), "none"))  # router
        if a.d_shared:
            found += [Tensor(layer, (a.d_model, a.d_shared), "tp")] * ups
            found.append(Tensor(layer, (a.d_shared, a.d_model), "tp"))
        for _ in range(a.n_experts):
            found += [Tensor(layer, (a.d_model, a.d_expert), "expert")] * ups
            found.append(Tensor(layer, (a.d_expert, a.d_model), "expert"))
    return found


def stage_of_layer(layer: int, n_layers: int, pp: int, vpp: int) -> int:
    """Deal the layers out in order: one chunk to each stage, round after round."""
    per_chunk = n_layers // (pp * vpp)
    return (layer // per_chunk) % pp


# ---------------------------------------------------------------- machines to predict by hand

PEAK = 1e15


def ideal_hardware(devices_per_node: int = 8) -> Hardware:
    """Build a machine that computes at its peak and moves data in no time at all."""
    ring = RingSurface(0.0, inf, 0.0, 0.0, inf, 0.0, 1.0, 0.0, inf, 0.0)
    attention = AttentionSurface(0.0, 0.0, 1.0, 1.0, 0.0)
    grouped = GroupedGemmSurface(0.0, 0.0, 1.0, 1.0)
    return Hardware(
        device=DeviceRates(peak_flops=PEAK, fp32_flops=PEAK, memory_bw=inf),
        gemm=GemmSurface(0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 2.0),
        grouped_forward=grouped,
        grouped_backward=grouped,
        attention_forward=attention,
        attention_backward=attention,
        head=HeadSurface(1.0, 1.0, 0.0, 0.0),
        topk=TopKSurface(0.0, 0.0, inf, inf),
        elementwise=ElementwiseSurface(0.0, 1.0),
        fabric=Fabric(
            devices_per_node=float(devices_per_node),
            all_to_all=AllToAllSurface(0.0, inf, inf, 0.0, 0.0, 0.0, inf, 0.0),
            all_reduce=ring,
            reduce_scatter=ring,
            all_gather=ring,
        ),
    )


def ideal_stack(**changes: float) -> Stack:
    """Build a stack whose host takes no time, with some constants changed."""
    fields = dict.fromkeys(Stack._fields, 0.0) | {"optimizer_matmul_eff": inf} | changes
    return Stack(**fields)


# ---------------------------------------------------------------- effort, without a clock


@contextmanager
def few_steps(limit: int = 3_000_000) -> Iterator[None]:
    """Fail, and come back, where the block executes more lines than `limit`."""
    left = limit

    def count(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            sys.settrace(None)
            pytest.fail(f"more than {limit} lines were executed")
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(before)
