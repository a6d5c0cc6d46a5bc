r"""The router of arXiv 2608.10605: Algorithm 1, its bias controller and its losses.

Sigmoid scores of row-normalised logits; a Gumbel proposal of M experts, its noise centred for each
expert over the batch; the K of them with the highest biased score; gates from clean scores. A
controller moves the bias once for every optimizer step, equation (19).
"""

from __future__ import annotations

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from moe_ref.noise import gumbel_like
from moe_ref.routing import Router, Routing, counts_of, wide_dtype

__all__ = ["PaperRouter", "RouterRecipe", "sequence_auxiliary_loss", "z_loss"]


class RouterRecipe(BaseModel):
    """The constants of the router, with those of Appendix A.3.

    Attributes
    ----------
    row_norm : float or None
        ``c_r``, the norm of each row of the router; None leaves the rows as they are.
    temperature : float
        ``tau`` of the Gumbel noise [-], at least 0; 0 proposes the M highest clean scores.
    proposal : int
        ``rho``: ``M = min(rho K, E)``.
    centre_noise : bool
        Take the mean over the batch off each expert's noise.
    bias_rate, bias_epsilon : float
        ``mu_b`` and ``epsilon`` of (19).
    z_coefficient, sequence_coefficient : float
        Of the z-loss (23) and of the sequence auxiliary loss.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    row_norm: float | None = Field(default=1.0, gt=0)
    temperature: float = Field(default=0.01, ge=0)
    proposal: int = Field(default=12, ge=1)
    centre_noise: bool = True
    bias_rate: float = Field(default=1e-3, ge=0)
    bias_epsilon: float = Field(default=1e-4, gt=0)
    z_coefficient: float = Field(default=1e-4, ge=0)
    sequence_coefficient: float = Field(default=1e-3, ge=0)


class PaperRouter(Router):
    """Algorithm 1 of arXiv 2608.10605.

    The noise is drawn in training alone, and centred over the tokens of one call, a microbatch.
    Algorithm 1 says neither; without noise, what evaluation finds depends on the tokens only.

    Attributes
    ----------
    bias_E : Tensor
        ``phi``; no parameter, saved with the state.
    seen_E : Tensor
        Tokens that chose each expert since the last optimizer step.
    """

    bias_E: Tensor
    seen_E: Tensor

    def __init__(
        self, d_model: int, n_experts: int, top_k: int, recipe: RouterRecipe | None = None
    ) -> None:
        super().__init__(d_model, n_experts, top_k)
        self.recipe = recipe or RouterRecipe()
        self.n_proposed = min(self.recipe.proposal * top_k, n_experts)
        self.register_buffer("bias_E", torch.zeros(n_experts))
        self.register_buffer("seen_E", torch.zeros(n_experts, dtype=torch.int64))

    def logits(self, x_TD: Tensor) -> Tensor:
        """Return the logits of the tokens, shape (T, E), in float32 or wider."""
        weight_ED = self.weight_ED.to(wide_dtype(x_TD))
        if self.recipe.row_norm is not None:
            weight_ED = self.recipe.row_norm * normalize(weight_ED, dim=1)
        return x_TD.to(weight_ED) @ weight_ED.T

    def noise(self, like_TE: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return Gumbel noise of a shape; each expert's is centred where the recipe says so."""
        noise_TE = gumbel_like(like_TE, generator)
        if self.recipe.centre_noise:
            noise_TE = noise_TE - noise_TE.mean(dim=0, keepdim=True)
        return noise_TE

    def propose(self, log_score_TE: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return the proposed experts of each token, shape (T, M): the noisy top M of (20)."""
        tau = self.recipe.temperature
        if self.training and tau > 0.0 and self.n_proposed < self.n_experts:
            log_score_TE = log_score_TE + tau * self.noise(log_score_TE, generator)
        return log_score_TE.topk(self.n_proposed, dim=1).indices

    def forward(
        self, x_TD: Tensor, sequences: int = 1, generator: torch.Generator | None = None
    ) -> Routing:
        """Choose experts by Algorithm 1; see `Router.forward`."""
        logits_TE = self.logits(x_TD)
        score_TE, log_score_TE = torch.sigmoid(logits_TE), logsigmoid(logits_TE)
        with torch.no_grad():
            proposed_TM = self.propose(log_score_TE, generator)
            biased_TM = (score_TE + self.bias_E.to(score_TE)).gather(1, proposed_TM)
            experts_TK = proposed_TM.gather(1, biased_TM.topk(self.top_k, dim=1).indices)
            counts_E = counts_of(experts_TK, self.n_experts)
            if self.training:
                self.seen_E += counts_E
        # s' / sum of s', of scores however small
        gates_TK = torch.softmax(log_score_TE.gather(1, experts_TK), dim=1)
        losses = {}
        if self.recipe.z_coefficient:
            losses["z"] = self.recipe.z_coefficient * z_loss(logits_TE)
        if self.recipe.sequence_coefficient:
            losses["sequence"] = self.recipe.sequence_coefficient * sequence_auxiliary_loss(
                score_TE, self.top_k, sequences
            )
        return Routing(experts_TK, gates_TK, None, counts_E, losses)

    def extra_repr(self) -> str:
        """Say what the router was made with, its recipe too."""
        return f"{super().extra_repr()}, {self.recipe!r}"

    @torch.no_grad()
    def after_step(self) -> None:
        """Move the bias by (19) on the counts since the last step, and centre it."""
        short_E = self.seen_E.to(self.bias_E).mean() - self.seen_E.to(self.bias_E)
        size = torch.sqrt((short_E * short_E).mean() + self.recipe.bias_epsilon)
        self.bias_E += self.recipe.bias_rate * short_E / size
        self.bias_E -= self.bias_E.mean()
        self.seen_E.zero_()


def z_loss(logits_TE: Tensor) -> Tensor:
    """Return the mean squared log-sum-exp of the logits, (23) (Zoph et al., arXiv 2202.08906)."""
    return torch.logsumexp(logits_TE, dim=1).square().mean()


def sequence_auxiliary_loss(score_TE: Tensor, top_k: int, sequences: int) -> Tensor:
    """Return the balance loss within sequences (DeepSeek-V3, arXiv 2412.19437, (17) to (20)).

    ``sum_i f_i P_i`` of each sequence, averaged over the sequences: ``f_i`` the share of its
    tokens that have expert ``i`` among their K highest scores, times ``E / K``; ``P_i`` the mean
    over its tokens of the score of ``i`` over the sum of the token's scores. By (18) the K highest
    are those of the clean scores, whatever bias and noise select. It is 1 where the experts are
    balanced.
    """
    n_experts = score_TE.shape[1]
    share_BSE = (score_TE / score_TE.sum(dim=1, keepdim=True)).reshape(sequences, -1, n_experts)
    highest_TK = score_TE.topk(top_k, dim=1).indices
    chosen_TE = torch.zeros_like(score_TE).scatter(1, highest_TK, 1.0)
    often_BE = chosen_TE.reshape(sequences, -1, n_experts).mean(dim=1) * (n_experts / top_k)
    return (often_BE * share_BSE.mean(dim=1)).sum(dim=1).mean()
