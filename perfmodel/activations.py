"""Bytes that one layer and one microbatch need on a device: kept, replayed, and in passing.

They depend on (tp, etp, cp, ep, micro-batch) and on what is recomputed, not on the pipeline: see
:class:`LayerBytes`. Counted per token of the device, for flash attention: no score matrix is
stored. Nothing is divided by EP: the all-to-all trades tokens, it does not reduce them.
"""

from __future__ import annotations

from typing import NamedTuple

from perfmodel._jit import formula
from perfmodel.attention import attention_weights, kv_heads_per_rank
from perfmodel.dims import ArchitectureDims
from perfmodel.kernels import BF16_BYTES, FP32_BYTES
from perfmodel.mesh import PlanDims, sequence_shards
from perfmodel.replay import replay_of
from perfmodel.stack import Stack


class LayerBytes(NamedTuple):
    """What one microbatch needs of one layer, dense or sparse [B]."""

    dense: float  # kept from the forward pass to the backward pass
    moe: float
    dense_replay: float  # what the backward pass computes again, all of one layer at once
    moe_replay: float
    dense_working: float  # gradients of activations and weights while the layer is in backward
    moe_working: float
    prediction: float  # of a prediction layer, beside its layer
    logits: float  # of one head
    head_working: float  # gradient of the head's weights


@formula
def layer_activation_bytes(
    a: ArchitectureDims, p: PlanDims, stack: Stack, tokens: float, moe: float, mode: float
) -> float:
    """Bytes that the backward pass of one layer needs of its forward pass [B].

    ``tokens`` are the device's; ``moe`` is 1 for a layer with experts, 0 for a dense one; ``mode``
    is a recompute code (:mod:`perfmodel.replay`). Selective recompute drops of attention the
    log-sum-exp alone: its output is the input of the projection. Rows of experts are those of the
    fullest rank of EP. Inputs of linear layers and experts are kept in the products' precision,
    ``p.saved_bytes`` an element; attention keeps its own output in bf16 besides.

    References
    ----------
    What is kept by a layer: arXiv 2205.05198, section 4, with flash attention and sequence
    parallelism; modules: Megatron-LM, ``--recompute-modules``.
    """
    local = tokens / sequence_shards(p)
    hidden = BF16_BYTES * a.d_model
    saved = p.saved_bytes
    r = replay_of(mode)
    if r.whole > 0.0:
        return local * hidden
    heads = a.n_heads / p.tp
    kv = kv_heads_per_rank(a, p.tp)
    inputs = a.ffn_matrices - 1.0 + stack.unit_copies

    kept = 2.0 * local * hidden  # inputs of the two norms
    if r.norms == 0.0:  # their outputs
        kept += 2.0 * (tokens if stack.gathered_inputs > 0.0 else local) * saved * a.d_model
    kept += stack.hidden_copies * local * hidden
    if r.latent_up == 0.0:  # q, k, v
        kept += BF16_BYTES * tokens * (heads * a.head_dim + kv * (a.head_dim + a.v_head_dim))
    if a.latent > 0.0:  # latent vectors, and what their norms make of them
        norms = a.q_lora_rank + a.kv_lora_rank
        kept += BF16_BYTES * local * (norms + a.rope_head_dim)
        if (r.norms if mode < 4.0 else r.latent_up) == 0.0:
            kept += BF16_BYTES * local * norms
    kept += BF16_BYTES * tokens * heads * a.v_head_dim  # attention's output
    if saved < BF16_BYTES:  # and the projection's copy of it, which is the same tensor in bf16
        kept += saved * tokens * heads * a.v_head_dim
    if r.core == 0.0:
        kept += FP32_BYTES * tokens * heads  # log-sum-exp
    if moe > 0.0:
        if r.experts == 0.0:
            routed = local * a.top_k
            # rows in expert order, gathered over ETP; outputs that the gates weight
            kept += (p.load * p.etp * saved + BF16_BYTES) * routed * a.d_model
            unit = BF16_BYTES * inputs + saved * (1.0 - r.expert_activation)
            kept += p.load * routed * unit * a.d_expert  # / etp on etp times the rows
            kept += 2.0 * FP32_BYTES * local * a.n_experts  # router logits and probabilities
        if r.shared == 0.0:
            unit = BF16_BYTES * inputs + saved * (1.0 - (r.norms if mode < 4.0 else 0.0))
            kept += tokens * unit * a.d_shared / p.tp
    elif r.dense_block == 0.0:
        unit = BF16_BYTES * inputs + saved * (1.0 - r.dense_activation)
        kept += tokens * unit * a.d_ff / p.tp
    return kept


@formula
def replay_bytes(
    a: ArchitectureDims, p: PlanDims, stack: Stack, tokens: float, moe: float, mode: float
) -> float:
    """Bytes of what is computed again of one layer, blocks and whole layers only [B].

    What `selective` and `super-selective` drop is made and freed tensor by tensor.
    """
    r = replay_of(mode)
    blocks = (r.experts + r.shared + r.latent_up) if moe > 0.0 else (r.dense_block + r.latent_up)
    if r.whole + blocks == 0.0:
        return 0.0
    whole = layer_activation_bytes(a, p, stack, tokens, moe, 0.0)
    return whole - layer_activation_bytes(a, p, stack, tokens, moe, mode)


@formula
def working_bytes(
    a: ArchitectureDims, p: PlanDims, stack: Stack, tokens: float, moe: float
) -> float:
    """Bytes that the backward pass of one layer takes and gives back [B].

    Gradients of the gated unit, ``working_widths`` of its width, and those of the layer's dense
    matrices, ``wgrad_bytes`` a weight. Grouped products of experts add into the main gradients.
    """
    if moe > 0.0:
        rows = p.load * tokens / sequence_shards(p) * a.top_k
        width = max(rows * a.d_expert, tokens * a.d_shared / p.tp)
        block = a.d_shared
    else:
        width = tokens * a.d_ff / p.tp
        block = a.d_ff
    matrices = attention_weights(a, p.tp) + a.ffn_matrices * a.d_model * block / p.tp
    return stack.working_widths * BF16_BYTES * width + stack.wgrad_bytes * matrices


@formula
def layer_bytes(
    a: ArchitectureDims, p: PlanDims, stack: Stack, seq_len: float, mode: float
) -> LayerBytes:
    """Return what one microbatch needs of a layer under a recompute code [B]."""
    tokens = p.micro_batch * seq_len / p.cp
    vocabulary = a.vocab_size / p.tp
    return LayerBytes(
        dense=layer_activation_bytes(a, p, stack, tokens, 0.0, mode),
        moe=layer_activation_bytes(a, p, stack, tokens, 1.0, mode),
        dense_replay=replay_bytes(a, p, stack, tokens, 0.0, mode),
        moe_replay=replay_bytes(a, p, stack, tokens, 1.0, mode),
        dense_working=working_bytes(a, p, stack, tokens, 0.0),
        moe_working=working_bytes(a, p, stack, tokens, 1.0),
        # inputs of two norms, and their outputs side by side
        prediction=4.0 * tokens / sequence_shards(p) * BF16_BYTES * a.d_model,
        logits=stack.logit_bytes * tokens * vocabulary,
        head_working=stack.wgrad_bytes * a.d_model * vocabulary,
    )
