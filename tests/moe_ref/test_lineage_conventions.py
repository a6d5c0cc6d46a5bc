"""What is particular to each router of the lineage, and to each convention."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from moe_ref import (  # noqa: E402
    AuxiliaryLoss,
    Capacity,
    DeepSeekV3Recipe,
    DeepSeekV3Router,
    ExpertGroups,
    GroupScore,
    GShardRecipe,
    GShardRouter,
    MixtralRecipe,
    MixtralRouter,
    MoeRefError,
    Normalisation,
    SecondExpert,
    ShazeerRouter,
    SwitchRecipe,
    SwitchRouter,
    load_balancing_loss,
    probability_in_top_k,
    sequence_auxiliary_loss,
    sinkhorn,
    updated_bias,
)

from .lineages import D, E, dense, mask_of, router_of, sees_logits, tokens  # noqa: E402
from .models import seeded  # noqa: E402

# ---------------------------------------------------------------- shazeer


def test_the_load_is_the_probability_to_stay_in_the_top_k() -> None:
    """Against draws of each expert's noise, that of the others held."""
    clean_TE = torch.randn(3, 5, dtype=torch.float64, generator=seeded(0))
    deviation_TE = 0.3 + torch.rand(3, 5, dtype=torch.float64, generator=seeded(1))
    noisy_TE = clean_TE + deviation_TE * torch.randn(3, 5, dtype=torch.float64, generator=seeded(2))
    found_TE = probability_in_top_k(clean_TE, noisy_TE, deviation_TE, 2)
    draws = 40_000
    for expert in range(5):
        drawn_NTE = noisy_TE.expand(draws, 3, 5).clone()
        fresh_NT = torch.randn(draws, 3, dtype=torch.float64, generator=seeded(3 + expert))
        drawn_NTE[:, :, expert] = clean_TE[:, expert] + deviation_TE[:, expert] * fresh_NT
        chosen_NT2 = drawn_NTE.topk(2, dim=2).indices
        share_T = (chosen_NT2 == expert).any(dim=2).double().mean(dim=0)
        # four standard deviations of a share of so many draws
        assert (share_T - found_TE[:, expert]).abs().max() <= 4.0 * 0.5 / draws**0.5


def test_shazeer_without_noise_is_the_softmax_over_the_top_k() -> None:
    router = router_of("shazeer").eval()
    found = router(tokens())
    logits_TE = router.logits(tokens())
    expected = torch.softmax(logits_TE.topk(2, dim=1).values, dim=1)
    torch.testing.assert_close(found.gates_TK, expected, rtol=1e-12, atol=1e-12)


def test_a_fresh_router_of_shazeer_spreads_by_noise_alone() -> None:
    router = ShazeerRouter(D, E, 2)
    counts_E = router(tokens(4000, dtype=torch.float32), generator=seeded(0)).counts_E
    assert (counts_E.double() / 1000.0 - 1.0).abs().max() < 0.15


def test_the_noise_learns_from_the_load() -> None:
    router = router_of("shazeer")
    router(tokens(), generator=seeded(0)).losses["load"].backward()
    assert router.noise_weight_ED.grad.abs().max() > 0.0


# ---------------------------------------------------------------- gshard, st-moe


@pytest.mark.parametrize(
    ("second", "chance"),
    [
        (SecondExpert.GSHARD, lambda p1, p2: 2.0 * p2 / (p1 + p2)),
        (SecondExpert.HF_NLLB_RANDOM, lambda p1, p2: 2.0 * p2),
        (SecondExpert.ST_MOE, lambda p1, p2: p2 / (p1 + p2) / 0.2),
        (SecondExpert.MESH_THRESHOLD, lambda p1, p2: float(p2 / (p1 + p2) > 0.2)),
        (SecondExpert.ALL, lambda p1, p2: 1.0),
    ],
)
@pytest.mark.parametrize("gap", [0.3, 1.0, 2.0, 3.0])
def test_how_often_the_second_expert_is_sent_to(
    second: SecondExpert, chance: Callable[[float, float], float], gap: float
) -> None:
    logits_E = torch.tensor([1.0 + gap, 1.0, 0.0, -1.0], dtype=torch.float64)
    p1, p2 = torch.softmax(logits_E, dim=0)[:2].tolist()
    recipe = GShardRecipe(second=second, capacity=None)
    router = sees_logits(GShardRouter(4, 4, recipe=recipe))
    count = 8000
    found = router(logits_E.expand(count, 4).clone(), generator=seeded(0))
    assert found.kept_TK[:, 0].all()
    share = found.kept_TK[:, 1].double().mean().item()
    assert abs(share - min(chance(p1, p2), 1.0)) <= 4.0 * 0.5 / count**0.5
    assert found.counts_E.tolist() == [count, round(share * count), 0, 0]


