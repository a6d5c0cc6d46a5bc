"""What a search over stage layouts answers, and how that is made from a layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from mosaic_opt.backends.cpsat.stages import StageSolution
from mosaic_opt.stage_step import step_of
from mosaic_opt.stage_tables import StageTables
from perfmodel.cluster import Cluster
from perfmodel.frozen import Frozen
from perfmodel.plan import Plan, Recompute
from perfmodel.sources import Source, weakest
from perfmodel.stages import Stage, StageLayout
from perfmodel.step import StepModel

__all__ = ["Ended", "PlacedStage", "PoolUse", "StageSearch", "result_of", "stages_wanted"]

StageTermination = Literal["exhausted", "time_limit", "interrupted"]
StageStatus = Literal["optimal", "feasible", "infeasible", "unknown"]


SAME = 1e-12
"""Steps that differ by less than this share are equal: the order of sums makes it [-]."""


class PlacedStage(Frozen):
    """One device of the pipeline: what it holds and what that costs (SI units)."""

    stage: int
    pool: str
    layers: tuple[int, ...]  # decoder layers of each chunk
    dense: int  # of them, with a dense block
    moe: int  # of them, with experts
    mtp: int
    embedding: bool
    loss: bool
    recompute: Recompute
    time_s: float
    memory_bytes: float
    memory_cap_bytes: float


class PoolUse(Frozen):
    """Stages that are on a pool, and its devices that have none."""

    pool: str
    stages: int
    idle_devices: int


class StageSearch(Frozen):
    """What :func:`search_stages` found.

    Attributes
    ----------
    status : str
        ``optimal``: no layout is faster, but for ``rounding_s``; ``feasible``: stopped before the
        proof; ``infeasible``: proved that none fits; ``unknown``: stopped without either.
    slowest_s : float or None
        Time of one microbatch on the slowest stage, forward and backward [s].
    bound_s : float or None
        No layout has a faster slowest stage [s]; None if infeasible.
    gap : float or None
        ``1 - bound_s / slowest_s`` [-].
    rounding_s : float
        Unit that the search rounded times down to [s].
    balanced_slowest_s : float or None
        The same of the balanced layout, with the best recompute mode of each stage and the best
        pools [s]; None if it does not fit.
    layout : str or None
        The layout in Megatron-Core's letters, as ``Plan.layout`` takes it.
    plan : Plan or None
        The plan with that layout, where one pool and one recompute mode serve all stages.
    balanced_layout, balanced_plan, balanced_stages
        The same of the balanced layout; None, None and empty if it does not fit.
    recommended : str or None
        Which of the two layouts has the shorter step, ``search`` or ``balanced``; of equals the
        search's. None without a layout.
    step_time_s, balanced_step_time_s : float or None
        Time of a step under the layout, and under the balanced one [s]. Exact under the model where
        one recompute mode serves all stages of one pool; else the schedule is run with one share of
        the forward pass for all stages, the mean of theirs. The search does not minimise it.
    source : Source
        What the times rest on; memory rests on ASSUMED.
    """

    schema_version: Literal[1] = 1
    model: str
    stack: str
    status: StageStatus
    termination: StageTermination
    slowest_s: float | None
    bound_s: float | None
    gap: float | None
    rounding_s: float
    balanced_slowest_s: float | None
    layout: str | None
    plan: Plan | None
    step_time_s: float | None
    balanced_step_time_s: float | None
    stages: tuple[PlacedStage, ...]
    balanced_layout: str | None
    balanced_plan: Plan | None
    balanced_stages: tuple[PlacedStage, ...]
    recommended: Literal["search", "balanced"] | None
    pools: tuple[PoolUse, ...]
    source: Source
    seconds: float

    @property
    def recommended_layout(self) -> str | None:
        """The layout to take: of the two, the one with the shorter step."""
        return self.balanced_layout if self.recommended == "balanced" else self.layout

    @property
    def recommended_plan(self) -> Plan | None:
        """The plan with that layout, where one pool and one recompute mode serve all stages."""
        return self.balanced_plan if self.recommended == "balanced" else self.plan

    @property
    def recommended_stages(self) -> tuple[PlacedStage, ...]:
        """What each stage of that layout holds."""
        return self.balanced_stages if self.recommended == "balanced" else self.stages


class Ended(NamedTuple):
    """How a search ended."""

    status: StageStatus
    termination: StageTermination
    bound_s: float
    unit_s: float
    balanced_s: float | None
    seconds: float


class _Written(NamedTuple):
    """A layout as the answer has it; nothing where there is none."""

    layout: str | None = None
    plan: Plan | None = None
    stages: tuple[PlacedStage, ...] = ()
    slowest_s: float | None = None
    step_s: float | None = None


def stages_wanted(plan: Plan, counts: Sequence[int], mtp: int, early: bool) -> StageLayout:
    """Return the layout of counts of layers: embedding first, loss last."""
    last = len(counts) - 1
    stages = (
        Stage(int(s == 0), n, mtp * (s == last - early), int(s == last))
        for s, n in enumerate(counts)
    )
    return StageLayout(plan.pp, tuple(stages))


def _pool_name(cluster: Cluster) -> str:
    return f"{cluster.hardware}:{cluster.nodes}"


def _written(tables: StageTables, plan: Plan, solution: StageSolution | None) -> _Written:
    loads = None if solution is None else tables.loads_of(*solution)
    if solution is None or loads is None:
        return _Written()
    mtp = tables.architecture.mtp_layers
    clusters = [model.cluster for model in tables.models]
    text = stages_wanted(plan, solution.counts, mtp, solution.early)
    contents = tables.contents_of(solution.counts, solution.early)
    placed = tuple(
        PlacedStage(
            stage=r,
            pool=_pool_name(clusters[solution.pools[r]]),
            layers=solution.counts[r :: plan.pp],
            dense=contents[r].dense,
            moe=contents[r].moe,
            mtp=text.device(r).mtp,
            embedding=r == 0,
            loss=r == plan.pp - 1,
            recompute=load.mode,
            time_s=load.time_s,
            memory_bytes=load.memory_bytes,
            memory_cap_bytes=tables.caps[solution.pools[r]],
        )
        for r, load in enumerate(loads)
    )
    uniform = len(clusters) == 1 and len({load.mode for load in loads}) == 1
    update = {"layout": str(text), "recompute": loads[0].mode}
    return _Written(
        str(text),
        plan.model_copy(update=update) if uniform else None,
        placed,
        max(load.time_s for load in loads),
        step_of(tables, solution),
    )


def _source(tables: StageTables, plan: Plan, found: _Written, used: Sequence[int]) -> Source:
    """Return what the times of the pools that are used rest on."""
    if not found.stages:
        return Source.ASSUMED
    update = {"layout": found.layout, "recompute": found.stages[0].recompute}
    uniform = plan.model_copy(update=update)
    return weakest(
        [
            StepModel(tables.architecture, uniform, m.cluster, m.batch, m.profile).sources()[
                "step_time_s"
            ]
            for m, n in zip(tables.models, used, strict=True)
            if n
        ]
    )


def _shorter(found: _Written, balanced: _Written) -> Literal["search", "balanced"] | None:
    """Say which of two layouts has the shorter step."""
    if found.step_s is None:
        return None
    waits = balanced.step_s is not None and balanced.step_s < (1.0 - SAME) * found.step_s
    return "balanced" if waits else "search"


def result_of(
    tables: StageTables,
    plan: Plan,
    solution: StageSolution | None,
    balanced: StageSolution | None,
    ended: Ended,
) -> StageSearch:
    """Write the answer for the layout that a search found, beside the balanced one."""
    clusters = [model.cluster for model in tables.models]
    devices = plan.tp * plan.cp * plan.dp
    found, even = _written(tables, plan, solution), _written(tables, plan, balanced)
    used = [0 if solution is None else solution.pools.count(q) for q in range(len(clusters))]
    bound, slowest = None if ended.status == "infeasible" else ended.bound_s, found.slowest_s
    return StageSearch(
        model=tables.architecture.name,
        stack=tables.models[0].profile.name,
        status=ended.status,
        termination=ended.termination,
        slowest_s=slowest,
        bound_s=bound,
        gap=None if slowest is None or bound is None else max(0.0, 1.0 - bound / slowest),
        rounding_s=ended.unit_s,
        balanced_slowest_s=ended.balanced_s,
        layout=found.layout,
        plan=found.plan,
        step_time_s=found.step_s,
        balanced_step_time_s=even.step_s,
        stages=found.stages,
        balanced_layout=even.layout,
        balanced_plan=even.plan,
        balanced_stages=even.stages,
        recommended=_shorter(found, even),
        source=_source(tables, plan, found, used),
        pools=tuple(
            PoolUse(pool=_pool_name(c), stages=n, idle_devices=c.n_devices - n * devices)
            for c, n in zip(clusters, used, strict=True)
        ),
        seconds=ended.seconds,
    )
