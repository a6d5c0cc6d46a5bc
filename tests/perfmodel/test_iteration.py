"""Time of a step: parts that add up, the pipeline against its task graph, FLOPs, monotony."""

from __future__ import annotations

from itertools import pairwise
from math import isfinite, log2

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from perfmodel.architecture import Architecture, MfuConvention, ParameterConvention
from perfmodel.calibration.stacks import StackProfile
from perfmodel.cluster import Optimizer
from perfmodel.exchange import (
    data_parallel_time,
    newton_schulz_flop,
    optimizer_time,
    synchronisation_time,
)
from perfmodel.iteration import pipeline_time, step_total, time_of_stage
from perfmodel.layer import OperatorTimes, layer_cost
from perfmodel.modes import ModeTotals, mode_totals, with_replay
from perfmodel.replay import replay_of
from perfmodel.schedule import makespan_interleaved
from perfmodel.schedule_graph import simulate
from perfmodel.stack import SWEEP_CONSTANTS, Stack

from .strategies import (
    PEAK,
    Run,
    core_flop,
    dims,
    ideal_hardware,
    ideal_stack,
    moe,
    prediction_tensors,
    profiles,
    runs,
    stage_time,
    tensors,
)

FORWARD_SHARE = {0.0: 1 / 3, 1.0: 1 / 3, 2.0: 1 / 3, 3.0: 1 / 4}
ADAMW = Optimizer.ADAMW.dims


# ---------------------------------------------------------------- parts of a step


@given(runs(), profiles)
def test_the_breakdown_adds_up_to_the_step(run: Run, stack: StackProfile) -> None:
    model = run.under(stack)
    parts = model.breakdown()
    assert sum(parts.values()) == pytest.approx(model.step_s, rel=1e-12)
    assert all(isfinite(seconds) for seconds in parts.values())
    assert all(seconds >= 0 for name, seconds in parts.items() if name != "bubble")
    assert parts["bubble"] >= -1e-12 * model.step_s


@given(runs(), profiles)
def test_mfu_is_a_fraction_of_what_the_devices_could_do(run: Run, stack: StackProfile) -> None:
    step_s = run.under(stack).step_s
    for convention in (MfuConvention.SIX_N_NONEMBEDDING, MfuConvention.SIX_N_HEAD):
        flop = run.architecture.flops_per_token(convention) * run.batch.tokens
        mfu = flop / (step_s * run.cluster.n_devices * run.cluster.peak_flops)
        assert 0 < mfu < 1


@given(runs())
def test_the_steady_part_is_shared_out_over_data_parallel_replicas(run: Run) -> None:
    """Twice the replicas, half of the microbatches: the last stage works half as long."""
    a, stack, p = run.architecture.dims, run.model.profile.stack(), run.dims
    totals = mode_totals(run.model.cost, a, stack, p.recompute)
    n = 4.0 * run.plan.pp
    hw, seq_len = run.cluster.constants, float(run.batch.seq_len)
    one = pipeline_time(a, hw, stack, p, totals, seq_len, 2 * n)
    two = pipeline_time(a, hw, stack, p._replace(dp=2 * p.dp), totals, seq_len, n)
    assert one.steady == pytest.approx(2 * two.steady, rel=1e-12)
    assert one.bubble == pytest.approx(two.bubble, rel=1e-9, abs=1e-9 * one.steady)


# ---------------------------------------------------------------- against the task graph


def pipeline(a: Architecture, stack: Stack, **plan: float) -> tuple[float, list[float], float]:
    """Return the makespan, the times of the stages, and the last one's without the head."""
    n = plan.pop("n_microbatches")
    p = dims(**plan)
    cost = layer_cost(a.dims, ideal_hardware(), 2048.0, dims())
    totals = mode_totals(cost, a.dims, stack, p.recompute)
    made = pipeline_time(a.dims, ideal_hardware(), stack, p, totals, 2048.0, float(n))

    def stage(index: float, t: ModeTotals) -> float:
        return time_of_stage(a.dims, ideal_hardware(), stack, p, t, 2048.0, index).time

    times = [stage(float(s), totals) for s in range(int(p.pp))]
    bare = stage(p.pp - 1.0, totals._replace(head=0.0))
    assert made.pipeline_depth == 0
    return made.steady + made.bubble, times, bare


