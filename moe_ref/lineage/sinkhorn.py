"""Choice by optimal transport (S-BASE; Clark et al., arXiv 2202.01169)."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ref.errors import MoeRefError
from moe_ref.lineage.linear import LineageRecipe, LinearRouter, Normalisation, Positive
from moe_ref.routing import Routing

__all__ = ["SinkhornRecipe", "SinkhornRouter", "sinkhorn"]

_MAX_ROUNDS = 10_000


def sinkhorn(logits_TE: Tensor, tolerance: float = 1e-4) -> Tensor:
    """Return the transport plan of the logits, shape (T, E): columns sum to ``1 / E``.

    Rows and columns of ``exp(logits)`` are scaled in turn, rows to ``1 / T`` and columns to
    ``1 / E``, until the scales of the columns change by at most ``tolerance`` on average, as in
    Megatron-Core. That adds 1e-8 to each sum, with which the scales drift for ever and no
    tolerance below some 1e-8 is reached; here nothing is added, and a row is taken off its
    highest logit first, which its scale absorbs.

    Raises
    ------
    MoeRefError
        The logits are not finite, an expert's are all too far below the highest, or the scales
        still change after 10 000 rounds.
    """
    cost_TE = torch.exp(logits_TE - logits_TE.amax(dim=1, keepdim=True))
    if not (cost_TE.amax(dim=0) > 0.0).all():
        raise MoeRefError(
            f"expert {int(cost_TE.amax(dim=0).argmin())} has no share of any token; "
            "logits must be finite and within about 80 of the highest of a token."
        )
    tokens, n_experts = cost_TE.shape
    column_E = torch.ones_like(cost_TE[0])
    for _ in range(_MAX_ROUNDS):
        before_E = column_E
        row_T = 1.0 / (tokens * (cost_TE * column_E).sum(dim=1))
        column_E = 1.0 / (n_experts * (cost_TE * row_T[:, None]).sum(dim=0))
        if (column_E - before_E).abs().mean() <= tolerance:
            return column_E * cost_TE * row_T[:, None]
    raise MoeRefError(
        f"the scales still change by more than {tolerance:g} after {_MAX_ROUNDS} rounds; "
        f"take a larger tolerance, such as {10 * tolerance:g}."
    )


class SinkhornRecipe(LineageRecipe):
    """The options of the Sinkhorn router, with those of Megatron-Core.

    Attributes
    ----------
    tolerance : float
        Of `sinkhorn`.
    """

    normalisation: Normalisation = Normalisation.NONE
    tolerance: Positive = 1e-4


class SinkhornRouter(LinearRouter):
    """In training, the K experts to which most of a token is transported; else the K likeliest.

    The gate is the sigmoid of the logit where K is 1, and the softmax over all experts else.
    Nothing is learnt through the plan.
    """

    recipe: SinkhornRecipe

    def __init__(
        self, d_model: int, n_experts: int, top_k: int = 1, recipe: SinkhornRecipe | None = None
    ) -> None:
        super().__init__(d_model, n_experts, top_k, recipe or SinkhornRecipe())

    def forward(
        self, x_TD: Tensor, sequences: int = 1, generator: torch.Generator | None = None
    ) -> Routing:
        """Choose experts; see `Router.forward`."""
        logits_TE = self.logits(x_TD)
        score_TE = torch.softmax(logits_TE, dim=1)
        with torch.no_grad():
            plan_TE = sinkhorn(logits_TE, self.recipe.tolerance) if self.training else logits_TE
            experts_TK = plan_TE.topk(self.top_k, dim=1).indices
        gate_TE = torch.sigmoid(logits_TE) if self.top_k == 1 else score_TE
        return self.routing(logits_TE, score_TE, experts_TK, sequences, gate_TE=gate_TE)
