"""Which parts of a layer the backward pass computes again, by recompute code.

Codes 0 to 3 are the modes none, selective, super-selective and full. A choice of Megatron-Core's
modules (``--recompute-modules``) is ``4`` plus the sum of their bits in `MODULE_BITS`.
"""

from __future__ import annotations

from math import floor
from typing import NamedTuple

from perfmodel._jit import formula
from perfmodel.dims import ArchitectureDims

MODULE_BITS = {
    "core_attn": 1,
    "layernorm": 2,
    "moe_act": 4,
    "mla_up_proj": 8,
    "mlp": 16,
    "moe": 32,
    "shared_experts": 64,
}
"""Modules that Megatron-Core replays one by one (``transformer_config.py``), as bits of a code."""

FIRST_MODULE_CODE = 4


class Replay(NamedTuple):
    """What is computed again: 1 for a part that is, 0 for one that is not [-]."""

    core: float  # softmax(QK)V
    norms: float  # norms, residuals, rotary embedding
    expert_activation: float  # gated unit of experts
    dense_activation: float  # gated unit of dense blocks
    latent_up: float  # projections out of latent vectors
    dense_block: float  # dense blocks
    experts: float  # router, dispatch, routed and shared experts
    shared: float  # shared experts
    whole: float  # the whole layer


@formula
def bit(code: float, value: float) -> float:
    """Return 1 where ``code`` has the bit ``value``, else 0."""
    count = float(floor(code / value))
    return count - 2.0 * float(floor(0.5 * count))


@formula
def replay_of(mode: float) -> Replay:
    """Return what a recompute code replays."""
    if mode < 4.0:
        core = 1.0 if mode >= 1.0 else 0.0
        cheap = 1.0 if mode >= 2.0 else 0.0
        whole = 1.0 if mode >= 3.0 else 0.0
        return Replay(core, cheap, cheap, cheap, whole, whole, whole, whole, whole)
    modules = mode - 4.0
    mlp = bit(modules, 16.0)
    moe = bit(modules, 32.0)
    unit = bit(modules, 4.0)
    return Replay(
        core=bit(modules, 1.0),
        norms=bit(modules, 2.0),
        expert_activation=max(unit, moe),
        dense_activation=mlp,
        latent_up=bit(modules, 8.0),
        dense_block=mlp,
        experts=moe,
        shared=max(moe, bit(modules, 64.0)),
        whole=0.0,
    )


@formula
def latent_up_share(a: ArchitectureDims) -> float:
    """Share of attention's projections that lead out of latent vectors, by weights [-]."""
    if a.latent == 0.0:
        return 0.0
    unfolded = a.head_dim - a.rope_head_dim + a.v_head_dim
    up = a.n_heads * (a.q_lora_rank * a.head_dim + a.kv_lora_rank * unfolded)
    query = a.d_model * a.n_heads * a.head_dim if a.q_lora_rank == 0.0 else 0.0
    rest = a.d_model * (a.q_lora_rank + a.kv_lora_rank + a.rope_head_dim) + query
    rest += a.n_heads * a.v_head_dim * a.d_model
    return up / (up + rest)
