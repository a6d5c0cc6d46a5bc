"""Calibrate, predict, measure, score: ``mosaic calibrate --validate``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch.distributed as dist

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
    measure_parallel_steps,
    measure_steps,
    step_times,
)
from perfmodel.calibration.stacks import StackProfile
from perfmodel.calibration.writer import record_toml

__all__ = ["Validation", "validate"]

STACK, PREDICTIONS = "stack.toml", "predictions.jsonl"
ROWS, REPORT, FIGURE = "validation.csv", "validation.md", "validation.html"


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
        Predicted and then measured.
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
    """Calibrate the machine, fit its stack to some steps, predict others, and measure those.

    What is in the folder is not measured again. Predictions are written before any of their steps
    is timed.

    Parameters
    ----------
    folder, device, dtype, quick, budget_s, effort, progress
        See `moe_ref.calibrate`; the budget is that of kernels.
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
        As `moe_ref.calibrate`, or the folder lacks kernels that a pack needs.
    RankError
        A process of several ended.
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
    if parallel:
        _measure_ranks(folder, facts, quick, seed)
        found = fit_folder(folder, facts, found.rows)
    if found.pack is None:
        raise CalibrationError(" ".join(found.unpriced))
    visits = visits or (QUICK if quick else FULL)
    time = partial(measure_steps, folder, facts, visits=visits, seed=seed, progress=progress)
    time_together = partial(
        measure_parallel_steps, folder, facts, visits=visits, seed=seed, progress=progress
    )
    time(cases.fitted)
    beside = cases.beside if parallel else ()
    time_together(beside)
    times = step_times(folder, facts, visits)
    profile = fitted_stack(
        facts,
        found.pack,
        found.path,
        [(case, times[case.id]) for case in cases.fitted],
        resamples=resamples,
        progress=None if progress is None else partial(progress, "stack"),
    )
    if beside:
        pairs = zip(beside, cases.fitted, strict=False)  # the same steps, beside others and alone
        ratios = [times[b.id].median_s / times[alone.id].median_s for b, alone in pairs]
        profile = beside_busy(profile, ratios)
    text = "Written by `mosaic calibrate --validate`, of steps in steps.csv."
    (folder / STACK).write_text(record_toml(profile, text), "utf-8")
    said = _predicted(found, profile, (*cases.scored, *parallel))
    time(cases.scored)
    time_together(parallel)
    times = step_times(folder, facts, visits)
    rows = tuple(scored(each, times[each.case.id]) for each in said)
    return _reported(Validation(found, profile, rows, _scores(rows), tuple(remarks)))


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


def _measure_ranks(folder: Path, facts: Facts, quick: bool, seed: int) -> None:
    """Measure the collectives of as many processes as there are devices."""
    volumes, world = QUICK_VOLUMES if quick else VOLUMES_CPU, facts.devices_per_node
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
    """Predict every case, and write the predictions down."""
    assert found.pack is not None
    unfitted, path = unfitted_stack(found.facts, found.pack), str(found.path)
    said = [
        predicted_step(case, path, profile.varied(*[BUSY] * (case.ranks > 1)), unfitted)
        for case in cases
    ]
    lines = "".join(each.model_dump_json() + "\n" for each in said)
    (found.folder / PREDICTIONS).write_text(lines, "utf-8")
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
    (folder / ROWS).write_text(rows_csv(found.rows), "utf-8")
    page = validation_markdown(facts, pack, found.profile, found.rows, found.scores, found.remarks)
    (folder / REPORT).write_text(page, "utf-8")
    figure = figure_html(found.rows, f"Steps of moe_ref on {facts.name}, {facts.threads} threads")
    if figure is not None:
        (folder / FIGURE).write_text(figure, "utf-8")
    return found
