"""Times of a layer under a recompute mode, as a stack runs them."""

from __future__ import annotations

from typing import NamedTuple

from perfmodel._jit import formula
from perfmodel.dims import ArchitectureDims
from perfmodel.layer import LayerCost, OperatorTimes, total
from perfmodel.replay import Replay, latent_up_share, replay_of
from perfmodel.stack import Stack


class ModeTotals(NamedTuple):
    """One microbatch of one layer under a recompute mode, summed over operators and passes [s]."""

    moe_device: float
    dense_device: float
    launches: float  # host time of a MoE layer's grouped products
    dispatch: float  # all expert all-to-alls of a MoE layer
    host_share: float  # of A: forward, replay and backward [-]
    forward_share: float  # forward time / (forward + backward), replay in the backward [-]
    head: float  # head and cross-entropy, and those and the projection of each prediction layer
    joined: float  # the projection of one prediction layer


@formula
def with_replay(
    forward: OperatorTimes, backward: OperatorTimes, replay: Replay, moe: float, latent_up: float
) -> OperatorTimes:
    """One layer's forward, what is replayed of it, and its backward [s].

    ``moe`` is 1 for a layer with experts; ``latent_up`` is :func:`latent_up_share`.
    """
    whole = 1.0 + replay.whole
    experts = 1.0 + max(replay.whole, replay.experts)
    activation = replay.expert_activation if moe > 0.0 else replay.dense_activation
    block = replay.shared if moe > 0.0 else replay.dense_block
    linear = 1.0 + max(replay.whole, replay.latent_up * latent_up)
    core = 1.0 + replay.core
    return OperatorTimes(
        attention_linear=linear * forward.attention_linear + backward.attention_linear,
        attention_core=core * forward.attention_core + backward.attention_core,
        elementwise=(1.0 + replay.norms) * forward.elementwise + backward.elementwise,
        router=experts * forward.router + backward.router,
        permutation=experts * forward.permutation + backward.permutation,
        experts=experts * forward.experts + backward.experts,
        activation=(1.0 + activation) * forward.activation + backward.activation,
        dense_ffn=(1.0 + block) * forward.dense_ffn + backward.dense_ffn,
        tensor_parallel=whole * forward.tensor_parallel + backward.tensor_parallel,
        context_parallel=core * forward.context_parallel + backward.context_parallel,
        gradient=backward.gradient,
    )


@formula
def layer_times(
    cost: LayerCost, stack: Stack, replay: Replay, moe: float, latent_up: float
) -> OperatorTimes:
    """One layer's forward, replay and backward as a stack runs them [s].

    Its kernels, what it does not overlap, and attention's scores where it writes them: once
    forward, once more in a replay, and twice as many bytes backward.
    """
    forward, backward = cost.dense_forward, cost.dense_backward
    if moe > 0.0:
        forward, backward = cost.moe_forward, cost.moe_backward
    t = with_replay(forward, backward, replay, moe, latent_up)
    k = stack.device_scale
    moved = k * stack.elementwise_scale
    scores = stack.score_bytes * cost.score_byte * (3.0 + replay.core)
    return OperatorTimes(
        attention_linear=k * t.attention_linear,
        attention_core=k * (stack.attention_scale * t.attention_core + scores),
        elementwise=moved * t.elementwise,
        router=k * stack.router_scale * t.router,
        permutation=moved * t.permutation,
        experts=k * t.experts,
        activation=moved * t.activation,
        dense_ffn=k * t.dense_ffn,
        tensor_parallel=stack.tp_exposed * t.tensor_parallel,
        context_parallel=t.context_parallel,
        gradient=k * t.gradient,
    )


@formula
def host_replay(stack: Stack, replay: Replay) -> float:
    """Share of a forward pass that the host launches again [-].

    Of single modules: attention as in the selective mode, norms and gated units share what the
    super-selective mode has more, projections and blocks by their calls among about twenty-five.
    """
    if replay.whole > 0.0:
        return 1.0
    share = stack.selective_replay * replay.core
    rest = stack.super_selective_replay - stack.selective_replay
    share += rest * (0.6 * replay.norms + 0.4 * replay.expert_activation)
    share += 0.1 * replay.latent_up + 0.15 * replay.dense_block
    return share + max(0.5 * replay.experts, 0.1 * replay.shared)


@formula
def mode_totals(cost: LayerCost, a: ArchitectureDims, stack: Stack, mode: float) -> ModeTotals:
    """Sum the costs of a layer under a recompute mode [s]."""
    replay = replay_of(mode)
    up = latent_up_share(a)
    again = max(replay.whole, replay.experts)
    moe = layer_times(cost, stack, replay, 1.0, up)
    dense = layer_times(cost, stack, replay, 0.0, up)
    launches = cost.launch_forward * (1.0 + again) + cost.launch_backward
    once = stack.copies_once
    dispatch = (1.0 - once) * cost.dispatch + once * cost.dispatch_once
    return ModeTotals(
        moe_device=total(moe),
        dense_device=total(dense),
        launches=stack.launch_share * launches,
        dispatch=dispatch * (4.0 + 2.0 * again),
        host_share=stack.forward_share * (1.0 + host_replay(stack, replay)) + stack.backward_share,
        forward_share=0.25 if mode == 3.0 else 1.0 / 3.0,
        head=stack.device_scale * cost.head,
        joined=stack.device_scale * cost.joined,
    )
