"""GShard's top 2 (Lepikhin et al., arXiv 2006.16668), and ST-MoE's top n (arXiv 2202.08906)."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

import torch
from torch import Tensor

from moe_ref.errors import MoeRefError
from moe_ref.lineage.balance import AuxiliaryLoss
from moe_ref.lineage.capacity import Capacity, CapacityRounding
from moe_ref.lineage.linear import (
    LineageRecipe,
    LinearRouter,
    LocalGroups,
    Normalisation,
    NotNegative,
    Positive,
)
from moe_ref.noise import gumbel_like, uniform_like
from moe_ref.routing import Routing

__all__ = ["GShardRecipe", "GShardRouter", "SecondExpert", "StMoeRecipe", "StMoeRouter"]


class SecondExpert(StrEnum):
    """Which second expert a token takes, and whether it is sent there; after a library.

    ``p`` is the probability of the second expert, ``g = p / (p_1 + p)`` its gate, ``u`` uniform
    in [0, 1). With more than two experts it holds for each after the first, and gates are over
    their sum.

    Attributes
    ----------
    ALL
        The second highest, always (``all`` of HF NLLB and lucidrains, DeepSpeed without sampling).
    GSHARD
        The second highest, sent if ``2 g > u`` (Algorithm 1).
    HF_NLLB_RANDOM
        The second highest, sent if ``2 p > u`` (``random`` of HF NLLB; ``p`` is not normalised).
    ST_MOE
        The second highest, sent if ``u < g / threshold`` (``random`` of Mesh TensorFlow and
        lucidrains; ST-MoE).
    MESH_THRESHOLD
        The second highest, sent if ``g > threshold`` (``threshold`` of Mesh TensorFlow; that of
        lucidrains' port fails on its shapes).
    GUMBEL
        Drawn by its probability, that is the highest of logits plus Gumbel noise, and always sent
        (fairscale, DeepSpeed, ``sampling`` of HF NLLB). The last two add the noise to the
        logits of the caller; here they stay as they are.
    """

    ALL = "all"
    GSHARD = "gshard"
    HF_NLLB_RANDOM = "hf-nllb-random"
    ST_MOE = "st-moe"
    MESH_THRESHOLD = "mesh-threshold"
    GUMBEL = "gumbel"


class GShardRecipe(LineageRecipe):
    """The options of GShard, with those of its Algorithm 1.

    Attributes
    ----------
    second : SecondExpert
        Whether a token gets its second expert, in training.
    eval_second : SecondExpert or None
        The same outside training; None for no difference.
    threshold : float
        Of ST_MOE and MESH_THRESHOLD.
    """

    balance: AuxiliaryLoss = AuxiliaryLoss.FAIRSCALE
    balance_coefficient: NotNegative = 1e-2
    normalisation: Normalisation = Normalisation.BEFORE_DROPPING
    capacity: Capacity | None = Capacity(rounding=CapacityRounding.FAIRSCALE)
    local_groups: LocalGroups = "sequences"
    second: SecondExpert = SecondExpert.GSHARD
    eval_second: SecondExpert | None = None
    threshold: Positive = 0.2


class StMoeRecipe(GShardRecipe):
    """The options of ST-MoE: its threshold, capacity factors and coefficients."""

    balance: AuxiliaryLoss = AuxiliaryLoss.SWITCH
    z_coefficient: NotNegative = 1e-3
    capacity: Capacity | None = Capacity(
        factor=1.25, eval_factor=2.0, rounding=CapacityRounding.LUCIDRAINS
    )
    second: SecondExpert = SecondExpert.ST_MOE


class GShardRouter(LinearRouter):
    """The likeliest expert, and perhaps the second; capacity in local groups.

    ``kept_TK`` is False also where a token is not sent to its second expert, which `counts_E`
    then leaves out.
    """

    recipe: GShardRecipe
    default: ClassVar[type[GShardRecipe]] = GShardRecipe
    most: ClassVar[int | None] = 2

    def __init__(
        self, d_model: int, n_experts: int, top_k: int = 2, recipe: GShardRecipe | None = None
    ) -> None:
        if top_k < 2 or (self.most is not None and top_k > self.most):
            legal = "must be 2" if self.most else "must be at least 2"
            raise MoeRefError(f"top_k is {top_k}, but {legal}; the nearest legal value is 2.")
        super().__init__(d_model, n_experts, top_k, recipe or self.default())

    def forward(
        self, x_TD: Tensor, sequences: int = 1, generator: torch.Generator | None = None
    ) -> Routing:
        """Choose experts by Algorithm 1; see `Router.forward`."""
        logits_TE = self.logits(x_TD)
        score_TE = torch.softmax(logits_TE, dim=1)
        second = self.recipe.second
        if not self.training and self.recipe.eval_second is not None:
            second = self.recipe.eval_second
        with torch.no_grad():
            experts_TK = self.choose(logits_TE, second, generator)
            sent_TK = self.sent(score_TE.gather(1, experts_TK), second, generator)
        return self.routing(logits_TE, score_TE, experts_TK, sequences, sent_TK=sent_TK)

    def choose(
        self, logits_TE: Tensor, second: SecondExpert, generator: torch.Generator | None
    ) -> Tensor:
        """Return the experts of each token, shape (T, K), the likeliest first."""
        if second is not SecondExpert.GUMBEL:
            return logits_TE.topk(self.top_k, dim=1).indices
        first_T1 = logits_TE.argmax(dim=1, keepdim=True)
        noisy_TE = logits_TE + gumbel_like(logits_TE, generator)
        others_TE = noisy_TE.scatter(1, first_T1, -torch.inf)
        return torch.cat([first_T1, others_TE.topk(self.top_k - 1, dim=1).indices], dim=1)

    def sent(
        self, score_TK: Tensor, second: SecondExpert, generator: torch.Generator | None
    ) -> Tensor:
        """Return which choices are sent, shape (T, K), bool; the first is always."""
        if second in (SecondExpert.ALL, SecondExpert.GUMBEL):
            return torch.ones_like(score_TK, dtype=torch.bool)
        gate_TK = score_TK / score_TK.sum(dim=1, keepdim=True)
        if second is SecondExpert.MESH_THRESHOLD:
            sent_TK = gate_TK > self.recipe.threshold
        else:
            chance = {
                SecondExpert.GSHARD: 2.0 * gate_TK,
                SecondExpert.HF_NLLB_RANDOM: 2.0 * score_TK,
                SecondExpert.ST_MOE: gate_TK / self.recipe.threshold,
            }[second]
            sent_TK = uniform_like(chance, generator) < chance
        sent_TK[:, 0] = True
        return sent_TK


class StMoeRouter(GShardRouter):
    """GShard's router with a threshold, a z-loss and any number of experts."""

    default: ClassVar[type[GShardRecipe]] = StMoeRecipe
    most: ClassVar[int | None] = None
