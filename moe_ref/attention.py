"""Causal grouped-query attention with rotary positions and, as an option, a gate for each head.

No norm of queries and keys, no biases (arXiv 2608.10605 A.1). Shape suffixes: `moe_ref.routing`;
R is half the width of a head, the pairs of features that a position turns.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from moe_ref.parts import INITIAL_DEVIATION, projection
from moe_ref.routing import wide_dtype

__all__ = ["ROTARY_BASE", "Attention", "Rotation", "rotation"]

ROTARY_BASE: Final = 10_000.0
"""Base of the rotary frequencies (Su et al., arXiv 2104.09864). ASSUMED: the paper prints none."""


class Rotation(NamedTuple):
    """Cosine and sine of the angle by which each position turns each pair of features."""

    cos_SR: Tensor
    sin_SR: Tensor


def rotation(positions: int, head_dim: int, like: Tensor, base: float = ROTARY_BASE) -> Rotation:
    """Return the rotation of the first positions, in float32, or float64 like a float64 tensor."""
    dtype = wide_dtype(like)
    pair_R = torch.arange(0, head_dim, 2, device=like.device, dtype=dtype) / head_dim
    angle_SR = torch.arange(positions, device=like.device, dtype=dtype)[:, None] * base**-pair_R
    return Rotation(angle_SR.cos(), angle_SR.sin())


def _turn(x_BHSC: Tensor, turned: Rotation) -> Tensor:
    """Turn feature ``r`` and feature ``r + R`` of each head by their position's angle."""
    first, second = x_BHSC.chunk(2, dim=-1)
    cos_SR, sin_SR = turned
    return torch.cat(
        [first * cos_SR - second * sin_SR, second * cos_SR + first * sin_SR], dim=-1
    ).to(x_BHSC)


class Attention(nn.Module):
    """Causal attention of H query heads over G key and value heads.

    Attributes
    ----------
    gate : nn.Linear or None
        The gate of gated attention (Qiu et al., arXiv 2505.06708): the output of each head is
        multiplied by the sigmoid of one value that the head reads from the layer's input. It has
        ``d_model * n_heads`` parameters, which no count of arXiv 2608.10605 includes.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        *,
        gated: bool = False,
        deviation: float = INITIAL_DEVIATION,
    ) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads = n_heads, n_kv_heads
        self.query = projection(d_model, n_heads * head_dim)
        self.key = projection(d_model, n_kv_heads * head_dim)
        self.value = projection(d_model, n_kv_heads * head_dim)
        self.output = projection(n_heads * head_dim, d_model, deviation)
        self.gate = projection(d_model, n_heads) if gated else None

    def forward(self, x_BSD: Tensor, turned: Rotation) -> Tensor:
        """Return what attention writes to the residual stream, shape (B, S, D)."""
        query_BHSC = _turn(_heads(self.query(x_BSD), self.n_heads), turned)
        key_BGSC = _turn(_heads(self.key(x_BSD), self.n_kv_heads), turned)
        value_BGSC = _heads(self.value(x_BSD), self.n_kv_heads)
        out_BHSC = scaled_dot_product_attention(
            query_BHSC,
            key_BGSC,
            value_BGSC,
            is_causal=True,
            enable_gqa=self.n_heads != self.n_kv_heads,
        )
        out_BSHC = out_BHSC.transpose(1, 2)
        if self.gate is not None:
            out_BSHC = out_BSHC * torch.sigmoid(self.gate(x_BSD))[..., None]
        return self.output(out_BSHC.flatten(2))


def _heads(x_BSX: Tensor, heads: int) -> Tensor:
    """Split the last axis into heads and put them before the positions."""
    return x_BSX.unflatten(-1, (heads, -1)).transpose(1, 2)
