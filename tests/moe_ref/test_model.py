"""The model counts what `perfmodel.Architecture` counts, and is what A.1 describes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from moe_ref.attention import Attention, rotation  # noqa: E402
from moe_ref.counting import count_matmul_flops, count_parameters  # noqa: E402
from moe_ref.errors import MoeRefError  # noqa: E402
from moe_ref.layer import MoELayer  # noqa: E402
from moe_ref.model import ReferenceModel  # noqa: E402
from moe_ref.paper_router import PaperRouter, RouterRecipe  # noqa: E402
from perfmodel import Architecture, MfuConvention, ParameterConvention  # noqa: E402

from .models import (  # noqa: E402
    VOCABULARY,
    architectures,
    noiseless,
    noisy,
    objective,
    seeded,
    small,
    text,
)

# ---------------------------------------------------------------- agreement


@given(architectures())
def test_parameters_of_the_live_model_are_those_of_the_architecture(a: Architecture) -> None:
    model = ReferenceModel(a)
    for convention in ParameterConvention:
        assert count_parameters(model, convention) == a.n_total(convention)
        assert count_parameters(model, convention, active=True) == a.n_active(convention)
    stored = sum(parameter.numel() for parameter in model.parameters())
    assert stored == a.n_total(ParameterConvention.WITH_EMBEDDING)


@settings(max_examples=40)
@given(architectures(), st.integers(1, 3), st.integers(1, 12), st.booleans())
def test_flops_of_the_live_model_are_those_of_the_architecture(
    a: Architecture, sequences: int, length: int, grouped: bool
) -> None:
    """Megatron's convention leaves out the router and the masked half of attention's products."""
    model = ReferenceModel(a, grouped=grouped)
    tokens_BS = torch.zeros(sequences, length, dtype=torch.int64)
    counted = count_matmul_flops(model, tokens_BS)
    core = 12 * a.n_layers * length * a.n_heads * a.head_dim
    router = 6 * a.n_moe_layers * a.d_model * a.n_experts
    convention = a.flops_per_token(MfuConvention.MEGATRON, length)
    assert counted == sequences * length * (convention + router + core // 2)

    gains = (2 * a.n_layers + 1) * a.d_model
    six_n = a.flops_per_token(MfuConvention.SIX_N_HEAD) - 6 * gains
    assert counted == sequences * length * (six_n + core)


@given(architectures(), st.integers(0, 5))
def test_active_parameters_are_those_that_one_token_gives_a_gradient(
    a: Architecture, seed: int
) -> None:
    """Of a single token's pass, K experts of a layer have a gradient; of the embedding, one row."""
    model = ReferenceModel(a, seed=seed).double()
    objective(model, torch.zeros(1, 2, dtype=torch.int64)).backward()
    for layer in (m for m in model.modules() if isinstance(m, MoELayer)):
        for name, parameter in layer.experts.named_parameters():
            moved_E = parameter.grad.flatten(1).abs().sum(dim=1) > 0
            assert int(moved_E.sum()) == a.top_k, name


def test_counting_leaves_the_model_as_it_was() -> None:
    model = ReferenceModel(small(), recompute=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    count_matmul_flops(model, text())
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gated_attention_adds_what_the_paper_does_not_count() -> None:
    a = small()
    extra = count_parameters(ReferenceModel(a, gated_attention=True)) - a.n_total()
    assert extra == a.n_layers * a.d_model * a.n_heads


# ---------------------------------------------------------------- what it refuses


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"window": {"width": 8}}, "window=SlidingWindow"),
        ({"biases": {"qkv": True}}, "biases=Biases"),
        ({"qk_norm": "head"}, "qk_norm='head' is not part"),
        ({"attention_sinks": True}, "attention_sinks=True"),
        ({"shared_expert_gate": True}, "shared_expert_gate=True"),
        ({"gated": False}, "gated=False is not part .* gated=True only"),
        ({"norms_per_layer": 4}, "norms_per_layer=4"),
        ({"learned_positions": 9}, "learned_positions=9"),
        ({"mtp_layers": 1}, "mtp_layers=1"),
        ({"extra": {"parameters": 5, "reason": "a test"}}, "extra="),
        ({"head_dim": 5}, "head_dim=5 must be even.*nearest: 6"),
        (
            {
                "n_kv_heads": 4,
                "head_dim": 6,
                "latent": {
                    "kv_lora_rank": 4,
                    "qk_nope_head_dim": 4,
                    "qk_rope_head_dim": 2,
                    "v_head_dim": 4,
                },
            },
            "latent=LatentAttention",
        ),
    ],
)
def test_what_the_model_does_not_have_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(MoeRefError, match=words):
        ReferenceModel(small(**changes))


