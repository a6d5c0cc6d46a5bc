"""A plan as the formulas take it, and how layers fall on its stages."""

from __future__ import annotations

from math import floor
from typing import NamedTuple

from perfmodel._jit import formula
from perfmodel.dims import ArchitectureDims


class PlanDims(NamedTuple):
    """Degrees of a plan as floats; ``recompute`` is its code, 0 none to 3 full."""

    tp: float
    etp: float
    ep: float
    pp: float
    vpp: float
    cp: float
    dp: float
    micro_batch: float
    recompute: float


class StageLayers(NamedTuple):
    """Layers on a stage by kind, multi-token prediction included [-]."""

    dense: float
    moe: float


@formula
def moe_layers_before(a: ArchitectureDims, layer: float) -> float:
    """Layers with experts among the first ``layer`` [-]."""
    behind = max(0.0, layer - a.first_k_dense)
    return float(floor(behind / a.moe_every))


@formula
def dense_layers_of_stage(a: ArchitectureDims, p: PlanDims, stage: float) -> float:
    """Dense layers on a stage, of the model's own layers in order [-].

    Without interleaving a stage holds consecutive layers. With it, a stage holds ``vpp`` chunks
    that lie ``n_layers / vpp`` apart.
    """
    chunk = a.n_layers / (p.pp * p.vpp)
    count = 0.0
    for i in range(int(p.vpp)):
        first = (i * p.pp + stage) * chunk
        if a.moe_every == 1.0:
            count += min(chunk, max(0.0, a.first_k_dense - first))
        else:
            count += chunk - (moe_layers_before(a, first + chunk) - moe_layers_before(a, first))
    return count


@formula
def stage_layers(a: ArchitectureDims, p: PlanDims, stage: float) -> StageLayers:
    """Return the layers of a stage; the last one has those of multi-token prediction as well."""
    dense = dense_layers_of_stage(a, p, stage)
    moe = a.n_layers / p.pp - dense
    if stage == p.pp - 1.0:
        dense += a.mtp_dense
        moe += a.mtp_moe
    return StageLayers(dense, moe)
