"""Device time of one layer, operator by operator, for one microbatch on one device.

``tokens`` are a device's own: ``micro_batch * seq_len / cp``. With sequence parallelism, what lies
between the matrix products (norms, residuals, the router, the permutation of tokens) works on
``tokens / tp``. Times of experts are those of the most loaded rank of EP, which has ``load`` times
the mean rows.
"""

from __future__ import annotations

from typing import NamedTuple

from perfmodel._jit import formula, inner_formula
from perfmodel.attention import (
    AttentionTimes,
    attention_parallel_time,
    attention_times,
    attention_weights,
    linear_time,
    tensor_parallel_time,
)
from perfmodel.collectives import all_to_all_once_time, all_to_all_time, ring_time
from perfmodel.dims import ArchitectureDims
from perfmodel.hardware import Hardware
from perfmodel.kernels import (
    BF16_BYTES,
    cast_time,
    elementwise_time,
    grouped_gemm_launch,
    grouped_gemm_time,
    head_time,
    router_time,
    topk_time,
)
from perfmodel.mesh import PlanDims, sequence_shards

MAIN_GRAD_EXTRA_BYTES = 6.0
"""Per weight and microbatch: a fused weight gradient reads and writes fp32 where it would else
write bf16 (8 - 2 bytes)."""


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


