"""Fits of dense and grouped GEMMs: which rows, what was timed, which bounds."""

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
    DISPATCH,
    EFFICIENCY,
    LAUNCH,
    Evidence,
    efficiency_of,
    floor_of,
    isin,
    span,
)
from perfmodel.calibration.surfaces import GEMM_FP8
from perfmodel.calibration.tables import BoolArray, FloatArray, Table, TableError, Tables
from perfmodel.kernels import (
    DeviceRates,
    GemmSurface,
    GroupedGemmSurface,
    gemm_time,
    grouped_gemm_launch,
    grouped_gemm_time,
)

GEMM = "dense_gemm.csv"
GROUPED = "grouped_gemm.csv"

FP8_BYTES = 1.0

CAST_BYTES = 3.0  # a timed fp8 call reads each operand in bf16 and writes it in fp8 [B]
CAST_EFFICIENCY = 0.92  # of the memory bandwidth: what elementwise kernels of p6-b200 reach [-]

DROOP_FLOP = 1e12  # below it `GemmSurface.droop` is without effect [FLOP]

LARGE = "more than 1e12 FLOP, m, n and k of at least 512"

SMALLEST_GEMM = 64.0  # where m, n or k is below it, a timed call is launch and nothing else


@dataclass(frozen=True)
class GemmFit:
    """Dense GEMM; each call was timed alone, so the host's launch is in the time.

    ``floor_s`` is given where no chains of kernels were timed.
    """

    surface: str = "gemm"
    floor_s: float | None = None

    def fit(self, tables: Tables, device: Device) -> Surface:
        """Fit wall = launch + rooflines; the floor is read off chains of small kernels."""
        table = tables.load(GEMM).where(dtype=device.dtype)
        small = np.minimum(np.minimum(table["M"], table["N"]), table["K"]) < SMALLEST_GEMM
        table = table.take(~small)
        m, n, k = table["M"], table["N"], table["K"]
        bounds = {
            "launch_s": LAUNCH,
            "flop_eff": efficiency_of(device),
            "bw_eff": CPU_CACHED if device.blocking else EFFICIENCY,
            "k_half": Bound(200.0, 0.1, 1e4),
            "mn_half": Bound(1e5, 1.0, 1e8),
            "droop": Bound(0.05, 1e-5, 1.0),
            "norm": Bound(3.0, 1.0, 12.0),
        }
        fixed = {"floor_s": 0.0}
        if not (2.0 * m * n * k > DROOP_FLOP).any():  # no row has any
            del bounds["droop"]
            fixed["droop"] = 0.0
        rates = device.rates

        def wall(p: Parameters) -> FloatArray:
            s = GemmSurface(**{**fixed, **p})
            return s.launch_s + evaluate(partial(gemm_time, rates, s), m, n, k)

        fit = Regression(
            bounds,
            wall,
            table["time_ms_med"] * 1e-3,
            isin(k, 4096) | isin(n, 2048) | isin(m, 8192),
            "all rows with k = 4096, n = 2048 or m = 8192",
        ).solve()
        floor_s, floor_tables, borrowed = floor_of(self.floor_s, tables)
        params = {**fixed, **fit.params, "floor_s": floor_s}
        regimes = {}
        if not borrowed:
            alone = device_alone(tables, device, GemmSurface(**params))
            regimes["device time in chains of GEMMs (floor_s is theirs)"] = alone.errors
        floor_text = borrowed or "is the shortest busy time per kernel in chains of GEMMs"
        return Evidence(
            self.surface,
            (GEMM, *floor_tables),
            f"{len(table)} {device.dtype} rows with m, n and k of at least {SMALLEST_GEMM:g}; "
            f"wall time of one call = launch_s + rooflines. floor_s {floor_text}.",
        ).surface_of(
            tables,
            params,
            {"m": span(m), "n": span(n), "k": span(k)},
            fit.errors,
            regimes=regimes,
        )


