"""An architecture as the formulas take it: floats that are integers, and what they divide by."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from perfmodel import parameters

if TYPE_CHECKING:
    from perfmodel.architecture import Architecture


class ArchitectureDims(NamedTuple):
    """The sizes of an architecture as floats, in the form that the formulas take."""

    n_layers: float
    first_k_dense: float
    d_model: float
    n_heads: float
    n_kv_heads: float
    head_dim: float
    d_ff: float
    n_experts: float
    top_k: float
    d_expert: float
    d_shared: float
    vocab_size: float
    ffn_matrices: float  # 3 with a gated unit, 2 without
    tied_embeddings: float  # 1 if the head is the embedding
    v_head_dim: float  # of values; head_dim is that of queries and keys
    latent: float  # 1 with latent attention
    q_lora_rank: float  # 0 where queries have no latent vector
    kv_lora_rank: float
    rope_head_dim: float  # rotary part of a latent model's keys, shared by all heads
    moe_every: float
    window: float  # tokens; used where window_fraction > 0
    window_fraction: float  # of the layers
    layer_vectors: float  # parameters of a layer that TP does not divide, matrices apart
    query_head_vectors: float  # of each query head
    kv_head_vectors: float  # of each key-value head
    moe_vectors: float  # of a sparse layer, undivided, router's matrix apart
    ffn_bias: float  # 1 with biases in dense blocks
    expert_bias: float  # 1 with biases in experts, routed and shared
    final_norm: float
    head_bias: float  # 1 with a bias of the head
    positions: float  # learned positions
    extra: float  # parameters of each layer beside the modelled ones
    mtp_dense: float  # multi-token prediction layers with a dense block
    mtp_moe: float  # the same, with experts


def dims_of(a: Architecture) -> ArchitectureDims:
    """Return the sizes of an architecture as floats."""
    latent, window = a.latent, a.window
    sparse_end = a.is_moe(a.n_layers - 1)
    return ArchitectureDims(
        n_layers=float(a.n_layers),
        first_k_dense=float(a.first_k_dense if a.n_experts else a.n_layers),
        d_model=float(a.d_model),
        n_heads=float(a.n_heads),
        n_kv_heads=float(a.n_kv_heads),
        head_dim=float(a.head_dim),
        d_ff=float(a.d_ff),
        n_experts=float(a.n_experts),
        top_k=float(a.top_k),
        d_expert=float(a.d_expert),
        d_shared=float(a.d_shared),
        vocab_size=float(a.vocab_size),
        ffn_matrices=float(a.ffn_matrices),
        tied_embeddings=float(a.tied_embeddings),
        v_head_dim=float(a.head_dim if latent is None else latent.v_head_dim),
        latent=float(latent is not None),
        q_lora_rank=float(0 if latent is None else latent.q_lora_rank),
        kv_lora_rank=float(0 if latent is None else latent.kv_lora_rank),
        rope_head_dim=float(0 if latent is None else latent.qk_rope_head_dim),
        moe_every=float(a.moe_every),
        window=float(0 if window is None else window.width),
        window_fraction=a.window_layers / a.n_layers,
        layer_vectors=float(parameters.layer_vectors(a)),
        query_head_vectors=float(parameters.query_head_vectors(a)),
        kv_head_vectors=float(parameters.kv_head_vectors(a)),
        moe_vectors=float(parameters.moe_vectors(a)),
        ffn_bias=float(a.biases.ffn),
        expert_bias=float(a.biases.experts),
        final_norm=float(parameters.norm(a)),
        head_bias=float(a.biases.head),
        positions=float(a.learned_positions),
        extra=0.0 if a.extra is None else a.extra.parameters / a.n_layers,
        mtp_dense=float(0 if sparse_end else a.mtp_layers),
        mtp_moe=float(a.mtp_layers if sparse_end else 0),
    )
