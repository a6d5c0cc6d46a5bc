"""The rules of a stack that hides the expert all-to-all of one microbatch behind another's compute.

They are apart from :data:`perfmodel.rules.RULES`, since the overlap is a switch of a stack profile
(``megatron-bridge+overlap``) and not part of a plan. `recompute` is a code, 0 none to 3 full.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from perfmodel.constraints import AtLeast, AtMost, Implies
from perfmodel.rule import Rule

__all__ = ["OVERLAP_RULES", "overlap_mask"]

_SOURCE = (
    "megatron/core/transformer/transformer_config.py (overlap_moe_expert_parallel_comm); "
    "megatron/bridge/training/comm_overlap.py"
)

OVERLAP_RULES = (
    Rule(
        "overlap_needs_experts_apart",
        AtLeast(("ep",), (2,)),
        "there is no all-to-all to hide where every rank has all experts",
        "ep",
        _SOURCE,
    ),
    Rule(
        "overlap_needs_chunks",
        Implies(AtLeast(("pp",), (2,)), AtLeast(("vpp",), (2,))),
        "in a pipeline the two microbatches at work are of two chunks of the interleaved schedule",
        "vpp",
        _SOURCE,
    ),
    Rule(
        "overlap_without_full_recompute",
        AtMost(("recompute",), (2,)),
        "a layer that is computed again as a whole would dispatch its tokens once more",
        "recompute",
        _SOURCE,
    ),
)
"""What `overlap_moe_expert_parallel_comm` refuses."""


def overlap_mask(columns: Mapping[str, NDArray[np.int64]]) -> NDArray[np.bool_]:
    """Mark the plans that such a stack runs.

    Parameters
    ----------
    columns : mapping of str to array of shape (n,)
        At least `ep`, `pp`, `vpp` and `recompute` (:attr:`perfmodel.plan_table.PlanTable.columns`).
    """
    runs = np.ones(len(columns["ep"]), dtype=np.bool_)
    for rule in OVERLAP_RULES:
        runs &= np.asarray(rule.constraint.holds(dict(columns)))
    return runs
