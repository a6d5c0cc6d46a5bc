"""Task graph of a pipeline schedule; its longest path is the makespan, whatever the stages take.

This is what the closed forms of :mod:`perfmodel.schedule` are measured against: slow, general, and
written from the schedule alone. :func:`makespan_of_stages` is the closed form for stages that are
all different. Orders follow Megatron-LM, ``megatron/core/pipeline_parallel/schedules.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise, product
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from perfmodel.errors import PerfmodelError

__all__ = ["Schedule", "Task", "device_order", "makespan_of_stages", "simulate", "task_graph"]

Schedule = Literal["1f1b", "interleaved"]


class Task(NamedTuple):
    """One pass of one microbatch through one chunk."""

    phase: Literal["F", "B"]
    chunk: int  # on its device
    rank: int  # the device
    microbatch: int


def device_order(
    schedule: Schedule, rank: int, pp: int, vpp: int, n_microbatches: int
) -> list[Task]:
    """Return the tasks of one device in the order in which it runs them.

    Warm-up forwards, pairs of one forward and one backward, cool-down backwards. The interleaved
    schedule takes microbatches in groups of ``pp``, and each group through all chunks; backwards
    go through the chunks in reverse.

    Parameters
    ----------
    schedule : {"1f1b", "interleaved"}
        1F1B has one chunk on each device, the interleaved schedule two or more.
    rank, pp, vpp, n_microbatches : int
        Device, devices, chunks on each, microbatches [-].
    """
    if min(pp, vpp, n_microbatches) < 1:
        raise PerfmodelError("A schedule needs at least one stage, one chunk and one microbatch.")
    if schedule == "1f1b":
        if vpp != 1:
            raise PerfmodelError(f"1F1B has one chunk on each device, not {vpp}.")
        warmup = pp - 1 - rank
        table = [(0, microbatch) for microbatch in range(n_microbatches)]
    else:
        if schedule != "interleaved":
            raise PerfmodelError(f"No schedule is called {schedule!r}.")
        if vpp == 1:
            raise PerfmodelError("There is nothing to interleave in one chunk: that is 1F1B.")
        if n_microbatches % pp:
            raise PerfmodelError(
                f"The interleaved schedule takes microbatches in groups of {pp}: "
                f"{n_microbatches} is not a multiple."
            )
        warmup = 2 * (pp - 1 - rank) + (vpp - 1) * pp
        table = [
            (chunk, microbatch)
            for group in range(0, n_microbatches, pp)
            for chunk in range(vpp)
            for microbatch in range(group, group + pp)
        ]
    forwards = [Task("F", chunk, rank, microbatch) for chunk, microbatch in table]
    backwards = [Task("B", vpp - 1 - chunk, rank, microbatch) for chunk, microbatch in table]
    warmup = min(warmup, len(table))
    order = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(table) - warmup :]


def task_graph(
    schedule: Schedule,
    forward_s: ArrayLike,
    backward_s: ArrayLike,
    n_microbatches: int,
    p2p_s: float = 0.0,
) -> Any:
    """Build the graph: an edge weighs what its target takes, plus the transfer to it [s].

    Parameters are those of :func:`simulate`. Returns a ``networkx.DiGraph`` over :class:`Task`,
    with one source more, ``"start"``.
    """
    import networkx as nx

    forward = np.atleast_2d(np.asarray(forward_s, dtype=np.float64))
    backward = np.atleast_2d(np.asarray(backward_s, dtype=np.float64))
    if forward.shape != backward.shape or forward.ndim != 2:
        raise PerfmodelError(
            f"Forward and backward times need one shape, (vpp, pp) or (pp,): "
            f"they have {forward.shape} and {backward.shape}."
        )
    vpp, pp = (int(size) for size in forward.shape)
    seconds = {"F": forward.tolist(), "B": backward.tolist()}
    graph = nx.DiGraph()

    def link(source: Task | str, target: Task, delay: float = 0.0) -> None:
        graph.add_edge(
            source, target, weight=seconds[target.phase][target.chunk][target.rank] + delay
        )

    for rank in range(pp):
        order = device_order(schedule, rank, pp, vpp, n_microbatches)
        link("start", order[0])
        for source, target in pairwise(order):
            link(source, target)
    places = list(product(range(vpp), range(pp)))  # (chunk, rank) along the model
    for microbatch in range(n_microbatches):
        for here, there in pairwise(places):
            delay = p2p_s if here[1] != there[1] else 0.0
            link(Task("F", *here, microbatch), Task("F", *there, microbatch), delay)
            link(Task("B", *there, microbatch), Task("B", *here, microbatch), delay)
        link(Task("F", *places[-1], microbatch), Task("B", *places[-1], microbatch))
    return graph


def simulate(
    schedule: Schedule,
    forward_s: ArrayLike,
    backward_s: ArrayLike,
    n_microbatches: int,
    p2p_s: float = 0.0,
) -> float:
    """Return the makespan of a schedule [s]: the longest path of its task graph.

    Parameters
    ----------
    schedule : {"1f1b", "interleaved"}
        Order of the tasks on a device.
    forward_s, backward_s : array_like
        Times of one microbatch [s], of shape ``(pp,)``, or ``(vpp, pp)``: chunk, then device.
    n_microbatches : int
        Microbatches [-]; a multiple of ``pp`` for the interleaved schedule.
    p2p_s : float
        Time from the end of a task until another device can use its result [s].
    """
    import networkx as nx

    graph = task_graph(schedule, forward_s, backward_s, n_microbatches, p2p_s)
    return float(nx.dag_longest_path_length(graph, weight="weight"))


def makespan_of_stages(
    forward_s: Sequence[float], backward_s: Sequence[float], n_microbatches: int
) -> float:
    """Return the makespan of 1F1B [s] for stages that are all different: exact, ``O(pp^3)``.

    The critical path enters the steady state by way of stage ``j``, stays with stage ``i``, and
    leaves by way of stage ``k``; ``docs/theory/schedule.md`` derives the maximum over all three.

    Parameters
    ----------
    forward_s, backward_s : sequence of float
        Times of one microbatch on each stage [s].
    n_microbatches : int
        Microbatches [-].
    """
    pp, m = len(forward_s), n_microbatches
    tau = [forward + backward for forward, backward in zip(forward_s, backward_s, strict=True)]
    total = list(accumulate(tau))  # of stages 0..i
    slowest_forward = list(accumulate(forward_s, max))
    slowest_backward = list(accumulate(backward_s, max))
    best = 0.0
    for i, j, k in product(range(max(0, pp - m), pp), repeat=3):
        turns = m - 1 + (pp - 1 - i) - (pp - 1 - min(i, j)) - (pp - 1 - min(i, k))
        if turns < 0 or (turns == 0 and i < min(j, k)):
            continue
        path = total[max(i, j)] + total[max(i, k)] - total[i] + turns * tau[i]
        path += (pp - 1 - j) * slowest_forward[j] + (pp - 1 - k) * slowest_backward[k]
        best = max(best, path)
    return best
