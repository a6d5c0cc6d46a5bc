"""Bytes on one device, in Megatron's buckets, stage by stage.

Parameters fall in two classes: those of attention, dense blocks, shared experts, routers, norms,
embedding and head, which are sharded over DP*CP; and those of routed experts, which are sharded
over EDP. What is sharded follows the ZeRO stage: 0 nothing, 1 the optimizer's state, 2 gradients
too, 3 weights too. bf16 weights and main gradients are resident on every replica otherwise: with
Megatron's 2 + 4 bytes a parameter.

Activations of a layer are in :mod:`perfmodel.activations`. What depends on the software, such as
how many bytes cross-entropy needs for a logit, is in the stack (:class:`perfmodel.stack.Stack`).
"""

from __future__ import annotations

from typing import NamedTuple

from perfmodel._jit import formula
from perfmodel.activations import LayerBytes, layer_bytes
from perfmodel.attention import attention_parameters
from perfmodel.dims import ArchitectureDims
from perfmodel.kernels import BF16_BYTES
from perfmodel.mesh import (
    PlanDims,
    StageContent,
    dense_layers_of_stage,
    is_uneven,
    stage_content,
    state_shards,
)
from perfmodel.schedule import in_flight_microbatches
from perfmodel.stack import Stack

GATHERED_UNITS = 2.0
"""Layers whose weights ZeRO-3 holds whole: the one at work and the one fetched ahead [-]."""


class OptimizerDims(NamedTuple):
    """What an optimizer stores and moves for one parameter."""

    state_bytes: float  # master weight and moments, fp32 [B]
    traffic_bytes: float  # read and written in one step [B]
    matrix_iterations: float  # Newton-Schulz steps on every matrix [-]


class StageBytes(NamedTuple):
    """Memory of one device of a stage, by bucket [B]."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float  # context, communicators, workspaces of libraries
    working: float  # taken and given back in the backward pass
    reserve: float  # held by the allocator and in no tensor


@formula
def stage_allocated(m: StageBytes) -> float:
    """Bytes in tensors at the peak: what the framework's allocator calls allocated [B]."""
    return m.weights + m.gradients + m.optimizer + m.activations + m.logits + m.working


@formula
def stage_total(m: StageBytes) -> float:
    """Sum of the buckets [B]."""
    return stage_allocated(m) + m.reserve + m.buffers


class RankParameters(NamedTuple):
    """Parameters of the parts of a model on one rank [-]; they depend on (tp, etp, ep)."""

    layer: float  # attention and norms of one layer
    extra: float  # of one decoder layer, beside the modelled ones
    dense: float  # dense block of one layer
    moe: float  # router and shared experts of one layer
    experts: float  # routed experts of one layer
    vocabulary: float  # embedding or head
    head_bias: float
    prediction: float  # of a prediction layer, beside its layer


@formula
def rank_parameters(a: ArchitectureDims, p: PlanDims) -> RankParameters:
    """Return the parameters of the parts of a model on one rank [-]."""
    ups = a.ffn_matrices - 1.0
    expert = a.ffn_matrices * a.d_model * a.d_expert / p.etp
    expert += a.expert_bias * (ups * a.d_expert / p.etp + a.d_model)
    shared = a.d_model * a.ffn_matrices + a.expert_bias * ups
    return RankParameters(
        layer=attention_parameters(a, p.tp),
        extra=a.extra / p.tp,
        dense=(a.ffn_matrices * a.d_model + a.ffn_bias * ups) * a.d_ff / p.tp
        + a.ffn_bias * a.d_model,
        moe=shared * a.d_shared / p.tp + a.d_model * a.n_experts + a.moe_vectors,
        experts=a.n_experts / p.ep * expert,
        vocabulary=a.vocab_size * a.d_model / p.tp,
        head_bias=a.head_bias * a.vocab_size / p.tp,
        prediction=2.0 * a.d_model * a.d_model / p.tp + 3.0 * a.final_norm,
    )


@formula
def dense_of(a: ArchitectureDims, r: RankParameters, c: StageContent) -> float:
    """Parameters of a stage on one rank, routed experts excepted [-].

    The loss needs the head: where embedding and head are tied and not on one stage, a second copy
    of the embedding. Prediction layers need the embedding as well, and have a copy of it where
    neither the embedding nor a tied head is on their stage (Megatron-LM #5034).
    """
    count = (c.dense + c.moe) * r.layer + c.dense * r.dense + c.moe * r.moe + c.layers * r.extra
    shared_head = False
    if c.embedding > 0.0:
        count += r.vocabulary + a.positions * a.d_model
    if c.loss > 0.0:
        count += a.final_norm + r.head_bias
        shared_head = a.tied_embeddings > 0.0
        if not shared_head or c.embedding == 0.0:
            count += r.vocabulary
    if c.prediction > 0.0:
        count += c.prediction * r.prediction
        if not shared_head and c.embedding == 0.0:
            count += r.vocabulary
    return count


@formula
def dense_parameters(a: ArchitectureDims, p: PlanDims, c: StageContent) -> float:
    """Parameters of a stage on one rank, routed experts excepted [-]."""
    return dense_of(a, rank_parameters(a, p), c)


@formula
def expert_parameters(a: ArchitectureDims, p: PlanDims, c: StageContent) -> float:
    """Parameters of the routed experts of a stage on one rank [-]."""
    return c.moe * rank_parameters(a, p).experts


@formula
def stage_dense_parameters(a: ArchitectureDims, p: PlanDims, stage: float) -> float:
    """Parameters of a stage of the balanced layout on one rank, routed experts excepted [-]."""
    return dense_parameters(a, p, stage_content(a, p, stage))