NO_TIME = OperatorTimes(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class LayerCost(NamedTuple):
    """All that a stage needs to know of its layers."""

    moe_forward: OperatorTimes
    moe_backward: OperatorTimes
    dense_forward: OperatorTimes
    dense_backward: OperatorTimes
    dispatch: float  # one expert all-to-all (and all-gather over ETP) [s]
    dispatch_once: float  # the same, where a token goes once to each node [s]
    launch_forward: float  # host time of the two grouped products, forward [s]
    launch_backward: float  # the same, backward [s]
    head: float  # head and cross-entropy, and for each prediction layer once more and `joined` [s]
    joined: float  # projection from 2d to d of one prediction layer, forward and backward [s]
    score_byte: float  # to move one byte of every attention score of a layer [s/B]


class TrunkPass(NamedTuple):
    """What one pass over a layer costs whatever EP and ETP are."""

    attention: AttentionTimes
    shared_ffn: float  # products of the shared expert [s]
    tensor_parallel: float  # collectives of TP in a MoE layer [s]
    dense: OperatorTimes  # a dense layer


class TrunkCost(NamedTuple):
    """What a layer costs whatever EP and ETP are: it follows from TP, CP and the micro-batch."""

    forward: TrunkPass
    backward: TrunkPass
    head: float  # as in `LayerCost` [s]
    joined: float
    score_byte: float


@inner_formula
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
def ffn_time(
    a: ArchitectureDims, hw: Hardware, tokens: float, width: float, backward: float
) -> float:
    """Products of a dense block of ``width`` on one rank in one pass [s]."""
    if width <= 0.0:
        return 0.0
    up = (a.ffn_matrices - 1.0) * width
    return linear_time(hw, tokens, up, a.d_model, backward) + linear_time(
        hw, tokens, a.d_model, width, backward
    )


@formula
def expert_time(
    a: ArchitectureDims, hw: Hardware, n_local: float, rows: float, width: float, backward: float
) -> float:
    """Device time of one pass of the local experts: products and quantising [s].

    As in a linear layer: forward the inputs of both products, backward their outputs' gradients.
    """
    up = (a.ffn_matrices - 1.0) * width
    surface = hw.grouped_backward if backward > 0.0 else hw.grouped_forward
    time = grouped_gemm_time(hw.device, surface, n_local, rows, up, a.d_model, backward)
    time += grouped_gemm_time(hw.device, surface, n_local, rows, a.d_model, width, backward)
    inner = up if backward > 0.0 else width
    time += cast_time(hw.device, hw.elementwise, hw.cast, n_local * rows * a.d_model)
    return time + cast_time(hw.device, hw.elementwise, hw.cast, n_local * rows * inner)


@formula
def activation_traffic(a: ArchitectureDims, rows: float, width: float, backward: float) -> float:
    """Bytes that the (gated) unit moves: u inputs and 1 output, 2u + 1 backward [B]."""
    inputs = a.ffn_matrices - 1.0
    return BF16_BYTES * rows * width * (inputs + 1.0 + backward * inputs)


@formula
def rows_per_expert(a: ArchitectureDims, p: PlanDims, tokens: float) -> float:
    """Rows that each expert of the most loaded rank works on [-].

    All ranks of the EP group feed it: ``load (tokens / tp) K ep etp / E``.
    """
    local = tokens / sequence_shards(p)
    return p.load * local * a.top_k * p.ep * p.etp / a.n_experts


@formula
def dense_layer_times(
    a: ArchitectureDims,
    hw: Hardware,
    attention: AttentionTimes,
    p: PlanDims,
    tokens: float,
    backward: float,
) -> OperatorTimes:
    """Device time of one pass over a dense layer, by operator [s]."""
    tp = p.tp
    width = a.d_ff / tp
    weights = attention_weights(a, tp) + a.ffn_matrices * a.d_model * width + a.extra / tp
    traffic = backward * MAIN_GRAD_EXTRA_BYTES * weights
    return OperatorTimes(
        attention_linear=attention.linear,
        attention_core=attention.core,
        elementwise=attention.elementwise,
        router=0.0,
        permutation=0.0,
        experts=0.0,
        activation=elementwise_time(
            hw.device, hw.elementwise, activation_traffic(a, tokens, width, backward), 1.0
        ),
        dense_ffn=ffn_time(a, hw, tokens, width, backward),
        tensor_parallel=attention_parallel_time(a, hw, p, tokens)
        + tensor_parallel_time(hw, p, tokens * BF16_BYTES * a.d_model),
        context_parallel=attention.ring,
        gradient=elementwise_time(hw.device, hw.elementwise, traffic, 0.0),
    )


@formula
def trunk_pass(
    a: ArchitectureDims, hw: Hardware, seq_len: float, p: PlanDims, tokens: float, backward: float
) -> TrunkPass:
    """Return what one pass over a layer costs whatever EP and ETP are."""
    attention = attention_times(a, hw, seq_len, p, backward)
    shared_ffn = 0.0
    parallel = attention_parallel_time(a, hw, p, tokens)
    if a.n_experts > 0.0 and a.d_shared > 0.0:
        shared_ffn = ffn_time(a, hw, tokens, a.d_shared / p.tp, backward)
        parallel += tensor_parallel_time(hw, p, tokens * (BF16_BYTES * a.d_model))
    return TrunkPass(
        attention=attention,
        shared_ffn=shared_ffn,
        tensor_parallel=parallel,
        dense=dense_layer_times(a, hw, attention, p, tokens, backward),
    )


@formula
def moe_layer_times(
    a: ArchitectureDims,
    hw: Hardware,
    trunk: TrunkPass,
    p: PlanDims,
    tokens: float,
    backward: float,
) -> OperatorTimes:
    """Device time of one pass over a MoE layer, by operator, all-to-all apart [s]."""
    dev, elem, tp = hw.device, hw.elementwise, p.tp
    attention = trunk.attention
    local = tokens / sequence_shards(p)
    hidden = BF16_BYTES * a.d_model
    n_local = a.n_experts / p.ep
    rows = rows_per_expert(a, p, tokens)
    width = a.d_expert / p.etp
    shared = a.d_shared / tp
    blocks = 2.0 if a.d_shared > 0.0 else 1.0  # that TP splits

    # the selection's backward is a scatter of K values a token: launch-bound, no device time
    gate = router_time(dev, elem, local, a.d_model, a.n_experts)
    router = 2.0 * gate if backward > 0.0 else gate + topk_time(hw.topk, local, a.n_experts)
    # to expert order and back; behind an exchange once more, on the rows that ETP gathered
    passes = 4.0 if p.ep * p.etp > 1.0 else 2.0
    moved = 2.0 * (1.0 + p.load * p.etp) if p.ep * p.etp > 1.0 else 2.0
    permutation = elementwise_time(dev, elem, moved * 2.0 * local * a.top_k * hidden, passes)
    traffic = activation_traffic(a, n_local * rows, width, backward)
    traffic += activation_traffic(a, tokens, shared, backward)
    weights = attention_weights(a, tp) + a.ffn_matrices * a.d_model * (n_local * width + shared)
    weights += a.extra / tp
    return OperatorTimes(
        attention_linear=attention.linear,
        attention_core=attention.core,
        elementwise=attention.elementwise,
        router=router,
        permutation=permutation,
        experts=expert_time(a, hw, n_local, rows, width, backward),
        activation=elementwise_time(dev, elem, traffic, blocks),
        dense_ffn=trunk.shared_ffn,
        tensor_parallel=trunk.tensor_parallel,
        context_parallel=attention.ring,
        gradient=elementwise_time(dev, elem, backward * MAIN_GRAD_EXTRA_BYTES * weights, 0.0),
    )


@formula
def dispatch_time(a: ArchitectureDims, hw: Hardware, p: PlanDims, local_tokens: float) -> float:
    """Time to send every token's K copies to their experts, or to bring them back [s].

    The most loaded rank sets it. With ETP the copies are gathered over the expert-tensor group
    behind the all-to-all.
    """
    volume = p.load * local_tokens * a.top_k * BF16_BYTES * a.d_model
    fabric = hw.fabric
    return all_to_all_time(fabric, p.ep, p.etp, volume) + ring_time(
        fabric.all_gather, fabric, p.etp, 1.0, p.etp * volume
    )


@formula
def dispatch_once_time(
    a: ArchitectureDims, hw: Hardware, p: PlanDims, local_tokens: float
) -> float:
    """:func:`dispatch_time` where each token goes once to each node that has experts of it [s]."""
    token_bytes = p.load * local_tokens * BF16_BYTES * a.d_model
    gathered = p.etp * a.top_k * token_bytes
    fabric = hw.fabric
    return all_to_all_once_time(fabric, p.ep, p.etp, token_bytes, a.top_k) + ring_time(
        fabric.all_gather, fabric, p.etp, 1.0, gathered
    )


@formula
def score_byte_time(a: ArchitectureDims, hw: Hardware, seq_len: float, p: PlanDims) -> float:
    """Time to move one byte of every score of a layer's attention, full square of each head [s/B].

    For stacks that write the scores to memory: products, mask and softmax, dropout.
    """
    scores = p.micro_batch * a.n_heads / (p.tp * p.cp) * seq_len * seq_len
    return scores / (hw.device.memory_bw * hw.elementwise.bw_eff)


@formula
def trunk_cost(a: ArchitectureDims, hw: Hardware, seq_len: float, p: PlanDims) -> TrunkCost:
    """Return what a layer and the head cost for one microbatch whatever EP and ETP are [s]."""
    tokens = p.micro_batch * seq_len / p.cp
    tp = p.tp
    head = head_time(hw.device, hw.head, tokens, a.d_model, a.vocab_size / tp)
    prediction = a.mtp_dense + a.mtp_moe
    joined = 0.0
    if prediction > 0.0:  # each has logits of its own, and a projection from 2d to d
        joined = linear_time(hw, tokens, a.d_model / tp, 2.0 * a.d_model, 0.0)
        joined += linear_time(hw, tokens, a.d_model / tp, 2.0 * a.d_model, 1.0)
        head += prediction * (head + joined)
    return TrunkCost(
        forward=trunk_pass(a, hw, seq_len, p, tokens, 0.0),
        backward=trunk_pass(a, hw, seq_len, p, tokens, 1.0),
        head=head,
        joined=joined,
        score_byte=score_byte_time(a, hw, seq_len, p),
    )


@formula
def layer_cost_on(
    trunk: TrunkCost, a: ArchitectureDims, hw: Hardware, seq_len: float, p: PlanDims
) -> LayerCost:
    """:func:`layer_cost` of a plan whose :func:`trunk_cost` is known."""
    tokens = p.micro_batch * seq_len / p.cp
    moe_forward = NO_TIME
    moe_backward = NO_TIME
    dispatch = 0.0
    dispatch_once = 0.0
    launch_forward = 0.0
    launch_backward = 0.0
    if a.n_experts > 0.0:
        moe_forward = moe_layer_times(a, hw, trunk.forward, p, tokens, 0.0)
        moe_backward = moe_layer_times(a, hw, trunk.backward, p, tokens, 1.0)
        dispatch = dispatch_time(a, hw, p, tokens / sequence_shards(p))
        dispatch_once = dispatch_once_time(a, hw, p, tokens / sequence_shards(p))
        launch_forward = 2.0 * grouped_gemm_launch(hw.grouped_forward, a.n_experts / p.ep)
        launch_backward = 2.0 * grouped_gemm_launch(hw.grouped_backward, a.n_experts / p.ep)
    return LayerCost(
        moe_forward=moe_forward,
        moe_backward=moe_backward,
        dense_forward=trunk.forward.dense,
        dense_backward=trunk.backward.dense,
        dispatch=dispatch,
        dispatch_once=dispatch_once,
        launch_forward=launch_forward,
        launch_backward=launch_backward,
        head=trunk.head,
        joined=trunk.joined,
        score_byte=trunk.score_byte,
    )


@formula
def layer_cost(a: ArchitectureDims, hw: Hardware, seq_len: float, p: PlanDims) -> LayerCost:
    """Device time of a MoE layer, a dense layer and the head for one microbatch [s]."""
    return layer_cost_on(trunk_cost(a, hw, seq_len, p), a, hw, seq_len, p)
