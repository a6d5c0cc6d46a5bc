"""The estimate of a step: what is refused, what is priced, and what every number rests on."""

from __future__ import annotations

from math import isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from perfmodel.architecture import Architecture, MfuConvention
from perfmodel.calibration.records import PackError
from perfmodel.cluster import Batch, Cluster
from perfmodel.errors import IllegalPlanError
from perfmodel.ladders import ladder
from perfmodel.plan import Plan, Recompute
from perfmodel.rules import RULES
from perfmodel.sources import Source
from perfmodel.step import DEFAULT_STACK, StepEstimate, check, estimate

from .strategies import (
    PACK,
    STACK,
    Run,
    architectures,
    batches,
    cluster,
    dense,
    legal_rows,
    moe,
    plans,
    profile,
    runs,
    skeleton,
)

RULE_NAMES = {rule.name for rule in RULES}


def numbers(step: StepEstimate) -> list[float]:
    found = [value for value in step.model_dump().values() if isinstance(value, float)]
    found += step.memory_by_stage_bytes
    found += step.breakdown_s.values()
    return found + [size for buckets in step.memory_buckets_bytes for size in buckets.values()]


# ---------------------------------------------------------------- legal and illegal


@given(architectures(), plans, batches, st.sampled_from((1, 2)))
def test_an_illegal_plan_is_refused_with_every_rule_that_it_breaks(
    a: Architecture, plan: Plan, batch: Batch, nodes: int
) -> None:
    broken = check(a, plan, cluster(nodes), batch)
    if not broken:
        assert isfinite(estimate(a, plan, cluster(nodes), batch, stack=profile()).step_time_s)
        return
    with pytest.raises(IllegalPlanError) as caught:
        estimate(a, plan, cluster(nodes), batch, stack=profile())
    assert caught.value.violations == broken
    assert {violation.rule for violation in broken} <= RULE_NAMES
    for violation in broken:
        assert violation.message in str(caught.value)


def test_an_illegal_plan_names_all_of_its_faults() -> None:
    plan = Plan(tp=3, ep=5, pp=3, dp=1, micro_batch=7)
    with pytest.raises(IllegalPlanError) as caught:
        estimate(moe(), plan, cluster(1), Batch(global_batch=16, seq_len=256))
    rules = [violation.rule for violation in caught.value.violations]
    assert set(rules) >= {
        "world_size",
        "expert_mesh",
        "global_batch",
        "equal_stages",
        "attention_heads",
        "experts",
    }
    order = [rule.name for rule in RULES]
    assert rules == sorted(rules, key=order.index)


@given(architectures(), batches, st.sampled_from((1, 2)), st.data())
def test_whatever_the_space_calls_legal_is_priced(
    a: Architecture, batch: Batch, nodes: int, data: st.DataObject
) -> None:
    table = skeleton(nodes, batch.seq_len, batch.global_batch)
    rows = legal_rows(a, table)
    plan = table.plan(int(rows[data.draw(st.integers(0, len(rows) - 1))]))
    assert check(a, plan, cluster(nodes), batch) == ()
    step = estimate(a, plan, cluster(nodes), batch, stack=profile())
    assert all(isfinite(value) for value in numbers(step))
    assert step.step_time_s > 0


def test_an_unknown_stack_is_said() -> None:
    with pytest.raises(PackError, match=f"no stack profile 'nemo'.*{STACK}"):
        estimate(moe(), Plan(dp=8), cluster(1), Batch(global_batch=16, seq_len=256), stack="nemo")


def test_the_stack_is_named_and_may_be_a_profile() -> None:
    batch = Batch(global_batch=16, seq_len=256)
    by_default = estimate(moe(), Plan(dp=8), cluster(1), batch)
    assert by_default.stack == DEFAULT_STACK == STACK
    assert by_default.hardware == PACK
    assert by_default == estimate(moe(), Plan(dp=8), cluster(1), batch, stack=profile())


# ---------------------------------------------------------------- numbers that agree


@given(runs())
def test_headline_numbers_are_one_step_seen_in_several_ways(run: Run) -> None:
    step = estimate(*run, stack=profile())
    devices = run.cluster.n_devices
    assert step.tokens_per_s * step.step_time_s == pytest.approx(run.batch.tokens)
    assert step.tokens_per_s_per_device * devices == pytest.approx(step.tokens_per_s)
    assert step.tflops_per_device * 1e12 == pytest.approx(step.mfu * run.cluster.peak_flops)
    assert sum(step.breakdown_s.values()) == pytest.approx(step.step_time_s, rel=1e-12)
    assert 0 < step.mfu < 1


@given(runs())
def test_memory_is_that_of_the_heaviest_stage(run: Run) -> None:
    step = estimate(*run, stack=profile())
    assert len(step.memory_by_stage_bytes) == run.plan.pp == len(step.memory_buckets_bytes)
    assert step.memory_bytes == max(step.memory_by_stage_bytes)
    assert step.memory_by_stage_bytes[step.heaviest_stage] == step.memory_bytes
    for held, buckets in zip(step.memory_by_stage_bytes, step.memory_buckets_bytes, strict=True):
        assert sum(buckets.values()) == pytest.approx(held)
        assert all(size >= 0 for size in buckets.values())


