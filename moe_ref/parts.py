"""Small modules that the layers are built of, drawn as arXiv 2608.10605 A.1 draws them.

Matrices are drawn from a normal distribution; gains of norms start at 1; nothing has a bias. A
matrix that reads the residual stream has the deviation 0.006, one that writes to it a smaller one
(`write_deviation`). Shape suffixes: `moe_ref.routing`.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

__all__ = ["INITIAL_DEVIATION", "SwiGlu", "matrix", "norm", "projection", "write_deviation"]

INITIAL_DEVIATION: Final = 0.006
"""Standard deviation of the initial weights, arXiv 2608.10605 A.1."""

NORM_EPSILON: Final = 1e-5
"""Added to the mean square in RMSNorm. ASSUMED: the paper does not print it."""


def write_deviation(n_layers: int) -> float:
    """Return the deviation of a matrix that writes to the residual stream (A.1).

    ``0.006 / sqrt(2 L)``: a forward pass adds 2 L of them.
    """
    return INITIAL_DEVIATION / math.sqrt(2 * n_layers)


def matrix(*shape: int, deviation: float = INITIAL_DEVIATION) -> nn.Parameter:
    """Return a parameter of a shape, drawn from torch's own generator."""
    return nn.Parameter(torch.empty(*shape).normal_(std=deviation))


def projection(width: int, out: int, deviation: float = INITIAL_DEVIATION) -> nn.Linear:
    """Return a linear map without a bias."""
    linear = nn.Linear(width, out, bias=False)
    nn.init.normal_(linear.weight, std=deviation)
    return linear


def norm(d_model: int) -> nn.RMSNorm:
    """Return an RMSNorm: one gain for each feature."""
    return nn.RMSNorm(d_model, eps=NORM_EPSILON)


class SwiGlu(nn.Module):
    """A gated feed-forward block: a dense layer's, or a shared expert.

    ``down(silu(gate x) * up x)`` (Shazeer, arXiv 2002.05202): 3 d F parameters.
    """

    def __init__(self, d_model: int, width: int, deviation: float = INITIAL_DEVIATION) -> None:
        super().__init__()
        self.gate = projection(d_model, width)
        self.up = projection(d_model, width)
        self.down = projection(width, d_model, deviation)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block, of the shape of the input (..., D)."""
        return self.down(silu(self.gate(x)) * self.up(x))
