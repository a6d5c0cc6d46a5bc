"""Clusters and batches: text, names, and values that cannot be."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from perfmodel.calibration.packs import PackError, load_pack
from perfmodel.cluster import MAX_NODES, Batch, Cluster, Optimizer
from perfmodel.collectives import ring_over_nodes_time
from perfmodel.errors import PerfmodelError

from .strategies import PACK


def test_a_cluster_from_text() -> None:
    cluster = Cluster.parse(f"{PACK}:32")
    assert cluster == Cluster(hardware=PACK, nodes=32)
    assert cluster.n_devices == 256
    assert cluster.peak_flops == 2.25e15
    assert cluster.device_memory_bytes == 179e9
    assert cluster.constants.fabric.devices_per_node == 8.0


def test_a_memory_of_ones_own_replaces_the_packs() -> None:
    assert Cluster(hardware=PACK, nodes=1, memory_bytes=80e9).device_memory_bytes == 80e9


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not PACK:NODES"),
        (PACK, "is not PACK:NODES"),
        (":4", "is not PACK:NODES"),
        (f"{PACK}:", "is not PACK:NODES"),
        (f"{PACK}:four", "is not PACK:NODES"),
        (f"{PACK}:-4", "is not PACK:NODES"),
        (f"{PACK}:1.5", "is not PACK:NODES"),
        (f"{PACK}:٣", "is not PACK:NODES"),
        (f"{PACK}:0", f"nodes=0 must be from 1 to {MAX_NODES}"),
        (f"{PACK}:999999", f"nodes=999999 must be from 1 to {MAX_NODES}"),
        ("h900:4", "There is no hardware pack 'h900'"),
        ("h900:4gpus", "There is no hardware pack 'h900'"),
        ("h100:4 gpus", "is not PACK:NODES or PACK:DEVICESgpus"),
        ("h100:gpus", "is not PACK:NODES or PACK:DEVICESgpus"),
        ("h100:0gpus", f"devices=0 must be from 1 to {8 * MAX_NODES}"),
        ("h100:99999999gpus", f"devices=99999999 must be from 1 to {8 * MAX_NODES}"),
        ("gb200:73gpus", "devices=73 cannot be as many on each node of 72"),
    ],
)
def test_text_that_names_no_cluster_is_said_in_one_sentence(text: str, says: str) -> None:
    with pytest.raises(PerfmodelError) as caught:
        Cluster.parse(text)
    message = str(caught.value)
    assert says in message
    assert message.endswith(".")
    assert "\n" not in message


def test_an_unknown_pack_lists_the_known_ones() -> None:
    cluster = Cluster(hardware="b900", nodes=1)
    with pytest.raises(PackError, match=f"no hardware pack 'b900'.*{PACK}"):
        _ = cluster.pack
    with pytest.raises(PackError, match="cannot be read"):
        Cluster.parse("no/such/pack.toml:4")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"nodes": 0}, "greater than or equal to 1"),
        ({"nodes": MAX_NODES + 1}, "less than or equal to"),
        ({"nodes": 1.0}, "valid integer"),
        ({"nodes": True}, "valid integer"),
        ({"devices": 0}, "greater than or equal to 1"),
        ({"devices": 8.0}, "valid integer"),
        ({"memory_bytes": 0.0}, "greater than 0"),
        ({"memory_bytes": -80e9}, "greater than 0"),
        ({"memory_bytes": float("nan")}, "finite number|greater than 0"),
        ({"memory_bytes": float("inf")}, "finite number"),
        ({"gpus": 8}, "Extra inputs are not permitted"),
    ],
)
def test_bad_clusters_are_said(fields: dict[str, object], says: str) -> None:
    (name,) = fields
    with pytest.raises(ValidationError, match=rf"(?s){name}.*({says})"):
        Cluster(**({"hardware": PACK, "nodes": 1} | fields))


def test_a_changed_copy_of_a_cluster_reads_its_own_pack() -> None:
    cluster = Cluster.parse(f"{PACK}:4")
    with pytest.raises(PackError):
        _ = cluster.model_copy(update={"hardware": "no-such-pack"}).pack


def test_the_devices_of_a_cluster_are_those_of_its_nodes() -> None:
    node = load_pack(PACK).node
    for nodes in (1, 3, 128):
        assert Cluster(hardware=PACK, nodes=nodes).n_devices == nodes * node.devices_per_node


# ---------------------------------------------------------------- some devices of each node


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("h100:32", Cluster(hardware="h100", nodes=32)),
        ("H100:32", Cluster(hardware="h100", nodes=32)),
        ("A100:4", Cluster(hardware="a100-80", nodes=4)),
        ("h100:256gpus", Cluster(hardware="h100", nodes=32)),
        ("h100:4gpus", Cluster(hardware="h100", nodes=1, devices=4)),
        ("h100:12gpus", Cluster(hardware="h100", nodes=2, devices=12)),
        ("gb200:4", Cluster(hardware="gb200", nodes=4)),
        ("gb200:64gpus", Cluster(hardware="gb200", nodes=1, devices=64)),
        ("gb200:256gpus", Cluster(hardware="gb200", nodes=4, devices=256)),
        ("gb200:288gpus", Cluster(hardware="gb200", nodes=4)),
        ("gb300:1024gpus", Cluster(hardware="gb300", nodes=16, devices=1024)),
    ],
)
def test_devices_are_spread_over_the_fewest_nodes(text: str, expected: Cluster) -> None:
    cluster = Cluster.parse(text)
    assert cluster == expected
    assert cluster.n_devices == cluster.nodes * cluster.devices_per_node
    assert cluster.constants.fabric.devices_per_node == cluster.devices_per_node


@given(devices=st.integers(1, 5000), name=st.sampled_from(("h100", "gb200")))
def test_any_number_of_devices_is_placed_or_the_nearest_are_named(devices: int, name: str) -> None:
    try:
        cluster = Cluster.parse(f"{name}:{devices}gpus")
    except PerfmodelError as error:
        nearest = re.search(r"nearest: (\d+) or (\d+)\.$", str(error))
        assert nearest
        below, above = int(nearest[1]), int(nearest[2])
        assert below < devices < above
        for count in (below, above):
            assert Cluster.parse(f"{name}:{count}gpus").n_devices == count
        return
    assert cluster.n_devices == devices
    full = cluster.pack.node.devices_per_node
    assert cluster.nodes == 1 or 2 * cluster.devices_per_node >= full


def test_devices_that_are_not_as_many_on_each_node_are_refused() -> None:
    with pytest.raises(ValidationError, match="devices=9 cannot be as many on each of 2 nodes"):
        Cluster(hardware="h100", nodes=2, devices=9)


def test_devices_that_do_not_fit_are_refused() -> None:
    cluster = Cluster(hardware="h100", nodes=2, devices=18)
    with pytest.raises(PerfmodelError, match=r"devices=18 do not fit on nodes=2 of 8; nearest: 16"):
        _ = cluster.n_devices


def test_half_of_a_node_has_half_of_its_nics() -> None:
    whole, half = (Cluster.parse(text).constants.fabric for text in ("b200:2", "b200:8gpus"))
    halves = Cluster(hardware="b200", nodes=2, devices=8).constants.fabric
    assert half == whole  # one full node
    ring = halves.reduce_scatter
    assert ring.inter_bw == pytest.approx(4.0 * whole.reduce_scatter.strided_bw)
    # as long for each rank as in full nodes
    per_rank = whole.reduce_scatter.inter_latency_s / 8.0
    assert ring.inter_latency_s / 4.0 == pytest.approx(per_rank)
    slow, fast = (
        ring_over_nodes_time(f.reduce_scatter, f.devices_per_node, 8.0, 1.0, 1e9)
        for f in (halves, half)
    )
    assert slow > fast  # across two nodes, and inside one


# ---------------------------------------------------------------- batches


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"global_batch": 0}, "greater than or equal to 1"),
        ({"seq_len": -1}, "greater than or equal to 1"),
        ({"seq_len": 2048.0}, "valid integer"),
        ({"seq_len": 2**31}, "less than or equal to"),
        ({"optimizer": "sgd"}, "'adamw', 'muon' or 'scion'"),
        ({"micro_batch": 4}, "Extra inputs are not permitted"),
    ],
)
def test_bad_batches_are_said(fields: dict[str, object], says: str) -> None:
    (name,) = fields
    with pytest.raises(ValidationError, match=f"(?s){name}.*{says}"):
        Batch(**({"global_batch": 64, "seq_len": 2048} | fields))


def test_tokens_of_a_step() -> None:
    assert Batch(global_batch=1024, seq_len=2048).tokens == 2**21


def test_what_an_optimizer_stores() -> None:
    """Four bytes each: a master weight and two moments, or a master weight and a momentum."""
    assert Optimizer.ADAMW.dims.state_bytes == 3 * 4
    assert Optimizer.MUON.dims.state_bytes == Optimizer.SCION.dims.state_bytes == 2 * 4
    assert Optimizer.ADAMW.dims.matrix_iterations == 0
    assert Optimizer.MUON.dims.matrix_iterations > 0
    for optimizer in Optimizer:  # it reads a gradient and its state, and writes state and weight
        assert optimizer.dims.traffic_bytes == 4 + 2 * optimizer.dims.state_bytes + 2