@formula
def stage_expert_parameters(a: ArchitectureDims, p: PlanDims, stage: float) -> float:
    """Parameters of the routed experts of a stage of the balanced layout on one rank [-]."""
    return expert_parameters(a, p, stage_content(a, p, stage))


@formula
def bytes_of(
    a: ArchitectureDims,
    p: PlanDims,
    optimizer: OptimizerDims,
    stack: Stack,
    n_microbatches: float,
    stage: float,
    c: StageContent,
    t: LayerBytes,
    r: RankParameters,
) -> StageBytes:
    """Memory of one device of ``stage`` (0 is the first), which holds ``c`` [B].

    ``t`` and ``r`` are :func:`perfmodel.activations.layer_bytes` and :func:`rank_parameters`.
    Interleaved, a chunk's activations are taken as ``1 / vpp`` of the stage's: what each chunk
    holds in flight is not told apart where they differ.
    """
    dense = dense_of(a, r, c)
    expert = c.moe * r.experts
    dense_shards, expert_shards = state_shards(p)
    sharded = dense / dense_shards + expert / expert_shards
    whole = dense + expert

    kept = c.moe * t.moe + c.dense * t.dense + c.prediction * t.prediction
    activations = kept * in_flight_microbatches(stage, p.pp, p.vpp, n_microbatches)
    replay, working = 0.0, 0.0
    if c.moe > 0.0:
        replay, working = t.moe_replay, t.moe_working
    if c.dense > 0.0:
        replay, working = max(replay, t.dense_replay), max(working, t.dense_working)
    logits = 0.0
    if c.loss > 0.0:  # those of prediction layers too, wherever they are
        logits = (1.0 + (a.mtp_dense + a.mtp_moe)) * t.logits
        working += t.head_working

    weights, gradients = BF16_BYTES * whole, stack.gradient_memory_bytes * whole
    if p.zero >= 2.0:
        unit = 0.0
        if c.moe > 0.0:
            unit = r.layer + r.extra + r.moe + r.experts
        if c.dense > 0.0:
            unit = max(unit, r.layer + r.extra + r.dense)
        head = c.loss * r.vocabulary
        gradients = stack.gradient_memory_bytes * sharded
        # one unit's whole gradients, and what they are reduced in
        working += (BF16_BYTES + stack.gradient_memory_bytes) * max(unit, head)
        if p.zero >= 3.0:
            weights = BF16_BYTES * (sharded + GATHERED_UNITS * unit + head)
    m = StageBytes(
        weights=weights,
        gradients=gradients,
        optimizer=(1.0 - p.offload) * optimizer.state_bytes * sharded,
        activations=activations + replay,
        logits=logits,
        buffers=stack.framework_bytes,
        working=working,
        reserve=0.0,
    )
    return StageBytes(
        m.weights,
        m.gradients,
        m.optimizer,
        m.activations,
        m.logits,
        m.buffers,
        m.working,
        stack.reserve_share * stage_allocated(m),
    )


@formula
def content_bytes(
    a: ArchitectureDims,
    p: PlanDims,
    optimizer: OptimizerDims,
    stack: Stack,
    seq_len: float,
    n_microbatches: float,
    stage: float,
    c: StageContent,
) -> StageBytes:
    """Memory of one device of ``stage`` (0 is the first), which holds ``c`` [B]."""
    t = layer_bytes(a, p, stack, seq_len, p.recompute)
    r = rank_parameters(a, p)
    return bytes_of(a, p, optimizer, stack, n_microbatches, stage, c, t, r)


@formula
def stage_bytes(
    a: ArchitectureDims,
    p: PlanDims,
    optimizer: OptimizerDims,
    stack: Stack,
    seq_len: float,
    n_microbatches: float,
    stage: float,
) -> StageBytes:
    """Memory of one device of ``stage`` of the balanced layout (0 is the first) [B]."""
    c = stage_content(a, p, stage)
    return content_bytes(a, p, optimizer, stack, seq_len, n_microbatches, stage, c)


@formula
def peak_of(
    a: ArchitectureDims,
    p: PlanDims,
    optimizer: OptimizerDims,
    stack: Stack,
    n_microbatches: float,
    t: LayerBytes,
    r: RankParameters,
) -> float:
    """Memory of the heaviest stage; ``t`` and ``r`` as in :func:`bytes_of` [B]."""
    last = p.pp - 1.0
    c = stage_content(a, p, last)
    heaviest = stage_total(bytes_of(a, p, optimizer, stack, n_microbatches, last, c, t, r))
    stage = 0.0
    alike = a.moe_every == 1.0 and not is_uneven(a, p)
    while stage < last:
        c = stage_content(a, p, stage)
        m = bytes_of(a, p, optimizer, stack, n_microbatches, stage, c, t, r)
        heaviest = max(heaviest, stage_total(m))
        if alike and dense_layers_of_stage(a, p, stage) == 0.0:
            break  # the later ones hold the same layers and fewer microbatches
        stage += 1.0
    return heaviest


@formula
def peak_bytes(
    a: ArchitectureDims,
    p: PlanDims,
    optimizer: OptimizerDims,
    stack: Stack,
    seq_len: float,
    n_microbatches: float,
) -> float:
    """Memory of the heaviest stage [B]."""
    t = layer_bytes(a, p, stack, seq_len, p.recompute)
    return peak_of(a, p, optimizer, stack, n_microbatches, t, rank_parameters(a, p))
