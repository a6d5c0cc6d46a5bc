"""Measured training runs, as cases that the model can price."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from pydantic import ValidationError

from perfmodel.architecture import Architecture, MfuConvention
from perfmodel.cluster import Batch, Cluster
from perfmodel.errors import IllegalPlanError, PerfmodelError
from perfmodel.frozen import explain
from perfmodel.ladders import ladder
from perfmodel.plan import Plan, Recompute
from perfmodel.step import check

SWEEPS = "b200_layout_sweeps.csv"
TABLE5 = "table5.csv"


@dataclass(frozen=True)
class MeasuredRun:
    """One training run: what ran, where and how, and the MFU that was measured."""

    sweep: str
    architecture: Architecture
    plan: Plan
    cluster: Cluster
    batch: Batch
    measured_mfu: float
    mfu_convention: MfuConvention
    peer_mfu: float | None = None


def csv_rows(path: Path | None, shipped: str) -> Iterator[dict[str, str]]:
    """Read the rows of a table, or of the shipped one; lines that begin with # are comments."""
    if path is None:
        text = (resources.files("perfmodel.validation") / "data" / shipped).read_text("utf-8")
    else:
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise PerfmodelError(f"Measured runs {path} cannot be read: {reason}.") from None
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    try:
        yield from csv.DictReader(lines)
    except csv.Error as error:
        raise PerfmodelError(f"The measured runs are not valid CSV: {error}.") from None


_SIZES = ("n_layers", "d_model", "d_ff", "n_heads", "n_kv_heads", "head_dim", "vocab_size")
_EXPERTS = ("n_experts", "top_k", "d_expert", "d_shared")
_DEGREES = ("pp", "ep", "dp", "micro_batch")
_OPTIONAL_DEGREES = ("tp", "etp", "cp", "vpp")  # 1 where the table has no such column


class _Row:
    """One row of a table; a missing or impossible value is said with its column."""

    def __init__(self, cells: dict[str, str | None]) -> None:
        self._cells = cells

    def text(self, column: str, default: str | None = None) -> str:
        """Return a cell as it stands."""
        value = self._cells.get(column)
        if value is None or value == "":
            if default is None:
                raise PerfmodelError(f"{column} is missing")
            return default
        return value

    def integer(self, column: str, default: str | None = None) -> int:
        """Return a cell that holds a whole number."""
        value = self.text(column, default)
        try:
            return int(value)
        except ValueError:
            raise PerfmodelError(f"{column}={value!r} must be a whole number") from None

    def fraction(self, column: str) -> float:
        """Return a cell that holds a number above 0 and up to 1."""
        value = self.text(column)
        try:
            number = float(value)
        except ValueError:
            number = float("nan")
        if not 0.0 < number <= 1.0:
            raise PerfmodelError(f"{column}={value!r} must be a fraction above 0 and up to 1")
        return number


def _run(row: _Row, hardware: str) -> MeasuredRun:
    sizes = {name: row.integer(name) for name in (*_SIZES, *_EXPERTS)}
    degrees = {name: row.integer(name) for name in _DEGREES}
    degrees |= {name: row.integer(name, "1") for name in _OPTIONAL_DEGREES}
    convention = row.text("mfu_convention", MfuConvention.SIX_N_EMBEDDING.value)
    if convention not in list(MfuConvention):
        raise PerfmodelError(
            f"mfu_convention={convention!r} must be one of {', '.join(MfuConvention)}"
        )
    run = MeasuredRun(
        sweep=row.text("sweep"),
        architecture=Architecture.model_validate(
            sizes
            | {
                "name": row.text("sweep"),
                "first_k_dense": row.integer("first_k_dense", "0"),
                "tied_embeddings": row.text("tied_embeddings").lower() == "true",
            }
        ),
        plan=Plan.model_validate(degrees | {"recompute": row.text("recompute")}),
        cluster=Cluster(hardware=hardware, nodes=row.integer("nodes")),
        batch=Batch.model_validate(
            {
                "global_batch": row.integer("global_batch"),
                "seq_len": row.integer("seq_len"),
                "optimizer": row.text("optimizer"),
            }
        ),
        measured_mfu=row.fraction("measured_mfu"),
        mfu_convention=MfuConvention(convention),
        peer_mfu=row.fraction("scaleplan_mfu") if row.text("scaleplan_mfu", "-") != "-" else None,
    )
    broken = check(run.architecture, run.plan, run.cluster, run.batch)
    if broken:
        raise IllegalPlanError(broken)
    return run


def layout_sweeps(path: Path | None = None, hardware: str = "p6-b200") -> tuple[MeasuredRun, ...]:
    """Read a table of measured runs; the shipped one is the 24 rows of the B200 layout sweeps.

    Raises
    ------
    PerfmodelError
        The file cannot be read, or a row lacks a column, holds an impossible value or a layout
        that breaks a rule.
    """
    runs = []
    for number, cells in enumerate(csv_rows(path, SWEEPS), start=1):
        try:
            runs.append(_run(_Row(dict(cells)), hardware))
        except ValidationError as error:
            raise PerfmodelError(f"Row {number} of the measured runs: {explain(error)}.") from None
        except PerfmodelError as error:
            text = str(error).rstrip(".")
            raise PerfmodelError(f"Row {number} of the measured runs: {text}.") from None
    if not runs:
        raise PerfmodelError("The table of measured runs has no rows.")
    return tuple(runs)


@dataclass(frozen=True)
class StagedRun:
    """One of the four runs whose *ratios* of MFU were measured (Table 5)."""

    architecture: Architecture
    measured_ratio: float
    paper_mfu: float


TABLE5_CLUSTER = ("p6-b200", 8)
TABLE5_BATCH = Batch(global_batch=1024, seq_len=2048)


def table5_plan(recompute: Recompute) -> Plan:
    """Return the layout of the staged runs; the paper does not state its recompute mode."""
    return Plan(ep=8, pp=4, dp=16, micro_batch=4, recompute=recompute)


def staged_runs() -> tuple[StagedRun, ...]:
    """Return the four runs of Table 5."""
    return tuple(
        StagedRun(
            architecture=ladder(
                int(row["q"]), int(row["n_experts"]), int(row["top_k"]), int(row["expert_split"])
            ),
            measured_ratio=float(row["measured_ratio"]),
            paper_mfu=float(row["paper_mfu"]),
        )
        for row in csv_rows(None, TABLE5)
    )
