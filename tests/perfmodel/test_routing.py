"""How tokens fall on experts: the fullest rank, what a capacity drops, and what a load costs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from perfmodel.calibration.packs import load_pack
from perfmodel.calibration.stacks import StackProfile
from perfmodel.cluster import Batch
from perfmodel.errors import PerfmodelError
from perfmodel.frozen import explain
from perfmodel.layer import layer_cost, rows_per_expert
from perfmodel.layout_search import search_layouts
from perfmodel.plan import Plan
from perfmodel.routing import Routing
from perfmodel.sources import Source
from perfmodel.step import check, estimate

from .option_strategies import optioned_runs, routings, slow_all_to_all
from .strategies import (
    Run,
    cluster,
    dense,
    dims,
    ideal_hardware,
    moe,
    profile,
    runs,
)

counts = st.lists(st.integers(0, 1000), min_size=1, max_size=64).filter(any)
SEQ = 2048.0


def groups(values: list[float], ep: int) -> list[list[float]]:
    """Deal experts out in order, as many to each rank."""
    local = len(values) // ep
    return [values[i * local : (i + 1) * local] for i in range(ep)]


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


# ---------------------------------------------------------------- load


@given(counts, st.data())
def test_load_of_a_distribution_is_that_of_the_fullest_rank(
    tokens: list[int], data: st.DataObject
) -> None:
    ep = data.draw(st.sampled_from(divisors(len(tokens))))
    routing = Routing(tokens_per_expert=tuple(map(float, tokens)))
    fullest = max(sum(rank) for rank in groups([float(t) for t in tokens], ep))
    assert routing.load(ep) == pytest.approx(fullest / (sum(tokens) / ep))
    assert routing.load(1) == pytest.approx(1)
    assert routing.dropped == 0


@given(counts)
def test_more_ranks_never_even_out_a_distribution(tokens: list[int]) -> None:
    """A part of a rank is fuller than the rank, or as full."""
    routing = Routing(tokens_per_expert=tuple(map(float, tokens)))
    degrees = divisors(len(tokens))
    for coarse in degrees:
        for fine in degrees:
            if fine % coarse == 0:
                assert routing.load(fine) >= routing.load(coarse) * (1 - 1e-12)


@given(st.floats(1.0, 1e3), st.integers(2, 64))
def test_a_factor_is_the_load_of_any_group(imbalance: float, ep: int) -> None:
    routing = Routing(imbalance=imbalance)
    assert routing.load(ep) == imbalance
    assert routing.load(1) == 1  # one rank holds every expert
    assert routing.dropped == 0


def test_even_routing_is_the_default() -> None:
    assert Batch(global_batch=1, seq_len=1).routing == Routing()
    assert Routing().load(8) == 1
    even = Routing(tokens_per_expert=(3.0,) * 16)
    assert [even.load(ep) for ep in (1, 2, 16)] == [1, 1, 1]


# ---------------------------------------------------------------- capacity


@given(counts, st.floats(0.25, 4.0), st.data())
def test_kept_and_dropped_tokens_are_all_tokens(
    tokens: list[int], cap: float, data: st.DataObject
) -> None:
    routing = Routing(tokens_per_expert=tuple(map(float, tokens)), capacity_factor=cap)
    mean = sum(tokens) / len(tokens)
    kept = [min(float(t), cap * mean) for t in tokens]
    assert routing.dropped == pytest.approx(1 - sum(kept) / sum(tokens), abs=1e-9)
    ep = data.draw(st.sampled_from(divisors(len(tokens))))
    fullest = max(sum(rank) for rank in groups(kept, ep))
    assert routing.load(ep) == pytest.approx(fullest / (sum(tokens) / ep))
    assert routing.load(ep) <= cap * (1 + 1e-12)


@given(st.sampled_from((4, 8, 16)).flatmap(routings), st.sampled_from((1, 2, 4)))
def test_no_rank_is_fuller_than_the_capacity_and_padded_ones_are_as_full(
    routing: Routing, ep: int
) -> None:
    load, cap = routing.load(ep), routing.capacity_factor
    if cap is None:
        assert load >= 1 - 1e-12
    elif routing.pad_to_capacity:
        assert load == cap
    else:
        assert load <= cap * (1 + 1e-12)
    if routing.dropped is not None:
        assert 0 <= routing.dropped < 1
        if cap is None or (cap >= routing.imbalance and routing.tokens_per_expert is None):
            assert routing.dropped == 0
    else:  # a factor does not say how full the other experts are
        assert routing.tokens_per_expert is None
        assert cap is not None
        assert cap < routing.imbalance


def test_a_larger_capacity_never_drops_more() -> None:
    tokens = (1.0, 5.0, 2.0, 8.0)
    drops = [
        Routing(tokens_per_expert=tokens, capacity_factor=cap).dropped
        for cap in (0.5, 1.0, 1.5, 2.0)
    ]
    # mean 4: over 2, 4, 6 and 8 tokens an expert
    assert drops == [3 / 16 + 6 / 16, 1 / 16 + 4 / 16, 2 / 16, 0]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"imbalance": 0.9}, "imbalance=0.9"),
        ({"imbalance": float("inf")}, "imbalance"),
        ({"capacity_factor": 0.0}, "capacity_factor=0.0"),
        ({"pad_to_capacity": True}, "needs capacity_factor"),
        ({"tokens_per_expert": ()}, "must have a token"),
        ({"tokens_per_expert": (0.0, 0.0)}, "must have a token"),
        ({"tokens_per_expert": (1.0, -1.0)}, "tokens_per_expert.1=-1.0"),
        ({"tokens_per_expert": (1.0,), "imbalance": 2.0}, "keep one"),
        ({"overflow": 1}, "overflow"),
    ],
    ids=lambda value: None if isinstance(value, str) else "+".join(value),
)
def test_a_routing_that_cannot_be_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Routing(**fields)
    sentence = explain(refused.value, Routing)
    assert said in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize("a", [moe(), dense()], ids=["16 experts", "none"])
def test_a_distribution_is_over_the_models_experts(a: Any) -> None:
    routing = Routing(tokens_per_expert=(1.0,) * 8)
    batch = Batch(global_batch=16, seq_len=256, routing=routing)
    said = f"^tokens_per_expert has 8 numbers; the model has {a.n_experts} experts.$"
    for ask in (
        lambda: estimate(a, Plan(dp=8), cluster(1), batch),
        lambda: check(a, Plan(dp=8), cluster(1), batch),
        lambda: search_layouts(a, cluster(1), batch),
    ):
        with pytest.raises(PerfmodelError, match=said):
            ask()


# ---------------------------------------------------------------- what a load costs


@pytest.mark.parametrize("load", [0.5, 1.0, 2.5])
def test_the_fullest_rank_sets_experts_and_dispatch(load: float) -> None:
    a, p = moe().dims, dims(ep=4, load=load)
    even = dims(ep=4)
    assert rows_per_expert(a, p, SEQ) == load * SEQ * 2 * 4 / 16
    for hardware in (ideal_hardware(), slow_all_to_all(2, nic_bw=1e9)):
        found, plain = (layer_cost(a, hardware, SEQ, q) for q in (p, even))
        for way in ("moe_forward", "moe_backward"):
            full, mean = getattr(found, way), getattr(plain, way)
            assert full.experts == pytest.approx(load * mean.experts)
            assert full.experts > 0
            assert full.router == mean.router
            assert full.attention_core == mean.attention_core
            assert full.dense_ffn == mean.dense_ffn
        assert found.dispatch == pytest.approx(load * plain.dispatch)
        assert found.dispatch_once == pytest.approx(load * plain.dispatch_once)
        assert found.dense_forward == plain.dense_forward


def calm() -> StackProfile:
    """The stack without the wait for the slowest rank, which a busier device makes shorter."""
    fitted = profile()
    still = fitted.constants["jitter_s"].model_copy(update={"value": 0.0, "low": 0.0})
    return fitted.model_copy(update={"constants": {**fitted.constants, "jitter_s": still}})


@given(runs(sparse=True), st.sampled_from((1.25, 4.0)))
def test_an_uneven_routing_never_makes_a_faster_step(run: Run, imbalance: float) -> None:
    uneven = run._replace(
        batch=run.batch.model_copy(update={"routing": Routing(imbalance=imbalance)})
    )
    before, after = run.under(calm()).step_s, uneven.under(calm()).step_s
    assert after >= before * (1 - 1e-12)
    if run.plan.ep == 1:
        assert after == before


@given(optioned_runs())
def test_an_estimate_says_what_is_dropped_and_that_a_load_is_assumed(run: Run) -> None:
    step = estimate(*run, stack=profile())
    sparse = run.architecture.n_experts > 0
    assert step.dropped_tokens_share == (run.batch.routing.dropped if sparse else 0)
    assert step.sources["dropped_tokens_share"] is Source.ASSUMED
    load = run.batch.routing.load(run.plan.ep)
    said = [flag for flag in step.flags if " load=" in flag]
    assert len(said) == (sparse and load != 1)
    assert all("ASSUMED" in flag and "no run" in flag for flag in said)


def test_the_load_does_not_depend_on_the_machine() -> None:
    """A step under imbalance is priced on a pack whose all-to-all nobody measured as well."""
    assert not load_pack("mi355x").surfaces["all_to_all"].measured
    batch = Batch(global_batch=16, seq_len=2048, routing=Routing(imbalance=2.0))
    where = cluster(1).model_copy(update={"hardware": "mi355x"})
    even = batch.model_copy(update={"routing": Routing()})
    plan = Plan(dp=8, ep=8)
    uneven_s, even_s = (estimate(moe(), plan, where, b).step_time_s for b in (batch, even))
    assert uneven_s >= even_s
