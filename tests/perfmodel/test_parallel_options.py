"""TP without sequence parallelism, CP by heads, and options in the kernel and in flags."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.attention import attention_parallel_time, attention_times, tensor_parallel_time
from perfmodel.batch import alike_of, loads_of, plan_matrix, price
from perfmodel.calibration.stacks import load_stack, shipped_stacks
from perfmodel.cluster import Batch
from perfmodel.memory import peak_bytes
from perfmodel.plan import Plan, plan_dims
from perfmodel.plan_space import PlanSpace
from perfmodel.ranges import DEFAULT_OPTIONS, option_flags, option_variables
from perfmodel.routing import Routing
from perfmodel.step import StepEstimate, estimate

from .option_strategies import (
    SLOW,
    optioned_runs,
    routings,
    slow_all_to_all,
    slow_memory,
    slow_ring,
    stack_with,
    with_options,
)
from .strategies import (
    Run,
    cluster,
    dense,
    dims,
    ideal_hardware,
    latent,
    legal_rows,
    moe,
    profile,
    runs,
)

SEQ = 2048.0
HIDDEN = 2.0 * 512  # bytes of a token between the blocks


# ---------------------------------------------------------------- sequence parallelism


@pytest.mark.parametrize(("on", "reduced", "halves"), [(1, 0, 2), (0, 1, 0)])
def test_what_joins_a_block_that_tp_splits(on: int, reduced: int, halves: int) -> None:
    """An all-gather and a reduce-scatter, or one all-reduce, of the same bytes."""
    p = dims(tp=4, sequence_parallel=on)
    one = 3 / 4 * 1e6 / SLOW
    assert tensor_parallel_time(slow_ring("all_reduce"), p, 1e6) == pytest.approx(reduced * one)
    found = tensor_parallel_time(slow_ring("all_gather", "reduce_scatter"), p, 1e6)
    assert found == pytest.approx(halves * one)
    assert tensor_parallel_time(slow_ring("all_reduce"), dims(sequence_parallel=on), 1e6) == 0


def test_latent_attention_without_sequence_parallelism_reduces_its_output() -> None:
    """Every rank has all tokens, so that nothing that it reads is gathered."""
    a, p = dense(**latent()).dims, dims(tp=4, sequence_parallel=0)
    gathered = slow_ring("all_gather", "reduce_scatter")
    assert attention_parallel_time(a, gathered, p, SEQ) == 0
    found = attention_parallel_time(a, slow_ring("all_reduce"), p, SEQ)
    assert found * SLOW == pytest.approx(3 / 4 * SEQ * HIDDEN)


@pytest.mark.parametrize(("backward", "factor"), [(0.0, 1.0), (1.0, 1.5)])
def test_norms_work_on_all_tokens_of_every_rank(backward: float, factor: float) -> None:
    """10 passes over the width: two norms and two residuals; 1.5 times as many backward."""
    a = dense().dims
    split, whole = (
        attention_times(a, slow_memory(), SEQ, dims(tp=4, sequence_parallel=on), backward)
        for on in (1.0, 0.0)
    )
    more = (whole.elementwise - split.elementwise) * SLOW
    assert more == pytest.approx(factor * 10 * SEQ * HIDDEN * (1 - 1 / 4))
    assert whole.core == split.core
    assert whole.linear == split.linear


@given(runs(sparse=False))
def test_sequence_parallelism_is_nothing_without_tp(run: Run) -> None:
    off = with_options(run, sequence_parallel=False)
    if run.plan.tp == 1:
        assert off.model.step_s == run.model.step_s
    else:
        on = run.model.breakdown(), off.model.breakdown()
        assert on[1]["compute_elementwise"] >= on[0]["compute_elementwise"]


# ---------------------------------------------------------------- context parallelism by heads


@pytest.mark.parametrize("a", [dense(), dense(**latent())], ids=["grouped", "latent"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("backward", [0.0, 1.0])
def test_heads_are_exchanged_before_attention_and_after_it(
    a: Any, tp: int, backward: float
) -> None:
    """Queries, keys and values of a rank's tokens go in, outputs come back; 3/4 leave the rank."""
    p = dims(cp=4, tp=tp, heads_over_cp=1)
    tokens = SEQ / 4
    hardware = slow_all_to_all(8, link_bw=SLOW)
    found = attention_times(a.dims, hardware, SEQ, p, backward).ring
    values = a.latent.v_head_dim if a.latent is not None else a.head_dim
    into = 2 * tokens * (a.n_heads * a.head_dim + a.n_kv_heads * (a.head_dim + values)) / tp
    out = 2 * tokens * a.n_heads * values / tp
    assert found * SLOW == pytest.approx(3 / 4 * (into + out))


