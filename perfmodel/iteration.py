"""Time of one optimizer step: stages, pipeline, data-parallel exchange, optimizer.

For one microbatch on one stage, the host launches kernels while the device runs them, so the
slower of the two sets the pace, and the expert all-to-all is a point where both wait:

    C0  = n_moe (A share + launches) + n_dense A share_dense + H
    G0  = sum over layers and operators                  device
    Y   = n_moe (4 + 2 [full]) t_a2a                     expert all-to-all
    J   = s log2(pp) log2(ep) max(0, 1 - (G0 + Y) / C0)  wait for the slowest rank of EP x PP
    tau = max(C0 + J, G0 + t_head) + Y                   t_head on the last stage only
    T   = (1 + c (ceil(pp / 8) - 1)) makespan(tau, pp, vpp, n_mb) + t_DP + t_opt

``8`` is the number of devices in a node. Model "M4" of the study of the B200 layout sweeps.
"""

from __future__ import annotations

from math import ceil, log2
from typing import Any, NamedTuple

import numpy as np

from perfmodel._jit import formula
from perfmodel.collectives import point_to_point_time, ring_time
from perfmodel.dims import ArchitectureDims
from perfmodel.hardware import Hardware
from perfmodel.kernels import BF16_BYTES, FP32_BYTES
from perfmodel.layer import LayerCost, OperatorTimes, total
from perfmodel.memory import OptimizerDims, dense_parameters, expert_parameters
from perfmodel.mesh import (
    PlanDims,
    StageContent,
    dense_layers_of_stage,
    is_uneven,
    layers_before,
    stage_content,
)
from perfmodel.schedule import makespan_interleaved
from perfmodel.schedule_stages import makespan_of_chunks
from perfmodel.stack import Stack


class ModeTotals(NamedTuple):
    """One microbatch of one layer under a recompute mode, summed over operators and passes [s]."""

    moe_device: float
    dense_device: float
    launches: float  # host time of a MoE layer's grouped products
    dispatch: float  # all expert all-to-alls of a MoE layer
    host_share: float  # of A: forward, replay and backward [-]
    forward_share: float  # forward time / (forward + backward), replay in the backward [-]
    head: float  # head and cross-entropy, and those and the projection of each prediction layer
    joined: float  # the projection of one prediction layer


class StageTime(NamedTuple):
    """One microbatch on one stage, forward and backward [s]."""

    host: float  # C0
    jitter: float  # J
    device: float  # G0
    head: float  # t_head, where the loss is
    dispatch: float  # Y
    time: float  # tau


class PipelineTime(NamedTuple):
    """The pipeline's part of a step; the fields add up [s]."""

    steady: float  # n_mb microbatches on the last stage
    bubble: float  # the rest of the makespan: the pipeline fills and drains
    pipeline_depth: float  # extra cost of a pipeline over more than one node


class SynchronisationTime(NamedTuple):
    """The part of a step outside the pipeline's stages; the fields add up [s]."""

    hand_off: float  # activations between stages, exposed while the pipeline fills and drains
    data_parallel: float  # gradients scattered, weights gathered
    optimizer: float


@formula
def with_replay(forward: OperatorTimes, backward: OperatorTimes, mode: float) -> OperatorTimes:
    """One layer's forward, what a recompute mode replays of it, and its backward [s]."""
    core = 2.0 if mode >= 1.0 else 1.0
    cheap = 2.0 if mode >= 2.0 else 1.0
    rest = 2.0 if mode >= 3.0 else 1.0
    return OperatorTimes(
        attention_linear=rest * forward.attention_linear + backward.attention_linear,
        attention_core=core * forward.attention_core + backward.attention_core,
        elementwise=cheap * forward.elementwise + backward.elementwise,
        router=rest * forward.router + backward.router,
        permutation=rest * forward.permutation + backward.permutation,
        experts=rest * forward.experts + backward.experts,
        activation=cheap * forward.activation + backward.activation,
        dense_ffn=rest * forward.dense_ffn + backward.dense_ffn,
        tensor_parallel=rest * forward.tensor_parallel + backward.tensor_parallel,
        context_parallel=core * forward.context_parallel + backward.context_parallel,
        gradient=backward.gradient,
    )


@formula
def mode_totals(cost: LayerCost, stack: Stack, mode: float) -> ModeTotals:
    """Sum the costs of a layer under a recompute mode [s]."""
    replay = 0.0
    grouped_replay = 0.0
    if mode >= 3.0:
        replay = 1.0
        grouped_replay = 1.0
    elif mode >= 2.0:
        replay = stack.super_selective_replay
    elif mode >= 1.0:
        replay = stack.selective_replay
    return ModeTotals(
        moe_device=total(with_replay(cost.moe_forward, cost.moe_backward, mode)),
        dense_device=total(with_replay(cost.dense_forward, cost.dense_backward, mode)),
        launches=cost.launch_forward * (1.0 + grouped_replay) + cost.launch_backward,
        dispatch=cost.dispatch * (6.0 if mode >= 3.0 else 4.0),
        host_share=stack.forward_share * (1.0 + replay) + stack.backward_share,
        forward_share=0.25 if mode >= 3.0 else 1.0 / 3.0,
        head=cost.head,
        joined=cost.joined,
    )


