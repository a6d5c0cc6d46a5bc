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

On a CPU, whose kernels run in the host's own threads, the first term of ``tau`` is the sum
``C0 + J + G0 + t_head``.

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
from perfmodel.dims import ArchitectureDims
from perfmodel.exchange import (
    SynchronisationTime,
    sharding_time,
    stage_hand_off_time,
)
from perfmodel.hardware import Hardware
from perfmodel.memory import (
    EndStages,
    end_stages,
)
from perfmodel.mesh import (
    PlanDims,
    StageContent,
    dense_layers_of_stage,
    is_uneven,
    layers_before,
    stage_content,
)
from perfmodel.modes import ModeTotals
from perfmodel.schedule import makespan_interleaved
from perfmodel.schedule_stages import makespan_of_chunks
from perfmodel.stack import Stack


class StageSetting(NamedTuple):
    """What the time of a microbatch on a stage depends on, whatever is recomputed."""

    n_moe: float  # layers with experts, prediction layers included [-]
    n_dense: float
    heads: float  # 1 where the loss is [-]
    joined: float  # projections of prediction layers that `ModeTotals.head` does not have [-]
    wait: float  # of the slowest rank, where the device has nothing to do [s]
    sharding: float  # exchange of sharded weights and gradients, before any overlap [s]
    hand_off: float  # all hand-offs, before any overlap [s]
    blocking: float = 0.0  # 1 where the host computes: it hides behind nothing


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


@inner_formula
def rank_wait(stack: Stack, p: PlanDims) -> float:
    """Wait for the slowest rank of EP x PP where the device has nothing to do [s]."""
    return stack.jitter_s * log2(p.pp) * log2(p.ep)


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
    busy = max(host + jitter, device + head)
    if s.blocking > 0.0:
        busy = host + jitter + device + head
    return StageTime(
        host=host,
        jitter=jitter,
        device=device,
        head=head,
        dispatch=waited,
        sharding=gathered,
        hand_off=handed,
        time=busy + waited + gathered + handed,
    )


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
    return StageSetting(c.moe, c.dense, c.loss, joined, wait, sharding, hand_off, hw.blocking)


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


@inner_formula
def pipeline_depth_cost(stack: Stack, devices_per_node: float, pp: float) -> float:
    """Extra cost of a pipeline over more than one node, relative to its makespan [-]."""
    return stack.pipeline_node_cost * (ceil(pp / devices_per_node) - 1.0)


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
    depth = pipeline_depth_cost(stack, devices_per_node, float(len(tau)))
    return PipelineTime(
        steady=steady,
        bubble=makespan - steady,
        pipeline_depth=depth * makespan,
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
    depth = pipeline_depth_cost(stack, hw.fabric.devices_per_node, p.pp)
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
        depth = pipeline_depth_cost(stack, hw.fabric.devices_per_node, p.pp)
        return pipeline_of_times(first, mid, last, depth, p, t, n_microbatches)
    setting = pipeline_setting(a, hw, stack, p, seq_len, end_stages(a, p))
    return pipeline_of_setting(stack, setting, p, t, n_microbatches)


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
