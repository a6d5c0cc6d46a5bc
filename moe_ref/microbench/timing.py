"""How long a call takes: warm-up, repeats until the median is steady, median and quantiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt

import numpy as np

from moe_ref.microbench.clocks import Call, Clock, Sample

__all__ = ["Timer", "Timing"]

TOGETHER_S = 1e-3
"""Short calls are timed one by one, and looked after together, so many that they take this [s]."""

MOST_TOGETHER = 20

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
    set_aside : int
        Calls beside them that do not: in them the system took a core away more often.
    waited : float
        Share of the time of those that count in which another process had the core; it is taken
        off [-].
    """

    median_s: float
    p10_s: float
    p90_s: float
    repeats: int
    set_aside: int = 0
    waited: float = 0.0

    @classmethod
    def of(cls, samples: Sequence[Sample], set_aside: int = 0) -> Timing:
        """Return the quantiles of timed calls."""
        seconds = np.array([sample.seconds for sample in samples])
        p10, median, p90 = np.quantile(seconds, [0.1, 0.5, 0.9]).tolist()
        waited = sum(sample.waited for sample in samples)
        share = waited / max(float(seconds.sum()) + waited, 1e-12)
        return cls(median, p10, p90, len(samples), set_aside, share)

    def per_call(self, calls: int) -> Timing:
        """Return the times of one of ``calls`` equal calls that were timed together."""
        return replace(
            self,
            median_s=self.median_s / calls,
            p10_s=self.p10_s / calls,
            p90_s=self.p90_s / calls,
        )


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
        are left. Short calls are looked after several at a time, fewer where that is disturbed.
        """
        batch = 1
        for i in range(self.warmup):
            (first,) = self.clock.time([calls[i % len(calls)]])
            batch = int(min(MOST_TOGETHER, max(1.0, TOGETHER_S / max(first.seconds, 1e-9))))
            if first.seconds > 0.1 * self.limit_s:
                break
        self.clock.wait()
        samples: list[Sample] = []
        spent = 0.0
        while (made := len(samples)) < self.most:
            if made >= self.least and (
                spent >= self.limit_s or _spread(self._calmest(samples)) <= self.steady
            ):
                break
            together = min(batch, self.most - made)
            new = self.clock.time([calls[(made + i) % len(calls)] for i in range(together)])
            samples += new
            if new[0].disturbed:
                batch = max(1, batch // 2)
            spent += sum(sample.seconds + sample.waited for sample in new)
        kept = self._calmest(samples)
        return Timing.of(kept, len(samples) - len(kept))

    def _calmest(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the repeats that were disturbed least often, `least` of them or more."""
        counts = sorted(sample.disturbed for sample in samples)
        often = counts[min(self.least, len(counts)) - 1]
        return [sample for sample in samples if sample.disturbed <= often]


def _spread(samples: Sequence[Sample]) -> float:
    """Return the standard error of the median over the median, from the middle half [-]."""
    seconds = np.array([sample.seconds for sample in samples])
    low, median, high = np.quantile(seconds, [0.25, 0.5, 0.75]).tolist()
    if median <= 0.0:
        return inf
    deviation = (high - low) / _IQR_OF_NORMAL
    return float(_MEDIAN_ERROR * deviation / sqrt(len(samples)) / median)
