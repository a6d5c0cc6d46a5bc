"""What the software stack does with the hardware: the constants of a stack profile."""

from __future__ import annotations

from typing import NamedTuple


class Stack(NamedTuple):
    """Constants of a software stack, in the form that the formulas take.

    The first four are fitted to measured runs; the others are stated assumptions. They come from
    a stack profile (:mod:`perfmodel.calibration.stacks`).
    """

    host_layer_s: float  # A: host time of one MoE layer, forward + replay + backward [s]
    host_microbatch_s: float  # H: host time of one microbatch on a stage, beside its layers [s]
    jitter_s: float  # s: wait of EP x PP ranks for the slowest of them [s]
    pipeline_node_cost: float  # c: relative cost of each further devices_per_node stages [-]
    forward_share: float  # of A: one forward pass [-]
    backward_share: float  # of A: one backward pass [-]
    dense_layer_share: float  # host time of a dense layer, relative to A [-]
    selective_replay: float  # of a forward pass that the host launches again, selective [-]
    super_selective_replay: float  # the same, super-selective [-]
    optimizer_matmul_eff: float  # of peak, in the optimizer's matrix iterations [-]
    framework_bytes: float  # context, communicators, workspaces on every device [B]


FITTED_CONSTANTS = ("host_layer_s", "host_microbatch_s", "jitter_s", "pipeline_node_cost")
"""The constants that measured runs identify; the others are stated assumptions."""
