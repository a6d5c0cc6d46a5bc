"""Measured training runs, as cases that the model can price."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from perfmodel.architecture import Architecture, MfuConvention
from perfmodel.cluster import Batch, Cluster, Optimizer
from perfmodel.errors import PerfmodelError
from perfmodel.ladder import ladder
from perfmodel.plan import Plan, Recompute

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


def _rows(path: Path | None, shipped: str) -> Iterator[dict[str, str]]:
    if path is None:
        text = (resources.files("perfmodel.validation") / "data" / shipped).read_text("utf-8")
    else:
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise PerfmodelError(f"Measured runs {path} cannot be read: {reason}.") from None
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return csv.DictReader(lines)


_INTEGERS = ("n_layers", "d_model", "d_ff", "n_heads", "n_kv_heads", "head_dim", "vocab_size")
_EXPERTS = ("n_experts", "top_k", "d_expert", "d_shared")


def _run(row: dict[str, str], hardware: str) -> MeasuredRun:
    sizes: dict[str, object] = {name: int(row[name]) for name in (*_INTEGERS, *_EXPERTS)}
    return MeasuredRun(
        sweep=row["sweep"],
        architecture=Architecture.model_validate(
            sizes | {"name": row["sweep"], "tied_embeddings": row["tied_embeddings"] == "true"}
        ),
        plan=Plan(
            ep=int(row["ep"]),
            pp=int(row["pp"]),
            dp=int(row["dp"]),
            micro_batch=int(row["micro_batch"]),
            recompute=Recompute(row["recompute"]),
        ),
        cluster=Cluster(hardware=hardware, nodes=int(row["nodes"])),
        batch=Batch(
            global_batch=int(row["global_batch"]),
            seq_len=int(row["seq_len"]),
            optimizer=Optimizer(row["optimizer"]),
        ),
        measured_mfu=float(row["measured_mfu"]),
        mfu_convention=MfuConvention.SIX_N_EMBEDDING,
        peer_mfu=float(row["scaleplan_mfu"]) if row.get("scaleplan_mfu") else None,
    )


def layout_sweeps(path: Path | None = None, hardware: str = "p6-b200") -> tuple[MeasuredRun, ...]:
    """Read a table of measured runs; the shipped one is the 24 rows of the B200 layout sweeps.

    Raises
    ------
    PerfmodelError
        The file cannot be read, or a row lacks a column or holds an impossible value.
    """
    runs = []
    for number, row in enumerate(_rows(path, SWEEPS), start=1):
        try:
            runs.append(_run(row, hardware))
        except (KeyError, ValueError) as error:
            what = f"column {error}" if isinstance(error, KeyError) else str(error).splitlines()[0]
            raise PerfmodelError(f"Row {number} of the measured runs: {what}.") from None
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
        for row in _rows(None, TABLE5)
    )
