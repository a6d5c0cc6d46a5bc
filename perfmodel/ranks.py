"""The device meshes that a plan makes, in Megatron-Core's default order of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from perfmodel.errors import PerfmodelError
from perfmodel.rules import DERIVED, explain

if TYPE_CHECKING:
    from perfmodel.plan import Plan

__all__ = ["Mesh"]


@dataclass(frozen=True, slots=True)
class Mesh:
    """Where the ranks of each group lie, in Megatron-Core's default order.

    The same devices are seen twice. Dense layers see ``pp x dp x cp x tp`` and routed experts
    ``pp x edp x ep x etp``, each with its last axis innermost: neighbours along an axis are a
    stride of that axis apart.
    """

    tp: int
    cp: int
    dp: int
    etp: int
    ep: int
    edp: int
    pp: int

    @classmethod
    def of(cls, plan: Plan) -> Mesh:
        """Build the meshes of a plan whose expert mesh tiles a pipeline stage."""
        degrees = {name: int(getattr(plan, name)) for name in ("tp", "cp", "dp", "etp", "ep", "pp")}
        edp = DERIVED["edp"]
        if not edp.defined.holds(degrees):
            raise PerfmodelError(explain(edp.defined, degrees, "ep")[0])
        return cls(**degrees, edp=int(edp.value(degrees)))

    @property
    def world(self) -> int:
        """Number of devices."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def tp_stride(self) -> int:
        """Ranks between neighbours of a tensor-parallel group."""
        return 1

    @property
    def cp_stride(self) -> int:
        """Ranks between neighbours of a context-parallel group."""
        return self.tp

    @property
    def dp_stride(self) -> int:
        """Ranks between neighbours of a data-parallel group."""
        return self.tp * self.cp

    @property
    def etp_stride(self) -> int:
        """Ranks between neighbours of an expert-tensor-parallel group."""
        return 1

    @property
    def ep_stride(self) -> int:
        """Ranks between neighbours of an expert-parallel group."""
        return self.etp

    @property
    def edp_stride(self) -> int:
        """Ranks between neighbours of an expert-data-parallel group."""
        return self.etp * self.ep

    @property
    def pp_stride(self) -> int:
        """Ranks between neighbouring pipeline stages, outermost in both meshes."""
        return self.world // self.pp
