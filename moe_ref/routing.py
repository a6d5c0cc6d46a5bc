"""What a router decides, and what every router offers.

Shape suffixes, used in the whole package: a tensor's name ends in its axes.

====  =====================================================================
B     sequences of a batch
S     positions of a sequence
T     tokens of a batch, ``B * S``, sequence by sequence
D     width of the residual stream, ``d_model``
E     experts
K     experts of a token, ``top_k``
M     proposed experts of a token
F     hidden width of a feed-forward block or an expert
H     query heads; G: key and value heads; C: width of a head
V     entries of the vocabulary
P     pairs of a token and one of its experts
====  =====================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor, nn

__all__ = ["Router", "Routing", "counts_of", "wide_dtype"]


@dataclass(frozen=True)
class Routing:
    """Which experts work on each token, and with what weight.

    Attributes
    ----------
    experts_TK : Tensor of int64
        Experts of each token.
    gates_TK : Tensor
        Weight of each expert's output in the sum; carries the gradient of the router.
    kept_TK : Tensor of bool or None
        False where the expert had no room: its output is left out, and the token passes by on the
        residual stream. None where there is room for all.
    counts_E : Tensor of int64
        Tokens that chose each expert, those without room as well.
    losses : dict of str to Tensor
        What the router adds to the objective, each with its coefficient.
    """

    experts_TK: Tensor
    gates_TK: Tensor
    kept_TK: Tensor | None
    counts_E: Tensor
    losses: dict[str, Tensor] = field(default_factory=dict)


class Router(nn.Module):
    """A learned choice of experts.

    A subclass defines `forward`. What it must remember between optimizer steps, such as a bias,
    changes in `after_step` alone, so that accumulated microbatches see the same state. Tokens
    counted until then are a buffer ``seen_E``, which several ranks sum.

    Attributes
    ----------
    weight_ED : Parameter
        One row for each expert.
    """

    weight_ED: nn.Parameter

    def __init__(self, d_model: int, n_experts: int, top_k: int) -> None:
        super().__init__()
        if not 1 <= top_k <= n_experts:
            raise ValueError(
                f"top_k is {top_k}, but must be from 1 to n_experts = {n_experts}; "
                f"the nearest legal value is {min(max(top_k, 1), n_experts)}."
            )
        self.n_experts, self.top_k = n_experts, top_k
        self.weight_ED = nn.Parameter(torch.empty(n_experts, d_model))
        nn.init.normal_(self.weight_ED, std=0.006)

    def forward(
        self, x_TD: Tensor, sequences: int = 1, generator: torch.Generator | None = None
    ) -> Routing:
        """Choose experts.

        Parameters
        ----------
        x_TD : Tensor
            Hidden states, sequence by sequence.
        sequences : int
            Sequences in the batch; it divides T.
        generator : torch.Generator, optional
            Of the noise, where there is any; without one, torch's own.
        """
        raise NotImplementedError

    def after_step(self) -> None:
        """Change what is remembered, after an optimizer step."""

    def extra_repr(self) -> str:
        """Say what the router was made with; a checkpoint holds it against another run's."""
        n_experts, d_model = self.weight_ED.shape
        return f"d_model={d_model}, n_experts={n_experts}, top_k={self.top_k}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move as the model moves, and stay in float32 where the model becomes narrower."""
        return super()._apply(lambda tensor: _not_narrowed(tensor, fn(tensor)), recurse)


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return float64 for float64, else float32: what a router computes in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _not_narrowed(tensor: Tensor, moved: Tensor) -> Tensor:
    """Return the moved tensor, or the tensor in float32 there if the move made it narrower."""
    if not moved.is_floating_point() or moved.dtype == wide_dtype(moved):
        return moved
    return tensor.to(device=moved.device, dtype=torch.float32)


def counts_of(experts_TK: Tensor, n_experts: int) -> Tensor:
    """Return how many tokens chose each expert, shape (E,), int64."""
    chosen_P = experts_TK.flatten()
    return chosen_P.new_zeros(n_experts).index_add_(0, chosen_P, torch.ones_like(chosen_P))
