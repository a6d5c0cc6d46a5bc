"""Experts in groups, such as those of one node, of which a token reaches a few.

DeepSeek-V2, arXiv 2405.04434, section 2.2.2 (devices); DeepSeek-V3, arXiv 2412.19437, section
2.1.2 (nodes). The limit is a mask on what is chosen, not something that the router learns.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from moe_ref.errors import MoeRefError

__all__ = ["ExpertGroups", "GroupMask", "GroupScore"]


class GroupScore(StrEnum):
    """What a group is ranked by, after a library.

    Attributes
    ----------
    HF_DEEPSEEK_V3
        The sum of its two highest scores (transformers, torchtitan).
    MEGATRON
        The sum of its ``K / kept`` highest scores (Megatron-Core, DeepSeek-V3's text). The same
        for DeepSeek-V3, where K is 8 and 4 groups are kept.
    HF_DEEPSEEK_V2
        Its highest score.
    """

    HF_DEEPSEEK_V3 = "hf-deepseek-v3"
    MEGATRON = "megatron"
    HF_DEEPSEEK_V2 = "hf-deepseek-v2"


class GroupMask(StrEnum):
    """What stands for the scores of a group that is not kept.

    Attributes
    ----------
    MINUS_INFINITY
        Never chosen (Megatron-Core, torchtitan, transformers since its pull request 45441).
    ZERO
        As DeepSeek-V2 and older ports of DeepSeek-V3. A negative bias makes scores below 0, and
        then the masked ones win.
    """

    MINUS_INFINITY = "minus-infinity"
    ZERO = "zero"


class ExpertGroups(BaseModel):
    """Groups of experts, and how many of them a token reaches.

    Attributes
    ----------
    count : int
        Groups, of equal size, one after the other.
    kept : int
        Groups that a token may reach.
    score : GroupScore
        What they are ranked by.
    mask : GroupMask
        What stands for the scores of the others.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    count: int = Field(ge=1)
    kept: int = Field(ge=1)
    score: GroupScore = GroupScore.HF_DEEPSEEK_V3
    mask: GroupMask = GroupMask.MINUS_INFINITY

    @model_validator(mode="after")
    def _keeps_some(self) -> ExpertGroups:
        if self.kept > self.count:
            raise MoeRefError(
                f"kept is {self.kept}, but must be at most count = {self.count}; "
                f"the nearest legal value is {self.count}."
            )
        return self

    def check(self, n_experts: int, top_k: int) -> None:
        """Raise `MoeRefError` where ``n_experts`` experts do not group so, or ``top_k`` not fit."""
        if n_experts % self.count:
            nearest = min(
                (d for d in range(1, n_experts + 1) if n_experts % d == 0),
                key=lambda d: abs(d - self.count),
            )
            raise MoeRefError(
                f"count is {self.count}, but must divide n_experts = {n_experts}; "
                f"the nearest legal value is {nearest}."
            )
        size, summed = n_experts // self.count, self.summed(top_k)
        if not 1 <= summed <= size:
            raise MoeRefError(
                f"a group is scored by {summed} of its experts, but must be by 1 to {size}, its "
                f"size (K = {top_k}, kept = {self.kept}); "
                f"the score {GroupScore.HF_DEEPSEEK_V2} is legal."
            )
        if top_k > self.kept * size:
            raise MoeRefError(
                f"kept is {self.kept}, but {self.kept} groups of {size} hold fewer than "
                f"top_k = {top_k} experts; the nearest legal value is {-(-top_k // size)}."
            )

    def summed(self, top_k: int) -> int:
        """Return how many of its highest scores rank a group."""
        of = {
            GroupScore.HF_DEEPSEEK_V3: 2,
            GroupScore.MEGATRON: top_k // self.kept,
            GroupScore.HF_DEEPSEEK_V2: 1,
        }
        return of[self.score]

    def masked(self, choice_TE: Tensor, top_k: int) -> Tensor:
        """Return the scores, those of groups that a token does not reach masked."""
        tokens, n_experts = choice_TE.shape
        grouped_TNE = choice_TE.reshape(tokens, self.count, -1)
        rank_TN = grouped_TNE.topk(self.summed(top_k), dim=2).values.sum(dim=2)
        kept_TN = torch.zeros_like(rank_TN, dtype=torch.bool)
        kept_TN = kept_TN.scatter(1, rank_TN.topk(self.kept, dim=1).indices, True)
        other = 0.0 if self.mask is GroupMask.ZERO else -torch.inf
        return grouped_TNE.masked_fill(~kept_TN[:, :, None], other).reshape(tokens, n_experts)
