"""All constants of one kind of machine, as the nested named tuples that the formulas take."""

from __future__ import annotations

from typing import NamedTuple

from perfmodel.collectives import Fabric
from perfmodel.kernels import (
    NO_CAST,
    AttentionSurface,
    Cast,
    DeviceRates,
    ElementwiseSurface,
    GemmSurface,
    GroupedGemmSurface,
    HeadSurface,
    TopKSurface,
)


class Host(NamedTuple):
    """What the host offers each device when all of its devices ask at once."""

    link_bw: float  # between device and host, one direction [B/s]
    memory_bw: float  # of the host's memory [B/s]


ASSUMED_HOST = Host(link_bw=32e9, memory_bw=51.2e9)
"""For packs that say nothing of it: PCIe Gen4 x16, and 16 channels of DDR4-3200 over 8 devices."""


class Hardware(NamedTuple):
    """What a hardware pack says, in the form that both Python and numba read.

    ``gemm`` and the grouped surfaces are those of one precision: their ``flop_eff`` is a fraction
    of the bf16 peak and may exceed 1 below it.
    """

    device: DeviceRates
    gemm: GemmSurface
    grouped_forward: GroupedGemmSurface
    grouped_backward: GroupedGemmSurface
    attention_forward: AttentionSurface
    attention_backward: AttentionSurface
    head: HeadSurface
    topk: TopKSurface
    elementwise: ElementwiseSurface
    fabric: Fabric
    cast: Cast = NO_CAST  # of what linear layers and experts multiply
    host: Host = ASSUMED_HOST  # for the part of the optimizer that is there
    blocking: float = 0.0  # 1 where the host computes itself, so that its time and kernels' add
