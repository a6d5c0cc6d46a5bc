"""Routers of the lineage, and their decisions as matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from moe_ref.lineage.linear import LinearRouter
from moe_ref.routing import Routing

AnyRouter = TypeVar("AnyRouter", bound=LinearRouter)


def sees_logits(router: AnyRouter) -> AnyRouter:
    """Give a router weights with which its logits are its input."""
    with torch.no_grad():
        router.weight_ED.copy_(torch.eye(router.n_experts))
    return router


def spread(
    experts_TK: Tensor | Sequence[Sequence[int]],
    gates_TK: Tensor | Sequence[Sequence[float]],
    n_experts: int,
) -> Tensor:
    """Return gates as a matrix, shape (T, E)."""
    gates_TK = torch.as_tensor(gates_TK)
    zeros_TE = gates_TK.new_zeros(len(gates_TK), n_experts)
    return zeros_TE.scatter(1, torch.as_tensor(experts_TK), gates_TK)


def dense(routing: Routing, n_experts: int) -> Tensor:
    """Return the gates of what is kept, shape (T, E)."""
    gates_TK = routing.gates_TK
    if routing.kept_TK is not None:
        gates_TK = gates_TK * routing.kept_TK
    return spread(routing.experts_TK, gates_TK, n_experts)


def mask_of(experts_TK: Tensor, n_experts: int) -> Tensor:
    """Return who is chosen, shape (T, E), bool."""
    zeros_TE = torch.zeros(len(experts_TK), n_experts, dtype=torch.bool)
    return zeros_TE.scatter(1, experts_TK, True)
