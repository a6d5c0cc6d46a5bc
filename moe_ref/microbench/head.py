"""The language-model head and cross-entropy in fp32, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch.nn.functional import cross_entropy, linear

from moe_ref.microbench.family import COUNTS, Bench, Family, backward_calls, counts, quantiles
from moe_ref.microbench.grids import Point, Scale, thinned, volume
from moe_ref.microbench.machine import DTYPES
from moe_ref.microbench.store import Cell

__all__ = ["HEAD"]

HEAD_OP, LOSS_OP = "lm_head_gemm", "cross_entropy"


def _grid(scale: Scale, dtype: str) -> list[Point]:
    tokens = (4096, 8192, 16384, 32768) if scale.large else (128, 256, 512, 1024, 2048, 8192)
    widths = (2048, 4096, 6144) if scale.large else (64, 128, 256, 512)
    vocabularies = (32768, 131072) if scale.large else (256, 1024, 4096, 32768)
    points: list[Point] = []
    for t, width, vocabulary in product(tokens, widths, vocabularies):
        elements = 3 * volume((t, width), (width, vocabulary), (t, vocabulary))
        if not scale.allows(4.0 * t * width * vocabulary, elements):
            continue
        sizes: Point = {"m_tokens": t, "hidden": width, "vocab_padded": vocabulary}
        points.append({"op": HEAD_OP, **sizes, "dtype": dtype})
    chosen = thinned(points, scale.points, "head")
    for t, vocabulary in product(tokens, vocabularies):
        if scale.allows(1.0, 3 * volume((t, vocabulary))):
            sizes = {"m_tokens": t, "hidden": widths[0], "vocab_padded": vocabulary}
            chosen.append({"op": LOSS_OP, **sizes, "dtype": "fp32"})  # it does not see the width
    return chosen


def _head(bench: Bench, point: Point) -> tuple[list[Any], Callable[[], Any]]:
    tokens, width = int(point["m_tokens"]), int(point["hidden"])
    dtype = DTYPES[str(point["dtype"])]
    x = bench.random(tokens, width, dtype=dtype).requires_grad_()
    weight = bench.random(int(point["vocab_padded"]), width, dtype=dtype).requires_grad_()
    return [x, weight], lambda: linear(x, weight)


def _loss(bench: Bench, point: Point) -> tuple[list[Any], Callable[[], Any]]:
    tokens, vocabulary = int(point["m_tokens"]), int(point["vocab_padded"])
    logits = bench.random(tokens, vocabulary, dtype=torch.float32).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device=bench.device)
    return [logits], lambda: cross_entropy(logits, targets)


def _measure(bench: Bench, point: Point) -> dict[str, Cell]:
    operation = _head if point["op"] == HEAD_OP else _loss
    tokens, width = int(point["m_tokens"]), int(point["hidden"])
    vocabulary = int(point["vocab_padded"])
    elements = 2 * volume((tokens, vocabulary))
    if operation is _head:
        elements += 2 * volume((tokens, width), (vocabulary, width))

    def forward() -> Callable[[], object]:
        return operation(bench, point)[1]

    def backward() -> Callable[[], object]:
        inputs, call = operation(bench, point)
        return backward_calls([call()], inputs)

    fwd, bwd = bench.time(elements, forward), bench.time(elements, backward)
    return {
        **quantiles(fwd, "fwd_ms", "_p50"),
        **quantiles(bwd, "bwd_ms", "_p50"),
        **counts(fwd, bwd),
    }


HEAD = Family(
    name="head",
    table="vocab_gemm_ce.csv",
    keys=("op", "m_tokens", "hidden", "vocab_padded", "dtype"),
    values=(
        *(f"{way}_ms_{part}" for way in ("fwd", "bwd") for part in ("p50", "p10", "p90")),
        *COUNTS,
    ),
    grid=_grid,
    measure=_measure,
)
"""Head and cross-entropy."""
