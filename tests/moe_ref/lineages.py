"""Routers of the lineage, and their decisions as matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from moe_ref import (
    Capacity,
    DeepSeekV2Recipe,
    DeepSeekV2Router,
    DeepSeekV3Recipe,
    DeepSeekV3Router,
    ExpertGroups,
    GroupScore,
    GShardRecipe,
    GShardRouter,
    MixtralRecipe,
    MixtralRouter,
    SecondExpert,
    ShazeerRecipe,
    ShazeerRouter,
    SinkhornRecipe,
    SinkhornRouter,
    StMoeRouter,
    SwitchRecipe,
    SwitchRouter,
)
from moe_ref.lineage.linear import LinearRouter
from moe_ref.routing import Routing

from .models import seeded

D, E = 12, 8

LIMIT = ExpertGroups(count=4, kept=2)
DEVICES = ExpertGroups(count=4, kept=2, score=GroupScore.HF_DEEPSEEK_V2)
ROOM = Capacity(factor=0.75)

ROUTERS: dict[str, Callable[[], Any]] = {
    "shazeer": lambda: ShazeerRouter(D, E, 2, ShazeerRecipe(z_coefficient=1e-3)),
    "shazeer, capacity": lambda: ShazeerRouter(D, E, 2, ShazeerRecipe(capacity=ROOM)),
    "gshard": lambda: GShardRouter(D, E),
    "gshard, gumbel": lambda: GShardRouter(D, E, 2, GShardRecipe(second=SecondExpert.GUMBEL)),
    "st-moe": lambda: StMoeRouter(D, E, 3),
    "switch": lambda: SwitchRouter(D, E, 1, SwitchRecipe(jitter=0.1, capacity=ROOM)),
    "mixtral": lambda: MixtralRouter(
        D, E, 2, MixtralRecipe(balance_coefficient=1e-2, z_coefficient=1e-3)
    ),
    "sinkhorn": lambda: SinkhornRouter(D, E, 1),
    "sinkhorn, top 2": lambda: SinkhornRouter(D, E, 2, SinkhornRecipe(balance_coefficient=1e-2)),
    "deepseek-v2": lambda: DeepSeekV2Router(D, E, 3, DeepSeekV2Recipe(groups=DEVICES)),
    "deepseek-v3": lambda: DeepSeekV3Router(D, E, 4, DeepSeekV3Recipe(groups=LIMIT)),
}


def router_of(name: str, dtype: Any = torch.float64) -> Any:
    """Make a router with weights that spread the tokens."""
    router = ROUTERS[name]().to(dtype)
    generator = seeded(3)
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.normal_(std=0.7, generator=generator)
    return router


def tokens(count: int = 24, seed: int = 5, dtype: Any = torch.float64) -> Any:
    return torch.randn(count, D, dtype=torch.float64, generator=seeded(seed)).to(dtype)


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
