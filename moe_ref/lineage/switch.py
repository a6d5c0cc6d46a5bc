"""Switch: one expert for each token (Fedus, Zoph and Shazeer, arXiv 2101.03961)."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from moe_ref.errors import MoeRefError
from moe_ref.lineage.balance import AuxiliaryLoss
from moe_ref.lineage.capacity import Capacity
from moe_ref.lineage.linear import LineageRecipe, LinearRouter, Normalisation, NotNegative
from moe_ref.noise import uniform_like
from moe_ref.routing import Routing, wide_dtype

__all__ = ["SwitchRecipe", "SwitchRouter"]


class SwitchRecipe(LineageRecipe):
    """The options of Switch, with the values of its sections 2.2 and 2.4.

    Attributes
    ----------
    jitter : float
        ``epsilon``: in training the router sees its input times draws from
        ``[1 - epsilon, 1 + epsilon)``. 0 is none.
    """

    balance: AuxiliaryLoss = AuxiliaryLoss.SWITCH
    balance_coefficient: NotNegative = 1e-2
    normalisation: Normalisation = Normalisation.NONE
    capacity: Capacity | None = Capacity(factor=1.25)
    jitter: float = Field(default=0.0, ge=0, lt=1)


class SwitchRouter(LinearRouter):
    """The expert with the highest probability, its output times that probability.

    Equations (1) to (6): softmax in float32, capacity, ``alpha E sum f P``.
    """

    recipe: SwitchRecipe

    def __init__(
        self, d_model: int, n_experts: int, top_k: int = 1, recipe: SwitchRecipe | None = None
    ) -> None:
        if top_k != 1:
            raise MoeRefError(
                f"top_k is {top_k}, but Switch sends a token to one expert; "
                "the only legal value is 1."
            )
        super().__init__(d_model, n_experts, top_k, recipe or SwitchRecipe())

    def forward(
        self, x_TD: Tensor, sequences: int = 1, generator: torch.Generator | None = None
    ) -> Routing:
        """Choose the expert; see `Router.forward`."""
        seen_TD = x_TD
        if self.training and self.recipe.jitter:
            wide_TD = x_TD.to(wide_dtype(x_TD))
            low, high = 1.0 - self.recipe.jitter, 1.0 + self.recipe.jitter
            seen_TD = wide_TD * uniform_like(wide_TD, generator, low, high)
        logits_TE = self.logits(seen_TD)
        score_TE = torch.softmax(logits_TE, dim=1)
        experts_TK = score_TE.argmax(dim=1, keepdim=True)
        return self.routing(logits_TE, score_TE, experts_TK, sequences)