@pytest.mark.parametrize("backward", [0.0, 1.0])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_attention_itself_takes_its_flops_either_way(cp: int, backward: float) -> None:
    a = dense().dims
    ring, heads = (
        attention_times(a, ideal_hardware(), SEQ, dims(cp=cp, heads_over_cp=on), backward)
        for on in (0.0, 1.0)
    )
    assert heads.core == pytest.approx(ring.core, rel=1e-12)
    assert heads.linear == ring.linear
    assert heads.ring == ring.ring == 0


def test_an_exchange_of_heads_is_exposed_and_a_ring_is_not() -> None:
    a = dense().dims
    hardware = slow_all_to_all(8, link_bw=1e15)  # slower than attention in neither
    ring, heads = (
        attention_times(a, hardware, SEQ, dims(cp=4, heads_over_cp=on), 0.0).ring
        for on in (0.0, 1.0)
    )
    assert ring == 0 < heads


def test_heads_are_not_exchanged_on_one_rank() -> None:
    a = dense().dims
    p = dims(heads_over_cp=1)
    assert attention_times(a, slow_all_to_all(8, link_bw=SLOW), SEQ, p, 0.0).ring == 0


# ---------------------------------------------------------------- many plans at once


SPACES: tuple[dict[str, Any], ...] = (
    {"zero": 0},
    {"zero": 2, "optimizer_offload": 0.5},
    {"zero": 3, "optimizer_instances": 2},
    {"cp_comm": "a2a", "optimizer_offload": 1.0},
    {"sequence_parallel": False},
)


@pytest.mark.parametrize("options", SPACES, ids=lambda o: "+".join(o))
@pytest.mark.parametrize("a", [moe(), dense(n_kv_heads=8)], ids=["sparse", "dense"])
@settings(max_examples=15)
@given(data=st.data())
def test_the_kernel_prices_options_and_routing_as_the_scalar_estimate(
    a: Any, options: dict[str, Any], data: st.DataObject
) -> None:
    routing = data.draw(routings(a.n_experts))
    batch = Batch(global_batch=16, seq_len=2048, routing=routing)
    table = PlanSpace(micro_batch=(1, 2), **options).skeleton(16, 2048, 16)
    rows = legal_rows(a, table)
    rows = np.sort(data.draw(st.permutations(rows.tolist()))[:6]).astype(np.int64)
    stack = stack_with(dp_hidden=0.5, a2a_hidden=0.3, copies_once=0.5)
    optimizer, where = batch.optimizer.dims, cluster(2)
    step_s, memory = price(
        a,
        plan_matrix(table),
        rows,
        hardware=where.constants,
        stack=stack.stack(),
        optimizer=optimizer,
        seq_len=2048,
        global_batch=16,
        alike=alike_of(table),
        loads=loads_of(table, routing),
    )
    assert len(rows) > 0
    for i, row in enumerate(rows):
        run = Run(a, table.plan(int(row)), where, batch)
        assert all(getattr(run.plan, name) == value for name, value in options.items())
        model = run.under(stack)
        assert step_s[i] == pytest.approx(model.step_s, rel=1e-12)
        p = plan_dims(run.plan, routing.load(run.plan.ep))
        n = float(model.n_microbatches)
        held = peak_bytes(a.dims, p, optimizer, stack.stack(), 2048.0, n)
        assert memory[i] == pytest.approx(held, rel=1e-12)


