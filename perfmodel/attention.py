"""Device time and weights of one layer's attention, grouped-query or latent.

``tokens`` are a device's own, as in :mod:`perfmodel.layer`.
"""

from __future__ import annotations

from typing import NamedTuple

from perfmodel._jit import formula, inner_formula
from perfmodel.collectives import (
    all_reduce_time,
    all_to_all_time,
    point_to_point_time,
    ring_time,
)
from perfmodel.dims import ArchitectureDims
from perfmodel.hardware import Hardware
from perfmodel.kernels import (
    BF16_BYTES,
    attention_time,
    cast_time,
    elementwise_time,
    gemm_time,
    linear_backward_time,
)
from perfmodel.mesh import PlanDims, sequence_shards

NORM_BACKWARD_TRAFFIC = 1.5
"""Traffic of the backward of norms, residuals and rotary embedding over that of the forward."""


class AttentionTimes(NamedTuple):
    """One pass over the part of a layer that does not depend on its feed-forward block [s]."""

    linear: float  # QKV and output projections
    core: float  # softmax(QK)V
    elementwise: float  # norms, residuals, rotary embedding
    ring: float  # exposed part of the KV ring, or all-to-alls of heads


@inner_formula
def kv_heads_per_rank(a: ArchitectureDims, tp: float) -> float:
    """Key-value heads on one rank: replicated where TP exceeds their number [-]."""
    return max(1.0, a.n_kv_heads / tp)


@inner_formula
def attention_weights(a: ArchitectureDims, tp: float) -> float:
    """Weights of one layer's attention on one rank [-].

    The projections into latent vectors are replicated over TP, those out of them are divided.
    """
    if a.latent > 0.0:
        heads = a.n_heads / tp
        into = a.d_model * (a.q_lora_rank + a.kv_lora_rank + a.rope_head_dim)
        query = a.q_lora_rank if a.q_lora_rank > 0.0 else a.d_model
        unfolded = a.head_dim - a.rope_head_dim + a.v_head_dim
        out = query * a.head_dim + a.kv_lora_rank * unfolded + a.v_head_dim * a.d_model
        return into + heads * out
    heads = a.n_heads / tp + kv_heads_per_rank(a, tp)
    return 2.0 * a.d_model * a.head_dim * heads


@inner_formula
def attention_parameters(a: ArchitectureDims, tp: float) -> float:
    """Parameters of one layer on one rank, feed-forward block and extra part apart [-]."""
    vectors = a.n_heads / tp * a.query_head_vectors + kv_heads_per_rank(a, tp) * a.kv_head_vectors
    return attention_weights(a, tp) + vectors + a.layer_vectors


@formula
def linear_time(hw: Hardware, m: float, n: float, k: float, backward: float) -> float:
    """Device time of one pass of a linear layer (m, k) x (k, n); ``backward`` is 0 or 1 [s].

    Below bf16 the forward pass quantises the input and the backward pass the gradient of the
    output; the weights are quantised once a step, with the optimizer.
    """
    if backward > 0.0:
        products = linear_backward_time(hw.device, hw.gemm, m, n, k)
        return products + cast_time(hw.device, hw.elementwise, hw.cast, m * n)
    return gemm_time(hw.device, hw.gemm, m, n, k) + cast_time(
        hw.device, hw.elementwise, hw.cast, m * k
    )


@formula
def projection_time(
    a: ArchitectureDims, hw: Hardware, p: PlanDims, tokens: float, backward: float
) -> float:
    """Device time of attention's projections in one pass, and of a layer's extra part [s].

    Latent vectors are made of a rank's own part of the tokens and gathered; all else works on
    ``tokens``.
    """
    tp = p.tp
    heads = a.n_heads / tp
    if a.latent > 0.0:
        local = tokens / sequence_shards(p)
        time = linear_time(hw, local, a.kv_lora_rank + a.rope_head_dim, a.d_model, backward)
        query = a.d_model
        if a.q_lora_rank > 0.0:
            query = a.q_lora_rank
            time += linear_time(hw, local, a.q_lora_rank, a.d_model, backward)
        unfolded = a.head_dim - a.rope_head_dim + a.v_head_dim
        time += linear_time(hw, tokens, heads * a.head_dim, query, backward)
        time += linear_time(hw, tokens, heads * unfolded, a.kv_lora_rank, backward)
    else:
        qkv = (heads + 2.0 * kv_heads_per_rank(a, tp)) * a.head_dim
        time = linear_time(hw, tokens, qkv, a.d_model, backward)
    time += linear_time(hw, tokens, a.d_model, heads * a.v_head_dim, backward)
    if a.extra > 0.0:
        time += linear_time(hw, tokens, a.extra / (a.d_model * tp), a.d_model, backward)
    return time


