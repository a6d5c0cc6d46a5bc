"""Experts as a loop equal experts grouped; dropped tokens contribute nothing; gradients."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch.func import functional_call  # noqa: E402
from torch.nn.functional import silu  # noqa: E402

from moe_ref import experts as module  # noqa: E402
from moe_ref.experts import Experts, apply_grouped, apply_looped  # noqa: E402
from moe_ref.layer import MoELayer  # noqa: E402
from moe_ref.parts import SwiGlu  # noqa: E402
from moe_ref.routing import Routing, counts_of  # noqa: E402

from .models import noiseless, seeded  # noqa: E402

WAYS = [apply_looped, apply_grouped]


def experts(d_model: int, n_experts: int, width: int) -> Experts:
    """Build experts of weights around 1, so that nothing is small."""
    made = Experts(d_model, n_experts, width).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(generator=seeded(parameter.shape[1]))
    return made


def routing(tokens: int, n_experts: int, top_k: int, room: float, seed: int = 0) -> Routing:
    """Draw distinct experts, positive gates, and which pairs have room."""
    score_TE = torch.rand(tokens, n_experts, dtype=torch.float64, generator=seeded(seed))
    gates_TK, experts_TK = score_TE.topk(top_k, dim=1)
    kept_TK = torch.rand(tokens, top_k, generator=seeded(seed + 1)) < room
    return Routing(
        experts_TK,
        gates_TK.clone().requires_grad_(),
        None if room >= 1.0 else kept_TK,
        counts_of(experts_TK, n_experts),
    )


def inputs(tokens: int, d_model: int) -> torch.Tensor:
    x_TD = torch.randn(tokens, d_model, dtype=torch.float64, generator=seeded(9))
    return x_TD.requires_grad_()


@given(st.data())
def test_the_loop_equals_the_groups_with_all_gradients(data: st.DataObject) -> None:
    tokens, n_experts = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 6))
    top_k, width = data.draw(st.integers(1, n_experts)), data.draw(st.integers(1, 5))
    room = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    made = experts(4, n_experts, width)
    decided = routing(tokens, n_experts, top_k, room, data.draw(st.integers(0, 99)))
    x_TD = inputs(tokens, 4)
    leaves = [x_TD, decided.gates_TK, *made.parameters()]
    results = []
    for way in WAYS:
        y_TD = way(made, x_TD, decided)
        slope = torch.randn(y_TD.shape, dtype=y_TD.dtype, generator=seeded(3))
        gradients = torch.autograd.grad(
            (y_TD * slope).sum(), leaves, allow_unused=True, materialize_grads=True
        )
        results.append([y_TD, *gradients])
    for looped, grouped in zip(*results, strict=True):
        assert torch.allclose(looped, grouped, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_the_output_is_the_gated_sum_of_the_experts(way: object) -> None:
    """Equation (7), token by token."""
    made, decided, x_TD = experts(4, 5, 3), routing(6, 5, 2, 0.6), inputs(6, 4)
    assert decided.kept_TK is not None
    assert 0 < decided.kept_TK.sum() < decided.kept_TK.numel()
    y_TD = way(made, x_TD, decided)  # type: ignore[operator]
    for token in range(6):
        want_D = torch.zeros(4, dtype=torch.float64)
        for slot in range(2):
            e = int(decided.experts_TK[token, slot])
            hidden_F = silu(x_TD[token] @ made.gate_EDF[e]) * (x_TD[token] @ made.up_EDF[e])
            share = decided.gates_TK[token, slot].item() * bool(decided.kept_TK[token, slot])
            want_D += share * (hidden_F @ made.down_EFD[e])
        assert torch.allclose(y_TD[token], want_D)


@pytest.mark.parametrize("way", WAYS)
def test_dropped_tokens_contribute_nothing(way: object) -> None:
    """Not to the output, to no gradient, and no expert is computed for them."""
    made = experts(4, 3, 2)
    experts_TK = torch.tensor([[0, 1], [1, 2], [2, 0]])
    kept_TK = torch.tensor([[True, False], [False, True], [False, False]])
    gates_TK = torch.full((3, 2), 0.5, dtype=torch.float64, requires_grad=True)
    decided = Routing(experts_TK, gates_TK, kept_TK, counts_of(experts_TK, 3))
    with torch.no_grad():
        made.up_EDF[1] = torch.nan  # the expert that has room for nobody
    x_TD = inputs(3, 4)
    y_TD = way(made, x_TD, decided)  # type: ignore[operator]
    assert y_TD.isfinite().all()
    assert y_TD[2].abs().sum() == 0.0
    y_TD.sum().backward()
    assert x_TD.grad[2].abs().sum() == 0.0
    assert x_TD.grad[:2].abs().sum(dim=1).min() > 0.0
    assert torch.equal(gates_TK.grad != 0.0, kept_TK)
    assert made.down_EFD.grad[1].abs().sum() == 0.0


@pytest.mark.parametrize("way", WAYS)
def test_the_gates_precision_reaches_the_sum_and_the_output_has_the_inputs(way: object) -> None:
    made = Experts(4, 3, 2).to(torch.bfloat16)
    decided = routing(5, 3, 2, 1.0)
    y_TD = way(made, inputs(5, 4).to(torch.bfloat16), decided)  # type: ignore[operator]
    assert y_TD.dtype == torch.bfloat16
    assert decided.gates_TK.dtype == torch.float64


@pytest.mark.parametrize("room", [0.6, 1.0])
def test_one_grouped_product_equals_a_product_for_each_segment(
    monkeypatch: pytest.MonkeyPatch, room: float
) -> None:
    """What CUDA does in bf16, on the CPU."""
    torch.manual_seed(0)
    made = Experts(16, 5, 8, deviation=0.3).to(torch.bfloat16)
    decided, x_TD = routing(30, 5, 2, room), inputs(30, 16).to(torch.bfloat16)
    segments = apply_grouped(made, x_TD, decided)
    slopes = torch.autograd.grad(segments.float().square().sum(), list(made.parameters()))
    if not module._fits_one_kernel(x_TD, made.gate_EDF):
        pytest.skip("this torch has no grouped product")
    used = []

    def one(x_PX: torch.Tensor, weight_EXY: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        used.append(len(x_PX))
        return module._one_kernel(x_PX, weight_EXY, counts_E)

    monkeypatch.setattr(module, "_segments", one)
    kernel = apply_grouped(made, x_TD, decided)
    again = torch.autograd.grad(kernel.float().square().sum(), list(made.parameters()))
    assert len(used) == 3
    assert torch.allclose(kernel, segments, rtol=0.02, atol=1e-6)
    for one_slope, other in zip(slopes, again, strict=True):
        assert torch.allclose(one_slope, other, rtol=0.05, atol=0.02 * float(other.abs().max()))


def test_the_grouped_product_takes_bf16_in_units_of_16_bytes() -> None:
    weight_EXY, x_PX = (torch.zeros(*s, dtype=torch.bfloat16) for s in ((2, 16, 8), (4, 16)))
    assert not module._fits_one_kernel(x_PX.float(), weight_EXY.float())
    assert not module._fits_one_kernel(x_PX, weight_EXY[:, :, :6])
    assert not module._fits_one_kernel(x_PX[:0], weight_EXY)


# ---------------------------------------------------------------- the layer


def layer(grouped: bool, shared: bool = True) -> MoELayer:
    router = noiseless(4, 5, 2).double()
    with torch.no_grad():
        router.weight_ED.normal_(generator=seeded(2))
    made = experts(4, 5, 3)
    made.grouped = grouped
    both = SwiGlu(4, 3, deviation=1.0).double() if shared else None
    return MoELayer(router, made, both)


@pytest.mark.parametrize("grouped", [False, True])
def test_gradients_of_the_layer(grouped: bool) -> None:
    """Gates, experts and shared expert; no perturbation changes what is routed."""
    made = layer(grouped).eval()
    names = [name for name, _ in made.named_parameters()]
    x_BSD = inputs(6, 4).unflatten(0, (2, 3)).detach().requires_grad_()

    def outcome(x_BSD: torch.Tensor, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights = dict(zip(names, values, strict=True))
        y_BSD, decided = functional_call(made, weights, (x_BSD,))
        return y_BSD, *decided.losses.values()

    assert len(names) == 1 + 3 + 3
    leaves = (x_BSD, *(p.detach().requires_grad_() for p in made.parameters()))
    assert torch.autograd.gradcheck(outcome, leaves, eps=1e-6, atol=1e-7)


def test_the_shared_expert_is_added_to_every_token() -> None:
    x_BSD = inputs(6, 4).unflatten(0, (2, 3))
    made = layer(True)
    with_shared, _ = made(x_BSD)
    shared = made.shared
    made.shared = None
    without, _ = made(x_BSD)
    assert torch.allclose(with_shared - without, shared(x_BSD))


def test_tokens_are_treated_alike_in_every_order() -> None:
    made, x_BSD = layer(True), inputs(12, 4).unflatten(0, (1, 12))
    order = torch.randperm(12, generator=seeded(1))
    assert torch.allclose(made(x_BSD)[0][:, order], made(x_BSD[:, order])[0])


def test_the_router_stays_in_float32_under_autocast() -> None:
    made, x_BSD = layer(True).float(), inputs(6, 4).float().unflatten(0, (1, 6))
    exact = made.router(x_BSD[0].detach())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y_BSD, decided = made(x_BSD)
    assert torch.equal(decided.gates_TK, exact.gates_TK)
    assert torch.equal(decided.losses["z"], exact.losses["z"])
    assert torch.allclose(y_BSD.float(), made(x_BSD)[0], rtol=0.05, atol=0.1)
