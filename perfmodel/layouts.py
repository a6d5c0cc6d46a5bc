"""A step under an explicit stage layout: :mod:`perfmodel.iteration`, stage by stage.

Layouts that follow from the numbers of layers and stages are priced by the formulas themselves, in
compiled kernels too; these here are for one plan at a time. Hand-offs are priced as in every other
layout: what a prediction layer on a stage before the loss sends besides is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np

from perfmodel.dims import ArchitectureDims
from perfmodel.exchange import SynchronisationTime, exchange_time, hand_off_time, update_time
from perfmodel.hardware import Hardware
from perfmodel.iteration import PipelineTime, fill_chunks, pipeline_of_chunks
from perfmodel.memory import OptimizerDims
from perfmodel.mesh import PlanDims, StageContent, content_of, stage_content
from perfmodel.modes import ModeTotals
from perfmodel.stack import Stack
from perfmodel.stages import StageLayout

__all__ = ["contents_of", "pipeline_of_layout", "synchronisation_of_layout"]


def _together(one: StageContent, other: StageContent) -> StageContent:
    return StageContent(*(x + y for x, y in zip(one, other, strict=True)))


def contents_of(
    a: ArchitectureDims, p: PlanDims, layout: StageLayout | None
) -> tuple[StageContent, ...]:
    """Return what each device holds, of an explicit layout or of the balanced one."""
    if layout is None:
        return tuple(stage_content(a, p, float(i)) for i in range(int(p.pp)))
    chunks = [
        content_of(a, float(first), float(behind), float(stage.mtp))._replace(
            embedding=float(stage.embedding), loss=float(stage.loss)
        )
        for stage, (first, behind) in zip(layout.stages, layout.spans, strict=True)
    ]
    return tuple(reduce(_together, chunks[i :: layout.pp]) for i in range(layout.pp))


def pipeline_of_layout(
    a: ArchitectureDims,
    hw: Hardware,
    stack: Stack,
    p: PlanDims,
    t: ModeTotals,
    seq_len: float,
    n_microbatches: float,
    layout: StageLayout,
) -> PipelineTime:
    """Time from the first microbatch's forward to the last one's backward [s]."""
    seconds = np.empty((layout.vpp, layout.pp))
    for rank, c in enumerate(contents_of(a, p, layout)):
        layers = np.array([float(s.layers + s.mtp) for s in layout.stages[rank :: layout.pp]])
        fill_chunks(a, hw, stack, p, t, seq_len, c, layers, seconds[:, rank])
    node = hw.fabric.devices_per_node
    return pipeline_of_chunks(stack, node, seconds, n_microbatches, t.forward_share)


def synchronisation_of_layout(
    a: ArchitectureDims,
    hw: Hardware,
    stack: Stack,
    optimizer: OptimizerDims,
    p: PlanDims,
    seq_len: float,
    contents: Sequence[StageContent],
) -> SynchronisationTime:
    """Time of hand-offs, gradients and optimizer: the slowest stage's of each [s]."""
    return SynchronisationTime(
        hand_off=hand_off_time(a, hw, p, seq_len),
        data_parallel=max(exchange_time(a, hw, stack, p, c) for c in contents),
        optimizer=max(update_time(a, hw, stack, optimizer, p, c) for c in contents),
        step_host=stack.step_host_s,
    )
