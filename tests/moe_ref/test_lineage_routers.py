"""What holds of every router of the lineage, behind the same layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from moe_ref import (  # noqa: E402
    Capacity,
    CapacityRounding,
    DeepSeekV2Recipe,
    DeepSeekV2Router,
    DeepSeekV3Recipe,
    DeepSeekV3Router,
    ExpertGroups,
    Experts,
    GShardRouter,
    MixtralRecipe,
    MixtralRouter,
    MoELayer,
    ReferenceModel,
    SecondExpert,
    ShazeerRouter,
    SinkhornRouter,
    StMoeRouter,
    SwitchRouter,
)

from .lineages import DEVICES, ROUTERS, D, E, dense, router_of, tokens  # noqa: E402
from .models import VOCABULARY, seeded, small  # noqa: E402

every_router = pytest.mark.parametrize("name", ROUTERS)


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
