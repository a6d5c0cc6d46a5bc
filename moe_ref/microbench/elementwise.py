"""Kernels that only move bytes: a copy, a residual, an activation, tokens in another order."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch.nn.functional import rms_norm, silu

from moe_ref.microbench.family import COUNTS, Bench, Family, counts, quantiles
from moe_ref.microbench.grids import Point, Scale, powers, thinned
from moe_ref.microbench.machine import DTYPES
from moe_ref.microbench.store import Cell

__all__ = ["ELEMENTWISE"]

WIDTH = 256
"""Elements of a row."""

READS = {"copy": 1, "add": 2, "silu": 1, "gather": 1, "rms_norm": 1, "stream": 1}
"""Operands of each operation; all write one, which is new but for ``stream``."""

TOP_NEW = 1 << 22
"""Elements that a CPU's allocator still hands out again; larger ones are cleared page by page."""


def _grid(scale: Scale, dtype: str) -> list[Point]:
    top = 1 << 28 if scale.large else 1 << 25
    points: list[Point] = [
        {
            "op": op,
            "rows": size // WIDTH,
            "elements_read": READS[op] * size,
            "elements_written": size,
            "dtype": dtype,
        }
        for op, size in product(READS, powers(1 << 12, top, 8 if scale.points < 20 else 4))
        if scale.allows(1.0, (READS[op] + 1) * size)
        and (scale.large or op == "stream" or size <= TOP_NEW)
    ]
    return thinned(points, max(scale.points, len(READS) * 3), "elementwise")


def _call(bench: Bench, op: str, rows: int, dtype: Any) -> Callable[[], object]:
    x = bench.random(rows, WIDTH, dtype=dtype)
    match op:
        case "copy":
            return x.clone
        case "stream":
            out = torch.empty_like(x)
            return lambda: out.copy_(x)
        case "add":
            y = bench.random(rows, WIDTH, dtype=dtype)
            return lambda: x + y
        case "silu":
            return lambda: silu(x)
        case "gather":
            order = torch.randperm(rows, device=bench.device)
            return lambda: x[order]
        case _:
            weight = bench.random(WIDTH, dtype=dtype)
            return lambda: rms_norm(x, (WIDTH,), weight)


def _measure(bench: Bench, point: Point) -> dict[str, Cell]:
    op, rows = str(point["op"]), int(point["rows"])
    dtype = DTYPES[str(point["dtype"])]
    elements = int(point["elements_read"]) + int(point["elements_written"])
    timing = bench.time(elements, lambda: _call(bench, op, rows, dtype))
    return {**quantiles(timing, "time_ms"), **counts(timing)}


ELEMENTWISE = Family(
    name="elementwise",
    table="elementwise.csv",
    keys=("op", "rows", "elements_read", "elements_written", "dtype"),
    values=("time_ms_med", "time_ms_p10", "time_ms_p90", *COUNTS),
    grid=_grid,
    measure=_measure,
)
"""Kernels that only move bytes."""
