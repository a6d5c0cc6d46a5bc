"""What the software stack does with the hardware: the constants of a stack profile."""

from __future__ import annotations

from typing import NamedTuple


class Stack(NamedTuple):
    """Constants of a software stack, in the form that the formulas take.

    A profile fits a few of them to measured runs and states the others
    (:mod:`perfmodel.calibration.stacks`). Shares that are hidden run from 0, nothing overlaps, to
    1, all that fits behind compute is hidden.
    """

    host_layer_s: float  # A: host time of one MoE layer, forward + replay + backward [s]
    host_microbatch_s: float  # H: host time of one microbatch on a stage, beside its layers [s]
    jitter_s: float  # s: wait of EP x PP ranks for the slowest of them [s]
    pipeline_node_cost: float  # c: relative cost of each further devices_per_node stages [-]
    device_scale: float  # k: time of device kernels over that of the pack's surfaces [-]
    attention_scale: float  # time of fused attention over that of the surface, beside k [-]
    elementwise_scale: float  # of norms, gated units and permutation, beside k [-]
    router_scale: float  # of the router's product and selection, beside k [-]
    optimizer_scale: float  # time of the optimizer over that of its least traffic [-]
    step_host_s: float  # once a step: optimizer launches, data loader, logging [s]
    tp_exposed: float  # TP's collectives that compute does not hide, over the pack's time [-]
    dp_hidden: float  # share of gradient and weight exchange behind compute [-]
    pp_hidden: float  # share of a microbatch's hand-offs behind compute [-]
    a2a_hidden: float  # share of the expert all-to-all behind compute [-]
    score_bytes: float  # moved for each attention score, forward; 0 where attention is fused [B]
    copies_once: float  # 1: a token goes once to each node that has experts of it; 0: K copies
    launch_share: float  # of grouped products' launches: 1 one an expert, 0 fused or captured [-]
    forward_share: float  # of A: one forward pass [-]
    backward_share: float  # of A: one backward pass [-]
    dense_layer_share: float  # host time of a dense layer, relative to A [-]
    selective_replay: float  # of a forward pass that the host launches again, selective [-]
    super_selective_replay: float  # the same, super-selective [-]
    gradient_bytes: float  # of each gradient on the wire [B]
    optimizer_matmul_eff: float  # of peak, in the optimizer's matrix iterations [-]
    framework_bytes: float  # context, communicators, workspaces on every device [B]
    reserve_share: float  # of what is allocated, that the allocator holds besides [-]
    gradient_memory_bytes: float  # of each resident gradient [B]
    logit_bytes: float  # of each logit, copies and gradients of cross-entropy included [B]
    hidden_copies: float  # tensors of the residual width that a layer keeps besides [-]
    unit_copies: float  # tensors of the gated unit's width that it keeps besides [-]
    gathered_inputs: float  # 1: inputs that TP gathers are kept; 0: they are gathered again [-]
    working_widths: float  # tensors of the unit's width in the backward pass of a layer [-]
    wgrad_bytes: float  # of each weight of a layer and of the head, beside the main gradients [B]


MEMORY_CONSTANTS = Stack._fields[Stack._fields.index("framework_bytes") :]
"""The constants that the memory of a device depends on."""

HIDDEN_SHARES = ("dp_hidden", "pp_hidden", "a2a_hidden", "copies_once")
"""The constants that are at most 1: no more than all of something is hidden, or sent once."""

MAX_FITTED = 5
"""The most constants that a profile may fit."""

SWEEP_CONSTANTS = ("host_layer_s", "host_microbatch_s", "jitter_s", "pipeline_node_cost")
"""The constants that the layout sweeps of megatron-eager identify."""
