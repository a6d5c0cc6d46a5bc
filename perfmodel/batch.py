"""The same formulas over many plans of one architecture, compiled.

The kernel walks the rows of a plan table in order and evaluates the layer costs only where the
degrees that they depend on change, and likewise what no recompute mode touches. A table sorted by
(tp, etp, cp, ep, micro_batch), as :meth:`perfmodel.plan.PlanSpace.skeleton` makes it, is priced
at a fraction of the scalar cost.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel._jit import compile_kernel, formulas_digest
from perfmodel.architecture import Architecture
from perfmodel.dims import ArchitectureDims
from perfmodel.hardware import Hardware
from perfmodel.iteration import mode_totals, pipeline_time, step_total, synchronisation_time
from perfmodel.layer import layer_cost
from perfmodel.memory import OptimizerDims, peak_bytes
from perfmodel.mesh import PlanDims
from perfmodel.plan import PlanTable
from perfmodel.stack import Stack

Kernel = Callable[..., None]

PRICED_COLUMNS = ("tp", "etp", "ep", "pp", "vpp", "cp", "dp", "micro_batch", "recompute")


@cache
def _kernel() -> Kernel:
    digest = formulas_digest()

    def price_rows(
        a: ArchitectureDims,
        hw: Hardware,
        stack: Stack,
        optimizer: OptimizerDims,
        seq_len: float,
        global_batch: float,
        plans: Any,
        rows: Any,
        step_s: Any,
        memory_bytes: Any,
    ) -> None:
        len(digest)  # a cell of this closure: numba's cache key follows the formulas' sources
        node = hw.fabric.devices_per_node
        p = PlanDims(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0)
        cost = layer_cost(a, hw, seq_len, 1.0, 1.0, 1.0, 1.0, 1.0)
        totals = (
            mode_totals(cost, stack, 0.0),
            mode_totals(cost, stack, 1.0),
            mode_totals(cost, stack, 2.0),
            mode_totals(cost, stack, 3.0),
        )
        sync = synchronisation_time(a, hw, stack, optimizer, p, seq_len)
        for i in range(rows.shape[0]):
            row = plans[rows[i]]
            q = PlanDims(row[0], row[1], row[2], row[3], row[4], row[5], row[6], row[7], row[8])
            layers_alike = (
                q.tp == p.tp
                and q.etp == p.etp
                and q.ep == p.ep
                and q.cp == p.cp
                and q.micro_batch == p.micro_batch
            )
            if not layers_alike:
                cost = layer_cost(a, hw, seq_len, q.micro_batch, q.tp, q.etp, q.ep, q.cp)
                totals = (
                    mode_totals(cost, stack, 0.0),
                    mode_totals(cost, stack, 1.0),
                    mode_totals(cost, stack, 2.0),
                    mode_totals(cost, stack, 3.0),
                )
            if not (layers_alike and q.pp == p.pp and q.vpp == p.vpp and q.dp == p.dp):
                sync = synchronisation_time(a, hw, stack, optimizer, q, seq_len)
            p = q
            n_microbatches = global_batch / (p.dp * p.micro_batch)
            pipeline = pipeline_time(a, stack, node, p, totals[int(p.recompute)], n_microbatches)
            step_s[i] = step_total(pipeline, sync)
            memory_bytes[i] = peak_bytes(
                a, p, optimizer, seq_len, n_microbatches, stack.framework_bytes
            )

    return compile_kernel(price_rows)


def plan_matrix(table: PlanTable) -> NDArray[np.float64]:
    """Return the columns of a plan table in the layout that the kernel reads, one row a plan."""
    columns = table.columns
    return np.ascontiguousarray(
        np.stack([columns[name] for name in PRICED_COLUMNS], axis=1), dtype=np.float64
    )


def price(
    architecture: Architecture,
    plans: NDArray[np.float64],
    rows: NDArray[np.int64],
    *,
    hardware: Hardware,
    stack: Stack,
    optimizer: OptimizerDims,
    seq_len: int,
    global_batch: int,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Price many plans of one architecture.

    Parameters
    ----------
    plans : array of shape (n, 9)
        What :func:`plan_matrix` returns.
    rows : array of int64, shape (m,)
        Which of them to price; they must be legal for the architecture.

    Returns
    -------
    step_s, memory_bytes : arrays of shape (m,)
        Time of a step [s] and bytes on a device of the heaviest stage [B].
    """
    step_s = np.empty(len(rows))
    memory_bytes = np.empty(len(rows))
    _kernel()(
        architecture.dims,
        hardware,
        stack,
        optimizer,
        float(seq_len),
        float(global_batch),
        plans,
        rows,
        step_s,
        memory_bytes,
    )
    return step_s, memory_bytes
