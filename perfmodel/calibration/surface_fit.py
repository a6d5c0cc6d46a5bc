"""What the fit of one surface is: rows in, a surface with its evidence out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from perfmodel.calibration.machines import Device
from perfmodel.calibration.packs import FitErrors, Policy, Surface
from perfmodel.calibration.regression import Bound
from perfmodel.calibration.surfaces import KINDS
from perfmodel.calibration.tables import BoolArray, FloatArray, Tables
from perfmodel.sources import Source

Range = tuple[float, float]

DISPATCH = "dispatch_gap.csv"
BUSY = "gpu_active_us_per_kernel"

LAUNCH = Bound(2e-5, 1e-7, 1e-2)
EFFICIENCY = Bound(0.6, 0.02, 1.0)
EFFICIENCY_SEEN = Bound(0.6, 0.02, 1.5)  # of the fastest product seen; the asymptote is above it
CACHED = Bound(0.8, 0.02, 1.3)  # traffic is counted as if no cache helped; above 1 it did
CPU_CALL = Bound(1e-5, 1e-7, 1e-2)  # of one call besides its work, on a CPU [s]
CPU_CACHED = Bound(0.5, 0.01, 1.5)  # the same on a CPU, whose caches hold most operands


JOIN = 4.0  # exponent that joins the host's and the device's share of one timed call [-]


def join(host_s: float, device: FloatArray) -> FloatArray:
    """Return the time of a call that ends when the slower of host and device does, smoothly."""
    return np.asarray((host_s**JOIN + device**JOIN) ** (1.0 / JOIN))


class SurfaceFit(Protocol):
    """Selects rows of the tables, predicts what was timed, fits, and states errors."""

    @property
    def surface(self) -> str:
        """Name of the surface in a pack."""

    def fit(self, tables: Tables, device: Device) -> Surface:
        """Return the fitted surface."""


@dataclass(frozen=True)
class Evidence:
    """Which surface, from which tables, and how."""

    surface: str
    tables: tuple[str, ...]
    provenance: str

    def surface_of(
        self,
        tables: Tables,
        params: Mapping[str, float],
        ranges: Mapping[str, Range],
        errors: FitErrors,
        *,
        regimes: Mapping[str, FitErrors] | None = None,
        nuisance: Mapping[str, float] | None = None,
        beyond: Mapping[str, Policy] | None = None,
    ) -> Surface:
        """Put the record of the surface together; what ``beyond`` leaves out is flagged."""
        kind = KINDS[self.surface]
        policies: dict[str, Policy] = dict.fromkeys(kind.variables, "flag")
        return Surface(
            source=Source.FITTED,
            provenance=self.provenance,
            tables={name: tables.sha256(name) for name in self.tables},
            params={name: params[name] for name in kind.parameters if name in params},
            nuisance=dict(nuisance or {}),
            ranges=dict(ranges),
            beyond={**policies, **(beyond or {})},
            errors=errors,
            regimes=dict(regimes or {}),
        )


def efficiency_of(device: Device) -> Bound:
    """Return the bound of a fraction of the device's peak, a datasheet's or the fastest row's."""
    return EFFICIENCY_SEEN if device.peak_flops.source is Source.MEASURED else EFFICIENCY


def span(values: FloatArray) -> Range:
    """Return the smallest and the largest value."""
    return float(values.min()), float(values.max())


def held_line(lines: BoolArray, text: str, values: FloatArray, what: str) -> tuple[BoolArray, str]:
    """Return the rows that errors are stated on, and what to say of them.

    They are ``lines``; tables of a small machine have none of these, and then they are the rows
    of the value in the middle of all ``values``.
    """
    if lines.any():
        return lines, text
    distinct = np.unique(values)
    middle = float(distinct[len(distinct) // 2])
    return isin(values, middle), f"all rows with {what} of {middle:g}"


def isin(values: FloatArray, *wanted: float) -> BoolArray:
    """Mark the values that are among the wanted ones."""
    return np.isin(values, wanted)


def floor_of(given: float | None, tables: Tables) -> tuple[float, tuple[str, ...], str]:
    """Return the floor of any kernel [s], the tables it rests on, and what to say of it."""
    if given is not None:
        return given, (), "is that of p6-b200: chains of kernels were not timed on this device"
    return shortest_kernel_s(tables), (DISPATCH,), ""


def shortest_kernel_s(tables: Tables) -> float:
    """Return the shortest time for which any kernel kept the device busy [s]."""
    gemms = tables.load(DISPATCH).where(mode="gemm")
    return round(float(gemms[BUSY].min()) * 1e-6, 12)