def test_a_plan_fits_up_to_the_last_byte() -> None:
    run = moe(), Plan(dp=8), cluster(1), Batch(global_batch=16, seq_len=256)
    need = estimate(*run).memory_bytes
    for memory, fits in ((need, True), (need * (1 - 1e-9), False), (need * 2, True)):
        device = Cluster(hardware=PACK, nodes=1, memory_bytes=memory)
        step = estimate(moe(), Plan(dp=8), device, run[3])
        assert step.fits is fits
        assert step.device_memory_bytes == memory
        assert step.memory_bytes == need


def test_the_mfu_convention_changes_the_numerator_and_nothing_else() -> None:
    run = moe(), Plan(dp=8), cluster(1), Batch(global_batch=16, seq_len=256)
    steps = {c: estimate(*run, mfu_convention=c) for c in MfuConvention}
    for convention, step in steps.items():
        assert step.mfu_convention is convention
        per_token = step.mfu * step.step_time_s * 8 * run[2].peak_flops / run[3].tokens
        assert per_token == pytest.approx(moe().flops_per_token(convention, 256))
    assert len({step.step_time_s for step in steps.values()}) == 1
    assert steps[MfuConvention.SIX_N_EMBEDDING].mfu > steps[MfuConvention.SIX_N_HEAD].mfu
    assert estimate(*run).mfu_convention is MfuConvention.SIX_N_NONEMBEDDING


def test_more_work_for_the_same_devices_takes_longer() -> None:
    def seconds(a: Architecture, global_batch: int, seq_len: int) -> float:
        batch = Batch(global_batch=global_batch, seq_len=seq_len)
        return estimate(a, Plan(dp=8), cluster(1), batch).step_time_s

    small = seconds(moe(), 16, 2048)
    assert seconds(moe(), 32, 2048) > small
    assert seconds(moe(n_layers=8), 16, 2048) > small
    # The host is the slower one at short sequences, and what it does has no length.
    assert seconds(moe(), 16, 2048) >= seconds(moe(), 16, 1024)
    assert seconds(moe(), 16, 2**18) > seconds(moe(), 16, 2**17)


# ---------------------------------------------------------------- what it rests on


@given(runs())
def test_every_part_and_every_headline_has_a_source(run: Run) -> None:
    step = estimate(*run, stack=profile())
    headlines = set(step.sources) - set(step.breakdown_s)
    assert set(step.breakdown_s) <= set(step.sources)
    assert headlines >= {"step_time_s", "mfu", "memory_bytes"}
    assert headlines <= set(StepEstimate.model_fields)
    assert all(isinstance(source, Source) for source in step.sources.values())


def test_a_headline_is_no_stronger_than_what_carries_it() -> None:
    """The shares of another mode than full recomputation are assumed, and so is the dispatch."""
    batch = Batch(global_batch=32, seq_len=8192)
    full, none = (
        estimate(moe(first_k_dense=0), Plan(dp=8, ep=8, recompute=mode), cluster(1), batch)
        for mode in (Recompute.FULL, Recompute.NONE)
    )
    assert full.sources["dispatch"] is Source.FITTED
    assert none.sources["dispatch"] is Source.ASSUMED
    for step in (full, none):
        assert step.breakdown_s["dispatch"] > 0.1 * step.step_time_s
    assert none.sources["step_time_s"] is none.sources["mfu"] is Source.ASSUMED
    assert full.sources["step_time_s"] is full.sources["mfu"] is Source.FITTED
    assert full.sources["memory_bytes"] is Source.ASSUMED


# ---------------------------------------------------------------- as a value


@given(runs())
def test_an_estimate_reads_back_from_its_json(run: Run) -> None:
    step = estimate(*run, stack=profile())
    assert StepEstimate.model_validate_json(step.model_dump_json()) == step


def test_an_estimate_is_frozen_and_takes_no_other_field() -> None:
    step = estimate(dense(), Plan(dp=8), cluster(1), Batch(global_batch=16, seq_len=256))
    with pytest.raises(ValidationError, match="frozen"):
        step.mfu = 1.0  # type: ignore[misc]
    with pytest.raises(ValidationError, match="Extra inputs"):
        StepEstimate.model_validate(step.model_dump() | {"fun": 1})


def test_the_optimum_of_the_paper_on_its_cluster_is_plausible() -> None:
    """arXiv 2608.10605 predicts 12.38%; half or twice as much would be another machine."""
    step = estimate(
        ladder(12, n_experts=96, top_k=2, expert_split=4),
        Plan.parse("ep=8,pp=8,mbs=4,recompute=full", world=256),
        Cluster.parse(f"{PACK}:32"),
        Batch(global_batch=1024, seq_len=2048),
    )
    assert 0.5 * 0.1238 < step.mfu < 2 * 0.1238
    assert step.fits
    assert step.architecture["n_experts"] == 96
    assert step.plan.dp == 32