def test_gumbel_draws_the_second_expert_by_its_probability() -> None:
    logits_E = torch.tensor([2.0, 1.0, 0.0, -1.0], dtype=torch.float64)
    recipe = GShardRecipe(second=SecondExpert.GUMBEL, capacity=None)
    router = sees_logits(GShardRouter(4, 4, recipe=recipe))
    count = 20_000
    found = router(logits_E.expand(count, 4).clone(), generator=seeded(0))
    share_E = torch.bincount(found.experts_TK[:, 1], minlength=4).double() / count
    expected_E = torch.softmax(logits_E[1:], dim=0)
    assert (share_E[1:] - expected_E).abs().max() <= 4.0 * 0.5 / count**0.5


def test_local_groups_have_capacity_of_their_own() -> None:
    """A group that all want one expert drops tokens; the other group does not help it."""
    x_TD = torch.zeros(8, 4, dtype=torch.float64)
    x_TD[:4, 0] = 5.0
    x_TD[4:] = 5.0 * torch.eye(4, dtype=torch.float64)
    for local_groups, kept in ((1, 8 // 2 + 3), (2, 2 + 4)):
        recipe = SwitchRecipe(capacity=Capacity(slots=4 // local_groups), local_groups=local_groups)
        found = sees_logits(SwitchRouter(4, 4, recipe=recipe))(x_TD)
        assert int(found.kept_TK.sum()) == kept


def test_evaluation_may_have_a_policy_and_a_factor_of_its_own() -> None:
    recipe = GShardRecipe(
        second=SecondExpert.ST_MOE,
        eval_second=SecondExpert.ALL,
        capacity=Capacity(factor=0.25, eval_factor=8.0),
    )
    router = sees_logits(GShardRouter(8, 8, recipe=recipe))
    x_TD = torch.randn(32, 8, generator=seeded(0))
    assert not router(x_TD, generator=seeded(1)).kept_TK.all()
    assert router.eval()(x_TD, generator=seeded(1)).kept_TK.all()


def test_after_dropping_the_first_expert_has_all_weight() -> None:
    x_TD = torch.tensor([[2.0, 1.0, 0.0], [2.0, 1.0, 0.0]], dtype=torch.float64)
    sums = {}
    for rule in Normalisation:
        recipe = MixtralRecipe(normalisation=rule, capacity=Capacity(slots=1))
        found = sees_logits(MixtralRouter(3, 3, 2, recipe))(x_TD)
        assert found.kept_TK.tolist() == [[True, True], [False, False]]
        recipe = GShardRecipe(
            second=SecondExpert.MESH_THRESHOLD, threshold=0.9, normalisation=rule, capacity=None
        )
        alone = sees_logits(GShardRouter(3, 3, 2, recipe))(x_TD[:1])
        assert alone.kept_TK.tolist() == [[True, False]]
        sums[rule] = alone.gates_TK.sum().item()
    p = torch.softmax(x_TD[0], dim=0)
    assert sums[Normalisation.NONE] == pytest.approx(p[0].item(), rel=1e-12)
    assert sums[Normalisation.BEFORE_DROPPING] == pytest.approx((p[0] / p[:2].sum()).item())
    assert sums[Normalisation.AFTER_DROPPING] == pytest.approx(1.0, rel=1e-12)


# ---------------------------------------------------------------- switch, sinkhorn


def test_jitter_is_there_in_training_alone_and_within_its_bounds() -> None:
    recipe = SwitchRecipe(jitter=0.1, capacity=None, z_coefficient=1.0)
    router = sees_logits(SwitchRouter(8, 8, recipe=recipe))
    x_TD = torch.ones(50, 8, dtype=torch.float64)
    found = router(x_TD, generator=seeded(0))
    probability = torch.softmax(torch.tensor([1.1] + [0.9] * 7, dtype=torch.float64), dim=0)[0]
    assert (found.gates_TK <= probability).all()
    assert (found.gates_TK > 1.0 / 8.0).all()
    quiet = router.eval()(x_TD).gates_TK
    torch.testing.assert_close(quiet, torch.full_like(quiet, 1.0 / 8.0), rtol=1e-12, atol=0)


def test_a_router_in_the_type_of_its_input_rounds() -> None:
    """In bf16 the logits lose digits, which float32 keeps; both continue in float32."""
    x_TD = tokens(200, dtype=torch.bfloat16)
    exact, narrow = (
        MixtralRouter(D, E, 2, MixtralRecipe(float32=float32)) for float32 in (True, False)
    )
    narrow.load_state_dict(exact.state_dict())
    wide_TE, rounded_TE = exact.logits(x_TD), narrow.logits(x_TD)
    assert wide_TE.dtype == rounded_TE.dtype == torch.float32
    assert torch.equal(rounded_TE, rounded_TE.to(torch.bfloat16).float())
    assert not torch.equal(wide_TE, rounded_TE)


@given(seed=st.integers(0, 10_000), size=st.floats(0.1, 3.0))
def test_sinkhorn_gives_every_expert_the_same(seed: int, size: float) -> None:
    logits_TE = size * torch.randn(24, 8, dtype=torch.float64, generator=seeded(seed))
    plan_TE = sinkhorn(logits_TE, tolerance=1e-9)
    torch.testing.assert_close(
        plan_TE.sum(dim=0), torch.full((8,), 1 / 8, dtype=torch.float64), rtol=1e-6, atol=0
    )
    torch.testing.assert_close(
        plan_TE.sum(dim=1), torch.full((24,), 1 / 24, dtype=torch.float64), rtol=1e-4, atol=0
    )
    # a plan is the exponential with rows and columns scaled: its log keeps every double difference
    log_TE = plan_TE.log() - logits_TE
    twisted_TE = log_TE - log_TE[:1] - log_TE[:, :1] + log_TE[0, 0]
    assert twisted_TE.abs().max() <= 1e-9


def test_sinkhorn_balances_what_top_1_does_not() -> None:
    router = router_of("sinkhorn")
    router.weight_ED.data[0] *= 4.0
    x_TD = tokens(400)
    balanced_E, plain_E = router(x_TD).counts_E, router.eval()(x_TD).counts_E
    assert balanced_E.max() < plain_E.max()
    with pytest.raises(MoeRefError, match="expert 1 has no share of any token"):
        sinkhorn(torch.tensor([[1e6, 0.0]]))
    with pytest.raises(MoeRefError, match="has no share of any token"):
        sinkhorn(torch.tensor([[float("nan"), 0.0]]))


# ---------------------------------------------------------------- deepseek


@given(seed=st.integers(0, 10_000))
def test_a_token_reaches_no_more_groups_than_it_may(seed: int) -> None:
    for score in GroupScore:
        limit = ExpertGroups(count=4, kept=2, score=score)
        recipe = DeepSeekV3Recipe(groups=limit)
        router = sees_logits(DeepSeekV3Router(16, 16, 4, recipe))
        router.bias_E.copy_(torch.randn(16, generator=seeded(seed + 1)) - 1.0)
        x_TD = torch.randn(10, 16, dtype=torch.float64, generator=seeded(seed))
        groups_TK = router(x_TD).experts_TK // 4
        assert all(len(set(row)) <= 2 for row in groups_TK.tolist())


def test_the_bias_chooses_and_does_not_weigh() -> None:
    router = router_of("deepseek-v3").eval()
    scores_TE = torch.sigmoid(router.logits(tokens()))
    router.bias_E.copy_(3.0 * torch.randn(E, generator=seeded(0)))
    found = router(tokens())
    chosen_TK = scores_TE.gather(1, found.experts_TK)
    expected = 2.5 * chosen_TK / chosen_TK.sum(dim=1, keepdim=True)
    torch.testing.assert_close(found.gates_TK, expected, rtol=1e-12, atol=1e-12)


def test_report_80_gates_are_scores_without_the_bias_and_not_taken_off_it() -> None:
    """A score of 1.5e-8 is lost in a sum with a bias of 12, in float32."""
    recipe = DeepSeekV3Recipe(scaling=1.0, normalisation=Normalisation.NONE)
    router = sees_logits(DeepSeekV3Router(4, 4, 2, recipe))
    router.bias_E.copy_(torch.tensor([12.0, 12.0, 0.0, 0.0]))
    x_TD = torch.tensor([[-18.0, -17.0, 3.0, 2.0]])
    found = router(x_TD)
    assert found.experts_TK.sort().values.tolist() == [[0, 1]]
    expected = torch.sigmoid(x_TD[0, :2])
    assert not ((expected + 12.0) - 12.0).any()
    torch.testing.assert_close(dense(found, 4)[0, :2], expected, rtol=1e-6, atol=0.0)


def test_the_bias_evens_the_load_without_a_loss() -> None:
    recipe = DeepSeekV3Recipe(bias_rate=0.005, sequence_coefficient=0.0)
    router = DeepSeekV3Router(D, E, 2, recipe).double()
    with torch.no_grad():
        router.weight_ED.normal_(generator=seeded(0))
        router.weight_ED[0] = 0.0
    x_TD = tokens(500)
    first = router(x_TD).counts_E
    for _ in range(200):
        router(x_TD)
        router.after_step()
    last = router(x_TD).counts_E
    assert first.max() / 125.0 > 1.3
    assert last.max() / 125.0 < 1.1


def test_the_bias_moves_once_for_a_step_of_many_microbatches() -> None:
    whole, split = router_of("deepseek-v3"), router_of("deepseek-v3")
    whole(tokens(24))
    for part in tokens(24).split(8):
        split(part)
    assert torch.equal(whole.seen_E, split.seen_E)
    assert not split.bias_E.any()
    for router in (whole, split):
        router.after_step()
    assert torch.equal(whole.bias_E, split.bias_E)
    assert split.bias_E.any()
    assert not split.seen_E.any()
    split.eval()(tokens(24))
    assert not split.seen_E.any()


@given(counts=st.lists(st.integers(0, 50), min_size=2, max_size=16))
def test_tokens_counted_twice_move_the_bias_as_once(counts: list[int]) -> None:
    counts_E = torch.tensor(counts)
    zero_E = torch.zeros(len(counts), dtype=torch.float64)
    once, twice = updated_bias(zero_E, counts_E, 1e-3), updated_bias(zero_E, 2 * counts_E, 1e-3)
    assert torch.equal(once, twice)


# ---------------------------------------------------------------- conventions


@given(seed=st.integers(0, 10_000), top_k=st.integers(1, 4))
def test_the_scales_of_the_auxiliary_loss_are_multiples(seed: int, top_k: int) -> None:
    logits_TE = torch.randn(24, 8, dtype=torch.float64, generator=seeded(seed))
    score_TE, chosen_TK = torch.softmax(logits_TE, dim=1), logits_TE.topk(top_k, dim=1).indices
    loss = {s: load_balancing_loss(score_TE, chosen_TK, s).item() for s in AuxiliaryLoss}
    assert loss[AuxiliaryLoss.HF_MIXTRAL] == pytest.approx(top_k * loss[AuxiliaryLoss.MEGATRON])
    assert loss[AuxiliaryLoss.SWITCH] == pytest.approx(64.0 * loss[AuxiliaryLoss.FAIRSCALE])
    first = load_balancing_loss(score_TE, chosen_TK[:, :1], AuxiliaryLoss.MEGATRON).item()
    assert loss[AuxiliaryLoss.SWITCH] == pytest.approx(first)


@pytest.mark.parametrize(
    ("scale", "balanced", "collapsed"),
    [
        (AuxiliaryLoss.SWITCH, 1.0, 4.0),
        (AuxiliaryLoss.FAIRSCALE, 1.0 / 64.0, 4.0 / 64.0),
        (AuxiliaryLoss.MEGATRON, 1.0, 4.0),
        (AuxiliaryLoss.HF_MIXTRAL, 2.0, 8.0),
    ],
)
def test_report_39_the_auxiliary_loss_at_balance_and_at_collapse(
    scale: AuxiliaryLoss, balanced: float, collapsed: float
) -> None:
    """Of 8 experts, 2 for each token; at collapse all probability is on the same two."""
    uniform_TE = torch.full((8, 8), 1 / 8, dtype=torch.float64)
    token_T = torch.arange(8)
    even_TK = torch.stack([token_T, (token_T + 1) % 8], dim=1)
    assert load_balancing_loss(uniform_TE, even_TK, scale).item() == pytest.approx(balanced)
    two_TE = torch.tensor([[0.5, 0.5] + [0.0] * 6], dtype=torch.float64).expand(8, 8)
    same_TK = torch.tensor([[0, 1]]).expand(8, 2)
    assert load_balancing_loss(two_TE, same_TK, scale).item() == pytest.approx(collapsed)


def test_report_48_balance_losses_are_1_at_forced_balance() -> None:
    """Whatever the sizes: E experts in turn, all of them as likely."""
    for n_experts, top_k, sequences in ((8, 1, 1), (8, 2, 2), (16, 4, 1)):
        token_T = torch.arange(2 * n_experts)
        even_TK = (token_T[:, None] + torch.arange(top_k)) % n_experts
        uniform_TE = torch.full((len(token_T), n_experts), 1 / n_experts, dtype=torch.float64)
        for scale in (AuxiliaryLoss.MEGATRON, AuxiliaryLoss.SWITCH):
            loss = load_balancing_loss(uniform_TE, even_TK, scale, sequences)
            assert loss.item() == pytest.approx(1.0, rel=1e-14)
        leaning_TE = uniform_TE + 1e-9 * mask_of(even_TK, n_experts)
        leaning = sequence_auxiliary_loss(leaning_TE, top_k, sequences)
        assert leaning.item() == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("scale", AuxiliaryLoss)
def test_report_79_the_balance_loss_does_not_grow_with_replicas(scale: AuxiliaryLoss) -> None:
    """Replicas of the same tokens average to the loss of one, as do their gradients."""
    logits_TE = torch.randn(24, 8, dtype=torch.float64, generator=seeded(0)).requires_grad_()
    chosen_TK = logits_TE.topk(2, dim=1).indices
    one = load_balancing_loss(torch.softmax(logits_TE, dim=1), chosen_TK, scale)
    four_TE = torch.softmax(logits_TE.repeat(4, 1), dim=1)
    for local_groups in (1, 4):
        four = load_balancing_loss(four_TE, chosen_TK.repeat(4, 1), scale, local_groups)
        assert four.item() == pytest.approx(one.item(), rel=1e-12)
        gradients = [torch.autograd.grad(x, logits_TE, retain_graph=True)[0] for x in (one, four)]
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-10, atol=1e-15)


def test_the_auxiliary_loss_of_groups_is_their_mean() -> None:
    logits_TE = torch.randn(24, 8, dtype=torch.float64, generator=seeded(0))
    score_TE, chosen_TK = torch.softmax(logits_TE, dim=1), logits_TE.topk(2, dim=1).indices
    parts = zip(score_TE.split(8), chosen_TK.split(8), strict=True)
    mean = sum(load_balancing_loss(s, c).item() for s, c in parts) / 3.0
    assert load_balancing_loss(score_TE, chosen_TK, local_groups=3).item() == pytest.approx(mean)