@formula
def stage_time(
    t: ModeTotals, stack: Stack, p: PlanDims, n_moe: float, n_dense: float, head: float
) -> StageTime:
    """Time of one microbatch on a stage of the given layers, and a head on the last stage [s]."""
    layer = stack.host_layer_s * t.host_share
    host = n_moe * (layer + t.launches) + n_dense * stack.dense_layer_share * layer
    host += stack.host_microbatch_s
    device = n_moe * t.moe_device + n_dense * t.dense_device
    dispatch = n_moe * t.dispatch
    slack = max(0.0, 1.0 - (device + dispatch) / host) if host > 0.0 else 0.0
    jitter = stack.jitter_s * log2(p.pp) * log2(p.ep) * slack
    return StageTime(
        host=host,
        jitter=jitter,
        device=device,
        head=head,
        dispatch=dispatch,
        time=max(host + jitter, device + head) + dispatch,
    )


@formula
def exchange_time(a: ArchitectureDims, hw: Hardware, p: PlanDims, c: StageContent) -> float:
    """Exposed reduce-scatter of fp32 gradients and all-gather of bf16 weights on a stage [s]."""
    node = hw.fabric.devices_per_node
    dense = dense_parameters(a, p, c)
    expert = expert_parameters(a, p, c)
    ranks = p.dp * p.cp
    edp = p.tp * ranks / (p.etp * p.ep)
    rs, ag = hw.fabric.reduce_scatter, hw.fabric.all_gather
    return (
        ring_time(rs, node, ranks, p.tp, FP32_BYTES * dense)
        + ring_time(ag, node, ranks, p.tp, BF16_BYTES * dense)
        + ring_time(rs, node, edp, p.etp * p.ep, FP32_BYTES * expert)
        + ring_time(ag, node, edp, p.etp * p.ep, BF16_BYTES * expert)
    )


@formula
def data_parallel_time(a: ArchitectureDims, hw: Hardware, p: PlanDims, stage: float) -> float:
    """:func:`exchange_time` of a stage of the balanced layout [s]."""
    return exchange_time(a, hw, p, stage_content(a, p, stage))


@formula
def newton_schulz_flop(rows: float, columns: float) -> float:
    """FLOP of one Newton-Schulz step on a matrix: ``4 m^2 n + 2 m^3``, m the smaller side."""
    m = min(rows, columns)
    n = max(rows, columns)
    return 4.0 * m * m * n + 2.0 * m * m * m


@formula
def attention_iteration_flop(a: ArchitectureDims) -> float:
    """FLOP of one Newton-Schulz step on every matrix of one layer's attention."""
    q = a.n_heads * a.head_dim
    if a.latent > 0.0:
        out = newton_schulz_flop(a.d_model, a.n_heads * a.v_head_dim)
        unfolded = a.n_heads * (a.head_dim - a.rope_head_dim + a.v_head_dim)
        keys = newton_schulz_flop(a.d_model, a.kv_lora_rank + a.rope_head_dim)
        keys += newton_schulz_flop(a.kv_lora_rank, unfolded)
        if a.q_lora_rank > 0.0:
            query = newton_schulz_flop(a.d_model, a.q_lora_rank)
            return out + keys + query + newton_schulz_flop(a.q_lora_rank, q)
        return out + keys + newton_schulz_flop(a.d_model, q)
    kv = a.n_kv_heads * a.head_dim
    return 2.0 * newton_schulz_flop(a.d_model, q) + 2.0 * newton_schulz_flop(a.d_model, kv)


