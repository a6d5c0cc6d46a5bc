"""Random draws of the routers, each from the generator that it is given."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["gumbel_like", "uniform_like"]


def uniform_like(
    like: Tensor, generator: torch.Generator | None = None, low: float = 0.0, high: float = 1.0
) -> Tensor:
    """Return uniform draws from [low, high), of the shape and type of ``like``."""
    return torch.empty_like(like).uniform_(low, high, generator=generator)


def gumbel_like(like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Return standard Gumbel draws, all finite, of the shape and type of ``like``.

    Minus the logarithm of exponential draws, which keeps both tails as far as the type goes.
    """
    exponential = torch.empty_like(like).exponential_(generator=generator)
    return -exponential.clamp_min(torch.finfo(like.dtype).tiny).log()
