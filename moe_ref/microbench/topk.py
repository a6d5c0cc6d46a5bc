"""The choice of experts: top-k over a router's scores in fp32."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch

from moe_ref.microbench.family import COUNTS, Bench, Family, counts, quantiles
from moe_ref.microbench.grids import Point, Scale, thinned, volume
from moe_ref.microbench.store import Cell

__all__ = ["TOPK"]


def _grid(scale: Scale, dtype: str) -> list[Point]:
    tokens = (1024, 4096, 8192, 32768) if scale.large else (128, 512, 2048, 8192)
    experts = (32, 64, 128, 256) if scale.large else (4, 8, 16, 32, 64, 128)
    points: list[Point] = [
        {"num_tokens": t, "num_experts": e, "k": k, "dtype": "fp32"}
        for t, e, k in product(tokens, experts, (1, 2, 4, 8))
        if k <= e and scale.allows(1.0, volume((t, e)))
    ]
    return thinned(points, scale.points, "topk")


def _measure(bench: Bench, point: Point) -> dict[str, Cell]:
    tokens, experts, k = (int(point[name]) for name in ("num_tokens", "num_experts", "k"))

    def make() -> Callable[[], object]:
        scores = bench.random(tokens, experts, dtype=torch.float32)
        return lambda: torch.topk(scores, k, dim=1)

    timing = bench.time(volume((tokens, experts)), make)
    return {**quantiles(timing, "event_time_ms", ""), **counts(timing)}


TOPK = Family(
    name="topk",
    table="topk.csv",
    keys=("num_tokens", "num_experts", "k", "dtype"),
    values=("event_time_ms", "event_time_ms_p10", "event_time_ms_p90", *COUNTS),
    grid=_grid,
    measure=_measure,
)
"""The choice of experts."""
