"""A layer of experts behind any router, with an optional shared expert."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_ref.experts import Experts
from moe_ref.parts import SwiGlu
from moe_ref.routing import Router, Routing

__all__ = ["MoELayer"]


class MoELayer(nn.Module):
    """Experts that a router chooses, and a shared one that works on every token.

    Attributes
    ----------
    router : Router
        Any router of this package. It never runs under autocast: its logits and scores are in
        float32 or wider (Fedus et al., arXiv 2101.03961, 2.4).
    experts : Experts
        What it chooses from.
    shared : SwiGlu or None
        The shared expert; its output is added without a gate.
    """

    def __init__(self, router: Router, experts: Experts, shared: SwiGlu | None = None) -> None:
        super().__init__()
        self.router, self.experts, self.shared = router, experts, shared

    def forward(
        self, x_BSD: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Routing]:
        """Return the output of the layer, shape (B, S, D), and what the router decided.

        Parameters
        ----------
        x_BSD : Tensor
            Hidden states.
        generator : torch.Generator, optional
            Of the router's noise.
        """
        x_TD = x_BSD.flatten(0, 1)
        with torch.autocast(x_TD.device.type, enabled=False):
            routing = self.router(x_TD, sequences=len(x_BSD), generator=generator)
        y_TD = self.experts(x_TD, routing)
        if self.shared is not None:
            y_TD = y_TD + self.shared(x_TD)
        return y_TD.view_as(x_BSD), routing
