"""Time of one optimizer step: stages, pipeline, data-parallel exchange, optimizer.

For one microbatch on one stage, the host launches kernels while the device runs them, so the
slower of the two sets the pace, and the expert all-to-all is a point where both wait:

    C0  = n_moe (A share + launches) + n_dense A share_dense + H
    G0  = k sum over layers and operators + e_TP t_TP         device
    Y   = n_moe (4 + 2 [full]) t_a2a                          expert all-to-all
    J   = s log2(pp) log2(ep) max(0, 1 - (G0 + Y) / C0)       wait for the slowest rank of EP x PP
    tau = max(C0 + J, G0 + t_head) + Y - min(h_A2A Y, G0) + max(0, Z - h_DP G0) + (1 - h_PP) t_P2P
    T   = (1 + c (ceil(pp / 8) - 1)) makespan(tau, pp, vpp, n_mb)
          + t_DP - min(h_DP t_DP, tau) + t_opt + t_step

``8`` is the number of devices in a node; ``t_head`` is on the last stage only; ``Z`` is what ZeRO
stages 2 and 3 exchange in every microbatch; ``e_TP`` and the shares ``h`` are properties of the
stack. With ``k = e_TP = 1`` and every ``h = 0`` (``h_PP = 1``) this is model "M4" of the study of
the B200 layout sweeps.
"""

from __future__ import annotations

from math import ceil, log2
from typing import Any, NamedTuple

import numpy as np

from perfmodel._jit import formula, inner_formula
from perfmodel.collectives import (
    all_reduce_time,
    chain_time,
    point_to_point_time,
    ring_time,
)
from perfmodel.dims import ArchitectureDims
from perfmodel.hardware import Hardware
from perfmodel.kernels import BF16_BYTES
from perfmodel.layer import LayerCost, OperatorTimes, total
from perfmodel.memory import (
    EndStages,
    OptimizerDims,
    StageParameters,
    dense_parameters,
    end_stages,
    expert_parameters,
    stage_parameters,
    stages_are_alike,
)
from perfmodel.mesh import (
    PlanDims,
    StageContent,
    dense_layers_of_stage,
    is_uneven,
    layers_before,
    stage_content,
    state_shards,
)
from perfmodel.replay import Replay, latent_up_share, replay_of
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


class StageSetting(NamedTuple):
    """What the time of a microbatch on a stage depends on, whatever is recomputed."""

    n_moe: float  # layers with experts, prediction layers included [-]
    n_dense: float
    heads: float  # 1 where the loss is [-]
    joined: float  # projections of prediction layers that `ModeTotals.head` does not have [-]
    wait: float  # of the slowest rank, where the device has nothing to do [s]
    sharding: float  # exchange of sharded weights and gradients, before any overlap [s]
    hand_off: float  # all hand-offs, before any overlap [s]


class PipelineSetting(NamedTuple):
    """The stages that the makespan of stages alike follows from, whatever is recomputed."""

    first: StageSetting
    mid: StageSetting
    other: StageSetting  # another one between, which may be slower
    last: StageSetting
    has_mid: float  # 1 if it is not like the first [-]
    has_other: float  # 1 if it is not like `mid` [-]
    depth: float  # extra cost of a pipeline over more than one node, over the makespan [-]


class StageTime(NamedTuple):
    """One microbatch on one stage, forward and backward [s]."""

    host: float  # C0
    jitter: float  # J
    device: float  # G0
    head: float  # t_head, where the loss is
    dispatch: float  # Y, what of it is exposed
    sharding: float  # exposed exchange of sharded weights and gradients, ZeRO 2 and 3
    hand_off: float  # exposed hand-offs to and from other stages
    time: float  # tau


class PipelineTime(NamedTuple):
    """The pipeline's part of a step; the fields add up [s]."""

    steady: float  # n_mb microbatches on the last stage
    bubble: float  # the rest of the makespan: the pipeline fills and drains
    pipeline_depth: float  # extra cost of a pipeline over more than one node


