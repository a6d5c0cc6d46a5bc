"""Causal attention by torch's ``scaled_dot_product_attention``, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

from torch.nn.functional import scaled_dot_product_attention

from moe_ref.microbench.family import COUNTS, Bench, Family, backward_calls, counts, quantiles
from moe_ref.microbench.grids import Point, Scale, powers, thinned, volume
from moe_ref.microbench.machine import DTYPES
from moe_ref.microbench.store import Cell

__all__ = ["ATTENTION"]


def _grid(scale: Scale, dtype: str) -> list[Point]:
    lengths = powers(1024, 16384) if scale.large else powers(128, 4096)
    heads = (8, 16, 32, 64) if scale.large else (1, 2, 4, 8)
    sequences = (1, 4) if scale.large else (1, 2, 8)
    points: list[Point] = []
    for length, batch, n_heads, width in product(lengths, sequences, heads, (64, 128)):
        flop = 5.0 * batch * n_heads * length * length * width
        if scale.allows(flop, 8 * volume((batch, length, n_heads, width))):
            points.append(
                {
                    "seq_len": length,
                    "micro_bs": batch,
                    "n_q_heads": n_heads,
                    "n_kv_heads": n_heads,
                    "head_dim": width,
                    "backend": "sdpa",
                    "dtype": dtype,
                }
            )
    return thinned(points, scale.points, "attention")


def _measure(bench: Bench, point: Point) -> dict[str, Cell]:
    sizes = ("micro_bs", "seq_len", "n_q_heads", "head_dim")
    batch, length, heads, width = (int(point[name]) for name in sizes)
    dtype = DTYPES[str(point["dtype"])]
    elements = volume((batch, length, heads, width))

    def operand() -> Any:
        """Return queries, keys or values, (B, H, S, C), as a projection lays them out."""
        x = bench.random(batch, length, heads, width, dtype=dtype)
        return x.transpose(1, 2).requires_grad_()

    def forward() -> Callable[[], object]:
        q, k, v = operand(), operand(), operand()
        return lambda: scaled_dot_product_attention(q, k, v, is_causal=True)

    def backward() -> Callable[[], object]:
        q, k, v = operand(), operand(), operand()
        return backward_calls([scaled_dot_product_attention(q, k, v, is_causal=True)], [q, k, v])

    fwd, bwd = bench.time(3 * elements, forward), bench.time(8 * elements, backward)
    return {
        **quantiles(fwd, "fwd_time_ms"),
        **quantiles(bwd, "bwd_time_ms"),
        **counts(fwd, bwd),
    }


ATTENTION = Family(
    name="attention",
    table="sdpa.csv",
    keys=(
        *("seq_len", "micro_bs", "n_q_heads", "n_kv_heads", "head_dim"),
        *("backend", "dtype"),
    ),
    values=(
        *(f"{way}_time_ms_{part}" for way in ("fwd", "bwd") for part in ("med", "p10", "p90")),
        *COUNTS,
    ),
    grid=_grid,
    measure=_measure,
)
"""Causal attention."""
