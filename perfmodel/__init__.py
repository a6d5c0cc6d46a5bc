"""What a training step of a transformer costs: time, memory, FLOPs, and what each rests on.

>>> from perfmodel import Batch, Cluster, Plan, estimate, ladder
>>> step = estimate(
...     ladder(q=12, n_experts=96, top_k=2, expert_split=4),
...     Plan.parse("ep=8,pp=8,mbs=4", world=256),
...     Cluster.parse("p6-b200:32"),
...     Batch(global_batch=1024, seq_len=2048),
... )

Names are loaded when they are first used, so that importing the package loads no compiler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perfmodel.lazy import lazy_names

if TYPE_CHECKING:
    from perfmodel.architecture import Architecture, MfuConvention, ParameterConvention
    from perfmodel.calibration.packs import HardwarePack, load_pack
    from perfmodel.calibration.records import PackError
    from perfmodel.calibration.stacks import StackProfile, load_stack
    from perfmodel.cluster import Batch, Cluster, Optimizer
    from perfmodel.errors import IllegalPlanError, PerfmodelError
    from perfmodel.explanation import Explanation, explain
    from perfmodel.goodput import FailureFacts, Goodput
    from perfmodel.ladders import ladder, parse_ladder
    from perfmodel.layout_search import LayoutSearch, layout_space, search_layouts
    from perfmodel.levels import NetworkLevel
    from perfmodel.models import CatalogueEntry, catalogue
    from perfmodel.parts import Biases, ExtraParameters, LatentAttention, SlidingWindow
    from perfmodel.plan import Plan, Recompute
    from perfmodel.plan_space import PlanSpace
    from perfmodel.precision import Precision
    from perfmodel.rules import RULES, Violation
    from perfmodel.sources import Source
    from perfmodel.stages import StageLayout
    from perfmodel.step import StepEstimate, check, estimate

_HOMES = {
    "RULES": "rules",
    "Architecture": "architecture",
    "Batch": "cluster",
    "Biases": "parts",
    "CatalogueEntry": "models",
    "Cluster": "cluster",
    "Explanation": "explanation",
    "ExtraParameters": "parts",
    "FailureFacts": "goodput",
    "Goodput": "goodput",
    "HardwarePack": "calibration.packs",
    "IllegalPlanError": "errors",
    "LatentAttention": "parts",
    "LayoutSearch": "layout_search",
    "MfuConvention": "architecture",
    "NetworkLevel": "levels",
    "Optimizer": "cluster",
    "PackError": "calibration.records",
    "ParameterConvention": "architecture",
    "PerfmodelError": "errors",
    "Plan": "plan",
    "PlanSpace": "plan_space",
    "Precision": "precision",
    "Recompute": "plan",
    "SlidingWindow": "parts",
    "Source": "sources",
    "StackProfile": "calibration.stacks",
    "StageLayout": "stages",
    "StepEstimate": "step",
    "Violation": "rules",
    "catalogue": "models",
    "check": "step",
    "estimate": "step",
    "explain": "explanation",
    "ladder": "ladders",
    "layout_space": "layout_search",
    "load_pack": "calibration.packs",
    "load_stack": "calibration.stacks",
    "parse_ladder": "ladders",
    "search_layouts": "layout_search",
}

__all__ = [
    "RULES",
    "Architecture",
    "Batch",
    "Biases",
    "CatalogueEntry",
    "Cluster",
    "Explanation",
    "ExtraParameters",
    "FailureFacts",
    "Goodput",
    "HardwarePack",
    "IllegalPlanError",
    "LatentAttention",
    "LayoutSearch",
    "MfuConvention",
    "NetworkLevel",
    "Optimizer",
    "PackError",
    "ParameterConvention",
    "PerfmodelError",
    "Plan",
    "PlanSpace",
    "Precision",
    "Recompute",
    "SlidingWindow",
    "Source",
    "StackProfile",
    "StageLayout",
    "StepEstimate",
    "Violation",
    "catalogue",
    "check",
    "estimate",
    "explain",
    "ladder",
    "layout_space",
    "load_pack",
    "load_stack",
    "parse_ladder",
    "search_layouts",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES, __all__)
