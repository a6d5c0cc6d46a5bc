"""Time of one collective over a group of ranks placed on nodes.

A group is ``size`` ranks at a constant ``stride``; ranks are numbered node by node. It has
``ranks_per_node = max(1, devices_per_node / stride)`` members on each node (or all of them, when
it fits in one). Three regimes, each a surface of its own: inside a node; across nodes with every
device of the node in the group; across nodes strided, where each member has its own NIC.

Above the nodes a network may have up to two further levels (:class:`Level`): units of many nodes,
such as a rail group, a leaf or a data centre, with less bandwidth out of a unit than inside it. A
group that lies in one unit costs what it costs without the level.

``volume`` is the buffer of one rank [B]: the send buffer of an all-to-all, the full (gathered, or
not yet scattered) tensor of an all-gather, reduce-scatter or all-reduce. Times in seconds.
"""

from __future__ import annotations

from math import ceil, floor, inf, sqrt
from typing import NamedTuple

from perfmodel._jit import formula, inner_formula
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


class Level(NamedTuple):
    """A level of the network above the nodes: what it costs to leave one of its units."""

    devices: float  # in a unit, consecutive ranks; 0 where there is no such level
    bandwidth: float  # out of the unit, for each of its devices when all of them send [B/s]
    latency_s: float  # of a message that leaves the unit, besides what it has anyway [s]


NO_LEVEL = Level(0.0, inf, 0.0)


class Fabric(NamedTuple):
    """Collectives of a cluster: one surface each, the size of a node, and levels above it."""

    devices_per_node: float
    all_to_all: AllToAllSurface
    all_reduce: RingSurface
    reduce_scatter: RingSurface
    all_gather: RingSurface
    inner: Level = NO_LEVEL
    outer: Level = NO_LEVEL  # its units hold whole units of the inner level


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

    return fabric._replace(
        devices_per_node=devices,
        all_reduce=fewer(fabric.all_reduce),
        reduce_scatter=fewer(fabric.reduce_scatter),
        all_gather=fewer(fabric.all_gather),
    )


@inner_formula
def ranks_per_node(devices_per_node: float, size: float, stride: float) -> float:
    """Members of the group on each node, at most ``size`` [-]."""
    return min(size, max(1.0, float(floor(devices_per_node / stride))))


@inner_formula
def leaves(level: Level, size: float, stride: float) -> bool:
    """Say whether a group has members in more than one unit of a level."""
    return level.devices > 0.0 and ranks_per_node(level.devices, size, stride) < size


@formula
def all_to_all_over_level(
    level: Level, size: float, stride: float, volume: float, within: float
) -> float:
    """Time of an all-to-all that takes ``within`` seconds without a level of the network [s].

    Parts for other units leave through it, all at once.
    """
    if not leaves(level, size, stride):
        return within
    away = (size - ranks_per_node(level.devices, size, stride)) / size
    return max(within, volume * away / level.bandwidth) + level.latency_s


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
    time = max(intra, latency + ramped(volume, s.inter_ramp_bytes) * away / s.nic_bw)
    time = all_to_all_over_level(fabric.inner, size, stride, volume, time)
    return all_to_all_over_level(fabric.outer, size, stride, volume, time)


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
    time = max(intra, latency + ramped(away, s.inter_ramp_bytes) / s.nic_bw)
    time = dispatch_over_level(fabric.inner, size, stride, token_bytes, copies, time)
    return dispatch_over_level(fabric.outer, size, stride, token_bytes, copies, time)


@formula
def dispatch_over_level(
    level: Level, size: float, stride: float, token_bytes: float, copies: float, within: float
) -> float:
    """Time of a dispatch that takes ``within`` seconds without a level of the network [s].

    A token goes once to each other unit that has experts of it.
    """
    if not leaves(level, size, stride):
        return within
    units = size / ranks_per_node(level.devices, size, stride)
    away = token_bytes * distinct(units, copies) * (units - 1.0) / units
    return max(within, away / level.bandwidth) + level.latency_s


