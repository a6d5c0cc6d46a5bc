"""Packs of a machine that nobody has a datasheet of: a CPU, fp32, one device or one node."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from perfmodel.architecture import Architecture
from perfmodel.calibration import HardwarePack, PackError, load_pack, shipped_packs
from perfmodel.calibration.fit import fit_pack, load_datasheet, main
from perfmodel.calibration.measured import (
    Machine,
    known_datasheet,
    measured_datasheet,
    write_datasheet,
)
from perfmodel.calibration.surfaces import COLLECTIVES, SURFACES
from perfmodel.calibration.tables import TableError, Tables
from perfmodel.calibration.writer import record_toml
from perfmodel.cluster import Batch, Cluster
from perfmodel.explanation import explain
from perfmodel.families import family_model
from perfmodel.layout_search import search_layouts
from perfmodel.plan import Plan
from perfmodel.sources import Source
from perfmodel.step import StepModel, estimate, legal_model

from .cpu_tables import CPU, DEVICE, RATES, cpu_collectives, cpu_tables

MACHINE = Machine(name="Toy", dtype="fp32", blocking=True, memory_bytes=8e9, devices_per_node=2)
BATCH = Batch(global_batch=8, seq_len=256)


def model() -> Architecture:
    return family_model(
        d_model=256,
        n_layers=4,
        d_ff=1024,
        n_experts=8,
        top_k=2,
        d_expert=256,
        vocab_size=4096,
        head_dim=64,
    )


def fitted(folder: Path) -> HardwarePack:
    tables = Tables(folder, DEVICE)
    sheet = measured_datasheet(tables, MACHINE)
    return fit_pack(tables, sheet, DEVICE, "invented constants", one_device=True)


def saved(pack: HardwarePack, folder: Path) -> str:
    path = folder / "pack.toml"
    path.write_text(record_toml(pack), "utf-8")
    assert load_pack(path) == pack
    return str(path)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[HardwarePack, str, Path]:
    folder = tmp_path_factory.mktemp("alone")
    cpu_tables(folder)
    pack = fitted(folder)
    return pack, saved(pack, folder), folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[HardwarePack, str]:
    folder = tmp_path_factory.mktemp("pair")
    cpu_tables(folder)
    cpu_collectives(folder)
    pack = fitted(folder)
    return pack, saved(pack, folder)


# ---------------------------------------------------------------- rates as measured


def test_rates_are_the_fastest_rows(alone: tuple[HardwarePack, str, Path]) -> None:
    device = alone[0].device
    for datum in (device.peak_flops, device.fp32_flops, device.memory_bw, device.memory_bytes):
        assert datum.source is Source.MEASURED
    assert 0.8 * RATES.peak_flops < device.peak_flops.value < 0.9 * RATES.peak_flops
    assert device.peak_flops.note == "the fastest of 64 fp32 products [FLOP/s]: 2048 x 2048 x 2048"
    assert device.memory_bw.value == pytest.approx(RATES.memory_bw, rel=1e-5)
    assert "not a datasheet's" in alone[0].description


def test_fit_recovers_the_constants_whatever_the_peak_is_called(
    pair: tuple[HardwarePack, str],
) -> None:
    """Efficiencies are of the fastest product that was seen; times the peak they are the truth."""
    found = pair[0].constants()
    scale = found.device.peak_flops / CPU.device.peak_flops
    shares = ("flop_eff", "eff_d64", "eff_d128", "forward_eff", "backward_eff")
    for name in SURFACES:
        owner, truth = (found.fabric, CPU.fabric) if name in COLLECTIVES else (found, CPU)
        stated = pair[0].surfaces[name].params
        for key, value in stated.items():
            expected = getattr(getattr(truth, name), key)
            got = value * scale if key in shares else value
            assert got == pytest.approx(expected, rel=0.02), (name, key)
            assert getattr(getattr(owner, name), key) == value


def test_one_node_states_no_constant_of_what_leaves_it(pair: tuple[HardwarePack, str]) -> None:
    for name in COLLECTIVES:
        assert {key.partition("_")[0] for key in pair[0].surfaces[name].params} <= {
            *("intra", "link", "self"),
        }


def test_errors_of_a_perfect_fit_are_nothing(pair: tuple[HardwarePack, str]) -> None:
    for name, surface in pair[0].surfaces.items():
        assert surface.source is Source.FITTED
        assert surface.errors is not None
        assert surface.errors.median_in < 0.2, name
        assert surface.errors.held_out != "none", name


def test_a_known_device_keeps_its_datasheet() -> None:
    h100 = MACHINE.model_copy(update={"name": "NVIDIA H100 80GB HBM3", "dtype": "bf16"})
    sheet = known_datasheet(h100)
    assert sheet is not None
    assert sheet.device == load_datasheet(None, "h100").device
    assert sheet.node.devices_per_node == 2
    assert known_datasheet(h100.model_copy(update={"dtype": "fp32"})) is None
    assert known_datasheet(MACHINE) is None


def test_the_command_fits_the_same_pack_again(alone: tuple[HardwarePack, str, Path]) -> None:
    pack, _, folder = alone
    sheet = folder / "datasheet.toml"
    write_datasheet(measured_datasheet(Tables(folder, DEVICE), MACHINE), sheet)
    arguments = ["--tables", str(folder), "--device", DEVICE, "--name", DEVICE]
    arguments += ["--datasheet", str(sheet), "--origin", "invented constants"]
    out = folder / "again.toml"
    assert main([*arguments, "--out", str(out)]) == 2  # it lacks collectives, and nobody said so
    assert not out.exists()
    assert main([*arguments, "--one-device", "--out", str(out)]) == 0
    assert load_pack(out).digest == pack.digest
    assert out.read_text("utf-8").splitlines()[1] == (
        f"# python -m perfmodel.calibration.fit --tables DIR --device {DEVICE} --name {DEVICE} "
        "--origin 'invented constants' --out again.toml --datasheet datasheet.toml --one-device"
    )


def test_no_copy_no_bandwidth(alone: tuple[HardwarePack, str, Path], tmp_path: Path) -> None:
    for file in alone[2].glob("*.csv"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    rows = (tmp_path / "elementwise.csv").read_text("utf-8").splitlines()
    kept = [row for row in rows if "stream" not in row]
    (tmp_path / "elementwise.csv").write_text("\n".join(kept), "utf-8")
    with pytest.raises(TableError, match=r"no row with dtype=fp32, op=stream\.$"):
        fitted(tmp_path)


# ---------------------------------------------------------------- what it prices


def test_a_pack_of_one_device_prices_one(alone: tuple[HardwarePack, str, Path]) -> None:
    pack, path, _ = alone
    assert pack.lacking == COLLECTIVES
    assert pack.most_devices == 1
    cluster = Cluster.parse(f"{path}:1gpus")
    step = estimate(model(), Plan.parse("mbs=2", world=1), cluster, BATCH)
    assert 0.0 < step.step_time_s < inf
    assert sum(step.breakdown_s.values()) == pytest.approx(step.step_time_s)
    assert step.sources["compute_experts"] is Source.FITTED
    assert step.sources["all_to_all"] is Source.ASSUMED
    assert step.breakdown_s["all_to_all"] == step.breakdown_s["data_parallel"] == 0.0
    assert any("timed in fp32" in flag for flag in step.flags)
    with pytest.raises(PackError, match=r"^2 devices have no price .* nearest: toy-2t:1gpus\.$"):
        Cluster.parse(f"{path}:1")
    two = Cluster(hardware=path, nodes=1)
    with pytest.raises(PackError, match="no all_to_all, all_reduce"):
        estimate(model(), Plan.parse("ep=2", world=2), two, BATCH)


def test_a_search_takes_it(alone: tuple[HardwarePack, str, Path]) -> None:
    cluster = Cluster.parse(f"{alone[1]}:1gpus")
    best = search_layouts(model(), cluster, BATCH).layouts[0]
    again = estimate(model(), best.plan, cluster, BATCH)
    assert best.step_time_s == pytest.approx(again.step_time_s, rel=1e-9)


def test_a_pack_of_one_node_prices_its_devices(pair: tuple[HardwarePack, str]) -> None:
    pack, path = pair
    assert pack.most_devices == 2
    cluster = Cluster.parse(f"{path}:1")
    step = estimate(model(), Plan.parse("ep=2,mbs=2", world=2), cluster, BATCH)
    assert 0.0 < step.breakdown_s["all_to_all"] < step.step_time_s < inf
    assert step.sources["all_to_all"] is Source.FITTED
    with pytest.raises(PackError, match=r"^4 devices .* no collective across nodes was measured"):
        Cluster.parse(f"{path}:2")


def test_beyond_the_rows_is_flagged(alone: tuple[HardwarePack, str, Path]) -> None:
    pack = alone[0]
    assert pack.check("gemm", m=64, n=2048, k=64) == ()
    (flag,) = pack.check("gemm", m=63, n=64, k=64)
    assert "extrapolation" in flag.message


def test_shipped_packs_price_any_number_of_devices() -> None:
    for name in shipped_packs():
        assert load_pack(name).most_devices == inf
        assert not load_pack(name).constants().blocking


def test_half_of_what_leaves_a_node_is_refused(pair: tuple[HardwarePack, str]) -> None:
    content = pair[0].model_dump(mode="json", exclude_none=True)
    content["surfaces"]["all_reduce"]["params"]["inter_bw"] = 1e9
    with pytest.raises(ValueError, match=r"surfaces.all_reduce.params lacks inter_latency_s"):
        HardwarePack.model_validate(content)


# ---------------------------------------------------------------- who computes


def priced(path: str, blocking: bool) -> StepModel:
    case = legal_model(model(), Plan.parse("mbs=2", world=1), Cluster.parse(f"{path}:1gpus"), BATCH)
    changed = case.hardware._replace(blocking=float(blocking))
    case.__dict__["hardware"] = changed
    return case


def test_on_a_cpu_the_host_hides_behind_nothing(alone: tuple[HardwarePack, str, Path]) -> None:
    summed, larger = priced(alone[1], True), priced(alone[1], False)
    n = float(summed.n_microbatches)
    pace = larger.time_of(0)
    hidden = min(pace.host + pace.jitter, pace.device + pace.head)
    assert hidden > 0.0
    assert summed.step_s - larger.step_s == pytest.approx(n * hidden)
    for case in (summed, larger):
        assert sum(case.breakdown().values()) == pytest.approx(case.step_s)


def test_the_explanation_adds_up_on_a_cpu(alone: tuple[HardwarePack, str, Path]) -> None:
    cluster = Cluster.parse(f"{alone[1]}:1gpus")
    said = explain(model(), Plan.parse("mbs=2", world=1), cluster, BATCH)
    step = said.step.step_time_s
    assert sum(loss.time_s for loss in said.waterfall) == pytest.approx(step)
    assert sum(said.terms_s.values()) == pytest.approx(step)
    assert {"host_dispatch", "device"} <= said.terms_s.keys()