class SynchronisationTime(NamedTuple):
    """The part of a step outside the pipeline's stages; the fields add up [s]."""

    hand_off: float  # activations between stages, exposed while the pipeline fills and drains
    data_parallel: float  # gradients scattered, weights gathered; before any overlap
    optimizer: float
    step_host: float  # host time once a step


@formula
def with_replay(
    forward: OperatorTimes, backward: OperatorTimes, replay: Replay, moe: float, latent_up: float
) -> OperatorTimes:
    """One layer's forward, what is replayed of it, and its backward [s].

    ``moe`` is 1 for a layer with experts; ``latent_up`` is :func:`latent_up_share`.
    """
    whole = 1.0 + replay.whole
    experts = 1.0 + max(replay.whole, replay.experts)
    activation = replay.expert_activation if moe > 0.0 else replay.dense_activation
    block = replay.shared if moe > 0.0 else replay.dense_block
    linear = 1.0 + max(replay.whole, replay.latent_up * latent_up)
    core = 1.0 + replay.core
    return OperatorTimes(
        attention_linear=linear * forward.attention_linear + backward.attention_linear,
        attention_core=core * forward.attention_core + backward.attention_core,
        elementwise=(1.0 + replay.norms) * forward.elementwise + backward.elementwise,
        router=experts * forward.router + backward.router,
        permutation=experts * forward.permutation + backward.permutation,
        experts=experts * forward.experts + backward.experts,
        activation=(1.0 + activation) * forward.activation + backward.activation,
        dense_ffn=(1.0 + block) * forward.dense_ffn + backward.dense_ffn,
        tensor_parallel=whole * forward.tensor_parallel + backward.tensor_parallel,
        context_parallel=core * forward.context_parallel + backward.context_parallel,
        gradient=backward.gradient,
    )


@formula
def layer_times(
    cost: LayerCost, stack: Stack, replay: Replay, moe: float, latent_up: float
) -> OperatorTimes:
    """One layer's forward, replay and backward as a stack runs them [s].

    Its kernels, what it does not overlap, and attention's scores where it writes them: once
    forward, once more in a replay, and twice as many bytes backward.
    """
    forward, backward = cost.dense_forward, cost.dense_backward
    if moe > 0.0:
        forward, backward = cost.moe_forward, cost.moe_backward
    t = with_replay(forward, backward, replay, moe, latent_up)
    k = stack.device_scale
    scores = stack.score_bytes * cost.score_byte * (3.0 + replay.core)
    return OperatorTimes(
        attention_linear=k * t.attention_linear,
        attention_core=k * (stack.attention_scale * t.attention_core + scores),
        elementwise=k * t.elementwise,
        router=k * t.router,
        permutation=k * t.permutation,
        experts=k * t.experts,
        activation=k * t.activation,
        dense_ffn=k * t.dense_ffn,
        tensor_parallel=stack.tp_exposed * t.tensor_parallel,
        context_parallel=t.context_parallel,
        gradient=k * t.gradient,
    )


@formula
def host_replay(stack: Stack, replay: Replay) -> float:
    """Share of a forward pass that the host launches again [-].

    Of single modules: attention as in the selective mode, norms and gated units share what the
    super-selective mode has more, projections and blocks by their calls among about twenty-five.
    """
    if replay.whole > 0.0:
        return 1.0
    share = stack.selective_replay * replay.core
    rest = stack.super_selective_replay - stack.selective_replay
    share += rest * (0.6 * replay.norms + 0.4 * replay.expert_activation)
    share += 0.1 * replay.latent_up + 0.15 * replay.dense_block
    return share + max(0.5 * replay.experts, 0.1 * replay.shared)


@formula
def mode_totals(cost: LayerCost, a: ArchitectureDims, stack: Stack, mode: float) -> ModeTotals:
    """Sum the costs of a layer under a recompute mode [s]."""
    replay = replay_of(mode)
    up = latent_up_share(a)
    again = max(replay.whole, replay.experts)
    moe = layer_times(cost, stack, replay, 1.0, up)
    dense = layer_times(cost, stack, replay, 0.0, up)
    launches = cost.launch_forward * (1.0 + again) + cost.launch_backward
    once = stack.copies_once
    dispatch = (1.0 - once) * cost.dispatch + once * cost.dispatch_once
    return ModeTotals(
        moe_device=total(moe),
        dense_device=total(dense),
        launches=stack.launch_share * launches,
        dispatch=dispatch * (4.0 + 2.0 * again),
        host_share=stack.forward_share * (1.0 + host_replay(stack, replay)) + stack.backward_share,
        forward_share=0.25 if mode == 3.0 else 1.0 / 3.0,
        head=stack.device_scale * cost.head,
        joined=stack.device_scale * cost.joined,
    )


