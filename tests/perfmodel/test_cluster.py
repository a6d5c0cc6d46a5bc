"""Clusters and batches: text, names, and values that cannot be."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from perfmodel.calibration.packs import PackError, load_pack
from perfmodel.cluster import MAX_NODES, Batch, Cluster, Optimizer
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
        ("h100:4", "There is no hardware pack 'h100'"),
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
    cluster = Cluster(hardware="b200", nodes=1)
    with pytest.raises(PackError, match=f"no hardware pack 'b200'.*{PACK}"):
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
