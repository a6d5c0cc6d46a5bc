"""Dense products as a linear layer makes them: ``x @ w.T``."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

from torch.nn.functional import linear

from moe_ref.microbench.family import COUNTS, Bench, Family, counts, quantiles
from moe_ref.microbench.grids import Point, Scale, powers, thinned, volume
from moe_ref.microbench.machine import DTYPES
from moe_ref.microbench.store import Cell

__all__ = ["GEMM"]

FP32_SIZES = (1024, 2048, 4096)
"""Squares that show the fp32 rate where products are timed in another format."""


def _grid(scale: Scale, dtype: str) -> list[Point]:
    top = 65536 if scale.large else 4096
    shapes = [
        *product(powers(64, top, 4), repeat=3),
        *product((128, 512, 2048), repeat=3),
    ]
    points: list[Point] = [
        {"dtype": dtype, "M": m, "N": n, "K": k} for m, n, k in shapes if _fits(scale, m, n, k)
    ]
    chosen = thinned(points, scale.points, "gemm")
    if dtype != "fp32":
        squares = [s for s in FP32_SIZES if _fits(scale, s, s, s)]
        chosen += [{"dtype": "fp32", "M": s, "N": s, "K": s} for s in squares]
    return chosen


def _fits(scale: Scale, m: int, n: int, k: int) -> bool:
    return scale.allows(2.0 * m * n * k, volume((m, k), (n, k), (m, n)))


def _measure(bench: Bench, point: Point) -> dict[str, Cell]:
    m, n, k = int(point["M"]), int(point["N"]), int(point["K"])
    dtype = DTYPES[str(point["dtype"])]

    def make() -> Callable[[], object]:
        x, weight = bench.random(m, k, dtype=dtype), bench.random(n, k, dtype=dtype)
        return lambda: linear(x, weight)

    timing = bench.time(volume((m, k), (n, k)), make)
    return {**quantiles(timing, "time_ms"), **counts(timing)}


GEMM = Family(
    name="gemm",
    table="dense_gemm.csv",
    keys=("dtype", "M", "N", "K"),
    values=("time_ms_med", "time_ms_p10", "time_ms_p90", *COUNTS),
    grid=_grid,
    measure=_measure,
)
"""Dense products."""
