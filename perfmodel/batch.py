"""The same formulas over many plans of one architecture, compiled.

The kernel walks the rows of a plan table in order and evaluates each part only where the degrees
that it depends on change: what EP does not touch by (tp, etp, cp, micro_batch), layers by ep as
well, stages by (pp, vpp, dp) besides; the rest is a few dozen operations for each recompute mode.
Rows whose stages are uneven, or whose layers alternate, go one by one through a second kernel,
which is compiled when the first of them is met. A table sorted by (tp, etp, cp, ep, micro_batch),
as :meth:`perfmodel.plan_space.PlanSpace.skeleton` makes it, is priced at a fraction of the scalar
cost.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel._jit import compile_kernel, formula, formulas_digest, inner_formula
from perfmodel.activations import LayerBytes, layer_bytes
from perfmodel.architecture import Architecture
from perfmodel.dims import ArchitectureDims
from perfmodel.exchange import synchronisation_of_ends, synchronisation_time
from perfmodel.hardware import Hardware
from perfmodel.iteration import pipeline_of_setting, pipeline_setting, pipeline_time, step_total
from perfmodel.layer import LayerCost, layer_cost, layer_cost_on, trunk_cost
from perfmodel.memory import (
    OptimizerDims,
    end_stages,
    heavy_stages,
    peak_bytes,
    peak_on,
    stages_are_alike,
)
from perfmodel.mesh import PlanDims
from perfmodel.modes import ModeTotals, mode_totals
from perfmodel.plan import Plan, plan_dims
from perfmodel.plan_table import PlanTable
from perfmodel.precision import Precision, saved_activation_bytes
from perfmodel.records import as_record
from perfmodel.routing import Routing
from perfmodel.stack import Stack

Kernel = Callable[..., int]

PLAIN = PlanDims(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0)
"""One device; with sequence parallelism and ZeRO-1 where there are more."""

SLOTS = 8
"""Places for what EP does not touch, by micro-batch: a table changes both before the rest."""

PRICED_COLUMNS = ("tp", "etp", "ep", "pp", "vpp", "cp", "dp", "micro_batch", "recompute")
"""The degrees of a plan that a table has a column of; what else the formulas read is alike in all
of its plans."""


@formula
def layer_costs_of_modes(
    cost: LayerCost, a: ArchitectureDims, stack: Stack
) -> tuple[ModeTotals, ModeTotals, ModeTotals, ModeTotals]:
    """Return the costs of a layer under each recompute mode, by code."""
    return (
        mode_totals(cost, a, stack, 0.0),
        mode_totals(cost, a, stack, 1.0),
        mode_totals(cost, a, stack, 2.0),
        mode_totals(cost, a, stack, 3.0),
    )


@formula
def layer_bytes_of_modes(
    a: ArchitectureDims, p: PlanDims, stack: Stack, seq_len: float
) -> tuple[LayerBytes, LayerBytes, LayerBytes, LayerBytes]:
    """Return the bytes of a layer under each recompute mode, by code."""
    return (
        layer_bytes(a, p, stack, seq_len, 0.0),
        layer_bytes(a, p, stack, seq_len, 1.0),
        layer_bytes(a, p, stack, seq_len, 2.0),
        layer_bytes(a, p, stack, seq_len, 3.0),
    )


@inner_formula
def plan_of_row(row: Any, load: float, alike: PlanDims) -> PlanDims:
    """Return a row of :func:`plan_matrix` as a plan."""
    return PlanDims(
        row[0],
        row[1],
        row[2],
        row[3],
        row[4],
        row[5],
        row[6],
        row[7],
        row[8],
        load,
        alike.sequence_parallel,
        alike.zero,
        alike.instances,
        alike.heads_over_cp,
        alike.offload,
        alike.saved_bytes,
    )


@inner_formula
def same_trunk(p: PlanDims, q: PlanDims) -> bool:
    """Say whether two plans share :func:`perfmodel.layer.trunk_cost` and a layer's bytes."""
    return (
        p.tp == q.tp
        and p.cp == q.cp
        and p.micro_batch == q.micro_batch
        and p.etp == q.etp
        and p.load == q.load
    )


