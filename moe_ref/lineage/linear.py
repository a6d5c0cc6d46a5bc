"""What all routers of the lineage share: one linear layer, losses, capacity."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from moe_ref.errors import MoeRefError
from moe_ref.lineage.balance import AuxiliaryLoss, load_balancing_loss
from moe_ref.lineage.capacity import Capacity, DropOrder, within_capacity
from moe_ref.paper_router import z_loss
from moe_ref.routing import Router, Routing, counts_of, wide_dtype

__all__ = ["LineageRecipe", "LinearRouter", "Normalisation"]

NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
LocalGroups = Annotated[int, Field(ge=1)] | Literal["sequences"]


class Normalisation(StrEnum):
    """What the gates of a token are divided by.

    Attributes
    ----------
    NONE
        Nothing: the scores stand (Switch, DeepSeek-V2, Qwen3 with ``norm_topk_prob=False``,
        Megatron-Core with ``use_pre_softmax``).
    BEFORE_DROPPING
        The sum over its K choices, those without room as well (GShard, lucidrains, Mixtral,
        DeepSeek-V3, Megatron-Core). With softmax scores it is the softmax over the top K.
    AFTER_DROPPING
        The sum over the choices that are kept (fairscale, DeepSpeed, HF NLLB by default): a token
        that lost its second expert gives all weight to the first.
    """

    NONE = "none"
    BEFORE_DROPPING = "before-dropping"
    AFTER_DROPPING = "after-dropping"

    def gates(self, score_TK: Tensor, kept_TK: Tensor | None) -> Tensor:
        """Return the gates, 0 where a choice is not kept."""
        kept = score_TK if kept_TK is None else score_TK * kept_TK
        if self is Normalisation.NONE:
            return kept
        total = score_TK if self is Normalisation.BEFORE_DROPPING else kept
        tiny = torch.finfo(score_TK.dtype).tiny
        return kept / total.sum(dim=1, keepdim=True).clamp(min=tiny)


class LineageRecipe(BaseModel):
    """The options that every router of the lineage has.

    Attributes
    ----------
    balance, balance_coefficient
        Scale and coefficient of the auxiliary loss; 0 leaves it out.
    z_coefficient : float
        Of the z-loss (Zoph et al., arXiv 2202.08906, (5)); 0 leaves it out.
    normalisation : Normalisation
        Of the gates.
    capacity : Capacity or None
        Room of each expert; None drops nothing.
    local_groups : int or "sequences"
        Groups of tokens, one after the other, in each of which capacity and auxiliary loss are
        counted apart; "sequences" makes each sequence a group.
    scaling : float
        Factor on the gates, after normalisation (``routed_scaling_factor`` of HF).
    float32 : bool
        Multiply by the router in float32 (Switch, section 2.4); False multiplies in the type of
        the input, as HF Mixtral. What follows is in float32 in any case, and all is in float64
        where the input is.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    balance: AuxiliaryLoss = AuxiliaryLoss.SWITCH
    balance_coefficient: NotNegative = 0.0
    z_coefficient: NotNegative = 0.0
    normalisation: Normalisation = Normalisation.BEFORE_DROPPING
    capacity: Capacity | None = None
    local_groups: LocalGroups = 1
    scaling: Positive = 1.0
    float32: bool = True


class LinearRouter(Router):
    """A router of one linear layer; its subclasses choose experts and gates.

    Attributes
    ----------
    recipe : LineageRecipe
        Its options.
    """

    recipe: LineageRecipe

    def __init__(self, d_model: int, n_experts: int, top_k: int, recipe: LineageRecipe) -> None:
        super().__init__(d_model, n_experts, top_k)
        self.recipe = recipe

    def logits(self, x_TD: Tensor) -> Tensor:
        """Return the logits of the tokens, shape (T, E), in float32 or wider."""
        wide = wide_dtype(x_TD)
        narrow = wide if self.recipe.float32 else x_TD.dtype
        return (x_TD.to(narrow) @ self.weight_ED.to(narrow).T).to(wide)

    def extra_repr(self) -> str:
        """Say what the router was made with, its recipe too."""
        return f"{super().extra_repr()}, {self.recipe!r}"

    def local_groups(self, tokens: int, sequences: int) -> int:
        """Return the local groups of a batch.

        Raises
        ------
        MoeRefError
            The groups do not divide the tokens.
        """
        asked = self.recipe.local_groups
        groups = sequences if asked == "sequences" else asked
        if tokens % groups:
            nearest = next(g for g in range(groups, 0, -1) if tokens % g == 0)
            raise MoeRefError(
                f"local_groups is {groups}, but must divide the {tokens} tokens of the batch; "
                f"the nearest legal value below is {nearest}."
            )
        return groups

    def kept(
        self, score_TE: Tensor, experts_TK: Tensor, groups: int, sent_TK: Tensor | None = None
    ) -> Tensor | None:
        """Return which choices are sent and have room, shape (T, K), bool; None for all."""
        capacity = self.recipe.capacity
        if capacity is None:
            return sent_TK
        tokens, top_k = experts_TK.shape
        slots = capacity.slots_for(tokens // groups, self.n_experts, top_k, self.training)
        with torch.no_grad():
            priority_TK = score_TE.gather(1, experts_TK)
            if capacity.order is DropOrder.MEGATRON_PROBS:
                priority_TK = self.recipe.normalisation.gates(priority_TK, None)
        return within_capacity(
            experts_TK,
            self.n_experts,
            slots,
            capacity.order,
            sent_TK=sent_TK,
            priority_TK=priority_TK,
            local_groups=groups,
        )

    def losses(
        self, logits_TE: Tensor, score_TE: Tensor, experts_TK: Tensor, groups: int
    ) -> dict[str, Tensor]:
        """Return the losses whose coefficient is not 0, each with its coefficient."""
        found = {}
        if self.recipe.balance_coefficient:
            found["balance"] = self.recipe.balance_coefficient * load_balancing_loss(
                score_TE, experts_TK, self.recipe.balance, groups
            )
        if self.recipe.z_coefficient:
            found["z"] = self.recipe.z_coefficient * z_loss(logits_TE)
        return found

    def routing(
        self,
        logits_TE: Tensor,
        score_TE: Tensor,
        experts_TK: Tensor,
        sequences: int,
        *,
        gate_TE: Tensor | None = None,
        sent_TK: Tensor | None = None,
    ) -> Routing:
        """Return the decision for the experts chosen.

        Parameters
        ----------
        logits_TE, score_TE : Tensor
            Logits, and scores that sum to 1 for each token, for the losses.
        experts_TK : Tensor of int64
            Experts of each token, the first choice first.
        sequences : int
            Sequences in the batch.
        gate_TE : Tensor, optional
            Scores that gates are made of, where they are not ``score_TE``.
        sent_TK : Tensor of bool, optional
            False where a choice is not sent; it is not counted, nor kept.
        """
        gate_TE = score_TE if gate_TE is None else gate_TE
        groups = self.local_groups(len(logits_TE), sequences)
        kept_TK = self.kept(gate_TE, experts_TK, groups, sent_TK)
        gates_TK = self.recipe.normalisation.gates(gate_TE.gather(1, experts_TK), kept_TK)
        gates_TK = self.recipe.scaling * gates_TK
        chose = experts_TK if sent_TK is None else experts_TK[sent_TK]
        losses = self.losses(logits_TE, score_TE, experts_TK, groups)
        counts_E = counts_of(chose, self.n_experts)
        return Routing(experts_TK, gates_TK, kept_TK, counts_E, losses)
