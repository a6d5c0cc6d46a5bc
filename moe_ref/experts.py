"""Experts of equal width, as stacked weights, and two ways to apply them.

Both give the same numbers. `apply_looped` is the definition, one expert after the other.
`apply_grouped` sorts the tokens by expert, so that each expert works on one segment. Neither
computes an expert that had no room for a token. Shape suffixes: `moe_ref.routing`; P is the pairs
of a token and its expert that have room.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import silu

from moe_ref.parts import INITIAL_DEVIATION, matrix
from moe_ref.routing import Routing

__all__ = [
    "Experts",
    "apply_grouped",
    "apply_looped",
    "apply_segments",
    "apply_sorted",
    "as_products_take",
]


class Experts(nn.Module):
    """SwiGLU experts.

    Attributes
    ----------
    gate_EDF, up_EDF, down_EFD : Parameter
        The three matrices of each expert.
    grouped : bool
        Apply them by `apply_grouped`, else by `apply_looped`.
    """

    def __init__(
        self,
        d_model: int,
        n_experts: int,
        width: int,
        deviation: float = INITIAL_DEVIATION,
        grouped: bool = True,
    ) -> None:
        super().__init__()
        self.gate_EDF = matrix(n_experts, d_model, width)
        self.up_EDF = matrix(n_experts, d_model, width)
        self.down_EFD = matrix(n_experts, width, d_model, deviation=deviation)
        self.grouped = grouped

    def forward(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """Return the sum of each token's experts, weighted by its gates, shape (T, D)."""
        apply = apply_grouped if self.grouped else apply_looped
        return apply(self, x_TD, routing)


def apply_looped(experts: Experts, x_TD: Tensor, routing: Routing) -> Tensor:
    """Apply one expert after the other: the definition, equation (7) of arXiv 2608.10605."""
    out_TD = torch.zeros_like(x_TD)
    weights = zip(
        experts.gate_EDF.unbind(), experts.up_EDF.unbind(), experts.down_EFD.unbind(), strict=True
    )
    for expert, (gate_DF, up_DF, down_FD) in enumerate(weights):
        chosen_TK = routing.experts_TK == expert
        if routing.kept_TK is not None:
            chosen_TK = chosen_TK & routing.kept_TK
        token_P, slot_P = torch.where(chosen_TK)
        x_PD = x_TD[token_P]
        y_PD = (silu(x_PD @ gate_DF) * (x_PD @ up_DF)) @ down_FD
        weighted_PD = y_PD * routing.gates_TK[token_P, slot_P, None]
        out_TD = out_TD.index_add(0, token_P, weighted_PD.to(out_TD))
    return out_TD


def apply_grouped(experts: Experts, x_TD: Tensor, routing: Routing) -> Tensor:
    """Apply all experts to the tokens sorted by expert, and sum over K in the order of K."""

    def apply(x_PD: Tensor, counts_E: Tensor) -> Tensor:
        return apply_segments(experts, x_PD, counts_E)

    return apply_sorted(apply, x_TD, routing, experts.gate_EDF.shape[0])


def apply_sorted(
    apply: Callable[[Tensor, Tensor], Tensor], x_TD: Tensor, routing: Routing, n_experts: int
) -> Tensor:
    """Return the sum of each token's experts, weighted by its gates, shape (T, D).

    Parameters
    ----------
    apply : callable
        Takes a row of every pair that has room, sorted by expert, shape (P, D), and how many each
        expert has, shape (E,); returns what the experts make of the rows, shape (P, D).
    x_TD : Tensor
        Hidden states.
    routing : Routing
        What the router decided.
    n_experts : int
        E.
    """
    top_k = routing.experts_TK.shape[1]
    order_P, counts_E = _sorted_pairs(routing, n_experts)
    y_PD = apply(x_TD.index_select(0, order_P // top_k), counts_E)
    y_TKD = _unsorted(y_PD, order_P, routing)
    return (y_TKD * routing.gates_TK[:, :, None]).sum(dim=1).to(x_TD)


def apply_segments(experts: Experts, x_PD: Tensor, counts_E: Tensor) -> Tensor:
    """Apply each expert to its segment of rows that are sorted by expert, shape (P, D)."""
    hidden_PF = silu(_segments(x_PD, experts.gate_EDF, counts_E)) * _segments(
        x_PD, experts.up_EDF, counts_E
    )
    return _segments(hidden_PF, experts.down_EFD, counts_E)


def as_products_take(x_PX: Tensor) -> Tensor:
    """Return the rows in the precision of the products: that of autocast where it is on."""
    if x_PX.dtype == torch.float32 and torch.is_autocast_enabled(x_PX.device.type):
        return x_PX.to(torch.get_autocast_dtype(x_PX.device.type))
    return x_PX


def _sorted_pairs(routing: Routing, n_experts: int) -> tuple[Tensor, Tensor]:
    """Return the pairs that have room, sorted by expert, and how many each expert has."""
    expert_P = routing.experts_TK.flatten()
    if routing.kept_TK is None:
        return expert_P.argsort(stable=True), routing.counts_E
    expert_P = torch.where(routing.kept_TK.flatten(), expert_P, n_experts)  # without room: last
    counts_E = torch.bincount(expert_P, minlength=n_experts + 1)[:n_experts]
    return expert_P.argsort(stable=True)[: int(counts_E.sum())], counts_E


def _unsorted(y_PD: Tensor, order_P: Tensor, routing: Routing) -> Tensor:
    """Return the rows where their pairs are, shape (T, K, D); of pairs without room, zeros."""
    pairs = len(order_P)
    place_TK = torch.full_like(routing.experts_TK, pairs)
    place_TK.view(-1)[order_P] = torch.arange(pairs, device=order_P.device)
    if routing.kept_TK is not None:
        y_PD = torch.cat([y_PD, y_PD.new_zeros(1, y_PD.shape[1])])
    return y_PD.index_select(0, place_TK.view(-1)).unflatten(0, place_TK.shape)


def _segments(x_PX: Tensor, weight_EXY: Tensor, counts_E: Tensor) -> Tensor:
    """Multiply each segment of rows by the matrix of its expert, shape (P, Y)."""
    x_PX = as_products_take(x_PX)
    if torch.is_autocast_enabled(x_PX.device.type):
        weight_EXY = weight_EXY.to(x_PX)
    if x_PX.is_cuda and _fits_one_kernel(x_PX, weight_EXY):
        return _one_kernel(x_PX, weight_EXY, counts_E)
    segments = zip(x_PX.split(counts_E.tolist()), weight_EXY.unbind(), strict=True)
    return torch.cat([x_PX @ weight_XY for x_PX, weight_XY in segments])


_grouped_mm: Any = getattr(functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


def _fits_one_kernel(x_PX: Tensor, weight_EXY: Tensor) -> bool:
    """Say whether torch's grouped product takes the tensors: bf16, rows in units of 16 bytes."""
    _, width, out = weight_EXY.shape
    aligned = width % 8 == 0 and out % 8 == 0 and len(x_PX) > 0
    return _grouped_mm is not None and aligned and x_PX.dtype == torch.bfloat16


def _one_kernel(x_PX: Tensor, weight_EXY: Tensor, counts_E: Tensor) -> Tensor:
    """Multiply all segments by torch's grouped product; no count leaves the device."""
    return _grouped_mm(x_PX, weight_EXY, offs=counts_E.cumsum(0).to(torch.int32))
