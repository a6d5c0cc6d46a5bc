"""Collectives between processes: ``torchrun --nproc-per-node N -m moe_ref.microbench.collectives``.

gloo on CPUs, NCCL on CUDA devices. Each process is one device: on a CPU its share of the cores.
The tables and the sidecar are those of ``mosaic calibrate --out DIR``, which fits them when it is
run again with as many threads.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from math import inf
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

from moe_ref.microbench.campaign import FULL, allowed_budget, probed_scale
from moe_ref.microbench.clocks import Sample, clock_of
from moe_ref.microbench.errors import CalibrationError
from moe_ref.microbench.family import quantiles
from moe_ref.microbench.files import refused
from moe_ref.microbench.grids import Point
from moe_ref.microbench.machine import (
    Campaign,
    Facts,
    Run,
    facts_of,
    load_average,
    read_sidecar,
    require_cuda,
    run_record,
)
from moe_ref.microbench.store import RowFile
from moe_ref.microbench.timing import Timing
from perfmodel.errors import PerfmodelError
from perfmodel.kernels import FP32_BYTES

__all__ = ["Ranks", "lacks_collectives", "main", "measure_collectives"]

RINGS = ("all_reduce", "reduce_scatter", "all_gather")

VOLUMES_CPU = (4e3, 16e3, 64e3, 256e3, 1e6, 4e6, 16e6, 64e6)
VOLUMES_CUDA = (256e3, 1e6, 4e6, 16e6, 64e6, 256e6, 1024e6)
QUICK_VOLUMES = (4e3, 64e3, 1e6, 4e6)

LIMIT_S = 0.3
LEAST, MOST = 7, 100

_RINGS_KEYS = ("layout", "world_size", "group_size", "collective", "payload_bytes")
_EXCHANGE_KEYS = ("world_size", "group_size", "buffer_bytes")
_VALUES = ("time_ms_p50", "time_ms_p10", "time_ms_p90", "repeats")


@dataclass(frozen=True)
class Ranks:
    """One process among the others.

    Attributes
    ----------
    rank, world : int
        Its number, and how many there are.
    local : int
        Processes on one machine.
    device : str
        "cpu" or "cuda".
    """

    rank: int
    world: int
    local: int
    device: str

    def groups(self) -> dict[tuple[str, int], list[list[int]]]:
        """Return groups that together are all ranks, by layout and size.

        Contiguous ones of 2, 4 and so on, and with several machines one rank of each.
        """
        found = {}
        size = 2
        while size <= self.world:
            if self.world % size == 0:
                found["contiguous", size] = [
                    list(range(first, first + size)) for first in range(0, self.world, size)
                ]
            size *= 2
        nodes = self.world // self.local
        if nodes > 1 and self.local > 1:
            found[f"stride{self.local}", nodes] = [
                list(range(first, self.world, self.local)) for first in range(self.local)
            ]
        return found


def collective(name: str, group: Any, size: int, volume: float, device: str) -> Callable[[], Any]:
    """Return a call of one collective over a group, on a buffer of about ``volume`` bytes."""
    part = max(1, round(volume / FP32_BYTES / size))
    whole = torch.ones(part * size, device=device)
    own = torch.ones(part, device=device)
    match name:
        case "all_reduce":
            return lambda: dist.all_reduce(whole, group=group)
        case "reduce_scatter":
            scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            return lambda: scatter(own, whole, group=group)
        case "all_gather":
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            return lambda: gather(whole, own, group=group)
        case "all_to_all":
            out = torch.empty_like(whole)
            return lambda: dist.all_to_all_single(out, whole, group=group)
        case _:
            raise CalibrationError(f"There is no collective {name!r} to measure.")


def timed(ranks: Ranks, call: Callable[[], Any]) -> Timing:
    """Time a call that all ranks make together; each repeat takes as long as the slowest rank.

    By the clock on the wall: who a rank waits for is mostly the others, and their threads.
    """
    clock = clock_of(ranks.device)
    for _ in range(3):
        call()
    dist.barrier()
    estimate = torch.tensor([clock.time([call])[0].wall_s], device=ranks.device)
    dist.all_reduce(estimate, op=dist.ReduceOp.MAX)
    repeats = int(min(MOST, max(LEAST, LIMIT_S / max(1e-9, float(estimate)))))
    times = torch.zeros(repeats, device=ranks.device, dtype=torch.float64)
    for i in range(repeats):
        dist.barrier()
        times[i] = clock.time([call])[0].wall_s
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return Timing.of([Sample(seconds, 0.0, 0) for seconds in times.tolist()])


def points_of(ranks: Ranks, volumes: Sequence[float]) -> list[Point]:
    """Return every row of both tables that these ranks can measure."""
    points: list[Point] = []
    for layout, size in ranks.groups():
        for volume in volumes:
            here: Point = {"world_size": ranks.world, "group_size": size}
            for name in RINGS:
                points.append(
                    {**here, "layout": layout, "collective": name, "payload_bytes": int(volume)}
                )
            if layout == "contiguous":
                points.append({**here, "buffer_bytes": int(volume)})
    return points


def measure_collectives(
    folder: Path,
    facts: Facts,
    ranks: Ranks,
    *,
    volumes: Sequence[float],
    seed: int = 0,
    budget_s: float = inf,
) -> tuple[int, int]:
    """Measure what the tables lack; all ranks call it, and rank 0 reads and writes.

    Parameters
    ----------
    folder : Path
        Where the tables and ``machine.json`` are, or will be.
    facts : Facts
        The device; the facts must be those of the rows that are there.
    ranks : Ranks
    volumes : sequence of float
        Sizes of a buffer [B].
    seed : int
        Of the order of the rows.
    budget_s : float
        No row is begun after so many seconds, above 0 [s].

    Returns
    -------
    (int, int)
        Rows that this run added, and rows that it did not get to.

    Raises
    ------
    CalibrationError
        On every rank: the budget is not above 0, the folder holds measurements under other facts
        or something else, or it cannot be read or written.
    """
    writer = _Writer(folder, facts)

    def lacking() -> list[Point]:
        allowed_budget(budget_s)
        writer.open()
        return writer.lacking(ranks, volumes)

    points = _of_first(ranks, lacking)
    groups = {key: _own_group(ranks, lists) for key, lists in ranks.groups().items()}
    Random(seed).shuffle(points)
    deadline, done = monotonic() + budget_s, 0
    started, load = datetime.now(UTC), load_average()
    for point in points:
        if _of_first(ranks, lambda: monotonic() >= deadline):
            break
        name = str(point.get("collective", "all_to_all"))
        volume = point["payload_bytes"] if "collective" in point else point["buffer_bytes"]
        size = int(point["group_size"])
        group = groups[str(point.get("layout", "contiguous")), size]
        timing = timed(ranks, collective(name, group, size, float(volume), ranks.device))
        _of_first(ranks, partial(writer.add, point, timing))
        done += 1
    run = run_record(started, seed, done, len(points) - done, False, load)
    _of_first(ranks, lambda: writer.close(run))
    return done, len(points) - done


def lacks_collectives(folder: Path, facts: Facts, ranks: Ranks, volumes: Sequence[float]) -> bool:
    """Say whether `measure_collectives` would have a row to measure; no process group is needed."""
    writer = _Writer(folder, facts)
    writer.open()
    return bool(writer.lacking(ranks, volumes))


class _Writer:
    """The tables and the sidecar; rank 0 alone opens them."""

    def __init__(self, folder: Path, facts: Facts) -> None:
        self.folder, self.facts = folder, facts

    def open(self) -> None:
        """Read what is there."""
        with refused(self.folder, "a folder"):
            self.folder.mkdir(parents=True, exist_ok=True)
        self.sidecar = read_sidecar(self.folder)
        found = self.sidecar.campaign(self.facts)
        self.rings = _file(self.folder / "dp_collectives.csv", _RINGS_KEYS)
        self.exchange = _file(self.folder / "all_to_all.csv", _EXCHANGE_KEYS)
        scale = probed_scale(self.facts, FULL) if found is None else found.scale
        self.campaign = found or Campaign(facts=self.facts, scale=scale)

    def lacking(self, ranks: Ranks, volumes: Sequence[float]) -> list[Point]:
        """Return the rows that the tables do not have."""
        key = {"device": self.facts.key}
        return [p for p in points_of(ranks, volumes) if {**key, **p} not in self._table(p)]

    def add(self, point: Point, timing: Timing) -> None:
        """Write one row."""
        values = {**quantiles(timing, "time_ms", "_p50"), "repeats": timing.repeats}
        self._table(point).add({"device": self.facts.key, **point, **values})

    def close(self, run: Run) -> None:
        """Add the run to the sidecar."""
        kept = self.campaign.model_copy(update={"runs": (*self.campaign.runs, run)})
        self.sidecar.with_campaign(kept).write(self.folder)

    def _table(self, point: Point) -> RowFile:
        return self.rings if "collective" in point else self.exchange


def _file(path: Path, keys: tuple[str, ...]) -> RowFile:
    return RowFile(path, ("device", *keys, *_VALUES), ("device", *keys))


def _own_group(ranks: Ranks, lists: list[list[int]]) -> Any:
    """Make every group, as all ranks must, and return that of this rank."""
    made = [dist.new_group(members) for members in lists]
    return next(g for g, members in zip(made, lists, strict=True) if ranks.rank in members)


class _SaidError(CalibrationError):
    """What rank 0 raised and says, on another rank."""


def _of_first(ranks: Ranks, act: Callable[[], Any]) -> Any:
    """Let rank 0 act, and return what it got on every rank; what it refuses is refused on all."""
    shared: list[Any] = [None, None]  # a value, or a sentence
    if ranks.rank == 0:
        try:
            shared[0] = act()
        except CalibrationError as error:
            dist.broadcast_object_list([None, str(error)], src=0)
            raise
    dist.broadcast_object_list(shared, src=0)
    if shared[1] is not None:
        raise _SaidError(shared[1])
    return shared[0]


@contextmanager
def _process_group(device: str) -> Iterator[Ranks]:
    """Join the processes that torchrun started."""
    if "RANK" not in os.environ:
        raise CalibrationError(
            "Collectives take several processes: torchrun --nproc-per-node 2 -m "
            "moe_ref.microbench.collectives --out DIR."
        )
    if device == "cuda":
        require_cuda()
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        yield Ranks(dist.get_rank(), dist.get_world_size(), local, device)
    finally:
        dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    options = _parser().parse_args(arguments)
    try:
        with _process_group(options.device) as ranks:
            cores = facts_of(options.device, options.dtype).cores
            threads = max(1, cores // ranks.local) if options.device == "cpu" else None
            torch.set_num_threads(threads or torch.get_num_threads())
            facts = facts_of(options.device, options.dtype, threads)
            usual = VOLUMES_CUDA if options.device == "cuda" else VOLUMES_CPU
            done, left = measure_collectives(
                options.out,
                facts,
                ranks,
                volumes=QUICK_VOLUMES if options.quick else usual,
                seed=options.seed,
                budget_s=inf if options.budget is None else options.budget,
            )
            if ranks.rank == 0:
                _say(f"{done} rows of collectives measured, {left} left, over {ranks.world} ranks")
                hint = f" --threads {facts.threads}" if facts.device == "cpu" else ""
                _say(f"mosaic calibrate --out DIR{hint} fits them")
    except _SaidError:
        return 2
    except PerfmodelError as error:
        _say(f"error: {error}")
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node N -m moe_ref.microbench.collectives",
        description="Measure collectives between processes, into the tables of a calibration.",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the tables")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="fp32", help="that the kernels of the pack are in")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller buffers")
    parser.add_argument("--budget", type=float, help="seconds after which no row is begun")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the rows")
    return parser


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
