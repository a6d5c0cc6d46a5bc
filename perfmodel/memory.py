"""Bytes on one device, in Megatron's buckets, stage by stage.

Parameters fall in two classes: those of attention, dense blocks, shared experts, routers, norms,
embedding and head, whose optimizer state is sharded over DP*CP; and those of routed experts, whose
optimizer state is sharded over EDP. bf16 weights and fp32 main gradients stay resident on every
replica (a distributed optimizer, "ZeRO-1"): 2 + 4 bytes a parameter.

Activations are counted per token of the device for flash attention (no score matrix is stored);
what each recompute mode keeps is in :func:`layer_activation_bytes`. They are not divided by EP: the
all-to-all trades tokens, it does not reduce them.
"""

from __future__ import annotations

from typing import NamedTuple

from perfmodel._jit import formula
from perfmodel.attention import attention_parameters, kv_heads_per_rank
from perfmodel.dims import ArchitectureDims
from perfmodel.kernels import BF16_BYTES, FP32_BYTES
from perfmodel.mesh import (
    PlanDims,
    StageContent,
    dense_layers_of_stage,
    is_uneven,
    stage_content,
)
from perfmodel.schedule import in_flight_microbatches

LOGIT_BYTES = 10.0
"""Per logit: bf16 output of the head, fp32 copy for cross-entropy, fp32 gradient."""


class OptimizerDims(NamedTuple):
    """What an optimizer stores and moves for one parameter."""

    state_bytes: float  # master weight and moments, fp32 [B]
    traffic_bytes: float  # read and written in one step [B]
    matrix_iterations: float  # Newton-Schulz steps on every matrix [-]


