"""Clocks of a call: the caller's own on a CPU, events on CUDA."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from resource import RUSAGE_SELF, getrusage
from time import perf_counter
from typing import NamedTuple, Protocol

__all__ = ["Call", "Clock", "CpuClock", "CudaClock", "Sample", "clock_of"]

Call = Callable[[], object]

NOTICED_S = 1e-5
"""Wait for a core that counts as a disturbance [s]."""

MOST_WAITED = 0.9
"""Share of a call's time that is taken off at most; a longer wait was not within it [-]."""

_TASKS = "/proc/self/task"


class Sample(NamedTuple):
    """One timed call."""

    seconds: float  # without `waited` [s]
    waited: float  # for a core that another process had [s]
    disturbed: int  # times that the system took a core away [-]

    @property
    def wall_s(self) -> float:
        """Time by the clock on the wall: of several processes, each other's threads are no others.

        What they wait for a core of the machine that they share is part of what they take [s].
        """
        return self.seconds + self.waited


class Clock(Protocol):
    """Times calls on a device."""

    def time(self, calls: Sequence[Call]) -> list[Sample]:
        """Return the time of each call, from its start to the end of its work."""

    def wait(self) -> None:
        """Return when the device has nothing left to do."""


class CpuClock:
    """The caller computes: the time of the call is that of the work.

    Where the system tells how long each thread was ready and had no core (Linux), the longest such
    wait is taken off a single call: it is time of other processes, and not of the machine. Of
    several calls nobody knows which one it was; they count as disturbed.
    """

    def time(self, calls: Sequence[Call]) -> list[Sample]:
        """Return the time of each call."""
        switches, ready = getrusage(RUSAGE_SELF).ru_nivcsw, ready_s()
        walls = []
        for call in calls:
            start = perf_counter()
            call()
            walls.append(perf_counter() - start)
        after = ready_s()
        disturbed = getrusage(RUSAGE_SELF).ru_nivcsw - switches
        waits = [seconds - ready.get(task, 0.0) for task, seconds in after.items()]
        waited = max(waits, default=0.0)
        if len(walls) > 1:
            disturbed += waited > NOTICED_S
            return [Sample(wall, 0.0, disturbed) for wall in walls]
        if waited > MOST_WAITED * walls[0]:  # it waited before or after the call as well
            return [Sample(walls[0], 0.0, disturbed + 1)]
        return [Sample(walls[0] - waited, waited, disturbed)]

    def wait(self) -> None:
        """Nothing to wait for."""


class CudaClock:
    """Events around the call on its stream, read when the second has passed."""

    def __init__(self) -> None:
        import torch

        self._cuda = torch.cuda
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def time(self, calls: Sequence[Call]) -> list[Sample]:
        """Return the time between the events around each call."""
        start, end = self._events
        samples = []
        for call in calls:
            self._cuda.synchronize()
            start.record()
            call()
            end.record()
            end.synchronize()
            samples.append(Sample(float(start.elapsed_time(end)) * 1e-3, 0.0, 0))
        return samples

    def wait(self) -> None:
        """Return when the device has nothing left to do."""
        self._cuda.synchronize()


def clock_of(device: str) -> Clock:
    """Return the clock of ``"cpu"`` or ``"cuda"``."""
    return CudaClock() if device == "cuda" else CpuClock()


def ready_s() -> dict[str, float]:
    """Return how long each thread has been ready and had no core [s]; empty where nobody says."""
    found = {}
    try:
        for task in os.listdir(_TASKS):
            with open(f"{_TASKS}/{task}/schedstat", encoding="ascii") as stream:
                found[task] = int(stream.read().split()[1]) * 1e-9
    except (OSError, ValueError, IndexError):
        return {}
    return found
