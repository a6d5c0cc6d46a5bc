"""Softmax over the top k, of Mixtral (Jiang et al., arXiv 2401.04088) and most that followed."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ref.lineage.balance import AuxiliaryLoss
from moe_ref.lineage.linear import LineageRecipe, LinearRouter
from moe_ref.routing import Routing

__all__ = ["MixtralRecipe", "MixtralRouter"]


class MixtralRecipe(LineageRecipe):
    """The options of Mixtral: no capacity; no auxiliary loss, of which its paper says nothing."""

    balance: AuxiliaryLoss = AuxiliaryLoss.HF_MIXTRAL


class MixtralRouter(LinearRouter):
    """The K highest logits, gates their softmax (section 2.1).

    With `Normalisation.NONE` gates are the probabilities over all experts, as in Qwen3 without
    ``norm_topk_prob``; with a capacity, `Normalisation.AFTER_DROPPING` and
    `AuxiliaryLoss.MEGATRON` it is DeepSpeed's top-k gate.
    """

    recipe: MixtralRecipe

    def __init__(
        self, d_model: int, n_experts: int, top_k: int = 2, recipe: MixtralRecipe | None = None
    ) -> None:
        super().__init__(d_model, n_experts, top_k, recipe or MixtralRecipe())

    def forward(
        self, x_TD: Tensor, sequences: int = 1, generator: torch.Generator | None = None
    ) -> Routing:
        """Choose experts; see `Router.forward`."""
        logits_TE = self.logits(x_TD)
        experts_TK = logits_TE.topk(self.top_k, dim=1).indices
        score_TE = torch.softmax(logits_TE, dim=1)
        return self.routing(logits_TE, score_TE, experts_TK, sequences)