def test_every_field_of_an_architecture_is_modelled_or_refused() -> None:
    """A field that is added to `Architecture` must be thought of here."""
    modelled = {
        "name",
        "n_layers",
        "d_model",
        "n_heads",
        "n_kv_heads",
        "head_dim",
        "d_ff",
        "vocab_size",
        "n_experts",
        "top_k",
        "d_expert",
        "d_shared",
        "first_k_dense",
        "tied_embeddings",
        "moe_every",
    }
    refused = {
        "latent",
        "window",
        "biases",
        "qk_norm",
        "attention_sinks",
        "shared_expert_gate",
        "gated",
        "norms_per_layer",
        "learned_positions",
        "mtp_layers",
        "extra",
    }
    assert set(Architecture.model_fields) == modelled | refused


# ---------------------------------------------------------------- initial weights


def test_initial_weights_are_those_of_a_1() -> None:
    a = small(d_model=128, n_heads=8, head_dim=16, d_ff=256, d_expert=64, d_shared=64)
    model = ReferenceModel(a, gated_attention=True)
    written = 0.006 / math.sqrt(2 * a.n_layers)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
            continue
        deviation = written if ".down" in name or ".output" in name else 0.006
        error = 5 / math.sqrt(2 * parameter.numel())
        assert float(parameter.detach().std()) == pytest.approx(deviation, rel=error), name
        assert abs(parameter.mean().item()) < 5 * deviation / math.sqrt(parameter.numel()), name


def test_another_deviation_scales_every_matrix_and_no_gain() -> None:
    a = small()
    plain, wide = ReferenceModel(a, seed=3), ReferenceModel(a, deviation=0.03, seed=3)
    for (name, one), other in zip(plain.named_parameters(), wide.parameters(), strict=True):
        factor = 5.0 if one.ndim > 1 else 1.0
        torch.testing.assert_close(other, factor * one, msg=name)
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(MoeRefError, match=f"deviation={wrong} must be finite and above 0"):
            ReferenceModel(a, deviation=wrong)


def test_the_seed_decides_the_weights_and_touches_no_other_draw() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first, again = (ReferenceModel(small(), seed=3).state_dict() for _ in range(2))
    other = ReferenceModel(small(), seed=4).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embedding_VD"], other["embedding_VD"])
    assert not torch.equal(
        first["blocks.1.feed_forward.router.weight_ED"],
        other["blocks.1.feed_forward.router.weight_ED"],
    )


# ---------------------------------------------------------------- attention


