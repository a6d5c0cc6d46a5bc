"""A PyTorch mixture-of-experts model to calibrate and validate predictions with.

>>> from moe_ref import ReferenceModel
>>> from perfmodel import ladder
>>> model = ReferenceModel(ladder(q=8, n_experts=96, top_k=2, expert_split=4))

The only package that may import torch (extra ``torch``). Names are loaded when they are first used:
importing ``moe_ref`` itself does not load torch, and so works where it is not installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_ref.attention import Attention
    from moe_ref.errors import MoeRefError
    from moe_ref.experts import Experts, apply_grouped, apply_looped
    from moe_ref.layer import MoELayer
    from moe_ref.model import ModelOutput, ReferenceModel, RouterFactory
    from moe_ref.paper_router import (
        PaperRouter,
        RouterRecipe,
        sequence_auxiliary_loss,
        z_loss,
    )
    from moe_ref.routing import Router, Routing

_HOMES = {
    "Attention": "attention",
    "Experts": "experts",
    "MoELayer": "layer",
    "ModelOutput": "model",
    "MoeRefError": "errors",
    "PaperRouter": "paper_router",
    "ReferenceModel": "model",
    "Router": "routing",
    "RouterFactory": "model",
    "RouterRecipe": "paper_router",
    "Routing": "routing",
    "apply_grouped": "experts",
    "apply_looped": "experts",
    "sequence_auxiliary_loss": "paper_router",
    "z_loss": "paper_router",
}

__all__ = [
    "Attention",
    "Experts",
    "MoELayer",
    "ModelOutput",
    "MoeRefError",
    "PaperRouter",
    "ReferenceModel",
    "Router",
    "RouterFactory",
    "RouterRecipe",
    "Routing",
    "apply_grouped",
    "apply_looped",
    "sequence_auxiliary_loss",
    "z_loss",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
