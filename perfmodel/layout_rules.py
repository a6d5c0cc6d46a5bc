"""The rules on how layers fall on the stages of a pipeline, for :data:`perfmodel.rules.RULES`.

`layout` is 0 for equal stages, 1 for balanced ones and 2 for an explicit layout, whose numbers are
`LAYOUT_VARIABLES`; a rule on those concerns only plans that have one.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from perfmodel.constraints import AtLeast, AtMost, Constraint, Divides, Implies, OneOf, ProductIs
from perfmodel.rule import Rule
from perfmodel.stages import balanced_counts

__all__ = ["LAYOUT_CODES", "LAYOUT_RULES", "LAYOUT_VARIABLES", "layout_note", "said"]

LAYOUT_VARIABLES = (
    "layout_stages",
    "layout_layers",
    "layout_mtp",
    "embedding_stage",
    "loss_stage",
    "mtp_stages",
    "mtp_stage",
    "mtp_chunk",
    "last_layer_stage",
)
"""What rules read of an explicit stage layout; virtual stages are counted from 1."""

LAYOUT_CODES = MappingProxyType({"equal": 0, "balanced": 1, "explicit": 2})
"""Values of the variable `layout`."""

_EQUAL = AtMost(("layout",), (0,))
_BY_RULE = AtMost(("layout",), (1,))
_BALANCED = OneOf("layout", (1,))
_WITH_MTP = AtLeast(("mtp_stage",), (1,))
_LAYOUT_SOURCE = "megatron/core/transformer/pipeline_parallel_layer_layout.py"

_SHOWN_STAGES = 16

LAYOUT_RULES = (
    Rule(
        "equal_stages",
        Implies(_EQUAL, Divides(("pp", "vpp"), ("n_layers",))),
        "every virtual stage holds the same number of layers unless a layout says otherwise",
        "pp",
        "megatron/core/transformer/transformer_config.py; Megatron-LM #1304",
    ),
    Rule(
        "pipeline_depth",
        Implies(_BY_RULE, AtMost(("pp",), ("n_layers",))),
        "no pipeline stage is empty",
        "pp",
        "megatron/core/transformer/transformer_block.py",
    ),
    Rule(
        "balanced_chunks",
        Implies(_BALANCED, AtMost(("pp", "vpp"), ("n_layers",))),
        "no virtual stage of a balanced layout is empty",
        "vpp",
        "perfmodel/mesh.py",
    ),
    Rule(
        "layout_stages",
        ProductIs(("pp", "vpp"), ("layout_stages",)),
        "a layout has one stage for each chunk of each device",
        "pp",
        _LAYOUT_SOURCE,
    ),
    Rule(
        "layout_layers",
        ProductIs(("layout_layers",), ("n_layers",)),
        "a layout places every decoder layer once",
        "layout_layers",
        f"{_LAYOUT_SOURCE}; Megatron-LM #1304",
    ),
    Rule(
        "layout_mtp",
        ProductIs(("layout_mtp",), ("mtp_layers",)),
        "a layout places every prediction (MTP) layer once",
        "layout_mtp",
        _LAYOUT_SOURCE,
    ),
    Rule(
        "layout_embedding",
        ProductIs(("embedding_stage",), (1,)),
        "the embedding is on the first virtual stage",
        "embedding_stage",
        _LAYOUT_SOURCE,
    ),
    Rule(
        "layout_loss",
        ProductIs(("loss_stage",), ("layout_stages",)),
        "the loss is on the last virtual stage",
        "loss_stage",
        _LAYOUT_SOURCE,
    ),
    Rule(
        "mtp_behind_layers",
        Implies(_WITH_MTP, AtLeast(("mtp_stage",), ("last_layer_stage",))),
        "no decoder layer is behind a prediction (MTP) layer",
        "mtp_stage",
        _LAYOUT_SOURCE,
    ),
    Rule(
        "mtp_together",
        AtMost(("mtp_stages",), (1,)),
        "all prediction (MTP) layers are on one virtual stage",
        "mtp_stages",
        _LAYOUT_SOURCE,
    ),
    Rule(
        "mtp_last_chunk",
        Implies(_WITH_MTP, ProductIs(("mtp_chunk",), ("vpp",))),
        "prediction (MTP) layers are in the last chunk of their device",
        "mtp_chunk",
        _LAYOUT_SOURCE,
    ),
)
"""Part of `RULES`."""


def said(constraint: Constraint) -> Constraint:
    """Leave out of an explanation which kind of layout the plan has: its author knows."""
    if isinstance(constraint, Implies) and constraint.condition.variables == {"layout"}:
        return constraint.consequence
    return constraint


def layout_note(values: Mapping[str, int]) -> str:
    """Offer a layout to a plan that has none and needs one."""
    stages = values["pp"] * values["vpp"]
    if stages > values["n_layers"]:
        return ""
    if stages > _SHOWN_STAGES:
        return "or give a layout, such as layout=balanced"
    counts = "/".join(map(str, balanced_counts(values["n_layers"], stages)))
    return f"or give a layout, such as layout=balanced or layout={counts}"
