"""Bounds of blocks of layouts: below the truth for every layout of every block."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from perfmodel.architecture import Architecture
from perfmodel.batch import alike_of, loads_of, plan_matrix, price
from perfmodel.bounds import MARGIN, Blocks, block_floors, blocks_of
from perfmodel.calibration.packs import shipped_packs
from perfmodel.calibration.stacks import StackProfile, load_stack, shipped_stacks
from perfmodel.cluster import Batch, Cluster
from perfmodel.ladders import ladder
from perfmodel.plan_space import PlanSpace
from perfmodel.plan_table import PlanTable, RuleMasks, legal_mask
from perfmodel.precision import Precision
from perfmodel.records import as_records
from perfmodel.routing import Routing
from perfmodel.rules import architecture_values
from perfmodel.stack import HIDDEN_SHARES, Stack

from .option_strategies import OPTIONS
from .strategies import architectures, batches, dense, fast_profile, latent, moe, profile


def bounds_and_prices(
    a: Architecture,
    table: PlanTable,
    rows: np.ndarray,
    cluster: Cluster,
    batch: Batch,
    stack: Stack,
    cap: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the bound of each row's block, and the step and memory of the row."""
    loads = loads_of(table, batch.routing)
    given: dict[str, Any] = {
        "hardware": cluster.constants_for(batch.precision),
        "stack": stack,
        "optimizer": batch.optimizer.dims,
        "seq_len": batch.seq_len,
        "global_batch": batch.global_batch,
        "alike": alike_of(table, batch.precision),
    }
    blocks = blocks_of(table, loads)
    legal = np.ones((1, len(blocks.values)), dtype=np.bool_)
    floors = block_floors(
        as_records([a.dims]),
        blocks,
        legal,
        n_devices=cluster.n_devices,
        memory_cap_bytes=cap,
        **given,
    )
    step_s, memory = price(a, plan_matrix(table), rows, loads=loads, **given)
    return floors[0][blocks.of_row[rows]], step_s, memory


def assert_below(floor: np.ndarray, step_s: np.ndarray, memory: np.ndarray, cap: float) -> None:
    fits = memory <= cap
    assert (floor[fits] <= step_s[fits]).all()
    assert not np.isnan(floor).any()
    assert (floor > 0.0).all()


@st.composite
def spaces(draw: st.DrawFn) -> PlanSpace:
    """Draw a space with every degree, and options that are alike in all of its plans."""
    return PlanSpace(
        etp=(1, 2, 4),
        vpp=(1, 2, 3),
        micro_batch=(1, 2, 4),
        layouts=draw(st.sampled_from((("equal",), ("balanced",), ("equal", "balanced")))),
        **{name: draw(st.sampled_from(values)) for name, values in OPTIONS.items()},
    )


@st.composite
def any_stacks(draw: st.DrawFn) -> Stack:
    """Draw a shipped stack, the host's time out of it or not, with shares that overlap."""
    name = draw(st.sampled_from(("", "fast", *shipped_stacks())))
    profiles = {"": profile, "fast": fast_profile}
    stack = (profiles[name]() if name in profiles else load_stack(name)).stack()
    share = st.sampled_from((0.0, 0.3, 1.0))
    if draw(st.booleans()):
        hidden = {n: draw(share) for n in Stack._fields if n.endswith("_hidden")}
        stack = stack._replace(**hidden, copies_once=draw(share))
    return stack


@settings(max_examples=150)
@given(
    architectures(),
    batches,
    spaces(),
    any_stacks(),
    st.sampled_from(shipped_packs()),
    st.sampled_from((1, 2)),
    st.sampled_from((1.0, 1.7)),
    st.floats(0.0, 1.0),
    st.randoms(use_true_random=False),
)
def test_bound_is_below_every_layout_of_the_block_that_fits(
    a: Architecture,
    batch: Batch,
    space: PlanSpace,
    stack: Stack,
    pack: str,
    nodes: int,
    imbalance: float,
    tight: float,
    random: Random,
) -> None:
    cluster = Cluster(hardware=pack, nodes=nodes)
    routing = Routing(imbalance=imbalance) if imbalance > 1.0 else Routing()
    batch = batch.model_copy(update={"routing": routing})
    table = space.skeleton(cluster.n_devices, batch.seq_len, batch.global_batch)
    legal = np.flatnonzero(legal_mask(table, a.rule_variables())).tolist()
    rows = np.array(sorted(random.sample(legal, min(60, len(legal)))), dtype=np.int64)
    if not len(rows):
        return
    _, _, memory = bounds_and_prices(a, table, rows, cluster, batch, stack, np.inf)
    cap = float(np.quantile(memory, tight))
    here = bounds_and_prices(a, table, rows, cluster, batch, stack, cap)
    assert_below(*here, cap)


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("tp", [(1,), (2, 4)])
def test_bound_is_below_in_every_precision(precision: Precision, tp: tuple[int, ...]) -> None:
    cluster = Cluster(hardware="p6-b200", nodes=4)
    batch = Batch(global_batch=256, seq_len=2048, precision=precision)
    table = PlanSpace(tp=tp, max_cp=2).skeleton(32, 2048, 256)
    for a in (ladder(8, 64, 4, 4), ladder(4, 8, 1, 1), dense(), moe(**latent(), mtp_layers=1)):
        rows = np.flatnonzero(legal_mask(table, a.rule_variables()))
        here = bounds_and_prices(a, table, rows, cluster, batch, profile().stack(), 179e9)
        assert_below(*here, 179e9)


