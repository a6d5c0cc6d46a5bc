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
    from moe_ref.attention import Attention, Rotation, rotation
    from moe_ref.checkpoints import load_checkpoint, save_checkpoint
    from moe_ref.counting import count_matmul_flops, count_parameters
    from moe_ref.errors import MoeRefError
    from moe_ref.experts import Experts, apply_grouped, apply_looped
    from moe_ref.held_out import byte_tokens, evaluate
    from moe_ref.layer import MoELayer
    from moe_ref.model import ModelOutput, ReferenceModel, RouterFactory
    from moe_ref.paper_router import PaperRouter, RouterRecipe, sequence_auxiliary_loss, z_loss
    from moe_ref.parts import SwiGlu
    from moe_ref.recipe import WarmupStableDecay, adamw, parameter_groups, peak_learning_rate
    from moe_ref.routing import Router, Routing
    from moe_ref.statistics import RoutingStatistics, mean_statistics, routing_statistics
    from moe_ref.sweeps import SweepRow, SweepRun, read_sweep, sweep, train_sweep_run
    from moe_ref.training import Run, StepReport, TokenWindows, train

_HOMES = {
    "Attention": "attention",
    "Experts": "experts",
    "MoELayer": "layer",
    "ModelOutput": "model",
    "MoeRefError": "errors",
    "PaperRouter": "paper_router",
    "ReferenceModel": "model",
    "Rotation": "attention",
    "Router": "routing",
    "RouterFactory": "model",
    "RouterRecipe": "paper_router",
    "Routing": "routing",
    "RoutingStatistics": "statistics",
    "Run": "training",
    "StepReport": "training",
    "SweepRow": "sweeps",
    "SweepRun": "sweeps",
    "SwiGlu": "parts",
    "TokenWindows": "training",
    "WarmupStableDecay": "recipe",
    "adamw": "recipe",
    "apply_grouped": "experts",
    "apply_looped": "experts",
    "byte_tokens": "held_out",
    "count_matmul_flops": "counting",
    "count_parameters": "counting",
    "evaluate": "held_out",
    "load_checkpoint": "checkpoints",
    "mean_statistics": "statistics",
    "parameter_groups": "recipe",
    "peak_learning_rate": "recipe",
    "read_sweep": "sweeps",
    "rotation": "attention",
    "routing_statistics": "statistics",
    "save_checkpoint": "checkpoints",
    "sequence_auxiliary_loss": "paper_router",
    "sweep": "sweeps",
    "train": "training",
    "train_sweep_run": "sweeps",
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
    "Rotation",
    "Router",
    "RouterFactory",
    "RouterRecipe",
    "Routing",
    "RoutingStatistics",
    "Run",
    "StepReport",
    "SweepRow",
    "SweepRun",
    "SwiGlu",
    "TokenWindows",
    "WarmupStableDecay",
    "adamw",
    "apply_grouped",
    "apply_looped",
    "byte_tokens",
    "count_matmul_flops",
    "count_parameters",
    "evaluate",
    "load_checkpoint",
    "mean_statistics",
    "parameter_groups",
    "peak_learning_rate",
    "read_sweep",
    "rotation",
    "routing_statistics",
    "save_checkpoint",
    "sequence_auxiliary_loss",
    "sweep",
    "train",
    "train_sweep_run",
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
