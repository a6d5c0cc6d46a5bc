"""Makespan of a pipeline whose stages all differ, for compiled kernels.

1F1B in closed form, the interleaved schedule by running it for a few groups of microbatches. Both
take one share of the forward pass for all stages. ``docs/theory/schedule.md`` says what is exact.
"""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np

from perfmodel._jit import compile_kernel, formula

__all__ = ["makespan_1f1b_stages", "makespan_interleaved_stages", "makespan_of_chunks"]

GROUPS_RUN = 4
"""Groups of pp microbatches that are run; those beyond take as long as the last of these."""


@formula
def makespan_1f1b_stages(
    tau: Any, pp: float, n_microbatches: float, forward_fraction: float
) -> float:
    """Makespan of 1F1B [s] for stages that all differ, one share of the forward pass: exact.

    :func:`perfmodel.schedule_graph.makespan_of_stages` for a compiled kernel. Where no detour can
    use up all turns (``n_microbatches >= 2 pp - 1``) the ways in and out of the steady stage are
    chosen apart, ``O(pp^2)``; else together, ``O(pp^3)``.

    Parameters
    ----------
    tau : array of float, shape (pp,)
        Time of one microbatch on each stage, forward and backward [s].
    pp, n_microbatches, forward_fraction : float
        As in :func:`perfmodel.schedule.makespan_1f1b`.
    """
    n, m = int(pp), int(n_microbatches)
    share = forward_fraction
    start = max(0, n - m)  # the first stage that is not all warm-up
    apart = m >= 2 * n - 1
    early = 0.0  # the slowest stage before it
    for i in range(start):
        early = max(early, tau[i])
    best = 0.0
    before = 0.0  # stages 0 to i
    for i in range(n):
        before += tau[i]
        if i < start:
            continue
        free = m - 1 + (n - 1 - i)  # turns in stage i, but for those of the ways in and out
        way_in = -inf
        way_out = -inf
        slowest = early
        between = 0.0  # stages i + 1 to j
        for j in range(start, n):
            slowest = max(slowest, tau[j])
            if j > i:
                between += tau[j]
            turns = free - (n - 1 - min(i, j))
            enter = between + (n - 1 - j) * share * slowest
            if apart:
                lost = (n - 1 - min(i, j)) * tau[i]
                way_in = max(way_in, enter - lost)
                way_out = max(way_out, between + (n - 1 - j) * (1.0 - share) * slowest - lost)
                continue
            peak = early
            back = 0.0  # stages i + 1 to k
            for k in range(start, n):
                peak = max(peak, tau[k])
                if k > i:
                    back += tau[k]
                left = turns - (n - 1 - min(i, k))
                if left > 0 or (left == 0 and i >= min(j, k)):
                    leave = back + (n - 1 - k) * (1.0 - share) * peak
                    best = max(best, before + enter + leave + left * tau[i])
        if apart:
            best = max(best, before + way_in + way_out + free * tau[i])
    return best


@compile_kernel
def interleaved_end(seconds: Any, groups: int, forward_fraction: float) -> float:
    """End of the interleaved schedule of some groups of microbatches [s]: run task by task.

    Parameters
    ----------
    seconds : array of float, shape (vpp, pp)
        Time of one microbatch in each chunk of each device, forward and backward [s].
    groups : int
        Groups of ``pp`` microbatches.
    forward_fraction : float
        Forward time / (forward + backward time) [-].
    """
    vpp, pp = seconds.shape
    m = groups * pp
    forward = np.full((vpp * pp, m), -1.0)  # when each microbatch leaves each virtual stage
    backward = np.full((vpp * pp, m), -1.0)
    clock = np.zeros(pp)
    forwards = np.zeros(pp, dtype=np.int64)  # done on each device
    backwards = np.zeros(pp, dtype=np.int64)
    left = 2 * vpp * m * pp
    while left > 0:
        for r in range(pp):
            warmup = min(2 * (pp - 1 - r) + (vpp - 1) * pp, vpp * m)
            while backwards[r] < vpp * m:
                ahead = forwards[r] - backwards[r]
                is_forward = forwards[r] < vpp * m and ahead <= warmup
                k = forwards[r] if is_forward else backwards[r]
                n = (k // (vpp * pp)) * pp + k % pp
                chunk = (k // pp) % vpp
                if is_forward:
                    s = chunk * pp + r
                    ready = 0.0 if s == 0 else forward[s - 1, n]
                else:
                    chunk = vpp - 1 - chunk
                    s = chunk * pp + r
                    ready = forward[s, n] if s == vpp * pp - 1 else backward[s + 1, n]
                if ready < 0.0:
                    break
                share = forward_fraction if is_forward else 1.0 - forward_fraction
                clock[r] = max(clock[r], ready) + share * seconds[chunk, r]
                if is_forward:
                    forward[s, n] = clock[r]
                    forwards[r] += 1
                else:
                    backward[s, n] = clock[r]
                    backwards[r] += 1
                left -= 1
    return float(clock.max())


@formula
def makespan_interleaved_stages(
    seconds: Any, n_microbatches: float, forward_fraction: float
) -> float:
    """Makespan of the interleaved schedule [s] for chunks that all differ.

    Exact up to `GROUPS_RUN` groups of microbatches. Each group beyond them takes as long as the
    last of them added, but the whole no less than any device needs: it starts behind the first
    chunks of those before it, ends ahead of their backwards, and works on everything in between.
    Parameters are those of :func:`makespan_of_chunks`.
    """
    groups = int(n_microbatches) // seconds.shape[1]
    if groups <= GROUPS_RUN:
        return interleaved_end(seconds, groups, forward_fraction)
    end = interleaved_end(seconds, GROUPS_RUN, forward_fraction)
    step = end - interleaved_end(seconds, GROUPS_RUN - 1, forward_fraction)
    end += (groups - GROUPS_RUN) * step
    tau = seconds.sum(axis=0)
    ahead = 0.0
    for i in range(len(tau)):
        end = max(end, n_microbatches * tau[i] + ahead)
        ahead += seconds[0, i]
    return float(end)


@formula
def makespan_of_chunks(seconds: Any, n_microbatches: float, forward_fraction: float) -> float:
    """Makespan of a pipeline whose chunks all differ [s]: 1F1B with one chunk, else interleaved.

    Parameters
    ----------
    seconds : array of float, shape (vpp, pp)
        Time of one microbatch in each chunk of each device, forward and backward [s].
    n_microbatches : float
        Microbatches [-]; a multiple of ``pp`` if ``vpp >= 2``.
    forward_fraction : float
        Forward time / (forward + backward time) [-], the same for all.
    """
    if seconds.shape[0] == 1 or seconds.shape[1] == 1:
        tau = seconds.sum(axis=0)
        return float(makespan_1f1b_stages(tau, float(len(tau)), n_microbatches, forward_fraction))
    return float(makespan_interleaved_stages(seconds, n_microbatches, forward_fraction))
