"""How far predicted step times are from published ones, by source, device, stack and kind.

    python -m perfmodel.validation.published_scores --csv scores.csv --plot scores.html

Each run is predicted under the stack profile that takes it
(:mod:`perfmodel.calibration.published_stacks`). Half of the layouts of a stack fitted its
constants; the others took part in no fit and are the ones that score.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib import resources
from io import StringIO
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal

import numpy as np

from perfmodel.calibration.published_stacks import SPECS, StackSpec, fits
from perfmodel.calibration.stacks import StackProfile, load_stack
from perfmodel.errors import PerfmodelError
from perfmodel.frozen import Frozen
from perfmodel.step import StepModel
from perfmodel.validation.published import PublishedRun, published_runs, read_runs

__all__ = [
    "GroupScore",
    "PublishedScores",
    "RankScore",
    "ScoredRow",
    "published_scores",
    "score_runs",
    "scores_csv",
]

SHIPPED_SWEEP = "time_nanotron.json"

LEAST_RANKED = 4
"""The fewest layouts of a group inside which ranks are compared."""

Progress = Callable[[str, int, int], None]


class ScoredRow(Frozen):
    """One run [s]; ``error`` is predicted over measured time, minus 1; 90% are in the interval."""

    row: int
    source: str
    model: str
    kind: Literal["dense", "moe"]
    hardware: str
    precision: str
    devices: int
    global_batch: int
    seq_len: int
    stack: str
    role: Literal["fit", "score"]
    plan: str
    measured_s: float
    predicted_s: float
    low_s: float
    high_s: float
    error: float
    measured_tflops: float

    @property
    def inside(self) -> bool:
        """Whether the measured time lies in the interval."""
        return self.low_s <= self.measured_s <= self.high_s


class GroupScore(Frozen):
    """Errors of some runs of one role [-]."""

    by: str
    name: str
    role: str
    rows: int
    median: float
    mean: float
    bias: float
    inside: float


class RankScore(Frozen):
    """Rank correlation of throughput inside one (model, device) group; ``rows`` are layouts."""

    model: str
    hardware: str
    rows: int
    spearman: float


class PeerScore(Frozen):
    """What a peer says of its error on rows that are here too, and ours on the same [-]."""

    peer: str
    rows: str
    theirs: str
    ours_rows: int
    ours_mean: float
    ours_worst: float
    source: str


class PublishedScores(Frozen):
    """Every score of published runs; ``schema_version`` 1."""

    schema_version: int = 1
    rows: tuple[ScoredRow, ...]
    groups: tuple[GroupScore, ...]
    ranks: tuple[RankScore, ...]
    peers: tuple[PeerScore, ...]
    sweep: tuple[GroupScore, ...]  # of the table that does not ship
    left_out: dict[str, int]  # runs that no stack takes, by source

    def overall(self, role: str = "score") -> GroupScore:
        """Return the score of all runs of a role."""
        return next(g for g in self.groups if g.by == "all" and g.role == role)


@cache
def _profile(name: str) -> StackProfile:
    return load_stack(name)


def spec_of(run: PublishedRun) -> StackSpec | None:
    """Return the stack that takes a run, if one does."""
    return next((s for s in SPECS if s.takes(run)), None)


def profile_of(run: PublishedRun) -> StackProfile | None:
    """Return the profile of a run, with the switches that it has on."""
    spec = spec_of(run)
    return None if spec is None else _profile("+".join((spec.name, *spec.switches_of(run))))


def score_runs(
    runs: Sequence[PublishedRun], progress: Progress | None = None
) -> tuple[ScoredRow, ...]:
    """Predict the step time of every run that has one and a stack."""
    scored = []
    for i, run in enumerate(runs):
        profile = profile_of(run)
        if progress is not None and (i + 1) % 50 == 0:
            progress("published runs", i + 1, len(runs))
        if profile is None or run.step_time_s is None:
            continue
        model = StepModel(run.architecture, run.plan, run.cluster, run.batch, profile)
        predicted, measured = model.step_s, run.step_time_s
        scored.append(
            ScoredRow(
                row=run.row,
                source=run.source,
                model=run.architecture.name,
                kind="moe" if run.architecture.n_experts else "dense",
                hardware=run.hardware,
                precision=run.precision,
                devices=run.devices,
                global_batch=run.global_batch,
                seq_len=run.seq_len,
                stack=profile.name.partition("+")[0],
                role="fit" if fits(run) else "score",
                plan=str(run.plan),
                measured_s=measured,
                predicted_s=predicted,
                low_s=predicted * profile.errors.low,
                high_s=predicted * profile.errors.high,
                error=predicted / measured - 1.0,
                measured_tflops=run.tflops_per_gpu or 0.0,
            )
        )
    return tuple(scored)


def group_score(by: str, name: str, role: str, rows: Sequence[ScoredRow]) -> GroupScore:
    """Summarise some runs."""
    errors = [row.error for row in rows]
    return GroupScore(
        by=by,
        name=name,
        role=role,
        rows=len(rows),
        median=median(map(abs, errors)),
        mean=mean(map(abs, errors)),
        bias=mean(errors),
        inside=mean(float(row.inside) for row in rows),
    )


_BY: dict[str, Callable[[ScoredRow], str]] = {
    "all": lambda row: "all",
    "stack": lambda row: row.stack,
    "source": lambda row: row.source,
    "device": lambda row: row.hardware,
    "kind": lambda row: row.kind,
    "precision": lambda row: row.precision,
}


def group_scores(rows: Sequence[ScoredRow]) -> tuple[GroupScore, ...]:
    """Summarise runs by each of what they are grouped by, those that fitted apart."""
    out = []
    for by, key in _BY.items():
        for role in ("score", "fit"):
            mine = [row for row in rows if row.role == role]
            for name in sorted({key(row) for row in mine}):
                out.append(group_score(by, name, role, [r for r in mine if key(r) == name]))
    return tuple(out)


def rank_scores(rows: Sequence[ScoredRow]) -> tuple[RankScore, ...]:
    """Compare ranks of throughput a device inside groups of one model on one kind of device.

    Rows of both roles count: a constant moves all rows of a group alike, mostly. A layout that was
    measured under several releases counts once, at the median: the model gives it one time. Groups
    have at least `LEAST_RANKED` layouts.
    """
    from scipy.stats import spearmanr

    out = []
    for model, hardware in sorted({(row.model, row.hardware) for row in rows}):
        same: dict[tuple[object, ...], list[ScoredRow]] = {}
        for row in rows:
            if (row.model, row.hardware) == (model, hardware):
                key = (row.plan, row.precision, row.devices, row.global_batch, row.seq_len)
                same.setdefault(key, []).append(row)
        measured = [median(r.measured_tflops for r in mine) for mine in same.values()]
        predicted = [
            median(r.measured_tflops * r.measured_s / r.predicted_s for r in mine)
            for mine in same.values()
        ]
        if len(same) < LEAST_RANKED or len(set(measured)) < 2 or len(set(predicted)) < 2:
            continue
        rho = float(spearmanr(measured, predicted).statistic)
        out.append(RankScore(model=model, hardware=hardware, rows=len(same), spearman=rho))
    return tuple(out)


_PEERS: tuple[tuple[str, str, str, str, Callable[[ScoredRow], bool]], ...] = (
    (
        "Calculon",
        "Korthikanti et al. 2022, Table 5",
        "mean 3.65 %, worst 8.87 %",
        "github.com/calculon-ai/calculon, its validation",
        lambda row: row.source.startswith("Korthikanti et al. 2022 (Table 5)"),
    ),
    (
        "SimuMax v1.2",
        "SimuMax B200 v1.2 validation, dense",
        "-11.37 to -0.18 %",
        "github.com/MooreThreads/SimuMax, docs/b200",
        lambda row: row.source.startswith("SimuMax") and row.kind == "dense",
    ),
    (
        "SimuMax v1.2",
        "SimuMax B200 v1.2 validation, MoE",
        "-13.54 to +0.06 %",
        "github.com/MooreThreads/SimuMax, docs/b200",
        lambda row: row.source.startswith("SimuMax") and row.kind == "moe",
    ),
)


def peer_scores(rows: Sequence[ScoredRow]) -> tuple[PeerScore, ...]:
    """Put our errors beside what peers publish for the same rows, fitted ones included."""
    out = []
    for peer, name, theirs, source, takes in _PEERS:
        errors = [abs(row.error) for row in rows if takes(row)]
        if errors:
            out.append(
                PeerScore(
                    peer=peer,
                    rows=name,
                    theirs=theirs,
                    ours_rows=len(errors),
                    ours_mean=mean(errors),
                    ours_worst=max(errors),
                    source=source,
                )
            )
    return tuple(out)


def shipped_sweep() -> tuple[GroupScore, ...]:
    """Return the scores of the nanotron sweep, whose rows are not part of the package."""
    text = (resources.files("perfmodel.validation") / "data" / SHIPPED_SWEEP).read_text("utf-8")
    return tuple(Sweep.model_validate_json(text).groups)


class Sweep(Frozen):
    """Scores of a table that does not ship, and the command that printed them."""

    source: str
    command: str
    groups: tuple[GroupScore, ...]
    rank: float  # median of the rank correlations inside groups [-]


def published_scores(progress: Progress | None = None) -> PublishedScores:
    """Score every published run that ships under its stack."""
    runs = published_runs()
    rows = score_runs(runs, progress)
    left: dict[str, int] = {}
    for run in runs:
        if run.step_time_s is not None and spec_of(run) is None:
            left[run.source] = left.get(run.source, 0) + 1
    return PublishedScores(
        rows=rows,
        groups=group_scores(rows),
        ranks=rank_scores(rows),
        peers=peer_scores(rows),
        sweep=shipped_sweep(),
        left_out=left,
    )


COLUMNS = tuple(ScoredRow.model_fields)


def scores_csv(rows: Iterable[ScoredRow]) -> str:
    """Write runs as CSV; times to six digits."""
    out = StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        values = row.model_dump().values()
        writer.writerow([f"{v:.6g}" if isinstance(v, float) else v for v in values])
    return out.getvalue()


def scores_figure(rows: Sequence[ScoredRow]) -> str:
    """Draw measured against predicted step times of the scored runs, as a page of HTML."""
    import plotly.graph_objects as go

    figure: Any = go.Figure()
    scored = [row for row in rows if row.role == "score"]
    span = [min(r.measured_s for r in scored), max(r.measured_s for r in scored)]
    for name, factor in (("equal", 1.0), ("+10%", 1.1), ("-10%", 0.9)):
        dash = "solid" if factor == 1.0 else "dot"
        line = {"color": "grey", "dash": dash, "width": 1}
        figure.add_scatter(x=span, y=[factor * s for s in span], mode="lines", name=name, line=line)
    for stack in sorted({row.stack for row in scored}):
        mine = [row for row in scored if row.stack == stack]
        figure.add_scatter(
            x=[row.measured_s for row in mine],
            y=[row.predicted_s for row in mine],
            mode="markers",
            name=stack,
            text=[f"{row.model} {row.hardware} {row.precision}<br>{row.plan}" for row in mine],
        )
    figure.update_layout(
        title="Published runs that took part in no fit",
        xaxis={"title": "measured step time (s)", "type": "log"},
        yaxis={"title": "predicted step time (s)", "type": "log"},
    )
    return str(figure.to_html(include_plotlyjs="cdn", div_id="published-scores"))


def sweep_scores(table: Path) -> Sweep:
    """Score a table of runs given by path: the nanotron sweep."""
    rows = score_runs(read_runs(table).runs)
    if not rows:
        raise PerfmodelError(f"{table} has no run that a shipped stack takes.")
    ranks = rank_scores(rows)
    groups = [g for g in group_scores(rows) if g.by in ("all", "stack")]
    return Sweep(
        source=rows[0].source,
        command=f"python -m perfmodel.validation.published_scores --runs {table.name}",
        groups=tuple(groups),
        rank=float(np.median([r.spearman for r in ranks])) if ranks else 0.0,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m perfmodel.validation.published_scores",
        description="Score the stack profiles on published runs.",
    )
    parser.add_argument("--csv", type=Path, help="file to write every run to")
    parser.add_argument("--plot", type=Path, help="page of HTML to write a figure to")
    parser.add_argument("--page", type=Path, help="page of Markdown whose tables to write anew")
    parser.add_argument("--runs", type=Path, help="score this table instead, as JSON")
    o = parser.parse_args(arguments)
    try:
        if o.runs is not None:
            sys.stdout.write(sweep_scores(o.runs).model_dump_json(indent=1) + "\n")
            return 0
        scores = published_scores()
    except PerfmodelError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if o.csv is not None:
        o.csv.write_text(scores_csv(scores.rows), "utf-8")
    if o.plot is not None:
        o.plot.write_text(scores_figure(scores.rows), "utf-8")
    if o.page is not None:
        from perfmodel.validation.published_page import with_tables

        o.page.write_text(with_tables(o.page.read_text("utf-8"), scores), "utf-8")
    for g in scores.groups:
        sys.stdout.write(
            f"{g.role:5s} {g.by:9s} {g.name:52s} {g.rows:4d} rows  median {100 * g.median:5.1f}% "
            f"mean {100 * g.mean:5.1f}% bias {100 * g.bias:+6.1f}% inside {100 * g.inside:5.1f}%\n"
        )
    for r in scores.ranks:
        sys.stdout.write(
            f"rank  {r.model:28s} {r.hardware:8s} {r.rows:4d} rows {r.spearman:+.2f}\n"
        )
    for p in scores.peers:
        sys.stdout.write(
            f"peer  {p.peer}, {p.rows}: {p.theirs}; ours, {p.ours_rows} rows: mean "
            f"{100 * p.ours_mean:.2f}%, worst {100 * p.ours_worst:.2f}%\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
