"""Where the layouts of experts are searched, and the prices of the plans there."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from perfmodel._integers import divisors
from perfmodel.batch import alike_of, loads_of, plan_matrix, price
from perfmodel.calibration.stacks import StackProfile, load_stack
from perfmodel.layout_search import CP_TOKENS
from perfmodel.overlap_rules import overlap_mask
from perfmodel.plan import Recompute
from perfmodel.plan_space import PlanSpace
from perfmodel.plan_table import PlanTable, legal_mask
from perfmodel.rules import LAYOUT_CODES
from perfmodel.stages import BALANCED
from perfmodel.step import StepModel
from perfmodel.validation.expert_rows import SOURCE, ExpertCase
from perfmodel.validation.published_layouts import layout_of

__all__ = ["PricedSpace", "spaces_of", "variants_of"]

MOVED = 100
"""Plans of a space that are priced with other stages [-]."""

ABOUT = 1.2
"""Memory of such plans over that of the device, at most [-]."""


def spaces_of(case: ExpertCase) -> tuple[PlanSpace, ...]:
    """Return where a case is searched.

    TP of 1 to 8 within a node; CP to where a rank has `CP_TOKENS` tokens; every divisor of the
    devices for PP and of the experts for EP; ETP 1; VPP 1, 2, 4 and 8; micro-batches of 1 to 16;
    every recompute mode; equal and balanced stages; ZeRO-1, and for dense models ZeRO-3 as well.
    The expert's own TP, CP, VPP and micro-batch are in it.
    """
    run = case.run
    node = run.cluster.devices_per_node
    most = max(1, min(8, run.seq_len // CP_TOKENS))
    experts = run.architecture.n_experts
    zeros = (1,) if experts else (1, 3)
    return tuple(
        PlanSpace.model_validate(
            {
                "tp": {*(d for d in (1, 2, 4, 8) if d <= node), run.tp},
                "cp": {*(d for d in (1, 2, 4, 8) if d <= most), run.cp},
                "ep": divisors(experts) if experts else (1,),
                "vpp": {1, 2, 4, 8, run.vpp},
                "micro_batch": {1, 2, 4, 8, 16, run.micro_batch},
                "layouts": ("equal", "balanced"),
                "zero": zero,
            }
        )
        for zero in zeros
    )


class PricedSpace:
    """The legal plans of one space, their step times [s] and memory [B]."""

    def __init__(self, case: ExpertCase, space: PlanSpace, profile: StackProfile) -> None:
        run, batch = case.run, case.run.batch
        table = space.skeleton(run.devices, batch.seq_len, batch.global_batch)
        legal = legal_mask(table, run.architecture.rule_variables())
        if "overlap" in profile.name.split("+"):
            legal = legal & overlap_mask(table.columns)
        self.table: PlanTable = table.select(legal)
        self.step_s, self.memory = price(
            run.architecture,
            plan_matrix(self.table),
            np.arange(len(self.table)),
            hardware=run.cluster.constants_for(batch.precision),
            stack=profile.stack(),
            optimizer=batch.optimizer.dims,
            seq_len=batch.seq_len,
            global_batch=batch.global_batch,
            alike=alike_of(self.table, batch.precision),
            loads=loads_of(self.table, batch.routing),
        )


def variants_of(case: ExpertCase, found: PricedSpace, limit_s: float) -> Iterator[StepModel]:
    """Yield plans of a space with what the expert chose beside degrees, in the scalar formulas.

    Plans that recompute nothing and are faster than ``limit_s``, with the expert's modules instead:
    modules add time. And the `MOVED` fastest of those with balanced stages and about enough memory,
    with the stages of the recipes' rule (:func:`perfmodel.validation.published_layouts.layout_of`)
    instead, with and without the modules.
    """
    run, profile = case.run, load_stack(case.stack)
    modules = run.plan.recompute_modules
    added: dict[str, object] = {"recompute": Recompute.SELECTIVE, "recompute_modules": modules}
    room = ABOUT * run.cluster.device_memory_bytes

    def model(row: int, changes: dict[str, object]) -> StepModel:
        plan = found.table.plan(row).model_copy(update=changes)
        return StepModel(run.architecture, plan, run.cluster, run.batch, profile)

    none = found.table.recompute == Recompute.NONE.code
    if modules:
        for row in np.flatnonzero(none & (found.step_s < limit_s)).tolist():
            yield model(row, added)
    uneven = (found.table.layout == LAYOUT_CODES[BALANCED]) & (found.memory <= room)
    rows = np.flatnonzero(uneven)
    for row in rows[np.argsort(found.step_s[rows], kind="stable")][:MOVED].tolist():
        pp, vpp = int(found.table.pp[row]), int(found.table.vpp[row])
        layout, _ = layout_of(SOURCE, {}, run.architecture, pp, vpp)
        if layout != BALANCED:
            yield model(row, {"layout": layout})
            if modules and none[row]:
                yield model(row, {"layout": layout, **added})
