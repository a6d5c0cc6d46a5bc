"""Room for a bounded number of tokens in each expert, and who gets it."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from math import ceil

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from moe_ref.errors import MoeRefError

__all__ = ["Capacity", "CapacityRounding", "DropOrder", "within_capacity"]

LUCIDRAINS_LEAST = 4


class CapacityRounding(StrEnum):
    """How a factor becomes a number of tokens for each expert, after a library.

    ``T`` tokens of a local group, each of K choices, over E experts.

    Attributes
    ----------
    MEGATRON
        ``ceil(K T / E * factor)`` in float64.
    DEEPSPEED
        ``ceil(T / E * (K factor))`` in float32. Mostly the same; but 1000 tokens over 10 experts
        at 1.1 are 110, where MEGATRON has 111: 100 times 1.1 is above 110 in float64 alone.
    FAIRSCALE
        ``K T // E``, the ``C = 2 N / (G E)`` of GShard; no factor.
    HF_NLLB
        ``K ceil(T / E)``; no factor.
    LUCIDRAINS
        ``int(T factor / E)``, at most T and at least 4. K does not count.
    PLAIN_INT
        ``int(T / E * factor)``, as written in much teaching code. K does not count.
    """

    MEGATRON = "megatron"
    DEEPSPEED = "deepspeed"
    FAIRSCALE = "fairscale"
    HF_NLLB = "hf-nllb"
    LUCIDRAINS = "lucidrains"
    PLAIN_INT = "plain-int"


def _deepspeed(tokens: int, n_experts: int, top_k: int, factor: float) -> int:
    return int(torch.ceil((tokens / n_experts) * torch.tensor(factor * top_k, dtype=torch.float32)))


def _lucidrains(tokens: int, n_experts: int, _: int, factor: float) -> int:
    return max(min(tokens, int(tokens * factor / n_experts)), LUCIDRAINS_LEAST)


_ROUNDED: dict[CapacityRounding, Callable[[int, int, int, float], int]] = {
    CapacityRounding.MEGATRON: lambda t, e, k, factor: ceil(t * k / e * factor),
    CapacityRounding.DEEPSPEED: _deepspeed,
    CapacityRounding.FAIRSCALE: lambda t, e, k, _: k * t // e,
    CapacityRounding.HF_NLLB: lambda t, e, k, _: k * ceil(t / e),
    CapacityRounding.LUCIDRAINS: _lucidrains,
    CapacityRounding.PLAIN_INT: lambda t, e, _, factor: int(t / e * factor),
}
_WITHOUT_FACTOR = (CapacityRounding.FAIRSCALE, CapacityRounding.HF_NLLB)


class DropOrder(StrEnum):
    """Who is served first where an expert has less room than tokens.

    Attributes
    ----------
    GSHARD
        All first choices by position, then all second choices, and so on (GShard, fairscale,
        DeepSpeed's top-1 without random token selection and top-2, lucidrains, HF Switch, NLLB).
    POSITION
        By position of the token, whichever of its choices it is (``position`` of DeepSpeed's
        top-k gate, and what Megatron-Core's ``position`` means; its top-k over ties promises no
        order).
    MEGATRON_PROBS
        By the gate, highest first, as Megatron-Core's ``probs``; the earlier token of a tie.
    DEEPSPEED_PROBS
        By the score before normalisation, as ``probs`` of DeepSpeed's top-k gate.
    BATCH_PRIORITIZED
        As GSHARD, the tokens sorted by their highest score (V-MoE, arXiv 2106.05974;
        ``batch_prioritized_routing`` of HF NLLB).
    """

    GSHARD = "gshard"
    POSITION = "position"
    MEGATRON_PROBS = "megatron-probs"
    DEEPSPEED_PROBS = "deepspeed-probs"
    BATCH_PRIORITIZED = "batch-prioritized"


class Capacity(BaseModel):
    """How many tokens of a local group each expert takes.

    Attributes
    ----------
    factor : float
        Room over the mean load [-].
    eval_factor : float or None
        The factor outside training; None for the same.
    rounding : CapacityRounding
        To a whole number.
    order : DropOrder
        Who is served first.
    minimum : int
        Tokens that each expert takes at least.
    slots : int or None
        Tokens that each expert takes, whatever the factor says (``expert_capacity`` of HF).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    factor: float = Field(default=1.0, gt=0)
    eval_factor: float | None = Field(default=None, gt=0)
    rounding: CapacityRounding = CapacityRounding.MEGATRON
    order: DropOrder = DropOrder.GSHARD
    minimum: int = Field(default=0, ge=0)
    slots: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _has_a_factor(self) -> Capacity:
        if self.rounding in _WITHOUT_FACTOR:
            for factor in (self.factor, self.eval_factor or 1.0):
                if factor != 1.0:
                    raise MoeRefError(
                        f"factor is {factor:g}, but the rounding {self.rounding} has none; "
                        "the only legal value is 1."
                    )
        return self

    def slots_for(self, tokens: int, n_experts: int, top_k: int, training: bool = True) -> int:
        """Return how many of ``tokens`` tokens each expert takes."""
        if self.slots is not None:
            return self.slots
        factor = self.factor if training or self.eval_factor is None else self.eval_factor
        return max(_ROUNDED[self.rounding](tokens, n_experts, top_k, factor), self.minimum)


def within_capacity(
    experts_TK: Tensor,
    n_experts: int,
    slots: int,
    order: DropOrder = DropOrder.GSHARD,
    *,
    sent_TK: Tensor | None = None,
    priority_TK: Tensor | None = None,
    local_groups: int = 1,
) -> Tensor:
    """Return which choices have room, shape (T, K), bool.

    Parameters
    ----------
    experts_TK : Tensor of int64
        Experts of each token, the first choice first.
    n_experts : int
        E.
    slots : int
        Tokens that each expert takes of each local group.
    order : DropOrder
        Who is served first.
    sent_TK : Tensor of bool, optional
        False for a choice that asks for no room; it gets none.
    priority_TK : Tensor, optional
        Of each choice, for the orders by probability; ties go by position.
    local_groups : int
        Groups of tokens, one after the other; it divides T.
    """
    tokens, top_k = experts_TK.shape
    group_T = torch.arange(tokens, device=experts_TK.device) // max(tokens // local_groups, 1)
    room_TK = experts_TK + n_experts * group_T[:, None]
    if sent_TK is not None:
        room_TK = torch.where(sent_TK, room_TK, n_experts * local_groups)
    served = _served(order, tokens, top_k, priority_TK, experts_TK.device)
    room = room_TK.reshape(-1)[served]
    by_room = room.argsort(stable=True)
    first = torch.searchsorted(room[by_room], room[by_room])
    place = torch.arange(room.numel(), device=room.device) - first
    kept = torch.empty_like(room, dtype=torch.bool)
    kept[served[by_room]] = place < slots
    kept_TK = kept.reshape(tokens, top_k)
    return kept_TK if sent_TK is None else kept_TK & sent_TK


def _served(
    order: DropOrder, tokens: int, top_k: int, priority_TK: Tensor | None, device: torch.device
) -> Tensor:
    """Return the choices, each ``t K + k``, in the order in which they are served."""
    choice_TK = torch.arange(tokens * top_k, device=device).reshape(tokens, top_k)
    if order is DropOrder.GSHARD:
        return choice_TK.T.reshape(-1)
    if order is DropOrder.POSITION:
        return choice_TK.reshape(-1)
    if priority_TK is None:
        raise MoeRefError(
            f"priority_TK is None, but the order {order} goes by it; "
            f"give one, or take the order {DropOrder.GSHARD}."
        )
    if order is DropOrder.BATCH_PRIORITIZED:
        best_T = priority_TK.amax(dim=1).argsort(descending=True, stable=True)
        return choice_TK[best_T].T.reshape(-1)
    return priority_TK.reshape(-1).argsort(descending=True, stable=True)