@dataclass(frozen=True)
class Fp8GemmFit:
    """Dense GEMM with fp8 operands, one scale a tensor; ``flop_eff`` is of the fp8 peak.

    A timed call quantises both operands and multiplies them, while the host issues all of it:
    wall = max(launch, lead + cast + rooflines). ``lead_s`` is the host's part before the device
    starts, a nuisance of timing one call alone. The cast is not part of the surface. ``mn_half``
    is 0: where it would count, the launch hides the device.
    """

    surface: str = GEMM_FP8
    floor_s: float | None = None

    def fit(self, tables: Tables, device: Device) -> Surface:
        """Fit the rooflines beside a cast of known traffic."""
        table = fp8_rows(tables)
        m, n, k = table["M"], table["N"], table["K"]
        rates = fp8_rates(device)
        cast = CAST_BYTES * (m * k + k * n) / (rates.memory_bw * CAST_EFFICIENCY)
        bounds = {
            "launch_s": Bound(1.5e-4, 1e-7, 1e-2),
            "lead_s": Bound(1e-4, 1e-7, 1e-2),
            "flop_eff": EFFICIENCY,
            "bw_eff": EFFICIENCY,
            "k_half": Bound(200.0, 0.1, 1e4),
            "droop": Bound(0.05, 1e-5, 1.0),
            "norm": Bound(3.0, 1.0, 12.0),
        }

        def wall(p: Parameters) -> FloatArray:
            constants = {name: value for name, value in p.items() if name != "lead_s"}
            s = GemmSurface(floor_s=0.0, mn_half=0.0, operand_bytes=FP8_BYTES, **constants)
            busy = evaluate(partial(gemm_time, rates, s), m, n, k)
            return np.maximum(s.launch_s, p["lead_s"] + cast + busy)

        held_out = isin(k, 4096) | isin(n, 2048) | isin(m, 8192)
        text = "all rows with k = 4096, n = 2048 or m = 8192"
        fit = Regression(bounds, wall, table["time_ms_med"] * 1e-3, held_out, text).solve()
        large = (2.0 * m * n * k > 1e12) & (np.minimum(np.minimum(m, n), k) >= 512.0)
        regimes = {}
        if large.any():
            outside = fit.outside[large[held_out]] if len(fit.outside) else fit.outside
            part = Fit({}, fit.inside[large], outside, text)
            regimes[f"fitted rows of {LARGE}"] = part.errors
        floor_s, floor_tables, borrowed = floor_of(self.floor_s, tables)
        params = {**fit.params, "floor_s": floor_s, "mn_half": 0.0}
        return Evidence(
            self.surface,
            (GEMM, *floor_tables),
            f"{len(table)} fp8 rows with m, n and k of at least {SMALLEST_GEMM:g}; wall time of "
            f"one call = max(launch_s, lead_s + cast + rooflines), the cast {CAST_BYTES:g} B an "
            f"element of both operands at {CAST_EFFICIENCY:g} of the bandwidth. flop_eff is of "
            f"the fp8 peak. floor_s {borrowed or 'is that of gemm'}.",
        ).surface_of(
            tables,
            params,
            {"m": span(m), "n": span(n), "k": span(k)},
            fit.errors,
            regimes=regimes,
            nuisance={"lead_s": params.pop("lead_s")},
        )


def fp8_rates(device: Device) -> DeviceRates:
    """Return the device's rates with its fp8 peak in place of the bf16 peak."""
    if device.peak_flops_fp8 is None:
        raise TableError(f"The datasheet of {device.name} lacks device.peak_flops_fp8.")
    return device.rates._replace(peak_flops=device.peak_flops_fp8.value)


def fp8_rows(tables: Tables) -> Table:
    """Return the fp8 rows that are more than launch."""
    table = tables.load(GEMM).where(dtype="fp8")
    sizes = np.minimum(np.minimum(table["M"], table["N"]), table["K"])
    return table.take(sizes >= SMALLEST_GEMM)


def has_fp8(tables: Tables, device: Device) -> bool:
    """Whether the tables and the datasheet have what an fp8 surface needs."""
    if device.peak_flops_fp8 is None or "fp8" not in tables.load(GEMM).words("dtype"):
        return False
    return len(fp8_rows(tables)) > 0


