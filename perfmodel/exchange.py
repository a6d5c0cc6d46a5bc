"""What stages exchange and update: sharded weights, gradients, hand-offs, the optimizer."""

from __future__ import annotations

from typing import NamedTuple

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
    replicas,
    stage_content,
    state_shards,
)
from perfmodel.stack import Stack


class SynchronisationTime(NamedTuple):
    """The part of a step outside the pipeline's stages; the fields add up [s]."""

    hand_off: float  # activations between stages, exposed while the pipeline fills and drains
    data_parallel: float  # gradients scattered, weights gathered; before any overlap
    optimizer: float
    step_host: float  # host time once a step


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
    ranks, edp = state_shards(p)
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
    ranks, edp = replicas(p)
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
    memory, one after the other. Matrix iterations stay on the device. ``optimizer_scale`` stretches
    the traffic of the device.
    """
    ranks, edp = state_shards(p)
    sharded = w.dense / ranks + w.expert / edp
    traffic = (1.0 - p.offload) * optimizer.traffic_bytes * sharded
    traffic += hw.cast.weight_bytes * (w.dense + w.expert)  # quantised once a step, on every rank
    time = stack.optimizer_scale * traffic / (hw.device.memory_bw * hw.elementwise.bw_eff)
    if p.offload > 0.0:
        moved = (stack.gradient_memory_bytes + BF16_BYTES) / hw.host.link_bw
        moved += optimizer.traffic_bytes / hw.host.memory_bw
        time += p.offload * sharded * moved
    if optimizer.matrix_iterations > 0.0:
        flop = (c.dense + c.moe) * attention_iteration_flop(a) / ranks
        if c.prediction > 0.0:
            joined = newton_schulz_flop(a.d_model, 2.0 * a.d_model)
            flop += c.prediction * joined / ranks
        if c.dense > 0.0:
            flop += c.dense * a.ffn_matrices * newton_schulz_flop(a.d_model, a.d_ff) / ranks
        if a.n_experts > 0.0:
            one = a.ffn_matrices * newton_schulz_flop(a.d_model, a.d_expert)
            flop += c.moe * a.n_experts / p.ep * one / edp
            if a.d_shared > 0.0:
                shared = newton_schulz_flop(a.d_model, a.d_shared)
                flop += c.moe * a.ffn_matrices * shared / ranks
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
