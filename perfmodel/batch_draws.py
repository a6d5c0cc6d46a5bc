"""The shortest step over many plans under each of many draws of a stack's constants, compiled.

:func:`perfmodel.batch.price` prices plans under one stack. What a draw of the host's constants
(`HOST_CONSTANTS`) moves is a small part of a step's formulas: the layers, the exchange and the
optimizer stay as they are. So the kernel evaluates those once a plan and the rest once a draw, and
keeps for each draw the least step and its row.

Where the step cannot decrease in any of these constants, a plan is first priced at the floor of a
block of draws, the least value of each constant in it. If that is above the least step so far of
every draw of the block, the plan is the best of none of them, and its draws are skipped. That is so

* for ``tau``: ``C0 + J`` has the slope ``1 + s w (G0 + Y) / C0^2 >= 1`` in the host time ``C0``
  where the ranks wait, and 1 elsewhere (:mod:`perfmodel.iteration`); ``J`` grows with ``s``;
* for 1F1B, whose makespan is the longest path of tasks; not for the interleaved schedule, whose
  closed form may fall where the plain chunks grow (:mod:`perfmodel.schedule`);
* for the step, which adds to it, unless a longer microbatch hides more of the exchange: only with
  ``dp_hidden`` 0.

Elsewhere nothing is skipped. Either way the answer is that of pricing every plan under every draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel._jit import compile_kernel, formulas_digest, inner_formula
from perfmodel.architecture import Architecture
from perfmodel.batch import (
    PLAIN,
    SLOTS,
    Kernel,
    layer_costs_of_modes,
    plan_of_row,
    price,
    same_trunk,
)
from perfmodel.exchange import SynchronisationTime, synchronisation_of_ends
from perfmodel.hardware import Hardware
from perfmodel.iteration import (
    PipelineSetting,
    StageSetting,
    pipeline_depth_cost,
    pipeline_of_setting,
    pipeline_setting,
    rank_wait,
    step_total,
)
from perfmodel.layer import layer_cost_on, trunk_cost
from perfmodel.memory import OptimizerDims, end_stages, stages_are_alike
from perfmodel.mesh import PlanDims
from perfmodel.modes import ModeTotals
from perfmodel.records import as_record, as_records
from perfmodel.stack import Stack

__all__ = ["HOST_CONSTANTS", "differ_in_host_alone", "least_steps"]

HOST_CONSTANTS = (
    "host_layer_s",
    "host_microbatch_s",
    "jitter_s",
    "pipeline_node_cost",
    "step_host_s",
)
"""The constants of a stack that no part of a layer, of the exchange or of memory depends on."""

BLOCK = 8
"""Draws that share a floor."""

ROUNDING = 1.0 - 1e-9
"""What a floor is worth after rounding, relative."""


@inner_formula
def waiting(s: StageSetting, wait: float) -> StageSetting:
    """Return a stage with another wait of its ranks."""
    return StageSetting(
        s.n_moe, s.n_dense, s.heads, s.joined, wait, s.sharding, s.hand_off, s.blocking
    )


@inner_formula
def step_of_draw(
    stack: Stack,
    devices_per_node: float,
    setting: PipelineSetting,
    sync: SynchronisationTime,
    p: PlanDims,
    t: ModeTotals,
    n_microbatches: float,
) -> float:
    """Return the step time under a stack that differs in `HOST_CONSTANTS` alone [s].

    ``setting`` and ``sync`` are those of another stack.
    """
    wait = rank_wait(stack, p)
    drawn = PipelineSetting(
        waiting(setting.first, wait),
        waiting(setting.mid, wait),
        waiting(setting.other, wait),
        waiting(setting.last, wait),
        setting.has_mid,
        setting.has_other,
        pipeline_depth_cost(stack, devices_per_node, p.pp),
    )
    pipeline = pipeline_of_setting(stack, drawn, p, t, n_microbatches)
    host = SynchronisationTime(sync.hand_off, sync.data_parallel, sync.optimizer, stack.step_host_s)
    return step_total(stack, pipeline, host, n_microbatches)


@cache
def _kernel() -> Kernel:
    """Compile the kernel for stages alike; other rows are marked in ``left`` and not priced."""
    digest = int(formulas_digest()[:15], 16)

    def least_of_draws(
        architecture: Any,
        hardware: Any,
        optimizer_: Any,
        alike_: Any,
        seq_len: float,
        global_batch: float,
        plans: Any,
        loads: Any,
        rows: Any,
        stacks: Any,
        floors: Any,
        monotone: bool,
        best_s: Any,
        best_row: Any,
        left: Any,
    ) -> int:
        if digest == 0 or rows.shape[0] == 0:  # a cell of this closure, and so of the cache's key
            return 0
        a, hw, stack = architecture[0], hardware[0], stacks[0]
        optimizer, alike = optimizer_[0], alike_[0]
        node = hw.fabric.devices_per_node
        n_draws, n_blocks = stacks.shape[0], floors.shape[0]
        worst = np.empty(n_blocks)
        for b in range(n_blocks):
            worst[b] = best_s[b * BLOCK : min((b + 1) * BLOCK, n_draws)].max()
        p = plan_of_row(plans[rows[0]], loads[rows[0]], alike)
        trunk = trunk_cost(a, hw, seq_len, p)
        trunks = [(p, trunk)] * SLOTS
        totals = layer_costs_of_modes(layer_cost_on(trunk, a, hw, seq_len, p), a, stack)
        ends = end_stages(a, p)
        sync = synchronisation_of_ends(a, hw, stack, optimizer, p, seq_len, ends)
        setting = pipeline_setting(a, hw, stack, p, seq_len, ends)
        n_microbatches = global_batch / (p.dp * p.micro_batch)
        stages_alike = stages_are_alike(a, p)
        n_left = 0
        for i in range(rows.shape[0]):
            row = rows[i]
            q = plan_of_row(plans[row], loads[row], alike)
            layers_alike = same_trunk(p, q) and q.ep == p.ep
            if not layers_alike:
                slot = int(q.micro_batch) % SLOTS
                known, trunk = trunks[slot]
                if not same_trunk(known, q):
                    trunk = trunk_cost(a, hw, seq_len, q)
                    trunks[slot] = (q, trunk)
                totals = layer_costs_of_modes(layer_cost_on(trunk, a, hw, seq_len, q), a, stack)
            if not (layers_alike and q.pp == p.pp and q.vpp == p.vpp and q.dp == p.dp):
                ends = end_stages(a, q)
                sync = synchronisation_of_ends(a, hw, stack, optimizer, q, seq_len, ends)
                setting = pipeline_setting(a, hw, stack, q, seq_len, ends)
                n_microbatches = global_batch / (q.dp * q.micro_batch)
                stages_alike = stages_are_alike(a, q)
            p = q
            if not stages_alike:
                left[i] = True
                n_left += 1
                continue
            t = totals[int(p.recompute)]
            skips = monotone and (p.vpp <= 1.0 or p.pp <= 1.0)
            for b in range(n_blocks):
                if skips:
                    floor = step_of_draw(floors[b], node, setting, sync, p, t, n_microbatches)
                    if floor * ROUNDING > worst[b]:
                        continue
                start, stop = b * BLOCK, min((b + 1) * BLOCK, n_draws)
                for d in range(start, stop):
                    step = step_of_draw(stacks[d], node, setting, sync, p, t, n_microbatches)
                    if step < best_s[d] or (step == best_s[d] and row < best_row[d]):
                        best_s[d] = step
                        best_row[d] = row
                worst[b] = best_s[start:stop].max()
        return n_left

    return compile_kernel(least_of_draws)


def differ_in_host_alone(stacks: Sequence[Stack]) -> bool:
    """Say whether stacks are alike in all but `HOST_CONSTANTS`."""
    first = stacks[0]._replace(**dict.fromkeys(HOST_CONSTANTS, 0.0))
    return all(s._replace(**dict.fromkeys(HOST_CONSTANTS, 0.0)) == first for s in stacks)


def least_steps(
    architecture: Architecture,
    plans: NDArray[np.float64],
    rows: NDArray[np.int64],
    stacks: Sequence[Stack],
    *,
    likely: NDArray[np.int64] | None = None,
    hardware: Hardware,
    optimizer: OptimizerDims,
    seq_len: int,
    global_batch: int,
    alike: PlanDims = PLAIN,
    loads: NDArray[np.float64] | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Find the shortest step of one architecture under each of several stacks.

    Parameters
    ----------
    plans, rows, alike, loads
        As in :func:`perfmodel.batch.price`; of equal steps the smallest row is taken.
    stacks : sequence of Stack, of length n
        Draws. Stacks that differ in more than `HOST_CONSTANTS` are priced one by one, which is
        slower by far.
    likely : array of int64, optional
        Some of the rows, to begin with; good ones save time and move nothing else.

    Returns
    -------
    step_s, best_row : arrays of shape (n,)
        The least step time under each stack [s], inf without rows; and its row, or -1.
    """
    n = len(stacks)
    best_s, best_row = np.full(n, np.inf), np.full(n, -1, dtype=np.int64)
    if not n or not len(rows):
        return best_s, best_row

    def one_by_one(some: NDArray[np.int64]) -> None:
        for d, stack in enumerate(stacks):
            step_s, _ = price(
                architecture,
                plans,
                some,
                hardware=hardware,
                stack=stack,
                optimizer=optimizer,
                seq_len=seq_len,
                global_batch=global_batch,
                alike=alike,
                loads=loads,
            )
            at = int(np.lexsort((some, step_s))[0])
            if (step_s[at], some[at]) < (best_s[d], best_row[d]):
                best_s[d], best_row[d] = step_s[at], some[at]

    if not differ_in_host_alone(stacks):
        one_by_one(rows)
        return best_s, best_row
    # draws with like constants side by side, so that a block's floor is near each of them
    order = np.array(sorted(range(n), key=lambda d: (stacks[d].host_layer_s, d)))
    drawn = as_records([stacks[d] for d in order])
    floors = drawn[::BLOCK].copy()
    for name in HOST_CONSTANTS:
        floors[name] = np.minimum.reduceat(drawn[name], np.arange(0, n, BLOCK))
    sorted_s, sorted_row = best_s.copy(), best_row.copy()
    given = (
        as_record(architecture.dims),
        as_record(hardware),
        as_record(optimizer),
        as_record(alike),
        float(seq_len),
        float(global_batch),
        plans,
        np.ones(len(plans)) if loads is None else loads,
    )
    monotone = stacks[0].dp_hidden == 0.0
    for some in (rows[:0] if likely is None else likely, rows):
        left = np.zeros(len(some), dtype=np.bool_)
        _kernel()(*given, some, drawn, floors, monotone, sorted_s, sorted_row, left)
    best_s[order], best_row[order] = sorted_s, sorted_row
    if left.any():
        one_by_one(rows[left])
    return best_s, best_row
