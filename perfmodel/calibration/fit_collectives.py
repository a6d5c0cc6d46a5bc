"""Fits of the collectives, one regime after the other: inside a node, across nodes, strided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from perfmodel.calibration.packs import Device, Surface
from perfmodel.calibration.regression import Bound, Fit, Parameters, Regression, evaluate, pooled
from perfmodel.calibration.surface_fit import Evidence, isin, span
from perfmodel.calibration.tables import BoolArray, FloatArray, Table, Tables
from perfmodel.collectives import (
    AllToAllSurface,
    Fabric,
    RingSurface,
    all_to_all_time,
    ring_over_nodes_time,
)

ALL_TO_ALL = "all_to_all.csv"
RINGS = "dp_collectives.csv"

LATENCY = Bound(1e-4, 1e-7, 1e-2)
RAMP = Bound(1e6, 1.0, 1e10)
LINK_BW = Bound(5e11, 1e9, 1e14)
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
        """Fit the part inside a node, then the part across nodes on top of it."""
        table = tables.load(ALL_TO_ALL)
        size, volume = table["group_size"], table["buffer_bytes"]
        outlier = np.zeros(len(table), dtype=np.bool_)
        for group, buffer in OUTLIERS:
            outlier |= isin(size, group) & isin(volume, buffer)
        table = table.take(~outlier)
        size, volume = table["group_size"], table["buffer_bytes"]
        inside = size <= self.devices_per_node
        within = self._regression(
            table.take(inside),
            {
                "intra_latency_s": LATENCY,
                "link_bw": LINK_BW,
                "self_bw": LINK_BW,
                "intra_ramp_bytes": RAMP,
            },
            dict.fromkeys(AllToAllSurface._fields, 1.0),
            isin(size[inside], 4),
            "all rows of 4 ranks",
        ).solve()
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

    def _regression(
        self,
        table: Table,
        bounds: Mapping[str, Bound],
        fixed: Parameters,
        held_out: BoolArray,
        held_out_text: str,
    ) -> Regression:
        unused = RingSurface(*[1.0] * len(RingSurface._fields))

        def time(p: Parameters) -> FloatArray:
            s = AllToAllSurface(**{**fixed, **p})
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
        """Fit inside a node, across full nodes on top of it, and between single devices."""
        table = tables.load(RINGS).where(collective=self.surface)
        contiguous = table.where(layout="contiguous")
        inside = contiguous["group_size"] <= self.devices_per_node
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

        held_out = isin(volumes, *SIZES_HELD_OUT)
        return Regression(bounds, time, table["time_ms_p50"] * 1e-3, held_out, SIZES_TEXT)


def collective_fits(devices_per_node: int) -> tuple[AllToAllFit | RingFit, ...]:
    """Return the fits of the collectives of a machine."""
    return (
        AllToAllFit(devices_per_node),
        RingFit("all_reduce", devices_per_node, Bound(1.5, 1.0, 4.0)),
        RingFit("reduce_scatter", devices_per_node),
        RingFit("all_gather", devices_per_node),
    )
