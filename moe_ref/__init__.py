"""A PyTorch mixture-of-experts model to calibrate and validate predictions with.

>>> from moe_ref import ReferenceModel
>>> from perfmodel import ladder
>>> model = ReferenceModel(ladder(q=8, n_experts=96, top_k=2, expert_split=4))

The only package that may import torch (extra ``torch``). Names are loaded when they are first used:
importing ``moe_ref`` itself does not load torch, and so works where it is not installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perfmodel.lazy import lazy_names

if TYPE_CHECKING:
    from moe_ref.attention import Attention, Rotation, rotation
    from moe_ref.checkpoints import load_checkpoint, save_checkpoint
    from moe_ref.counting import count_matmul_flops, count_parameters
    from moe_ref.errors import MoeRefError, RankError
    from moe_ref.experts import Experts, apply_grouped, apply_looped
    from moe_ref.held_out import byte_tokens, evaluate
    from moe_ref.layer import MoELayer
    from moe_ref.lineage.balance import AuxiliaryLoss, cv_squared, load_balancing_loss
    from moe_ref.lineage.capacity import Capacity, CapacityRounding, DropOrder, within_capacity
    from moe_ref.lineage.deepseek import (
        BiasUpdate,
        DeepSeekV2Recipe,
        DeepSeekV2Router,
        DeepSeekV3Recipe,
        DeepSeekV3Router,
        updated_bias,
    )
    from moe_ref.lineage.groups import ExpertGroups, GroupMask, GroupScore
    from moe_ref.lineage.gshard import (
        GShardRecipe,
        GShardRouter,
        SecondExpert,
        StMoeRecipe,
        StMoeRouter,
    )
    from moe_ref.lineage.linear import LineageRecipe, LinearRouter, Normalisation
    from moe_ref.lineage.mixtral import MixtralRecipe, MixtralRouter
    from moe_ref.lineage.shazeer import ShazeerRecipe, ShazeerRouter, probability_in_top_k
    from moe_ref.lineage.sinkhorn import SinkhornRecipe, SinkhornRouter, sinkhorn
    from moe_ref.lineage.switch import SwitchRecipe, SwitchRouter
    from moe_ref.microbench.calibration import Calibration, calibrate
    from moe_ref.microbench.errors import CalibrationError
    from moe_ref.model import ModelOutput, ReferenceModel, RouterFactory
    from moe_ref.paper_router import PaperRouter, RouterRecipe, sequence_auxiliary_loss, z_loss
    from moe_ref.parallel import ParallelExperts, ParallelRun
    from moe_ref.parts import SwiGlu
    from moe_ref.ranks import run_ranks
    from moe_ref.recipe import WarmupStableDecay, adamw, parameter_groups, peak_learning_rate
    from moe_ref.routing import Router, Routing
    from moe_ref.statistics import RoutingStatistics, mean_statistics, routing_statistics
    from moe_ref.sweeps import SweepRow, SweepRun, read_sweep, sweep, train_sweep_run
    from moe_ref.training import Run, StepReport, TokenWindows, train
    from moe_ref.validation.cases import StepCase
    from moe_ref.validation.loop import Validation, validate
    from moe_ref.validation.scores import Prediction, ScoredStep, StepScores

_HOMES = {
    "Attention": "attention",
    "AuxiliaryLoss": "lineage.balance",
    "BiasUpdate": "lineage.deepseek",
    "Calibration": "microbench.calibration",
    "CalibrationError": "microbench.errors",
    "Capacity": "lineage.capacity",
    "CapacityRounding": "lineage.capacity",
    "DeepSeekV2Recipe": "lineage.deepseek",
    "DeepSeekV2Router": "lineage.deepseek",
    "DeepSeekV3Recipe": "lineage.deepseek",
    "DeepSeekV3Router": "lineage.deepseek",
    "DropOrder": "lineage.capacity",
    "ExpertGroups": "lineage.groups",
    "Experts": "experts",
    "GShardRecipe": "lineage.gshard",
    "GShardRouter": "lineage.gshard",
    "GroupMask": "lineage.groups",
    "GroupScore": "lineage.groups",
    "LineageRecipe": "lineage.linear",
    "LinearRouter": "lineage.linear",
    "MixtralRecipe": "lineage.mixtral",
    "MixtralRouter": "lineage.mixtral",
    "MoELayer": "layer",
    "ModelOutput": "model",
    "MoeRefError": "errors",
    "Normalisation": "lineage.linear",
    "PaperRouter": "paper_router",
    "ParallelExperts": "parallel",
    "ParallelRun": "parallel",
    "Prediction": "validation.scores",
    "RankError": "errors",
    "ReferenceModel": "model",
    "Rotation": "attention",
    "Router": "routing",
    "RouterFactory": "model",
    "RouterRecipe": "paper_router",
    "Routing": "routing",
    "RoutingStatistics": "statistics",
    "Run": "training",
    "ScoredStep": "validation.scores",
    "SecondExpert": "lineage.gshard",
    "ShazeerRecipe": "lineage.shazeer",
    "ShazeerRouter": "lineage.shazeer",
    "SinkhornRecipe": "lineage.sinkhorn",
    "SinkhornRouter": "lineage.sinkhorn",
    "StMoeRecipe": "lineage.gshard",
    "StMoeRouter": "lineage.gshard",
    "StepCase": "validation.cases",
    "StepReport": "training",
    "StepScores": "validation.scores",
    "SweepRow": "sweeps",
    "SweepRun": "sweeps",
    "SwiGlu": "parts",
    "SwitchRecipe": "lineage.switch",
    "SwitchRouter": "lineage.switch",
    "TokenWindows": "training",
    "Validation": "validation.loop",
    "WarmupStableDecay": "recipe",
    "adamw": "recipe",
    "apply_grouped": "experts",
    "apply_looped": "experts",
    "byte_tokens": "held_out",
    "calibrate": "microbench.calibration",
    "count_matmul_flops": "counting",
    "count_parameters": "counting",
    "cv_squared": "lineage.balance",
    "evaluate": "held_out",
    "load_balancing_loss": "lineage.balance",
    "load_checkpoint": "checkpoints",
    "mean_statistics": "statistics",
    "parameter_groups": "recipe",
    "peak_learning_rate": "recipe",
    "probability_in_top_k": "lineage.shazeer",
    "read_sweep": "sweeps",
    "rotation": "attention",
    "routing_statistics": "statistics",
    "run_ranks": "ranks",
    "save_checkpoint": "checkpoints",
    "sequence_auxiliary_loss": "paper_router",
    "sinkhorn": "lineage.sinkhorn",
    "sweep": "sweeps",
    "train": "training",
    "train_sweep_run": "sweeps",
    "updated_bias": "lineage.deepseek",
    "validate": "validation.loop",
    "within_capacity": "lineage.capacity",
    "z_loss": "paper_router",
}

__all__ = [
    "Attention",
    "AuxiliaryLoss",
    "BiasUpdate",
    "Calibration",
    "CalibrationError",
    "Capacity",
    "CapacityRounding",
    "DeepSeekV2Recipe",
    "DeepSeekV2Router",
    "DeepSeekV3Recipe",
    "DeepSeekV3Router",
    "DropOrder",
    "ExpertGroups",
    "Experts",
    "GShardRecipe",
    "GShardRouter",
    "GroupMask",
    "GroupScore",
    "LineageRecipe",
    "LinearRouter",
    "MixtralRecipe",
    "MixtralRouter",
    "MoELayer",
    "ModelOutput",
    "MoeRefError",
    "Normalisation",
    "PaperRouter",
    "ParallelExperts",
    "ParallelRun",
    "Prediction",
    "RankError",
    "ReferenceModel",
    "Rotation",
    "Router",
    "RouterFactory",
    "RouterRecipe",
    "Routing",
    "RoutingStatistics",
    "Run",
    "ScoredStep",
    "SecondExpert",
    "ShazeerRecipe",
    "ShazeerRouter",
    "SinkhornRecipe",
    "SinkhornRouter",
    "StMoeRecipe",
    "StMoeRouter",
    "StepCase",
    "StepReport",
    "StepScores",
    "SweepRow",
    "SweepRun",
    "SwiGlu",
    "SwitchRecipe",
    "SwitchRouter",
    "TokenWindows",
    "Validation",
    "WarmupStableDecay",
    "adamw",
    "apply_grouped",
    "apply_looped",
    "byte_tokens",
    "calibrate",
    "count_matmul_flops",
    "count_parameters",
    "cv_squared",
    "evaluate",
    "load_balancing_loss",
    "load_checkpoint",
    "mean_statistics",
    "parameter_groups",
    "peak_learning_rate",
    "probability_in_top_k",
    "read_sweep",
    "rotation",
    "routing_statistics",
    "run_ranks",
    "save_checkpoint",
    "sequence_auxiliary_loss",
    "sinkhorn",
    "sweep",
    "train",
    "train_sweep_run",
    "updated_bias",
    "validate",
    "within_capacity",
    "z_loss",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES, __all__)
