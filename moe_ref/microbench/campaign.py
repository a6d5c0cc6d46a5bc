"""Measuring what a folder of tables still lacks, in random order, until done or out of time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from random import Random
from time import monotonic

import torch

from moe_ref.microbench.clocks import clock_of
from moe_ref.microbench.errors import CalibrationError
from moe_ref.microbench.family import Bench, Family
from moe_ref.microbench.files import refused
from moe_ref.microbench.grids import Point, Scale
from moe_ref.microbench.machine import (
    DTYPES,
    Campaign,
    Facts,
    load_average,
    read_sidecar,
    run_record,
)
from moe_ref.microbench.store import RowFile
from moe_ref.microbench.timing import Timer

__all__ = ["Effort", "Progress", "allowed_budget", "measure", "probed_scale", "threads_of"]

Progress = Callable[[str, int, int], None]
"""Told the family of a row, how many rows are done and how many there are."""


@dataclass(frozen=True)
class Effort:
    """How much to measure.

    Attributes
    ----------
    call_s : float
        Longest single call of a grid, about [s].
    limit_s : float
        Time for the repeats of one call [s].
    points : int
        Rows of a family, at most.
    budget_s : float
        Time for all rows of a run, unless another is given [s].
    """

    call_s: float
    limit_s: float
    points: int
    budget_s: float = inf


FULL = Effort(call_s=0.08, limit_s=0.3, points=100)
"""Some minutes."""

QUICK = Effort(call_s=0.03, limit_s=0.08, points=30, budget_s=45.0)
"""Under a minute."""


def probed_scale(facts: Facts, effort: Effort) -> Scale:
    """Return the largest call to measure, from the rate of one product and the memory."""
    size = 8192 if facts.device == "cuda" else 512
    clock = clock_of(facts.device)
    with threads_of(facts):
        x = torch.ones(size, size, device=facts.device, dtype=DTYPES[facts.dtype])
        timing = Timer(clock, limit_s=0.2).time([lambda: x @ x])
    rate = 2.0 * size**3 / timing.p10_s
    element_bytes = torch.finfo(DTYPES[facts.dtype]).bits / 8
    elements = facts.memory_bytes / element_bytes / 32
    if facts.device == "cpu":
        elements = min(elements, rate * effort.call_s / 8)  # about 8 FLOP for an element's traffic
    return Scale(
        flop=float(f"{rate * effort.call_s:.2g}"),
        elements=float(f"{elements:.2g}"),
        points=effort.points,
        large=facts.device == "cuda",
    )


def allowed_budget(budget_s: float) -> float:
    """Return a time for measuring, or refuse one in which nothing could be measured [s].

    Raises
    ------
    CalibrationError
        It is not above 0.
    """
    if not budget_s > 0.0:
        raise CalibrationError(
            f"budget is {budget_s:g} seconds, but must be above 0: use 1, or inf for no end."
        )
    return budget_s


def measure(
    folder: Path,
    facts: Facts,
    families: Sequence[Family],
    *,
    effort: Effort = FULL,
    scale: Scale | None = None,
    seed: int = 0,
    budget_s: float | None = None,
    progress: Progress | None = None,
) -> dict[str, tuple[int, int]]:
    """Measure the rows that the tables lack.

    Every row is on the disk before the next is begun: an interrupt loses none, and the next run
    goes on from there. Rows of all families come in one random order, so that what the machine
    does besides falls on all alike.

    Parameters
    ----------
    folder : Path
        Where the tables and ``machine.json`` are, or will be.
    facts : Facts
        The device; the facts must be those of the rows that are there.
    families : sequence of Family
        What to measure.
    effort : Effort
        How much; a folder keeps the grid of its first run.
    scale : Scale, optional
        The grid's limits, for a folder without any; probed unless given.
    seed : int
        Of the order and of the operands.
    budget_s : float, optional
        No row is begun after so many seconds, above 0; those of ``effort`` unless given [s].
    progress : callable, optional
        See `Progress`.

    Returns
    -------
    dict of str to (int, int)
        Rows that are there, and rows of the grid, by family.

    Raises
    ------
    CalibrationError
        The budget is not above 0, the folder holds measurements under other facts or something
        else, or it cannot be read or written.
    """
    budget = allowed_budget(effort.budget_s if budget_s is None else budget_s)
    with refused(folder, "a folder"):
        folder.mkdir(parents=True, exist_ok=True)
    sidecar = read_sidecar(folder)
    campaign = sidecar.campaign(facts)
    files = {f.name: RowFile(folder / f.table, f.columns, ("device", *f.keys)) for f in families}
    if campaign is None:
        campaign = Campaign(facts=facts, scale=scale or probed_scale(facts, effort))
    grids = {f.name: f.grid(campaign.scale, facts.dtype) for f in families}
    left = [
        (family, point)
        for family in families
        for point in grids[family.name]
        if {"device": facts.key, **point} not in files[family.name]
    ]
    Random(seed).shuffle(left)
    started, load, done = datetime.now(UTC), load_average(), 0
    try:
        with threads_of(facts):
            torch.manual_seed(seed)
            bench = Bench(
                facts.device,
                DTYPES[facts.dtype],
                Timer(clock_of(facts.device), limit_s=effort.limit_s),
            )
            for family, row in _rows(bench, left, monotonic() + budget):
                files[family.name].add({"device": facts.key, **row})
                done += 1
                if progress is not None:
                    progress(family.name, done, len(left))
        interrupted = False
    except BaseException:
        interrupted = True
        raise
    finally:
        run = run_record(started, seed, done, len(left) - done, interrupted, load)
        kept = campaign.model_copy(update={"runs": (*campaign.runs, run)})
        sidecar.with_campaign(kept).write(folder)
    return {
        name: (sum({"device": facts.key, **p} in files[name] for p in points), len(points))
        for name, points in grids.items()
    }


def _rows(
    bench: Bench, left: Sequence[tuple[Family, Point]], deadline: float
) -> Iterator[tuple[Family, Mapping[str, str | int | float]]]:
    """Yield a measured row for each point, while there is time."""
    for family, point in left:
        if monotonic() >= deadline:
            return
        try:
            values = family.measure(bench, point)
        except torch.OutOfMemoryError:
            continue  # the row is missing, and the count of rows says so
        except RuntimeError as error:
            what = ", ".join(f"{key} = {value}" for key, value in point.items())
            words = " ".join(str(error).split()).rstrip(".")
            raise CalibrationError(
                f"{family.name} with {what} cannot be measured: {words}."
            ) from error
        yield family, {**point, **values}


@contextmanager
def threads_of(facts: Facts) -> Iterator[None]:
    """Set the threads of the device, and put back those that there were."""
    before = torch.get_num_threads()
    torch.set_num_threads(facts.threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
