"""What ZeRO's stages put on the wire in a step, and what an optimizer on the host costs."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.architecture import Architecture, ParameterConvention
from perfmodel.calibration.packs import load_pack, shipped_packs
from perfmodel.cluster import Batch, Optimizer
from perfmodel.exchange import exchange_time, optimizer_time, sharding_time, update_time
from perfmodel.hardware import ASSUMED_HOST, Hardware, Host
from perfmodel.mesh import PlanDims, stage_content, state_shards
from perfmodel.plan import Plan
from perfmodel.sources import Source
from perfmodel.stack import Stack
from perfmodel.step import estimate

from .option_strategies import (
    SLOW,
    is_legal,
    optioned_runs,
    slow_memory,
    slow_ring,
    step_seconds,
    with_options,
)
from .strategies import Run, cluster, dense, dims, ideal_hardware, ideal_stack, moe, profile, runs

ADAMW = Optimizer.ADAMW.dims
SEQ = 2048.0
RINGS = ("all_reduce", "reduce_scatter", "all_gather")


def on_the_wire(
    a: Architecture, p: PlanDims, n_microbatches: float, *rings: str, stack: Stack | None = None
) -> float:
    """Bytes of a step that each rank sends through some ring collectives, all the others free."""
    stack = ideal_stack() if stack is None else stack
    slow, free = (
        step_seconds(a, hardware, stack, ADAMW, p, SEQ, n_microbatches)
        for hardware in (slow_ring(*rings), ideal_hardware())
    )
    return (slow - free) * SLOW


def parameters(a: Architecture) -> float:
    return float(a.n_total(ParameterConvention.WITH_EMBEDDING))


# ---------------------------------------------------------------- bytes of a step


@pytest.mark.parametrize("a", [dense(), moe()], ids=["dense", "sparse"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    ("zero", "reduced", "scattered", "gathered"),
    [
        (0, 4, lambda n: 0, lambda n: 0),
        (1, 0, lambda n: 4, lambda n: 2),
        (2, 0, lambda n: 4 * n, lambda n: 2),
        (3, 0, lambda n: 4 * n, lambda n: 2 * 2 * n),
    ],
)
def test_bytes_of_each_stage(
    a: Architecture,
    n: int,
    zero: int,
    reduced: int,
    scattered: Callable[[int], int],
    gathered: Callable[[int], int],
) -> None:
    """Gradients of 4 bytes and weights of 2, 3/4 of each over 4 ranks.

    0: one all-reduce. 1: scattered and gathered once. 2: scattered in every microbatch. 3: that,
    and gathered for both passes of every microbatch.
    """
    p = dims(dp=4, zero=zero)
    share = 3 / 4 * parameters(a)
    assert on_the_wire(a, p, n, "all_reduce") == pytest.approx(reduced * share, abs=1)
    assert on_the_wire(a, p, n, "reduce_scatter") == pytest.approx(scattered(n) * share, abs=1)
    assert on_the_wire(a, p, n, "all_gather") == pytest.approx(gathered(n) * share, abs=1)


@pytest.mark.parametrize("zero", range(4))
def test_gradients_on_the_wire_are_those_of_the_stack(zero: int) -> None:
    rings = ("all_reduce", "reduce_scatter")
    two, four = (
        on_the_wire(moe(), dims(dp=4, zero=zero), 2, *rings, stack=ideal_stack(gradient_bytes=b))
        for b in (2.0, 4.0)
    )
    assert four == pytest.approx(2 * two)


@pytest.mark.parametrize("zero", range(4))
def test_experts_are_exchanged_over_their_own_replicas(zero: int) -> None:
    """Of dp=4 and ep=2, two ranks hold the same experts; half of the experts are on each."""
    a = moe()
    routed = 3 * 16 * 3 * 512 * 384
    gradients = 4 * (3 / 4 * (parameters(a) - routed) + 1 / 2 * routed / 2)
    found = on_the_wire(a, dims(dp=4, ep=2, zero=zero), 1, "all_reduce", "reduce_scatter")
    assert found == pytest.approx(gradients)
    alone = on_the_wire(a, dims(dp=4, ep=4, zero=zero), 1, "all_reduce", "reduce_scatter")
    assert alone == pytest.approx(4 * 3 / 4 * (parameters(a) - routed))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_instances_shard_among_themselves_and_reduce_across(zero: int) -> None:
    """8 replicas in two instances of 4: a shard's gradients go through an all-reduce of two."""
    a = dense()
    p = dims(dp=8, zero=zero, instances=2)
    assert state_shards(p) == (4, 4)
    one = dims(dp=4, zero=zero)
    for ring in ("reduce_scatter", "all_gather"):
        assert on_the_wire(a, p, 3, ring) == pytest.approx(on_the_wire(a, one, 3, ring))
    across = 1 / 2 * 4 * parameters(a) / 4
    assert on_the_wire(a, p, 3, "all_reduce") == pytest.approx(across)
    assert on_the_wire(a, one, 3, "all_reduce") == pytest.approx(0, abs=1)


def test_what_state_is_sharded_over() -> None:
    p = dims(tp=2, cp=2, dp=8, ep=4, etp=1)
    assert state_shards(p._replace(zero=0.0)) == (1, 1)
    for zero in (1.0, 2.0, 3.0):
        assert state_shards(p._replace(zero=zero)) == (16, 2 * 16 / 4)
        assert state_shards(p._replace(zero=zero, instances=4.0)) == (4, 2 * 4 / 4)


