"""Routers of this package beside those of public libraries, on the same numbers.

Each comparison returns pairs of what this package and the library give; `largest_difference` says
how far they are apart. ``python -m tests.moe_ref.oracles`` prints the table of
docs/theory/routers.md for the libraries that are installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from moe_ref.lineage import balance, capacity, deepseek, groups, gshard, mixtral, sinkhorn, switch
from moe_ref.lineage.linear import Normalisation
from moe_ref.noise import gumbel_like, uniform_like
from moe_ref.paper_router import z_loss
from moe_ref.routing import Routing

from . import oracles_transformers  # noqa: F401 - it registers its comparisons
from .comparing import (
    COMPARISONS,
    LIBRARIES,
    Pair,
    compares,
    filled_with,
    generator_of,
    largest_difference,
    present,
    toy_logits,
)
from .lineages import dense, mask_of, sees_logits

# ---------------------------------------------------------------- megatron-core


def mcore() -> Any:
    return import_module("megatron.core.transformer.moe.moe_utils")


@compares("megatron-core", "topk_routing_with_score_function, softmax", "MixtralRouter")
def mcore_softmax(seed: int) -> Iterator[Pair]:
    x = toy_logits(seed)
    for before in (False, True):
        probs, chosen = mcore().topk_routing_with_score_function(
            x.clone(), 2, use_pre_softmax=before, scaling_factor=1.5
        )
        rule = Normalisation.NONE if before else Normalisation.BEFORE_DROPPING
        recipe = mixtral.MixtralRecipe(normalisation=rule, scaling=1.5)
        found = sees_logits(mixtral.MixtralRouter(8, 8, 2, recipe))(x)
        yield mask_of(found.experts_TK, 8), chosen
        yield dense(found, 8), probs


@compares("megatron-core", "topk_routing_with_score_function, sigmoid", "DeepSeekV3Router")
def mcore_sigmoid(seed: int) -> Iterator[Pair]:
    x = toy_logits(seed, n_experts=16)
    bias_E = 0.3 * torch.randn(16, generator=generator_of(seed)) - 1.0
    for top_k, kept in ((4, 2), (6, 3), (2, 2), (4, None)):
        limit = None
        if kept is not None:
            limit = groups.ExpertGroups(count=4, kept=kept, score=groups.GroupScore.MEGATRON)
        probs, chosen = mcore().topk_routing_with_score_function(
            x.clone(),
            top_k,
            num_groups=4 if kept else None,
            group_topk=kept,
            score_function="sigmoid",
            expert_bias=bias_E,
        )
        recipe = deepseek.DeepSeekV3Recipe(groups=limit, scaling=1.0)
        ours = sees_logits(deepseek.DeepSeekV3Router(16, 16, top_k, recipe))
        ours.bias_E.copy_(bias_E)
        found = ours(x)
        yield mask_of(found.experts_TK, 16), chosen
        yield dense(found, 16), probs


@compares("megatron-core", "switch_load_balancing_loss_func", "AuxiliaryLoss.MEGATRON")
def mcore_loss(seed: int) -> Iterator[Pair]:
    x = toy_logits(seed)
    score_TE = torch.softmax(x, dim=1)
    for top_k in (1, 2, 4):
        chosen_TK = x.topk(top_k, dim=1).indices
        counts_E = torch.bincount(chosen_TK.flatten(), minlength=8)
        theirs = mcore().switch_load_balancing_loss_func(score_TE, counts_E, 48, top_k, 8, 1.0)
        yield (
            balance.load_balancing_loss(score_TE, chosen_TK, balance.AuxiliaryLoss.MEGATRON),
            theirs,
        )


@compares("megatron-core", "z_loss_func", "z_loss")
def mcore_z_loss(seed: int) -> Iterator[Pair]:
    x = toy_logits(seed)
    yield z_loss(x) / 10.0, mcore().z_loss_func(x, 0.1)


@compares("megatron-core", "sinkhorn", "sinkhorn")
def mcore_sinkhorn(seed: int) -> Iterator[Pair]:
    x = toy_logits(seed)
    yield 48.0 * sinkhorn.sinkhorn(x), 48.0 * mcore().sinkhorn(x.clone())


@compares("megatron-core", "get_capacity", "CapacityRounding.MEGATRON")
def mcore_capacity(seed: int) -> Iterator[Pair]:
    for tokens, n_experts, top_k, factor in capacity_cases(seed):
        theirs = mcore().get_capacity(tokens * top_k, n_experts, factor)
        yield (
            whole(capacity.CapacityRounding.MEGATRON, tokens, n_experts, top_k, factor),
            (torch.tensor(theirs)),
        )


@compares("megatron-core", "apply_router_token_dropping, probs", "DropOrder.MEGATRON_PROBS")
def mcore_dropping(seed: int) -> Iterator[Pair]:
    x = toy_logits(seed)
    for factor in (0.5, 1.0, 1.25, 6.0):
        probs, chosen = mcore().topk_routing_with_score_function(x.clone(), 2)
        probs, kept = mcore().apply_router_token_dropping(probs, chosen, 2, factor, "probs")
        room = capacity.Capacity(factor=factor, order=capacity.DropOrder.MEGATRON_PROBS)
        recipe = mixtral.MixtralRecipe(capacity=room)
        found = dense(sees_logits(mixtral.MixtralRouter(8, 8, 2, recipe))(x), 8)
        yield found > 0.0, kept
        yield found, probs


@compares("megatron-core", "get_updated_expert_bias", "updated_bias", 1e-9)
def mcore_bias(seed: int) -> Iterator[Pair]:
    counts_E = torch.randint(0, 9, (8,), generator=generator_of(seed)).to(torch.float32)
    bias_E = torch.randn(8, generator=generator_of(seed))
    module = mcore()
    alone = patch.object(module.torch.distributed, "all_reduce", lambda *_, **__: None)
    group = "get_tensor_and_data_parallel_group"
    with alone, patch.object(module.parallel_state, group, lambda **_: None):
        theirs = module.get_updated_expert_bias(counts_E, bias_E, 1e-3)
    yield deepseek.updated_bias(bias_E, counts_E, 1e-3), theirs


# ---------------------------------------------------------------- deepspeed


def ds() -> Any:
    return import_module("deepspeed.moe.sharded_moe")


def capacity_cases(seed: int) -> list[tuple[int, int, int, float]]:
    generator = generator_of(seed)
    drawn = torch.randint(1, 400, (40, 3), generator=generator).tolist()
    random = [(t, 1 + e % 64, 1 + k % 8, f) for t, e, k in drawn for f in (0.5, 1.0, 1.1, 1.25)]
    return [(10, 4, 1, 1.0), (1000, 10, 1, 1.1), (4096, 64, 8, 1.25), *random]


def whole(
    rounding: capacity.CapacityRounding, tokens: int, n_experts: int, top_k: int, factor: float
) -> Tensor:
    room = capacity.Capacity(factor=factor, rounding=rounding)
    return torch.tensor(room.slots_for(tokens, n_experts, top_k))


@compares("deepspeed", "_capacity", "CapacityRounding.DEEPSPEED")
def ds_capacity(seed: int) -> Iterator[Pair]:
    for tokens, n_experts, top_k, factor in capacity_cases(seed):
        theirs = ds()._capacity(
            torch.empty(tokens, n_experts), torch.tensor(factor * top_k), torch.tensor(0)
        )
        ours = whole(capacity.CapacityRounding.DEEPSPEED, tokens, n_experts, top_k, factor)
        yield ours, theirs


def ds_room(factor: float, order: capacity.DropOrder) -> capacity.Capacity:
    return capacity.Capacity(
        factor=factor, rounding=capacity.CapacityRounding.DEEPSPEED, order=order
    )


@compares("deepspeed", "top1gating", "SwitchRouter")
def ds_top1(seed: int) -> Iterator[Pair]:
    """Without random token selection, its top-k over ties keeps any tokens, but as many."""
    x = toy_logits(seed)
    for factor in (0.75, 8.0):
        loss, combined, _, counts = ds().top1gating(x.clone(), factor, 0, use_rts=False)
        recipe = switch.SwitchRecipe(
            balance_coefficient=1.0, capacity=ds_room(factor, capacity.DropOrder.GSHARD)
        )
        found = sees_logits(switch.SwitchRouter(8, 8, recipe=recipe))(x)
        gates_TE, theirs_TE = dense(found, 8), combined.sum(dim=2)
        yield (gates_TE > 0.0).sum(dim=0), (theirs_TE > 0.0).sum(dim=0)
        if factor == 8.0:
            yield gates_TE, theirs_TE
        yield found.losses["balance"], loss
        yield found.counts_E, counts


def ds_like_top2(second: gshard.SecondExpert) -> gshard.GShardRouter:
    recipe = gshard.GShardRecipe(
        second=second,
        balance=balance.AuxiliaryLoss.SWITCH,
        balance_coefficient=1.0,
        normalisation=Normalisation.AFTER_DROPPING,
        capacity=ds_room(0.75, capacity.DropOrder.GSHARD),
        local_groups=1,
    )
    return sees_logits(gshard.GShardRouter(8, 8, recipe=recipe))


@compares("deepspeed", "top2gating", "GShardRouter, ALL and GUMBEL")
def ds_top2(seed: int) -> Iterator[Pair]:
    x = toy_logits(seed)
    noise = gumbel_like(x, generator_of(seed))
    for second in (gshard.SecondExpert.ALL, gshard.SecondExpert.GUMBEL):
        found = ds_like_top2(second)(x, generator=generator_of(seed))
        sampling = second is gshard.SecondExpert.GUMBEL
        with patch.object(ds(), "gumbel_rsample", lambda *_, **__: noise):
            loss, combined, _, counts = ds().top2gating(
                x.clone(), 0.75, 0, top2_2nd_expert_sampling=sampling
            )
        yield dense(found, 8), combined.sum(dim=2)
        yield found.losses["balance"], loss
        yield found.counts_E, counts


@compares("deepspeed", "topkgating, probs and position", "MixtralRouter")
def ds_topk(seed: int) -> Iterator[Pair]:
    x = toy_logits(seed)
    orders = {
        "probs": capacity.DropOrder.DEEPSPEED_PROBS,
        "position": capacity.DropOrder.POSITION,
    }
    for policy, order in orders.items():
        loss, combined, _, counts = ds().topkgating(x.clone(), 3, 0.75, 0, drop_policy=policy)
        recipe = mixtral.MixtralRecipe(
            balance=balance.AuxiliaryLoss.MEGATRON,
            balance_coefficient=1.0,
            normalisation=Normalisation.AFTER_DROPPING,
            capacity=ds_room(0.75, order),
        )
        found = sees_logits(mixtral.MixtralRouter(8, 8, 3, recipe))(x)
        yield dense(found, 8), combined.sum(dim=2)
        yield found.losses["balance"], loss
        yield found.counts_E, counts


# ---------------------------------------------------------------- fairscale


@compares("fairscale", "top2gating", "GShardRouter, GUMBEL, FAIRSCALE")
def fairscale_top2(seed: int) -> Iterator[Pair]:
    module = import_module("fairscale.nn.moe.top2gate")
    x = toy_logits(seed)
    recipe = gshard.GShardRecipe(
        second=gshard.SecondExpert.GUMBEL,
        balance=balance.AuxiliaryLoss.FAIRSCALE,
        balance_coefficient=1.0,
        normalisation=Normalisation.AFTER_DROPPING,
        local_groups=1,
    )
    ours = sees_logits(gshard.GShardRouter(8, 8, recipe=recipe))
    found = ours(x, generator=generator_of(seed))
    noise = gumbel_like(x, generator_of(seed))
    with patch.object(module, "gumbel_rsample", lambda *_, **__: noise):
        loss, combined, _ = module.top2gating(x.clone())
    yield dense(found, 8), combined.sum(dim=2)
    yield 64.0 * found.losses["balance"], 64.0 * loss


# ---------------------------------------------------------------- lucidrains


@compares("mixture-of-experts", "Top2Gating, all and random", "GShardRouter, ALL and ST_MOE")
def lucidrains_top2(seed: int) -> Iterator[Pair]:
    module = import_module("mixture_of_experts.mixture_of_experts")
    x = toy_logits(seed)
    policies = {
        "all": gshard.SecondExpert.ALL,
        "random": gshard.SecondExpert.ST_MOE,
    }
    room = capacity.Capacity(
        factor=1.25, eval_factor=2.0, rounding=capacity.CapacityRounding.LUCIDRAINS
    )
    for policy, second in policies.items():
        recipe = gshard.GShardRecipe(
            second=second,
            balance=balance.AuxiliaryLoss.SWITCH,
            balance_coefficient=1.0,
            capacity=room,
        )
        ours = sees_logits(gshard.GShardRouter(8, 8, recipe=recipe))
        theirs = module.Top2Gating(8, 8, second_policy_train=policy)
        with torch.no_grad():
            theirs.w_gating.copy_(torch.eye(8))
        found = ours(x, sequences=2, generator=generator_of(seed))
        noise = uniform_like(torch.empty(48, 2), generator_of(seed))[:, 1].reshape(2, 24)
        with filled_with(noise):
            _, combined, loss = theirs(x.reshape(2, 24, 8))
        yield dense(found, 8), combined.sum(dim=-1).reshape(48, 8)
        yield found.losses["balance"], loss


@compares("st-moe-pytorch", "TopNGating", "StMoeRouter")
def st_moe(seed: int) -> Iterator[Pair]:
    module = import_module("st_moe_pytorch.st_moe_pytorch")
    x = toy_logits(seed)
    for top_k in (2, 3):
        theirs = module.TopNGating(8, 8, top_n=top_k, straight_through_dispatch_tensor=False)
        recipe = gshard.StMoeRecipe(balance_coefficient=1.0, z_coefficient=1.0)
        ours = sees_logits(gshard.StMoeRouter(8, 8, top_k, recipe))
        with torch.no_grad():
            theirs.to_gates.weight.copy_(torch.eye(8))
        found = ours(x, sequences=2, generator=generator_of(seed))
        noise_TK = uniform_like(torch.empty(48, top_k), generator_of(seed))
        with filled_with(noise_TK.T.reshape(top_k, 2, 24)):
            _, combined, loss, z = theirs(x.reshape(2, 24, 8))
        yield dense(found, 8), combined.sum(dim=-1).reshape(48, 8)
        yield after_dropping(found, torch.softmax(x, dim=1)), loss
        yield found.losses["z"] / 10.0, z / 10.0


def after_dropping(found: Routing, score_TE: Tensor) -> Tensor:
    """Return the auxiliary loss of first choices that have room.

    The package means all first choices, but takes them from a view that is then changed.
    """
    assert found.kept_TK is not None
    chosen_TE = mask_of(found.experts_TK[:, :1], 8) & found.kept_TK[:, :1]
    often_LE = chosen_TE.reshape(2, 24, 8).to(score_TE).mean(dim=1)
    return 8.0 * (often_LE * score_TE.reshape(2, 24, 8).mean(dim=1)).sum(dim=1).mean()


# ---------------------------------------------------------------- table


def main() -> None:
    """Print how far this package and each installed library are apart."""
    torch.set_num_threads(1)
    for library in LIBRARIES:
        print(f"{library} {present(library) or 'is not installed'}")  # noqa: T201
    for comparison in COMPARISONS:
        if present(comparison.library):
            apart = largest_difference(comparison)
            print(  # noqa: T201
                f"{comparison.library} | {comparison.function} | {comparison.ours} | {apart:.1e}"
            )


if __name__ == "__main__":
    main()
