"""A plan as the formulas take it, and how layers fall on its stages."""

from __future__ import annotations

from math import floor
from typing import NamedTuple

from perfmodel._jit import formula, inner_formula
from perfmodel.dims import ArchitectureDims


class PlanDims(NamedTuple):
    """A plan as floats: its degrees, and what else the formulas need to know of it."""

    tp: float
    etp: float
    ep: float
    pp: float
    vpp: float
    cp: float
    dp: float
    micro_batch: float
    recompute: float  # code: 0 none to 3 full, or one of modules (perfmodel.replay)
    load: float = 1.0  # rows on the most loaded rank of EP over the mean [-]
    sequence_parallel: float = 1.0  # 1: what lies between TP's blocks is split over TP
    zero: float = 1.0  # ZeRO stage, 0 to 3
    instances: float = 1.0  # replicas of the sharded optimizer (HSDP with zero=3)
    heads_over_cp: float = 0.0  # 1: CP exchanges heads all-to-all; 0: keys and values in a ring
    offload: float = 0.0  # share of the optimizer that is on the host
    saved_bytes: float = 2.0  # of each element of a linear layer's input, kept for its backward [B]


@inner_formula
def sequence_shards(p: PlanDims) -> float:
    """Parts that a rank's tokens are in between the blocks that TP splits [-]."""
    return p.tp if p.sequence_parallel > 0.0 else 1.0


@inner_formula
def replicas(p: PlanDims) -> tuple[float, float]:
    """Ranks that hold the same parameters before sharding: dense ones, those of experts [-]."""
    ranks = p.dp * p.cp
    return ranks, p.tp * ranks / (p.etp * p.ep)


@inner_formula
def state_shards(p: PlanDims) -> tuple[float, float]:
    """Ranks that the optimizer's state is sharded over: of dense parameters, of experts [-]."""
    if p.zero < 1.0:
        return 1.0, 1.0
    ranks, edp = replicas(p)
    return ranks / p.instances, edp / p.instances


class StageLayers(NamedTuple):
    """The model's own layers on a stage, by kind [-]."""

    dense: float
    moe: float


class StageContent(NamedTuple):
    """What one device of a pipeline holds, all its chunks together [-]."""

    layers: float  # decoder layers
    dense: float  # layers with a dense block, prediction layers included
    moe: float  # layers with experts, prediction layers included
    prediction: float  # multi-token prediction layers
    embedding: float  # 1 with the embedding
    loss: float  # 1 with the head and the loss


@inner_formula
def moe_layers_before(a: ArchitectureDims, layer: float) -> float:
    """Layers with experts among the first ``layer`` [-]."""
    behind = max(0.0, layer - a.first_k_dense)
    return float(floor(behind / a.moe_every))


@inner_formula
def is_uneven(a: ArchitectureDims, p: PlanDims) -> bool:
    """Say whether the layers cannot be shared out equally over the virtual stages."""
    stages = p.pp * p.vpp
    return stages * float(floor(a.n_layers / stages)) != a.n_layers


@formula
def layers_before(a: ArchitectureDims, p: PlanDims, virtual_stage: float) -> float:
    """Count the decoder layers before a virtual stage of the balanced layout [-].

    Chunk sizes differ by at most one. The larger ones lie side by side from the second virtual
    stage on, or from the first on where all but one are larger: the last virtual stage, which has
    the head, is never a larger one, and the first one only if it must. Where ``pp * vpp`` divides
    the layers this is the equal layout.
    """
    stages = p.pp * p.vpp
    least = float(floor(a.n_layers / stages))
    larger = a.n_layers - least * stages
    first = 1.0 if larger < stages - 1.0 else 0.0
    return virtual_stage * least + max(0.0, min(virtual_stage - first, larger))


@inner_formula
def layers_of_stage(a: ArchitectureDims, p: PlanDims, stage: float) -> StageLayers:
    """Return the model's own layers on a stage of the balanced layout, by kind.

    Without interleaving a stage holds consecutive layers. With it, a stage holds ``vpp`` chunks
    that lie ``pp`` virtual stages apart.
    """
    uneven = is_uneven(a, p)
    chunk = a.n_layers / (p.pp * p.vpp)
    layers = a.n_layers / p.pp
    moe = 0.0
    if uneven:
        layers = 0.0
    for i in range(int(p.vpp)):
        virtual = i * p.pp + stage
        if uneven:
            first = layers_before(a, p, virtual)
            behind = layers_before(a, p, virtual + 1.0)
            layers += behind - first
        else:
            first = virtual * chunk
            behind = first + chunk
        moe += moe_layers_before(a, behind) - moe_layers_before(a, first)
    return StageLayers(layers - moe, moe)


@inner_formula
def dense_layers_of_stage(a: ArchitectureDims, p: PlanDims, stage: float) -> float:
    """Dense layers on a stage, of the model's own layers [-]."""
    return layers_of_stage(a, p, stage).dense


@inner_formula
def stage_content(a: ArchitectureDims, p: PlanDims, stage: float) -> StageContent:
    """Return what a stage of the balanced layout holds; the last one has prediction as well."""
    dense, moe = layers_of_stage(a, p, stage)
    last = 1.0 if stage == p.pp - 1.0 else 0.0
    prediction = last * (a.mtp_dense + a.mtp_moe)
    return StageContent(
        layers=dense + moe,
        dense=dense + last * a.mtp_dense,
        moe=moe + last * a.mtp_moe,
        prediction=prediction,
        embedding=1.0 if stage == 0.0 else 0.0,
        loss=last,
    )


@formula
def content_of(a: ArchitectureDims, first: float, behind: float, prediction: float) -> StageContent:
    """Return a chunk of the decoder layers ``first`` to ``behind - 1`` and prediction layers."""
    moe = moe_layers_before(a, behind) - moe_layers_before(a, first)
    sparse = 1.0 if a.mtp_moe > 0.0 else 0.0
    return StageContent(
        layers=behind - first,
        dense=behind - first - moe + (1.0 - sparse) * prediction,
        moe=moe + sparse * prediction,
        prediction=prediction,
        embedding=0.0,
        loss=0.0,
    )