stacks = st.builds(
    ideal_stack,
    host_layer_s=st.sampled_from((0.0, 2e-5, 1e-4)),
    host_microbatch_s=st.sampled_from((0.0, 1e-5)),
    forward_share=st.just(0.3),
    backward_share=st.just(0.4),
    dense_layer_share=st.sampled_from((0.25, 1.0)),
)
models = st.builds(
    moe,
    n_layers=st.just(12),
    first_k_dense=st.integers(0, 3),
    d_ff=st.sampled_from((64, 768, 6000)),
    vocab_size=st.sampled_from((8, 2000, 50000)),
)


@given(models, stacks, st.sampled_from((1, 2, 3, 4)), st.integers(1, 9), st.integers(0, 3))
def test_1f1b_is_the_longest_path_of_its_task_graph(
    a: Architecture, stack: Stack, pp: int, n_microbatches: int, mode: int
) -> None:
    """Exact for dense layers within the first stage, whichever stage is the slowest."""
    makespan, times, _ = pipeline(a, stack, pp=pp, recompute=mode, n_microbatches=n_microbatches)
    share = FORWARD_SHARE[float(mode)]
    forward = [share * t for t in times]
    backward = [(1 - share) * t for t in times]
    assert makespan == pytest.approx(simulate("1f1b", forward, backward, n_microbatches), rel=1e-9)


@given(st.integers(4, 12), stacks, st.sampled_from((3, 4, 6)), st.integers(1, 9))
def test_1f1b_never_promises_too_much_where_dense_layers_reach_further(
    first_k_dense: int, stack: Stack, pp: int, n_microbatches: int
) -> None:
    for d_ff in (64, 6000):
        a = moe(n_layers=12, first_k_dense=first_k_dense, d_ff=d_ff)
        makespan, times, _ = pipeline(a, stack, pp=pp, n_microbatches=n_microbatches)
        forward = [t / 3 for t in times]
        backward = [2 * t / 3 for t in times]
        exact = simulate("1f1b", forward, backward, n_microbatches)
        assert makespan >= exact * (1 - 1e-12)


@given(
    st.integers(0, 3),
    st.sampled_from((2, 3, 4)),
    st.integers(0, 1),
    stacks,
    st.sampled_from((2, 3, 4, 6)),
    st.integers(1, 9),
)
def test_1f1b_with_dense_layers_between_sparse_ones(
    first_k_dense: int, moe_every: int, mtp_layers: int, stack: Stack, pp: int, n: int
) -> None:
    """Exact where the stages between the ends are alike; else never too little."""
    for d_ff in (64, 6000):
        a = moe(n_layers=12, first_k_dense=first_k_dense, d_ff=d_ff, moe_every=moe_every)
        a = a.model_copy(update={"mtp_layers": mtp_layers})
        makespan, times, _ = pipeline(a, stack, pp=pp, n_microbatches=n)
        forward = [t / 3 for t in times]
        backward = [2 * t / 3 for t in times]
        exact = simulate("1f1b", forward, backward, n)
        assert makespan >= exact * (1 - 1e-12)
        if len(set(times[1:-1])) <= 1:
            assert makespan == pytest.approx(exact, rel=1e-9)


@given(
    st.sampled_from((0, 1, 2)),
    st.sampled_from((8, 2000, 50000)),
    st.sampled_from((2, 3, 4)),
    st.sampled_from((2, 3)),
    st.integers(1, 3),
)
def test_interleaving_is_the_longest_path_where_the_last_stage_is_the_slowest(
    first_k_dense: int, vocab_size: int, pp: int, vpp: int, groups: int
) -> None:
    """Dense layers are in the first chunk of the first device, the head in the last of the last."""
    a = moe(n_layers=72, first_k_dense=first_k_dense, d_ff=64, vocab_size=vocab_size)
    n = groups * pp
    makespan, times, bare = pipeline(a, ideal_stack(), pp=pp, vpp=vpp, n_microbatches=n)
    chunks = np.full((vpp, pp), bare / vpp)
    chunks[0, 0] -= bare - times[0]
    chunks[-1, -1] += times[-1] - bare
    assert chunks.sum(axis=0) == pytest.approx(times, rel=1e-12)
    exact = simulate("interleaved", chunks / 3, 2 * chunks / 3, n)
    assert makespan == pytest.approx(exact, rel=1e-9)


@given(
    st.tuples(*[st.sampled_from((0.01, 0.5, 1.0, 4.0))] * 3),
    st.sampled_from((2, 3, 4, 8)),
    st.sampled_from((1, 2, 4)),
    st.integers(1, 4),
)
def test_no_schedule_ends_before_its_busiest_device_has_done_its_work(
    taus: tuple[float, float, float], pp: int, vpp: int, groups: int
) -> None:
    """Else the bubble would be negative."""
    first, mid, last = taus
    n = float(groups * pp)
    makespan = makespan_interleaved(first, mid, last, float(pp), float(vpp), n)
    busiest = max(first, last, mid if pp > 2 else 0.0)
    assert makespan >= n * busiest


