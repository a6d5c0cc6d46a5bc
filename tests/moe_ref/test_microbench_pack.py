"""Microbenchmarks: from a machine to a pack, and what is claimed of it."""

from __future__ import annotations

import shlex
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import get_args

import pytest

pytest.importorskip("torch")

from moe_ref.microbench import campaign
from moe_ref.microbench.calibration import Calibration, calibrate, fit_folder
from moe_ref.microbench.campaign import Effort
from moe_ref.microbench.errors import CalibrationError
from moe_ref.microbench.families import FAMILIES
from moe_ref.microbench.grids import Scale
from moe_ref.microbench.machine import DTYPES, facts_of
from perfmodel.calibration import fit
from perfmodel.calibration.machines import NumberFormat
from perfmodel.calibration.packs import load_pack
from perfmodel.cluster import Batch, Cluster
from perfmodel.families import family_model
from perfmodel.plan import Plan
from perfmodel.sources import Source
from perfmodel.step import estimate

TINY = Effort(call_s=0.001, limit_s=0.002, points=10)
SCALE = Scale(flop=1e8, elements=2e6, points=12)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    """Measure everything once, on a grid that takes a second or two."""
    folder = tmp_path_factory.mktemp("machine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(campaign, "probed_scale", lambda facts, effort: SCALE)
        return calibrate(folder, threads=1, effort=TINY)


def test_everything_was_measured(measured: Calibration) -> None:
    assert set(measured.rows) == set(FAMILIES)
    assert all(there == of > 0 for there, of in measured.rows.values())


def test_the_tables_give_a_pack_that_prices_a_step(measured: Calibration) -> None:
    assert measured.pack is not None
    assert load_pack(measured.path) == measured.pack
    architecture = family_model(
        d_model=128,
        n_layers=2,
        d_ff=256,
        n_experts=4,
        top_k=2,
        d_expert=128,
        vocab_size=256,
        head_dim=64,
    )
    step = estimate(
        architecture,
        Plan.parse("mbs=1", world=1),
        Cluster.parse(f"{measured.path}:1gpus"),
        Batch(global_batch=2, seq_len=8192),
    )
    assert 0.0 < step.step_time_s < inf
    assert step.sources["compute_experts"] is Source.FITTED
    assert measured.pack.device.peak_flops.source is Source.MEASURED
    assert any(
        "seq_len = 8192 is outside" in f and f.startswith("attention_forward") for f in step.flags
    )


def test_it_says_what_it_does_not_price(measured: Calibration) -> None:
    assert measured.pack is not None
    assert measured.pack.lacking
    assert "More than one device: all_to_all" in measured.unpriced[0]
    assert "Precisions below bf16" in measured.unpriced[-1]


def test_the_report_and_the_datasheet_lie_beside_the_pack(measured: Calibration) -> None:
    report = (measured.folder / "report.md").read_text("utf-8")
    assert all(f"| {name} |" in report for name in ("gemm", "topk", "elementwise"))
    assert "MEASURED" in (measured.folder / "datasheet.toml").read_text("utf-8")


def test_the_same_tables_give_the_same_pack(measured: Calibration) -> None:
    again = fit_folder(measured.folder, measured.facts, measured.rows)
    assert again.pack == measured.pack


def test_the_command_in_the_header_gives_the_pack_again(
    measured: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measured.pack is not None
    command = measured.path.read_text("utf-8").splitlines()[1].removeprefix("# ")
    words = shlex.split(command.replace("DIR", str(measured.folder)))
    assert words[:3] == ["python", "-m", "perfmodel.calibration.fit"]
    monkeypatch.chdir(tmp_path)
    assert fit.main(words[3:]) == 0
    assert load_pack(tmp_path / "pack.toml").digest == measured.pack.digest


def copied(measured: Calibration, folder: Path) -> None:
    for file in measured.folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())


@pytest.mark.parametrize("table", ["sdpa.csv", "dp_collectives.csv", "all_to_all.csv"])
def test_a_table_that_cannot_be_read_is_no_table_that_lacks(
    measured: Calibration, tmp_path: Path, table: str
) -> None:
    copied(measured, tmp_path)
    (tmp_path / table).write_text("device,a\nx,1,2\n", "utf-8")
    with pytest.raises(
        CalibrationError,
        match=rf"{table} cannot be read: line 2 has 3 cells, but must have the 2 of the header\.$",
    ):
        fit_folder(tmp_path, measured.facts, {})
    assert not (tmp_path / "pack.toml").exists()


@pytest.mark.parametrize("name", ["pack.toml", "report.md"])
def test_a_pack_that_cannot_be_written_is_one_sentence(
    measured: Calibration, tmp_path: Path, name: str
) -> None:
    copied(measured, tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(CalibrationError, match=rf"{name} cannot be written: .*; give another"):
        fit_folder(tmp_path, measured.facts, {})


def test_no_pack_without_a_family(measured: Calibration, tmp_path: Path) -> None:
    for file in measured.folder.iterdir():
        if file.name != "sdpa.csv":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    found = fit_folder(tmp_path, measured.facts, {})
    assert found.pack is None
    assert found.unpriced == (
        "No pack: nothing was measured of attention, and every step has them.",
    )
    assert not found.path.exists()  # the old one would pass for one of these tables


def test_no_pack_of_too_few_rows(measured: Calibration, tmp_path: Path) -> None:
    copied(measured, tmp_path)
    lines = (tmp_path / "dense_gemm.csv").read_text("utf-8").splitlines()
    (tmp_path / "dense_gemm.csv").write_text("\n".join(lines[:4]) + "\n", "utf-8")
    found = fit_folder(tmp_path, measured.facts, {})
    assert found.pack is None
    assert found.unpriced[0].startswith("No pack: 3 rows cannot determine 6 parameters")


def test_rows_of_another_number_of_threads_count_for_nothing(
    measured: Calibration, tmp_path: Path
) -> None:
    copied(measured, tmp_path)
    other = replace(measured, facts=measured.facts.model_copy(update={"key": "other-2t"}))
    found = fit_folder(tmp_path, other.facts, {})
    assert found.pack is None
    assert "nothing was measured of gemm" in found.unpriced[0]


def test_every_number_format_that_is_offered_is_known() -> None:
    assert set(facts_of("cpu", "fp32", 1).supported) <= set(DTYPES)
    assert set(DTYPES) == set(get_args(NumberFormat))  # those of a pack
