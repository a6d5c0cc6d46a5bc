"""The shortest step under each draw of a stack, against pricing every plan under every draw."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from perfmodel.architecture import Architecture
from perfmodel.batch import plan_matrix, price
from perfmodel.batch_draws import HOST_CONSTANTS, differ_in_host_alone, least_steps
from perfmodel.cluster import Batch
from perfmodel.memory import stages_are_alike
from perfmodel.plan import Plan
from perfmodel.stack import Stack
from perfmodel.uncertainty import draw_stacks

from .option_strategies import stack_changes, stack_with
from .strategies import (
    Run,
    architectures,
    batches,
    cluster,
    legal_rows,
    moe,
    profile,
    runs,
    skeleton,
)

NODES = 2
BATCH = Batch(global_batch=32, seq_len=2048)


def host_constants() -> st.SearchStrategy[dict[str, float]]:
    """Values from none to many times those of a fitted profile."""
    sizes = {name: getattr(profile().stack(), name) or 0.05 for name in HOST_CONSTANTS}
    factor = st.sampled_from((0.0, 0.3, 0.9, 1.0, 1.1, 3.0, 30.0))
    return st.fixed_dictionaries({k: factor.map(lambda f, v=v: f * v) for k, v in sizes.items()})


def case(a: Architecture, batch: Batch, rows: np.ndarray) -> tuple[Any, ...]:
    table = skeleton(NODES, batch.seq_len, batch.global_batch)
    fields = {
        "hardware": cluster(NODES).constants,
        "optimizer": batch.optimizer.dims,
        "seq_len": batch.seq_len,
        "global_batch": batch.global_batch,
    }
    return (a, plan_matrix(table), rows), fields


def by_pricing(given_: tuple[Any, ...], stacks: list[Stack]) -> tuple[np.ndarray, np.ndarray]:
    """Price every row under every stack; the first row of equal steps."""
    (a, plans, rows), fields = given_
    priced = [price(a, plans, rows, stack=stack, **fields)[0] for stack in stacks]
    at = [int(np.argmin(step_s)) for step_s in priced]
    return np.array([s[i] for s, i in zip(priced, at, strict=True)]), rows[at]


def found_by_draws(
    given_: tuple[Any, ...], stacks: list[Stack], **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    positional, fields = given_
    return least_steps(*positional, stacks, **fields, **options)


def assert_equal(one: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray]) -> None:
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


@given(
    architectures(),
    batches,
    stack_changes() | st.just({}),
    st.lists(host_constants(), min_size=1, max_size=20),
    st.randoms(use_true_random=False),
)
def test_it_is_the_least_of_all_plans_in_every_draw(
    a: Architecture,
    batch: Batch,
    changes: dict[str, float],
    drawn: list[dict[str, float]],
    random: Random,
) -> None:
    """Bit for bit, whatever the stack hides, with uneven and interleaved pipelines among them."""
    table = skeleton(NODES, batch.seq_len, batch.global_batch)
    legal = legal_rows(a, table).tolist()
    rows = np.array(sorted(random.sample(legal, min(60, len(legal)))), dtype=np.int64)
    base = stack_with(**changes).stack()
    stacks = [base._replace(**values) for values in drawn]
    given_ = case(a, batch, rows)
    expected = by_pricing(given_, stacks)
    assert_equal(found_by_draws(given_, stacks), expected)
    some = np.array(sorted(random.sample(rows.tolist(), min(3, len(rows)))), dtype=np.int64)
    assert_equal(found_by_draws(given_, stacks, likely=some), expected)


def test_all_layouts_of_a_model_under_hosts_from_none_to_slow() -> None:
    a = moe(n_layers=16, n_experts=32)
    rows = legal_rows(a, skeleton(NODES, BATCH.seq_len, BATCH.global_batch))
    given_ = case(a, BATCH, rows)
    drawn = draw_stacks(profile(), 10, seed=1).stacks
    stacks = [
        stack._replace(**{name: factor * getattr(stack, name) for name in HOST_CONSTANTS})
        for factor in (0.0, 0.03, 0.3, 1.0)
        for stack in drawn
    ]
    expected = by_pricing(given_, stacks)
    assert_equal(found_by_draws(given_, stacks), expected)
    assert len(set(expected[1].tolist())) > 1  # or the case says little


def test_an_interleaved_pipeline_that_a_slower_host_makes_shorter_is_not_skipped() -> None:
    """Its closed form falls where the plain chunks grow, here by 3 %: its floor bounds nothing."""
    a = moe(
        n_layers=12,
        d_model=2048,
        head_dim=256,
        d_ff=131072,
        vocab_size=512000,
        d_expert=2048,
        first_k_dense=2,
    )
    batch = Batch(global_batch=16, seq_len=2048)
    table = skeleton(NODES, batch.seq_len, batch.global_batch)
    layouts = (
        "tp=1,ep=8,pp=2,vpp=1,cp=2,dp=4,mbs=1,recompute=full",
        "tp=1,ep=8,pp=2,vpp=2,cp=2,dp=4,mbs=2,recompute=selective",
    )
    wanted = [Plan.parse(text) for text in layouts]
    rows = np.array([i for i in range(len(table)) if table.plan(i) in wanted], dtype=np.int64)
    assert len(rows) == 2
    hosts = ((4.3e-05, 3.8e-05, 3.6e-05, 0.67, 8.8e-06), (6.8e-04, 3.8e-05, 2.9e-04, 0.67, 8.8e-05))
    stacks = [
        profile().stack()._replace(**dict(zip(HOST_CONSTANTS, values, strict=True)))
        for values in hosts
    ]
    given_ = case(a, batch, rows)
    expected = by_pricing(given_, stacks)
    (positional, fields), (quick, slow) = given_, stacks
    interleaved = (positional[0], positional[1], expected[1][1:])
    assert (
        price(*interleaved, stack=slow, **fields)[0] < price(*interleaved, stack=quick, **fields)[0]
    )
    assert expected[1][0] != expected[1][1]
    assert_equal(found_by_draws(given_, stacks), expected)


def test_of_equal_steps_the_first_row_is_taken_whatever_is_likely() -> None:
    (a, plans, rows), fields = case(
        moe(), BATCH, legal_rows(moe(), skeleton(NODES, BATCH.seq_len, BATCH.global_batch))
    )
    twice = np.vstack([plans, plans])
    both = np.concatenate([rows, rows + len(plans)])
    stacks = list(draw_stacks(profile(), 5, seed=0).stacks)
    given_ = (a, twice, both), fields
    expected = by_pricing(given_, stacks)
    assert (expected[1] < len(plans)).all()
    later = np.unique(expected[1] + len(plans))
    assert_equal(found_by_draws(given_, stacks, likely=later), expected)


@pytest.mark.parametrize("name", ["device_scale", "dp_hidden", "gradient_bytes"])
def test_stacks_that_differ_in_more_than_the_host_are_priced_one_by_one(name: str) -> None:
    rows = legal_rows(moe(), skeleton(NODES, BATCH.seq_len, BATCH.global_batch))
    given_ = case(moe(), BATCH, rows)
    base = profile().stack()
    stacks = [base._replace(**{name: value}) for value in (0.2, 0.5, 1.0)]
    assert not differ_in_host_alone(stacks)
    assert_equal(found_by_draws(given_, stacks), by_pricing(given_, stacks))


def test_without_plans_there_is_no_step() -> None:
    given_ = case(moe(), BATCH, np.empty(0, dtype=np.int64))
    step_s, rows = found_by_draws(given_, [profile().stack()] * 2)
    assert step_s.tolist() == [np.inf, np.inf]
    assert rows.tolist() == [-1, -1]


@settings(max_examples=100)
@given(runs(), host_constants(), host_constants())
def test_no_constant_of_the_host_makes_a_step_shorter(
    run: Run, one: dict[str, float], other: dict[str, float]
) -> None:
    """What skipping rests on: 1F1B, stages alike, and nothing of the exchange hidden."""
    assume(run.plan.vpp == 1 or run.plan.pp == 1)
    assume(stages_are_alike(run.architecture.dims, run.dims))
    low = {name: min(one[name], other[name]) for name in HOST_CONSTANTS}
    high = {name: max(one[name], other[name]) for name in HOST_CONSTANTS}
    least, most = (run.under(stack_with(dp_hidden=0.0, **v)).step_s for v in (low, high))
    assert least <= most * (1.0 + 1e-12)
