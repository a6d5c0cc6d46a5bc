"""What `mosaic calibrate` and the program for collectives refuse, each in one sentence."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from math import inf, nan
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

torch = pytest.importorskip("torch")

from moe_ref.microbench import collectives, command  # noqa: E402
from moe_ref.microbench.campaign import allowed_budget, measure  # noqa: E402
from moe_ref.microbench.errors import CalibrationError  # noqa: E402
from moe_ref.microbench.families import FAMILIES  # noqa: E402
from moe_ref.microbench.grids import Scale  # noqa: E402
from moe_ref.microbench.machine import facts_of  # noqa: E402
from moe_ref.microbench.store import RowFile  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent.parent

Program = Callable[..., str]
"""Calls a program on a folder with further options, and returns what it says of its error."""


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@pytest.fixture(params=["calibrate", "collectives"])
def program(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Program]:
    """Yield each of the two programs, the second as a single process."""
    app = typer.Typer()
    app.command()(command.calibrate)

    def calibrate(folder: Path, *options: str) -> str:
        result = CliRunner().invoke(
            app, ["--out", str(folder), "--threads", "1", "--quick", *options]
        )
        assert isinstance(result.exception, CalibrationError)
        return str(result.exception)

    def measure_collectives(folder: Path, *options: str) -> str:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", free_port())
        for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "1")):
            monkeypatch.setenv(name, value)
        capsys.readouterr()
        assert collectives.main(["--out", str(folder), "--quick", *options]) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        return err.removeprefix("error: ").removesuffix("\n")

    threads = torch.get_num_threads()
    yield calibrate if request.param == "calibrate" else measure_collectives
    torch.set_num_threads(threads)


# ---------------------------------------------------------------- budgets


@pytest.mark.parametrize("budget", ["-1", "0", "nan", "-inf"])
def test_a_budget_without_time(program: Program, tmp_path: Path, budget: str) -> None:
    assert program(tmp_path / "new", f"--budget={budget}") == (
        f"budget is {budget} seconds, but must be above 0: use 1, or inf for no end."
    )
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("budget", [-1.0, 0.0, nan])
def test_a_budget_without_time_in_python(tmp_path: Path, budget: float) -> None:
    facts, scale = facts_of("cpu", "fp32", 1), Scale(flop=1e6, elements=1e5, points=2)
    with pytest.raises(CalibrationError, match="but must be above 0"):
        measure(tmp_path, facts, [FAMILIES["topk"]], scale=scale, budget_s=budget)
    assert not list(tmp_path.iterdir())


def test_a_budget_may_have_no_end() -> None:
    assert allowed_budget(inf) == inf
    assert allowed_budget(1e-9) == 1e-9


# ---------------------------------------------------------------- folders and sidecars


def test_a_file_in_place_of_the_folder(program: Program, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("", "utf-8")
    assert program(tmp_path / "f") == (
        f"{tmp_path / 'f'} cannot be a folder: File exists; give another --out."
    )
    assert program(tmp_path / "f" / "below").endswith("Not a directory; give another --out.")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "Is a directory"),
        (b"\xff\xfe{}", "it is not JSON"),
        (b"{", "it is not JSON"),
        (b"[" * 100_000, "it is not JSON"),
        (b'{"campaigns": []}', "campaigns=list: input should be a valid dictionary"),
    ],
)
def test_a_sidecar_that_cannot_be_read(
    program: Program, tmp_path: Path, content: bytes | None, why: str
) -> None:
    path = tmp_path / "machine.json"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    assert program(tmp_path) == f"{path} cannot be read: {why}; give another --out."


def test_a_sidecar_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "machine.json.part").mkdir()
    facts, scale = facts_of("cpu", "fp32", 1), Scale(flop=1e6, elements=1e5, points=2)
    with pytest.raises(CalibrationError, match=r"machine.json cannot be written: Is a directory;"):
        measure(tmp_path, facts, [FAMILIES["topk"]], scale=scale, budget_s=1e-9)


# ---------------------------------------------------------------- tables


def begun(path: Path) -> bytes:
    """Return the header of a table of either program."""
    if path.name == "all_to_all.csv":
        times = (f"time_ms_{part}" for part in ("p50", "p10", "p90"))
        columns = ("device", "world_size", "group_size", "buffer_bytes", *times, "repeats")
    else:
        columns = FAMILIES["dispatch"].columns
    return ",".join(columns).encode() + b"\n"


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (b"\xff,1\n", "it is not UTF-8"),
        (b"a,1\n", r"line 2 has 2 cells, but must have the \d+ of the header"),
        (b"a" + b",1" * 40 + b"\n", r"line 2 has 41 cells, but must have the \d+ of the header"),
        (b'"' + b"a" * 200_000 + b'"\n', r"field larger than field limit \(131072\)"),
    ],
)
def test_a_table_that_is_none(program: Program, tmp_path: Path, more: bytes, why: str) -> None:
    for name in ("dispatch_gap.csv", "all_to_all.csv"):
        (tmp_path / name).write_bytes(begun(tmp_path / name) + more)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(CalibrationError, match=rf"cannot be read: {why}; give another --out, or"):
        raise CalibrationError(program(tmp_path))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_folder_in_place_of_a_table(program: Program, tmp_path: Path) -> None:
    for name in ("dispatch_gap.csv", "all_to_all.csv"):
        (tmp_path / name).mkdir()
    assert program(tmp_path).endswith(".csv cannot be read: Is a directory; give another --out.")


@pytest.mark.parametrize("content", [b"a note", b"a,b\n1,2\na note", b"\xff"])
def test_a_file_of_something_else_is_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    with pytest.raises(CalibrationError, match=r"^t.csv has other columns than device, n"):
        RowFile(path, ("device", "n"), ("device",))
    assert path.read_bytes() == content


@pytest.mark.parametrize("content", [b"", b"devi", b"device,n"])
def test_a_header_that_was_cut_short_is_written_again(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    RowFile(path, ("device", "n"), ("device",)).add({"device": "a", "n": 1})
    assert path.read_bytes() == b"device,n\na,1\n"


# ---------------------------------------------------------------- several processes


@pytest.mark.slow
def test_what_one_rank_cannot_read_stops_all_and_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "all_to_all.csv").mkdir()
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "moe_ref.microbench.collectives", "--out", str(tmp_path)],
            env=environment | {"RANK": str(rank)},
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    first, second = [process.communicate(timeout=120)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [2, 2]
    assert "all_to_all.csv cannot be read: Is a directory; give another --out." in first
    assert "error" not in second
    assert "Traceback" not in first + second
