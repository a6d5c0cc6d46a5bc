"""The lineage against numbers that libraries and papers gave, kept in ``published_routing.json``.

No library is needed; `oracles` compares with those that are installed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from moe_ref import (  # noqa: E402
    AuxiliaryLoss,
    BiasUpdate,
    Capacity,
    CapacityRounding,
    DeepSeekV3Recipe,
    DeepSeekV3Router,
    ExpertGroups,
    GroupMask,
    GroupScore,
    GShardRecipe,
    GShardRouter,
    MixtralRecipe,
    MixtralRouter,
    Normalisation,
    SecondExpert,
    SwitchRecipe,
    SwitchRouter,
    cv_squared,
    load_balancing_loss,
    sinkhorn,
    updated_bias,
    z_loss,
)

from .lineages import dense, mask_of, sees_logits, spread  # noqa: E402

Given = dict[str, Any]
SIX_DIGITS = 2e-6


@pytest.fixture(scope="module")
def given() -> Given:
    path = Path(__file__).with_name("published_routing.json")
    return dict(json.loads(path.read_text()))


@pytest.fixture
def toy(given: Given) -> Any:
    return torch.tensor(given["toy_logits"], dtype=torch.float64)


def near(ours: Any, theirs: Any, tolerance: float = SIX_DIGITS) -> bool:
    return bool((ours - torch.as_tensor(theirs, dtype=ours.dtype)).abs().max() <= tolerance)


# ---------------------------------------------------------------- gates


def test_mixtral(given: Given, toy: Any) -> None:
    found = sees_logits(MixtralRouter(8, 8, 2))(toy)
    assert found.experts_TK.tolist() == given["mixtral"]["experts"]
    assert near(found.gates_TK, given["mixtral"]["gates"])


def test_qwen3_without_normalisation(given: Given, toy: Any) -> None:
    recipe = MixtralRecipe(normalisation=Normalisation.NONE)
    found = sees_logits(MixtralRouter(8, 8, 2, recipe))(toy)
    assert near(found.gates_TK, given["qwen3_not_normalised"])


@pytest.mark.parametrize("case", ["deepseek_v3", "deepseek_v3_biased"])
def test_deepseek_v3_in_groups(given: Given, toy: Any, case: str) -> None:
    recipe = DeepSeekV3Recipe(groups=ExpertGroups(count=4, kept=2), scaling=2.5)
    router = sees_logits(DeepSeekV3Router(8, 8, 2, recipe))
    router.bias_E.copy_(torch.tensor(given[case].get("bias", [0.0] * 8)))
    expected = spread(given[case]["experts"], given[case]["gates"], 8)
    assert near(dense(router(toy), 8), expected)


def test_deepseek_v3_as_megatron_without_groups(given: Given, toy: Any) -> None:
    case = given["megatron_sigmoid"]
    found = sees_logits(DeepSeekV3Router(8, 8, 2, DeepSeekV3Recipe(scaling=1.0)))(toy)
    assert near(dense(found, 8), spread(case["experts"], case["gates"], 8))


def test_a_group_score_changes_who_is_chosen(given: Given, toy: Any) -> None:
    """With K 2 and 2 groups Megatron ranks a group by one expert, HF by two."""

    def third(kept: int, score: GroupScore) -> list[int]:
        recipe = DeepSeekV3Recipe(groups=ExpertGroups(count=4, kept=kept, score=score))
        found = sees_logits(DeepSeekV3Router(8, 8, 2, recipe))(toy)
        return sorted(found.experts_TK[2].tolist())

    assert third(2, GroupScore.MEGATRON) == given["megatron_groups_token_3"]["kept_2"]
    assert third(2, GroupScore.HF_DEEPSEEK_V3) == sorted(given["deepseek_v3"]["experts"][2])
    assert third(1, GroupScore.MEGATRON) == third(1, GroupScore.HF_DEEPSEEK_V3)
    # the best expert of all is out of reach: the limit is a mask, nothing learnt
    assert int(toy[2].argmax()) not in third(2, GroupScore.HF_DEEPSEEK_V3)


@pytest.mark.parametrize("mask", GroupMask)
def test_report_40_a_mask_of_zero_wins_under_a_negative_bias(given: Given, mask: GroupMask) -> None:
    case = given["negative_bias"]
    recipe = DeepSeekV3Recipe(
        groups=ExpertGroups(count=case["groups"], kept=case["kept"], mask=mask)
    )
    router = sees_logits(DeepSeekV3Router(8, 8, 2, recipe))
    router.bias_E.fill_(case["bias"])
    chosen = mask_of(router(torch.tensor([case["logits"]])).experts_TK, 8)[0]
    if mask is GroupMask.MINUS_INFINITY:
        assert chosen.nonzero().flatten().tolist() == case[mask]
    else:
        # four zeros tie for two places, none of them in the groups that are kept
        assert not chosen[case[GroupMask.MINUS_INFINITY]].any()
        zeros = [2, 3, 6, 7]
        assert set(chosen.nonzero().flatten().tolist()) <= set(zeros)
        assert set(case[mask]) <= set(zeros)


# ---------------------------------------------------------------- losses


@pytest.mark.parametrize("scale", AuxiliaryLoss)
def test_the_scales_of_the_auxiliary_loss(given: Given, toy: Any, scale: AuxiliaryLoss) -> None:
    score_TE = torch.softmax(toy, dim=1)
    loss = load_balancing_loss(score_TE, toy.topk(2, dim=1).indices, scale)
    assert loss.item() == pytest.approx(given["losses"][scale], rel=1e-6)


def test_z_loss_and_importance(given: Given, toy: Any) -> None:
    assert z_loss(toy).item() == pytest.approx(given["losses"]["z"], rel=1e-6)
    importance_E = torch.softmax(toy, dim=1).sum(dim=0)
    expected = given["losses"]["importance_cv2_full_softmax"]
    assert cv_squared(importance_E).item() == pytest.approx(expected, rel=1e-6)


def test_report_47_the_constants_of_the_switch_tests(given: Given) -> None:
    case = given["hf_switch_tests"]
    probs, experts = torch.tensor(case["router_probs"]), torch.tensor(case["experts"])
    assert load_balancing_loss(probs, experts[:, None]).item() == pytest.approx(
        case["balance"], abs=1e-5
    )
    assert z_loss(torch.tensor(case["logits"])).item() == pytest.approx(case["z"], abs=1e-5)


def test_report_47_the_router_of_the_switch_tests(given: Given) -> None:
    case = given["hf_switch_tests"]
    recipe = SwitchRecipe(
        balance_coefficient=1.0,
        z_coefficient=1.0,
        capacity=Capacity(slots=4),
        local_groups="sequences",
    )
    router = SwitchRouter(4, 2, recipe=recipe)
    with torch.no_grad():
        router.weight_ED.copy_(torch.tensor(case["router_weight"]))
    losses = router(torch.tensor(case["router_input"]), sequences=2).losses
    assert losses["balance"].item() == pytest.approx(case["router_balance"], abs=1e-5)
    assert losses["z"].item() == pytest.approx(case["router_z"], abs=1e-5)


def test_the_squared_coefficient_of_variation(given: Given) -> None:
    for amounts, expected, unbiased in given["cv_squared"]:
        amount_E = torch.tensor(amounts, dtype=torch.float64)
        found = cv_squared(amount_E).item()
        assert found == pytest.approx(expected, abs=1e-9)
        if unbiased is not None:
            assert found * len(amounts) / (len(amounts) - 1) == pytest.approx(unbiased, abs=1e-5)


# ---------------------------------------------------------------- capacity


def test_switch_drops_the_last_of_two(given: Given, toy: Any) -> None:
    recipe = SwitchRecipe(capacity=Capacity(factor=1.0))
    found = sees_logits(SwitchRouter(8, 8, recipe=recipe))(toy)
    assert found.kept_TK.flatten().tolist() == given["switch_capacity_1"]["kept"]
    kept = torch.tensor(given["switch_capacity_1"]["kept"])
    expected = torch.tensor(given["switch_capacity_1"]["gates"]) * kept
    assert near(found.gates_TK.flatten(), expected)
    case = given["deepspeed_top1_capacity_1"]
    assert found.counts_E.tolist() == case["counts"]
    assert int(found.kept_TK.sum()) == case["kept"]


def test_top_2_of_deepspeed_at_capacity_1(given: Given, toy: Any) -> None:
    recipe = GShardRecipe(
        second=SecondExpert.ALL,
        normalisation=Normalisation.AFTER_DROPPING,
        capacity=Capacity(factor=1.0, rounding=CapacityRounding.DEEPSPEED),
    )
    found = sees_logits(GShardRouter(8, 8, recipe=recipe))(toy)
    case = given["deepspeed_top2_capacity_1"]
    assert found.counts_E.tolist() == case["counts"]
    assert near(found.gates_TK.sum(dim=1), case["gate_sums"])


@pytest.mark.parametrize("rounding", CapacityRounding)
def test_the_roundings_of_capacity(given: Given, rounding: CapacityRounding) -> None:
    for tokens, n_experts, top_k, factor, slots in given["capacity"][rounding]:
        room = Capacity(factor=factor, rounding=rounding)
        assert room.slots_for(tokens, n_experts, top_k) == slots


def test_the_capacity_of_gshard(given: Given) -> None:
    room = Capacity(rounding=CapacityRounding.FAIRSCALE)
    for tokens, local_groups, n_experts, slots in given["gshard_capacity"]:
        assert room.slots_for(tokens // local_groups, n_experts, 2) == slots


# ---------------------------------------------------------------- balancers


def test_sinkhorn(given: Given, toy: Any) -> None:
    plan_TE = sinkhorn(toy[:, :4].to(torch.float32))
    assert near(plan_TE.flatten(), given["sinkhorn_4x4"])


def test_the_update_of_the_bias(given: Given) -> None:
    case = given["bias_update"]
    counts_E = torch.tensor(case["counts"])
    zero_E = torch.zeros(8, dtype=torch.float64)
    moved_E = updated_bias(zero_E, counts_E, case["rate"])
    assert near(moved_E, case["bias"], 1e-15)
    centred_E = updated_bias(zero_E, counts_E, case["rate"], BiasUpdate.MOONLIGHT)
    assert near(centred_E, moved_E - moved_E.mean(), 1e-15)


def test_report_42_the_published_factors_on_gates(given: Given) -> None:
    """The factor gives the sum of K experts of unit size the size of one."""
    for n_experts, top_k, published in given["gate_scaling"]:
        router = sees_logits(
            DeepSeekV3Router(n_experts, n_experts, top_k, DeepSeekV3Recipe(scaling=1.0))
        )
        logits_TE = torch.randn(40_000, n_experts, generator=torch.Generator().manual_seed(1))
        gates_TK = router.eval()(logits_TE).gates_TK
        factor = gates_TK.square().sum(dim=1).rsqrt().mean().item()
        assert factor == pytest.approx(published, abs=2e-3)


def test_every_number_has_a_source(given: Given) -> None:
    assert set(given["provenance"]) >= {
        "toy",
        "hf_switch_tests",
        "negative_bias",
        "bias_update",
        "capacity",
        "cv_squared",
        "gate_scaling",
        "gshard_capacity",
    }