@inner_formula
def rank_wait(stack: Stack, p: PlanDims) -> float:
    """Wait for the slowest rank of EP x PP where the device has nothing to do [s]."""
    return stack.jitter_s * log2(p.pp) * log2(p.ep)


@formula
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
    """Time of one microbatch on a stage of the given layers, and a head on the last stage [s].

    ``sharding`` is the time to exchange sharded weights and gradients and ``hand_off`` that of
    all hand-offs, before any overlap.
    """
    wait = rank_wait(stack, p)
    s = StageSetting(n_moe, n_dense, 0.0, 0.0, wait, sharding, hand_off)
    return time_in_setting(stack, t, s, head)


@inner_formula
def time_in_setting(stack: Stack, t: ModeTotals, s: StageSetting, head: float) -> StageTime:
    """Time of one microbatch on a stage whose head takes ``head`` seconds [s]."""
    layer = stack.host_layer_s * t.host_share
    host = s.n_moe * (layer + t.launches) + s.n_dense * stack.dense_layer_share * layer
    host += stack.host_microbatch_s
    device = s.n_moe * t.moe_device + s.n_dense * t.dense_device
    dispatch = s.n_moe * t.dispatch
    slack = max(0.0, 1.0 - (device + dispatch) / host) if host > 0.0 else 0.0
    jitter = s.wait * slack
    waited = dispatch - min(stack.a2a_hidden * dispatch, device)
    gathered = max(0.0, s.sharding - stack.dp_hidden * device)
    handed = (1.0 - stack.pp_hidden) * s.hand_off
    return StageTime(
        host=host,
        jitter=jitter,
        device=device,
        head=head,
        dispatch=waited,
        sharding=gathered,
        hand_off=handed,
        time=max(host + jitter, device + head) + waited + gathered + handed,
    )


@formula
def sharding_time(
    a: ArchitectureDims, hw: Hardware, stack: Stack, p: PlanDims, c: StageContent
) -> float:
    """Exchange of sharded weights and gradients in one microbatch on a stage, one layer at a time.

    ZeRO-2 scatters gradients after every microbatch; ZeRO-3 gathers weights for the forward and
    for the backward pass as well (arXiv 1910.02054). With several instances (HSDP) each shards
    over its own ranks. [s]
    """
    if p.zero < 2.0 or c.layers + c.prediction <= 0.0:
        return 0.0
    fabric = hw.fabric
    layers = c.layers + c.prediction
    dense = dense_parameters(a, p, c) / layers
    expert = expert_parameters(a, p, c) / layers
    ranks = p.dp * p.cp / p.instances
    edp = p.tp * p.dp * p.cp / (p.etp * p.ep * p.instances)
    rs, ag = fabric.reduce_scatter, fabric.all_gather
    time = ring_time(rs, fabric, ranks, p.tp, stack.gradient_bytes * dense)
    time += ring_time(rs, fabric, edp, p.etp * p.ep, stack.gradient_bytes * expert)
    if p.zero > 2.0:
        time += 2.0 * ring_time(ag, fabric, ranks, p.tp, BF16_BYTES * dense)
        time += 2.0 * ring_time(ag, fabric, edp, p.etp * p.ep, BF16_BYTES * expert)
    return layers * time


