"""Levels of a network above the nodes, as a cluster states them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Self

from pydantic import Field, model_validator

from perfmodel.collectives import NO_LEVEL, Fabric, Level
from perfmodel.errors import PerfmodelError
from perfmodel.frozen import Frozen
from perfmodel.sources import Source

__all__ = ["MAX_LEVELS", "NetworkLevel", "with_levels"]

MAX_LEVELS = 2

Bandwidth = Annotated[float, Field(ge=1.0, le=1e18, allow_inf_nan=False, strict=True)]


class NetworkLevel(Frozen):
    """Units of many nodes, and what it costs to leave one: a rail group, a leaf, a data centre.

    Attributes
    ----------
    name : str
        For messages.
    devices : int
        Devices of a unit, consecutive ranks: whole nodes, and whole units of the level below.
    bandwidth_bytes_per_s : float, optional
        Out of a unit, in one direction, for each of its devices when all of them send [B/s]; or
    unit_bandwidth_bytes_per_s : float, optional
        out of a whole unit, in one direction [B/s]; or
    oversubscription : float, optional
        bandwidth of a device's NIC over its share of the way out, at least 1 [-].
    latency_s : float
        Of a message that leaves the unit, besides what it has anyway, one way [s].
    source : Source
        What these numbers rest on.
    """

    name: Annotated[str, Field(min_length=1, max_length=60)]
    devices: Annotated[int, Field(ge=2, le=2**30, strict=True)]
    bandwidth_bytes_per_s: Bandwidth | None = None
    unit_bandwidth_bytes_per_s: Bandwidth | None = None
    oversubscription: Annotated[float, Field(ge=1.0, le=1e6, strict=True)] | None = None
    latency_s: Annotated[float, Field(ge=0.0, le=60.0, strict=True)] = 0.0
    source: Source = Source.ASSUMED

    @model_validator(mode="after")
    def _one_bandwidth(self) -> Self:
        names = ("bandwidth_bytes_per_s", "unit_bandwidth_bytes_per_s", "oversubscription")
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"level {self.name!r} must have one of {', '.join(names)}, not {len(given)}"
            )
        return self

    def constants(self, nic_bw: float | None) -> Level:
        """Return the level as the formulas take it.

        Parameters
        ----------
        nic_bw : float, optional
            Datasheet bandwidth of one device's NIC [B/s]; read with `oversubscription` only.

        Raises
        ------
        PerfmodelError
            `oversubscription` of a NIC whose bandwidth is not known.
        """
        if self.unit_bandwidth_bytes_per_s is not None:
            bandwidth = self.unit_bandwidth_bytes_per_s / self.devices
        elif self.bandwidth_bytes_per_s is not None:
            bandwidth = self.bandwidth_bytes_per_s
        elif nic_bw is not None and self.oversubscription is not None:
            bandwidth = nic_bw / self.oversubscription
        else:
            raise PerfmodelError(
                f"cluster level {self.name!r}: oversubscription={self.oversubscription:g} needs "
                "the bandwidth of a NIC, which the hardware pack does not state; give "
                "bandwidth_bytes_per_s."
            )
        return Level(float(self.devices), bandwidth, self.latency_s)


def _require_whole_units(
    levels: Sequence[NetworkLevel], devices_per_node: int, n_devices: int
) -> None:
    name, part = "a node", devices_per_node
    for level in levels:
        if level.devices % part:
            down = level.devices // part * part
            near = f"{down} or {down + part}" if down else f"{part}"
            raise PerfmodelError(
                f"cluster level {level.name!r}: devices={level.devices} must be a multiple of the "
                f"{part} of {name}; nearest: {near}."
            )
        name, part = f"level {level.name!r}", level.devices
        if n_devices > part and n_devices % part:
            raise PerfmodelError(
                f"cluster level {level.name!r}: the {n_devices} devices of the cluster must be a "
                f"multiple of its devices={part}."
            )


def with_levels(
    fabric: Fabric,
    levels: Sequence[NetworkLevel],
    devices_per_node: int,
    n_devices: int,
    nic_bw: float | None,
) -> Fabric:
    """Return a fabric with levels above the nodes, smallest units first.

    A level with one unit for the whole cluster is never left, and dropped.

    Raises
    ------
    PerfmodelError
        Units that do not hold whole units of what is below them, a number of devices that is not
        whole units, or an outer level with more bandwidth than an inner one.
    """
    _require_whole_units(levels, devices_per_node, n_devices)
    kept = [level for level in levels if level.devices < n_devices]
    found = [level.constants(nic_bw) for level in kept]
    if len(found) > 1 and found[1].bandwidth > found[0].bandwidth:
        raise PerfmodelError(
            f"cluster level {kept[1].name!r}: {found[1].bandwidth:g} B/s out of a unit for each "
            f"device must be at most the {found[0].bandwidth:g} of level {kept[0].name!r} in it."
        )
    inner, outer = [*found, NO_LEVEL, NO_LEVEL][:MAX_LEVELS]
    return fabric._replace(inner=inner, outer=outer)