@inner_formula
def ring_over_nodes_time(
    s: RingSurface, devices_per_node: float, size: float, stride: float, volume: float
) -> float:
    """Time of an all-gather, reduce-scatter or all-reduce without levels above the nodes [s].

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


@inner_formula
def ring_over_level(
    s: RingSurface,
    level: Level,
    size: float,
    stride: float,
    volume: float,
    trips: float,
    within: float,
    inside: float,
) -> float:
    """Time of a ring collective that takes ``within`` seconds without a level of the network [s].

    The better of two ways. Flat: one ring over all members, which leaves each unit through the
    links of its own members there. By levels: scattered inside every unit, exchanged between those
    that hold the same part, gathered inside. A level never makes a group faster.

    ``inside`` is the time of the members of one unit; ``trips`` is 2 for an all-reduce, whose data
    goes round twice, else 1.
    """
    local = ranks_per_node(level.devices, size, stride)
    units = size / local
    passed = trips * (size - 1.0) / size * volume / (local * level.bandwidth)
    flat = max(within, passed) + trips * units * level.latency_s
    part = volume / local
    bandwidth = min(s.strided_bw, level.bandwidth / trips)
    exchanged = (units - 1.0) / units * ramped(part, s.strided_ramp_bytes) / bandwidth
    latency = s.strided_latency_s + trips * (units - 1.0) * level.latency_s
    return max(within, min(flat, inside + latency + exchanged))


@inner_formula
def ring_inside_time(
    s: RingSurface, fabric: Fabric, size: float, stride: float, volume: float, trips: float
) -> float:
    """Time of a ring collective over the nodes and the inner level [s]."""
    node = fabric.devices_per_node
    time = ring_over_nodes_time(s, node, size, stride, volume)
    if volume <= 0.0 or not leaves(fabric.inner, size, stride):
        return time
    local = ranks_per_node(fabric.inner.devices, size, stride)
    inside = ring_over_nodes_time(s, node, local, stride, volume)
    return ring_over_level(s, fabric.inner, size, stride, volume, trips, time, inside)


@inner_formula
def ring_over_levels_time(
    s: RingSurface, fabric: Fabric, size: float, stride: float, volume: float, trips: float
) -> float:
    """Time of a ring collective over all levels; ``trips`` as in :func:`ring_over_level` [s]."""
    time = ring_inside_time(s, fabric, size, stride, volume, trips)
    if volume <= 0.0 or not leaves(fabric.outer, size, stride):
        return time
    local = ranks_per_node(fabric.outer.devices, size, stride)
    inside = ring_inside_time(s, fabric, local, stride, volume, trips)
    return ring_over_level(s, fabric.outer, size, stride, volume, trips, time, inside)


@formula
def ring_time(s: RingSurface, fabric: Fabric, size: float, stride: float, volume: float) -> float:
    """Time of an all-gather or a reduce-scatter of ``volume`` bytes over all levels [s]."""
    return ring_over_levels_time(s, fabric, size, stride, volume, 1.0)


@formula
def all_reduce_time(fabric: Fabric, size: float, stride: float, volume: float) -> float:
    """Time of an all-reduce of ``volume`` bytes over all levels [s]."""
    return ring_over_levels_time(fabric.all_reduce, fabric, size, stride, volume, 2.0)


@inner_formula
def node_hop_time(fabric: Fabric, distance: float, volume: float) -> float:
    """Time to hand ``volume`` bytes to the rank ``distance`` away, inside a unit of a level [s].

    The link and NIC bandwidths and latencies are those of the all-to-all surface.
    """
    s = fabric.all_to_all
    if volume <= 0.0:
        return 0.0
    if distance < fabric.devices_per_node:
        return s.intra_latency_s + volume / s.link_bw
    return s.inter_latency_s * float((2.0 / 16.0) ** s.inter_exponent) + volume / s.nic_bw


@formula
def leaving_hop_time(fabric: Fabric, level: Level, within: float, volume: float) -> float:
    """Time of a hand-off that leaves a unit; ``within`` is that of one that stays in it [s]."""
    if volume <= 0.0:
        return 0.0
    hop = node_hop_time(fabric, fabric.devices_per_node, volume)
    return max(within, hop, volume / level.bandwidth) + level.latency_s


@formula
def point_to_point_time(fabric: Fabric, distance: float, volume: float, reach: float) -> float:
    """Time to hand ``volume`` bytes to the rank ``distance`` away [s].

    ``reach`` is how many consecutive ranks the ring or chain of such hand-offs covers: where that
    is more than a unit of a level, some hand-off leaves it, and the slowest one counts.
    """
    time = node_hop_time(fabric, distance, volume)
    if leaves(fabric.inner, reach, 1.0):
        time = leaving_hop_time(fabric, fabric.inner, time, volume)
    if leaves(fabric.outer, reach, 1.0):
        time = leaving_hop_time(fabric, fabric.outer, time, volume)
    return time


@inner_formula
def borders_left(level: Level, distance: float, ranks: float, rounds: float) -> float:
    """Count the hand-offs of a chain that leave a unit of a level; see :func:`chain_time` [-]."""
    if not leaves(level, ranks * distance, 1.0):
        return 0.0
    units = ceil(ranks * distance / level.devices)
    return min(ranks * rounds - 1.0, rounds * (units - 1.0) + rounds - 1.0)


@formula
def chain_time(
    fabric: Fabric, distance: float, ranks: float, rounds: float, volume: float
) -> float:
    """Time to hand ``volume`` bytes from rank to rank, ``ranks`` of them, ``rounds`` times [s].

    Ranks are ``distance`` apart and each round begins at the first again, so that there are
    ``ranks rounds - 1`` hand-offs. Only those that leave a unit pay for its level.
    """
    hop = node_hop_time(fabric, distance, volume)
    time = (ranks * rounds - 1.0) * hop
    left = borders_left(fabric.outer, distance, ranks, rounds)
    inner = max(left, borders_left(fabric.inner, distance, ranks, rounds))
    if inner <= 0.0:
        return time
    leaf = leaving_hop_time(fabric, fabric.inner, hop, volume)
    time += (inner - left) * (leaf - hop)
    if left > 0.0:
        time += left * (leaving_hop_time(fabric, fabric.outer, leaf, volume) - hop)
    return time