# ---------------------------------------------------------------- how near they are


def test_bound_is_near_where_the_host_sets_the_pace_alone() -> None:
    """Nothing that the bound leaves out takes time: no jitter, exchange, or further nodes."""
    a, batch = ladder(4, 8, 1, 1), Batch(global_batch=256, seq_len=256)
    still = profile().stack()._replace(jitter_s=0.0, pipeline_node_cost=0.0)
    table = PlanSpace(tp=(1,), cp=(1,), recompute=("none",)).skeleton(8, 256, 256)
    rows = np.flatnonzero(legal_mask(table, a.rule_variables()))
    cluster = Cluster(hardware="p6-b200", nodes=1)
    floor, step_s, _ = bounds_and_prices(a, table, rows, cluster, batch, still, np.inf)
    assert (floor / step_s > 0.85).all()
    assert np.median(floor / step_s) > 0.95


def test_a_slower_part_raises_the_bound() -> None:
    a, batch = ladder(8, 64, 4, 4), Batch(global_batch=256, seq_len=2048)
    table = PlanSpace(max_tp=2, max_cp=1).skeleton(32, 2048, 256)
    rows = np.flatnonzero(legal_mask(table, a.rule_variables()))
    cluster = Cluster(hardware="p6-b200", nodes=4)
    stack = profile().stack()
    here = bounds_and_prices(a, table, rows, cluster, batch, stack, np.inf)[0]
    for name in ("host_layer_s", "host_microbatch_s", "device_scale"):
        slower = stack._replace(**{name: 3.0 * getattr(stack, name)})
        floor = bounds_and_prices(a, table, rows, cluster, batch, slower, np.inf)[0]
        assert (floor >= here * (1.0 - MARGIN)).all()
        assert floor.sum() > here.sum()


# ---------------------------------------------------------------- blocks and rules


def test_blocks_share_what_their_rows_have_in_common() -> None:
    table = PlanSpace(etp=(1, 2), vpp=(1, 2)).skeleton(16, 2048, 64)
    loads = np.linspace(1.0, 2.0, len(np.unique(table.ep)))[
        np.searchsorted(np.unique(table.ep), table.ep)
    ]
    blocks: Blocks = blocks_of(table, loads)
    assert blocks.most_tp == table.tp.max()
    u, etp, ep, pp, vpp, load = blocks.values[blocks.of_row].T
    for found, column in ((etp, table.etp), (ep, table.ep), (pp, table.pp), (vpp, table.vpp)):
        np.testing.assert_array_equal(found, column)
    np.testing.assert_array_equal(u, table.micro_batch / (table.tp * table.cp))
    np.testing.assert_array_equal(load, loads)
    assert len(np.unique(blocks.values, axis=0)) == len(blocks.values)


def test_a_block_that_is_not_legal_has_no_bound() -> None:
    batch = Batch(global_batch=64, seq_len=2048)
    table = PlanSpace().skeleton(16, 2048, 64)
    blocks = blocks_of(table, np.ones(len(table)))
    legal = np.zeros((2, len(blocks.values)), dtype=np.bool_)
    legal[1, ::2] = True
    floors = block_floors(
        as_records([moe().dims, dense().dims]),
        blocks,
        legal,
        hardware=Cluster(hardware="p6-b200", nodes=2).constants_for(Precision.BF16),
        stack=profile().stack(),
        optimizer=batch.optimizer.dims,
        seq_len=2048,
        global_batch=64,
        n_devices=16,
        memory_cap_bytes=1e12,
    )
    assert np.isinf(floors[~legal]).all()
    assert np.isfinite(floors[legal]).all()


@given(architectures())
def test_rules_of_some_columns_forbid_no_legal_row(a: Architecture) -> None:
    """And with all columns they forbid every other."""
    table = PlanSpace(etp=(1, 2), vpp=(1, 2, 3)).skeleton(16, 2048, 96)
    legal = legal_mask(table, a.rule_variables())
    values = architecture_values(a.rule_variables())
    some = RuleMasks({name: table.columns[name] for name in ("etp", "ep", "pp", "vpp")})
    assert not (legal & ~some.mask(values)).any()
    np.testing.assert_array_equal(table.rule_masks.mask(values), legal)
    single = RuleMasks({"ep": np.array([7])}).mask(values)
    assert single.all() == (a.n_experts % 7 == 0 or not a.n_experts)


# ---------------------------------------------------------------- what a bound may rely on


@pytest.mark.parametrize("name", HIDDEN_SHARES)
def test_no_profile_hides_more_than_all(name: str) -> None:
    """A share above 1 would hide a time that the bound counts."""
    stated = profile().model_dump(mode="json")
    part = stated["assumptions"] if name in stated["assumptions"] else stated["constants"]
    part[name] |= {"value": 1.5, **({"high": 1.5} if "high" in part[name] else {})}
    with pytest.raises(ValidationError, match=rf"{name}=1.5 is a share, at most 1; nearest: 1"):
        StackProfile.model_validate(stated)
