"""``mosaic calibrate``: light to load, one sentence where torch is not, exit codes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from moe_ref.microbench import command
from moe_ref.microbench.errors import CalibrationError

ROOT = Path(__file__).resolve().parent.parent.parent

app = typer.Typer()
app.command()(command.calibrate)


def test_the_entry_point_leads_to_the_command() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    value = project["entry-points"]["mosaic_opt.commands"]["calibrate"]
    module, _, name = value.partition(":")
    assert getattr(import_module(module), name) is command.calibrate


def test_loading_the_command_loads_no_torch() -> None:
    code = "import sys, moe_ref.microbench.command; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_without_torch_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "torch" else real(name))
    result = CliRunner().invoke(app, ["--out", str(tmp_path / "x")])
    assert isinstance(result.exception, CalibrationError)
    assert str(result.exception) == (
        "`mosaic calibrate` needs torch: pip install 'mosaic-opt[torch]'."
    )
    assert not (tmp_path / "x").exists()


def test_a_run_without_time_claims_nothing(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    result = CliRunner().invoke(app, ["--out", str(tmp_path), "--threads", "1", "--budget", "1e-9"])
    assert result.exit_code == 1
    assert "No pack: nothing was measured of gemm, dispatch, grouped" in result.output
    assert not (tmp_path / "pack.toml").exists()


def test_one_family_alone_is_measured_and_gives_no_pack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from moe_ref.microbench import calibration, campaign
    from moe_ref.microbench.grids import Scale

    monkeypatch.setattr(calibration, "QUICK", campaign.Effort(0.001, 0.001, 4))
    scale = Scale(flop=1e7, elements=1e6, points=4)
    monkeypatch.setattr(campaign, "probed_scale", lambda facts, effort: scale)
    options = ["--out", str(tmp_path), "--threads", "1", "--only", "dispatch", "--quick"]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 1
    assert (tmp_path / "dispatch_gap.csv").exists()
    assert not (tmp_path / "dense_gemm.csv").exists()
    assert "No pack: nothing was measured of gemm, grouped" in result.output


def test_an_unknown_family_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    result = CliRunner().invoke(app, ["--out", str(tmp_path), "--only", "gemm,conv"])
    assert isinstance(result.exception, CalibrationError)
