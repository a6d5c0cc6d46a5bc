"""Optimizer, schedule and learning rate of A.2."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import lawfit  # noqa: E402
from moe_ref.errors import MoeRefError  # noqa: E402
from moe_ref.model import ReferenceModel  # noqa: E402
from moe_ref.recipe import (  # noqa: E402
    WarmupStableDecay,
    adamw,
    parameter_groups,
    peak_learning_rate,
)

from .models import small  # noqa: E402


@given(st.floats(1e3, 1e12), st.floats(1e3, 1e14))
def test_rule_17_is_that_of_the_law(n_active: float, tokens: float) -> None:
    want = lawfit.peak_learning_rate(n_active=n_active, tokens=tokens)
    assert peak_learning_rate(n_active, tokens) == pytest.approx(want, rel=1e-14)


@pytest.mark.parametrize(("n_active", "tokens"), [(0, 1), (1, -1), (math.inf, 1), (1, math.nan)])
def test_rule_17_needs_what_is_above_0(n_active: float, tokens: float) -> None:
    with pytest.raises(MoeRefError, match="must be finite and above 0"):
        peak_learning_rate(n_active, tokens)


# ---------------------------------------------------------------- schedule


def test_warm_up_plateau_and_decay_by_hand() -> None:
    schedule = WarmupStableDecay(peak=8.0, steps=20, warmup_steps=4)
    rates = [schedule.rate(step) for step in range(20)]
    assert rates == [2.0, 4.0, 6.0, *[8.0] * 14, 6.0, 4.0, 2.0]


@given(
    st.integers(1, 60), st.integers(0, 30), st.floats(0, 1), st.floats(1e-6, 1.0, exclude_min=True)
)
def test_the_rate_rises_once_and_falls_once(
    steps: int, warmup: int, share: float, peak: float
) -> None:
    schedule = WarmupStableDecay(peak=peak, steps=steps, warmup_steps=warmup, decay_share=share)
    rates = [schedule.rate(step) for step in range(steps)]
    assert 0.0 < min(rates) <= max(rates) <= peak
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    if schedule.decay_steps:
        assert rates[-1] <= peak / schedule.decay_steps * (1 + 1e-12)


def test_a_run_of_tokens_has_the_papers_warm_up() -> None:
    schedule = WarmupStableDecay.of_tokens(1e-3, 5_000_000_000, 1024 * 2048)
    assert schedule.steps == 2384
    assert schedule.warmup_steps == 48  # 100.7 million tokens
    assert schedule.decay_steps == 477


def test_a_run_that_its_warm_up_does_not_fit_is_refused_with_one_that_fits() -> None:
    with pytest.raises(MoeRefError, match=r"warmup_tokens=100000000 must end .* nearest: 80000\."):
        WarmupStableDecay.of_tokens(1e-3, 100_000, 1000)
    assert WarmupStableDecay.of_tokens(1e-3, 100_000, 1000, 80_000).warmup_steps == 80
    with pytest.raises(MoeRefError, match="at least tokens_per_step=1000"):
        WarmupStableDecay.of_tokens(1e-3, 999, 1000)


@pytest.mark.parametrize(("step", "nearest"), [(-1, 0), (20, 19)])
def test_a_step_outside_of_the_run_is_refused(step: int, nearest: int) -> None:
    with pytest.raises(MoeRefError, match=rf"step={step} must be from 0 to 19; nearest: {nearest}"):
        WarmupStableDecay(peak=1.0, steps=20).rate(step)


# ---------------------------------------------------------------- optimizer


def test_every_parameter_is_in_one_group_and_only_gains_do_not_decay() -> None:
    model = ReferenceModel(small(), gated_attention=True)
    decayed, plain = parameter_groups(model)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    grouped = [id(p) for group in (decayed, plain) for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())
    names = {id(p): name for name, p in model.named_parameters()}
    assert all("norm" in names[id(p)] for p in plain["params"])
    assert not any("norm" in names[id(p)] for p in decayed["params"])


def test_the_optimizer_is_adamw_with_the_papers_constants() -> None:
    """Three steps against the recurrence written out (arXiv 1711.05101, algorithm 2)."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).double()
    optimizer = adamw(model)
    weight, rate = model.weight.detach().clone(), 0.01
    first = second = torch.zeros_like(weight)
    for step in range(1, 4):
        gradient = torch.randn(2, 3, dtype=torch.float64) * 1e-7  # small: epsilon must be small too
        model.weight.grad, model.bias.grad = gradient, torch.zeros(2, dtype=torch.float64)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        corrected = (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-14)
        weight = weight * (1 - rate * 0.1) - rate * corrected
    assert torch.allclose(model.weight, weight, rtol=1e-12, atol=0)
