"""Device time of one layer, operator by operator, for one microbatch on one device.

``tokens`` are a device's own: ``micro_batch * seq_len / cp``. Tensor parallelism is always with
sequence parallelism, so what lies between the matrix products (norms, residuals, the router, the
permutation of tokens) works on ``tokens / tp``.
"""

from __future__ import annotations

from typing import NamedTuple

from perfmodel._jit import formula
from perfmodel.architecture import ArchitectureDims
from perfmodel.collectives import all_to_all_time, point_to_point_time, ring_time
from perfmodel.hardware import Hardware
from perfmodel.kernels import (
    BF16_BYTES,
    attention_time,
    elementwise_time,
    gemm_time,
    grouped_gemm_launch,
    grouped_gemm_time,
    head_time,
    linear_backward_time,
    router_time,
    topk_time,
)

MAIN_GRAD_EXTRA_BYTES = 6.0
"""Per weight and microbatch: a fused weight gradient reads and writes fp32 where it would else
write bf16 (8 - 2 bytes)."""

NORM_BACKWARD_TRAFFIC = 1.5
"""Traffic of the backward of norms, residuals and rotary embedding over that of the forward."""


class OperatorTimes(NamedTuple):
    """Device time of one pass over one layer, by operator [s]."""

    attention_linear: float  # QKV and output projections
    attention_core: float  # softmax(QK)V
    elementwise: float  # norms, residuals, rotary embedding
    router: float  # router product and top-k
    permutation: float  # tokens to expert order and back
    experts: float  # grouped products of the routed experts
    activation: float  # gated unit
    dense_ffn: float  # dense block, or shared expert
    tensor_parallel: float  # all-gather and reduce-scatter of TP
    context_parallel: float  # exposed part of the KV ring
    gradient: float  # accumulation into fp32 main gradients (backward only)


class LayerCost(NamedTuple):
    """All that a stage needs to know of its layers."""

    moe_forward: OperatorTimes
    moe_backward: OperatorTimes
    dense_forward: OperatorTimes
    dense_backward: OperatorTimes
    dispatch: float  # one expert all-to-all (and all-gather over ETP) [s]
    launch_forward: float  # host time of the two grouped products, forward [s]
    launch_backward: float  # the same, backward [s]
    head: float  # head and cross-entropy, on the last stage [s]


@formula
def total(t: OperatorTimes) -> float:
    """Sum over operators [s]."""
    return (
        t.attention_linear
        + t.attention_core
        + t.elementwise
        + t.router
        + t.permutation
        + t.experts
        + t.activation
        + t.dense_ffn
        + t.tensor_parallel
        + t.context_parallel
        + t.gradient
    )


@formula
def kv_heads_per_rank(a: ArchitectureDims, tp: float) -> float:
    """Key-value heads on one rank: replicated where TP exceeds their number [-]."""
    return max(1.0, a.n_kv_heads / tp)


@formula
def attention_weights(a: ArchitectureDims, tp: float) -> float:
    """Weights of one layer's attention on one rank [-]."""
    heads = a.n_heads / tp + kv_heads_per_rank(a, tp)
    return 2.0 * a.d_model * a.head_dim * heads


@formula
def ffn_forward(a: ArchitectureDims, hw: Hardware, tokens: float, width: float) -> float:
    """Forward products of a dense block of ``width`` on one rank [s]."""
    if width <= 0.0:
        return 0.0
    up = (a.ffn_matrices - 1.0) * width
    return gemm_time(hw.device, hw.gemm, tokens, up, a.d_model) + gemm_time(
        hw.device, hw.gemm, tokens, a.d_model, width
    )


@formula
def ffn_backward(a: ArchitectureDims, hw: Hardware, tokens: float, width: float) -> float:
    """Backward products of a dense block of ``width`` on one rank [s]."""
    if width <= 0.0:
        return 0.0
    up = (a.ffn_matrices - 1.0) * width
    return linear_backward_time(hw.device, hw.gemm, tokens, up, a.d_model) + linear_backward_time(
        hw.device, hw.gemm, tokens, a.d_model, width
    )