@formula
def group_exchange_time(
    hw: Hardware, stack: Stack, p: PlanDims, size: float, stride: float, parameters: float
) -> float:
    """Exchange of gradients and weights once a step in one group of replicas [s]."""
    fabric = hw.fabric
    wire = stack.gradient_bytes * parameters
    if p.zero < 1.0:
        return all_reduce_time(fabric, size, stride, wire)
    shards = size / p.instances
    time = 0.0
    if p.zero < 2.0:
        time += ring_time(fabric.reduce_scatter, fabric, shards, stride, wire)
    if p.zero < 3.0:
        time += ring_time(fabric.all_gather, fabric, shards, stride, BF16_BYTES * parameters)
    if p.instances > 1.0:
        time += all_reduce_time(fabric, p.instances, stride * shards, wire / max(1.0, shards))
    return time


@inner_formula
def exchange_of_parameters(hw: Hardware, stack: Stack, p: PlanDims, w: StageParameters) -> float:
    """Exchange of gradients and bf16 weights of a stage once a step, before any overlap [s].

    ZeRO-0 reduces gradients; ZeRO-1 scatters them and gathers weights; ZeRO-2 gathers weights;
    ZeRO-3 does neither here. The optimizer's instances reduce among them besides.
    """
    ranks = p.dp * p.cp
    edp = p.tp * ranks / (p.etp * p.ep)
    return group_exchange_time(hw, stack, p, ranks, p.tp, w.dense) + group_exchange_time(
        hw, stack, p, edp, p.etp * p.ep, w.expert
    )


@formula
def exchange_time(
    a: ArchitectureDims, hw: Hardware, stack: Stack, p: PlanDims, c: StageContent
) -> float:
    """:func:`exchange_of_parameters` of what a stage holds [s]."""
    return exchange_of_parameters(hw, stack, p, stage_parameters(a, p, c))


@formula
def data_parallel_time(
    a: ArchitectureDims, hw: Hardware, stack: Stack, p: PlanDims, stage: float
) -> float:
    """:func:`exchange_time` of a stage of the balanced layout [s]."""
    return exchange_time(a, hw, stack, p, stage_content(a, p, stage))


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


@inner_formula
def update_of_parameters(
    a: ArchitectureDims,
    hw: Hardware,
    stack: Stack,
    optimizer: OptimizerDims,
    p: PlanDims,
    c: StageContent,
    w: StageParameters,
) -> float:
    """Time of the optimizer on its shards: traffic, and matrix iterations where it has them [s].

    ``w`` are the parameters of ``c``. Of the share that is on the host, gradients go there and
    weights come back over the host's link and the state is updated at the rate of the host's
    memory, one after the other. Matrix iterations stay on the device.
    """
    replicas, edp = state_shards(p)
    sharded = w.dense / replicas + w.expert / edp
    traffic = (1.0 - p.offload) * optimizer.traffic_bytes * sharded
    traffic += hw.cast.weight_bytes * (w.dense + w.expert)  # quantised once a step, on every rank
    time = traffic / (hw.device.memory_bw * hw.elementwise.bw_eff)
    if p.offload > 0.0:
        moved = (stack.gradient_memory_bytes + BF16_BYTES) / hw.host.link_bw
        moved += optimizer.traffic_bytes / hw.host.memory_bw
        time += p.offload * sharded * moved
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
def update_time(
    a: ArchitectureDims,
    hw: Hardware,
    stack: Stack,
    optimizer: OptimizerDims,
    p: PlanDims,
    c: StageContent,
) -> float:
    """:func:`update_of_parameters` of what a stage holds [s]."""
    return update_of_parameters(a, hw, stack, optimizer, p, c, stage_parameters(a, p, c))


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


@inner_formula
def border_bytes(a: ArchitectureDims, p: PlanDims, seq_len: float) -> float:
    """Bytes that a rank hands to the next stage for one microbatch [B]."""
    tokens = p.micro_batch * seq_len / p.cp
    return BF16_BYTES * tokens / p.tp * a.d_model


@formula
def border_time(a: ArchitectureDims, hw: Hardware, p: PlanDims, seq_len: float) -> float:
    """One hand-off of a microbatch's activations, each TP rank its part, to the next stage [s]."""
    distance = p.tp * p.cp * p.dp
    return point_to_point_time(hw.fabric, distance, border_bytes(a, p, seq_len), p.pp * distance)


