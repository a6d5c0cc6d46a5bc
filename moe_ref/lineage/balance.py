"""Losses that pull a router towards equal loads, and the scale that each library gives them."""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

__all__ = ["AuxiliaryLoss", "cv_squared", "load_balancing_loss"]


class AuxiliaryLoss(StrEnum):
    """The scale of ``sum_i f_i P_i``, after a library that has it.

    ``P_i`` is the mean score of expert ``i`` over the tokens, ``f_i`` the share of the tokens that
    chose it. All tokens count, those dropped as well.

    Attributes
    ----------
    SWITCH
        ``E sum f P`` with ``f`` of first choices alone (Fedus et al., arXiv 2101.03961, (4) to
        (6); the HF Switch and NLLB models, DeepSpeed's top-1 and top-2 gates, both packages of
        lucidrains). 1 at balance.
    FAIRSCALE
        ``(1 / E) sum f P``, first choices alone: the mean over experts that GShard prints
        (arXiv 2006.16668, Algorithm 1). ``E**2`` times smaller than SWITCH; ``1 / E**2`` at
        balance.
    MEGATRON
        ``E sum f P`` with ``f`` of all K choices over K (Megatron-Core, DeepSpeed's top-k gate,
        DeepSeek-V2's balance of experts). 1 at balance.
    HF_MIXTRAL
        ``E sum f P`` with ``f`` of all K choices (transformers: Mixtral, Qwen, and others). K at
        balance, E where all tokens choose the same K experts with all of their probability.
    """

    SWITCH = "switch"
    FAIRSCALE = "fairscale"
    MEGATRON = "megatron"
    HF_MIXTRAL = "hf-mixtral"


def load_balancing_loss(
    score_TE: Tensor,
    experts_TK: Tensor,
    scale: AuxiliaryLoss = AuxiliaryLoss.SWITCH,
    local_groups: int = 1,
) -> Tensor:
    """Return the auxiliary loss, averaged over the local groups of tokens.

    Parameters
    ----------
    score_TE : Tensor
        Scores that sum to 1 for each token.
    experts_TK : Tensor of int64
        Experts of each token, the first choice first.
    scale : AuxiliaryLoss
        The library whose scale is meant.
    local_groups : int
        Groups of tokens, one after the other; it divides T.
    """
    n_experts, top_k = score_TE.shape[1], experts_TK.shape[1]
    first = scale in (AuxiliaryLoss.SWITCH, AuxiliaryLoss.FAIRSCALE)
    counted_TK = experts_TK[:, :1] if first else experts_TK
    chosen_TE = torch.zeros_like(score_TE).scatter(1, counted_TK, 1.0)
    often_LE = chosen_TE.reshape(local_groups, -1, n_experts).mean(dim=1)
    score_LE = score_TE.reshape(local_groups, -1, n_experts).mean(dim=1)
    total = (often_LE * score_LE).sum(dim=1).mean()
    if scale is AuxiliaryLoss.FAIRSCALE:
        return total / n_experts
    return total * n_experts / (top_k if scale is AuxiliaryLoss.MEGATRON else 1)


def cv_squared(amount_E: Tensor, epsilon: float = 1e-10) -> Tensor:
    """Return the squared coefficient of variation (Shazeer et al., arXiv 1701.06538, (7)).

    The variance is that of the population, over E: ports that divide by ``E - 1`` are
    ``E / (E - 1)`` times too high.
    """
    mean = amount_E.mean()
    return (amount_E - mean).square().mean() / (mean.square() + epsilon)
