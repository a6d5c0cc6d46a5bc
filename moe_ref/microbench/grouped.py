"""Products of local experts: equal ones, one after the other, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

from torch.nn.functional import linear

from moe_ref.microbench.family import COUNTS, Bench, Family, backward_calls, counts, quantiles
from moe_ref.microbench.grids import Point, Scale, thinned, volume
from moe_ref.microbench.machine import DTYPES
from moe_ref.microbench.store import Cell

__all__ = ["GROUPED"]

SMALL = (
    (64, 64),
    (64, 256),
    (128, 128),
    (256, 128),
    (256, 256),
    (512, 256),
    (512, 512),
    (1024, 512),
)
LARGE = ((1024, 1280), (2048, 1408), (2560, 1536), (4096, 1536), (6144, 1536), (6144, 3072))
"""Widths of the residual stream and of an expert, (hidden, ffn)."""


def _grid(scale: Scale, dtype: str) -> list[Point]:
    counts = (4, 8, 16, 32, 64, 128) if scale.large else (2, 4, 8, 16, 32, 64)
    rows = (64, 256, 1024, 4096) if scale.large else (4, 16, 64, 256, 1024)
    widths = LARGE if scale.large else SMALL
    points: list[Point] = []
    for n, t, (hidden, ffn) in product(counts, rows, widths):
        for proj, out, inner in (("fc1", 2 * ffn, hidden), ("fc2", hidden, ffn)):
            elements = 2 * n * volume((t, out), (t, inner), (out, inner))
            if scale.allows(4.0 * n * t * out * inner, elements):
                points.append(
                    {
                        "proj": proj,
                        "distribution": "balanced",
                        "num_gemms": n,
                        "tokens_per_expert": t,
                        "hidden": hidden,
                        "ffn": ffn,
                        "in_features": inner,
                        "out_features": out,
                        "dtype": dtype,
                    }
                )
    return thinned(points, scale.points, "grouped")


def _measure(bench: Bench, point: Point) -> dict[str, Cell]:
    n, t = int(point["num_gemms"]), int(point["tokens_per_expert"])
    inner, out = int(point["in_features"]), int(point["out_features"])
    dtype = DTYPES[str(point["dtype"])]
    elements = n * volume((t, inner), (out, inner), (t, out))

    def operands() -> tuple[list[Any], list[Any]]:
        xs = [bench.random(t, inner, dtype=dtype).requires_grad_() for _ in range(n)]
        ws = [bench.random(out, inner, dtype=dtype).requires_grad_() for _ in range(n)]
        return xs, ws

    def forward() -> Callable[[], object]:
        xs, ws = operands()
        return lambda: [linear(x, w) for x, w in zip(xs, ws, strict=True)]

    def backward() -> Callable[[], object]:
        xs, ws = operands()
        return backward_calls([linear(x, w) for x, w in zip(xs, ws, strict=True)], [*xs, *ws])

    fwd, bwd = bench.time(elements, forward), bench.time(2 * elements, backward)
    return {
        **quantiles(fwd, "fwd_ms", ""),
        **quantiles(bwd, "bwd_ms", ""),
        **counts(fwd, bwd),
    }


GROUPED = Family(
    name="grouped",
    table="grouped_gemm.csv",
    keys=(
        "proj",
        "distribution",
        "num_gemms",
        "tokens_per_expert",
        "hidden",
        "ffn",
        "in_features",
        "out_features",
        "dtype",
    ),
    values=("fwd_ms", "bwd_ms", "fwd_ms_p10", "fwd_ms_p90", "bwd_ms_p10", "bwd_ms_p90", *COUNTS),
    grid=_grid,
    measure=_measure,
)
"""Products of local experts."""
