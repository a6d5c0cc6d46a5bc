"""Levels of the network above the nodes: neutral, monotone, and bound by their links."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from perfmodel.batch import alike_of, plan_matrix, price
from perfmodel.cluster import Batch, Cluster
from perfmodel.collectives import (
    NO_LEVEL,
    Fabric,
    Level,
    all_reduce_time,
    all_to_all_once_time,
    all_to_all_time,
    chain_time,
    leaves,
    point_to_point_time,
    ring_time,
)
from perfmodel.errors import PerfmodelError
from perfmodel.levels import NetworkLevel
from perfmodel.memory import dense_parameters, expert_parameters
from perfmodel.plan import Plan
from perfmodel.plan_space import PlanSpace
from perfmodel.plan_table import legal_mask
from perfmodel.sources import Source
from perfmodel.step import StepModel, estimate

from .strategies import PACK, Run, cluster, moe, profile, runs

FABRIC: Fabric = Cluster(hardware=PACK, nodes=8).constants.fabric
FREE = Level(16.0, inf, 0.0)

levels = st.builds(
    Level,
    st.sampled_from((16.0, 32.0, 64.0, 128.0)),
    st.floats(1e6, 1e12),
    st.floats(0.0, 0.1),
)
sizes = st.sampled_from((2.0, 4.0, 8.0, 16.0, 64.0, 256.0, 6.0, 24.0))
strides = st.sampled_from((1.0, 2.0, 4.0, 8.0, 16.0, 64.0))
volumes = st.floats(0.0, 10.0).map(lambda x: 10.0**x)


def collectives(
    fabric: Fabric, size: float, stride: float, volume: float
) -> tuple[float, float, float, float, float, float, float]:
    """Price everything that a group can exchange."""
    reach = size * stride
    return (
        ring_time(fabric.reduce_scatter, fabric, size, stride, volume),
        ring_time(fabric.all_gather, fabric, size, stride, volume),
        all_reduce_time(fabric, size, stride, volume),
        all_to_all_time(fabric, size, stride, volume),
        all_to_all_once_time(fabric, size, stride, volume, 2.0),
        point_to_point_time(fabric, stride, volume, reach),
        chain_time(fabric, stride, size, 2.0, volume),
    )


@given(sizes, strides, volumes)
def test_a_level_that_costs_nothing_changes_nothing(
    size: float, stride: float, volume: float
) -> None:
    plain = collectives(FABRIC, size, stride, volume)
    for fabric in (
        FABRIC._replace(inner=FREE),
        FABRIC._replace(inner=FREE, outer=Level(64.0, inf, 0.0)),
        FABRIC._replace(outer=FREE),
    ):
        found = collectives(fabric, size, stride, volume)
        assert found[:5] == plain[:5]
        # a hand-off that leaves a unit leaves the node as well, however near the next rank is
        assert all(a >= b for a, b in zip(found[5:], plain[5:], strict=True))
        assert found[5:] == pytest.approx(plain[5:]) or stride < FABRIC.devices_per_node


@given(levels, st.sampled_from((2.0, 4.0)), sizes, strides, volumes)
def test_a_level_never_makes_anything_faster(
    level: Level, more: float, size: float, stride: float, volume: float
) -> None:
    outer = Level(more * level.devices, level.bandwidth / 2.0, 10.0 * level.latency_s)
    cases = [FABRIC, FABRIC._replace(inner=level), FABRIC._replace(inner=level, outer=outer)]
    found = [np.array(collectives(fabric, size, stride, volume)) for fabric in cases]
    assert (found[0] <= found[1]).all()
    assert (found[1] <= found[2] * (1 + 1e-12)).all()


@given(levels, st.floats(1.0, 10.0), st.floats(1.0, 10.0), sizes, strides, volumes)
def test_less_bandwidth_and_more_latency_are_never_faster(
    level: Level, slower: float, later: float, size: float, stride: float, volume: float
) -> None:
    worse = Level(level.devices, level.bandwidth / slower, later * level.latency_s)
    before, after = (
        np.array(collectives(FABRIC._replace(inner=x), size, stride, volume))
        for x in (level, worse)
    )
    assert (before <= after * (1 + 1e-12)).all()


@given(levels, sizes, strides, volumes, volumes)
def test_more_to_send_is_never_faster(
    level: Level, size: float, stride: float, volume: float, further: float
) -> None:
    fabric = FABRIC._replace(inner=level)
    less, more = (
        np.array(collectives(fabric, size, stride, v)) for v in (volume, volume + further)
    )
    assert (less <= more * (1 + 1e-12)).all()


@given(levels, sizes, strides, volumes)
def test_a_group_inside_a_unit_costs_what_it_costs_without(
    level: Level, size: float, stride: float, volume: float
) -> None:
    fabric = FABRIC._replace(inner=level)
    if size * stride <= level.devices:
        assert not leaves(level, size, stride)
        assert collectives(fabric, size, stride, volume) == collectives(
            FABRIC, size, stride, volume
        )


@given(st.sampled_from((2, 4, 8)), st.sampled_from((16, 32)), volumes)
def test_no_way_moves_less_than_must_leave_a_unit(units: int, devices: int, volume: float) -> None:
    """Every unit sends the other units' parts of its own sum, or its share of the gathered tensor.

    That is (u-1)/u of the volume out of each unit, over the links of all its devices.
    """
    level = Level(float(devices), 1e8, 0.0)
    fabric = FABRIC._replace(inner=level)
    least = (units - 1) / units * volume / (devices * level.bandwidth)
    size = float(units * devices)
    assert ring_time(fabric.reduce_scatter, fabric, size, 1.0, volume) >= least
    assert ring_time(fabric.all_gather, fabric, size, 1.0, volume) >= least
    assert all_reduce_time(fabric, size, 1.0, volume) >= 2.0 * least


def test_levels_beat_the_flat_ring_over_a_slow_link_and_a_fast_one_is_flat() -> None:
    volume, size, local = 1e9, 64.0, 32.0
    slow = FABRIC._replace(inner=Level(local, 1e8, 1e-3))
    found = ring_time(slow.reduce_scatter, slow, size, 1.0, volume)
    link = volume / 2 / (local * 1e8)  # half of the volume leaves: 2 units
    flat = (size - 1) / size * volume / (local * 1e8) + 2 * 1e-3
    inside = ring_time(FABRIC.reduce_scatter, FABRIC, local, 1.0, volume)
    assert link < found < flat
    strided = slow.reduce_scatter
    part = volume / local / 2  # each rank's part of the exchange
    exchange = part / 1e8 + strided.strided_ramp_bytes / 1e8 / 2
    assert found == pytest.approx(inside + strided.strided_latency_s + 1e-3 + exchange, rel=1e-3)
    fast = FABRIC._replace(inner=Level(local, 1e11, 1e-6))
    within = ring_time(FABRIC.reduce_scatter, FABRIC, size, 1.0, volume)
    assert ring_time(fast.reduce_scatter, fast, size, 1.0, volume) == within + 2e-6


def test_a_chain_pays_for_the_borders_that_it_crosses() -> None:
    """Eight ranks, 16 apart, in two units: one border of seven; three of fifteen in two rounds."""
    level = Level(64.0, 1e9, 1e-2)
    fabric, hop = FABRIC._replace(inner=level), point_to_point_time(FABRIC, 16.0, 1e6, 0.0)
    once, twice = (chain_time(fabric, 16.0, 8.0, rounds, 1e6) for rounds in (1.0, 2.0))
    leaving = point_to_point_time(fabric, 16.0, 1e6, 128.0)
    assert leaving == pytest.approx(max(hop, 1e-3) + 1e-2)
    assert once == pytest.approx(6 * hop + leaving)
    assert twice == pytest.approx(12 * hop + 3 * leaving)
    assert chain_time(FABRIC, 16.0, 8.0, 2.0, 1e6) == pytest.approx(15 * hop)


def test_a_chain_over_two_levels() -> None:
    """Eight ranks, 16 apart, 4 leaves in 2 sites: one border between sites, two between leaves."""
    leaf, site = Level(32.0, 1e9, 1e-4), Level(64.0, 1e8, 1e-2)
    both = FABRIC._replace(inner=leaf, outer=site)
    hop = point_to_point_time(FABRIC, 16.0, 1e6, 0.0)
    between = point_to_point_time(FABRIC._replace(inner=leaf), 16.0, 1e6, 128.0)
    far = point_to_point_time(both, 16.0, 1e6, 128.0)
    assert hop < between < far
    assert chain_time(both, 16.0, 8.0, 1.0, 1e6) == pytest.approx(4 * hop + 2 * between + far)


# ---------------------------------------------------------------- of a cluster


SITES = NetworkLevel(
    name="site", devices=64, unit_bandwidth_bytes_per_s=64e7, latency_s=5e-3
)  # 10 MB/s a device
MODEL = moe(n_layers=8)
BATCH = Batch(global_batch=128, seq_len=2048)


def step_of(levels: tuple[NetworkLevel, ...], text: str, nodes: int = 16) -> StepModel:
    machines = Cluster(hardware=PACK, nodes=nodes, levels=levels)
    return StepModel(MODEL, Plan.parse(text, world=8 * nodes), machines, BATCH, profile())


def test_a_level_as_large_as_the_cluster_is_dropped() -> None:
    machines = Cluster(hardware=PACK, nodes=8, levels=(SITES,))
    assert machines.constants == Cluster(hardware=PACK, nodes=8).constants
    assert Cluster(hardware=PACK, nodes=16, levels=(SITES,)).constants.fabric.inner == Level(
        64.0, 1e7, 5e-3
    )


@given(runs())
@settings(max_examples=15)
def test_a_cluster_without_levels_is_priced_as_before(run: Run) -> None:
    fabric = run.cluster.constants.fabric
    assert (fabric.inner, fabric.outer) == (NO_LEVEL, NO_LEVEL)
    site = SITES.model_copy(update={"devices": run.cluster.n_devices})
    again = run._replace(cluster=run.cluster.model_copy(update={"levels": (site,)}))
    assert again.model.step_s == run.model.step_s
    assert again.model.breakdown() == run.model.breakdown()


def test_replicas_of_one_site_do_not_feel_the_other() -> None:
    """Two stages, one at each site: only hand-offs leave it."""
    text = "pp=2,ep=8,mbs=1"
    near, far = step_of((), text), step_of((SITES,), text)
    assert far.synchronisation.data_parallel == near.synchronisation.data_parallel
    crossing = 2 * (SITES.latency_s + 1 * 2048 * 512 * 2 / 1e7)  # there and back
    hop = near.synchronisation.hand_off / 2
    assert far.synchronisation.hand_off == pytest.approx(crossing, rel=1e-3)
    assert hop < SITES.latency_s


def test_replicas_of_two_sites_are_bound_by_the_link_between_them() -> None:
    near, far = step_of((), "ep=8,mbs=1"), step_of((SITES,), "ep=8,mbs=1")
    dense, expert = dense_and_expert(far)
    out = 64e7  # of a site
    # half of the gradients (4 B) and of the weights (2 B) leave; 8 groups of experts share a site
    link = (4 + 2) * (dense + 8 * expert) / 2 / out
    found = far.synchronisation.data_parallel
    assert found > 20 * near.synchronisation.data_parallel
    assert found == pytest.approx(link + 4 * SITES.latency_s, rel=0.25)
    assert found > link


def dense_and_expert(model: StepModel) -> tuple[float, float]:
    """Return the parameters of the last stage that one rank exchanges."""
    content = model.contents[-1]
    a, p = model.architecture.dims, model.dims
    return float(dense_parameters(a, p, content)), float(expert_parameters(a, p, content))


def test_experts_over_two_sites_exchange_tokens_over_the_link() -> None:
    inside, across = step_of((SITES,), "ep=8,mbs=1"), step_of((SITES,), "ep=16,etp=8,mbs=1")
    assert across.breakdown()["all_to_all"] > 10 * inside.breakdown()["all_to_all"]
    volume = 2048 * 2 * 2 * 512  # tokens, top-2, bf16
    assert across.cost.dispatch >= volume / 2 / 1e7


def test_compiled_prices_are_the_scalar_ones() -> None:
    rail = NetworkLevel(name="rail", devices=32, oversubscription=4.0, latency_s=1e-5)
    machines = Cluster(hardware=PACK, nodes=16, levels=(rail, SITES))
    space = PlanSpace(
        tp=(1, 2, 8), cp=(1, 2), ep=(1, 8, 16), pp=(1, 2, 4), micro_batch=(1,), etp=(1, 2)
    )
    table = space.skeleton(128, BATCH.seq_len, BATCH.global_batch)
    rows = np.flatnonzero(legal_mask(table, MODEL.rule_variables())).astype(np.int64)[::7]
    assert len(rows) > 20
    step_s, _ = price(
        MODEL,
        plan_matrix(table),
        rows,
        hardware=machines.constants,
        stack=profile().stack(),
        optimizer=BATCH.optimizer.dims,
        seq_len=BATCH.seq_len,
        global_batch=BATCH.global_batch,
        alike=alike_of(table),
    )
    for row, found in zip(rows, step_s, strict=True):
        model = StepModel(MODEL, table.plan(int(row)), machines, BATCH, profile())
        assert model.step_s == pytest.approx(found, rel=1e-12)


def test_oversubscription_is_of_the_nic() -> None:
    nic = cluster(1).pack.node.nic_bw
    assert nic is not None
    level = NetworkLevel(name="spine", devices=32, oversubscription=4.0)
    machines = Cluster(hardware=PACK, nodes=16, levels=(level,))
    assert machines.constants.fabric.inner.bandwidth == nic.value / 4.0
    with pytest.raises(PerfmodelError, match="needs the bandwidth of a NIC"):
        level.constants(None)


def test_the_source_of_a_level_is_that_of_what_leaves_it() -> None:
    plan = Plan.parse("ep=8,mbs=1", world=128)
    for source in (Source.MEASURED, Source.ASSUMED):
        site = SITES.model_copy(update={"source": source})
        machines = Cluster(hardware=PACK, nodes=16, levels=(site,))
        found = estimate(MODEL, plan, machines, BATCH).sources["data_parallel"]
        assert found is (Source.FITTED if source is Source.MEASURED else Source.ASSUMED)


def site(**changes: object) -> dict[str, object]:
    return {"name": "site", "devices": 64, "bandwidth_bytes_per_s": 1e9} | changes


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([site(unit_bandwidth_bytes_per_s=1e9)], "must have one of .*, not 2"),
        ([site(bandwidth_bytes_per_s=None)], "must have one of .*, not 0"),
        ([site(bandwidth_bytes_per_s=0.0)], "greater than or equal to 1"),
        ([site(latency_s=-1.0)], "greater than or equal to 0"),
        ([site(devices=1)], "greater than or equal to 2"),
        ([site()] * 3, "at most 2 items"),
    ],
)
def test_impossible_levels_are_refused(given: list[dict[str, object]], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        Cluster(hardware=PACK, nodes=16, levels=given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            [site(devices=60)],
            r"devices=60 must be a multiple of the 8 of a node; .*: 56 or 64",
        ),
        ([site(devices=4)], r"must be a multiple of the 8 of a node; nearest: 8\."),
        ([site(devices=32, name="leaf"), site(devices=48)], r"of the 32 of level 'leaf'"),
        ([site(devices=48)], r"the 128 devices of the cluster must be a multiple .*=48"),
        (
            [site(devices=32, name="leaf"), site(bandwidth_bytes_per_s=2e9)],
            r"2e\+09 B/s .* at most the 1e\+09 of level 'leaf'",
        ),
    ],
)
def test_levels_that_do_not_fit_are_said(given: list[dict[str, object]], says: str) -> None:
    with pytest.raises(PerfmodelError, match=says):
        _ = Cluster(hardware=PACK, nodes=16, levels=given).constants
