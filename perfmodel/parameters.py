"""Parameters of an architecture, group by group, as exact integers.

The groups follow how a layer is divided over devices: matrices and vectors, per layer, per sparse
layer, and outside of the layers. Conventions and sums are :class:`perfmodel.Architecture`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perfmodel.architecture import Architecture


def norm(a: Architecture) -> int:
    """One norm of the width of the model."""
    return a.d_model * (2 if a.biases.norms else 1)


def attention_matrices(a: Architecture) -> int:
    """Projections of one layer's attention."""
    d, heads = a.d_model, a.n_heads
    if a.latent is None:
        return 2 * d * a.head_dim * (heads + a.n_kv_heads)
    m = a.latent
    query = m.q_lora_rank * d if m.q_lora_rank else 0
    query += (m.q_lora_rank or d) * heads * m.qk_head_dim
    keys_and_values = d * (m.kv_lora_rank + m.qk_rope_head_dim)
    keys_and_values += m.kv_lora_rank * heads * (m.qk_nope_head_dim + m.v_head_dim)
    return query + keys_and_values + heads * m.v_head_dim * d


def query_head_vectors(a: Architecture) -> int:
    """Values beside the matrices for each query head: bias, norm over all heads, sink."""
    return (a.biases.qkv + (a.qk_norm == "full")) * a.head_dim + a.attention_sinks


def kv_head_vectors(a: Architecture) -> int:
    """Values beside the matrices for each key-value head: biases of both, norm over all heads."""
    return (2 * a.biases.qkv + (a.qk_norm == "full")) * a.head_dim


def layer_vectors(a: Architecture) -> int:
    """Values of every layer that tensor parallelism does not divide."""
    count = a.norms_per_layer * norm(a) + a.biases.output * a.d_model
    if a.qk_norm == "head":
        count += 2 * a.head_dim
    if a.latent is not None:
        count += a.latent.q_lora_rank + a.latent.kv_lora_rank
    return count


def attention(a: Architecture) -> int:
    """Everything of one layer but its feed-forward block."""
    vectors = a.n_heads * query_head_vectors(a) + a.n_kv_heads * kv_head_vectors(a)
    return attention_matrices(a) + vectors + layer_vectors(a)


def block(a: Architecture, width: int, bias: bool) -> int:
    """One feed-forward block: its matrices, and the biases of both of its products."""
    if not width:
        return 0
    count = a.ffn_matrices * a.d_model * width
    return count + bias * ((a.ffn_matrices - 1) * width + a.d_model)


def moe_vectors(a: Architecture) -> int:
    """Values of a sparse layer that no parallelism divides, the router's matrix apart."""
    gate = a.d_model if a.shared_expert_gate else 0
    shared = a.d_model if a.biases.experts and a.d_shared else 0
    return a.biases.router * a.n_experts + gate + shared


def moe_layer(a: Architecture, experts: int) -> int:
    """Feed-forward part of a sparse layer of which ``experts`` experts are counted."""
    d = a.d_model
    count = experts * block(a, a.d_expert, a.biases.experts) + d * a.n_experts
    count += a.biases.router * a.n_experts + (d if a.shared_expert_gate else 0)
    return count + block(a, a.d_shared, a.biases.experts)


def layers(a: Architecture, experts: int) -> int:
    """All layers."""
    count = a.n_layers * attention(a) + a.n_dense_layers * block(a, a.d_ff, a.biases.ffn)
    return count + (a.n_moe_layers * moe_layer(a, experts) if a.n_moe_layers else 0)


def prediction_layer(a: Architecture, experts: int) -> int:
    """One multi-token prediction layer: a layer, a projection from 2d to d, three norms.

    The layer is one of the kind of the last; embedding and head are those of the model.
    """
    last = moe_layer(a, experts) if a.is_moe(a.n_layers - 1) else block(a, a.d_ff, a.biases.ffn)
    return attention(a) + last + 2 * a.d_model**2 + 3 * norm(a)