@formula
def core_time(
    a: ArchitectureDims,
    hw: Hardware,
    sequences: float,
    heads: float,
    seq_len: float,
    backward: float,
) -> float:
    """Device time of softmax(QK)V in one pass, averaged over layers with and without window [s].

    Of its products one is as wide as the values forward and two of five backward; the others are
    as wide as the keys. Of a window's ``S w - w^2 / 2`` scores the rest of ``S^2 / 2`` is skipped.
    """
    if backward > 0.0:
        surface = hw.attention_backward
        width = (3.0 * a.head_dim + 2.0 * a.v_head_dim) / 5.0
    else:
        surface = hw.attention_forward
        width = (a.head_dim + a.v_head_dim) / 2.0
    core = attention_time(hw.device, surface, sequences, heads, seq_len, width, backward)
    if a.window_fraction > 0.0 and a.window < seq_len:
        share = a.window / seq_len
        kept = 1.0 - a.window_fraction * (1.0 - share * (2.0 - share))
        core = surface.fixed_s + kept * (core - surface.fixed_s)
    return core


@formula
def attention_times(
    a: ArchitectureDims,
    hw: Hardware,
    seq_len: float,
    p: PlanDims,
    backward: float,
) -> AttentionTimes:
    """Device time of what every layer has, in one pass (``backward`` is 0 or 1) [s]."""
    tokens = p.micro_batch * seq_len / p.cp
    local = tokens / sequence_shards(p)
    heads = a.n_heads / p.tp
    kv_heads = kv_heads_per_rank(a, p.tp)
    linear = projection_time(a, hw, p, tokens, backward)
    if p.heads_over_cp > 0.0:  # each rank has whole sequences of some heads
        core = core_time(a, hw, p.micro_batch, heads / p.cp, seq_len, backward)
    else:
        core = core_time(a, hw, p.micro_batch / p.cp, heads, seq_len, backward)

    # two norms, two residuals, rotary embedding of queries and keys; norms of latent vectors
    traffic = local * 10.0 * BF16_BYTES * a.d_model
    traffic += tokens * 2.0 * BF16_BYTES * (heads + kv_heads) * a.head_dim
    traffic += local * 2.0 * BF16_BYTES * (a.q_lora_rank + a.kv_lora_rank)
    traffic *= 1.0 + (NORM_BACKWARD_TRAFFIC - 1.0) * backward
    kernels = 5.0 + (2.0 if a.q_lora_rank > 0.0 else a.latent)
    elementwise = elementwise_time(hw.device, hw.elementwise, traffic, kernels)

    return AttentionTimes(
        linear, core, elementwise, context_parallel_time(a, hw, p, tokens, core, backward)
    )


@formula
def context_parallel_time(
    a: ArchitectureDims, hw: Hardware, p: PlanDims, tokens: float, core: float, backward: float
) -> float:
    """Exposed time of context parallelism in one pass of one layer [s].

    In a ring, keys and values go round while attention (``core`` seconds) works; their gradients
    go round as well. All-to-all (arXiv 2309.14509), queries, keys and values are exchanged for
    whole sequences of some heads before attention, and its output after it.
    """
    if p.cp <= 1.0:
        return 0.0
    heads = a.n_heads / p.tp
    kv_heads = kv_heads_per_rank(a, p.tp)
    pair = kv_heads * (a.head_dim + a.v_head_dim)
    if p.heads_over_cp > 0.0:
        into = tokens * BF16_BYTES * (heads * a.head_dim + pair)
        out = tokens * BF16_BYTES * heads * a.v_head_dim
        return all_to_all_time(hw.fabric, p.cp, p.tp, into) + all_to_all_time(
            hw.fabric, p.cp, p.tp, out
        )
    node = hw.fabric.devices_per_node
    distance = p.tp if p.tp * p.cp <= node else node
    shared = tokens * BF16_BYTES * pair
    hop = point_to_point_time(hw.fabric, distance, shared, p.tp * p.cp)
    return max(0.0, (1.0 + backward) * (p.cp - 1.0) * hop - core)


@formula
def tensor_parallel_time(hw: Hardware, p: PlanDims, volume: float) -> float:
    """Time to join ``volume`` bytes around a block that TP splits, in one pass [s].

    With sequence parallelism they are gathered before it and scattered after it; without, its
    outputs (or the gradients of its inputs) are reduced.
    """
    tp = p.tp
    if p.sequence_parallel == 0.0:
        return all_reduce_time(hw.fabric, tp, 1.0, volume)
    return ring_time(hw.fabric.all_gather, hw.fabric, tp, 1.0, volume) + ring_time(
        hw.fabric.reduce_scatter, hw.fabric, tp, 1.0, volume
    )


@formula
def attention_parallel_time(a: ArchitectureDims, hw: Hardware, p: PlanDims, tokens: float) -> float:
    """Time to gather what attention reads over TP, and to scatter what it writes [s].

    Latent attention gathers the latent vectors in place of the layer's input, which the queries
    need all the same where they have none.
    """
    hidden = tokens * BF16_BYTES * a.d_model
    if a.latent == 0.0 or p.sequence_parallel == 0.0:
        return tensor_parallel_time(hw, p, hidden)
    tp = p.tp
    fabric = hw.fabric
    read = a.q_lora_rank if a.q_lora_rank > 0.0 else a.d_model
    read += a.kv_lora_rank + a.rope_head_dim
    return ring_time(fabric.all_gather, fabric, tp, 1.0, tokens * BF16_BYTES * read) + ring_time(
        fabric.reduce_scatter, fabric, tp, 1.0, hidden
    )
