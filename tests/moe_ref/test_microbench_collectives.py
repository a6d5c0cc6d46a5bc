"""Collectives between processes: who is in which group, what a row times, a real pair."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("torch")

from moe_ref.microbench.collectives import Ranks, main, points_of

ROOT = Path(__file__).resolve().parent.parent.parent


def test_groups_are_of_every_size_and_hold_every_rank_once() -> None:
    groups = Ranks(rank=0, world=8, local=4, device="cpu").groups()
    assert set(groups) == {
        ("contiguous", 2),
        ("contiguous", 4),
        ("contiguous", 8),
        ("stride4", 2),
    }
    for (layout, size), lists in groups.items():
        assert sorted(rank for members in lists for rank in members) == list(range(8))
        assert {len(members) for members in lists} == {size}
        step = 4 if layout == "stride4" else 1
        assert all(b - a == step for m in lists for a, b in pairwise(m))


def test_one_process_has_no_group() -> None:
    assert Ranks(rank=0, world=1, local=1, device="cpu").groups() == {}


def test_every_collective_is_asked_for_at_every_volume() -> None:
    points = points_of(Ranks(rank=0, world=2, local=2, device="cpu"), (1e3, 1e6))
    assert len(points) == 2 * 4
    names = {point.get("collective", "all_to_all") for point in points}
    assert names == {"all_reduce", "reduce_scatter", "all_gather", "all_to_all"}


def test_one_process_alone_is_told_how_to_be_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["--out", str(tmp_path)]) == 2
    assert "torchrun --nproc-per-node 2" in capsys.readouterr().err


def test_no_cuda_device_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["--out", str(tmp_path), "--device", "cuda"]) == 2
    assert "no CUDA device here" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_measure_and_go_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["-m", "moe_ref.microbench.collectives", "--out", str(tmp_path), "--quick"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def run(*more: str) -> str:
        done = subprocess.run(
            [*command, *more], env=env, cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stderr

    assert "0 rows of collectives measured, 16 left" in run("--budget", "1e-9")
    assert "16 rows of collectives measured, 0 left" in run()
    with (tmp_path / "dp_collectives.csv").open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 12
    assert all(float(row["time_ms_p10"]) <= float(row["time_ms_p50"]) for row in rows)
    assert {row["group_size"] for row in rows} == {"2"}
    assert "0 rows of collectives measured, 0 left" in run()
