"""Routers of this package beside those of transformers; see `oracles`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from moe_ref.lineage import balance, capacity, deepseek, groups, gshard, mixtral, switch
from moe_ref.lineage.linear import Normalisation
from moe_ref.noise import gumbel_like, uniform_like

from .comparing import (
    Pair,
    compares,
    generator_of,
    toy_logits,
)
from .lineages import dense, mask_of, sees_logits, spread


def hf(model: str) -> Any:
    return import_module(f"transformers.models.{model}.modeling_{model}")


def hf_router(router: Any, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
    """Return experts and weights of a router of transformers that has ``weight``."""
    with torch.no_grad():
        router.weight.copy_(torch.eye(logits_TE.shape[1]))
    _, weights_TK, experts_TK = router(logits_TE.clone())
    return experts_TK, weights_TK


@compares("transformers", "MixtralTopKRouter", "MixtralRouter")
def hf_mixtral(seed: int) -> Iterator[Pair]:
    x = toy_logits(seed)
    config = SimpleNamespace(num_experts_per_tok=3, num_local_experts=8, hidden_size=8)
    experts, weights = hf_router(hf("mixtral").MixtralTopKRouter(config), x)
    found = sees_logits(mixtral.MixtralRouter(8, 8, 3))(x)
    yield found.experts_TK, experts
    yield found.gates_TK, weights


@compares("transformers", "Qwen3MoeTopKRouter", "MixtralRouter, NONE and BEFORE_DROPPING")
def hf_qwen3(seed: int) -> Iterator[Pair]:
    x = toy_logits(seed)
    for normalised in (False, True):
        config = SimpleNamespace(
            num_experts_per_tok=3, num_experts=8, hidden_size=8, norm_topk_prob=normalised
        )
        experts, weights = hf_router(hf("qwen3_moe").Qwen3MoeTopKRouter(config), x)
        rule = Normalisation.BEFORE_DROPPING if normalised else Normalisation.NONE
        recipe = mixtral.MixtralRecipe(normalisation=rule)
        found = sees_logits(mixtral.MixtralRouter(8, 8, 3, recipe))(x)
        yield found.experts_TK, experts
        yield found.gates_TK, weights


@compares("transformers", "mixtral load_balancing_loss_func", "AuxiliaryLoss.HF_MIXTRAL")
def hf_mixtral_loss(seed: int) -> Iterator[Pair]:
    x = toy_logits(seed)
    for top_k in (1, 2, 4):
        theirs = hf("mixtral").load_balancing_loss_func((x,), 8, top_k)
        ours = balance.load_balancing_loss(
            torch.softmax(x, dim=1),
            x.topk(top_k, dim=1).indices,
            balance.AuxiliaryLoss.HF_MIXTRAL,
        )
        yield ours / top_k, theirs / top_k


@compares("transformers", "DeepseekV3TopkRouter", "DeepSeekV3Router")
def hf_deepseek_v3(seed: int) -> Iterator[Pair]:
    x = toy_logits(seed, n_experts=16)
    for shift in (0.0, -2.0):
        config = SimpleNamespace(
            num_experts_per_tok=4,
            num_local_experts=16,
            hidden_size=16,
            routed_scaling_factor=2.5,
            n_group=4,
            topk_group=2,
            norm_topk_prob=True,
        )
        bias_E = 0.3 * torch.randn(16, generator=generator_of(seed)) + shift
        theirs = hf("deepseek_v3").DeepseekV3TopkRouter(config)
        theirs.e_score_correction_bias.copy_(bias_E)
        experts, weights = hf_router(theirs, x)
        recipe = deepseek.DeepSeekV3Recipe(groups=groups.ExpertGroups(count=4, kept=2))
        ours = sees_logits(deepseek.DeepSeekV3Router(16, 16, 4, recipe))
        ours.bias_E.copy_(bias_E)
        found = ours(x)
        yield mask_of(found.experts_TK, 16), mask_of(experts, 16)
        yield dense(found, 16) / 2.5, spread(experts, weights, 16) / 2.5


@compares("transformers", "DeepseekV2TopkRouter", "DeepSeekV2Router")
def hf_deepseek_v2(seed: int) -> Iterator[Pair]:
    x = toy_logits(seed, n_experts=16)
    for method in ("greedy", "group_limited_greedy"):
        config = SimpleNamespace(
            num_experts_per_tok=4,
            num_experts=16,
            hidden_size=16,
            routed_scaling_factor=1.0,
            topk_method=method,
            n_group=8,
            topk_group=3,
        )
        experts, weights = hf_router(hf("deepseek_v2").DeepseekV2TopkRouter(config), x)
        limit = groups.ExpertGroups(
            count=8, kept=3, score=groups.GroupScore.HF_DEEPSEEK_V2, mask=groups.GroupMask.ZERO
        )
        recipe = deepseek.DeepSeekV2Recipe(groups=None if method == "greedy" else limit)
        found = sees_logits(deepseek.DeepSeekV2Router(16, 16, 4, recipe))(x)
        yield mask_of(found.experts_TK, 16), mask_of(experts, 16)
        yield dense(found, 16), spread(experts, weights, 16)


@compares("transformers", "SwitchTransformersTop1Router and its two losses", "SwitchRouter")
def hf_switch(seed: int) -> Iterator[Pair]:
    x, module = toy_logits(seed), hf("switch_transformers")
    config = SimpleNamespace(
        num_experts=8,
        expert_capacity=2,
        hidden_size=8,
        router_bias=False,
        router_jitter_noise=0.1,
        router_ignore_padding_tokens=False,
        router_dtype="float32",
    )
    theirs = module.SwitchTransformersTop1Router(config)
    with torch.no_grad():
        theirs.classifier.weight.copy_(torch.eye(8))
    recipe = switch.SwitchRecipe(
        balance_coefficient=1.0,
        z_coefficient=1.0,
        capacity=capacity.Capacity(slots=2),
        local_groups="sequences",
        jitter=0.1,
    )
    ours = sees_logits(switch.SwitchRouter(8, 8, recipe=recipe))
    for training in (False, True):
        ours.train(training)
        theirs.train(training)
        torch.manual_seed(seed)
        dispatched, probability, logits = theirs(x.clone().reshape(4, 12, 8))
        found = ours(x, sequences=4, generator=torch.Generator().manual_seed(seed))
        yield dense(found, 8) > 0.0, dispatched.reshape(48, 8).bool()
        yield dense(found, 8), (dispatched * probability).reshape(48, 8)
        chosen = torch.softmax(logits, dim=-1)
        yield (
            found.losses["balance"],
            module.load_balancing_loss_func(chosen, chosen.argmax(dim=-1)),
        )
        yield found.losses["z"] / 10.0, module.router_z_loss_func(logits) / 10.0


def nllb(x: Tensor, **options: Any) -> Tensor:
    """Return the combining weights of HF NLLB, shape (T, E)."""
    config = SimpleNamespace(
        num_experts=8,
        expert_capacity=5,
        hidden_size=8,
        router_bias=False,
        router_ignore_padding_tokens=False,
        router_dtype="float32",
        normalize_router_prob_before_dropping=False,
        moe_eval_capacity_token_fraction=-1.0,
        **{"second_expert_policy": "all", "batch_prioritized_routing": False, **options},
    )
    return hf("nllb_moe").NllbMoeTop2Router(config).route_tokens(x.clone())[1]


def nllb_like(
    second: gshard.SecondExpert, order: capacity.DropOrder = capacity.DropOrder.GSHARD
) -> gshard.GShardRouter:
    recipe = gshard.GShardRecipe(
        second=second,
        normalisation=Normalisation.AFTER_DROPPING,
        capacity=capacity.Capacity(slots=5, order=order),
        local_groups=1,
    )
    return sees_logits(gshard.GShardRouter(8, 8, recipe=recipe))


@compares("transformers", "NllbMoeTop2Router, all", "GShardRouter, ALL")
def hf_nllb_all(seed: int) -> Iterator[Pair]:
    x = toy_logits(seed)
    yield dense(nllb_like(gshard.SecondExpert.ALL)(x), 8), nllb(x)


@compares("transformers", "NllbMoeTop2Router, random", "GShardRouter, HF_NLLB_RANDOM")
def hf_nllb_random(seed: int) -> Iterator[Pair]:
    x = toy_logits(seed)
    found = nllb_like(gshard.SecondExpert.HF_NLLB_RANDOM)(x, generator=generator_of(seed))
    noise = uniform_like(torch.empty(48, 2), generator_of(seed))[:, 1]
    with patch.object(torch, "rand_like", lambda _: noise):
        yield dense(found, 8), nllb(x, second_expert_policy="random")


@compares("transformers", "NllbMoeTop2Router, sampling", "GShardRouter, GUMBEL")
def hf_nllb_sampling(seed: int) -> Iterator[Pair]:
    x = toy_logits(seed)
    found = nllb_like(gshard.SecondExpert.GUMBEL)(x, generator=generator_of(seed))
    noise = gumbel_like(x, generator_of(seed))
    with patch.object(torch.distributions.gumbel.Gumbel, "rsample", lambda *_: noise):
        yield dense(found, 8), nllb(x, second_expert_policy="sampling")


@compares("transformers", "NllbMoeTop2Router, batch prioritized", "DropOrder.BATCH_PRIORITIZED")
def hf_nllb_prioritized(seed: int) -> Iterator[Pair]:
    x = toy_logits(seed)
    ours = nllb_like(gshard.SecondExpert.ALL, capacity.DropOrder.BATCH_PRIORITIZED)
    yield dense(ours(x), 8), nllb(x, batch_prioritized_routing=True)
