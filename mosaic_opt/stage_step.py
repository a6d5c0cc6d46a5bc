"""The step of a stage layout whose stages differ in recompute mode and pool.

:mod:`perfmodel.layouts` with each stage under its own mode and on its own hardware. Where one mode
serves all stages of one pool it is the same number.
"""

from __future__ import annotations

import numpy as np

from mosaic_opt.backends.cpsat.stages import StageSolution
from mosaic_opt.stage_tables import StageTables
from perfmodel.exchange import SynchronisationTime, exchange_time, hand_off_time, update_time
from perfmodel.iteration import fill_chunks, pipeline_of_chunks, step_total

__all__ = ["step_of"]


def step_of(tables: StageTables, solution: StageSolution) -> float | None:
    """Return the time of a step, or None where a stage does not fit [s].

    The schedule takes one share of the forward pass for all stages: the mean of theirs, each
    weighted with its time. Hand-offs at the start and the end are those of the slowest pool.
    """
    loads = tables.loads_of(*solution)
    if loads is None:
        return None
    a, pp = tables.architecture.dims, tables.pp
    contents = tables.contents_of(solution.counts, solution.early)
    seconds = np.empty((tables.vpp, pp))
    shares, exchange, update, hand_off = [], 0.0, 0.0, 0.0
    for r, load in enumerate(loads):
        model = tables.models[solution.pools[r]]
        hw, stack, seq = model.hardware, model.profile.stack(), float(model.batch.seq_len)
        parts = tables.parts(solution.pools[r], load.mode)
        c = tables.stage_content(r, contents[r])
        layers = np.array([float(n) for n in solution.counts[r::pp]])
        if contents[r].prediction:
            layers[-1] += tables.architecture.mtp_layers
        fill_chunks(a, hw, stack, parts.plan, parts.totals, seq, c, layers, seconds[:, r])
        shares.append(parts.totals.forward_share)
        exchange = max(exchange, exchange_time(a, hw, stack, parts.plan, c))
        optimizer = model.batch.optimizer.dims
        update = max(update, update_time(a, hw, stack, optimizer, parts.plan, c))
        hand_off = max(hand_off, hand_off_time(a, hw, parts.plan, seq))
    times = seconds.sum(axis=0)
    share = float(np.average(shares, weights=times)) if len({*shares}) > 1 else shares[0]
    nodes = [tables.models[q].hardware.fabric.devices_per_node for q in {*solution.pools}]
    n, stack = float(tables.models[0].n_microbatches), tables.models[0].profile.stack()
    pipeline = pipeline_of_chunks(stack, min(nodes), seconds, n, share)
    sync = SynchronisationTime(hand_off, exchange, update, stack.step_host_s)
    return float(step_total(stack, pipeline, sync, n))
