"""A budget of money or energy in place of days: one window, one formula, and what is said of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mosaic_opt.allocation.inverse import invert
from mosaic_opt.allocation.phases import phases
from mosaic_opt.allocation.variants import changed, with_nodes
from mosaic_opt.envelope import Envelope, parse_envelope
from mosaic_opt.errors import EnvelopeError, MosaicError
from mosaic_opt.report import render_text
from mosaic_opt.solver import solve
from mosaic_opt.spending import Budget, cost, energy_j, gpu_hours

from .strategies import TINY, solved_tiny, tiny_envelope

MONEY = {"cost": 480.0, "price_per_gpu_hour": 2.5}  # one day of 8 devices
ENERGY = {"energy_kwh": 240.0, "watts_per_device": 1000.0, "pue": 1.25}  # the same


def with_budget(budget: dict[str, Any], **changes: Any) -> Envelope:
    spec = {k: v for k, v in TINY.items() if k != "window_days"}
    return parse_envelope(spec | {"budget": budget} | changes)


amounts = st.floats(1e-2, 1e8)


@given(amounts, st.floats(0.01, 100.0), st.integers(1, 10**5))
def test_the_days_that_money_buys_cost_the_money(money: float, price: float, n: int) -> None:
    days = Budget(cost=money, price_per_gpu_hour=price).days(n)
    assert cost(price, n, days) == pytest.approx(money, rel=1e-12)
    assert price * gpu_hours(n, days) == pytest.approx(money, rel=1e-12)


@given(amounts, st.floats(1.0, 1e4), st.floats(1.0, 3.0), st.integers(1, 10**5))
def test_the_days_that_energy_buys_take_the_energy(
    kwh: float, watts: float, pue: float, n: int
) -> None:
    days = Budget(energy_kwh=kwh, watts_per_device=watts, pue=pue).days(n)
    assert pue * energy_j(watts, n, days) == pytest.approx(kwh * 3.6e6, rel=1e-12)


@pytest.mark.parametrize("budget", [MONEY, ENERGY])
def test_the_answer_of_a_budget_is_that_of_its_days(budget: dict[str, Any]) -> None:
    bought, given_days = solve(with_budget(budget)), solved_tiny()
    assert with_budget(budget).window_days == 1.0
    assert bought.optimum is not None
    assert given_days.optimum is not None
    assert given_days.optimum.spend is None
    assert bought.candidates == given_days.candidates
    assert bought.optimum.model_copy(update={"spend": None}) == given_days.optimum


def test_twice_the_nodes_have_half_the_days_of_a_budget() -> None:
    one = with_budget(MONEY)
    two = with_nodes(one, 2)
    assert two.window_days == pytest.approx(0.5 * one.window_days)
    assert two.budget == one.budget
    assert with_nodes(tiny_envelope(), 2).window_days == tiny_envelope().window_days


def test_other_days_take_the_place_of_a_budget() -> None:
    other = changed(with_budget(MONEY), window_days=3.0)
    assert (other.window_days, other.budget) == (3.0, None)


@pytest.mark.parametrize("budget", [MONEY, ENERGY])
def test_json_round_trip(budget: dict[str, Any]) -> None:
    envelope = with_budget(budget)
    assert parse_envelope(json.loads(envelope.model_dump_json())) == envelope


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"window_days": 2.0, "budget": MONEY}, "budget that buys 1 days on 8 devices are two"),
        ({"budget": None}, "window_days is missing"),
        ({"budget": {"cost": 5.0}}, r"budget: cost needs price_per_gpu_hour, .* no default\.$"),
        ({"budget": {"energy_kwh": 5.0}}, "budget: energy_kwh needs watts_per_device"),
        ({"budget": {"price_per_gpu_hour": 5.0}}, "one of them and not neither"),
        ({"budget": MONEY | ENERGY}, "one of them and not both"),
        ({"budget": ENERGY | {"pue": 0.9}}, "budget.pue=0.9: .* nearest: 1"),
        ({"budget": MONEY | {"cost": -1.0}}, "budget.cost=-1.0"),
        ({"budget": MONEY | {"cost": 1e12}}, "which must be above 0 and at most 36500"),
        ({"budget": MONEY | {"price": 1.0}}, "budget.price is not a field"),
    ],
)
def test_one_window_and_no_other(changes: dict[str, Any], says: str) -> None:
    spec = {k: v for k, v in TINY.items() if k != "window_days"}
    with pytest.raises(EnvelopeError, match=says) as caught:
        parse_envelope(spec | changes)
    assert "\n" not in str(caught.value)


def test_a_run_that_a_cap_ends_spends_less_than_the_budget() -> None:
    both = MONEY | {"watts_per_device": 1000.0}
    free = solve(with_budget(both)).optimum
    assert free is not None
    assert free.spend is not None
    assert free.spend.days == free.spend.window_days == 1.0
    assert free.spend.cost == pytest.approx(480.0)
    assert free.spend.energy_j == pytest.approx(8 * 1000.0 * 86400.0)
    capped = solve(with_budget(both, tokens={"max_tokens": 0.25 * free.tokens})).optimum
    assert capped is not None
    assert capped.spend is not None
    share = capped.tokens / capped.tokens_available
    assert share < 1.0
    assert capped.spend.cost == pytest.approx(share * 480.0)
    assert capped.spend.gpu_hours == pytest.approx(share * 192.0)
    assert capped.spend.source == "ASSUMED"


def test_the_page_says_which_budget_it_was_and_what_the_run_takes() -> None:
    money = " ".join(render_text(solve(with_budget(MONEY))).split())
    assert "budget of cost, buys 1 days; the run takes 1 of them, 192 GPU-hours, and" in money
    assert "costs 480 [ASSUMED]" in money
    energy = " ".join(render_text(solve(with_budget(ENERGY))).split())
    assert "budget of energy, buys 1 days" in energy
    assert "draws 0.24 MWh [ASSUMED]" in energy
    assert "budget" not in render_text(solved_tiny())


# ---------------------------------------------------------------- invert, with the same formulas


def test_invert_takes_price_and_draw_from_the_budget() -> None:
    target = solved_tiny().bounds.primal
    assert target is not None
    found = invert(with_budget(MONEY | {"watts_per_device": 500.0, "pue": 2.0}), target, "cost")
    same = invert(tiny_envelope(), target, "cost", price_per_gpu_hour=2.5, watts_per_device=1000.0)
    assert found.best == same.best
    assert found.best is not None
    assert found.best.cost == pytest.approx(480.0)
    with pytest.raises(MosaicError, match="needs price_per_gpu_hour"):
        invert(with_budget(ENERGY), target, "cost")


def test_nodes_of_a_budget_have_each_its_own_days() -> None:
    target = 1.02 * (solved_tiny().bounds.primal or 0.0)
    free = invert(with_budget(MONEY), target, "days", nodes=[1, 2])
    day, half = (reach.days for reach in free.by_nodes)
    # a budget that is enough for the days of one node, and not for those of two
    budget = MONEY | {"cost": 480.0 * 0.5 * (day + 2.0 * half)}
    assert 2.0 * half > day
    found = invert(with_budget(budget), target, "nodes", nodes=[1, 2])
    assert found.within_days is None
    assert [reach.nodes for reach in found.by_nodes] == [1]
    assert [missed.nodes for missed in found.missed] == [2]
    stated = invert(tiny_envelope(), target, "nodes", nodes=[1, 2])
    assert stated.within_days == 1.0
    assert [reach.nodes for reach in stated.by_nodes] == [1, 2]


def test_phases_ask_for_every_window_whatever_the_budget() -> None:
    assert phases(with_budget(MONEY)).phases == phases(tiny_envelope()).phases
