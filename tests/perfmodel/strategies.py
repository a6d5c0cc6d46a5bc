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
from perfmodel.hardware import Hardware, Host
from perfmodel.iteration import StageSetting, StageTime, rank_wait, time_in_setting
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
from perfmodel.modes import ModeTotals
from perfmodel.plan import Plan, Recompute, plan_dims
from perfmodel.plan_space import PlanSpace
from perfmodel.plan_table import PlanTable, legal_mask
from perfmodel.stack import Stack
from perfmodel.step import StepModel

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


def latent(n_heads: int = 8, **changes: int) -> dict[str, Any]:
    """Return the fields of a small latent attention, for `moe` and `dense`."""
    sizes = {"q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 64} | changes
    sizes = {"qk_rope_head_dim": 32, "v_head_dim": 48} | sizes
    width = sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"]
    return {"n_heads": n_heads, "n_kv_heads": n_heads, "head_dim": width, "latent": sizes}


@st.composite
def rare_parts(draw: st.DrawFn, sparse: bool, n_layers: int, n_heads: int) -> dict[str, Any]:
    """Draw the parts that most models do not have."""
    uses_latent = draw(st.booleans())
    flags = ["output", "ffn", "norms", "head", *(["experts", "router"] if sparse else [])]
    if not uses_latent:
        flags.append("qkv")
    fields: dict[str, Any] = {
        "biases": {flag: draw(st.booleans()) for flag in flags},
        "attention_sinks": draw(st.booleans()),
        "norms_per_layer": draw(st.integers(1, 4)),
        "learned_positions": draw(st.sampled_from((0, 96))),
        "mtp_layers": draw(st.sampled_from((0, 0, 1, 2))),
    }
    if uses_latent:
        fields |= latent(n_heads, q_lora_rank=draw(st.sampled_from((0, 96))))
    else:
        fields["qk_norm"] = draw(st.sampled_from(("none", "head", "full")))
    if draw(st.booleans()):
        fraction = draw(st.integers(1, n_layers)) / n_layers
        fields["window"] = {"width": draw(st.sampled_from((128, 1024))), "fraction": fraction}
    if not fields["mtp_layers"] and draw(st.booleans()):
        fields["extra"] = {"parameters": n_layers * 4096, "reason": "something else"}
    return fields


@st.composite
def architectures(
    draw: st.DrawFn, *, sparse: bool | None = None, rare: bool | None = None
) -> Architecture:
    """Draw a model: dense or sparse, any number of leading dense layers, GQA, tied, ungated.

    Every second one has `rare` parts too: latent attention, dense layers between sparse ones,
    biases, windows, multi-token prediction.

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
    if rare is None:
        rare = draw(st.booleans())
    if rare:
        fields |= draw(rare_parts(sparse, n_layers, fields["n_heads"]))
    first_k_dense, moe_every = 0, 1
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
        if rare:
            moe_every = fields["moe_every"] = draw(st.sampled_from((1, 2, 3)))
            fields["shared_expert_gate"] = fields["d_shared"] > 0 and draw(st.booleans())
    if first_k_dense or moe_every > 1 or not sparse or draw(st.booleans()):
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


def stage_time(
    t: ModeTotals,
    stack: Stack,
    p: PlanDims,
    n_moe: float,
    n_dense: float,
    head: float,
    sharding: float,
    hand_off: float,
) -> StageTime:
    """One microbatch on a stage of the given layers; `sharding`, `hand_off` before overlap [s]."""
    wait = rank_wait(stack, p)
    setting = StageSetting(n_moe, n_dense, 0.0, 0.0, wait, sharding, hand_off)
    return time_in_setting(stack, t, setting, head)


def dims(**degrees: float) -> PlanDims:
    """Build a layout as the formulas take it; degrees not given are 1, and no recomputation."""
    needed = [name for name in PlanDims._fields if name not in PlanDims._field_defaults]
    fields = dict.fromkeys(needed, 1.0) | {"recompute": 0.0} | degrees
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
    split: str  # "tp", "kv", "none", "expert" or "whole expert", which ETP does not divide

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))


def tensors(a: Architecture) -> list[Tensor]:
    """List every parameter tensor of a model, one by one; a tied head is not one."""
    found = [Tensor("embedding", (a.vocab_size, a.d_model), "tp")]
    if a.learned_positions:
        found.append(Tensor("positions", (a.learned_positions, a.d_model), "none"))
    if not a.tied_embeddings:
        found.append(Tensor("head", (a.d_model, a.vocab_size), "tp"))
    if a.biases.head:
        found.append(Tensor("final", (a.vocab_size,), "tp"))
    found += _norms("final", a, 1)
    for layer in range(a.n_layers):
        found += _layer(layer, a, sparse_layer(a, layer))
        if a.extra is not None:
            found.append(Tensor(layer, (64, a.extra.parameters // a.n_layers // 64), "tp"))
    return found


def sparse_layer(a: Architecture, layer: int) -> bool:
    """Say whether a layer has experts: the last of every group behind the leading dense ones."""
    if not a.n_experts or layer < a.first_k_dense:
        return False
    return list(range(a.first_k_dense, a.n_layers))[a.moe_every - 1 :: a.moe_every].count(layer) > 0


def prediction_tensors(a: Architecture) -> list[Tensor]:
    """List every tensor of multi-token prediction; embedding and head are the model's."""
    one = _layer("prediction", a, sparse_layer(a, a.n_layers - 1))
    one += _norms("prediction", a, 3)
    one.append(Tensor("prediction", (2 * a.d_model, a.d_model), "tp"))
    return one * a.mtp_layers


def _norms(layer: int | str, a: Architecture, count: int) -> list[Tensor]:
    return [Tensor(layer, (a.d_model,), "none")] * (count * (2 if a.biases.norms else 1))


def _block(layer: int | str, a: Architecture, width: int, split: str, bias: bool) -> list[Tensor]:
    ups = 2 if a.gated else 1
    found = [Tensor(layer, (a.d_model, width), split)] * ups
    found.append(Tensor(layer, (width, a.d_model), split))
    if bias:
        found += [Tensor(layer, (width,), split)] * ups
        whole = "whole expert" if split == "expert" else "none"
        found.append(Tensor(layer, (a.d_model,), whole))
    return found


def _attention(layer: int | str, a: Architecture) -> list[Tensor]:
    d, m = a.d_model, a.latent
    if m is not None:
        query, found = d, [Tensor(layer, (d, m.kv_lora_rank + m.qk_rope_head_dim), "none")]
        found.append(Tensor(layer, (m.kv_lora_rank,), "none"))
        if m.q_lora_rank:
            query = m.q_lora_rank
            found += [Tensor(layer, (d, query), "none"), Tensor(layer, (query,), "none")]
        unfolded = m.qk_nope_head_dim + m.v_head_dim
        return [
            *found,
            Tensor(layer, (query, a.n_heads * (m.qk_nope_head_dim + m.qk_rope_head_dim)), "tp"),
            Tensor(layer, (m.kv_lora_rank, a.n_heads * unfolded), "tp"),
            Tensor(layer, (a.n_heads * m.v_head_dim, d), "tp"),
        ]
    query, keys = a.n_heads * a.head_dim, a.n_kv_heads * a.head_dim
    found = [Tensor(layer, (d, query), "tp"), Tensor(layer, (query, d), "tp")]
    found += [Tensor(layer, (d, keys), "kv")] * 2
    if a.biases.qkv:
        found += [Tensor(layer, (query,), "tp"), *[Tensor(layer, (keys,), "kv")] * 2]
    if a.qk_norm == "full":
        found += [Tensor(layer, (query,), "tp"), Tensor(layer, (keys,), "kv")]
    if a.qk_norm == "head":
        found += [Tensor(layer, (a.head_dim,), "none")] * 2
    return found


def _layer(layer: int | str, a: Architecture, sparse: bool) -> list[Tensor]:
    found = _norms(layer, a, a.norms_per_layer) + _attention(layer, a)
    if a.biases.output:
        found.append(Tensor(layer, (a.d_model,), "none"))
    if a.attention_sinks:
        found.append(Tensor(layer, (a.n_heads,), "tp"))
    if not sparse:
        return found + _block(layer, a, a.d_ff, "tp", a.biases.ffn)
    found.append(Tensor(layer, (a.d_model, a.n_experts), "none"))  # router
    if a.biases.router:
        found.append(Tensor(layer, (a.n_experts,), "none"))
    if a.d_shared:
        found += _block(layer, a, a.d_shared, "tp", a.biases.experts)
    if a.shared_expert_gate:
        found.append(Tensor(layer, (a.d_model,), "none"))
    return found + _block(layer, a, a.d_expert, "expert", a.biases.experts) * a.n_experts


def core_flop(a: Architecture, seq_len: int) -> tuple[float, float]:
    """Sum causal attention's products over its scores: forward and backward, a token and layer.

    QK and PV forward; dV and dP as wide as the values, scores again, dQ and dK as the keys.
    """
    keys = a.head_dim
    values = a.latent.v_head_dim if a.latent is not None else keys
    scores, windowed = seq_len / 2, seq_len / 2
    if a.window is not None and a.window.width < seq_len:
        w = a.window.width  # a triangle, then a band
        windowed = (w * w / 2 + (seq_len - w) * w) / seq_len
    share = a.window.fraction if a.window is not None else 0.0
    one = 2 * a.n_heads * (share * windowed + (1 - share) * scores)
    return one * (keys + values), one * (3 * keys + 2 * values)


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
        host=Host(link_bw=inf, memory_bw=inf),
    )


def ideal_stack(**changes: float) -> Stack:
    """Build a stack whose host takes no time, with some constants changed."""
    neutral = {
        "optimizer_matmul_eff": inf,
        "device_scale": 1.0,
        "attention_scale": 1.0,
        "elementwise_scale": 1.0,
        "router_scale": 1.0,
        "optimizer_scale": 1.0,
        "tp_exposed": 1.0,
        "pp_hidden": 1.0,
        "launch_share": 1.0,
        "gradient_bytes": 4.0,
    }
    fields = dict.fromkeys(Stack._fields, 0.0) | neutral | changes
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
