"""A plan as the formulas take it, and how layers fall on its stages."""

from __future__ import annotations

from typing import NamedTuple

from perfmodel._jit import formula
from perfmodel.architecture import ArchitectureDims


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


@formula
def dense_layers_of_stage(a: ArchitectureDims, p: PlanDims, stage: float) -> float:
    """Dense layers on a stage: the first ``first_k_dense`` layers, in order [-].

    Without interleaving a stage holds consecutive layers. With it, a stage holds ``vpp`` chunks
    that lie ``n_layers / vpp`` apart.
    """
    chunk = a.n_layers / (p.pp * p.vpp)
    count = 0.0
    for i in range(int(p.vpp)):
        first = (i * p.pp + stage) * chunk
        count += min(chunk, max(0.0, a.first_k_dense - first))
    return count
