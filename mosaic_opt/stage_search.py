"""The stage layout of one plan whose slowest stage is the fastest, with a proof.

Given an architecture, a plan's degrees and a cluster, or several pools of devices, choose

- the decoder layers of every virtual stage, in any numbers; the prediction layers on the last
  virtual stage or on the one before, which then has no decoder layer behind it;
- the recompute mode of every stage;
- for each stage the pool that it is on, the stages of a pool side by side;

so that the largest time of one microbatch over the stages (the steady state of a full pipeline) is
least, with the memory of every stage within its device's. Every stage holds something: a layer, the
embedding, the loss or prediction layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from mosaic_opt.backends.base import Limits
from mosaic_opt.backends.cpsat.stages import (
    Held,
    StageProblem,
    StageSolution,
    StageState,
    solve_stages,
)
from mosaic_opt.errors import MosaicError
from mosaic_opt.stage_result import (
    Ended,
    PlacedStage,
    StageSearch,
    StageStatus,
    StageTermination,
    result_of,
    stages_wanted,
)
from mosaic_opt.stage_step import step_of
from mosaic_opt.stage_tables import StageTables, pool_runs
from perfmodel.architecture import Architecture
from perfmodel.calibration.stacks import StackProfile, load_stack
from perfmodel.cluster import Batch, Cluster
from perfmodel.errors import IllegalPlanError
from perfmodel.plan import Plan, Recompute
from perfmodel.rules import violations
from perfmodel.stages import balanced_counts
from perfmodel.step import DEFAULT_STACK, StepModel

__all__ = ["PlacedStage", "StageProgress", "StageSearch", "search_stages"]

MAX_POOLS = 4
"""More pools than this have too many orders to list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProgress:
    """Where a search is."""

    slowest_s: float | None  # of the best layout so far [s]; None before the first
    bound_s: float  # no layout is faster [s]; never falls
    seconds: float  # since the start


def search_stages(
    architecture: Architecture,
    plan: Plan,
    pools: Cluster | Sequence[Cluster],
    batch: Batch,
    *,
    stack: str | StackProfile = DEFAULT_STACK,
    recompute: Sequence[Recompute] = tuple(Recompute),
    memory_fraction: float = 1.0,
    max_chunk: int | None = None,
    limits: Limits | None = None,
    workers: int = 1,
    seed: int = 0,
    progress: Callable[[StageProgress], None] | None = None,
) -> StageSearch:
    """Search the stage layout with the least slowest stage.

    Parameters
    ----------
    architecture, plan, batch
        What runs; of the plan, the degrees and options count, not its ``layout`` or ``recompute``.
    pools : Cluster or sequence of Cluster
        Where it runs. One cluster has to have the plan's number of devices. Of several, each has
        room for ``n_devices // (tp cp dp)`` stages, and a stage is on one pool. Hand-offs between
        pools are priced as inside the pool of the stage.
    recompute : sequence of Recompute
        The modes that a stage may have; all unless given.
    memory_fraction : float
        Share of a device's memory that may be used [-].
    max_chunk : int, optional
        Layers of a virtual stage at most, prediction layers included. With vpp >= 2 a device waits
        for others within a turn of its chunks, and even chunks wait less.
    limits : Limits, optional
        When to stop; never unless given.
    workers, seed : int
        Of CP-SAT.
    progress : callable, optional
        Called with each better layout, each rise of the bound and the end of the search, from a
        thread of the search. A KeyboardInterrupt that it raises ends the search as Ctrl-C does:
        the best layout and the highest bound so far are returned.

    Returns
    -------
    StageSearch

    Raises
    ------
    IllegalPlanError
        The plan breaks a rule whatever its layout.
    MosaicError
        Pools without room for the stages, or another request that makes no sense.
    """
    if max_chunk is not None and max_chunk < 1:
        raise MosaicError(f"max_chunk={max_chunk} must be at least 1.")
    if workers < 1:
        raise MosaicError(f"workers={workers} must be at least 1.")
    began = time.monotonic()
    clusters = (pools,) if isinstance(pools, Cluster) else tuple(pools)
    capacities = _checked(architecture, plan, clusters, batch, recompute, memory_fraction)
    profile = load_stack(stack) if isinstance(stack, str) else stack
    bare = plan.model_copy(update={"layout": None, "recompute_modules": ()})
    models = [StepModel(architecture, bare, cluster, batch, profile) for cluster in clusters]
    modes = [mode for mode in Recompute if mode in recompute]
    caps = [memory_fraction * cluster.device_memory_bytes for cluster in clusters]
    tables = StageTables(models, modes, caps)
    runs = pool_runs(capacities, plan.pp)
    balanced, balanced_s = _balanced(tables, runs)
    within = balanced is not None and _largest_chunk(tables, balanced) <= (max_chunk or inf)
    hint = balanced if within else None
    cutoff = balanced_s if within and balanced_s is not None else inf
    held = []
    for device in range(plan.pp):
        mine = []
        for content in tables.contents(device):
            for pool in range(len(clusters)):
                load = tables.load(device, pool, content)
                if load is not None and load.time_s <= cutoff:
                    mine.append(Held(*content, pool, load.time_s))
        held.append(tuple(mine))

    known = StageState(hint, cutoff if hint is not None else None, 0.0)

    def told(state: StageState) -> None:
        nonlocal known
        if state.solution is None:
            state = known._replace(bound_s=state.bound_s)
        known = state
        if progress is not None:
            seconds = time.monotonic() - began
            progress(
                StageProgress(slowest_s=state.slowest_s, bound_s=state.bound_s, seconds=seconds)
            )

    limit = limits.time_s if limits is not None else None
    left = None if limit is None else limit - (time.monotonic() - began)
    interrupted = False
    solution, bound_s, proved, unit = hint, 0.0, False, 0.0
    if left is None or left > 0.0:
        try:
            answer = solve_stages(
                StageProblem(
                    pp=plan.pp,
                    vpp=plan.vpp,
                    moe_before=tables.moe_before,
                    predictions=architecture.mtp_layers,
                    held=tuple(held),
                    pools=runs,
                    max_chunk=max_chunk if plan.pp > 1 else None,
                ),
                workers=workers,
                seed=seed,
                time_s=left,
                hint=hint,
                on_state=told,
            )
            bound_s, proved, unit = answer.bound_s, answer.proved, answer.unit_s
            interrupted = answer.interrupted
            solution = _best(tables, (*answer.solutions, *([hint] if hint else ())), unit)
        except KeyboardInterrupt:  # outside of the search itself
            interrupted = True
            solution, bound_s = known.solution, max(bound_s, known.bound_s)
    termination: StageTermination = "interrupted"  # by Ctrl-C, or CP-SAT gave up by itself
    if proved:
        termination = "exhausted"
    elif limit is not None and not interrupted:
        termination = "time_limit"
    status: StageStatus = "unknown"
    if solution is not None:
        status = "optimal" if proved else "feasible"
    elif proved:
        status = "infeasible"
    ended = Ended(status, termination, bound_s, unit, balanced_s, time.monotonic() - began)
    return result_of(tables, plan, solution, balanced, ended)


