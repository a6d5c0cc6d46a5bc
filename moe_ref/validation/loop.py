"""Calibrate, predict, measure, score: ``mosaic calibrate --validate``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from moe_ref.errors import RankError
from moe_ref.microbench.calibration import Calibration, calibrate, fit_folder
from moe_ref.microbench.campaign import Effort, Progress
from moe_ref.microbench.collectives import (
    QUICK_VOLUMES,
    VOLUMES_CPU,
    Ranks,
    lacks_collectives,
    measure_collectives,
)
from moe_ref.microbench.errors import CalibrationError
from moe_ref.microbench.files import refused
from moe_ref.microbench.machine import Facts
from moe_ref.ranks import run_ranks
from moe_ref.validation.cases import CPU, CUDA, Design, StepCase, cases_of
from moe_ref.validation.report import figure_html, rows_csv, validation_markdown
from moe_ref.validation.scores import (
    GROUPS,
    Prediction,
    ScoredStep,
    StepScores,
    predicted_step,
    score,
    scored,
)
from moe_ref.validation.stack import BUSY, RESAMPLES, beside_busy, fitted_stack, unfitted_stack
from moe_ref.validation.steps import (
    FULL,
    QUICK,
    Visits,
    alone,
    measure_parallel_steps,
    measure_steps,
    step_times,
)
from perfmodel.calibration.stacks import StackProfile
from perfmodel.calibration.writer import record_toml

__all__ = ["Validation", "validate"]

STACK, ROWS = "stack.toml", "validation.csv"
REPORT, FIGURE = "validation.md", "validation.html"


@dataclass(frozen=True)
class Validation:
    """What came of the loop.

    Attributes
    ----------
    calibration : Calibration
        Kernels and pack.
    profile : StackProfile
        The stack, fitted to steps that are not among ``rows``.
    rows : tuple of ScoredStep
        Predicted and measured.
    scores : dict of str to StepScores
        By kind of step: ``one`` process, ``dp``, ``ep``, and where there are several, ``all``.
    remarks : tuple of str
        What was left out and why, one sentence each.
    """

    calibration: Calibration
    profile: StackProfile
    rows: tuple[ScoredStep, ...]
    scores: dict[str, StepScores]
    remarks: tuple[str, ...]

    @property
    def stack_path(self) -> Path:
        """Where the stack profile is."""
        return self.calibration.folder / STACK

    @property
    def report_path(self) -> Path:
        """Where the report is."""
        return self.calibration.folder / REPORT


def validate(
    folder: Path,
    *,
    device: str = "cpu",
    dtype: str | None = None,
    threads: int | None = None,
    quick: bool = False,
    budget_s: float | None = None,
    seed: int = 0,
    effort: Effort | None = None,
    design: Design | None = None,
    visits: Visits | None = None,
    resamples: int = RESAMPLES,
    progress: Progress | None = None,
) -> Validation:
    """Calibrate the machine, fit its stack to some steps, and predict others by it.

    Steps that fit and steps that score are timed in the same rounds, each in an order of its own,
    and so are those of several processes: what the machine does meanwhile falls on all alike. No
    time of a step that is scored enters its prediction. What the folder has is not timed again.

    Parameters
    ----------
    folder, device, dtype, quick, budget_s, effort, progress
        See `moe_ref.calibrate`; the budget is that of kernels, and no step is left out for it.
    threads : int, optional
        Threads that are one device of a CPU: 1 unless given, so that several processes fit.
    seed : int
        Of the orders; the steps themselves are always the same ones.
    design : Design, optional
        Steps to draw; those of the device unless given.
    visits : Visits, optional
        How often each is timed.
    resamples : int
        Of the bootstrap of the stack's constants.

    Raises
    ------
    CalibrationError
        As `moe_ref.calibrate`, or the folder lacks kernels that a pack needs, or a process of
        several failed.
    """
    if device == "cpu" and threads is None:
        threads = 1
    found = calibrate(
        folder,
        device=device,
        dtype=dtype,
        threads=threads,
        quick=quick,
        budget_s=budget_s,
        seed=seed,
        effort=effort,
        progress=progress,
    )
    facts = found.facts
    cases = cases_of(design or (CUDA if facts.device == "cuda" else CPU))
    remarks: list[str] = []
    parallel = cases.parallel if _has_ranks(facts, cases.parallel, remarks) else ()
    if parallel and found.pack is not None:
        with _ranks_heard():
            _measure_ranks(folder, facts, max(case.ranks for case in parallel), quick, seed)
        found = fit_folder(folder, facts, found.rows)
    if found.pack is None:
        raise CalibrationError(" ".join(found.unpriced))
    visits = visits or (QUICK if quick else FULL)
    every = (*cases.fitted, *cases.scored)
    together = (*cases.beside, *parallel) if parallel else ()
    for rounds in range(1, visits.rounds + 1):  # all of one round before the next: machines drift
        settings: Any = {"visits": replace(visits, rounds=rounds), "seed": seed}
        measure_steps(folder, facts, every, progress=progress, **settings)
        with _ranks_heard():
            measure_parallel_steps(folder, facts, together, progress=progress, **settings)
    times = step_times(folder, facts, visits)
    lacking = [case.id for case in every if case.id not in times]
    if lacking:
        remarks.append(f"Not in the memory of the device: {', '.join(lacking)}.")
    profile = fitted_stack(
        facts,
        found.pack,
        found.path,
        [(case, times[case.id]) for case in cases.fitted if case.id in times],
        resamples=resamples,
        progress=None if progress is None else partial(progress, "stack"),
    )
    if parallel and cases.beside:
        pairs = [(times[case.id], times[alone(case)]) for case in cases.beside]
        profile = beside_busy(profile, [busy.median_s / idle.median_s for busy, idle in pairs])
    _write(folder / STACK, record_toml(profile, "Written by `mosaic calibrate --validate`."))
    said = _predicted(found, profile, (*cases.scored, *parallel))
    rows = tuple(scored(each, times[each.case.id]) for each in said if each.case.id in times)
    return _reported(Validation(found, profile, rows, _scores(rows), tuple(remarks)))


@contextmanager
def _ranks_heard() -> Iterator[None]:
    """Say in one sentence what a process of several failed by."""
    try:
        yield
    except RankError as error:
        raise CalibrationError(f"Several processes: {error}") from error


def _write(path: Path, text: str) -> None:
    with refused(path, "written"):
        path.write_text(text, "utf-8")


def _has_ranks(facts: Facts, cases: Sequence[StepCase], remarks: list[str]) -> bool:
    """Say whether steps of several processes can be timed, and why not."""
    if not cases:
        remarks.append("No step of several processes is in the design.")
        return False
    most = max(case.ranks for case in cases)
    if facts.device != "cpu" or not dist.is_available() or facts.devices_per_node < most:
        remarks.append(
            f"No step of {most} processes: they take {most} devices of a CPU, and there are "
            f"{facts.devices_per_node} of {facts.threads} threads ({facts.device})."
        )
        return False
    return True


def _measure_ranks(folder: Path, facts: Facts, world: int, quick: bool, seed: int) -> None:
    """Measure the collectives of some processes."""
    volumes = QUICK_VOLUMES if quick else VOLUMES_CPU
    if lacks_collectives(folder, facts, Ranks(0, world, world, facts.device), volumes):
        worker = partial(_collectives, folder=folder, facts=facts, volumes=volumes, seed=seed)
        run_ranks(worker, world, threads=facts.threads)


def _collectives(
    rank: int, *, folder: Path, facts: Facts, volumes: Sequence[float], seed: int
) -> None:
    world = dist.get_world_size()
    ranks = Ranks(rank, world, world, facts.device)
    measure_collectives(folder, facts, ranks, volumes=volumes, seed=seed)


def _predicted(
    found: Calibration, profile: StackProfile, cases: Sequence[StepCase]
) -> list[Prediction]:
    """Predict every case; those of several ranks beside busy neighbours."""
    assert found.pack is not None
    unfitted, path = unfitted_stack(found.facts, found.pack), str(found.path)
    said = []
    for case in cases:
        busy = case.ranks > 1 and BUSY in profile.variants
        stack = profile.varied(BUSY) if busy else profile
        said.append(predicted_step(case, path, stack, unfitted))
    return said


def _scores(rows: Sequence[ScoredStep]) -> dict[str, StepScores]:
    groups = {g: [row for row in rows if row.prediction.group == g] for g in GROUPS}
    found = {group: score(mine) for group, mine in groups.items() if len(mine) > 1}
    return found | {"all": score(rows)} if len(found) > 1 else found


def _reported(found: Validation) -> Validation:
    """Write rows, report and figure."""
    calibration = found.calibration
    folder, facts, pack = calibration.folder, calibration.facts, calibration.pack
    assert pack is not None
    _write(folder / ROWS, rows_csv(found.rows))
    page = validation_markdown(facts, pack, found.profile, found.rows, found.scores, found.remarks)
    _write(folder / REPORT, page)
    figure = figure_html(found.rows, f"Steps of moe_ref on {facts.name}, {facts.threads} threads")
    if figure is not None:
        _write(folder / FIGURE, figure)
    return found