class StageBytes(NamedTuple):
    """Memory of one device of a stage, by bucket [B]."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float


@formula
def stage_total(m: StageBytes) -> float:
    """Sum of the buckets [B]."""
    return m.weights + m.gradients + m.optimizer + m.activations + m.logits + m.buffers


@formula
def dense_parameters(a: ArchitectureDims, p: PlanDims, c: StageContent) -> float:
    """Parameters of a stage on one rank, routed experts excepted [-].

    The loss needs the head: where embedding and head are tied and not on one stage, a second copy
    of the embedding. Prediction layers need the embedding as well, and have a copy of it where
    neither the embedding nor a tied head is on their stage (Megatron-LM #5034).
    """
    count = (c.dense + c.moe) * attention_parameters(a, p.tp)
    count += c.dense * a.ffn_matrices * a.d_model * a.d_ff / p.tp
    count += c.moe * a.d_model * (a.ffn_matrices * a.d_shared / p.tp + a.n_experts)
    count += c.layers * a.extra / p.tp
    ups = a.ffn_matrices - 1.0
    count += c.dense * a.ffn_bias * (ups * a.d_ff / p.tp + a.d_model)
    count += c.moe * (a.expert_bias * ups * a.d_shared / p.tp + a.moe_vectors)
    matrix = a.vocab_size * a.d_model / p.tp
    shared_head = False
    if c.embedding > 0.0:
        count += matrix + a.positions * a.d_model
    if c.loss > 0.0:
        count += a.final_norm + a.head_bias * a.vocab_size / p.tp
        shared_head = a.tied_embeddings > 0.0
        if not shared_head or c.embedding == 0.0:
            count += matrix
    if c.prediction > 0.0:
        count += c.prediction * (2.0 * a.d_model * a.d_model / p.tp + 3.0 * a.final_norm)
        if not shared_head and c.embedding == 0.0:
            count += matrix
    return count


@formula
def expert_parameters(a: ArchitectureDims, p: PlanDims, c: StageContent) -> float:
    """Parameters of the routed experts of a stage on one rank [-]."""
    bias = a.expert_bias * ((a.ffn_matrices - 1.0) * a.d_expert / p.etp + a.d_model)
    weights = c.moe * a.n_experts / p.ep * a.ffn_matrices * a.d_model * a.d_expert / p.etp
    return weights + c.moe * a.n_experts / p.ep * bias


@formula
def stage_dense_parameters(a: ArchitectureDims, p: PlanDims, stage: float) -> float:
    """Parameters of a stage of the balanced layout on one rank, routed experts excepted [-]."""
    return dense_parameters(a, p, stage_content(a, p, stage))


@formula
def stage_expert_parameters(a: ArchitectureDims, p: PlanDims, stage: float) -> float:
    """Parameters of the routed experts of a stage of the balanced layout on one rank [-]."""
    return expert_parameters(a, p, stage_content(a, p, stage))


@formula
def layer_activation_bytes(
    a: ArchitectureDims, p: PlanDims, tokens: float, moe: float, mode: float
) -> float:
    """Bytes that the backward pass of one layer needs of its forward pass, by recompute mode [B].

    ``mode`` is 0 none, 1 selective (attention is recomputed: of it only the log-sum-exp is not
    kept, since its output is the input of the projection), 2 super-selective (the outputs of norms
    and of the gated unit are recomputed as well), 3 full (only the layer's input is kept).
    ``moe`` is 1 for a MoE layer, 0 for a dense one.
    """
    local = tokens / p.tp
    hidden = BF16_BYTES * a.d_model
    if mode >= 3.0:
        return local * hidden
    heads = a.n_heads / p.tp
    kv = kv_heads_per_rank(a, p.tp)
    inputs = a.ffn_matrices - 1.0

    kept = 2.0 * local * hidden  # inputs of the two norms
    if mode < 2.0:
        kept += 2.0 * local * hidden  # their outputs
    kept += BF16_BYTES * tokens * (heads * a.head_dim + kv * (a.head_dim + a.v_head_dim))  # q, k, v
    if a.latent > 0.0:  # latent vectors, and what their norms make of them
        norms = a.q_lora_rank + a.kv_lora_rank
        kept += BF16_BYTES * local * (norms + a.rope_head_dim)
        if mode < 2.0:
            kept += BF16_BYTES * local * norms
    kept += BF16_BYTES * tokens * heads * a.v_head_dim  # attention's output
    if mode < 1.0:
        kept += FP32_BYTES * tokens * heads  # log-sum-exp
    unit = inputs if mode >= 2.0 else inputs + 1.0  # inputs of the gated unit (and its output)
    if moe > 0.0:
        routed = local * a.top_k
        # rows in expert order, gathered over ETP; outputs that the gates weight
        kept += (p.etp + 1.0) * routed * hidden
        kept += BF16_BYTES * routed * unit * a.d_expert  # width / etp on etp times the rows
        kept += 2.0 * FP32_BYTES * local * a.n_experts  # router logits and probabilities
        kept += BF16_BYTES * tokens * unit * a.d_shared / p.tp
    else:
        kept += BF16_BYTES * tokens * unit * a.d_ff / p.tp
    return kept


@formula
def content_bytes(
    a: ArchitectureDims,
    p: PlanDims,
    optimizer: OptimizerDims,
    seq_len: float,
    n_microbatches: float,
    stage: float,
    c: StageContent,
    framework_bytes: float,
) -> StageBytes:
    """Memory of one device of ``stage`` (0 is the first), which holds ``c`` [B].

    Interleaved, a chunk's activations are taken as ``1 / vpp`` of the stage's: what each chunk
    holds in flight is not told apart where they differ.
    """
    dense = dense_parameters(a, p, c)
    expert = expert_parameters(a, p, c)
    edp = p.tp * p.cp * p.dp / (p.etp * p.ep)
    state = optimizer.state_bytes * (dense / (p.dp * p.cp) + expert / edp)

    tokens = p.micro_batch * seq_len / p.cp
    per_microbatch = c.moe * layer_activation_bytes(a, p, tokens, 1.0, p.recompute)
    per_microbatch += c.dense * layer_activation_bytes(a, p, tokens, 0.0, p.recompute)
    # of each prediction layer: inputs of two norms, and their outputs side by side
    per_microbatch += c.prediction * tokens / p.tp * 4.0 * BF16_BYTES * a.d_model
    activations = per_microbatch * in_flight_microbatches(stage, p.pp, p.vpp, n_microbatches)
    if (
        p.recompute >= 3.0 and c.dense + c.moe > 0.0
    ):  # the largest layer that is replayed; its input is kept already
        replayed = 0.0
        if c.moe > 0.0:
            replayed = layer_activation_bytes(a, p, tokens, 1.0, 0.0)
        if c.dense > 0.0:
            replayed = max(replayed, layer_activation_bytes(a, p, tokens, 0.0, 0.0))
        activations += replayed - layer_activation_bytes(a, p, tokens, 0.0, 3.0)

    logits = 0.0
    if c.loss > 0.0:  # those of prediction layers too, wherever they are
        logits = (1.0 + (a.mtp_dense + a.mtp_moe)) * LOGIT_BYTES * tokens * a.vocab_size / p.tp
    return StageBytes(
        weights=BF16_BYTES * (dense + expert),
        gradients=FP32_BYTES * (dense + expert),
        optimizer=state,
        activations=activations,
        logits=logits,
        buffers=framework_bytes,
    )


@formula
def stage_bytes(
    a: ArchitectureDims,
    p: PlanDims,
    optimizer: OptimizerDims,
    seq_len: float,
    n_microbatches: float,
    stage: float,
    framework_bytes: float,
) -> StageBytes:
    """Memory of one device of ``stage`` of the balanced layout (0 is the first) [B]."""
    c = stage_content(a, p, stage)
    return content_bytes(a, p, optimizer, seq_len, n_microbatches, stage, c, framework_bytes)


@formula
def peak_bytes(
    a: ArchitectureDims,
    p: PlanDims,
    optimizer: OptimizerDims,
    seq_len: float,
    n_microbatches: float,
    framework_bytes: float,
) -> float:
    """Memory of the heaviest stage [B]."""
    last = p.pp - 1.0
    m = stage_bytes(a, p, optimizer, seq_len, n_microbatches, last, framework_bytes)
    heaviest = stage_total(m)
    stage = 0.0
    alike = a.moe_every == 1.0 and not is_uneven(a, p)
    while stage < last:
        m = stage_bytes(a, p, optimizer, seq_len, n_microbatches, stage, framework_bytes)
        heaviest = max(heaviest, stage_total(m))
        if alike and dense_layers_of_stage(a, p, stage) == 0.0:
            break  # the later ones hold the same layers and fewer microbatches
        stage += 1.0
    return heaviest