def device_alone(tables: Tables, device: Device, surface: GemmSurface) -> Fit:
    """Compare the surface with busy times of the device, which the fit did not use."""
    table = tables.load(DISPATCH).where(mode="gemm", dtype=device.dtype)
    time = partial(gemm_time, device.rates, surface)
    predicted = evaluate(time, table["M"], table["N"], table["K"])
    if device.blocking:
        predicted = predicted + surface.launch_s
    errors = np.abs(predicted / (table[BUSY] * 1e-6) - 1.0)
    return Fit({}, errors, errors, "every row")


MAXIMUM = "max(launch_s + launch_per_gemm_s n, device)"


@dataclass(frozen=True)
class GroupedFit:
    """Grouped GEMM of one pass; the host launches one GEMM per expert while the device works.

    On a CPU it launches and works in turn.
    """

    surface: str
    column: str
    backward: float

    def fit(self, tables: Tables, device: Device) -> Surface:
        """Fit wall = max(launch, device), or their sum, to balanced rows; skewed ones test it."""
        table = tables.load(GROUPED).where(dtype=device.dtype)
        balanced = table.where(distribution="balanced")
        bounds = {
            "launch_s": Bound(1e-4, 1e-7, 1e-2),
            "launch_per_gemm_s": LAUNCH,
            "flop_eff": efficiency_of(device),
            "bw_eff": CPU_CACHED if device.blocking else CACHED,
        }
        fit = self._regression(balanced, device, bounds).solve()
        regimes = {}
        if "skewed" in table.words("distribution"):
            skewed = self._regression(table.where(distribution="skewed"), device, bounds)
            unseen = skewed.relative_errors(fit.params)
            test = Fit({}, unseen, unseen, "every row; tokens_per_expert is their mean")
            regimes["skewed experts (not fitted)"] = test.errors
        return Evidence(
            self.surface,
            (GROUPED,),
            f"{len(balanced)} {device.dtype} rows with balanced experts; wall time of one call = "
            f"{'launch_s + launch_per_gemm_s n + device' if device.blocking else MAXIMUM}. bw_eff "
            "may exceed 1: traffic is counted as if no cache helped.",
        ).surface_of(
            tables,
            fit.params,
            dict(zip(("n_gemms", "rows", "n", "k"), map(span, sizes(balanced)), strict=True)),
            fit.errors,
            regimes=regimes,
        )

    def _regression(self, table: Table, device: Device, bounds: Mapping[str, Bound]) -> Regression:
        n_gemms, rows, n, k = sizes(table)
        rates = device.rates

        def wall(p: Parameters) -> FloatArray:
            s = GroupedGemmSurface(**p)
            host = evaluate(partial(grouped_gemm_launch, s), n_gemms)
            busy = evaluate(
                partial(grouped_gemm_time, rates, s), n_gemms, rows, n, k, self.backward
            )
            return np.asarray(host + busy) if device.blocking else np.maximum(host, busy)

        return Regression(
            bounds,
            wall,
            table[self.column] * 1e-3,
            held_out_shapes(table),
            "all rows with (hidden, ffn) = (6144, 1536), hidden = 2560 or 16 GEMMs",
        )


def sizes(table: Table) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Return n_gemms, rows, n and k of a grouped table."""
    return (
        table["num_gemms"],
        table["tokens_per_expert"],
        table["out_features"],
        table["in_features"],
    )


def held_out_shapes(table: Table) -> BoolArray:
    """Mark the grouped rows that held-out errors are stated on."""
    wide = isin(table["hidden"], 6144) & isin(table["ffn"], 1536)
    return wide | isin(table["hidden"], 2560) | isin(table["num_gemms"], 16)


def gemm_fits(floor_s: float | None = None) -> tuple[GemmFit | GroupedFit, ...]:
    """Return the fits of the products; ``floor_s`` where no chains of kernels were timed."""
    return (
        GemmFit(floor_s=floor_s),
        GroupedFit("grouped_forward", "fwd_ms", 0.0),
        GroupedFit("grouped_backward", "bwd_ms", 1.0),
    )