@given(runs(), st.sampled_from((0.0, 1.0)))
def test_only_stages_two_and_three_exchange_in_a_microbatch(run: Run, zero: float) -> None:
    a, p = run.architecture.dims, run.dims._replace(zero=zero)
    content = stage_content(a, p, 0.0)
    stack = profile().stack()
    assert sharding_time(a, run.cluster.constants, stack, p, content) == 0
    three = p._replace(zero=3.0)
    assert exchange_time(a, run.cluster.constants, stack, three, content) == 0


@given(runs(), st.sampled_from(RINGS), st.sampled_from((1.5, 10.0)))
def test_less_bandwidth_never_takes_less_time(run: Run, ring: str, factor: float) -> None:
    a, stack = run.architecture.dims, profile().stack()
    hw = run.cluster.constants
    surface = getattr(hw.fabric, ring)
    less = surface._replace(
        **{name: getattr(surface, name) / factor for name in ("intra_bw", "inter_bw", "strided_bw")}
    )
    slower = hw._replace(fabric=hw.fabric._replace(**{ring: less}))
    for zero in range(4):
        p = run.dims._replace(zero=float(zero))
        content = stage_content(a, p, 0.0)
        for exchange in (exchange_time, sharding_time):
            before, after = (exchange(a, h, stack, p, content) for h in (hw, slower))
            assert after >= before


# ---------------------------------------------------------------- an optimizer on the host


def update(
    hardware: Hardware, stack: Stack | None = None, a: Architecture | None = None, **degrees: float
) -> float:
    chosen = moe() if a is None else a
    constants = ideal_stack(gradient_memory_bytes=4.0) if stack is None else stack
    return optimizer_time(chosen.dims, hardware, constants, ADAMW, dims(**degrees), 0.0)


def host(link_bw: float = inf, memory_bw: float = inf) -> Hardware:
    return ideal_hardware()._replace(host=Host(link_bw, memory_bw))


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_gradients_go_to_the_host_and_weights_come_back(share: float) -> None:
    n = parameters(moe())
    assert update(host(link_bw=SLOW), offload=share) * SLOW == pytest.approx(share * (4 + 2) * n)
    short = ideal_stack(gradient_memory_bytes=2.0)
    found = update(host(link_bw=SLOW), short, offload=share)
    assert found * SLOW == pytest.approx(share * (2 + 2) * n)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_adam_moves_its_state_in_the_hosts_memory_or_the_devices(share: float) -> None:
    n = parameters(moe())
    there = update(host(memory_bw=SLOW), offload=share) * SLOW
    here = update(slow_memory(), offload=share) * SLOW
    assert there == pytest.approx(share * ADAMW.traffic_bytes * n)
    assert here == pytest.approx((1 - share) * ADAMW.traffic_bytes * n)


def test_link_and_memory_work_one_after_the_other() -> None:
    both = update(host(link_bw=SLOW, memory_bw=SLOW), offload=0.5)
    link, memory = (
        update(host(link_bw=SLOW), offload=0.5),
        update(host(memory_bw=SLOW), offload=0.5),
    )
    assert both == pytest.approx(link + memory)


def test_the_host_works_on_a_shard() -> None:
    one = update(host(SLOW, SLOW), offload=1)
    assert update(host(SLOW, SLOW), offload=1, dp=4) == pytest.approx(one / 4)
    assert update(host(SLOW, SLOW), offload=1, dp=4, ep=4) == pytest.approx(one / 4)
    assert update(host(SLOW, SLOW), offload=1, dp=4, zero=0) == pytest.approx(one)


@given(runs())
def test_without_offload_the_host_does_not_matter(run: Run) -> None:
    a, p, stack = run.architecture.dims, run.dims, profile().stack()
    hw, optimizer = run.cluster.constants, run.batch.optimizer.dims
    content = stage_content(a, p, 0.0)
    still = update_time(a, hw._replace(host=Host(1.0, 1.0)), stack, optimizer, p, content)
    assert still == update_time(a, hw, stack, optimizer, p, content)


@given(optioned_runs())
def test_an_optimizer_on_a_slower_host_takes_longer_and_less_memory(run: Run) -> None:
    here, there = (with_options(run, optimizer_offload=share) for share in (0.0, 1.0))
    assert is_legal(there)
    assert there.model.synchronisation.optimizer > here.model.synchronisation.optimizer
    for stage in range(run.plan.pp):
        assert there.model.stage(stage).optimizer == 0 < here.model.stage(stage).optimizer


def test_offload_is_flagged_with_its_source() -> None:
    where = cluster(1), Batch(global_batch=16, seq_len=2048)
    step, plain = (
        estimate(moe(), Plan(dp=8, optimizer_offload=share), *where, stack=profile())
        for share in (0.5, 0.0)
    )
    assert step.sources["optimizer"] is Source.ASSUMED
    assert [flag for flag in step.flags if "offload=0.5" in flag and "no run" in flag]
    assert not [flag for flag in plain.flags if "offload" in flag]


@pytest.mark.parametrize("name", shipped_packs())
def test_every_pack_states_its_host(name: str) -> None:
    node = load_pack(name).node
    assert node.host_link_bw is not None
    assert node.host_memory_bw is not None
    assert node.host_link_bw.source is Source.DATASHEET
    assert node.host == load_pack(name).constants().host
    assert node.host.link_bw < load_pack(name).device.memory_bw.value
    assert node.host.memory_bw < load_pack(name).device.memory_bw.value


def test_a_pack_that_says_nothing_of_its_host_has_an_assumed_one() -> None:
    pack = load_pack("h100")
    bare = pack.node.model_copy(update={"host_link_bw": None, "host_memory_bw": None})
    assert pack.model_copy(update={"node": bare}).constants().host == ASSUMED_HOST
    assert load_pack("a100-80").node.host == ASSUMED_HOST
