"""Time of one collective over a group of ranks placed on nodes.

A group is ``size`` ranks at a constant ``stride``; ranks are numbered node by node. It has
``ranks_per_node = max(1, devices_per_node / stride)`` members on each node (or all of them, when
it fits in one). Three regimes, each a surface of its own: inside a node; across nodes with every
device of the node in the group; across nodes strided, where each member has its own NIC.

``volume`` is the buffer of one rank [B]: the send buffer of an all-to-all, the full (gathered, or
not yet scattered) tensor of an all-gather, reduce-scatter or all-reduce. Times in seconds.
"""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

from perfmodel._jit import formula
from perfmodel.kernels import ramped


class AllToAllSurface(NamedTuple):
    """All-to-all of equal parts."""

    intra_latency_s: float
    link_bw: float  # to peers inside the node [B/s]
    self_bw: float  # the part that stays on the device is copied [B/s]
    intra_ramp_bytes: float
    inter_latency_s: float  # at 16 ranks [s]
    inter_exponent: float  # latency grows as (size / 16)^exponent [-]
    nic_bw: float  # per device, to other nodes [B/s]
    inter_ramp_bytes: float


class RingSurface(NamedTuple):
    """All-reduce, reduce-scatter or all-gather: ``(n-1)/n`` of the volume, at a bus bandwidth.

    For an all-reduce the bandwidths are half of the usual bus bandwidth.
    """

    intra_latency_s: float
    intra_bw: float  # [B/s]
    intra_ramp_bytes: float
    inter_latency_s: float  # per ``devices_per_node`` ranks of the group [s]
    inter_bw: float  # [B/s]
    inter_ramp_bytes: float
    two_node_gain: float  # bandwidth of full nodes when there are only two, over that of more [-]
    strided_latency_s: float  # one device of each node in the group [s]
    strided_bw: float  # [B/s]
    strided_ramp_bytes: float


class Fabric(NamedTuple):
    """Collectives of a cluster: one surface each, and the size of a node."""

    devices_per_node: float
    all_to_all: AllToAllSurface
    all_reduce: RingSurface
    reduce_scatter: RingSurface
    all_gather: RingSurface


def with_devices_per_node(fabric: Fabric, devices: float) -> Fabric:
    """Return the fabric of nodes with fewer of their devices in use.

    A ring over all devices in use has their NICs only; its latency per rank is what it was.
    """
    if devices == fabric.devices_per_node:
        return fabric

    def fewer(s: RingSurface) -> RingSurface:
        return s._replace(
            inter_bw=min(s.inter_bw, devices * s.strided_bw),
            inter_latency_s=s.inter_latency_s * devices / fabric.devices_per_node,
        )

    return Fabric(
        devices,
        fabric.all_to_all,
        fewer(fabric.all_reduce),
        fewer(fabric.reduce_scatter),
        fewer(fabric.all_gather),
    )


@formula
def ranks_per_node(devices_per_node: float, size: float, stride: float) -> float:
    """Members of the group on each node, at most ``size`` [-]."""
    return min(size, max(1.0, devices_per_node // stride))


@formula
def all_to_all_time(fabric: Fabric, size: float, stride: float, volume: float) -> float:
    """Time of an all-to-all in which each rank sends ``volume`` bytes in ``size`` parts [s].

    A group that leaves the node takes at least as long as its members on one node alone would:
    with many devices per node and few ranks outside, the links and not the NICs set the pace.
    """
    if size <= 1.0 or volume <= 0.0:
        return 0.0
    s = fabric.all_to_all
    local = ranks_per_node(fabric.devices_per_node, size, stride)
    per_byte = (local - 1.0) / local / s.link_bw + 1.0 / local / s.self_bw
    intra = s.intra_latency_s + ramped(volume, s.intra_ramp_bytes) * per_byte
    if local >= size:
        return intra
    latency = s.inter_latency_s * float((size / 16.0) ** s.inter_exponent)
    away = (size - local) / size
    return max(intra, latency + ramped(volume, s.inter_ramp_bytes) * away / s.nic_bw)


@formula
def distinct(groups: float, copies: float) -> float:
    """Count the groups expected to hold one or more of ``copies`` independent choices [-]."""
    return groups * float(1.0 - (1.0 - 1.0 / groups) ** copies)


@formula
def all_to_all_once_time(
    fabric: Fabric, size: float, stride: float, token_bytes: float, copies: float
) -> float:
    """Time of a dispatch that sends each token once to a node and forwards it inside [s].

    ``token_bytes`` are a rank's tokens, one copy of each; the choices of a token are taken as
    independent and balanced. DeepEP and HybridEP work so.
    """
    if size <= 1.0 or token_bytes <= 0.0:
        return 0.0
    s = fabric.all_to_all
    local = ranks_per_node(fabric.devices_per_node, size, stride)
    received = token_bytes * distinct(size, copies)
    per_byte = (local - 1.0) / local / s.link_bw + 1.0 / local / s.self_bw
    intra = s.intra_latency_s + ramped(received, s.intra_ramp_bytes) * per_byte
    if local >= size:
        return intra
    nodes = size / local
    away = token_bytes * distinct(nodes, copies) * (nodes - 1.0) / nodes
    latency = s.inter_latency_s * float((size / 16.0) ** s.inter_exponent)
    return max(intra, latency + ramped(away, s.inter_ramp_bytes) / s.nic_bw)


@formula
def ring_time(
    s: RingSurface, devices_per_node: float, size: float, stride: float, volume: float
) -> float:
    """Time of an all-gather, reduce-scatter or all-reduce of ``volume`` bytes [s].

    Across full nodes the latency, which grows with the number of ranks, hides behind the
    transfer: the two join in quadrature. Inside a node and between single devices they add.
    Two nodes can exchange halves of an all-reduce directly, which is ``two_node_gain`` faster.
    Between the strided and the contiguous regime the bandwidth is that of the group's NICs,
    ``ranks_per_node * strided_bw``, and never more than that of the contiguous group.
    """
    if size <= 1.0 or volume <= 0.0:
        return 0.0
    share = (size - 1.0) / size
    local = ranks_per_node(devices_per_node, size, stride)
    intra = s.intra_latency_s + share * ramped(volume, s.intra_ramp_bytes) / s.intra_bw
    if local >= size:
        return intra
    latency = s.inter_latency_s * size / devices_per_node
    if local >= devices_per_node:
        bandwidth = s.inter_bw * (s.two_node_gain if size <= 2.0 * local else 1.0)
        transfer = share * ramped(volume, s.inter_ramp_bytes) / bandwidth
        return max(intra, sqrt(latency * latency + transfer * transfer))
    bandwidth = min(s.inter_bw, local * s.strided_bw)
    latency = max(s.strided_latency_s, latency)
    return latency + share * ramped(volume, s.strided_ramp_bytes) / bandwidth


@formula
def point_to_point_time(fabric: Fabric, distance: float, volume: float) -> float:
    """Time to hand ``volume`` bytes to the rank ``distance`` away [s].

    The link and NIC bandwidths and latencies are those of the all-to-all surface.
    """
    s = fabric.all_to_all
    if volume <= 0.0:
        return 0.0
    if distance < fabric.devices_per_node:
        return s.intra_latency_s + volume / s.link_bw
    return s.inter_latency_s * float((2.0 / 16.0) ** s.inter_exponent) + volume / s.nic_bw