def test_a_capacity_counts_on_a_single_rank_too() -> None:
    """The first plan has the degrees of a single device, and another load than that."""
    a, optimizer = moe(), Batch(global_batch=16, seq_len=2048).optimizer.dims
    routing = Routing(capacity_factor=0.5, pad_to_capacity=True)
    table = PlanSpace(max_ep=1, max_tp=1, max_cp=1, max_pp=1, micro_batch=(1,)).skeleton(
        8, 2048, 16
    )
    rows = legal_rows(a, table)
    given_batch = {"optimizer": optimizer, "seq_len": 2048, "global_batch": 16}
    hardware, stack = cluster(1).constants, profile().stack()

    def memory(loads: np.ndarray | None) -> np.ndarray:
        machine = {"hardware": hardware, "stack": stack, "loads": loads}
        return price(a, plan_matrix(table), rows, **machine, **given_batch)[1]

    assert (table.ep[rows] == 1).all()
    assert (memory(loads_of(table, routing))[0] < memory(None)[0]).all()


# ---------------------------------------------------------------- what is said


@given(optioned_runs())
def test_every_option_that_no_fitted_run_had_is_said_once(run: Run) -> None:
    model = run.model
    values = option_variables(model)
    unlike = {name for name, value in values.items() if value != DEFAULT_OPTIONS[name]}
    said = option_flags(model)
    assert len(said) == len(set(said)) == len(unlike)
    for name in unlike:
        assert any(f" {name}=" in flag or f"{name}=" in flag for flag in said)
    assert set(said) <= set(estimate(*run, stack=profile()).flags)


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"zero": 3}, {"dp": 1}),
        ({"cp_comm": "a2a"}, {"dp": 8}),
        ({"sequence_parallel": False}, {"dp": 8}),
    ],
)
def test_an_option_without_effect_is_not_said(
    options: dict[str, Any], where: dict[str, Any]
) -> None:
    batch = Batch(global_batch=16, seq_len=2048)
    run = Run(dense(), Plan(**options, **where), cluster(1), batch)
    assert option_flags(run.model) == ()


def test_a_stack_that_was_fitted_with_an_option_does_not_flag_it() -> None:
    batch = Batch(global_batch=16, seq_len=2048)
    run = Run(dense(), Plan(dp=8, zero=3), cluster(1), batch)
    assert len(option_flags(run.under(load_stack("megatron-eager")))) == 1
    assert option_flags(run.under(load_stack("torchtitan"))) == ()
    never = run._replace(plan=Plan(dp=8, zero=1))
    fsdp = option_flags(never.under(load_stack("llm-foundry-a100")))
    assert len(fsdp) == 1
    assert "zero=1" in fsdp[0]


@pytest.mark.parametrize("name", shipped_stacks())
def test_every_shipped_stack_states_its_options(name: str) -> None:
    assert set(DEFAULT_OPTIONS) <= set(load_stack(name).ranges)


# ---------------------------------------------------------------- the interval of a step


def estimated(stack: str = "megatron-eager", **changes: Any) -> StepEstimate:
    fields: dict[str, Any] = {
        **{"n_layers": 16, "d_model": 2048, "n_heads": 16, "n_kv_heads": 8, "head_dim": 128},
        **{"vocab_size": 257664, "n_experts": 64, "top_k": 2, "d_expert": 1024, "d_ff": 0},
        **{"first_k_dense": 0, "d_shared": 0},
    }
    plan = Plan.model_validate({"ep": 8, "pp": 4, "dp": 8, "recompute": "full", **changes})
    batch = Batch(global_batch=64, seq_len=8192)
    return estimate(moe(**fields), plan, cluster(4), batch, stack=stack)


@given(optioned_runs(), st.sampled_from(("megatron-eager", "megatron-bridge")))
def test_the_interval_is_the_step_times_the_errors_of_runs_left_out(run: Run, name: str) -> None:
    stack = load_stack(name)
    step = estimate(*run, stack=stack)
    low, high = step.step_time_interval_s
    assert low == step.step_time_s * stack.errors.low
    assert high == step.step_time_s * stack.errors.high
    assert low < high
    assert step.sources["step_time_interval_s"] is step.sources["step_time_s"]


def test_the_interval_applies_to_what_the_stack_was_fitted_on() -> None:
    assert estimated().interval_applies
    assert not estimated(recompute="none").interval_applies
    assert not estimated(optimizer_offload=0.5).interval_applies
    assert not estimated(stack="megatron-bridge-h100").interval_applies  # on other devices