@formula
def stage_hand_off_time(
    a: ArchitectureDims, hw: Hardware, stack: Stack, p: PlanDims, seq_len: float
) -> float:
    """All hand-offs of one microbatch on a stage: each chunk receives and sends, both ways [s].

    0 with a stack that hides them all.
    """
    if p.pp <= 1.0 or stack.pp_hidden >= 1.0:
        return 0.0
    return 2.0 * p.vpp * border_time(a, hw, p, seq_len)


@inner_formula
def stage_setting(
    a: ArchitectureDims,
    hw: Hardware,
    stack: Stack,
    p: PlanDims,
    wait: float,
    hand_off: float,
    c: StageContent,
) -> StageSetting:
    """Return what the time of a microbatch on a stage depends on beside recompute.

    Head, cross-entropy and the logits of every prediction layer are where the loss is (Megatron-LM
    #5318); the projection of a prediction layer is on that layer's stage. ``wait`` is
    :func:`rank_wait` and ``hand_off`` is :func:`stage_hand_off_time`.
    """
    joined = c.prediction - c.loss * (a.mtp_dense + a.mtp_moe)
    sharding = sharding_time(a, hw, stack, p, c)
    return StageSetting(c.moe, c.dense, c.loss, joined, wait, sharding, hand_off)


@inner_formula
def time_of_setting(stack: Stack, t: ModeTotals, s: StageSetting) -> StageTime:
    """Return the time of one microbatch on a stage [s]."""
    return time_in_setting(stack, t, s, s.heads * t.head + s.joined * t.joined)


@formula
def time_of_content(
    a: ArchitectureDims,
    hw: Hardware,
    stack: Stack,
    p: PlanDims,
    t: ModeTotals,
    seq_len: float,
    c: StageContent,
) -> StageTime:
    """Return the time of one microbatch on a stage [s]."""
    hand_off = stage_hand_off_time(a, hw, stack, p, seq_len)
    setting = stage_setting(a, hw, stack, p, rank_wait(stack, p), hand_off, c)
    return time_of_setting(stack, t, setting)


@formula
def time_of_stage(
    a: ArchitectureDims,
    hw: Hardware,
    stack: Stack,
    p: PlanDims,
    t: ModeTotals,
    seq_len: float,
    stage: float,
) -> StageTime:
    """:func:`time_of_content` of a stage of the balanced layout [s]."""
    return time_of_content(a, hw, stack, p, t, seq_len, stage_content(a, p, stage))


@formula
def plain_content(a: ArchitectureDims, p: PlanDims, stage: float) -> StageContent:
    """Return a stage's own layers, without embedding, head or prediction."""
    layers = a.n_layers / p.pp
    dense = dense_layers_of_stage(a, p, stage)
    return StageContent(layers, dense, layers - dense, 0.0, 0.0, 0.0)


@formula
def plain_stage_time(
    a: ArchitectureDims,
    hw: Hardware,
    stack: Stack,
    p: PlanDims,
    t: ModeTotals,
    seq_len: float,
    stage: float,
) -> float:
    """Return the time of one microbatch on a stage's own layers, without head or prediction [s]."""
    return time_of_content(a, hw, stack, p, t, seq_len, plain_content(a, p, stage)).time


@formula
def fill_chunks(
    a: ArchitectureDims,
    hw: Hardware,
    stack: Stack,
    p: PlanDims,
    t: ModeTotals,
    seq_len: float,
    c: StageContent,
    layers: Any,
    seconds: Any,
) -> None:
    """Write the time of one microbatch in each chunk of a device into ``seconds`` [s].

    ``layers`` are those of each chunk, prediction layers included. Chunks share a device's time by
    their layers; what the head, a projection or the loss add is in the last one.
    """
    whole = time_of_content(a, hw, stack, p, t, seq_len, c).time
    last = seconds.shape[0] - 1
    if c.dense + c.moe > 0.0:
        own = StageContent(c.dense + c.moe, c.dense, c.moe, 0.0, 0.0, 0.0)
        plain = time_of_content(a, hw, stack, p, t, seq_len, own).time
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
    hw: Hardware,
    stack: Stack,
    p: PlanDims,
    t: ModeTotals,
    seq_len: float,
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
        fill_chunks(a, hw, stack, p, t, seq_len, c, layers, seconds[:, r])
    node = hw.fabric.devices_per_node
    return pipeline_of_chunks(stack, node, seconds, n_microbatches, t.forward_share)