@cache
def _kernel() -> Kernel:
    """Compile the kernel for stages alike (:func:`perfmodel.memory.stages_are_alike`).

    Other rows get NaN as their memory; it returns how many they are.
    """
    digest = int(formulas_digest()[:15], 16)

    def price_rows(
        architecture: Any,
        hardware: Any,
        stack_: Any,
        optimizer_: Any,
        alike_: Any,
        seq_len: float,
        global_batch: float,
        plans: Any,
        loads: Any,
        rows: Any,
        step_s: Any,
        memory_bytes: Any,
    ) -> int:
        if digest == 0 or rows.shape[0] == 0:  # a cell of this closure, and so of the cache's key
            return 0
        a, hw, stack = architecture[0], hardware[0], stack_[0]
        optimizer, alike = optimizer_[0], alike_[0]
        p = plan_of_row(plans[rows[0]], loads[rows[0]], alike)
        trunk = trunk_cost(a, hw, seq_len, p)
        held = layer_bytes_of_modes(a, p, stack, seq_len)
        trunks = [(p, trunk, held)] * SLOTS
        totals = layer_costs_of_modes(layer_cost_on(trunk, a, hw, seq_len, p), a, stack)
        ends = end_stages(a, p)
        sync = synchronisation_of_ends(a, hw, stack, optimizer, p, seq_len, ends)
        setting = pipeline_setting(a, hw, stack, p, seq_len, ends)
        n_microbatches = global_batch / (p.dp * p.micro_batch)
        heavy = heavy_stages(a, p, optimizer, stack, n_microbatches, ends)
        stages_alike = stages_are_alike(a, p)
        left = 0
        for i in range(rows.shape[0]):
            q = plan_of_row(plans[rows[i]], loads[rows[i]], alike)
            layers_alike = same_trunk(p, q) and q.ep == p.ep
            if not layers_alike:
                slot = int(q.micro_batch) % SLOTS
                known, trunk, held = trunks[slot]
                if not same_trunk(known, q):
                    trunk = trunk_cost(a, hw, seq_len, q)
                    held = layer_bytes_of_modes(a, q, stack, seq_len)
                    trunks[slot] = (q, trunk, held)
                totals = layer_costs_of_modes(layer_cost_on(trunk, a, hw, seq_len, q), a, stack)
            if not (layers_alike and q.pp == p.pp and q.vpp == p.vpp and q.dp == p.dp):
                ends = end_stages(a, q)
                sync = synchronisation_of_ends(a, hw, stack, optimizer, q, seq_len, ends)
                setting = pipeline_setting(a, hw, stack, q, seq_len, ends)
                n_microbatches = global_batch / (q.dp * q.micro_batch)
                heavy = heavy_stages(a, q, optimizer, stack, n_microbatches, ends)
                stages_alike = stages_are_alike(a, q)
            p = q
            if not stages_alike:
                memory_bytes[i] = nan
                left += 1
                continue
            mode = int(p.recompute)
            pipeline = pipeline_of_setting(stack, setting, p, totals[mode], n_microbatches)
            step_s[i] = step_total(stack, pipeline, sync, n_microbatches)
            memory_bytes[i] = peak_on(stack, heavy, held[mode])
        return left

    return compile_kernel(price_rows)


@cache
def _kernel_of_any_stages() -> Kernel:
    """Compile the kernel that prices any row, one by one."""
    digest = int(formulas_digest()[:15], 16)

    def price_any_rows(
        architecture: Any,
        hardware: Any,
        stack_: Any,
        optimizer_: Any,
        alike_: Any,
        seq_len: float,
        global_batch: float,
        plans: Any,
        loads: Any,
        rows: Any,
        step_s: Any,
        memory_bytes: Any,
    ) -> int:
        if digest == 0 or rows.shape[0] == 0:
            return 0
        a, hw, stack = architecture[0], hardware[0], stack_[0]
        optimizer, alike = optimizer_[0], alike_[0]
        p = plan_of_row(plans[rows[0]], loads[rows[0]], alike)
        cost = layer_cost(a, hw, seq_len, p)
        for i in range(rows.shape[0]):
            q = plan_of_row(plans[rows[i]], loads[rows[i]], alike)
            if not (same_trunk(p, q) and q.ep == p.ep):
                cost = layer_cost(a, hw, seq_len, q)
            p = q
            n_microbatches = global_batch / (p.dp * p.micro_batch)
            totals = mode_totals(cost, a, stack, p.recompute)
            pipeline = pipeline_time(a, hw, stack, p, totals, seq_len, n_microbatches)
            sync = synchronisation_time(a, hw, stack, optimizer, p, seq_len)
            step_s[i] = step_total(stack, pipeline, sync, n_microbatches)
            memory_bytes[i] = peak_bytes(a, p, optimizer, stack, seq_len, n_microbatches)
        return 0

    return compile_kernel(price_any_rows)


def plan_matrix(table: PlanTable) -> NDArray[np.float64]:
    """Return the columns of a plan table in the layout that the kernel reads, one row a plan."""
    columns = table.columns
    return np.ascontiguousarray(
        np.stack([columns[name] for name in PRICED_COLUMNS], axis=1), dtype=np.float64
    )


def alike_of(table: PlanTable, precision: Precision = Precision.BF16) -> PlanDims:
    """Return what all plans of a table have in common, as :func:`price` takes it."""
    plan = Plan.model_validate({"dp": 1, **table.options})
    return plan_dims(plan, saved_bytes=saved_activation_bytes(precision))


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
    given = (
        as_record(architecture.dims),
        as_record(hardware),
        as_record(stack),
        as_record(optimizer),
        as_record(alike),
        float(seq_len),
        float(global_batch),
        plans,
        np.ones(len(plans)) if loads is None else loads,
    )
    if _kernel()(*given, rows, step_s, memory_bytes):
        left = np.flatnonzero(np.isnan(memory_bytes))
        time_s, held = np.empty(len(left)), np.empty(len(left))
        _kernel_of_any_stages()(*given, rows[left], time_s, held)
        step_s[left], memory_bytes[left] = time_s, held
    return step_s, memory_bytes
