"""Fit of kernels that only move bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from perfmodel.calibration.machines import Device
from perfmodel.calibration.packs import Surface
from perfmodel.calibration.regression import Bound, Fit, Parameters, Regression, evaluate
from perfmodel.calibration.surface_fit import (
    BUSY,
    CACHED,
    CPU_CACHED,
    CPU_CALL,
    DISPATCH,
    JOIN,
    LAUNCH,
    Evidence,
    held_line,
    isin,
    join,
    span,
)
from perfmodel.calibration.tables import FloatArray, Table, Tables
from perfmodel.kernels import BF16_BYTES, ElementwiseSurface, elementwise_time

ELEMENTWISE = "elementwise.csv"

STREAM = "stream"
"""The copy into memory that is there already: it shows the bandwidth, and no step has it."""


@dataclass(frozen=True)
class ElementwiseFit:
    """Kernels that only move bytes, each timed alone where there is such a table.

    Where there is none: what a ReLU over one bf16 matrix adds to a chain of GEMMs.
    """

    surface: str = "elementwise"

    def fit(self, tables: Tables, device: Device) -> Surface:
        """Fit each operation's wall time, or the busy time that a ReLU adds to chains."""
        if tables.has(ELEMENTWISE):
            return self._alone(tables, device)
        table = tables.load(DISPATCH)
        shape = ("M", "N", "K")
        plain, both = table.where(mode="gemm"), table.where(mode="gemm_relu")
        busy = {
            row[:3]: row[3]
            for row in zip(*(plain[c].tolist() for c in (*shape, BUSY)), strict=True)
        }
        paired = np.array([row in busy for row in zip(*(both[c] for c in shape), strict=True)])
        both = both.take(paired)
        without = np.array(
            [busy[row] for row in zip(*(both[c].tolist() for c in shape), strict=True)]
        )
        added_s = (both[BUSY] - without) * 1e-6
        traffic = 2.0 * BF16_BYTES * both["M"] * both["N"]
        rates = device.rates

        def time(p: Parameters) -> FloatArray:
            s = ElementwiseSurface(**p)
            return evaluate(partial(elementwise_time, rates, s), traffic, 1.0)

        fit = Regression(
            {"fixed_s": Bound(2e-6, 1e-8, 1e-3), "bw_eff": CACHED},
            time,
            added_s,
            isin(both["M"], 8192),
            "the row with m = 8192",
        ).solve()
        return Evidence(
            self.surface,
            (DISPATCH,),
            f"{len(added_s)} pairs of chains: the busy time that a ReLU over (m, n) in bf16 adds "
            "to a GEMM. bw_eff may exceed 1: the small matrices stay in the cache.",
        ).surface_of(tables, fit.params, {"traffic_bytes": span(traffic)}, fit.errors)

    def _alone(self, tables: Tables, device: Device) -> Surface:
        """Fit wall = device on a CPU, else the p-norm of the host's launch and the device."""
        table = tables.load(ELEMENTWISE).where(dtype=device.dtype)
        fitted = table.without(op=[STREAM])
        bounds = {
            "fixed_s": CPU_CALL if device.blocking else Bound(2e-6, 1e-8, 1e-3),
            "bw_eff": CPU_CACHED if device.blocking else CACHED,
        }
        if not device.blocking:
            bounds["launch_s"] = LAUNCH
        fit = self._regression(fitted, device, bounds).solve()
        regimes = {}
        for op in sorted(table.words("op")):
            rows = table.where(op=op)
            errors = self._regression(rows, device, bounds).relative_errors(fit.params)
            name = f"{op} (not fitted)" if op == STREAM else op
            regimes[name] = Fit({}, errors, errors, "every row, under the constants of all").errors
        params = dict(fit.params)
        nuisance = {} if device.blocking else {"launch_s": params.pop("launch_s")}
        call = "device" if device.blocking else f"{JOIN:g}-norm of launch_s and device"
        return Evidence(
            self.surface,
            (ELEMENTWISE,),
            f"{len(fitted)} {device.dtype} rows of {', '.join(sorted(fitted.words('op')))}; wall "
            f"time of one call = {call}. Traffic is {BF16_BYTES:g} B an element, as the formulas "
            f"count it, of {device.element_bytes:g} that move.",
        ).surface_of(
            tables,
            params,
            {"traffic_bytes": span(traffic_of(fitted))},
            fit.errors,
            regimes=regimes,
            nuisance=nuisance,
        )

    @staticmethod
    def _regression(table: Table, device: Device, bounds: Mapping[str, Bound]) -> Regression:
        traffic, rates = traffic_of(table), device.rates

        def wall(p: Parameters) -> FloatArray:
            s = ElementwiseSurface(p["fixed_s"], p["bw_eff"])
            busy = evaluate(partial(elementwise_time, rates, s), traffic, 1.0)
            return join(p.get("launch_s", 0.0), busy)

        none = np.zeros(len(table), dtype=np.bool_)
        elements = table["elements_read"] + table["elements_written"]
        rows, text = held_line(none, "", elements, "elements moved")
        return Regression(bounds, wall, table["time_ms_med"] * 1e-3, rows, text)


def traffic_of(table: Table) -> FloatArray:
    """Return the traffic of each row as the formulas count it [B]."""
    return BF16_BYTES * (table["elements_read"] + table["elements_written"])
