"""How evenly the tokens of a batch fall on the experts of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from torch import Tensor

from moe_ref.errors import MoeRefError
from moe_ref.routing import Router, Routing

__all__ = ["STARVED_SHARE", "RoutingStatistics", "mean_statistics", "routing_statistics"]

STARVED_SHARE: Final = 0.05
"""Of its even share of tokens, below which an expert is starved (arXiv 2608.10605, C.2)."""


@dataclass(frozen=True)
class RoutingStatistics:
    """Balance of one sparse layer over one batch, or the mean over layers.

    Attributes
    ----------
    starved : float
        Experts with less than 5 % of their even share of tokens (arXiv 2608.10605, C.2).
    max_violation : float
        ``max_i n_i / mean - 1`` of the tokens of each expert, MaxVio (arXiv 2408.15664) [-].
    load_cv : float
        Deviation over mean of the tokens of each expert, over all experts and not a sample [-].
    drop_rate : float
        Part of the choices for which an expert had no room [-].
    bias_range : float or None
        Highest less lowest bias of the experts [-]; None for a router without one.
    """

    starved: float
    max_violation: float
    load_cv: float
    drop_rate: float
    bias_range: float | None


def routing_statistics(
    routings: Sequence[Routing], router: Router | None = None
) -> RoutingStatistics:
    """Return the balance of one layer over the microbatches of a batch.

    Parameters
    ----------
    routings : sequence of Routing
        What the layer's router decided for each microbatch.
    router : Router, optional
        The router, for the range of its ``bias_E``.

    Raises
    ------
    MoeRefError
        No microbatch, or none with a token.
    """
    choices = sum(routing.experts_TK.numel() for routing in routings)
    if not choices:
        raise MoeRefError("routings has no token, but balance needs at least one.")
    counts_E = sum(routing.counts_E for routing in routings[1:]) + routings[0].counts_E
    load_E = counts_E.double() / counts_E.double().mean()
    dropped = sum(
        int((~routing.kept_TK).sum()) for routing in routings if routing.kept_TK is not None
    )
    bias_E: Tensor | None = getattr(router, "bias_E", None)
    return RoutingStatistics(
        starved=float((load_E < STARVED_SHARE).sum()),
        max_violation=float(load_E.max()) - 1.0,
        load_cv=float(load_E.std(correction=0)),
        drop_rate=dropped / choices,
        bias_range=None if bias_E is None else float(bias_E.max() - bias_E.min()),
    )


def mean_statistics(layers: Sequence[RoutingStatistics]) -> RoutingStatistics:
    """Return the mean over layers of every statistic.

    Raises
    ------
    MoeRefError
        No layer.
    """
    if not layers:
        raise MoeRefError("layers is empty, but a mean needs at least one sparse layer.")
    ranges = [layer.bias_range for layer in layers if layer.bias_range is not None]
    return RoutingStatistics(
        starved=fmean(layer.starved for layer in layers),
        max_violation=fmean(layer.max_violation for layer in layers),
        load_cv=fmean(layer.load_cv for layer in layers),
        drop_rate=fmean(layer.drop_rate for layer in layers),
        bias_range=fmean(ranges) if len(ranges) == len(layers) else None,
    )