def attention_by_hand(made: Attention, x_SD: np.ndarray, head_dim: int) -> np.ndarray:
    """Compute one head and one position after the other, with complex numbers for the rotation."""

    def weights(part: object) -> np.ndarray:
        return part.weight.detach().numpy()  # type: ignore[attr-defined]

    def turned(features: np.ndarray, position: int) -> np.ndarray:
        half = head_dim // 2
        angle = position * 10_000.0 ** (-2.0 * np.arange(half) / head_dim)
        return (features[:half] + 1j * features[half:]) * np.exp(1j * angle)

    length, heads = len(x_SD), made.n_heads
    query, key, value = (
        (x_SD @ weights(part).T).reshape(length, -1, head_dim)
        for part in (made.query, made.key, made.value)
    )
    out = np.zeros((length, heads, head_dim))
    for head in range(heads):
        group = head // (heads // made.n_kv_heads)
        for t in range(length):
            scores = [
                np.real(np.vdot(turned(key[s, group], s), turned(query[t, head], t)))
                for s in range(t + 1)
            ]
            share = np.exp(np.array(scores) / np.sqrt(head_dim))
            out[t, head] = share / share.sum() @ value[: t + 1, group]
            if made.gate is not None:
                gate = x_SD[t] @ weights(made.gate)[head]
                out[t, head] /= 1.0 + np.exp(-gate)
    return out.reshape(length, -1) @ weights(made.output).T


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
def test_attention_is_what_one_computes_by_hand(heads: int, kv_heads: int, gated: bool) -> None:
    torch.manual_seed(0)
    made = Attention(10, heads, kv_heads, 6, gated=gated, deviation=0.5).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.5)
    x_BSD = torch.randn(2, 7, 10, dtype=torch.float64)
    out_BSD = made(x_BSD, rotation(7, 6, x_BSD)).detach().numpy()
    for b in range(2):
        want = attention_by_hand(made, x_BSD[b].numpy(), 6)
        np.testing.assert_allclose(out_BSD[b], want, rtol=1e-10, atol=1e-10)


def test_a_token_sees_no_later_token() -> None:
    model = ReferenceModel(small(), router=noiseless, seed=1).double().eval()
    tokens_BS = text(2, 8)
    changed_BS = tokens_BS.clone()
    changed_BS[:, 5:] = (changed_BS[:, 5:] + 1) % VOCABULARY
    before, after = model(tokens_BS).logits_BSV, model(changed_BS).logits_BSV
    assert torch.allclose(before[:, :5], after[:, :5], rtol=1e-12, atol=1e-14)
    assert not torch.allclose(before[:, 5:], after[:, 5:], rtol=1e-6, atol=0)


# ---------------------------------------------------------------- the whole


def test_experts_in_a_loop_and_in_groups_give_the_same_model() -> None:
    results = []
    for grouped in (False, True):
        model = ReferenceModel(small(), router=noisy, grouped=grouped).double()
        loss = objective(model, text(), seeded())
        loss.backward()
        results.append([loss, *(parameter.grad for parameter in model.parameters())])
    for looped, in_groups in zip(*results, strict=True):
        assert torch.allclose(looped, in_groups, rtol=1e-10, atol=1e-15)


def test_sparse_and_dense_layers_stand_where_the_architecture_has_them() -> None:
    a = small(n_layers=6, first_k_dense=1, moe_every=2)
    model = ReferenceModel(a)
    sparse = [isinstance(block.feed_forward, MoELayer) for block in model.blocks]
    assert sparse == [False, False, True, False, True, False]
    assert sparse == [a.is_moe(layer) for layer in range(6)]
    assert len(list(model.routers())) == len(model(text()).routings) == a.n_moe_layers == 2


def test_any_router_goes_into_the_model_and_steps_once() -> None:
    class Counting(PaperRouter):
        steps = 0

        def after_step(self) -> None:
            self.steps += 1

    model = ReferenceModel(small(), router=Counting)
    routers = list(model.routers())
    assert [type(router) for router in routers] == [Counting, Counting]
    assert [(router.n_experts, router.top_k) for router in routers] == [(8, 2)] * 2
    model.after_step()
    assert [router.steps for router in routers] == [1, 1]


def test_router_losses_are_summed_over_layers() -> None:
    output = ReferenceModel(small(), router=noiseless)(text(3, 5))
    assert set(output.router_losses()) == {"z", "sequence"}
    want = sum(routing.losses["sequence"].item() for routing in output.routings)
    assert output.router_losses()["sequence"].item() == pytest.approx(want)


def test_the_sequences_of_a_batch_are_the_sequences_of_its_loss() -> None:
    model = ReferenceModel(small(), router=noiseless).double()
    together = model(text(3, 5)).routings[0].losses["sequence"].item()
    alone = [model(text(3, 5)[i : i + 1]).routings[0].losses["sequence"].item() for i in range(3)]
    assert together == pytest.approx(sum(alone) / 3, rel=1e-12)
    assert len(set(alone)) == 3