def test_depth_beyond_a_node_costs_its_share() -> None:
    a = moe(n_layers=16, first_k_dense=0)
    cost = layer_cost(a.dims, ideal_hardware(), 2048.0, dims())
    hw = ideal_hardware()
    for pp, nodes in ((1, 1), (8, 1), (16, 2)):
        stack = ideal_stack(pipeline_node_cost=0.5)
        totals = mode_totals(cost, a.dims, stack, 0.0)
        made = pipeline_time(a.dims, hw, stack, dims(pp=pp), totals, 2048.0, 16.0)
        expected = 0.5 * (nodes - 1) * (made.steady + made.bubble)
        assert made.pipeline_depth == pytest.approx(expected, abs=0)


# ---------------------------------------------------------------- FLOPs on an ideal machine


@given(runs())
def test_on_an_ideal_machine_a_step_takes_its_flops(run: Run) -> None:
    """All stages, devices and microbatches together; nothing counted twice or left out."""
    a, plan, p = run.architecture, run.plan, run.dims
    seq_len = float(run.batch.seq_len)
    cost = layer_cost(a.dims, ideal_hardware(), seq_len, p)
    totals = mode_totals(cost, a.dims, ideal_stack(), p.recompute)
    n_devices = plan.tp * plan.cp * plan.dp  # of a stage
    stack, hw = ideal_stack(), ideal_hardware()
    stages = [
        time_of_stage(a.dims, hw, stack, p, totals, seq_len, float(s)) for s in range(plan.pp)
    ]
    assert all(stage.time == stage.device + stage.head for stage in stages)
    measured = sum(stage.time for stage in stages) * n_devices * run.model.n_microbatches * PEAK

    layers = 0.0
    for tensor in tensors(a) + prediction_tensors(a):
        if len(tensor.shape) == 1 or tensor.layer in ("embedding", "positions", "head", "final"):
            continue
        works = a.top_k / a.n_experts if tensor.split == "expert" else 1
        copies = max(1, plan.tp // a.n_kv_heads) if tensor.split == "kv" else 1
        layers += tensor.size * works * copies
    passes, core_passes = ((6, 1), (6, 2), (6, 2), (8, 2))[plan.recompute.code]
    forward, backward = core_flop(a, run.batch.seq_len)
    core = (a.n_layers + a.mtp_layers) * (core_passes * forward + backward)
    # The projection of a prediction layer is not replayed, nor are logits.
    joined = a.mtp_layers * 2 * a.d_model**2
    per_token = passes * (layers - joined) + core
    per_token += 6 * (joined + (1 + a.mtp_layers) * a.vocab_size * a.d_model)
    assert measured == pytest.approx(per_token * run.batch.tokens, rel=1e-9)


def test_an_ideal_step_is_its_mfu_convention_and_attention() -> None:
    """6 N with the head, less what multiplies no token: the norms."""
    a = moe(first_k_dense=0)
    cost = layer_cost(a.dims, ideal_hardware(), 2048.0, dims())
    totals = mode_totals(cost, a.dims, ideal_stack(), 0.0)
    time = pipeline_time(
        a.dims, ideal_hardware(), ideal_stack(), dims(), totals, 2048.0, 1.0
    ).steady
    norms = 4 * 2 * 512 + 512
    core = 3.5 * 4 * 2 * 8 * 64 * 2048
    expected = 6 * (a.n_active(ParameterConvention.WITHOUT_EMBEDDING) - norms) + core
    assert time * PEAK / 2048 == pytest.approx(expected, rel=1e-12)


# ---------------------------------------------------------------- recomputation


def test_what_each_mode_replays() -> None:
    """Selective: attention's core. Super-selective: norms and unit as well. Full: everything."""
    forward = OperatorTimes(*(10.0**i for i in range(11)))
    backward = OperatorTimes(*([0.0] * 11))
    replayed = [
        {
            name
            for name, times in with_replay(forward, backward, replay_of(mode), 1.0, 0.0)
            ._asdict()
            .items()
            if times == 2 * getattr(forward, name)
        }
        for mode in (0.0, 1.0, 2.0, 3.0)
    ]
    assert replayed[0] == set()
    assert replayed[1] == {"attention_core", "context_parallel"}
    assert replayed[2] == replayed[1] | {"elementwise", "activation"}
    assert replayed[3] == set(OperatorTimes._fields) - {"gradient"}


@given(runs())
def test_more_recomputation_never_takes_less_time(run: Run) -> None:
    stack = run.model.profile.stack()
    a = run.architecture.dims
    modes = [mode_totals(run.model.cost, a, stack, mode) for mode in (0.0, 1.0, 2.0, 3.0)]
    for less, more in pairwise(modes):
        assert more.moe_device >= less.moe_device
        assert more.dense_device >= less.dense_device
        assert more.launches >= less.launches
        assert more.dispatch >= less.dispatch
        assert more.host_share >= less.host_share
        assert more.head == less.head


def test_tokens_cross_the_expert_mesh_twice_a_pass() -> None:
    """To the experts and back: forward, backward, and in a full replay."""
    a = moe().dims
    cost = layer_cost(a, ideal_hardware(), 2048.0, dims())._replace(dispatch=1.0)
    crossings = [mode_totals(cost, a, ideal_stack(), m).dispatch for m in (0.0, 1.0, 2.0, 3.0)]
    assert crossings == [4.0, 4.0, 4.0, 6.0]


# ---------------------------------------------------------------- host and device


TOTALS = ModeTotals(
    moe_device=3.0,
    dense_device=2.0,
    launches=0.5,
    dispatch=0.25,
    host_share=1.0,
    forward_share=1 / 3,
    head=0.0,
    joined=0.0,
)


def test_the_slower_of_host_and_device_sets_the_pace() -> None:
    p = dims(pp=2, ep=4)
    slow_device = stage_time(TOTALS, ideal_stack(host_layer_s=0.1), p, 2.0, 1.0, 4.0, 0.0, 0.0)
    assert slow_device.device == 2 * 3.0 + 2.0
    assert slow_device.dispatch == 0.5
    assert slow_device.time == 8.0 + 4.0 + 0.5
    stack = ideal_stack(host_layer_s=10.0, dense_layer_share=0.25, host_microbatch_s=1.0)
    slow_host = stage_time(TOTALS, stack, p, 2.0, 1.0, 4.0, 0.0, 0.0)
    assert slow_host.host == 2 * (10.0 + 0.5) + 0.25 * 10.0 + 1.0
    assert slow_host.time == slow_host.host + 0.5


def test_ranks_wait_for_each_other_only_where_the_device_has_no_backlog() -> None:
    stack = ideal_stack(host_layer_s=10.0, jitter_s=1.0)
    idle = 1 - (6.0 + 0.5) / 21.0
    waited = stage_time(TOTALS, stack, dims(pp=4, ep=8), 2.0, 0.0, 0.0, 0.0, 0.0).jitter
    assert waited == pytest.approx(log2(4) * log2(8) * idle)
    assert stage_time(TOTALS, stack, dims(pp=1, ep=8), 2.0, 0.0, 0.0, 0.0, 0.0).jitter == 0
    assert stage_time(TOTALS, stack, dims(pp=4, ep=1), 2.0, 0.0, 0.0, 0.0, 0.0).jitter == 0
    busy = ideal_stack(host_layer_s=0.1, jitter_s=1.0)
    assert stage_time(TOTALS, busy, dims(pp=4, ep=8), 2.0, 0.0, 0.0, 0.0, 0.0).jitter == 0


@given(runs(), profiles, st.sampled_from(Stack._fields), st.sampled_from((1.01, 2.0, 30.0)))
def test_a_slower_stack_never_makes_a_faster_step(
    run: Run, measured: StackProfile, name: str, factor: float
) -> None:
    # With interleaving the closed form is a lower bound that may fall in its middle stages.
    assume(run.plan.vpp == 1 or run.architecture.n_dense_layers in (0, run.architecture.n_layers))
    stack = measured.stack()
    slower = stack._replace(**{name: factor * getattr(stack, name)})
    if name.endswith("_hidden"):
        slower = stack._replace(**{name: getattr(stack, name) / factor})
    if name == "optimizer_matmul_eff":
        slower = stack._replace(optimizer_matmul_eff=stack.optimizer_matmul_eff / factor)

    def step(constants: Stack) -> float:
        sync = synchronisation_time(
            run.architecture.dims,
            run.cluster.constants,
            constants,
            run.batch.optimizer.dims,
            run.dims,
            float(run.batch.seq_len),
        )
        pipeline = run.model.pipeline_under(constants)
        return step_total(constants, pipeline, sync, float(run.model.n_microbatches))

    assert step(slower) >= step(stack) * (1 - 1e-12)


def test_every_fitted_constant_matters_somewhere() -> None:
    a = moe(n_layers=16)
    p = dims(pp=16, ep=4)
    cost = layer_cost(a.dims, ideal_hardware(), 2048.0, dims(ep=4))
    stack = ideal_stack(
        host_layer_s=1e-2,
        host_microbatch_s=1e-2,
        jitter_s=1e-2,
        pipeline_node_cost=0.5,
        forward_share=0.3,
        backward_share=0.4,
        dense_layer_share=0.25,
    )

    hw = ideal_hardware()

    def step(constants: Stack) -> float:
        totals = mode_totals(cost, a.dims, constants, 0.0)
        return sum(pipeline_time(a.dims, hw, constants, p, totals, 2048.0, 16.0))

    for name in SWEEP_CONSTANTS:
        assert step(stack._replace(**{name: 2 * getattr(stack, name)})) > step(stack)


# ---------------------------------------------------------------- gradients and optimizer


@given(runs())
def test_a_single_replica_exchanges_no_gradients(run: Run) -> None:
    p = run.dims
    exchange = run.model.synchronisation.data_parallel
    edp = p.tp * p.cp * p.dp / (p.etp * p.ep)
    has_experts = run.architecture.n_moe_layers > 0
    assert (exchange > 0) is (p.dp * p.cp > 1 or (edp > 1 and has_experts))


def test_only_a_pipeline_hands_activations_over() -> None:
    a, hardware = moe().dims, ideal_hardware()
    fabric = hardware.fabric
    slow = hardware._replace(
        fabric=fabric._replace(all_to_all=fabric.all_to_all._replace(link_bw=1e9, nic_bw=1e9))
    )

    def hand_off(**degrees: float) -> float:
        p = dims(**degrees)
        return synchronisation_time(a, slow, ideal_stack(), ADAMW, p, 2048.0).hand_off

    assert hand_off(pp=1) == 0
    # bf16 activations of a microbatch, over every boundary, forward and backward
    assert hand_off(pp=4) == pytest.approx(2 * 3 * 2 * 2048 * 512 / 1e9)
    assert hand_off(pp=4, tp=2, cp=2) == pytest.approx(2 * 3 * 2 * 2048 * 512 / 4 / 1e9)


def test_exchanged_bytes_are_a_gradient_in_fp32_and_a_weight_in_bf16() -> None:
    a = moe()
    n = a.n_total(ParameterConvention.WITH_EMBEDDING)
    hardware = ideal_hardware()
    ring = hardware.fabric.reduce_scatter._replace(intra_bw=1e9)
    slow = hardware._replace(fabric=hardware.fabric._replace(reduce_scatter=ring, all_gather=ring))
    time = data_parallel_time(a.dims, slow, ideal_stack(), dims(dp=4), 0.0)
    assert time * 1e9 == pytest.approx(3 / 4 * (4 + 2) * n)
    # Folded over EP, experts have one owner and nothing to exchange.
    routed = 3 * 16 * 3 * 512 * 384
    folded = data_parallel_time(a.dims, slow, ideal_stack(), dims(dp=4, ep=4), 0.0)
    assert folded * 1e9 == pytest.approx(3 / 4 * (4 + 2) * (n - routed))


def test_newton_schulz_flops_of_a_matrix() -> None:
    """X X^T, its square, and their product with X, for the smaller side m: 4 m^2 n + 2 m^3."""
    assert newton_schulz_flop(3.0, 5.0) == newton_schulz_flop(5.0, 3.0)
    gram, square, product = 2 * 3 * 3 * 5, 2 * 3 * 3 * 3, 2 * 3 * 3 * 5
    assert newton_schulz_flop(3.0, 5.0) == gram + square + product


def test_matrix_iterations_are_shared_out_over_replicas() -> None:
    a, stack = moe(), ideal_stack(optimizer_matmul_eff=0.5)
    muon = Optimizer.MUON.dims

    def seconds(**degrees: float) -> float:
        return optimizer_time(a.dims, ideal_hardware(), stack, muon, dims(**degrees), 0.0)

    flop = 0.0
    for tensor in tensors(a):
        if isinstance(tensor.layer, int) and len(tensor.shape) == 2:
            router = tensor.shape == (a.d_model, a.n_experts)
            flop += 0.0 if router else 5 * newton_schulz_flop(*map(float, tensor.shape))
    assert seconds() * 0.5 * PEAK == pytest.approx(flop)
    assert seconds(dp=4) == pytest.approx(seconds() / 4)
    assert seconds(dp=2, cp=2) == pytest.approx(seconds() / 4)
    assert seconds(dp=4, ep=4) == pytest.approx(seconds() / 4)
    assert optimizer_time(a.dims, ideal_hardware(), stack, ADAMW, dims(), 0.0) == 0
