"""Step times that no layout of a candidate beats: what the relaxation's MFU* rests on.

Three kinds: of the best layout of each candidate, bounds that price no layout, and given ones. inf
stands for a candidate without a layout. What a search does not reach has the device's peak.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from functools import partial
from math import inf
from typing import NamedTuple

import numpy as np

from mosaic_opt.backends.base import Limits, Progress, ProgressCallback, Termination
from mosaic_opt.bounds import BlockBounds
from mosaic_opt.errors import MosaicError
from mosaic_opt.problem import Problem
from mosaic_opt.relaxation import Array
from perfmodel.threads import in_order

GB = 1e9

_AT_ONCE = 32  # candidates that are bounded in one call


class Steps(NamedTuple):
    """Steps of the candidates under the cap of memory, one GB more and one GB less [s]."""

    now: Array
    more: Array
    less: Array
    done: int  # candidates; the others have the step at peak
    termination: Termination


def best_steps(
    problem: Problem, limits: Limits, workers: int | None, progress: ProgressCallback | None
) -> Steps:
    """Find the steps of the best layouts; as much work as an exact search."""
    cap = problem.envelope.memory_cap_bytes
    least = partial(problem.least_steps, caps_bytes=(cap, cap + GB, cap - GB))
    results = in_order(least, range(len(problem.architectures)), workers)
    return _gathered(problem, results, limits, progress)


def floor_steps(
    problem: Problem, limits: Limits, workers: int | None, progress: ProgressCallback | None
) -> Steps:
    """Bound the steps by those of blocks of layouts, and by the peak; no layout is priced.

    A candidate without a block that is legal and within the memory has inf: it has no layout.
    """
    bounds, everyone = BlockBounds(problem), np.arange(len(problem.architectures))
    chunks = [everyone[i : i + _AT_ONCE] for i in range(0, len(everyone), _AT_ONCE)]
    found = in_order(bounds.floors, chunks, workers)

    def each() -> Generator[Array, None, None]:
        try:
            for floors in found:
                for floor in floors.min(axis=1, initial=inf):
                    yield np.full(3, floor)
        finally:
            found.close()

    steps = _gathered(problem, each(), limits, progress)
    now = np.maximum(steps.now, peak_steps(problem))
    return steps._replace(now=now, more=now, less=now)


def _gathered(
    problem: Problem,
    results: Generator[Array, None, None],
    limits: Limits,
    progress: ProgressCallback | None,
) -> Steps:
    """Gather steps in the order of the candidates until a limit is reached."""
    peak = peak_steps(problem)
    n, found = len(peak), np.tile(peak, (3, 1))
    deadline = inf if limits.time_s is None else time.monotonic() + limits.time_s
    done, termination = 0, Termination.EXHAUSTED
    try:
        for i, steps in enumerate(results):
            found[:, i] = steps
            done = i + 1
            if progress is not None:
                progress(Progress(done=done, of=n, incumbent=None, bound=-inf))
            if time.monotonic() > deadline and done < n:
                termination = Termination.TIME_LIMIT
                break
    except KeyboardInterrupt:
        termination = Termination.INTERRUPTED
    finally:
        results.close()
    return Steps(found[0], found[1], found[2], done, termination)


def peak_steps(problem: Problem) -> Array:
    """Return every candidate's :meth:`Problem.peak_step_s`, shape (candidates,)."""
    return np.array([problem.peak_step_s(i) for i in range(len(problem.architectures))])


def steps_of_mfu(problem: Problem, mfu: Array) -> Array:
    """Return the step times of MFU values of ``6 N_act``, N as the envelope counts it [s].

    Raises
    ------
    MosaicError
        Another number of values than candidates, or one that is below 0 or not finite.
    """
    values = np.asarray(mfu, dtype=np.float64)
    n = len(problem.architectures)
    if values.shape != (n,):
        raise MosaicError(
            f"mfu has the shape {values.shape}, and must have one value for each of "
            f"the {n} candidates."
        )
    fine = (values >= 0.0) & np.isfinite(values)
    if not fine.all():
        raise MosaicError(
            f"mfu={values[~fine][0]:g} must be at least 0 and finite; 0 says that there is no "
            "layout."
        )
    envelope = problem.envelope
    peak = envelope.cluster.n_devices * envelope.cluster.peak_flops
    active = np.array([float(problem.n_active(i)) for i in range(n)])
    with np.errstate(divide="ignore"):
        return np.asarray(6.0 * active * envelope.batch.tokens / (values * peak))