def test_the_loss_of_the_first_step_is_that_of_even_guesses() -> None:
    model = ReferenceModel(small(), gated_attention=True)
    loss = model(text()[:, :-1]).cross_entropy(text()[:, 1:])
    assert loss.item() == pytest.approx(math.log(VOCABULARY), abs=0.02)


@pytest.mark.parametrize("way", ["autocast", "dtype"])
@pytest.mark.parametrize("recompute", [False, True])
def test_bf16_runs_with_the_router_in_float32(way: str, recompute: bool) -> None:
    model = ReferenceModel(small(), gated_attention=True, recompute=recompute)
    if way == "dtype":
        model.to(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=way == "autocast"):
        output = model(text()[:, :-1])
    assert output.logits_BSV.dtype == torch.bfloat16
    loss = output.cross_entropy(text()[:, 1:])
    assert loss.dtype == torch.float32
    sum(output.router_losses().values(), start=loss).backward()
    model.after_step()
    for routing, router in zip(output.routings, model.routers(), strict=True):
        assert routing.gates_TK.dtype == router.bias_E.dtype == torch.float32
        assert router.weight_ED.dtype == router.weight_ED.grad.dtype == torch.float32
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    exact = ReferenceModel(small(), gated_attention=True)(text()[:, :-1])
    assert loss.item() == pytest.approx(exact.cross_entropy(text()[:, 1:]).item(), abs=0.01)


# ---------------------------------------------------------------- recompute


def once(recompute: bool, explicit: bool, router: object = noisy) -> tuple[list[object], object]:
    """Run two microbatches forward and backward; return all that could differ."""
    model = ReferenceModel(small(), router=router, recompute=recompute)  # type: ignore[arg-type]
    generator = seeded(11) if explicit else None
    torch.manual_seed(5)
    outcomes: list[object] = []
    for seed in (0, 1):
        tokens_BS = text(seed=seed)
        output = model(tokens_BS[:, :-1], generator)
        loss = output.cross_entropy(tokens_BS[:, 1:])
        sum(output.router_losses().values(), start=loss).backward()
        outcomes += [loss, *(routing.experts_TK for routing in output.routings)]
    outcomes += [parameter.grad for parameter in model.parameters()]
    outcomes += [buffer.clone() for buffer in model.buffers()]
    state = torch.get_rng_state() if generator is None else generator.get_state()
    return [*outcomes, state], model


@pytest.mark.parametrize("explicit", [False, True])
def test_report_77_recompute_counts_no_token_twice_and_changes_no_bit(explicit: bool) -> None:
    """Same noise, same routing, same gradients, same counts, and the generators stand the same."""
    plain, model = once(False, explicit)
    again, _ = once(True, explicit)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    tokens = 2 * text()[:, :-1].numel()
    assert [int(router.seen_E.sum()) for router in model.routers()] == [2 * tokens] * 2


def test_the_noise_of_that_test_decides() -> None:
    """Else a second draw would not have shown."""
    model = ReferenceModel(small(), router=noisy)
    first, second = (model(text(), seeded(seed)).routings[0].experts_TK for seed in (0, 1))
    assert not torch.equal(first, second)


def test_recompute_keeps_fewer_activations() -> None:
    def kept(recompute: bool) -> int:
        model = ReferenceModel(small(), recompute=recompute)
        sizes = []
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: sizes.append(tensor.numel()) or tensor, lambda tensor: tensor
        )
        with hooks:
            model(text())
        return sum(sizes)

    assert kept(True) < kept(False) / 3


def test_the_noise_recipe_reaches_the_router() -> None:
    def hot(d_model: int, n_experts: int, top_k: int) -> PaperRouter:
        return PaperRouter(d_model, n_experts, top_k, RouterRecipe(temperature=2.0))

    model = ReferenceModel(small(), router=hot)
    assert {router.recipe.temperature for router in model.routers()} == {2.0}
