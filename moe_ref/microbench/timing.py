"""How long a call takes: warm-up, repeats until the median is steady, median and quantiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt
from resource import RUSAGE_SELF, getrusage
from time import perf_counter
from typing import Protocol

import numpy as np

__all__ = ["Clock", "CpuClock", "CudaClock", "Timer", "Timing", "clock_of"]

Call = Callable[[], object]

_IQR_OF_NORMAL = 1.349  # interquartile range over standard deviation [-]
_MEDIAN_ERROR = 1.2533  # standard error of a median over that of a mean, sqrt(pi / 2) [-]


@dataclass(frozen=True)
class Timing:
    """Times of one call.

    Attributes
    ----------
    median_s, p10_s, p90_s : float
        Quantiles over the repeats [s].
    repeats : int
        Calls that count, without the warm-up.
    disturbed : int
        Calls beside them that do not, since the system took a core away in the middle.
    """

    median_s: float
    p10_s: float
    p90_s: float
    repeats: int
    disturbed: int = 0

    @classmethod
    def of(cls, samples: Sequence[float], disturbed: int = 0) -> Timing:
        """Return the quantiles of times of one call [s]."""
        p10, median, p90 = np.quantile(np.asarray(samples), [0.1, 0.5, 0.9]).tolist()
        return cls(median, p10, p90, len(samples), disturbed)

    def per_call(self, calls: int) -> Timing:
        """Return the times of one of ``calls`` equal calls that were timed together."""
        return replace(
            self,
            median_s=self.median_s / calls,
            p10_s=self.p10_s / calls,
            p90_s=self.p90_s / calls,
        )


class Clock(Protocol):
    """Times a call on a device."""

    def time(self, call: Call) -> float:
        """Return the time from the start of the call to the end of its work [s]."""

    def wait(self) -> None:
        """Return when the device has nothing left to do."""

    def switches(self) -> int:
        """Return a count that has grown if what was timed in between was disturbed."""


class CpuClock:
    """The caller computes: the time of the call is that of the work."""

    def switches(self) -> int:
        """Return how often the system has taken a core from one of the threads."""
        return getrusage(RUSAGE_SELF).ru_nivcsw

    def time(self, call: Call) -> float:
        """Return the time of the call [s]."""
        start = perf_counter()
        call()
        return perf_counter() - start

    def wait(self) -> None:
        """Nothing to wait for."""


class CudaClock:
    """Events around the call on its stream, read when the second has passed."""

    def __init__(self) -> None:
        import torch

        self._cuda = torch.cuda
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def time(self, call: Call) -> float:
        """Return the time between the events [s]."""
        start, end = self._events
        self._cuda.synchronize()
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3

    def wait(self) -> None:
        """Return when the device has nothing left to do."""
        self._cuda.synchronize()

    def switches(self) -> int:
        """Return 0: events are the device's own."""
        return 0


def clock_of(device: str) -> Clock:
    """Return the clock of ``"cpu"`` or ``"cuda"``."""
    return CudaClock() if device == "cuda" else CpuClock()


@dataclass(frozen=True)
class Timer:
    """Repeats a call until its median is known well enough, or time is up.

    Attributes
    ----------
    clock : Clock
    limit_s : float
        Time that the repeats of one call may take together [s]; at least ``least`` are made.
    steady : float
        Standard error of the median, relative, at which to stop [-].
    warmup : int
        Calls before the first that counts; one is enough where it takes a tenth of the limit.
    least, most : int
        Repeats.
    """

    clock: Clock
    limit_s: float = 0.25
    steady: float = 0.01
    warmup: int = 3
    least: int = 5
    most: int = 200

    def time(self, calls: Sequence[Call]) -> Timing:
        """Time equal calls in turn, each on operands of its own, as one.

        Operands in turn keep a call from finding what it left in the nearest cache. Repeats in
        which the system took a core away more often than in others are set aside, where enough
        are left.
        """
        for i in range(self.warmup):
            if self.clock.time(calls[i % len(calls)]) > 0.1 * self.limit_s:
                break
        self.clock.wait()
        samples: list[tuple[int, float]] = []
        spent = 0.0
        while (made := len(samples)) < self.most:
            kept = self._calmest(samples)
            if made >= self.least and (spent >= self.limit_s or _spread(kept) <= self.steady):
                break
            before = self.clock.switches()
            seconds = self.clock.time(calls[made % len(calls)])
            samples.append((self.clock.switches() - before, seconds))
            spent += seconds
        kept = self._calmest(samples)
        return Timing.of(kept, len(samples) - len(kept))

    def _calmest(self, samples: Sequence[tuple[int, float]]) -> list[float]:
        """Return the repeats that were disturbed least often, `least` of them or more."""
        counts = sorted(switches for switches, _ in samples)
        if len(counts) <= self.least:
            return [seconds for _, seconds in samples]
        often = counts[self.least - 1]
        return [seconds for switches, seconds in samples if switches <= often]


def _spread(samples: Sequence[float]) -> float:
    """Return the standard error of the median over the median, from the middle half [-]."""
    low, median, high = np.quantile(np.asarray(samples), [0.25, 0.5, 0.75]).tolist()
    if median <= 0.0:
        return inf
    deviation = (high - low) / _IQR_OF_NORMAL
    return float(_MEDIAN_ERROR * deviation / sqrt(len(samples)) / median)