@formula
def update_time(
    a: ArchitectureDims,
    hw: Hardware,
    stack: Stack,
    optimizer: OptimizerDims,
    p: PlanDims,
    c: StageContent,
) -> float:
    """Time of the optimizer on its shards: traffic, and matrix iterations where it has them [s]."""
    dense = dense_parameters(a, p, c)
    expert = expert_parameters(a, p, c)
    replicas = p.dp * p.cp
    edp = p.tp * replicas / (p.etp * p.ep)
    traffic = optimizer.traffic_bytes * (dense / replicas + expert / edp)
    traffic += hw.cast.weight_bytes * (dense + expert)  # quantised once a step, on every rank
    time = traffic / (hw.device.memory_bw * hw.elementwise.bw_eff)
    if optimizer.matrix_iterations > 0.0:
        flop = (c.dense + c.moe) * attention_iteration_flop(a) / replicas
        if c.prediction > 0.0:
            joined = newton_schulz_flop(a.d_model, 2.0 * a.d_model)
            flop += c.prediction * joined / replicas
        if c.dense > 0.0:
            flop += c.dense * a.ffn_matrices * newton_schulz_flop(a.d_model, a.d_ff) / (replicas)
        if a.n_experts > 0.0:
            one = a.ffn_matrices * newton_schulz_flop(a.d_model, a.d_expert)
            flop += c.moe * a.n_experts / p.ep * one / edp
            if a.d_shared > 0.0:
                flop += (
                    c.moe * a.ffn_matrices * newton_schulz_flop(a.d_model, a.d_shared) / replicas
                )
        flop *= optimizer.matrix_iterations
        time += flop / (hw.device.peak_flops * stack.optimizer_matmul_eff)
    return time


@formula
def optimizer_time(
    a: ArchitectureDims,
    hw: Hardware,
    stack: Stack,
    optimizer: OptimizerDims,
    p: PlanDims,
    stage: float,
) -> float:
    """:func:`update_time` of a stage of the balanced layout [s]."""
    return update_time(a, hw, stack, optimizer, p, stage_content(a, p, stage))


@formula
def time_of_content(
    a: ArchitectureDims, stack: Stack, p: PlanDims, t: ModeTotals, c: StageContent
) -> StageTime:
    """Return the time of one microbatch on a stage [s].

    Head, cross-entropy and the logits of every prediction layer are where the loss is (Megatron-LM
    #5318); the projection of a prediction layer is on that layer's stage.
    """
    prediction = a.mtp_dense + a.mtp_moe
    head = 0.0
    if c.loss > 0.0:
        head = t.head
        if c.prediction != prediction:
            head += (c.prediction - prediction) * t.joined
    elif c.prediction > 0.0:
        head = c.prediction * t.joined
    return stage_time(t, stack, p, c.moe, c.dense, head)


@formula
def time_of_stage(
    a: ArchitectureDims, stack: Stack, p: PlanDims, t: ModeTotals, stage: float
) -> StageTime:
    """:func:`time_of_content` of a stage of the balanced layout [s]."""
    return time_of_content(a, stack, p, t, stage_content(a, p, stage))


@formula
def plain_stage_time(
    a: ArchitectureDims, stack: Stack, p: PlanDims, t: ModeTotals, stage: float
) -> float:
    """Return the time of one microbatch on a stage's own layers, without head or prediction [s]."""
    dense = dense_layers_of_stage(a, p, stage)
    return stage_time(t, stack, p, a.n_layers / p.pp - dense, dense, 0.0).time


@formula
def fill_chunks(
    a: ArchitectureDims,
    stack: Stack,
    p: PlanDims,
    t: ModeTotals,
    c: StageContent,
    layers: Any,
    seconds: Any,
) -> None:
    """Write the time of one microbatch in each chunk of a device into ``seconds`` [s].

    ``layers`` are those of each chunk, prediction layers included. Chunks share a device's time by
    their layers; what the head, a projection or the loss add is in the last one.
    """
    whole = time_of_content(a, stack, p, t, c).time
    last = seconds.shape[0] - 1
    if c.dense + c.moe > 0.0:
        plain = stage_time(t, stack, p, c.moe, c.dense, 0.0).time
        for i in range(last):
            seconds[i] = plain * layers[i] / (c.dense + c.moe)
    else:
        for i in range(last):
            seconds[i] = 0.0
    seconds[last] = whole
    for i in range(last):
        seconds[last] -= seconds[i]


@formula
def pipeline_of_chunks(
    stack: Stack,
    devices_per_node: float,
    seconds: Any,
    n_microbatches: float,
    forward_share: float,
) -> PipelineTime:
    """Time from the first forward to the last backward, for chunks that all differ [s].

    ``seconds`` are those of :func:`perfmodel.schedule_stages.makespan_of_chunks`. The steady part
    is that of the slowest device.
    """
    tau = seconds.sum(axis=0)
    steady = n_microbatches * tau.max()
    makespan = makespan_of_chunks(seconds, n_microbatches, forward_share)
    nodes = ceil(len(tau) / devices_per_node)
    return PipelineTime(
        steady=steady,
        bubble=makespan - steady,
        pipeline_depth=stack.pipeline_node_cost * (nodes - 1.0) * makespan,
    )


