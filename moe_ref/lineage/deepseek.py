"""Routers of DeepSeek-V2 (arXiv 2405.04434) and DeepSeek-V3 (arXiv 2412.19437)."""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from moe_ref.lineage.balance import AuxiliaryLoss
from moe_ref.lineage.groups import ExpertGroups
from moe_ref.lineage.linear import LineageRecipe, LinearRouter, Normalisation, NotNegative, Positive
from moe_ref.paper_router import sequence_auxiliary_loss
from moe_ref.routing import Routing

__all__ = [
    "BiasUpdate",
    "DeepSeekV2Recipe",
    "DeepSeekV2Router",
    "DeepSeekV3Recipe",
    "DeepSeekV3Router",
    "updated_bias",
]


class BiasUpdate(StrEnum):
    """How the bias moves once for every optimizer step, after a library or a model.

    Attributes
    ----------
    DEEPSEEK_V3
        By ``u`` up where an expert has less than the mean load, and down where it has more
        (arXiv 2408.15664, Algorithm 1; Megatron-Core, torchtitan). A load at the mean is no move.
    MOONLIGHT
        The same, less the mean of the moves, so that the bias keeps its mean (arXiv 2502.16982).
    """

    DEEPSEEK_V3 = "deepseek-v3"
    MOONLIGHT = "moonlight"


def updated_bias(
    bias_E: Tensor, counts_E: Tensor, rate: float, update: BiasUpdate = BiasUpdate.DEEPSEEK_V3
) -> Tensor:
    """Return the bias after a step in which experts had ``counts_E`` tokens.

    Only the sign of what an expert lacks counts: tokens that are counted twice, as under full
    recomputation, change nothing.
    """
    counts_E = counts_E.to(torch.float64)
    move_E = torch.sign(counts_E.mean() - counts_E)
    if update is BiasUpdate.MOONLIGHT:
        move_E = move_E - move_E.mean()
    return bias_E + rate * move_E.to(bias_E)


class DeepSeekV2Recipe(LineageRecipe):
    """The options of DeepSeek-V2, with the coefficient of its section 3.1.2.

    Attributes
    ----------
    groups : ExpertGroups or None
        Devices that a token may reach; DeepSeek-V2 keeps 3 of 8. None has no limit.
    """

    balance: AuxiliaryLoss = AuxiliaryLoss.MEGATRON
    balance_coefficient: NotNegative = 3e-3
    normalisation: Normalisation = Normalisation.NONE
    groups: ExpertGroups | None = None


class DeepSeekV3Recipe(LineageRecipe):
    """The options of DeepSeek-V3, with those of its section 4.2 and of its configuration.

    Attributes
    ----------
    groups : ExpertGroups or None
        Nodes that a token may reach; DeepSeek-V3 keeps 4 of 8. None has no limit.
    bias_rate : float
        ``u``.
    bias_update : BiasUpdate
        How the bias moves.
    sequence_coefficient : float
        ``alpha`` of the loss within sequences, (17); 0 leaves it out.
    """

    groups: ExpertGroups | None = None
    scaling: Positive = 2.5
    bias_rate: NotNegative = 1e-3
    bias_update: BiasUpdate = BiasUpdate.DEEPSEEK_V3
    sequence_coefficient: NotNegative = 1e-4


class DeepSeekV2Router(LinearRouter):
    """Softmax over all experts, the K highest within groups; gates are not normalised.

    Its losses of devices and of communication are not here.
    """

    recipe: DeepSeekV2Recipe

    def __init__(
        self, d_model: int, n_experts: int, top_k: int = 6, recipe: DeepSeekV2Recipe | None = None
    ) -> None:
        super().__init__(d_model, n_experts, top_k, recipe or DeepSeekV2Recipe())
        if self.recipe.groups is not None:
            self.recipe.groups.check(n_experts, top_k)

    def forward(
        self, x_TD: Tensor, sequences: int = 1, generator: torch.Generator | None = None
    ) -> Routing:
        """Choose experts; see `Router.forward`."""
        logits_TE = self.logits(x_TD)
        score_TE = torch.softmax(logits_TE, dim=1)
        experts_TK = _highest(score_TE, self.top_k, self.recipe.groups)
        return self.routing(logits_TE, score_TE, experts_TK, sequences)


class DeepSeekV3Router(LinearRouter):
    """Sigmoid scores; a bias that follows the load chooses, and gates do without it.

    Attributes
    ----------
    bias_E : Tensor
        Added to the scores to choose; no parameter, saved with the state.
    seen_E : Tensor
        Tokens that chose each expert since the last optimizer step.
    """

    recipe: DeepSeekV3Recipe
    bias_E: Tensor
    seen_E: Tensor

    def __init__(
        self, d_model: int, n_experts: int, top_k: int = 8, recipe: DeepSeekV3Recipe | None = None
    ) -> None:
        super().__init__(d_model, n_experts, top_k, recipe or DeepSeekV3Recipe())
        if self.recipe.groups is not None:
            self.recipe.groups.check(n_experts, top_k)
        self.register_buffer("bias_E", torch.zeros(n_experts))
        self.register_buffer("seen_E", torch.zeros(n_experts, dtype=torch.int64))

    def forward(
        self, x_TD: Tensor, sequences: int = 1, generator: torch.Generator | None = None
    ) -> Routing:
        """Choose experts by (13) to (16); see `Router.forward`."""
        logits_TE = self.logits(x_TD)
        gate_TE = torch.sigmoid(logits_TE)
        score_TE = gate_TE / gate_TE.sum(dim=1, keepdim=True)
        biased_TE = gate_TE.detach() + self.bias_E.to(gate_TE)
        experts_TK = _highest(biased_TE, self.top_k, self.recipe.groups)
        routing = self.routing(logits_TE, score_TE, experts_TK, sequences, gate_TE=gate_TE)
        if self.training:
            self.seen_E += routing.counts_E
        if self.recipe.sequence_coefficient:
            routing.losses["sequence"] = self.recipe.sequence_coefficient * sequence_auxiliary_loss(
                gate_TE, self.top_k, sequences
            )
        return routing

    @torch.no_grad()
    def after_step(self) -> None:
        """Move the bias by the counts since the last step."""
        self.bias_E.copy_(
            updated_bias(self.bias_E, self.seen_E, self.recipe.bias_rate, self.recipe.bias_update)
        )
        self.seen_E.zero_()


def _highest(choice_TE: Tensor, top_k: int, groups: ExpertGroups | None) -> Tensor:
    """Return the experts of each token, shape (T, K), by scores within the groups it reaches."""
    if groups is not None:
        choice_TE = groups.masked(choice_TE, top_k)
    return choice_TE.topk(top_k, dim=1).indices