@inner_formula
def pipeline_depth_cost(hw: Hardware, stack: Stack, pp: float) -> float:
    """Extra cost of a pipeline over more than one node, relative to its makespan [-]."""
    return stack.pipeline_node_cost * (ceil(pp / hw.fabric.devices_per_node) - 1.0)


@inner_formula
def pipeline_setting(
    a: ArchitectureDims,
    hw: Hardware,
    stack: Stack,
    p: PlanDims,
    seq_len: float,
    ends: EndStages,
) -> PipelineSetting:
    """Return the stages that the makespan follows from, where stages are alike.

    See :func:`perfmodel.memory.stages_are_alike`; ``ends`` is :func:`perfmodel.memory.end_stages`.
    """
    wait = rank_wait(stack, p)
    hand_off = stage_hand_off_time(a, hw, stack, p, seq_len)
    last = stage_setting(a, hw, stack, p, wait, hand_off, ends.last)
    first = last
    if p.pp > 1.0:
        first = stage_setting(a, hw, stack, p, wait, hand_off, ends.first)
    mid, other = first, first
    has_mid, has_other = 0.0, 0.0
    if p.pp > 2.0 and a.first_k_dense > 0.0:
        has_mid = 1.0
        c = stage_content(a, p, p.pp - 2.0)
        mid = stage_setting(a, hw, stack, p, wait, hand_off, c)
        if dense_layers_of_stage(a, p, 1.0) > 0.0:  # dense layers beyond the first stage
            has_other = 1.0
            other = stage_setting(a, hw, stack, p, wait, hand_off, stage_content(a, p, 1.0))
    elif p.pp > 1.0 and p.vpp > 1.0 and a.first_k_dense > 0.0:  # the last stage without its head
        has_mid = 1.0
        mid = stage_setting(a, hw, stack, p, wait, hand_off, plain_content(a, p, 1.0))
    depth = pipeline_depth_cost(hw, stack, p.pp)
    return PipelineSetting(first, mid, other, last, has_mid, has_other, depth)


@inner_formula
def pipeline_of_times(
    first: float,
    mid: float,
    last: float,
    depth: float,
    p: PlanDims,
    t: ModeTotals,
    n_microbatches: float,
) -> PipelineTime:
    """Time of a pipeline from that of a microbatch on its stages [s].

    ``depth`` is :func:`pipeline_depth_cost`.
    """
    makespan = makespan_interleaved(first, mid, last, p.pp, p.vpp, n_microbatches, t.forward_share)
    steady = n_microbatches * last
    return PipelineTime(steady=steady, bubble=makespan - steady, pipeline_depth=depth * makespan)


@inner_formula
def pipeline_of_setting(
    stack: Stack, s: PipelineSetting, p: PlanDims, t: ModeTotals, n_microbatches: float
) -> PipelineTime:
    """Time from the first microbatch's forward to the last one's backward, stages alike [s]."""
    last = time_of_setting(stack, t, s.last).time
    first = time_of_setting(stack, t, s.first).time if p.pp > 1.0 else last
    mid = first
    if s.has_mid > 0.0:
        mid = time_of_setting(stack, t, s.mid).time
    if s.has_other > 0.0:
        mid = max(mid, time_of_setting(stack, t, s.other).time)
    return pipeline_of_times(first, mid, last, s.depth, p, t, n_microbatches)


