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

from math import floor
from typing import NamedTuple

from perfmodel._jit import formula, inner_formula
from perfmodel.activations import LayerBytes, layer_bytes
from perfmodel.attention import attention_parameters
from perfmodel.dims import ArchitectureDims
from perfmodel.kernels import BF16_BYTES
from perfmodel.mesh import (
    PlanDims,
    StageContent,
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


class StageParameters(NamedTuple):
    """Parameters of a stage on one rank [-]."""

    dense: float  # all but routed experts
    expert: float  # of routed experts


class StageHold(NamedTuple):
    """What a device of a stage holds whatever is recomputed, and what it multiplies."""

    c: StageContent
    in_flight: float  # microbatches whose activations it holds at once, in whole stages [-]
    weights: float  # [B]
    gradients: float  # [B]
    optimizer: float  # [B]
    heads: float  # logits, those of prediction layers included [-]
    reduced: float  # whole gradients of a unit of ZeRO, and what they are reduced in [B]


class EndStages(NamedTuple):
    """The first and the last stage of a pipeline; both the same where there is only one."""

    first: StageContent
    of_first: StageParameters
    last: StageContent
    of_last: StageParameters


class HeavyStages(NamedTuple):
    """The stages one of which is the heaviest (:func:`heavy_stages`)."""

    first: StageHold
    border: StageHold  # where the dense layers end
    behind: StageHold
    last: StageHold
    ends: float  # 1 where the first is the last, else 2 [-]
    has_border: float  # 1 if it is a stage of its own [-]
    has_behind: float


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


@inner_formula
def stage_allocated(m: StageBytes) -> float:
    """Bytes in tensors at the peak: what the framework's allocator calls allocated [B]."""
    return m.weights + m.gradients + m.optimizer + m.activations + m.logits + m.working


@inner_formula
def stage_total(m: StageBytes) -> float:
    """Sum of the buckets [B]."""
    return stage_allocated(m) + m.reserve + m.buffers


@inner_formula
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


@inner_formula
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


@inner_formula
def dense_parameters(a: ArchitectureDims, p: PlanDims, c: StageContent) -> float:
    """Parameters of a stage on one rank, routed experts excepted [-]."""
    return dense_of(a, rank_parameters(a, p), c)


@inner_formula
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
def layer_parameters(a: ArchitectureDims, p: PlanDims, moe: float) -> float:
    """Parameters of one layer on one rank, experts included: a unit of ZeRO-3 [-]."""
    r = rank_parameters(a, p)
    return r.layer + r.extra + (r.moe + r.experts if moe > 0.0 else r.dense)


@inner_formula
def stage_parameters(a: ArchitectureDims, p: PlanDims, c: StageContent) -> StageParameters:
    """Parameters of a stage on one rank, by what shards them [-]."""
    return StageParameters(dense_parameters(a, p, c), expert_parameters(a, p, c))


@inner_formula
def hold_of(
    a: ArchitectureDims,
    p: PlanDims,
    optimizer: OptimizerDims,
    stack: Stack,
    n_microbatches: float,
    stage: float,
    c: StageContent,
    parameters: StageParameters,
) -> StageHold:
    """Return what a device of ``stage`` (0 is the first) holds whatever is recomputed.

    ``parameters`` are :func:`stage_parameters` of its content ``c``. Interleaved, a chunk's
    activations are taken as ``1 / vpp`` of the stage's: what each chunk holds in flight is not told
    apart where they differ.
    """
    dense_shards, expert_shards = state_shards(p)
    sharded = parameters.dense / dense_shards + parameters.expert / expert_shards
    whole = parameters.dense + parameters.expert
    weights, gradients, reduced = BF16_BYTES * whole, stack.gradient_memory_bytes * whole, 0.0
    if p.zero >= 2.0:
        unit = 0.0
        if c.moe > 0.0:
            unit = layer_parameters(a, p, 1.0)
        if c.dense > 0.0:
            unit = max(unit, layer_parameters(a, p, 0.0))
        head = c.loss * a.d_model * a.vocab_size / p.tp
        gradients = stack.gradient_memory_bytes * sharded
        reduced = (BF16_BYTES + stack.gradient_memory_bytes) * max(unit, head)
        if p.zero >= 3.0:
            weights = BF16_BYTES * (sharded + GATHERED_UNITS * unit + head)
    return StageHold(
        c=c,
        in_flight=in_flight_microbatches(stage, p.pp, p.vpp, n_microbatches),
        weights=weights,
        gradients=gradients,
        optimizer=(1.0 - p.offload) * optimizer.state_bytes * sharded,
        # those of prediction layers are with the loss, wherever the layers are
        heads=c.loss * (1.0 + (a.mtp_dense + a.mtp_moe)),
        reduced=reduced,
    )


@inner_formula
def bytes_on(stack: Stack, hold: StageHold, t: LayerBytes) -> StageBytes:
    """Memory of one device of a stage [B].

    ``t`` is :func:`perfmodel.activations.layer_bytes` of the plan.
    """
    c = hold.c
    kept = c.moe * t.moe + c.dense * t.dense + c.prediction * t.prediction
    activations = kept * hold.in_flight
    replay, working = 0.0, 0.0
    if c.moe > 0.0:
        replay, working = t.moe_replay, t.moe_working
    if c.dense > 0.0:
        replay, working = max(replay, t.dense_replay), max(working, t.dense_working)
    m = StageBytes(
        weights=hold.weights,
        gradients=hold.gradients,
        optimizer=hold.optimizer,
        activations=activations + replay,
        logits=hold.heads * t.logits,
        buffers=stack.framework_bytes,
        working=working + c.loss * t.head_working + hold.reduced,
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
def bytes_of(
    a: ArchitectureDims,
    p: PlanDims,
    optimizer: OptimizerDims,
    stack: Stack,
    n_microbatches: float,
    stage: float,
    c: StageContent,
    t: LayerBytes,
) -> StageBytes:
    """Memory of one device of ``stage`` (0 is the first), which holds ``c`` [B].

    ``t`` as in :func:`bytes_on`, and chunks as in :func:`hold_of`.
    """
    parameters = stage_parameters(a, p, c)
    hold = hold_of(a, p, optimizer, stack, n_microbatches, stage, c, parameters)
    return bytes_on(stack, hold, t)


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
    return bytes_of(a, p, optimizer, stack, n_microbatches, stage, c, t)


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


@inner_formula
def end_stages(a: ArchitectureDims, p: PlanDims) -> EndStages:
    """Return what the first and the last stage of the balanced layout hold."""
    last = stage_content(a, p, p.pp - 1.0)
    of_last = stage_parameters(a, p, last)
    if p.pp <= 1.0:
        return EndStages(last, of_last, last, of_last)
    first = stage_content(a, p, 0.0)
    return EndStages(first, stage_parameters(a, p, first), last, of_last)


@formula
def stages_are_alike(a: ArchitectureDims, p: PlanDims) -> bool:
    """Say whether stages have equal numbers of layers, and dense ones at the front alone."""
    return a.moe_every == 1.0 and not is_uneven(a, p)


@inner_formula
def heavy_stages(
    a: ArchitectureDims,
    p: PlanDims,
    optimizer: OptimizerDims,
    stack: Stack,
    n_microbatches: float,
    ends: EndStages,
) -> HeavyStages:
    """Return the stages one of which is the heaviest, where stages are alike.

    Where the dense layers end inside a chunk, devices ahead of its own hold one number of them,
    that device another, and those behind it a third. Of devices with the same layers the first has
    the most microbatches in flight.
    """
    final = p.pp - 1.0
    last = hold_of(a, p, optimizer, stack, n_microbatches, final, ends.last, ends.of_last)
    if p.pp <= 1.0:
        return HeavyStages(last, last, last, last, 1.0, 0.0, 0.0)
    first = hold_of(a, p, optimizer, stack, n_microbatches, 0.0, ends.first, ends.of_first)
    chunk = a.n_layers / (p.pp * p.vpp)
    full = float(floor(a.first_k_dense / chunk))
    border = full - p.pp * float(floor(full / p.pp))
    behind = border + 1.0 if full * chunk < a.first_k_dense else final
    at_border, at_behind = first, first
    if 0.0 < border < final:
        c = stage_content(a, p, border)
        w = stage_parameters(a, p, c)
        at_border = hold_of(a, p, optimizer, stack, n_microbatches, border, c, w)
    if behind < final:
        c = stage_content(a, p, behind)
        w = stage_parameters(a, p, c)
        at_behind = hold_of(a, p, optimizer, stack, n_microbatches, behind, c, w)
    return HeavyStages(
        first,
        at_border,
        at_behind,
        last,
        2.0,
        1.0 if 0.0 < border < final else 0.0,
        1.0 if behind < final else 0.0,
    )


@inner_formula
def peak_on(stack: Stack, stages: HeavyStages, t: LayerBytes) -> float:
    """Memory of the heaviest of some stages; ``t`` as in :func:`bytes_on` [B]."""
    heaviest = stage_total(bytes_on(stack, stages.last, t))
    if stages.ends > 1.0:
        heaviest = max(heaviest, stage_total(bytes_on(stack, stages.first, t)))
    if stages.has_border > 0.0:
        heaviest = max(heaviest, stage_total(bytes_on(stack, stages.border, t)))
    if stages.has_behind > 0.0:
        heaviest = max(heaviest, stage_total(bytes_on(stack, stages.behind, t)))
    return heaviest


@formula
def peak_of(
    a: ArchitectureDims,
    p: PlanDims,
    optimizer: OptimizerDims,
    stack: Stack,
    n_microbatches: float,
    t: LayerBytes,
) -> float:
    """Memory of the heaviest stage; ``t`` as in :func:`bytes_on` [B]."""
    if stages_are_alike(a, p):
        return peak_on(
            stack, heavy_stages(a, p, optimizer, stack, n_microbatches, end_stages(a, p)), t
        )
    heaviest = 0.0
    stage = 0.0
    while stage < p.pp:
        c = stage_content(a, p, stage)
        m = bytes_of(a, p, optimizer, stack, n_microbatches, stage, c, t)
        heaviest = max(heaviest, stage_total(m))
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
    return peak_of(a, p, optimizer, stack, n_microbatches, t)