@formula
def activation_traffic(a: ArchitectureDims, rows: float, width: float, backward: float) -> float:
    """Bytes that the (gated) unit moves: u inputs and 1 output, 2u + 1 backward [B]."""
    inputs = a.ffn_matrices - 1.0
    return BF16_BYTES * rows * width * (inputs + 1.0 + backward * inputs)


@formula
def rows_per_expert(a: ArchitectureDims, tokens: float, tp: float, etp: float, ep: float) -> float:
    """Rows that each local expert works on, balanced routing [-].

    All ranks of the EP group feed it: ``(tokens / tp) K ep etp / E``.
    """
    return tokens / tp * a.top_k * ep * etp / a.n_experts


@formula
def layer_cost(
    a: ArchitectureDims,
    hw: Hardware,
    seq_len: float,
    micro_batch: float,
    tp: float,
    etp: float,
    ep: float,
    cp: float,
) -> LayerCost:
    """Device time of a MoE layer and of a dense layer, and what joins them [s]."""
    dev, gemm, elem = hw.device, hw.gemm, hw.elementwise
    tokens = micro_batch * seq_len / cp
    local = tokens / tp
    hidden = BF16_BYTES * a.d_model

    head = head_time(dev, hw.head, tokens, a.d_model, a.vocab_size / tp)

    # attention
    heads = a.n_heads / tp
    kv_heads = kv_heads_per_rank(a, tp)
    qkv = (heads + 2.0 * kv_heads) * a.head_dim
    out = heads * a.head_dim
    linear_f = gemm_time(dev, gemm, tokens, qkv, a.d_model) + gemm_time(
        dev, gemm, tokens, a.d_model, out
    )
    linear_b = linear_backward_time(dev, gemm, tokens, qkv, a.d_model) + linear_backward_time(
        dev, gemm, tokens, a.d_model, out
    )
    core_f = attention_time(
        dev, hw.attention_forward, micro_batch / cp, heads, seq_len, a.head_dim, 0.0
    )
    core_b = attention_time(
        dev, hw.attention_backward, micro_batch / cp, heads, seq_len, a.head_dim, 1.0
    )

    # two norms, two residuals, rotary embedding
    traffic = local * (10.0 * hidden)
    traffic += tokens * 2.0 * BF16_BYTES * (heads + kv_heads) * a.head_dim
    elementwise_f = elementwise_time(dev, elem, traffic, 5.0)
    elementwise_b = elementwise_time(dev, elem, NORM_BACKWARD_TRAFFIC * traffic, 5.0)

    # context parallelism: keys and values go round the ring while attention works
    ring_f = 0.0
    ring_b = 0.0
    if cp > 1.0:
        volume = tokens * 2.0 * BF16_BYTES * kv_heads * a.head_dim
        distance = tp if tp * cp <= hw.fabric.devices_per_node else hw.fabric.devices_per_node
        hop = point_to_point_time(hw.fabric, distance, volume)
        ring_f = max(0.0, (cp - 1.0) * hop - core_f)
        ring_b = max(0.0, 2.0 * (cp - 1.0) * hop - core_b)

    # tensor parallelism: gather before, scatter after, in each block that it splits
    per_block = 0.0
    if tp > 1.0:
        node = hw.fabric.devices_per_node
        per_block = ring_time(hw.fabric.all_gather, node, tp, 1.0, tokens * hidden)
        per_block += ring_time(hw.fabric.reduce_scatter, node, tp, 1.0, tokens * hidden)
    shared_blocks = 1.0 if a.d_shared > 0.0 else 0.0

    # dense block and shared expert
    dense_f = ffn_forward(a, hw, tokens, a.d_ff / tp)
    dense_b = ffn_backward(a, hw, tokens, a.d_ff / tp)
    dense_act_f = elementwise_time(dev, elem, activation_traffic(a, tokens, a.d_ff / tp, 0.0), 1.0)
    dense_act_b = elementwise_time(dev, elem, activation_traffic(a, tokens, a.d_ff / tp, 1.0), 1.0)
    attention_grad = MAIN_GRAD_EXTRA_BYTES * attention_weights(a, tp)
    dense_grad = attention_grad + MAIN_GRAD_EXTRA_BYTES * a.ffn_matrices * a.d_model * a.d_ff / tp

    moe_f = OperatorTimes(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    moe_b = OperatorTimes(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    dispatch = 0.0
    launch_f = 0.0
    launch_b = 0.0
    if a.n_experts > 0.0:
        n_local = a.n_experts / ep
        rows = rows_per_expert(a, tokens, tp, etp, ep)
        routed = local * a.top_k
        width = a.d_expert / etp
        up = (a.ffn_matrices - 1.0) * width

        gate = router_time(dev, elem, local, a.d_model, a.n_experts)
        router_f = gate + topk_time(hw.topk, local, a.n_experts)
        router_b = 2.0 * gate + topk_time(hw.topk, local, a.n_experts)
        passes = 4.0 if ep > 1.0 else 2.0
        permute = elementwise_time(dev, elem, passes * 2.0 * routed * hidden, passes)
        experts_f = grouped_gemm_time(
            dev, hw.grouped_forward, n_local, rows, up, a.d_model, 0.0
        ) + grouped_gemm_time(dev, hw.grouped_forward, n_local, rows, a.d_model, width, 0.0)
        experts_b = grouped_gemm_time(
            dev, hw.grouped_backward, n_local, rows, up, a.d_model, 1.0
        ) + grouped_gemm_time(dev, hw.grouped_backward, n_local, rows, a.d_model, width, 1.0)
        launch_f = 2.0 * grouped_gemm_launch(hw.grouped_forward, n_local)
        launch_b = 2.0 * grouped_gemm_launch(hw.grouped_backward, n_local)

        shared = a.d_shared / tp
        act_rows = n_local * rows
        act_f = elementwise_time(
            dev,
            elem,
            activation_traffic(a, act_rows, width, 0.0)
            + activation_traffic(a, tokens, shared, 0.0),
            1.0 + shared_blocks,
        )
        act_b = elementwise_time(
            dev,
            elem,
            activation_traffic(a, act_rows, width, 1.0)
            + activation_traffic(a, tokens, shared, 1.0),
            1.0 + shared_blocks,
        )
        weights = n_local * a.ffn_matrices * a.d_model * width
        weights += a.ffn_matrices * a.d_model * shared
        moe_grad = attention_grad + MAIN_GRAD_EXTRA_BYTES * weights
        moe_f = OperatorTimes(
            linear_f,
            core_f,
            elementwise_f,
            router_f,
            permute,
            experts_f,
            act_f,
            ffn_forward(a, hw, tokens, shared),
            per_block * (1.0 + shared_blocks),
            ring_f,
            0.0,
        )
        moe_b = OperatorTimes(
            linear_b,
            core_b,
            elementwise_b,
            router_b,
            permute,
            experts_b,
            act_b,
            ffn_backward(a, hw, tokens, shared),
            per_block * (1.0 + shared_blocks),
            ring_b,
            elementwise_time(dev, elem, moe_grad, 0.0),
        )
        dispatch = all_to_all_time(hw.fabric, ep, etp, routed * hidden)
        if etp > 1.0:
            node = hw.fabric.devices_per_node
            dispatch += ring_time(hw.fabric.all_gather, node, etp, 1.0, etp * routed * hidden)

    dense_forward = OperatorTimes(
        linear_f,
        core_f,
        elementwise_f,
        0.0,
        0.0,
        0.0,
        dense_act_f,
        dense_f,
        2.0 * per_block,
        ring_f,
        0.0,
    )
    dense_backward = OperatorTimes(
        linear_b,
        core_b,
        elementwise_b,
        0.0,
        0.0,
        0.0,
        dense_act_b,
        dense_b,
        2.0 * per_block,
        ring_b,
        elementwise_time(dev, elem, dense_grad, 0.0),
    )
    return LayerCost(
        moe_f, moe_b, dense_forward, dense_backward, dispatch, launch_f, launch_b, head
    )
