"""The surfaces that a hardware pack must hold: their constants and the variables they depend on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from perfmodel.collectives import AllToAllSurface, RingSurface
from perfmodel.kernels import (
    AttentionSurface,
    ElementwiseSurface,
    GemmSurface,
    GroupedGemmSurface,
    HeadSurface,
    TopKSurface,
)

_ACROSS = ("inter_", "nic_", "strided_", "two_node_")


@dataclass(frozen=True)
class SurfaceKind:
    """One kind of surface: the named tuple of its constants and the names of its variables."""

    constants: type[Any]  # a NamedTuple of floats
    variables: tuple[str, ...]  # arguments of its formula
    may_be_zero: frozenset[str]  # constants that add; the others divide

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the constants that a pack states: those without a value of their own."""
        given = self.constants._field_defaults
        return tuple(name for name in self.constants._fields if name not in given)

    @property
    def across(self) -> tuple[str, ...]:
        """Those of them that price groups over several nodes; a pack may lack all of these."""
        return tuple(name for name in self.parameters if name.startswith(_ACROSS))


_GROUPED = ("n_gemms", "rows", "n", "k")
_ATTENTION = ("sequences", "heads", "seq_len", "head_dim")
_GROUP = ("size", "stride", "volume")


def _kind(constants: type[Any], variables: tuple[str, ...], *may_be_zero: str) -> SurfaceKind:
    latencies = [name for name in constants._fields if name.endswith(("_s", "_ramp_bytes"))]
    additive = [name for name in latencies if not name.endswith("_per_s")]
    return SurfaceKind(constants, variables, frozenset([*additive, *may_be_zero]))


SURFACES = {
    "gemm": _kind(GemmSurface, ("m", "n", "k"), "k_half", "mn_half", "droop"),
    "grouped_forward": _kind(GroupedGemmSurface, _GROUPED),
    "grouped_backward": _kind(GroupedGemmSurface, _GROUPED),
    "attention_forward": _kind(AttentionSurface, _ATTENTION, "seq_half"),
    "attention_backward": _kind(AttentionSurface, _ATTENTION, "seq_half"),
    "head": _kind(
        HeadSurface,
        ("tokens", "d_model", "vocab"),
        "ce_forward_passes",
        "ce_backward_passes",
    ),
    "topk": _kind(TopKSurface, ("tokens", "n_experts")),
    "elementwise": _kind(ElementwiseSurface, ("traffic_bytes",)),
    "all_to_all": _kind(AllToAllSurface, _GROUP, "inter_exponent"),
    "all_reduce": _kind(RingSurface, _GROUP),
    "reduce_scatter": _kind(RingSurface, _GROUP),
    "all_gather": _kind(RingSurface, _GROUP),
}
"""Name of each surface in a pack, in the order in which packs list them."""

COLLECTIVES = ("all_to_all", "all_reduce", "reduce_scatter", "all_gather")
"""Surfaces that a pack of a single device may lack."""

GEMM_FP8 = "gemm_fp8"

OPTIONAL = {GEMM_FP8: SURFACES["gemm"]}
"""Surfaces that a pack may lack; the dense product in fp8 has ``flop_eff`` of the fp8 peak."""

KINDS = SURFACES | OPTIONAL
