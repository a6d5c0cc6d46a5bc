"""How far predicted peaks of memory are from measured ones, and labels of what fits.

``python -m perfmodel.validation.memory_scores --nanotron TABLE`` prints the score of the nanotron
sweep, whose rows are not part of the package: :data:`SHIPPED` is what it printed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from statistics import median

from perfmodel.calibration.memory_profiles import load_memory_profile
from perfmodel.calibration.stacks import load_stack
from perfmodel.frozen import Frozen
from perfmodel.memory import stage_total
from perfmodel.stack import Stack
from perfmodel.validation.memory_runs import (
    MemoryCase,
    measured_runs,
    nanotron_cases,
    predicted_bytes,
    published_cases,
    stages_of_case,
    why_not,
)

__all__ = [
    "LabelScore",
    "MemoryRow",
    "MemoryScores",
    "PeakScore",
    "SweepScore",
    "memory_scores",
    "sweep_score",
]

SHIPPED = "memory_nanotron.json"


class MemoryRow(Frozen):
    """One run with a measured peak [B]; ``error`` is relative, of the prediction."""

    name: str
    model: str
    stack: str
    peak: str
    half: int
    predicted_bytes: float
    measured_bytes: float
    error: float


class PeakScore(Frozen):
    """Errors of some runs: relative, absolute, and the shares of them within 5% and 10% [-]."""

    group: str
    rows: int
    median: float
    mean: float
    within_5: float
    within_10: float


class LabelScore(Frozen):
    """Runs by what happened and what was predicted."""

    group: str
    fit_right: int
    out_right: int
    missed: int  # ran out of memory, and was predicted to fit
    alarms: int  # fitted, and was predicted to run out

    @property
    def rows(self) -> int:
        """All of them."""
        return self.fit_right + self.out_right + self.missed + self.alarms

    @property
    def accuracy(self) -> float:
        """Share of right labels [-]."""
        return (self.fit_right + self.out_right) / self.rows


class SweepScore(Frozen):
    """Score of the nanotron sweep; constants were fitted on the successes of half 0."""

    source: str
    command: str
    date: str
    labels: tuple[LabelScore, ...]
    peaks: tuple[PeakScore, ...]


class MemoryScores(Frozen):
    """Every score of memory."""

    rows: tuple[MemoryRow, ...]
    peaks: tuple[PeakScore, ...]
    labels: tuple[LabelScore, ...]
    sweep: SweepScore
    left_out: dict[str, str]  # runs that are not compared, each with its reason


@cache
def stack_of(name: str) -> Stack:
    """Return a stack with the constants of a memory profile."""
    return load_memory_profile(name).on(load_stack("megatron-eager").stack())


def _rows(cases: Iterable[MemoryCase]) -> tuple[MemoryRow, ...]:
    rows = []
    for case in cases:
        if case.measured_bytes is None:
            continue
        predicted = float(predicted_bytes(case, stack_of(case.stack)))
        rows.append(
            MemoryRow(
                name=case.name,
                model=case.model,
                stack=case.stack,
                peak=case.peak,
                half=case.half,
                predicted_bytes=predicted,
                measured_bytes=case.measured_bytes,
                error=predicted / case.measured_bytes - 1.0,
            )
        )
    return tuple(rows)


def _peaks(rows: Sequence[MemoryRow], group: Callable[[MemoryRow], str]) -> tuple[PeakScore, ...]:
    scores = []
    for name in dict.fromkeys(map(group, rows)):
        errors = [abs(row.error) for row in rows if group(row) == name]
        scores.append(
            PeakScore(
                group=name,
                rows=len(errors),
                median=median(errors),
                mean=sum(errors) / len(errors),
                within_5=sum(e <= 0.05 for e in errors) / len(errors),
                within_10=sum(e <= 0.10 for e in errors) / len(errors),
            )
        )
    return tuple(scores)


def runs_out(case: MemoryCase) -> bool:
    """Say whether the fullest device is predicted to need more than it has."""
    stages = stages_of_case(case, stack_of(case.stack))
    return max(stage_total(m) for m in stages) > case.device_bytes


def _labels(cases: Sequence[MemoryCase], group: str) -> LabelScore:
    found = [(runs_out(case), case.oom) for case in cases]
    return LabelScore(
        group=group,
        fit_right=found.count((False, False)),
        out_right=found.count((True, True)),
        missed=found.count((False, True)),
        alarms=found.count((True, False)),
    )


def sweep_score(path: Path, date: str) -> SweepScore:
    """Score the nanotron sweep.

    Raises
    ------
    PerfmodelError
        The table cannot be read.
    """
    cases = nanotron_cases(path)
    rows = _rows(cases)
    halves = [_labels([c for c in cases if c.half == half], f"half {half}") for half in (0, 1)]
    return SweepScore(
        source="nanotron sweep on H100 behind the Ultra-Scale Playbook (Hugging Face, 2025)",
        command=f"python -m perfmodel.validation.memory_scores --nanotron {path.name}",
        date=date,
        labels=(*halves, _labels(cases, "all")),
        peaks=(*_peaks(rows, lambda row: f"half {row.half}"), *_peaks(rows, lambda _: "all")),
    )


def shipped_sweep() -> SweepScore:
    """Return the score of the nanotron sweep that ships with the package."""
    folder = resources.files("perfmodel.validation") / "data"
    return SweepScore.model_validate_json((folder / SHIPPED).read_text("utf-8"))


def memory_scores(nanotron: Path | None = None, date: str = "") -> MemoryScores:
    """Compare predicted peaks with the published ones, run by run.

    Parameters
    ----------
    nanotron : Path, optional
        Table of the nanotron sweep, to score it afresh; its shipped score otherwise.
    """
    cases = published_cases()
    rows = _rows(cases)
    sources = dict.fromkeys(case.stack for case in cases if case.oom)
    return MemoryScores(
        rows=rows,
        peaks=_peaks(rows, lambda row: f"{row.stack}, {row.peak}"),
        labels=tuple(_labels([c for c in cases if c.stack == name], name) for name in sources),
        sweep=shipped_sweep() if nanotron is None else sweep_score(nanotron, date),
        left_out={
            f"row {run.row}, {run.model}": reason
            for run in measured_runs()
            if (reason := why_not(run)) is not None
        },
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the score of the nanotron sweep as JSON."""
    parser = argparse.ArgumentParser(prog="python -m perfmodel.validation.memory_scores")
    parser.add_argument("--nanotron", type=Path, required=True, help="table of the sweep")
    parser.add_argument("--date", default="", help="date to write beside the score")
    given = parser.parse_args(arguments)
    score = sweep_score(given.nanotron, given.date)
    sys.stdout.write(score.model_dump_json(indent=2) + "\n")


if __name__ == "__main__":
    main()
