"""The same formulas over many plans of one architecture, compiled.

The kernel walks the rows of a plan table in order and evaluates the layer costs and a layer's
bytes only where the degrees that they depend on change, and likewise what no recompute mode
touches. A table sorted by (tp, etp, cp, ep, micro_batch), as
:meth:`perfmodel.plan.PlanSpace.skeleton` makes it, is priced at a fraction of the scalar cost.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel._jit import compile_kernel, formulas_digest
from perfmodel.activations import layer_bytes
from perfmodel.architecture import Architecture
from perfmodel.dims import ArchitectureDims
from perfmodel.hardware import Hardware
from perfmodel.iteration import mode_totals, pipeline_time, step_total, synchronisation_time
from perfmodel.layer import layer_cost
from perfmodel.memory import OptimizerDims, peak_of
from perfmodel.mesh import PlanDims
from perfmodel.plan import Plan, PlanTable, plan_dims
from perfmodel.routing import Routing
from perfmodel.stack import Stack

Kernel = Callable[..., None]

PLAIN = PlanDims(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0)
"""One device; with sequence parallelism and ZeRO-1 where there are more."""

PRICED_COLUMNS = ("tp", "etp", "ep", "pp", "vpp", "cp", "dp", "micro_batch", "recompute")
"""The degrees of a plan that a table has a column of; what else the formulas read is alike in all
of its plans."""


@cache
def _kernel() -> Kernel:
    digest = formulas_digest()

    def price_rows(
        a_: Any,
        hw_: Any,
        stack_: Any,
        optimizer_: Any,
        seq_len: float,
        global_batch: float,
        alike: PlanDims,
        plans: Any,
        loads: Any,
        rows: Any,
        step_s: Any,
        memory_bytes: Any,
    ) -> None:
        a, hw, stack, optimizer = a_[0], hw_[0], stack_[0], optimizer_[0]
        len(digest)  # a cell of this closure: numba's cache key follows the formulas' sources
        p = alike
        cost = layer_cost(a, hw, seq_len, p)
        totals = (
            mode_totals(cost, a, stack, 0.0),
            mode_totals(cost, a, stack, 1.0),
            mode_totals(cost, a, stack, 2.0),
            mode_totals(cost, a, stack, 3.0),
        )
        held = (
            layer_bytes(a, p, stack, seq_len, 0.0),
            layer_bytes(a, p, stack, seq_len, 1.0),
            layer_bytes(a, p, stack, seq_len, 2.0),
            layer_bytes(a, p, stack, seq_len, 3.0),
        )
        sync = synchronisation_time(a, hw, stack, optimizer, p, seq_len)
        for i in range(rows.shape[0]):
            row = plans[rows[i]]
            q = PlanDims(
                row[0],
                row[1],
                row[2],
                row[3],
                row[4],
                row[5],
                row[6],
                row[7],
                row[8],
                loads[rows[i]],
                alike.sequence_parallel,
                alike.zero,
                alike.instances,
                alike.heads_over_cp,
                alike.offload,
            )
            layers_alike = (
                q.tp == p.tp
                and q.etp == p.etp
                and q.ep == p.ep
                and q.cp == p.cp
                and q.micro_batch == p.micro_batch
            )
            if not layers_alike:
                cost = layer_cost(a, hw, seq_len, q)
                totals = (
                    mode_totals(cost, a, stack, 0.0),
                    mode_totals(cost, a, stack, 1.0),
                    mode_totals(cost, a, stack, 2.0),
                    mode_totals(cost, a, stack, 3.0),
                )
                held = (
                    layer_bytes(a, q, stack, seq_len, 0.0),
                    layer_bytes(a, q, stack, seq_len, 1.0),
                    layer_bytes(a, q, stack, seq_len, 2.0),
                    layer_bytes(a, q, stack, seq_len, 3.0),
                )
            if not (layers_alike and q.pp == p.pp and q.vpp == p.vpp and q.dp == p.dp):
                sync = synchronisation_time(a, hw, stack, optimizer, q, seq_len)
            p = q
            n_microbatches = global_batch / (p.dp * p.micro_batch)
            mode = totals[int(p.recompute)]
            pipeline = pipeline_time(a, hw, stack, p, mode, seq_len, n_microbatches)
            step_s[i] = step_total(stack, pipeline, sync, n_microbatches)
            layer = held[int(p.recompute)]
            memory_bytes[i] = peak_of(a, p, optimizer, stack, n_microbatches, layer)

    return compile_kernel(price_rows)


def _flat(value):
    if isinstance(value, tuple):
        return [x for v in value for x in _flat(v)]
    return [value]


def _fields(value):
    return [
        (n, _fields(v) if isinstance(v, tuple) else np.float64)
        for n, v in zip(value._fields, value)
    ]


def as_record(value):
    return np.array(_flat(value), dtype=np.float64).view(np.dtype(_fields(value)))


def plan_matrix(table: PlanTable) -> NDArray[np.float64]:
    """Return the columns of a plan table in the layout that the kernel reads, one row a plan."""
    columns = table.columns
    return np.ascontiguousarray(
        np.stack([columns[name] for name in PRICED_COLUMNS], axis=1), dtype=np.float64
    )


def alike_of(table: PlanTable) -> PlanDims:
    """Return what all plans of a table have in common, as :func:`price` takes it."""
    return plan_dims(Plan.model_validate({"dp": 1, **table.options}))


def loads_of(table: PlanTable, routing: Routing) -> NDArray[np.float64]:
    """Return the load of the fullest rank of EP under each plan of a table, shape (n,) [-]."""
    degrees, where = np.unique(table.ep, return_inverse=True)
    return np.array([routing.load(int(ep)) for ep in degrees], dtype=np.float64)[where]


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
    alike: PlanDims = PLAIN,
    loads: NDArray[np.float64] | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Price many plans of one architecture.

    Parameters
    ----------
    plans : array of shape (n, 9)
        What :func:`plan_matrix` returns.
    rows : array of int64, shape (m,)
        Which of them to price; they must be legal for the architecture.
    alike : PlanDims
        What the plans have in common: sequence parallelism, ZeRO, and the like; its degrees are
        not read.
    loads : array of shape (n,), optional
        Rows on the most loaded rank of EP over the mean; 1 unless given.

    Returns
    -------
    step_s, memory_bytes : arrays of shape (m,)
        Time of a step [s] and bytes on a device of the heaviest stage [B].
    """
    step_s = np.empty(len(rows))
    memory_bytes = np.empty(len(rows))
    _kernel()(
        as_record(architecture.dims),
        as_record(hardware),
        as_record(stack),
        as_record(optimizer),
        float(seq_len),
        float(global_batch),
        alike,
        plans,
        np.ones(len(plans)) if loads is None else loads,
        rows,
        step_s,
        memory_bytes,
    )
    return step_s, memory_bytes