@formula
def pipeline_time(
    a: ArchitectureDims,
    hw: Hardware,
    stack: Stack,
    p: PlanDims,
    t: ModeTotals,
    seq_len: float,
    n_microbatches: float,
) -> PipelineTime:
    """Time from the first microbatch's forward to the last one's backward [s].

    Of the balanced layout; where its stages are equal, in ``O(1)`` from the first, a middle and
    the last one.
    """
    if is_uneven(a, p):
        return uneven_pipeline_time(a, hw, stack, p, t, seq_len, n_microbatches)
    if a.moe_every > 1.0 and p.pp > 1.0:  # dense layers all over: the slowest plain stage
        last = time_of_stage(a, hw, stack, p, t, seq_len, p.pp - 1.0).time
        first = time_of_stage(a, hw, stack, p, t, seq_len, 0.0).time
        stage = 1.0
        mid = plain_stage_time(a, hw, stack, p, t, seq_len, stage)
        while stage < p.pp - 2.0:
            stage += 1.0
            mid = max(mid, plain_stage_time(a, hw, stack, p, t, seq_len, stage))
        depth = pipeline_depth_cost(hw, stack, p.pp)
        return pipeline_of_times(first, mid, last, depth, p, t, n_microbatches)
    setting = pipeline_setting(a, hw, stack, p, seq_len, end_stages(a, p))
    return pipeline_of_setting(stack, setting, p, t, n_microbatches)


@formula
def hand_off_time(a: ArchitectureDims, hw: Hardware, p: PlanDims, seq_len: float) -> float:
    """Exposed hand-offs of activations while the pipeline fills and drains [s].

    The first microbatch passes ``pp vpp - 1`` borders of chunks on its way to the loss, and as many
    back. Those of the steady part are in :func:`stage_hand_off_time`.
    """
    if p.pp <= 1.0:
        return 0.0
    volume = border_bytes(a, p, seq_len)
    return 2.0 * chain_time(hw.fabric, p.tp * p.cp * p.dp, p.pp, p.vpp, volume)


@inner_formula
def synchronisation_of_ends(
    a: ArchitectureDims,
    hw: Hardware,
    stack: Stack,
    optimizer: OptimizerDims,
    p: PlanDims,
    seq_len: float,
    ends: EndStages,
) -> SynchronisationTime:
    """:func:`synchronisation_time` where no stage holds more than the first or the last [s]."""
    exchange = exchange_of_parameters(hw, stack, p, ends.of_last)
    update = update_of_parameters(a, hw, stack, optimizer, p, ends.last, ends.of_last)
    if p.pp > 1.0:
        exchange = max(exchange, exchange_of_parameters(hw, stack, p, ends.of_first))
        of_first = update_of_parameters(a, hw, stack, optimizer, p, ends.first, ends.of_first)
        update = max(update, of_first)
    return SynchronisationTime(
        hand_off=hand_off_time(a, hw, p, seq_len),
        data_parallel=exchange,
        optimizer=update,
        step_host=stack.step_host_s,
    )


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
    sync = synchronisation_of_ends(a, hw, stack, optimizer, p, seq_len, end_stages(a, p))
    if stages_are_alike(a, p):
        return sync
    exchange, update = sync.data_parallel, sync.optimizer
    stage = 1.0
    while stage < p.pp - 1.0:  # a stage between may hold more than either end
        exchange = max(exchange, data_parallel_time(a, hw, stack, p, stage))
        update = max(update, optimizer_time(a, hw, stack, optimizer, p, stage))
        stage += 1.0
    return SynchronisationTime(
        hand_off=sync.hand_off,
        data_parallel=exchange,
        optimizer=update,
        step_host=sync.step_host,
    )


@inner_formula
def exposed_exchange(
    stack: Stack, pipeline: PipelineTime, sync: SynchronisationTime, n_microbatches: float
) -> float:
    """Return what of the exchange once a step is not behind compute [s].

    Gradients can be exchanged while the last microbatch is in its backward pass and weights while
    the first one is in its forward pass: at most one microbatch's time hides.
    """
    window = pipeline.steady / n_microbatches
    return sync.data_parallel - min(stack.dp_hidden * sync.data_parallel, window)


@inner_formula
def step_total(
    stack: Stack, pipeline: PipelineTime, sync: SynchronisationTime, n_microbatches: float
) -> float:
    """Time of one optimizer step [s]."""
    return (
        pipeline.steady
        + pipeline.bubble
        + pipeline.pipeline_depth
        + sync.hand_off
        + exposed_exchange(stack, pipeline, sync, n_microbatches)
        + sync.optimizer
        + sync.step_host
    )
