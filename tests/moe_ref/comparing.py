"""How a router is held against a library: the same numbers in, the largest difference out."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]
SEEDS = range(5)

LIBRARIES = (
    "transformers",
    "megatron-core",
    "deepspeed",
    "fairscale",
    "mixture-of-experts",
    "st-moe-pytorch",
)

# Three roundings or so of float32, at values of order 1: the libraries compute in it.
FLOAT32 = 1e-6


@dataclass(frozen=True)
class Comparison:
    """What is compared: ``pairs`` takes a seed."""

    library: str
    function: str
    ours: str
    pairs: Callable[[int], Iterator[Pair]]
    tolerance: float = FLOAT32


COMPARISONS: list[Comparison] = []


def compares(
    library: str, function: str, ours: str, tolerance: float = FLOAT32
) -> Callable[[Callable[[int], Iterator[Pair]]], Callable[[int], Iterator[Pair]]]:
    def register(pairs: Callable[[int], Iterator[Pair]]) -> Callable[[int], Iterator[Pair]]:
        COMPARISONS.append(Comparison(library, function, ours, pairs, tolerance))
        return pairs

    return register


def present(library: str) -> str | None:
    """Return the version of a library that is installed."""
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Let a library warn and print: it is not what is tested."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def largest_difference(comparison: Comparison, seeds: range = SEEDS) -> float:
    """Return the largest difference over seeds; infinite where choices or masks differ."""
    largest, compared = 0.0, 0
    with quiet():
        for seed in seeds:
            for ours, theirs in comparison.pairs(seed):
                compared += 1
                ours, theirs = ours.detach(), theirs.detach()
                if not theirs.is_floating_point():
                    if not torch.equal(ours.to(theirs.dtype), theirs):
                        return float("inf")
                    continue
                if ours.shape != theirs.shape or not torch.isfinite(ours).all():
                    return float("inf")
                largest = max(largest, float((ours - theirs).abs().max()))
    return largest if compared else float("inf")


# ---------------------------------------------------------------- common


def toy_logits(seed: int, tokens: int = 48, n_experts: int = 8, scale: float = 1.5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(tokens, n_experts, generator=generator)


def generator_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + seed)


def filled_with(noise: Tensor) -> Any:
    """Make `Tensor.uniform_` write these numbers."""
    return patch.object(torch.Tensor, "uniform_", lambda self, *_: self.copy_(noise))
