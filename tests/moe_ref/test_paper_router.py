"""Algorithm 1 of arXiv 2608.10605, its controller, its losses and the limits that A.3 names."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy.stats import binomtest

torch = pytest.importorskip("torch")

from moe_ref.paper_router import (  # noqa: E402
    PaperRouter,
    RouterRecipe,
    sequence_auxiliary_loss,
    z_loss,
)

from .models import seeded  # noqa: E402


def router(n_experts: int, top_k: int, **recipe: object) -> PaperRouter:
    """Build a router that reads one feature for each expert: with row norm 1, x is the logits."""
    made = PaperRouter(n_experts, n_experts, top_k, RouterRecipe(**recipe)).double()
    with torch.no_grad():
        made.weight_ED.copy_(torch.eye(n_experts))
    return made


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=seeded(seed))


def by_hand(logits: list[float], bias: list[float], top_k: int, proposed: int) -> set[int]:
    """Choose the experts of one token by lines 3, 4, 8 and 9 without noise."""
    clean = [1.0 / (1.0 + math.exp(-logit)) for logit in logits]
    pool = sorted(range(len(clean)), key=lambda i: -clean[i])[:proposed]
    return set(sorted(pool, key=lambda i: -(clean[i] + bias[i]))[:top_k])


# ---------------------------------------------------------------- selection


@given(st.integers(1, 12), st.data())
def test_without_noise_it_is_the_clean_top_m_then_the_biased_top_k(
    n_experts: int, data: st.DataObject
) -> None:
    top_k, rho = data.draw(st.integers(1, n_experts)), data.draw(st.integers(1, 4))
    seed = data.draw(st.integers(0, 1000))
    made = router(n_experts, top_k, temperature=0.0, proposal=rho)
    made.bias_E.copy_(0.3 * draw(n_experts, seed=seed + 1))
    logits_TE = draw(7, n_experts, seed=seed)
    chosen = [set(row) for row in made(logits_TE).experts_TK.tolist()]
    bias = made.bias_E.tolist()
    proposed = min(rho * top_k, n_experts)
    assert chosen == [by_hand(row, bias, top_k, proposed) for row in logits_TE.tolist()]


def test_noise_of_little_temperature_changes_nothing_and_of_much_it_does() -> None:
    logits_TE = draw(200, 16)
    still = router(16, 2, temperature=0.0, proposal=2)(logits_TE).experts_TK
    cold = router(16, 2, temperature=1e-9, proposal=2)(logits_TE, generator=seeded()).experts_TK
    warm = router(16, 2, temperature=1.0, proposal=2)(logits_TE, generator=seeded()).experts_TK
    assert torch.equal(still, cold)
    assert not torch.equal(still, warm)


def test_the_limit_need_not_be_the_global_top_k() -> None:
    """A.3: the bias can favour an expert outside of the clean top M."""
    made = router(3, 1, temperature=0.0, proposal=2)
    made.bias_E.copy_(torch.tensor([0.0, 0.1, 0.9]))
    logits_TE = torch.tensor([[1.0, 0.9, -1.0]], dtype=torch.float64)
    biased = torch.sigmoid(logits_TE) + made.bias_E
    assert biased.argmax().item() == 2
    assert made(logits_TE).experts_TK.tolist() == [[1]]


def test_two_experts_with_the_papers_proposal_are_deterministic() -> None:
    """A.3: both are proposed, and the correction selects under the biased score."""
    made = router(2, 1, temperature=100.0, proposal=12)
    made.bias_E.copy_(torch.tensor([-0.2, 0.2]))
    logits_TE = draw(500, 2)
    want = (torch.sigmoid(logits_TE) + made.bias_E).argmax(dim=1)
    assert torch.equal(made(logits_TE, generator=seeded()).experts_TK[:, 0], want)


@pytest.mark.parametrize("tau", [0.2, 1.0, 3.0])
def test_gumbel_max_of_two_experts_selects_as_a_3_says(tau: float) -> None:
    """Uncentred, uncorrected, K = 1: b over a with probability sigmoid(log(s_b / s_a) / tau)."""
    made = router(2, 1, temperature=tau, proposal=1, centre_noise=False)
    tokens = 40_000
    logits_TE = torch.tensor([[0.3, -0.1]], dtype=torch.float64).expand(tokens, 2)
    chosen = int(made(logits_TE, generator=seeded(7)).experts_TK.sum())
    clean = torch.sigmoid(logits_TE[0])
    odds = float(torch.log(clean[1] / clean[0]))
    assert binomtest(chosen, tokens, 1 / (1 + math.exp(-odds / tau))).pvalue > 0.01
    assert binomtest(chosen, tokens, 1 / (1 + math.exp(odds / tau))).pvalue < 1e-6


def test_noise_is_gumbel_and_centring_takes_its_mean_over_the_tokens() -> None:
    like_TE = torch.zeros(50_000, 3, dtype=torch.float64)
    plain = router(3, 1, centre_noise=False).noise(like_TE, seeded())
    centred = router(3, 1).noise(like_TE, seeded())
    assert centred.mean(dim=0).abs().max() < 1e-12
    assert torch.allclose(centred, plain - plain.mean(dim=0))
    assert plain.mean().item() == pytest.approx(0.5772, abs=0.02)
    assert plain.var().item() == pytest.approx(math.pi**2 / 6, rel=0.02)


def test_the_noise_of_a_single_token_is_centred_away() -> None:
    logits_TE = draw(1, 16)
    made = router(16, 2, temperature=50.0, proposal=2)
    want = set(logits_TE[0].topk(2).indices.tolist())
    assert {*made(logits_TE, generator=seeded(3)).experts_TK[0].tolist()} == want


def test_evaluation_has_no_noise_and_counts_nothing() -> None:
    made = router(16, 2, temperature=50.0, proposal=2).eval()
    logits_TE = draw(40, 16)
    want = router(16, 2, temperature=0.0, proposal=2)(logits_TE).experts_TK
    assert torch.equal(made(logits_TE).experts_TK, want)
    assert made.seen_E.sum() == 0


def test_the_generator_decides() -> None:
    made = router(16, 2, temperature=1.0, proposal=2)
    logits_TE = draw(64, 16)
    first, again = (made(logits_TE, generator=seeded(5)).experts_TK for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, made(logits_TE, generator=seeded(6)).experts_TK)


@given(st.floats(-3, 3), st.integers(0, 100))
def test_the_scale_of_a_row_changes_nothing(exponent: float, seed: int) -> None:
    made = PaperRouter(6, 9, 2, RouterRecipe(temperature=0.0)).double()
    scaled = PaperRouter(6, 9, 2, RouterRecipe(temperature=0.0)).double()
    factors = 10.0 ** (exponent * torch.rand(9, 1, generator=seeded(seed), dtype=torch.float64))
    with torch.no_grad():
        scaled.weight_ED.copy_(made.weight_ED * factors)
    x_TD = draw(11, 6, seed=seed)
    assert torch.allclose(made.logits(x_TD), scaled.logits(x_TD), rtol=1e-12, atol=1e-12)
    assert torch.equal(made(x_TD).experts_TK, scaled(x_TD).experts_TK)


def test_rows_have_the_target_norm_or_stay_as_they_are() -> None:
    x_TD = draw(4, 6)
    made = PaperRouter(6, 9, 2, RouterRecipe(row_norm=2.0)).double()
    rows = made.weight_ED / made.weight_ED.norm(dim=1, keepdim=True)
    assert torch.allclose(made.logits(x_TD), 2.0 * x_TD @ rows.T)
    plain = PaperRouter(6, 9, 2, RouterRecipe(row_norm=None)).double()
    assert torch.allclose(plain.logits(x_TD), x_TD @ plain.weight_ED.T)


# ---------------------------------------------------------------- gates and counts


@given(st.integers(1, 10), st.data())
def test_gates_are_clean_scores_over_their_sum(n_experts: int, data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, n_experts))
    made = router(n_experts, top_k, temperature=0.5, proposal=2)
    made.bias_E.copy_(5.0 * draw(n_experts, seed=1))
    logits_TE = 3.0 * draw(20, n_experts, seed=data.draw(st.integers(0, 100)))
    routing = made(logits_TE, generator=seeded())
    clean_TK = torch.sigmoid(logits_TE).gather(1, routing.experts_TK)
    assert torch.allclose(routing.gates_TK, clean_TK / clean_TK.sum(dim=1, keepdim=True))
    assert torch.allclose(routing.gates_TK.sum(dim=1), torch.ones(20, dtype=torch.float64))
    assert all(len(set(row)) == top_k for row in routing.experts_TK.tolist())
    assert routing.counts_E.tolist() == [
        int((routing.experts_TK == expert).sum()) for expert in range(n_experts)
    ]


def test_gates_of_scores_too_small_for_float32_still_sum_to_1() -> None:
    made = PaperRouter(4, 4, 2)
    with torch.no_grad():
        made.weight_ED.copy_(torch.eye(4))
    routing = made(torch.full((3, 4), -200.0))
    assert torch.allclose(routing.gates_TK, torch.full((3, 2), 0.5))


def test_the_bias_selects_and_takes_no_part_in_the_gradient() -> None:
    made = router(6, 2, temperature=0.0)
    made.bias_E[5] = 10.0
    routing = made(draw(8, 6))
    assert (routing.experts_TK == 5).any(dim=1).all()
    routing.gates_TK.square().sum().backward()
    assert made.weight_ED.grad.abs().sum() > 0
    assert {name for name, _ in made.named_parameters()} == {"weight_ED"}


def test_it_computes_in_float32_however_narrow_its_input_and_its_model() -> None:
    made = PaperRouter(8, 6, 2).to(torch.bfloat16)
    assert made.weight_ED.dtype == made.bias_E.dtype == torch.float32
    assert made.seen_E.dtype == torch.int64
    exact = made.weight_ED.clone()
    assert torch.equal(made.to(torch.float16).weight_ED, exact)
    routing = made(torch.randn(5, 8, generator=seeded()).to(torch.bfloat16))
    assert routing.gates_TK.dtype == torch.float32
    assert made.double().bias_E.dtype == torch.float64


# ---------------------------------------------------------------- the controller


@given(st.lists(st.integers(0, 10_000), min_size=2, max_size=20))
def test_the_correction_has_rms_1_up_to_epsilon(counts: list[int]) -> None:
    made = router(len(counts), 1)
    made.seen_E += torch.tensor(counts)
    made.after_step()
    u_E = made.bias_E / made.recipe.bias_rate
    mean = sum(counts) / len(counts)
    variance = sum((mean - count) ** 2 for count in counts) / len(counts)
    want = math.sqrt(variance / (variance + made.recipe.bias_epsilon))
    assert float(u_E.square().mean().sqrt()) == pytest.approx(want, rel=1e-9, abs=1e-12)
    assert made.bias_E.sum().item() == pytest.approx(0.0, abs=1e-12)
    assert made.seen_E.sum() == 0


def test_equation_19_by_hand() -> None:
    made = router(4, 1, bias_rate=0.5)
    made.bias_E.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    made.seen_E += torch.tensor([4, 0, 0, 0])
    made.after_step()
    size = math.sqrt((9 + 1 + 1 + 1) / 4 + 1e-4)
    moved = [1 + 0.5 * -3 / size, 2 + 0.5 / size, 3 + 0.5 / size, 4 + 0.5 / size]
    centred = [value - sum(moved) / 4 for value in moved]
    assert made.bias_E.tolist() == pytest.approx(centred, rel=1e-12)


def test_the_correction_follows_the_shape_of_the_imbalance_and_not_the_batch() -> None:
    few, many = router(4, 1), router(4, 1)
    few.seen_E += torch.tensor([40, 10, 20, 30])
    many.seen_E += torch.tensor([40_000, 10_000, 20_000, 30_000])
    few.after_step()
    many.after_step()
    assert torch.allclose(few.bias_E, many.bias_E, rtol=1e-6)


def test_balance_leaves_the_bias_alone() -> None:
    made = router(4, 1)
    made.seen_E += 25
    made.after_step()
    assert made.bias_E.tolist() == [0.0] * 4


def test_accumulated_microbatches_count_as_one_batch() -> None:
    parts, whole = (router(8, 2, temperature=0.0) for _ in range(2))
    logits_TE = draw(30, 8)
    for part in logits_TE.chunk(3):
        parts(part)
        assert parts.bias_E.abs().sum() == 0.0
    whole(logits_TE)
    assert torch.equal(parts.seen_E, whole.seen_E)
    parts.after_step()
    whole.after_step()
    assert torch.equal(parts.bias_E, whole.bias_E)
    assert parts.bias_E.abs().sum() > 0.0


def test_the_controller_balances_a_skewed_input() -> None:
    made = router(16, 2, bias_rate=0.003)
    skew_E = torch.linspace(-1.5, 1.5, 16, dtype=torch.float64)
    violations = []
    for step in range(300):
        counts_E = made(skew_E + 0.7 * draw(2048, 16, seed=step), generator=seeded(step)).counts_E
        violations.append(float(counts_E.max() / counts_E.double().mean()) - 1.0)
        made.after_step()
    assert violations[0] > 2.0
    assert max(violations[-20:]) < 0.35


# ---------------------------------------------------------------- losses


@pytest.mark.parametrize("n_experts", [1, 2, 7])
def test_z_loss_of_even_logits(n_experts: int) -> None:
    logits_TE = torch.full((5, n_experts), 0.5, dtype=torch.float64)
    assert z_loss(logits_TE).item() == pytest.approx((0.5 + math.log(n_experts)) ** 2)


def test_z_loss_of_the_published_logits(shared_data: Path) -> None:
    """Two libraries give 7.540133 for them, in float32."""
    values = json.loads((shared_data / "routing_oracle_values.json").read_text())
    logits_TE = torch.tensor(values["logits"], dtype=torch.float64)
    assert z_loss(logits_TE).item() == pytest.approx(7.540133, rel=1e-6)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_sequence_loss_is_1_at_balance(top_k: int) -> None:
    """Each expert is among the K highest as often as any other, in each sequence."""
    cycle = torch.linspace(0.1, 0.9, 4, dtype=torch.float64)
    score_TE = torch.stack([cycle.roll(shift) for shift in range(4)]).repeat(3, 1)
    assert sequence_auxiliary_loss(score_TE, top_k, 3).item() == pytest.approx(1.0)


def test_sequence_loss_by_hand() -> None:
    """One sequence sends all to expert 0, the other one half to each."""
    score_TE = torch.tensor([[0.6, 0.2], [0.6, 0.2], [0.6, 0.2], [0.2, 0.6]], dtype=torch.float64)
    uneven = 2 * 0.75 + 0 * 0.25
    even = 1 * 0.5 + 1 * 0.5
    loss = sequence_auxiliary_loss(score_TE, 1, 2)
    assert loss.item() == pytest.approx((uneven + even) / 2)


def test_the_bias_takes_no_part_in_the_sequence_loss() -> None:
    made = router(6, 2, temperature=0.0)
    logits_TE = draw(12, 6)
    before = made(logits_TE, sequences=3).losses["sequence"]
    made.bias_E[0] = 10.0
    assert made(logits_TE, sequences=3).losses["sequence"] == before


def test_losses_carry_their_coefficients_and_are_absent_without() -> None:
    logits_TE = draw(12, 6)
    losses = router(6, 2, z_coefficient=0.5, sequence_coefficient=0.25)(logits_TE, 3).losses
    assert losses["z"].item() == pytest.approx(0.5 * z_loss(logits_TE).item())
    plain = sequence_auxiliary_loss(torch.sigmoid(logits_TE), 2, 3)
    assert losses["sequence"].item() == pytest.approx(0.25 * plain.item())
    assert router(6, 2, z_coefficient=0, sequence_coefficient=0)(logits_TE).losses == {}


# ---------------------------------------------------------------- input


@pytest.mark.parametrize(("top_k", "nearest"), [(0, 1), (9, 8)])
def test_a_top_k_that_cannot_be(top_k: int, nearest: int) -> None:
    with pytest.raises(ValueError, match=f"top_k is {top_k}, .* nearest legal value is {nearest}"):
        PaperRouter(4, 8, top_k)


def test_the_constants_of_a_3() -> None:
    recipe = RouterRecipe()
    assert (recipe.temperature, recipe.proposal, recipe.row_norm) == (0.01, 12, 1.0)
    assert (recipe.bias_rate, recipe.bias_epsilon) == (1e-3, 1e-4)
    assert (recipe.z_coefficient, recipe.sequence_coefficient) == (1e-4, 1e-3)
    with pytest.raises(ValidationError):
        RouterRecipe(temperature=-0.1)


def test_the_proposal_is_rho_k_or_all() -> None:
    assert PaperRouter(4, 64, 2).n_proposed == 24
    assert PaperRouter(4, 16, 2).n_proposed == 16
