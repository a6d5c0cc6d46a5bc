"""Device time and weights of one layer's attention, grouped-query or latent.

``tokens`` are a device's own, as in :mod:`perfmodel.layer`.
"""

from __future__ import annotations

from typing import NamedTuple

from perfmodel._jit import formula
from perfmodel.collectives import point_to_point_time, ring_time
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

NORM_BACKWARD_TRAFFIC = 1.5
"""Traffic of the backward of norms, residuals and rotary embedding over that of the forward."""


class AttentionTimes(NamedTuple):
    """One pass over the part of a layer that does not depend on its feed-forward block [s]."""

    linear: float  # QKV and output projections
    core: float  # softmax(QK)V
    elementwise: float  # norms, residuals, rotary embedding
    ring: float  # exposed part of the KV ring


@formula
def kv_heads_per_rank(a: ArchitectureDims, tp: float) -> float:
    """Key-value heads on one rank: replicated where TP exceeds their number [-]."""
    return max(1.0, a.n_kv_heads / tp)


@formula
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


@formula
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
    a: ArchitectureDims, hw: Hardware, tokens: float, tp: float, backward: float
) -> float:
    """Device time of attention's projections in one pass, and of a layer's extra part [s].

    Latent vectors are made of a rank's own ``tokens / tp`` and gathered; all else works on
    ``tokens``.
    """
    heads = a.n_heads / tp
    if a.latent > 0.0:
        local = tokens / tp
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
    micro_batch: float,
    tp: float,
    cp: float,
    backward: float,
) -> AttentionTimes:
    """Device time of what every layer has, in one pass (``backward`` is 0 or 1) [s]."""
    tokens = micro_batch * seq_len / cp
    heads = a.n_heads / tp
    kv_heads = kv_heads_per_rank(a, tp)
    linear = projection_time(a, hw, tokens, tp, backward)
    core = core_time(a, hw, micro_batch / cp, heads, seq_len, backward)

    # two norms, two residuals, rotary embedding of queries and keys; norms of latent vectors
    traffic = tokens / tp * 10.0 * BF16_BYTES * a.d_model
    traffic += tokens * 2.0 * BF16_BYTES * (heads + kv_heads) * a.head_dim
    traffic += tokens / tp * 2.0 * BF16_BYTES * (a.q_lora_rank + a.kv_lora_rank)
    traffic *= 1.0 + (NORM_BACKWARD_TRAFFIC - 1.0) * backward
    kernels = 5.0 + (2.0 if a.q_lora_rank > 0.0 else a.latent)
    elementwise = elementwise_time(hw.device, hw.elementwise, traffic, kernels)

    # keys and values go round the ring while attention works; their gradients go round as well
    exposed = 0.0
    if cp > 1.0:
        volume = tokens * BF16_BYTES * kv_heads * (a.head_dim + a.v_head_dim)
        node = hw.fabric.devices_per_node
        hop = point_to_point_time(hw.fabric, tp if tp * cp <= node else node, volume)
        exposed = max(0.0, (1.0 + backward) * (cp - 1.0) * hop - core)
    return AttentionTimes(linear, core, elementwise, exposed)


@formula
def tensor_parallel_time(hw: Hardware, tp: float, volume: float) -> float:
    """Time to gather ``volume`` bytes before a block that TP splits and scatter it after [s]."""
    node = hw.fabric.devices_per_node
    return ring_time(hw.fabric.all_gather, node, tp, 1.0, volume) + ring_time(
        hw.fabric.reduce_scatter, node, tp, 1.0, volume
    )


@formula
def attention_parallel_time(a: ArchitectureDims, hw: Hardware, tp: float, tokens: float) -> float:
    """Time to gather what attention reads over TP, and to scatter what it writes [s].

    Latent attention gathers the latent vectors in place of the layer's input, which the queries
    need all the same where they have none.
    """
    hidden = tokens * BF16_BYTES * a.d_model
    if a.latent == 0.0:
        return tensor_parallel_time(hw, tp, hidden)
    node = hw.fabric.devices_per_node
    read = a.q_lora_rank if a.q_lora_rank > 0.0 else a.d_model
    read += a.kv_lora_rank + a.rope_head_dim
    return ring_time(hw.fabric.all_gather, node, tp, 1.0, tokens * BF16_BYTES * read) + ring_time(
        hw.fabric.reduce_scatter, node, tp, 1.0, hidden
    )
