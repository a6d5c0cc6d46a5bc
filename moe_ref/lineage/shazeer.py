r"""Noisy top k with losses of importance and load (Shazeer et al., arXiv 1701.06538).

    H(x)_i = (x W_g)_i + N(0, 1) softplus((x W_noise)_i),   G(x) = softmax(top k of H(x))

Importance is the sum of the gates of an expert, load the expected number of its tokens: the sum
of the probabilities that an expert stays in the top k when its noise is drawn anew.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from moe_ref.lineage.balance import cv_squared
from moe_ref.lineage.linear import LineageRecipe, LinearRouter, NotNegative
from moe_ref.routing import Routing, wide_dtype

__all__ = ["ShazeerRecipe", "ShazeerRouter", "probability_in_top_k"]


def probability_in_top_k(
    clean_TE: Tensor, noisy_TE: Tensor, deviation_TE: Tensor, top_k: int
) -> Tensor:
    """Return the probability that each expert is in the top k, its noise drawn anew, (8) and (9).

    The noise of the others stays: an expert must beat the ``top_k``-th highest of them.

    Parameters
    ----------
    clean_TE, noisy_TE : Tensor
        Logits without and with noise.
    deviation_TE : Tensor
        Standard deviation of the noise.
    top_k : int
        K, less than E.
    """
    highest_TK = noisy_TE.topk(top_k + 1, dim=1).values
    in_T1, out_T1 = highest_TK[:, top_k:], highest_TK[:, top_k - 1 : top_k]
    beaten_TE = torch.where(noisy_TE > in_T1, in_T1, out_T1)
    return torch.special.ndtr((clean_TE - beaten_TE) / deviation_TE)


class ShazeerRecipe(LineageRecipe):
    """The options of Shazeer's router, with the coefficients of its appendix.

    Attributes
    ----------
    importance_coefficient, load_coefficient : float
        ``w_importance`` and ``w_load``. Tensor2Tensor has 0.01 for both.
    least_noise : float
        Added to the softplus, as in Tensor2Tensor (0.01); the paper adds none, and its noise can
        vanish.
    """

    importance_coefficient: NotNegative = 0.1
    load_coefficient: NotNegative = 0.1
    least_noise: NotNegative = 1e-2


class ShazeerRouter(LinearRouter):
    """Noisy top k; outside training there is no noise.

    Both matrices start at zero, so that the noise alone chooses and loads start about equal.
    Without noise, or with K = E, load is the count of tokens, which carries no gradient.

    Attributes
    ----------
    noise_weight_ED : Parameter
        ``W_noise``.
    """

    recipe: ShazeerRecipe
    noise_weight_ED: nn.Parameter

    def __init__(
        self, d_model: int, n_experts: int, top_k: int = 4, recipe: ShazeerRecipe | None = None
    ) -> None:
        super().__init__(d_model, n_experts, top_k, recipe or ShazeerRecipe())
        nn.init.zeros_(self.weight_ED)
        self.noise_weight_ED = nn.Parameter(torch.zeros(n_experts, d_model))

    def forward(
        self, x_TD: Tensor, sequences: int = 1, generator: torch.Generator | None = None
    ) -> Routing:
        """Choose experts; see `Router.forward`."""
        clean_TE = noisy_TE = self.logits(x_TD)
        deviation_TE = self.deviation(x_TD)
        if self.training:
            drawn_TE = torch.empty_like(clean_TE).normal_(generator=generator)
            noisy_TE = clean_TE + drawn_TE * deviation_TE
        experts_TK = noisy_TE.topk(self.top_k, dim=1).indices
        score_TE = torch.softmax(noisy_TE, dim=1)
        routing = self.routing(clean_TE, score_TE, experts_TK, sequences)
        chosen_TK = torch.softmax(noisy_TE.gather(1, experts_TK), dim=1)
        gates_TE = torch.zeros_like(noisy_TE).scatter(1, experts_TK, chosen_TK)
        if self.training and self.top_k < self.n_experts:
            load_TE = probability_in_top_k(clean_TE, noisy_TE, deviation_TE, self.top_k)
        else:
            load_TE = (gates_TE > 0).to(gates_TE)
        self.add_losses(routing.losses, gates_TE.sum(dim=0), load_TE.sum(dim=0))
        return routing

    def deviation(self, x_TD: Tensor) -> Tensor:
        """Return the standard deviation of the noise, shape (T, E)."""
        wide = wide_dtype(x_TD)
        raw_TE = x_TD.to(wide) @ self.noise_weight_ED.to(wide).T
        return softplus(raw_TE) + self.recipe.least_noise

    def add_losses(self, losses: dict[str, Tensor], importance_E: Tensor, load_E: Tensor) -> None:
        """Add the squared coefficients of variation, (7) and (11)."""
        if self.recipe.importance_coefficient:
            losses["importance"] = self.recipe.importance_coefficient * cv_squared(importance_E)
        if self.recipe.load_coefficient:
            losses["load"] = self.recipe.load_coefficient * cv_squared(load_E)
