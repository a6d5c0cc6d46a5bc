"""Megatron's convention: the FLOPs of a token's matrix products, forward and backward.

Three times the forward pass, two FLOP a multiply-add: six for each weight of a projection, of a
feed-forward block that works on the token, and of the head. Causal attention counts the half of
its scores, ``min(S, w)`` long on layers with a window; an embedding look-up and the router count
nothing. Multi-token prediction counts its layers, projections and logits. Of the vectors it counts
what Megatron-LM counts, the latent vectors' norms and those of prediction layers.

Megatron-LM ``megatron/training/training.py``, ``num_floating_point_operations``.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from perfmodel import parameters

if TYPE_CHECKING:
    from perfmodel.architecture import Architecture

FLOP_PER_WEIGHT = 6
"""Two a multiply-add, in the forward pass and in the two products of the backward pass [FLOP]."""


def attended(a: Architecture, seq_len: int) -> Fraction:
    """Tokens that a token attends to before the causal half, averaged over layers [token]."""
    if a.window is None:
        return Fraction(seq_len)
    windowed = Fraction(a.window_layers, a.n_layers)
    return windowed * min(seq_len, a.window.width) + (1 - windowed) * seq_len


def megatron(a: Architecture, seq_len: int) -> int:
    """FLOPs of one token of a sequence of ``seq_len``, forward and backward [FLOP]."""
    d, matrices = a.d_model, a.ffn_matrices
    attention = parameters.attention_matrices(a)
    width = 2 * a.head_dim
    if a.latent is not None:
        attention += a.latent.q_lora_rank + a.latent.kv_lora_rank
        width = a.latent.qk_head_dim + a.latent.v_head_dim
    core = attended(a, seq_len) * a.n_heads * width / 2
    sparse = matrices * d * (a.top_k * a.d_expert + a.d_shared)
    dense = matrices * d * a.d_ff
    weights = (a.n_layers + a.mtp_layers) * (attention + core)
    weights += a.n_moe_layers * sparse + a.n_dense_layers * dense
    weights += a.mtp_layers * (sparse if a.is_moe(a.n_layers - 1) else dense)
    weights += a.mtp_layers * (2 * d * d + 3 * d)
    weights += (1 + a.mtp_layers) * a.vocab_size * d
    weights += 0 if a.extra is None else a.extra.parameters
    return round(FLOP_PER_WEIGHT * weights)
