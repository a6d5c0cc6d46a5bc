"""Microbenchmarks: what is measured, what is kept, what is refused."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from moe_ref.microbench.campaign import measure  # noqa: E402
from moe_ref.microbench.clocks import CpuClock  # noqa: E402
from moe_ref.microbench.errors import CalibrationError  # noqa: E402
from moe_ref.microbench.families import FAMILIES, chosen_families  # noqa: E402
from moe_ref.microbench.family import Bench, Family  # noqa: E402
from moe_ref.microbench.grids import Point, Scale, thinned  # noqa: E402
from moe_ref.microbench.machine import Facts, facts_of, read_sidecar  # noqa: E402
from moe_ref.microbench.store import RowFile  # noqa: E402
from moe_ref.microbench.timing import Timer  # noqa: E402

SCALE = Scale(flop=1e8, elements=2e6, points=12)


# ---------------------------------------------------------------- rows that are kept


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def test_rows_are_added_and_known_again(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    file = RowFile(path, ("device", "n", "ms"), ("device", "n"))
    file.add({"device": "a", "n": 1, "ms": 1 / 3})
    assert path.read_text("utf-8") == "device,n,ms\na,1,0.333333\n"
    again = RowFile(path, ("device", "n", "ms"), ("device", "n"))
    assert {"device": "a", "n": 1} in again
    assert {"device": "b", "n": 1} not in again
    assert {"device": "a", "n": 2} not in again


@pytest.mark.parametrize("cut", [1, 5, 13])
def test_a_row_that_was_cut_short_is_taken_off(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "t.csv"
    file = RowFile(path, ("device", "n", "ms"), ("device", "n"))
    file.add({"device": "a", "n": 1, "ms": 2.5})
    file.add({"device": "a", "n": 2, "ms": 2.5})
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    mended = RowFile(path, ("device", "n", "ms"), ("device", "n"))
    kept = [row["n"] for row in rows(path)] if path.exists() else []
    assert kept == (["1"] if cut < 8 else [])
    if cut < 8:
        mended.add({"device": "a", "n": 2, "ms": 2.5})
        assert path.read_bytes() == whole


def test_a_file_with_other_columns_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("device,k\na,1\n", "utf-8")
    with pytest.raises(CalibrationError, match=r"^t.csv has other columns than device, n: give"):
        RowFile(path, ("device", "n"), ("device",))
    assert path.read_text("utf-8") == "device,k\na,1\n"


# ---------------------------------------------------------------- grids


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
@pytest.mark.parametrize("large", [False, True])
def test_a_grid_is_the_same_every_time_and_has_no_row_twice(family: Family, large: bool) -> None:
    scale = Scale(flop=1e13, elements=1e10, points=60, large=large)
    dtype = "bf16" if large else "fp32"
    points = family.grid(scale, dtype)
    assert points == family.grid(scale, dtype)
    keys = [tuple(point[key] for key in family.keys) for point in points]
    assert len(set(keys)) == len(points)
    assert all(set(point) == set(family.keys) for point in points)
    assert points


def test_a_larger_budget_has_larger_calls() -> None:
    def largest(flop: float) -> float:
        scale = Scale(flop=flop, elements=1e9, points=1000)
        points = FAMILIES["gemm"].grid(scale, "fp32")
        return max(2.0 * int(p["M"]) * int(p["N"]) * int(p["K"]) for p in points)

    assert largest(1e8) <= 1e8 < largest(1e10) <= 1e10


def test_a_choice_of_points_is_seeded() -> None:
    points: list[Point] = [{"n": n} for n in range(50)]
    assert thinned(points, 60, "a") == points
    chosen = thinned(points, 10, "a")
    assert chosen == thinned(points, 10, "a") != thinned(points, 10, "b")
    assert len(chosen) == 10


# ---------------------------------------------------------------- operands


def test_operands_are_cut_from_a_pool_and_differ() -> None:
    bench = Bench("cpu", torch.float32, Timer(CpuClock()))
    a, b = bench.random(8, 8), bench.random(8, 8)
    assert a.shape == b.shape == (8, 8)
    assert a.is_contiguous()
    assert not torch.equal(a, b)
    assert bench.random(4, dtype=torch.float64).dtype == torch.float64
    leaf = bench.random(3).requires_grad_()
    assert leaf.is_leaf
    assert not bench.random(3).requires_grad


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_a_row_has_the_columns_of_its_table(family: Family) -> None:
    bench = Bench("cpu", torch.float32, Timer(CpuClock(), limit_s=0.0, warmup=1))
    point = family.grid(SCALE, "fp32")[0]
    row = family.measure(bench, point)
    assert set(row) == set(family.values)
    times = [v for k, v in row.items() if "ms" in k or "us" in k]
    assert all(float(value) >= 0.0 for value in times)
    assert any(float(value) > 0.0 for value in times)


# ---------------------------------------------------------------- a campaign


@pytest.fixture(scope="module")
def facts() -> Facts:
    return facts_of("cpu", "fp32", 1)


def counting(name: str = "fake") -> Family:
    """Return a family of eight rows that measures the threads in use."""
    return Family(
        name=name,
        table=f"{name}.csv",
        keys=("n",),
        values=("ms",),
        grid=lambda scale, dtype: [{"n": n} for n in range(8)],
        measure=lambda bench, point: {"ms": float(torch.get_num_threads())},
    )


class StopError(Exception):
    """An interrupt, as far as a test is concerned."""


def test_an_interrupt_loses_nothing_and_the_next_run_goes_on(tmp_path: Path, facts: Facts) -> None:
    family = counting()

    def stop(name: str, done: int, of: int) -> None:
        assert (name, of) == ("fake", 8)
        if done == 3:
            raise StopError

    with pytest.raises(StopError):
        measure(tmp_path, facts, [family], scale=SCALE, progress=stop)
    first = rows(tmp_path / "fake.csv")
    assert len(first) == 3
    assert measure(tmp_path, facts, [family], scale=SCALE) == {"fake": (8, 8)}
    both = rows(tmp_path / "fake.csv")
    assert both[:3] == first
    assert sorted(int(row["n"]) for row in both) == list(range(8))
    runs = read_sidecar(tmp_path).campaign(facts)
    assert runs is not None
    assert [(run.rows, run.left, run.interrupted) for run in runs.runs] == [
        (3, 5, True),
        (5, 0, False),
    ]


def test_nothing_is_measured_twice(tmp_path: Path, facts: Facts) -> None:
    family = counting()
    measure(tmp_path, facts, [family], scale=SCALE)
    before = (tmp_path / "fake.csv").read_bytes()
    measure(tmp_path, facts, [family], scale=SCALE, seed=5)
    assert (tmp_path / "fake.csv").read_bytes() == before


def test_the_order_is_random_and_seeded(tmp_path: Path, facts: Facts) -> None:
    def order(folder: str, seed: int) -> list[str]:
        families = [counting(), counting(name="other")]
        seen: list[str] = []
        measure(
            tmp_path / folder,
            facts,
            families,
            scale=SCALE,
            seed=seed,
            progress=lambda name, done, of: seen.append(name),
        )
        return [*seen, *(row["n"] for row in rows(tmp_path / folder / "fake.csv"))]

    assert order("a", 1) == order("b", 1) != order("c", 2)
    families = order("d", 1)[:16]
    assert families != sorted(families)


def test_a_row_that_does_not_fit_is_left_out(tmp_path: Path, facts: Facts) -> None:
    def measured(bench: Bench, point: Point) -> dict[str, str | int | float]:
        if point["n"] == 3:
            raise torch.OutOfMemoryError
        return {"ms": 1.0}

    family = replace(counting(), measure=measured)
    assert measure(tmp_path, facts, [family], scale=SCALE) == {"fake": (7, 8)}


def test_a_row_that_fails_is_one_sentence(tmp_path: Path, facts: Facts) -> None:
    def measured(bench: Bench, point: Point) -> dict[str, str | int | float]:
        raise RuntimeError("no\nkernel.")

    family = replace(counting(), measure=measured)
    with pytest.raises(
        CalibrationError, match=r"^fake with n = . cannot be measured: no kernel\.$"
    ):
        measure(tmp_path, facts, [family], scale=SCALE)


def test_out_of_time_is_no_error(tmp_path: Path, facts: Facts) -> None:
    assert measure(tmp_path, facts, [counting()], scale=SCALE, budget_s=1e-9) == {"fake": (0, 8)}


def test_threads_are_set_and_put_back(tmp_path: Path, facts: Facts) -> None:
    before = torch.get_num_threads()
    measure(tmp_path, facts, [counting()], scale=SCALE)
    assert {row["ms"] for row in rows(tmp_path / "fake.csv")} == {"1"}
    assert torch.get_num_threads() == before


def test_the_sidecar_says_what_was_measured_on(tmp_path: Path, facts: Facts) -> None:
    measure(tmp_path, facts, [counting()], scale=SCALE, seed=7)
    text = (tmp_path / "machine.json").read_text("utf-8")
    (campaign_of,) = json.loads(text)["campaigns"].values()
    found = campaign_of["facts"]
    assert found["torch_version"] == torch.__version__
    assert (found["threads"], found["dtype"], found["device"]) == (1, "fp32", "cpu")
    assert "fp32" in found["supported"]
    assert found["memory_bytes"] > 1e8
    assert campaign_of["runs"][0]["seed"] == 7
    assert campaign_of["scale"]["flop"] == SCALE.flop
    assert str(Path.home()) not in text


def test_other_software_is_another_campaign(tmp_path: Path, facts: Facts) -> None:
    measure(tmp_path, facts, [counting()], scale=SCALE)
    other = facts.model_copy(update={"torch_version": "1.0"})
    with pytest.raises(
        CalibrationError, match=r"torch_version = .* now '1\.0': give another --out"
    ):
        measure(tmp_path, other, [counting()], scale=SCALE)
    more = facts.model_copy(update={"key": "cpu-2t"})
    assert measure(tmp_path, more, [counting()], scale=SCALE) == {"fake": (8, 8)}
    assert len(rows(tmp_path / "fake.csv")) == 16


def test_a_sidecar_of_something_else_is_refused(tmp_path: Path, facts: Facts) -> None:
    (tmp_path / "machine.json").write_text('{"a": 1}', "utf-8")
    with pytest.raises(CalibrationError, match="give another --out"):
        measure(tmp_path, facts, [counting()], scale=SCALE)
    (tmp_path / "machine.json").write_text("{", "utf-8")
    with pytest.raises(CalibrationError, match="it is not JSON"):
        measure(tmp_path, facts, [counting()], scale=SCALE)


def test_a_file_is_no_folder(tmp_path: Path, facts: Facts) -> None:
    (tmp_path / "f").write_text("", "utf-8")
    with pytest.raises(CalibrationError, match="cannot be a folder"):
        measure(tmp_path / "f", facts, [counting()], scale=SCALE)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("device", "dtype", "threads", "sentence"),
    [
        ("tpu", "fp32", 1, "device 'tpu' is not cpu or cuda."),
        ("cpu", "fp8", 1, "dtype 'fp8' is not one of bf16, fp16, fp32."),
        ("cpu", "fp32", 0, "threads is 0, but must be from 1 to"),
        ("cpu", "fp32", 10**6, "use"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    device: str, dtype: str, threads: int, sentence: str
) -> None:
    with pytest.raises(CalibrationError, match=sentence):
        facts_of(device, dtype, threads)


def test_a_device_that_is_not_there_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CalibrationError, match=r"no CUDA device .* nearest: cpu\.$"):
        facts_of("cuda", "bf16")


def test_an_unknown_family_is_named() -> None:
    with pytest.raises(CalibrationError, match="no family 'conv' of kernels; there are gemm, "):
        chosen_families(["gemm", "conv"])
    assert [f.name for f in chosen_families(["topk", "gemm", "topk"])] == ["topk", "gemm"]
