"""Fits of the collectives, one regime after the other: inside a node, across nodes, strided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from perfmodel.calibration.machines import Device
from perfmodel.calibration.packs import Surface
from perfmodel.calibration.regression import Bound, Fit, Parameters, Regression, evaluate, pooled
from perfmodel.calibration.surface_fit import Evidence, held_line, isin, span
from perfmodel.calibration.tables import BoolArray, FloatArray, Table, Tables
from perfmodel.collectives import (
    AllToAllSurface,
    Fabric,
    RingSurface,
    all_to_all_time,
    ring_over_nodes_time,
)
from perfmodel.kernels import BF16_BYTES

ALL_TO_ALL = "all_to_all.csv"
RINGS = "dp_collectives.csv"

LATENCY = Bound(1e-4, 1e-7, 1e-2)
RAMP = Bound(1e6, 1.0, 1e10)
LINK_BW = Bound(5e11, 1e9, 1e14)
CPU_BW = Bound(2e9, 1e6, 1e13)  # between processes of one machine
NIC_BW = Bound(5e10, 1e9, 1e13)

# (group size, bytes): 7.4 ms in two runs, between neighbours on a line that gives 3.5 ms; the
# library picks another algorithm at that one size, which a smooth surface cannot follow.
OUTLIERS = ((16.0, 302e6),)

SIZES_HELD_OUT = (64e6, 512e6)
SIZES_TEXT = "all rows of 64 MB and 512 MB"


@dataclass(frozen=True)
class AllToAllFit:
    """All-to-all over contiguous ranks."""

    devices_per_node: int
    surface: str = "all_to_all"

    def fit(self, tables: Tables, device: Device) -> Surface:
        """Fit the part inside a node, then the part across nodes on top of it, where there is one.

        What a rank sends is activations, which the formulas count at 2 B an element.
        """
        table = with_volume(tables.load(ALL_TO_ALL), BF16_BYTES / device.element_bytes)
        size, volume = table["group_size"], table["buffer_bytes"]
        outlier = np.zeros(len(table), dtype=np.bool_)
        for group, buffer in OUTLIERS:
            outlier |= isin(size, group) & isin(volume, buffer)
        table = table.take(~outlier)
        size, volume = table["group_size"], table["buffer_bytes"]
        inside = size <= self.devices_per_node
        if inside.all():
            return self._one_node(tables, device, table)
        within = self._within(device, table.take(inside))
        bounds = {
            "inter_latency_s": LATENCY,
            "inter_exponent": Bound(0.5, 0.01, 2.0),
            "nic_bw": NIC_BW,
            "inter_ramp_bytes": RAMP,
        }
        across_rows = table.take(~inside)
        held_sizes = isin(volume[~inside], *SIZES_HELD_OUT)
        across = self._regression(
            across_rows, bounds, within.params, held_sizes, SIZES_TEXT
        ).solve()
        largest = size[~inside] == size.max()
        free = {name: bound for name, bound in bounds.items() if name != "inter_exponent"}
        fixed = {**within.params, "inter_exponent": across.params["inter_exponent"]}
        text = f"all rows of {size.max():g} ranks, with inter_exponent given"
        beyond = self._regression(across_rows, free, fixed, largest, text).solve()
        return Evidence(
            self.surface,
            (ALL_TO_ALL,),
            f"{len(table)} rows, contiguous ranks, both runs; left out: {outlier.sum()} rows of "
            "302 MB over 16 ranks, twice as slow in both runs as the line through their "
            "neighbours (another algorithm at that one size).",
        ).surface_of(
            tables,
            {**within.params, **across.params},
            {"size": span(size), "stride": (1.0, 1.0), "volume": span(volume)},
            pooled([within, across]),
            regimes={
                "inside a node": within.errors,
                "across nodes": across.errors,
                "across nodes, larger group": beyond.errors,
            },
            beyond={"size": "refuse"},
        )

    def _within(self, device: Device, table: Table) -> Fit:
        """Fit the part inside a node; one size of group cannot tell the link from the copy."""
        link = CPU_BW if device.blocking else LINK_BW
        bounds = {
            "intra_latency_s": LATENCY,
            "link_bw": link,
            "self_bw": link,
            "intra_ramp_bytes": RAMP,
        }
        size, volume = table["group_size"], table["buffer_bytes"]
        tied = len(np.unique(size)) == 1
        if tied:
            del bounds["self_bw"]
        fours = isin(size, 4) & (not tied)
        rows, text = held_line(fours, "all rows of 4 ranks", volume, "a volume")
        ones = dict.fromkeys(AllToAllSurface._fields, 1.0)
        fit = self._regression(table, bounds, ones, rows, text, tied=tied).solve()
        if tied:
            fit.params["self_bw"] = fit.params["link_bw"]
        return fit

    def _one_node(self, tables: Tables, device: Device, table: Table) -> Surface:
        within = self._within(device, table)
        size, volume = table["group_size"], table["buffer_bytes"]
        return Evidence(
            self.surface,
            (ALL_TO_ALL,),
            f"{len(table)} rows of ranks of one node; none crosses nodes, and the pack prices "
            f"none that does. Volumes are {BF16_BYTES:g} B an element of what was exchanged.",
        ).surface_of(
            tables,
            within.params,
            {"size": span(size), "stride": (1.0, 1.0), "volume": span(volume)},
            within.errors,
            beyond={"size": "refuse"},
        )

    def _regression(
        self,
        table: Table,
        bounds: Mapping[str, Bound],
        fixed: Parameters,
        held_out: BoolArray,
        held_out_text: str,
        *,
        tied: bool = False,
    ) -> Regression:
        unused = RingSurface(*[1.0] * len(RingSurface._fields))

        def time(p: Parameters) -> FloatArray:
            free = {**p, "self_bw": p["link_bw"]} if tied else p
            s = AllToAllSurface(**{**fixed, **free})
            fabric = Fabric(float(self.devices_per_node), s, unused, unused, unused)
            return evaluate(
                lambda size, volume: all_to_all_time(fabric, size, 1.0, volume),
                table["group_size"],
                table["buffer_bytes"],
            )

        return Regression(bounds, time, table["time_ms_p50"] * 1e-3, held_out, held_out_text)


@dataclass(frozen=True)
class RingFit:
    """All-reduce, reduce-scatter or all-gather, in three regimes."""

    surface: str
    devices_per_node: int
    two_node_gain: Bound | None = None  # free where given, 1 where not

    def fit(self, tables: Tables, device: Device) -> Surface:
        """Fit inside a node, across full nodes on top of it, and between single devices.

        Rows of one node alone give the first, and the surface lacks the others.
        """
        table = tables.load(RINGS).where(collective=self.surface)
        contiguous = table.where(layout="contiguous")
        inside = contiguous["group_size"] <= self.devices_per_node
        alone = inside.all() and table.words("layout") == {"contiguous"}
        if alone:
            return self._one_node(tables, device, contiguous)
        strided = table.where(layout=f"stride{self.devices_per_node}")
        regimes: dict[str, Fit] = {}
        params = dict.fromkeys(RingSurface._fields, 1.0)
        for regime, prefix, rows, stride, bandwidth in (
            ("inside a node", "intra", contiguous.take(inside), 1.0, LINK_BW),
            ("across full nodes", "inter", contiguous.take(~inside), 1.0, LINK_BW),
            ("one device per node", "strided", strided, float(self.devices_per_node), NIC_BW),
        ):
            bounds = {
                f"{prefix}_latency_s": LATENCY,
                f"{prefix}_bw": bandwidth,
                f"{prefix}_ramp_bytes": RAMP,
            }
            if prefix == "inter" and self.two_node_gain is not None:
                bounds["two_node_gain"] = self.two_node_gain
            fit = self._regression(rows, bounds, params, stride).solve()
            regimes[regime] = fit
            params.update(fit.params)
        return Evidence(
            self.surface,
            (RINGS,),
            f"{len(table)} rows: contiguous groups of 8 to 32 ranks and one device of each of 2 "
            "or 4 nodes, each regime with its own parameters. Groups with some of a node's "
            "devices were not measured.",
        ).surface_of(
            tables,
            params,
            {
                "size": span(table["group_size"]),
                "stride": (1.0, float(self.devices_per_node)),
                "volume": span(table["payload_bytes"]),
            },
            pooled(regimes.values()),
            regimes={name: fit.errors for name, fit in regimes.items()},
        )

    def _one_node(self, tables: Tables, device: Device, table: Table) -> Surface:
        bounds = {
            "intra_latency_s": LATENCY,
            "intra_bw": CPU_BW if device.blocking else LINK_BW,
            "intra_ramp_bytes": RAMP,
        }
        fit = self._regression(table, bounds, dict.fromkeys(RingSurface._fields, 1.0), 1.0).solve()
        return Evidence(
            self.surface,
            (RINGS,),
            f"{len(table)} rows of contiguous ranks of one node; none crosses nodes, and the pack "
            "prices none that does.",
        ).surface_of(
            tables,
            fit.params,
            {
                "size": span(table["group_size"]),
                "stride": (1.0, 1.0),
                "volume": span(table["payload_bytes"]),
            },
            fit.errors,
        )

    def _regression(
        self, table: Table, bounds: Mapping[str, Bound], fixed: Parameters, stride: float
    ) -> Regression:
        sizes, volumes = table["group_size"], table["payload_bytes"]
        known = dict(fixed)

        def time(p: Parameters) -> FloatArray:
            s = RingSurface(**{**known, **p})
            nodes = float(self.devices_per_node)
            return evaluate(
                lambda size, volume: ring_over_nodes_time(s, nodes, size, stride, volume),
                sizes,
                volumes,
            )

        lines = isin(volumes, *SIZES_HELD_OUT)
        rows, text = held_line(lines, SIZES_TEXT, volumes, "a volume")
        return Regression(bounds, time, table["time_ms_p50"] * 1e-3, rows, text)


def has_collective(tables: Tables, surface: str) -> bool:
    """Whether the tables have rows of a collective on the device."""
    if surface == "all_to_all":
        return tables.has(ALL_TO_ALL)
    return tables.has(RINGS) and surface in tables.load(RINGS).words("collective")


def with_volume(table: Table, factor: float) -> Table:
    """Return the table with its send buffers multiplied [B]."""
    return Table(table.name, {**table.columns, "buffer_bytes": factor * table["buffer_bytes"]})


def collective_fits(devices_per_node: int) -> tuple[AllToAllFit | RingFit, ...]:
    """Return the fits of the collectives of a machine."""
    return (
        AllToAllFit(devices_per_node),
        RingFit("all_reduce", devices_per_node, Bound(1.5, 1.0, 4.0)),
        RingFit("reduce_scatter", devices_per_node),
        RingFit("all_gather", devices_per_node),
    )