@formula
def uneven_pipeline_time(
    a: ArchitectureDims,
    stack: Stack,
    devices_per_node: float,
    p: PlanDims,
    t: ModeTotals,
    n_microbatches: float,
) -> PipelineTime:
    """:func:`pipeline_of_chunks` for the balanced layout [s]."""
    seconds = np.empty((int(p.vpp), int(p.pp)))
    layers = np.empty(int(p.vpp))
    for r in range(int(p.pp)):
        for i in range(int(p.vpp)):
            virtual = i * p.pp + r
            layers[i] = layers_before(a, p, virtual + 1.0) - layers_before(a, p, virtual)
        c = stage_content(a, p, float(r))
        fill_chunks(a, stack, p, t, c, layers, seconds[:, r])
    return pipeline_of_chunks(stack, devices_per_node, seconds, n_microbatches, t.forward_share)


@formula
def pipeline_time(
    a: ArchitectureDims,
    stack: Stack,
    devices_per_node: float,
    p: PlanDims,
    t: ModeTotals,
    n_microbatches: float,
) -> PipelineTime:
    """Time from the first microbatch's forward to the last one's backward [s].

    Of the balanced layout; where its stages are equal, in ``O(1)`` from the first, a middle and
    the last one.
    """
    if is_uneven(a, p):
        return uneven_pipeline_time(a, stack, devices_per_node, p, t, n_microbatches)
    last = time_of_stage(a, stack, p, t, p.pp - 1.0).time
    first = time_of_stage(a, stack, p, t, 0.0).time
    mid = first
    if a.moe_every > 1.0 and p.pp > 1.0:  # dense layers all over: the slowest plain stage
        stage = 1.0
        mid = plain_stage_time(a, stack, p, t, stage)
        while stage < p.pp - 2.0:
            stage += 1.0
            mid = max(mid, plain_stage_time(a, stack, p, t, stage))
    elif p.pp > 2.0 and a.first_k_dense > 0.0:
        mid = time_of_stage(a, stack, p, t, p.pp - 2.0).time
        if dense_layers_of_stage(a, p, 1.0) > 0.0:  # dense layers beyond the first stage
            mid = max(mid, time_of_stage(a, stack, p, t, 1.0).time)
    elif p.pp > 1.0 and p.vpp > 1.0 and a.first_k_dense > 0.0:  # the last stage without its head
        mid = plain_stage_time(a, stack, p, t, 1.0)
    makespan = makespan_interleaved(first, mid, last, p.pp, p.vpp, n_microbatches, t.forward_share)
    nodes = ceil(p.pp / devices_per_node)
    depth = stack.pipeline_node_cost * (nodes - 1.0) * makespan
    steady = n_microbatches * last
    return PipelineTime(steady=steady, bubble=makespan - steady, pipeline_depth=depth)


@formula
def hand_off_time(a: ArchitectureDims, hw: Hardware, p: PlanDims, seq_len: float) -> float:
    """Exposed hand-offs of activations while the pipeline fills and drains [s].

    The first microbatch passes ``pp vpp - 1`` borders of chunks on its way to the loss, and as many
    back. That no other hand-off is exposed is assumed.
    """
    if p.pp <= 1.0:
        return 0.0
    tokens = p.micro_batch * seq_len / p.cp
    distance = p.tp * p.cp * p.dp
    volume = BF16_BYTES * tokens / p.tp * a.d_model
    return 2.0 * (p.pp * p.vpp - 1.0) * point_to_point_time(hw.fabric, distance, volume)


@formula
def synchronisation_time(
    a: ArchitectureDims,
    hw: Hardware,
    stack: Stack,
    optimizer: OptimizerDims,
    p: PlanDims,
    seq_len: float,
) -> SynchronisationTime:
    """Time of what does not depend on the recompute mode: hand-offs, gradients, optimizer [s]."""
    final = p.pp - 1.0
    exchange = data_parallel_time(a, hw, p, final)
    update = optimizer_time(a, hw, stack, optimizer, p, final)
    if p.pp > 1.0:
        exchange = max(exchange, data_parallel_time(a, hw, p, 0.0))
        update = max(update, optimizer_time(a, hw, stack, optimizer, p, 0.0))
    if a.moe_every > 1.0 or is_uneven(a, p):  # a stage between may hold more than either
        stage = 1.0
        while stage < final:
            exchange = max(exchange, data_parallel_time(a, hw, p, stage))
            update = max(update, optimizer_time(a, hw, stack, optimizer, p, stage))
            stage += 1.0
    return SynchronisationTime(
        hand_off=hand_off_time(a, hw, p, seq_len), data_parallel=exchange, optimizer=update
    )


@formula
def step_total(pipeline: PipelineTime, sync: SynchronisationTime) -> float:
    """Time of one optimizer step [s]."""
    return (
        pipeline.steady
        + pipeline.bubble
        + pipeline.pipeline_depth
        + sync.hand_off
        + sync.data_parallel
        + sync.optimizer
    )
