"""Chains of products: what a kernel takes when the next is ready, and the gap that the host leaves.

On a CUDA device the busy time is that of the chain replayed as a graph, which the host does not
slow down; the gap is what the same chain takes more when the host launches each kernel. On a CPU
the caller computes, and there is no gap to tell apart.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch.nn.functional import linear

from moe_ref.microbench.family import COUNTS, Bench, Family, counts
from moe_ref.microbench.grids import Point, Scale, thinned
from moe_ref.microbench.machine import DTYPES
from moe_ref.microbench.store import Cell

__all__ = ["DISPATCH"]

CHAIN_CPU, CHAIN_CUDA = 32, 256

MODES = ("gemm", "gemm_relu")


def _grid(scale: Scale, dtype: str) -> list[Point]:
    rows = (8, 64, 512, 2048, 8192) if scale.large else (1, 16, 64, 256)
    widths = (2048,) if scale.large else (64, 256)
    length = CHAIN_CUDA if scale.large else CHAIN_CPU
    points: list[Point] = [
        {"mode": mode, "M": m, "N": width, "K": width, "dtype": dtype, "chain_len": length}
        for width, m, mode in product(widths, rows, MODES)
        if scale.allows(2.0 * length * m * width * width, width * width)
    ]
    return thinned(points, max(scale.points, 4), "dispatch")


def _chain(bench: Bench, point: Point) -> Callable[[], Any]:
    m, width, length = int(point["M"]), int(point["N"]), int(point["chain_len"])
    dtype = DTYPES[str(point["dtype"])]
    x = bench.random(m, width, dtype=dtype)
    weight = bench.random(width, width, dtype=dtype) / width**0.5
    relu = point["mode"] == "gemm_relu"

    def call() -> Any:
        y = x
        for _ in range(length):
            y = linear(y, weight)
            if relu:
                y = torch.relu(y)
        return y

    return call


def _graph(call: Callable[[], Any]) -> Callable[[], object]:
    """Return the replay of a call that was captured as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    replay: Callable[[], object] = graph.replay
    return replay


def _measure(bench: Bench, point: Point) -> dict[str, Cell]:
    length = int(point["chain_len"])
    call = _chain(bench, point)
    wall = bench.timer.time([call]).per_call(length)
    busy = wall
    if bench.device == "cuda":
        busy = bench.timer.time([_graph(call)]).per_call(length)
    return {
        "wall_us_per_kernel": 1e6 * wall.median_s,
        "gpu_active_us_per_kernel": 1e6 * busy.median_s,
        "idle_us_per_kernel": 1e6 * max(0.0, wall.median_s - busy.median_s),
        "wall_us_p10": 1e6 * wall.p10_s,
        "wall_us_p90": 1e6 * wall.p90_s,
        **counts(wall, busy),
    }


DISPATCH = Family(
    name="dispatch",
    table="dispatch_gap.csv",
    keys=("mode", "M", "N", "K", "dtype", "chain_len"),
    values=(
        *("wall_us_per_kernel", "gpu_active_us_per_kernel", "idle_us_per_kernel"),
        *("wall_us_p10", "wall_us_p90", *COUNTS),
    ),
    grid=_grid,
    measure=_measure,
)
"""Chains of products."""
