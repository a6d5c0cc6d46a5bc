"""Times of training steps: several visits to each case, in an order that is new every time.

A visit builds the model anew, makes one step that does not count, and times a few. What the machine
does besides, and where a model happens to lie in memory, then falls on all cases alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from statistics import median

import torch
import torch.distributed as dist

from moe_ref.microbench.campaign import Progress, threads_of
from moe_ref.microbench.clocks import Sample, clock_of
from moe_ref.microbench.machine import DTYPES, Facts
from moe_ref.microbench.store import Cell, RowFile
from moe_ref.model import ReferenceModel
from moe_ref.parallel import ParallelRun
from moe_ref.ranks import run_ranks
from moe_ref.recipe import WarmupStableDecay
from moe_ref.training import Run
from moe_ref.validation.cases import VOCABULARY, StepCase

__all__ = [
    "FULL",
    "QUICK",
    "StepTime",
    "Visits",
    "alone",
    "measure_parallel_steps",
    "measure_steps",
    "step_times",
]

TABLE = "steps.csv"

SCHEDULE = WarmupStableDecay(peak=1e-4, steps=10_000, warmup_steps=1_000)
"""Of every run that is timed; the time of a step does not depend on it."""


@dataclass(frozen=True)
class Visits:
    """How often a step is timed.

    Attributes
    ----------
    rounds : int
        Visits to each case.
    steps : int
        Timed steps of a visit, behind one that is not.
    """

    rounds: int
    steps: int


FULL = Visits(rounds=5, steps=3)
QUICK = Visits(rounds=3, steps=1)


@dataclass(frozen=True)
class StepTime:
    """Time of one case.

    Attributes
    ----------
    median_s, low_s, high_s : float
        Over the visits, each by the median of its steps: the middle one, the least and the
        largest [s].
    visits : int
    """

    median_s: float
    low_s: float
    high_s: float
    visits: int


class StepFile(RowFile):
    """The table of timed steps, one row a visit."""

    def __init__(self, folder: Path) -> None:
        keys = ("device", "dtype", "case", "steps", "visit")
        super().__init__(folder / TABLE, (*keys, "step_ms", "waited"), keys)


def step_times(folder: Path, facts: Facts, visits: Visits) -> dict[str, StepTime]:
    """Return the time of every case that had such visits, by its id.

    Visits of another number of steps, as ``--quick`` makes, count apart, and so do those beyond
    the rounds.
    """
    found: dict[str, list[float]] = {}
    wanted = (facts.key, facts.dtype, str(visits.steps))
    for row in StepFile(folder).rows():
        mine = (row["device"], row["dtype"], row["steps"]) == wanted
        if mine and int(row["visit"]) < visits.rounds:
            found.setdefault(row["case"], []).append(float(row["step_ms"]) * 1e-3)
    return {
        case: StepTime(median(seconds), min(seconds), max(seconds), len(seconds))
        for case, seconds in found.items()
    }


def measure_steps(
    folder: Path,
    facts: Facts,
    cases: Sequence[StepCase],
    *,
    visits: Visits = FULL,
    seed: int = 0,
    progress: Progress | None = None,
) -> None:
    """Time the cases of one rank that the table lacks visits of.

    On a CPU without what other processes had of the core. A step that does not fit into the memory
    of the device has no row. Every visit is on the disk before the next begins; what was
    interrupted goes on there.

    Raises
    ------
    CalibrationError
        The table is another program's, or cannot be written.
    """
    table = StepFile(folder)
    left = _left(table, facts, cases, visits, seed)
    with threads_of(facts):
        for done, (case, visit) in enumerate(left):
            try:
                samples = _timed(_run(case, facts), case, facts, visits.steps)
            except torch.OutOfMemoryError:
                continue  # no row says so, and neither does any prediction
            walls = sum(sample.wall_s for sample in samples)
            waited = sum(sample.waited for sample in samples) / walls
            table.add(_row(facts, case, visit, [s.seconds for s in samples], waited))
            if progress is not None:
                progress("steps", done + 1, len(left))


def measure_parallel_steps(
    folder: Path,
    facts: Facts,
    cases: Sequence[StepCase],
    *,
    visits: Visits = FULL,
    seed: int = 0,
    progress: Progress | None = None,
) -> None:
    """Time the cases of several ranks that the table lacks visits of, over as many processes.

    A step of several ranks takes as long as the slowest of them, by the clock on the wall.

    Raises
    ------
    CalibrationError
        As `measure_steps`.
    RankError
        A process failed or ended.
    """
    for ranks in sorted({case.ranks for case in cases}):
        mine = [case for case in cases if case.ranks == ranks]
        left = _left(StepFile(folder), facts, mine, visits, seed)
        if left:
            if progress is not None:
                progress(f"steps of {ranks} processes", 0, len(left))
            worker = partial(_visit_all, folder=folder, facts=facts, left=left, steps=visits.steps)
            run_ranks(worker, ranks, threads=facts.threads)


def _visit_all(
    rank: int, *, folder: Path, facts: Facts, left: Sequence[tuple[StepCase, int]], steps: int
) -> None:
    """Make all visits on one of several ranks; the first of them writes."""
    for case, visit in left:
        run = _run(case, facts)
        if case.apart:  # first one of them while the others wait: machines drift
            _visit_alone(rank, run, case, visit, folder, facts, steps)
        samples = _timed(run, case, facts, steps, rank=rank, before=dist.barrier)
        walls = torch.tensor([sample.wall_s for sample in samples], dtype=torch.float64)
        dist.all_reduce(walls, op=dist.ReduceOp.MAX)
        if rank == 0:
            waited = sum(sample.waited for sample in samples) / float(walls.sum())
            StepFile(folder).add(_row(facts, case, visit, walls.tolist(), waited))


def _visit_alone(
    rank: int, run: Run, case: StepCase, visit: int, folder: Path, facts: Facts, steps: int
) -> None:
    """Time the steps of the first rank while the others do nothing."""
    if rank == 0:
        walls = [sample.wall_s for sample in _timed(run, case, facts, steps)]
        row, table = _row(facts, case, visit, walls, 0.0), StepFile(folder)
        if (row := {**row, "case": alone(case)}) not in table:
            table.add(row)
    dist.barrier()


def alone(case: StepCase) -> str:
    """Return the name of the steps of one rank while the others of a case do nothing."""
    return f"{case.id}-alone"


def _left(
    table: StepFile, facts: Facts, cases: Iterable[StepCase], visits: Visits, seed: int
) -> list[tuple[StepCase, int]]:
    """Return the visits that the table lacks, round by round, each in an order of its own."""
    draw, left = Random(seed), list[tuple[StepCase, int]]()
    for visit in range(visits.rounds):
        order = sorted(cases, key=lambda case: case.id)
        draw.shuffle(order)
        key = partial(_key, facts, visit=visit, steps=visits.steps)
        left += [(case, visit) for case in order if key(case) not in table]
    return left


def _key(facts: Facts, case: StepCase, *, visit: int, steps: int) -> dict[str, Cell]:
    words: dict[str, Cell] = {"device": facts.key, "dtype": facts.dtype, "case": case.id}
    return words | {"steps": steps, "visit": visit}


def _row(
    facts: Facts, case: StepCase, visit: int, seconds: Sequence[float], waited: float
) -> Mapping[str, Cell]:
    return {
        **_key(facts, case, visit=visit, steps=len(seconds)),
        "step_ms": 1e3 * median(seconds),
        "waited": round(waited, 3),
    }


def _run(case: StepCase, facts: Facts) -> Run:
    """Return a new model in training; with several ranks, the part of this one."""
    model = ReferenceModel(case.architecture, recompute=case.recompute).to(facts.device)
    dtype: torch.dtype = DTYPES[facts.dtype]
    precision = None if dtype == torch.float32 else dtype
    if case.ranks == 1 or case.apart:
        return Run(model, SCHEDULE, accumulate=case.microbatches, precision=precision)
    return ParallelRun(
        model,
        SCHEDULE,
        expert_parallel=case.expert_parallel,
        accumulate=case.microbatches,
        precision=precision,
    )


def _timed(
    run: Run,
    case: StepCase,
    facts: Facts,
    steps: int,
    rank: int = 0,
    before: Callable[[], object] = lambda: None,
) -> list[Sample]:
    """Time some steps behind one that does not count."""
    clock, batches = clock_of(facts.device), _batches(case, rank)
    run.advance(next(batches))
    samples = []
    for _ in range(steps):
        tokens_BS = next(batches)
        before()
        samples += clock.time([partial(run.advance, tokens_BS)])
    return samples


def _batches(case: StepCase, rank: int) -> Iterator[torch.Tensor]:
    """Yield random tokens for one step after the other."""
    generator = torch.Generator().manual_seed(rank)
    shape = (case.micro_batch * case.microbatches, case.seq_len + 1)
    while True:
        yield torch.randint(VOCABULARY, shape, generator=generator)
