"""What a stack hides behind compute, and what its switches change: laws first, then bytes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.collectives import (
    all_to_all_once_time,
    all_to_all_time,
    distinct,
)
from perfmodel.exchange import SynchronisationTime
from perfmodel.hardware import Hardware
from perfmodel.iteration import PipelineTime, exposed_exchange, step_total
from perfmodel.layer import LayerCost, OperatorTimes, layer_cost
from perfmodel.modes import ModeTotals, layer_times, mode_totals
from perfmodel.replay import replay_of

from .option_strategies import (
    SLOW,
    optioned_runs,
    slow_all_to_all,
    slow_memory,
    slow_ring,
    stack_changes,
    stack_with,
)
from .strategies import Run, dims, ideal_hardware, ideal_stack, latent, moe, stage_time

SEQ = 2048.0
shares = st.floats(0.0, 1.0)
seconds = st.floats(0.0, 10.0)


# ---------------------------------------------------------------- a step and its parts


@given(optioned_runs(), stack_changes())
def test_the_breakdown_adds_up_under_any_stack_and_options(
    run: Run, changes: dict[str, float]
) -> None:
    model = run.under(stack_with(**changes))
    parts = model.breakdown()
    assert sum(parts.values()) == pytest.approx(model.step_s, rel=1e-12)
    assert all(part >= 0 for name, part in parts.items() if name != "bubble")
    assert parts["bubble"] >= -1e-12 * model.step_s
    assert set(parts) <= set(model.sources())


@pytest.mark.parametrize("name", ["dp_hidden", "pp_hidden", "a2a_hidden"])
@given(run=optioned_runs(), changes=stack_changes())
def test_more_overlap_never_takes_more_time(name: str, run: Run, changes: dict[str, float]) -> None:
    steps = [
        run.under(stack_with(**(changes | {name: share}))).pipeline.steady
        for share in (0.0, 0.4, 1.0)
    ]
    for less, more in pairwise(steps):
        assert more <= less * (1 + 1e-12)


# ---------------------------------------------------------------- stages


def totals(device: float = 3.0, dispatch: float = 0.25) -> ModeTotals:
    return ModeTotals(
        moe_device=device,
        dense_device=0.0,
        launches=0.0,
        dispatch=dispatch,
        host_share=1.0,
        forward_share=1 / 3,
        head=0.0,
        joined=0.0,
    )


@given(shares, seconds, seconds)
def test_no_more_of_an_all_to_all_is_hidden_than_there_is_compute(
    share: float, device: float, dispatch: float
) -> None:
    stack = ideal_stack(a2a_hidden=share)
    stage = stage_time(totals(device, dispatch), stack, dims(ep=8), 2.0, 0.0, 0.0, 0.0, 0.0)
    hidden = 2 * dispatch - stage.dispatch
    assert -1e-12 <= hidden <= 2 * device + 1e-12
    assert hidden <= share * 2 * dispatch + 1e-12
    if share * dispatch <= device:
        assert stage.dispatch == pytest.approx((1 - share) * 2 * dispatch)


@pytest.mark.parametrize(
    ("share", "device", "exposed"), [(0.0, 9.0, 4.0), (1.0, 9.0, 0.0), (0.5, 9.0, 2.0), (1, 1.5, 1)]
)
def test_what_is_left_of_an_all_to_all(share: float, device: float, exposed: float) -> None:
    """Two layers; 2 s each of all-to-all."""
    stack = ideal_stack(a2a_hidden=share)
    stage = stage_time(totals(device, 2.0), stack, dims(ep=8), 2.0, 0.0, 0.0, 0.0, 0.0)
    assert stage.dispatch == exposed
    assert stage.time == 2 * device + exposed


@pytest.mark.parametrize(("share", "exposed"), [(0.0, 5.0), (0.5, 2.0), (1.0, 0.0)])
def test_sharded_weights_hide_behind_the_microbatch(share: float, exposed: float) -> None:
    """5 s of exchange behind at most the given share of 6 s of compute."""
    stack = ideal_stack(dp_hidden=share)
    stage = stage_time(totals(3.0, 0.0), stack, dims(), 2.0, 0.0, 0.0, 5.0, 0.0)
    assert stage.sharding == exposed
    assert stage.time == 6.0 + exposed


@pytest.mark.parametrize(("share", "exposed"), [(0.0, 4.0), (0.25, 3.0), (1.0, 0.0)])
def test_hand_offs_behind_compute(share: float, exposed: float) -> None:
    stack = ideal_stack(pp_hidden=share)
    stage = stage_time(totals(3.0, 0.0), stack, dims(pp=2), 2.0, 0.0, 0.0, 0.0, 4.0)
    assert stage.hand_off == exposed
    assert stage.time == 6.0 + exposed


@given(shares, seconds, st.floats(0.1, 10.0), st.integers(1, 64))
def test_the_window_of_the_exchange_is_one_microbatch(
    share: float, exchange: float, tau: float, n: int
) -> None:
    pipeline = PipelineTime(steady=n * tau, bubble=0.0, pipeline_depth=0.0)
    sync = SynchronisationTime(0.0, exchange, 0.0, 0.0)
    left = exposed_exchange(ideal_stack(dp_hidden=share), pipeline, sync, float(n))
    assert left == pytest.approx(exchange - min(share * exchange, tau), abs=1e-9)
    assert exchange - left <= tau * (1 + 1e-12) + 1e-12


def test_all_of_an_exchange_is_exposed_or_all_that_fits_is_hidden() -> None:
    pipeline = PipelineTime(steady=8.0, bubble=1.0, pipeline_depth=0.0)
    sync = SynchronisationTime(0.0, 3.0, 0.0, 0.0)
    assert exposed_exchange(ideal_stack(dp_hidden=0.0), pipeline, sync, 4.0) == 3
    assert exposed_exchange(ideal_stack(dp_hidden=1.0), pipeline, sync, 4.0) == 3 - 2
    assert exposed_exchange(ideal_stack(dp_hidden=1.0), pipeline, sync, 2.0) == 0


@pytest.mark.parametrize("n", [1, 7])
def test_host_time_of_a_step_is_once_a_step(n: int) -> None:
    pipeline = PipelineTime(steady=8.0, bubble=0.0, pipeline_depth=0.0)
    sync = SynchronisationTime(0.0, 0.0, 0.0, 0.0)
    late = sync._replace(step_host=0.75)
    took = [step_total(ideal_stack(), pipeline, s, float(n)) for s in (sync, late)]
    assert took[1] - took[0] == 0.75


# ---------------------------------------------------------------- operators


def cost_on(hardware: Hardware, **degrees: float) -> LayerCost:
    return layer_cost(moe().dims, hardware, SEQ, dims(**degrees))


@pytest.mark.parametrize("mode", [0.0, 1.0, 3.0, 4.0 + 2.0 + 32.0])
def test_scales_of_device_and_attention_stretch_their_own_operators(mode: float) -> None:
    hardware = slow_ring("reduce_scatter", "all_gather")._replace(device=slow_memory().device)
    cost, replay = cost_on(hardware, tp=2, cp=2), replay_of(mode)
    for layer in (0.0, 1.0):
        plain = layer_times(cost, ideal_stack(), replay, layer, 0.0)
        twice = layer_times(cost, ideal_stack(device_scale=2.0), replay, layer, 0.0)
        core = layer_times(cost, ideal_stack(attention_scale=3.0), replay, layer, 0.0)
        exposed = layer_times(cost, ideal_stack(tp_exposed=0.25), replay, layer, 0.0)
        assert plain.tensor_parallel > 0
        for name in OperatorTimes._fields:
            before = getattr(plain, name)
            wire = name in ("tensor_parallel", "context_parallel")
            assert getattr(twice, name) == pytest.approx(before if wire else 2 * before)
            factor = 3 if name == "attention_core" else 1
            assert getattr(core, name) == pytest.approx(factor * before)
            factor = 0.25 if name == "tensor_parallel" else 1
            assert getattr(exposed, name) == pytest.approx(factor * before)


def test_what_tensor_parallelism_exposes_runs_from_nothing_to_everything() -> None:
    cost = cost_on(slow_ring("reduce_scatter", "all_gather"), tp=2)
    replay = replay_of(0.0)
    none, whole = (
        layer_times(cost, ideal_stack(tp_exposed=share), replay, 1.0, 0.0).tensor_parallel
        for share in (0.0, 1.0)
    )
    assert none == 0
    assert whole == cost.moe_forward.tensor_parallel + cost.moe_backward.tensor_parallel


@pytest.mark.parametrize(("mode", "passes"), [(0.0, 3), (1.0, 4), (2.0, 4), (3.0, 4), (6.0, 3)])
@pytest.mark.parametrize("degrees", [{}, {"tp": 2, "cp": 2, "micro_batch": 2}])
def test_scores_are_written_once_forward_once_again_and_twice_backward(
    mode: float, passes: int, degrees: dict[str, float]
) -> None:
    """8 heads, the whole square of each; moved at the bandwidth of the memory."""
    cost, replay = cost_on(slow_memory(), **degrees), replay_of(mode)
    fused, written = (
        layer_times(cost, ideal_stack(score_bytes=b), replay, 1.0, 0.0).attention_core
        for b in (0.0, 12.0)
    )
    p = dims(**degrees)
    scores = p.micro_batch * 8 / p.tp / p.cp * SEQ * SEQ
    assert (written - fused) * SLOW == pytest.approx(passes * 12 * scores)


@given(stack_changes(), st.sampled_from((0.0, 3.0, 4.0 + 32.0)))
def test_a_share_of_dispatches_goes_once(changes: dict[str, float], mode: float) -> None:
    a = moe(**latent()).dims
    cost = cost_on(ideal_hardware(), ep=8)._replace(dispatch=5.0, dispatch_once=3.0)
    found = mode_totals(cost, a, ideal_stack(**changes), mode).dispatch
    each = 5.0 + changes["copies_once"] * (3.0 - 5.0)
    assert found == pytest.approx(each * (4 if mode == 0 else 6))


# ---------------------------------------------------------------- a token once to each node


nodes_of = st.sampled_from((1, 2, 4, 8))
sizes = st.sampled_from((2, 4, 8, 16, 64))
volumes = st.floats(1.0, 1e9)


@given(nodes_of, sizes, st.sampled_from((1, 2, 8)), volumes, st.integers(1, 16))
def test_nics_never_carry_more_than_k_copies(
    node: int, size: int, stride: int, token_bytes: float, copies: int
) -> None:
    fabric = slow_all_to_all(node, nic_bw=SLOW).fabric
    once = all_to_all_once_time(fabric, float(size), float(stride), token_bytes, float(copies))
    each = all_to_all_time(fabric, float(size), float(stride), copies * token_bytes)
    assert once <= each * (1 + 1e-12)
    local = min(size, max(1, node // stride))
    assert (once > 0) is (local < size)


@given(nodes_of, sizes, volumes, st.integers(1, 16))
def test_links_never_carry_more_than_k_copies(
    node: int, size: int, token_bytes: float, copies: int
) -> None:
    fabric = slow_all_to_all(node, link_bw=SLOW, self_bw=SLOW).fabric
    once = all_to_all_once_time(fabric, float(size), 1.0, token_bytes, float(copies))
    each = all_to_all_time(fabric, float(size), 1.0, copies * token_bytes)
    assert once <= each * (1 + 1e-12)


@given(sizes, volumes)
def test_one_copy_goes_once_however_it_is_sent(size: int, token_bytes: float) -> None:
    """On nodes of one device there is nothing to forward either."""
    fabric = slow_all_to_all(1, nic_bw=SLOW, link_bw=3 * SLOW, self_bw=5 * SLOW).fabric
    once = all_to_all_once_time(fabric, float(size), 1.0, token_bytes, 1.0)
    assert once == pytest.approx(all_to_all_time(fabric, float(size), 1.0, token_bytes), rel=1e-12)


@given(st.integers(1, 64), st.integers(1, 32))
def test_distinct_groups_are_at_most_the_groups_and_the_choices(groups: int, copies: int) -> None:
    found = distinct(float(groups), float(copies))
    assert min(1, copies) - 1e-9 <= found <= min(groups, copies) + 1e-9
    assert distinct(float(groups), float(copies + 1)) >= found - 1e-12
    assert distinct(float(groups), 1.0) == pytest.approx(1)


@pytest.mark.parametrize(("nodes", "copies"), [(2, 2), (4, 8), (8, 8), (16, 6)])
def test_distinct_nodes_are_those_of_random_routing(nodes: int, copies: int) -> None:
    """Against 20,000 tokens with a fixed seed: independent choices, as the formula has them."""
    rng = np.random.default_rng(2608)
    tokens = 20_000
    chosen = rng.integers(nodes, size=(tokens, copies))
    counts = np.array([len(set(row)) for row in chosen.tolist()])
    error = counts.std() / np.sqrt(tokens)
    assert abs(counts.mean() - distinct(float(nodes), float(copies))) < 4 * error
    # A router chooses K different experts: a little more nodes, by less than 5% of them here.
    per_node = 256 // nodes
    scores = rng.random((2_000, 256))
    experts = np.argpartition(scores, copies, axis=1)[:, :copies]
    real = np.mean([len(set(row)) for row in (experts // per_node).tolist()])
    assert 0.98 < real / distinct(float(nodes), float(copies)) < 1.05


def test_bytes_of_tokens_that_go_once() -> None:
    """8 ranks on 4 nodes of 2, 3 choices: 4 (1 - (3/4)^3) nodes, 3/4 of them elsewhere."""
    fabric = slow_all_to_all(2, nic_bw=SLOW).fabric
    found = all_to_all_once_time(fabric, 8.0, 1.0, 1e6, 3.0)
    assert found * SLOW == pytest.approx(1e6 * 4 * (1 - 0.75**3) * 3 / 4)
