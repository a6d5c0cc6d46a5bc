"""Which layouts of one architecture make the shortest step on a cluster, and how sure that is.

Every layout of a space that is legal is priced by the compiled kernel (:mod:`perfmodel.batch`), in
blocks. What is kept between blocks is the shortest steps, the least memory, the Pareto front and
the step times of the near-ties, so that only the columns of the space grow with its size.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from perfmodel.architecture import Architecture, MfuConvention
from perfmodel.batch import alike_of, loads_of, plan_matrix, price
from perfmodel.calibration.stacks import StackProfile, load_stack
from perfmodel.cluster import Batch, Cluster
from perfmodel.errors import PerfmodelError
from perfmodel.layout_records import LayoutCounts, LayoutSearch, PricedLayout
from perfmodel.plan_space import PlanSpace
from perfmodel.plan_table import PlanTable, legal_mask
from perfmodel.priced_rows import NO_ROWS, PricedRows
from perfmodel.rules import architecture_values, violations
from perfmodel.stack import Stack
from perfmodel.step import DEFAULT_STACK, StepModel, estimate
from perfmodel.threads import in_order
from perfmodel.uncertainty import (
    draw_stacks,
    residual_error,
    scaled,
    throughput_ratios,
)

__all__ = [
    "LayoutCounts",
    "LayoutSearch",
    "PricedLayout",
    "layout_space",
    "nearest_to_legal",
    "search_layouts",
]

BLOCK = 8_192
"""Layouts that a thread prices at once."""

CP_TOKENS = 4096
"""The fewest tokens of a sequence on one rank for which context parallelism is tried."""

MOST = 10_000
"""The most layouts to list, pairs of draws, and threads, that make sense."""


def layout_space(cluster: Cluster, batch: Batch, **given: object) -> PlanSpace:
    """Return the space that is searched unless another is given.

    Tensor parallelism within a node; context parallelism within a node and for sequences of at
    least `CP_TOKENS` tokens a rank, which are where it is used; every divisor of the devices for
    `pp` and `ep`; `etp` 1; `vpp` 1, 2, 4 and 8; micro-batches of 1, 2 and 4 sequences; every
    recompute mode; and stages equal or, for numbers of layers that have no equal ones, balanced.

    Parameters
    ----------
    cluster, batch
        Whose nodes limit `tp` and `cp`, and whose sequences limit `cp`.
    **given
        Fields of `PlanSpace` to use in place of these. A list of `tp` or `cp` lifts its cap.
    """
    node = cluster.devices_per_node
    usual: dict[str, object] = {"vpp": (1, 2, 4, 8), "layouts": ("equal", "balanced")}
    caps = {"tp": node, "cp": max(1, min(node, batch.seq_len // CP_TOKENS))}
    usual |= {f"max_{name}": cap for name, cap in caps.items() if name not in given}
    return PlanSpace.model_validate(usual | given)


def search_layouts(
    architecture: Architecture,
    cluster: Cluster,
    batch: Batch,
    space: PlanSpace | None = None,
    *,
    stack: str | StackProfile = DEFAULT_STACK,
    top: int = 10,
    extrapolation: Literal["refuse", "flag"] = "refuse",
    mfu_convention: MfuConvention = MfuConvention.MEGATRON,
    pairs: int = 128,
    seed: int = 2608,
    workers: int | None = None,
) -> LayoutSearch:
    """Price every legal layout of a space and return the shortest steps that fit.

    Parameters
    ----------
    architecture, cluster, batch
        What trains, where, and on how many tokens.
    space : PlanSpace, optional
        Where to search; `layout_space` unless given.
    stack : str or StackProfile
        Software stack: the name of a shipped profile, a path, or a profile.
    top : int
        Layouts to return, at least 1.
    extrapolation : {"refuse", "flag"}
        What becomes of layouts whose all-to-all spans more ranks than the hardware pack has a
        measurement of. Whatever else lies outside a range is flagged.
    mfu_convention : MfuConvention
        What the numerators of MFU and of FLOP/s count.
    pairs, seed : int
        Half the number of draws behind the intervals, and the seed of their generator.
    workers : int, optional
        Threads (the kernel holds no lock); all cores unless given. The answer does not depend on
        their number.

    Raises
    ------
    PerfmodelError
        A `top`, `pairs` or `workers` below 1, a space too large to enumerate, or a routing that is
        a distribution over another number of experts.
    PackError
        No such hardware pack or stack profile.
    """
    workers = os.cpu_count() or 1 if workers is None else workers
    for name, value in (("top", top), ("pairs", pairs), ("workers", workers)):
        if not 1 <= value <= MOST:
            raise PerfmodelError(f"{name}={value} must be from 1 to {MOST}.")
    batch.routing.check(architecture.n_experts)
    profile = load_stack(stack) if isinstance(stack, str) else stack
    space = layout_space(cluster, batch) if space is None else space
    case = _Case(architecture, cluster, batch, profile, mfu_convention)
    run = (cluster.n_devices, batch.seq_len, batch.global_batch)
    table = space.skeleton(*run)
    legal = legal_mask(table, architecture.rule_variables())
    allowed = legal
    if extrapolation == "refuse":
        allowed = legal & (table.ep <= cluster.pack.refused_above("all_to_all", "size"))
    rows = np.flatnonzero(allowed)
    cap, tolerance = cluster.device_memory_bytes, profile.errors.mape_leave_one_out
    found = _price_all(case, table, rows, cap, top, tolerance, workers)
    counts = LayoutCounts(
        enumerated=len(table),
        legal=int(np.count_nonzero(legal)),
        refused=int(np.count_nonzero(legal)) - len(rows),
        priced=len(rows),
        fit=found.fit,
    )
    limit_s = (1.0 + tolerance) * min(found.best.step_s, default=0.0)
    leanest = NO_ROWS if found.fit else found.leanest
    shown = np.unique(np.concatenate([found.best.rows, found.front.rows, leanest.rows]))
    listed = case.listed(table, shown, limit_s, pairs, seed)
    status, reason = _verdict(case, table, run, counts, leanest, cap)
    return LayoutSearch(
        status=status,
        reason=reason,
        layouts=tuple(listed[row] for row in found.best.rows.tolist()),
        near_ties=len(found.close_s),
        near_tie_tolerance=tolerance,
        pareto_front=tuple(listed[row] for row in found.front.rows.tolist()),
        leanest=tuple(listed[row] for row in leanest.rows.tolist()),
        counts=counts,
        architecture=architecture.summary(),
        batch=batch,
        cluster=cluster,
        n_devices=cluster.n_devices,
        device_memory_bytes=cap,
        space=space,
        extrapolation=extrapolation,
        mfu_convention=mfu_convention,
        stack=profile.name,
        hardware=cluster.pack.name,
        draws=2 * pairs,
        seed=seed,
    )


# ---------------------------------------------------------------- pricing


@dataclass(frozen=True)
class _Found:
    best: PricedRows
    leanest: PricedRows
    front: PricedRows
    close_s: NDArray[np.float64]  # step times of the near-ties
    fit: int


@dataclass(frozen=True)
class _Case:
    architecture: Architecture
    cluster: Cluster
    batch: Batch
    profile: StackProfile
    mfu_convention: MfuConvention

    def price(self, table: PlanTable, rows: NDArray[np.int64], stack: Stack) -> PricedRows:
        """Price some rows of a table, ascending."""
        part = table.select(rows)
        step_s, memory = price(
            self.architecture,
            plan_matrix(part),
            np.arange(len(rows)),
            hardware=self.cluster.constants_for(self.batch.precision),
            stack=stack,
            optimizer=self.batch.optimizer.dims,
            seq_len=self.batch.seq_len,
            global_batch=self.batch.global_batch,
            alike=alike_of(part, self.batch.precision),
            loads=loads_of(part, self.batch.routing),
        )
        return PricedRows(rows, step_s, memory)

    def listed(
        self, table: PlanTable, rows: NDArray[np.int64], limit_s: float, pairs: int, seed: int
    ) -> dict[int, PricedLayout]:
        """Describe rows: the scalar estimate, and an interval from draws of the stack."""
        draws = draw_stacks(self.profile, pairs, seed)
        point = self.price(table, rows, self.profile.stack()).step_s
        drawn = np.stack([self.price(table, rows, stack).step_s for stack in draws.stacks])
        found = {}
        for i, row in enumerate(rows.tolist()):
            plan = table.plan(row)
            model = StepModel(self.architecture, plan, self.cluster, self.batch, self.profile)
            step = estimate(
                self.architecture,
                plan,
                self.cluster,
                self.batch,
                stack=self.profile,
                mfu_convention=self.mfu_convention,
            )
            name, mape = residual_error(model)
            ratios = throughput_ratios(float(point[i]), drawn[:, i], draws.residual, mape)
            found[row] = PricedLayout(
                plan=plan,
                step_time_s=step.step_time_s,
                tokens_per_s_per_device=scaled(step.tokens_per_s_per_device, ratios),
                tflops_per_device=scaled(step.tflops_per_device, ratios),
                mfu=scaled(step.mfu, ratios),
                interval_error=name,
                memory_bytes=step.memory_bytes,
                heaviest_stage=step.heaviest_stage,
                shortfall_bytes=max(0.0, step.memory_bytes - step.device_memory_bytes),
                fits=step.fits,
                near_tie=step.fits and float(point[i]) <= limit_s,
                sources={k: v for k, v in step.sources.items() if k not in step.breakdown_s},
                flags=step.flags,
            )
        return found


def _price_all(
    case: _Case,
    table: PlanTable,
    rows: NDArray[np.int64],
    cap: float,
    top: int,
    tolerance: float,
    workers: int,
) -> _Found:
    """Price the rows in blocks, and keep what the answer needs of each."""
    best, leanest, front, close_s, fit = NO_ROWS, NO_ROWS, NO_ROWS, np.empty(0), 0
    stack = case.profile.stack()
    parts = (rows[start : start + BLOCK] for start in range(0, len(rows), BLOCK))
    for block in in_order(lambda part: case.price(table, part, stack), parts, workers):
        fitting = block.take(block.memory <= cap)
        fit += len(fitting.rows)
        best = best.joined(fitting).shortest(top)
        leanest = leanest.joined(block.lightest(top)).lightest(top)
        front = front.joined(block.front()).front()
        close_s = np.concatenate([close_s, fitting.step_s])
        close_s = close_s[close_s <= (1.0 + tolerance) * close_s.min(initial=np.inf)]
    return _Found(best, leanest, front, close_s, fit)


# ---------------------------------------------------------------- why there is no answer


def nearest_to_legal(
    table: PlanTable, architecture_vars: dict[str, int], world: int, seq_len: int, global_batch: int
) -> str:
    """Name the rules that the first layout of a table breaks of those that break fewest."""
    if not len(table):
        return "no layout of the space tiles the cluster and the batch"
    row = int(np.argmin(table.rule_masks.broken(architecture_values(architecture_vars))))
    broken = violations(architecture_vars, table.plan(row), world, seq_len, global_batch)
    return " ".join(violation.message for violation in broken)


def _verdict(
    case: _Case,
    table: PlanTable,
    run: tuple[int, int, int],
    counts: LayoutCounts,
    leanest: PricedRows,
    cap: float,
) -> tuple[Literal["found", "nothing_fits", "nothing_measured", "nothing_legal"], str]:
    if counts.fit:
        return "found", ""
    if counts.priced:
        needs = float(leanest.memory[0])
        return "nothing_fits", (
            f"No layout fits: the leanest needs {needs / 1e9:.1f} GB of {cap / 1e9:.1f} GB, "
            f"{(needs - cap) / 1e9:.1f} GB short on a device of its heaviest stage."
        )
    if counts.legal:
        most = case.cluster.pack.refused_above("all_to_all", "size")
        return "nothing_measured", (
            f"Every legal layout needs expert parallelism over more than {most:g} ranks, which "
            "nobody measured; extrapolation=flag prices them."
        )
    why = nearest_to_legal(table, case.architecture.rule_variables(), *run).rstrip(".")
    return "nothing_legal", f"No layout is legal; the nearest to it: {why}."
