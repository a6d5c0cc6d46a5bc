"""What holds of every router of the lineage, behind the same layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from moe_ref import (  # noqa: E402
    AuxiliaryLoss,
    Capacity,
    CapacityRounding,
    DeepSeekV2Recipe,
    DeepSeekV2Router,
    DeepSeekV3Recipe,
    DeepSeekV3Router,
    ExpertGroups,
    Experts,
    GroupScore,
    GShardRecipe,
    GShardRouter,
    MixtralRecipe,
    MixtralRouter,
    MoELayer,
    MoeRefError,
    Normalisation,
    ReferenceModel,
    SecondExpert,
    ShazeerRecipe,
    ShazeerRouter,
    SinkhornRecipe,
    SinkhornRouter,
    StMoeRouter,
    SwitchRecipe,
    SwitchRouter,
    load_balancing_loss,
    probability_in_top_k,
    sequence_auxiliary_loss,
    sinkhorn,
    updated_bias,
)

from .lineages import dense, mask_of, sees_logits  # noqa: E402
from .models import VOCABULARY, seeded, small  # noqa: E402

D, E = 12, 8

LIMIT = ExpertGroups(count=4, kept=2)
DEVICES = ExpertGroups(count=4, kept=2, score=GroupScore.HF_DEEPSEEK_V2)
ROOM = Capacity(factor=0.75)

ROUTERS: dict[str, Callable[[], Any]] = {
    "shazeer": lambda: ShazeerRouter(D, E, 2, ShazeerRecipe(z_coefficient=1e-3)),
    "shazeer, capacity": lambda: ShazeerRouter(D, E, 2, ShazeerRecipe(capacity=ROOM)),
    "gshard": lambda: GShardRouter(D, E),
    "gshard, gumbel": lambda: GShardRouter(D, E, 2, GShardRecipe(second=SecondExpert.GUMBEL)),
    "st-moe": lambda: StMoeRouter(D, E, 3),
    "switch": lambda: SwitchRouter(D, E, 1, SwitchRecipe(jitter=0.1, capacity=ROOM)),
    "mixtral": lambda: MixtralRouter(
        D, E, 2, MixtralRecipe(balance_coefficient=1e-2, z_coefficient=1e-3)
    ),
    "sinkhorn": lambda: SinkhornRouter(D, E, 1),
    "sinkhorn, top 2": lambda: SinkhornRouter(D, E, 2, SinkhornRecipe(balance_coefficient=1e-2)),
    "deepseek-v2": lambda: DeepSeekV2Router(D, E, 3, DeepSeekV2Recipe(groups=DEVICES)),
    "deepseek-v3": lambda: DeepSeekV3Router(D, E, 4, DeepSeekV3Recipe(groups=LIMIT)),
}

every_router = pytest.mark.parametrize("name", ROUTERS)


def router_of(name: str, dtype: Any = torch.float64) -> Any:
    """Make a router with weights that spread the tokens."""
    router = ROUTERS[name]().to(dtype)
    generator = seeded(3)
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.normal_(std=0.7, generator=generator)
    return router


def tokens(count: int = 24, seed: int = 5, dtype: Any = torch.float64) -> Any:
    return torch.randn(count, D, dtype=torch.float64, generator=seeded(seed)).to(dtype)


# ---------------------------------------------------------------- every router


@every_router
def test_the_layer_takes_it_and_its_loss_reaches_the_router(name: str) -> None:
    layer = MoELayer(router_of(name), Experts(D, E, 6).double())
    x_BSD = tokens().reshape(2, 12, D).requires_grad_()
    y_BSD, routing = layer(x_BSD, seeded(1))
    assert y_BSD.shape == x_BSD.shape
    assert y_BSD.dtype == torch.float64
    y_BSD.square().mean().backward()
    for parameter in layer.router.parameters():
        if parameter is not getattr(layer.router, "noise_weight_ED", None):
            assert parameter.grad is not None
            assert parameter.grad.abs().max() > 0.0
    assert x_BSD.grad.abs().max() > 0.0
    assert routing.experts_TK.shape == (24, layer.router.top_k)


@pytest.mark.parametrize(
    ("router", "top_k"),
    [
        (ShazeerRouter, 2),
        (GShardRouter, 2),
        (StMoeRouter, 2),
        (SwitchRouter, 1),
        (MixtralRouter, 2),
        (SinkhornRouter, 2),
        (DeepSeekV2Router, 2),
        (DeepSeekV3Router, 2),
    ],
)
def test_the_reference_model_takes_it(router: Any, top_k: int) -> None:
    model = ReferenceModel(small(top_k=top_k), router=router)
    text_BS = torch.randint(0, VOCABULARY, (2, 9), generator=seeded(0))
    found = model(text_BS[:, :-1], seeded(1))
    loss = found.cross_entropy(text_BS[:, 1:]) + sum(found.router_losses().values())
    loss.backward()
    routers = [part for part in model.modules() if isinstance(part, router)]
    assert len(routers) == 2
    assert all(part.weight_ED.grad.abs().max() > 0.0 for part in routers)
    for part in routers:
        part.after_step()


@every_router
def test_each_of_its_losses_reaches_the_router(name: str) -> None:
    router = router_of(name)
    routing = router(tokens(), sequences=2, generator=seeded(1))
    for loss in routing.losses.values():
        assert loss.ndim == 0
        (gradient,) = torch.autograd.grad(loss, router.weight_ED, retain_graph=True)
        assert gradient.abs().max() > 0.0
    assert (
        set(routing.losses)
        == {
            "shazeer": {"importance", "load", "z"},
            "shazeer, capacity": {"importance", "load"},
            "gshard": {"balance"},
            "gshard, gumbel": {"balance"},
            "st-moe": {"balance", "z"},
            "switch": {"balance"},
            "mixtral": {"balance", "z"},
            "sinkhorn": set(),
            "sinkhorn, top 2": {"balance"},
            "deepseek-v2": {"balance"},
            "deepseek-v3": {"sequence"},
        }[name]
    )


@every_router
def test_the_layer_is_the_sum_of_gates_times_experts(name: str) -> None:
    router = router_of(name)
    experts = Experts(D, E, 6).double()
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(generator=seeded(4))
    layer = MoELayer(router, experts).eval()
    x_TD = tokens()
    gates_TE = dense(router(x_TD, generator=seeded(2)), E)
    hidden_ETF = torch.nn.functional.silu(x_TD @ experts.gate_EDF) * (x_TD @ experts.up_EDF)
    expected_TD = torch.einsum("te,etd->td", gates_TE, hidden_ETF @ experts.down_EFD)
    y_BSD, _ = layer(x_TD[None], seeded(2))
    torch.testing.assert_close(y_BSD[0], expected_TD, rtol=1e-12, atol=1e-12)


@every_router
def test_a_generator_decides_all(name: str) -> None:
    router = router_of(name)
    first, second = (router(tokens(), generator=seeded(7)) for _ in range(2))
    assert torch.equal(first.experts_TK, second.experts_TK)
    assert torch.equal(first.gates_TK, second.gates_TK)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    router(tokens(), generator=seeded(7))
    assert torch.equal(before, torch.get_rng_state())


@every_router
def test_it_computes_in_float32_or_wider(name: str) -> None:
    for dtype, wide in (
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
    ):
        router = router_of(name, dtype)
        routing = router(tokens(dtype=dtype), sequences=2, generator=seeded(1))
        assert routing.gates_TK.dtype == wide
        assert all(loss.dtype == wide for loss in routing.losses.values())
        assert torch.isfinite(routing.gates_TK).all()


@every_router
def test_the_input_stays_as_it_is(name: str) -> None:
    router, x_TD = router_of(name), tokens()
    before = x_TD.clone()
    weights = {key: value.clone() for key, value in router.named_parameters()}
    router(x_TD, sequences=2, generator=seeded(1))
    assert torch.equal(x_TD, before)
    assert all(torch.equal(value, weights[key]) for key, value in router.named_parameters())


@every_router
def test_its_decision_hangs_together(name: str) -> None:
    router = router_of(name)
    routing = router(tokens(), sequences=2, generator=seeded(1))
    assert all(len(set(row)) == router.top_k for row in routing.experts_TK.tolist())
    assert (routing.gates_TK >= 0.0).all()
    if routing.kept_TK is None:
        assert int(routing.counts_E.sum()) == 24 * router.top_k
    else:
        assert not routing.gates_TK[~routing.kept_TK].any()
        assert (routing.gates_TK[routing.kept_TK] > 0.0).all()
        kept_E = torch.bincount(routing.experts_TK[routing.kept_TK], minlength=E)
        assert (kept_E <= routing.counts_E).all()


@every_router
@given(order=st.permutations(range(E)))
def test_names_of_experts_do_not_matter(name: str, order: list[int]) -> None:
    """Experts renamed, groups kept together, are chosen under their new names."""
    router = router_of(name).eval()
    if getattr(router.recipe, "groups", None) is not None:
        pairs = dict.fromkeys(place // 2 for place in order)
        order = [2 * pair + half for pair in pairs for half in (1, 0)]
    if getattr(router.recipe, "second", None) is not None:
        router.recipe = router.recipe.model_copy(update={"second": SecondExpert.ALL})
    x_TD = tokens()
    before = router(x_TD, sequences=2)
    with torch.no_grad():
        router.weight_ED.copy_(router.weight_ED[order].clone())
    after = router(x_TD, sequences=2)
    torch.testing.assert_close(dense(after, E), dense(before, E)[:, order], rtol=0, atol=1e-12)
    for key, loss in before.losses.items():
        torch.testing.assert_close(after.losses[key], loss, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["mixtral", "deepseek-v2", "deepseek-v3", "shazeer"])
@given(order=st.permutations(range(12)))
def test_without_capacity_the_order_of_tokens_does_not_matter(name: str, order: list[int]) -> None:
    router, x_TD = router_of(name).eval(), tokens(12)
    before, after = dense(router(x_TD), E), dense(router(x_TD[order]), E)
    torch.testing.assert_close(after, before[order], rtol=0, atol=1e-12)


@every_router
def test_a_router_says_what_it_was_made_with(name: str) -> None:
    text = repr(router_of(name))
    assert f"n_experts={E}" in text
    assert "Recipe(" in text
    assert "balance_coefficient=" in text


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


# ---------------------------------------------------------------- what cannot be


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SwitchRouter(D, E, 2), "top_k is 2, but Switch sends .* only legal value is 1"),
        (lambda: GShardRouter(D, E, 3), "top_k is 3, but must be 2; the nearest legal value is 2"),
        (lambda: StMoeRouter(D, E, 1), "top_k is 1, but must be at least 2"),
        (lambda: MixtralRouter(D, E, 9), "top_k is 9, .* nearest legal value is 8"),
        (
            lambda: DeepSeekV3Router(
                D, E, 2, DeepSeekV3Recipe(groups=ExpertGroups(count=3, kept=1))
            ),
            "count is 3, but must divide n_experts = 8; the nearest legal value is 2",
        ),
        (
            lambda: DeepSeekV2Router(
                D, E, 5, DeepSeekV2Recipe(groups=DEVICES.model_copy(update={"kept": 2}))
            ),
            "kept is 2, but 2 groups of 2 hold fewer than top_k = 5 experts; .* value is 3",
        ),
        (
            lambda: DeepSeekV3Router(
                D, E, 2, DeepSeekV3Recipe(groups=ExpertGroups(count=8, kept=2))
            ),
            "a group is scored by 2 of its experts, but must be by 1 to 1",
        ),
        (lambda: ExpertGroups(count=2, kept=3), "kept is 3, but must be at most count = 2"),
        (
            lambda: Capacity(factor=1.25, rounding=CapacityRounding.FAIRSCALE),
            "factor is 1.25, but the rounding fairscale has none; the only legal value is 1",
        ),
        (
            lambda: MixtralRouter(D, E, 2, MixtralRecipe(local_groups=7)).double()(tokens()),
            "local_groups is 7, but must divide the 24 tokens .* legal value below is 6",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