def _checked(
    architecture: Architecture,
    plan: Plan,
    clusters: Sequence[Cluster],
    batch: Batch,
    recompute: Sequence[Recompute],
    memory_fraction: float,
) -> list[int]:
    """Refuse what cannot be laid out; return the stages that each pool has room for."""
    if not recompute:
        raise MosaicError("recompute is empty; list at least one mode.")
    if plan.recompute_modules:
        raise MosaicError(
            f"recompute_modules={'+'.join(plan.recompute_modules)} is not searched; stages choose "
            f"from {', '.join(Recompute)}."
        )
    if not 0.0 < memory_fraction <= 1.0:
        raise MosaicError(f"memory_fraction={memory_fraction:g} must be above 0 and at most 1.")
    if not 1 <= len(clusters) <= MAX_POOLS:
        raise MosaicError(f"{len(clusters)} pools are given, which must be from 1 to {MAX_POOLS}.")
    devices = plan.tp * plan.cp * plan.dp
    batch.routing.check(architecture.n_experts)
    world = devices * plan.pp if len(clusters) > 1 else clusters[0].n_devices
    stages, layers = plan.pp * plan.vpp, architecture.n_layers
    counts = balanced_counts(layers, stages)
    if layers < stages:
        counts = [1] * layers + [0] * (stages - layers)
    layout = stages_wanted(plan, counts, architecture.mtp_layers, early=False)
    broken = violations(
        architecture.rule_variables(),
        plan.model_copy(update={"layout": str(layout)}),
        world,
        batch.seq_len,
        batch.global_batch,
    )
    if broken:
        raise IllegalPlanError(broken)
    least = max(0, stages - 2 - (architecture.mtp_layers > 0 and plan.pp > 1))
    if layers < least:
        raise MosaicError(
            f"pp*vpp={stages} stages need at least {least} layers, one on each between the first "
            f"and the last; {architecture.name} has {layers}."
        )
    capacities = [cluster.n_devices // devices for cluster in clusters]
    if sum(capacities) < plan.pp:
        raise MosaicError(
            f"pp={plan.pp} stages of tp*cp*dp={devices} devices do not fit: the pools have room "
            f"for {' + '.join(map(str, capacities))}."
        )
    return capacities


def _balanced(
    tables: StageTables, runs: Sequence[tuple[int, ...]]
) -> tuple[StageSolution | None, float | None]:
    """Return the balanced layout on the pools that suit it best, and its slowest stage [s]."""
    stages, layers = tables.pp * tables.vpp, len(tables.moe_before) - 1
    best: tuple[StageSolution | None, float | None] = None, None
    if layers < stages:
        return best
    counts = tuple(balanced_counts(layers, stages))
    for run in runs:
        loads = tables.loads_of(counts, False, run)
        if loads is None:
            continue
        slowest = max(load.time_s for load in loads)
        if best[1] is None or slowest < best[1]:
            best = StageSolution(counts, False, run), slowest
    return best


def _largest_chunk(tables: StageTables, solution: StageSolution) -> int:
    """Return the layers of the largest virtual stage, prediction layers included."""
    units = [*solution.counts]
    units[-1 - solution.early] += tables.architecture.mtp_layers
    return max(units)


def _best(
    tables: StageTables, solutions: Sequence[StageSolution], unit_s: float
) -> StageSolution | None:
    """Return the layout with the fastest slowest stage; of equals, the one with the shortest step.

    Equal are those that the search's rounding does not tell apart.
    """
    timed = []
    for solution in solutions:
        loads = tables.loads_of(*solution)
        if loads is not None:
            timed.append((max(load.time_s for load in loads), solution))
    if not timed:
        return None
    least = min(slowest for slowest, _ in timed)
    equal = [solution for slowest, solution in timed if slowest <= least + unit_s]
    return min(equal, key=lambda solution: step_of(tables, solution) or 0.0)
