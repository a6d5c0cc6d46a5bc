"""Bytes on a device: an independent list of tensors, laws in the degrees, and known reports."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from perfmodel.activations import layer_activation_bytes
from perfmodel.architecture import Architecture, ParameterConvention
from perfmodel.calibration.stacks import load_stack
from perfmodel.cluster import Optimizer
from perfmodel.memory import (
    StageBytes,
    peak_bytes,
    rank_parameters,
    stage_allocated,
    stage_bytes,
    stage_dense_parameters,
    stage_expert_parameters,
    stage_total,
)
from perfmodel.mesh import PlanDims, dense_layers_of_stage
from perfmodel.models import catalogue
from perfmodel.replay import MODULE_BITS
from perfmodel.stack import Stack

from .strategies import (
    Run,
    architectures,
    dense,
    dims,
    latent,
    moe,
    prediction_tensors,
    runs,
    sparse_layer,
    stage_of_layer,
    tensors,
)

ADAMW = Optimizer.ADAMW.dims
EAGER = load_stack("megatron-eager").stack()._replace(framework_bytes=0.0)
GIB = 2**30
MODES = (0.0, 1.0, 2.0, 3.0)  # none, selective, super-selective, full


def stages(
    a: Architecture,
    p: PlanDims,
    *,
    seq_len: int = 2048,
    n_microbatches: int = 8,
    stack: Stack = EAGER,
) -> list[StageBytes]:
    return [
        stage_bytes(a.dims, p, ADAMW, stack, float(seq_len), float(n_microbatches), float(s))
        for s in range(int(p.pp))
    ]


def peak(a: Architecture, p: PlanDims, n_microbatches: int = 8) -> float:
    return peak_bytes(a.dims, p, ADAMW, EAGER, 2048.0, float(n_microbatches))


# ---------------------------------------------------------------- parameters


@given(runs())
def test_parameters_of_a_rank_are_those_of_its_share_of_every_tensor(run: Run) -> None:
    a, plan, p = run.architecture, run.plan, run.dims
    elsewhere = dict.fromkeys(("embedding", "positions"), 0)
    elsewhere |= dict.fromkeys(("head", "final", "prediction"), plan.pp - 1)
    held = {"dense": [Fraction(0)] * plan.pp, "expert": [Fraction(0)] * plan.pp}
    for tensor in tensors(a) + prediction_tensors(a):
        layer = tensor.layer
        if isinstance(layer, int):
            stage = stage_of_layer(layer, a.n_layers, plan.pp, plan.vpp)
        else:
            stage = elsewhere[layer]
        divisor = {
            "tp": plan.tp,
            "kv": min(plan.tp, a.n_kv_heads),  # a rank holds at least one whole head
            "none": 1,
            "expert": plan.etp * plan.ep,
            "whole expert": plan.ep,
        }[tensor.split]
        kind = "expert" if "expert" in tensor.split else "dense"
        held[kind][stage] += Fraction(tensor.size, divisor)
    # the last stage needs the embedding as its head, or for multi-token prediction
    if (a.tied_embeddings or a.mtp_layers) and plan.pp > 1:
        held["dense"][-1] += Fraction(a.vocab_size * a.d_model, plan.tp)
    for stage in range(plan.pp):
        s = float(stage)
        assert stage_dense_parameters(a.dims, p, s) == pytest.approx(float(held["dense"][stage]))
        assert stage_expert_parameters(a.dims, p, s) == pytest.approx(float(held["expert"][stage]))


@given(architectures(), st.data())
def test_stages_and_ranks_together_hold_the_model_once(
    a: Architecture, data: st.DataObject
) -> None:
    pp = data.draw(st.sampled_from([n for n in (1, 2, 3, 4, 6) if a.n_layers % n == 0]))
    vpp = data.draw(st.sampled_from([n for n in (1, 2, 3) if a.n_layers % (pp * n) == 0]))
    ep = data.draw(st.sampled_from([n for n in (1, 2, 4) if a.n_experts % n == 0]))
    p = dims(pp=pp, vpp=vpp, ep=ep if a.n_experts else 1, dp=4)
    held = sum(
        stage_dense_parameters(a.dims, p, float(s))
        + p.ep * stage_expert_parameters(a.dims, p, float(s))
        for s in range(pp)
    )
    copied = (a.tied_embeddings or a.mtp_layers) and pp > 1
    second_copy = a.vocab_size * a.d_model if copied else 0
    model = a.n_total(ParameterConvention.WITH_EMBEDDING) + a.mtp_parameters
    assert held == pytest.approx(model + second_copy, rel=1e-12)


@given(architectures(), st.data())
def test_dense_layers_are_dealt_out_in_order(a: Architecture, data: st.DataObject) -> None:
    pp = data.draw(st.sampled_from([n for n in (1, 2, 3, 4, 6) if a.n_layers % n == 0]))
    vpp = data.draw(st.sampled_from([n for n in (1, 2, 3) if a.n_layers % (pp * n) == 0]))
    found = [dense_layers_of_stage(a.dims, dims(pp=pp, vpp=vpp), float(s)) for s in range(pp)]
    solid = [layer for layer in range(a.n_layers) if not sparse_layer(a, layer)]
    assert len(solid) == a.n_dense_layers
    of = [stage_of_layer(layer, a.n_layers, pp, vpp) for layer in solid]
    assert found == [of.count(stage) for stage in range(pp)]


# ---------------------------------------------------------------- reports with right answers


def test_report_4_bytes_of_weights_and_optimizer_by_class() -> None:
    """Megatron-LM PR 4687: TP 2, PP 2, EP 2, ETP 4 on 64 devices; 3,195.0 B on the average stage.

    352 parameters split over TP and 36 replicated ones keep 6 + 12/16 bytes each (DP 16), 64 of
    routed experts 6 + 12/4 (EDP 4). That estimate halves the layers and gives each half an
    embedding, which is what both stages hold here where the embedding is tied.
    """
    a = Architecture(
        n_layers=2,
        d_model=8,
        n_heads=2,
        n_kv_heads=2,
        head_dim=4,
        d_ff=16,
        vocab_size=32,
        n_experts=4,
        top_k=1,
        d_expert=16,
        d_shared=8,
        first_k_dense=1,
        gated=False,
        tied_embeddings=True,
    )
    p = dims(tp=2, etp=4, ep=2, pp=2, dp=16)
    assert sum(stage_dense_parameters(a.dims, p, s) for s in (0.0, 1.0)) == 2 * (352 + 36)
    assert sum(stage_expert_parameters(a.dims, p, s) for s in (0.0, 1.0)) == 2 * 64
    states = [m.weights + m.gradients + m.optimizer for m in stages(a, p)]
    # The final norm is on the last stage: the average cannot tell.
    assert sum(states) / 2 == 3195.0
    assert states[1] > states[0]


def test_report_5_the_last_stage_is_the_heaviest_where_the_first_layer_is_dense() -> None:
    """DeepSeek-V3 sizes, 4 layers, EP 4, PP 2, DP 4: states 61.86 and 106.17 GiB, B200.

    The measured peaks were 71.24 and 114.00 GiB; with EP fixed at DP, experts keep 6 + 12 bytes.
    """
    shorter = {"n_layers": 4, "first_k_dense": 1, "mtp_layers": 0}
    a = catalogue["DeepSeek-V3"].model_copy(update=shorter)
    found = stages(a, dims(ep=4, pp=2, dp=4), seq_len=4096)
    states = [(m.weights + m.gradients + m.optimizer) / GIB for m in found]
    assert [f"{gib:.2f}" for gib in states] == ["61.86", "106.17"]
    for held, measured in zip(states, (71.24, 114.00), strict=True):
        assert held <= measured <= 1.2 * held
    assert stage_total(found[1]) > stage_total(found[0])


@pytest.mark.parametrize(("pp", "vpp", "penalty"), [(16, 2, "1.4688"), (8, 4, "1.2188")])
def test_report_29_interleaving_holds_more_activations(pp: int, vpp: int, penalty: str) -> None:
    a = moe(n_layers=64, first_k_dense=0)
    plain = stages(a, dims(pp=pp), n_microbatches=64)[0].activations
    interleaved = stages(a, dims(pp=pp, vpp=vpp), n_microbatches=64)[0].activations
    assert f"{interleaved / plain:.4f}" == penalty


@given(runs(sparse=True), st.sampled_from(MODES))
def test_report_31_activations_are_not_divided_by_the_expert_mesh(run: Run, mode: float) -> None:
    """The all-to-all trades tokens; it does not reduce them (ETP gathers them, so it is held)."""
    p = run.dims._replace(recompute=mode)
    merged = p._replace(ep=1.0)
    for s in range(run.plan.pp):
        found = [
            stage_bytes(run.architecture.dims, q, ADAMW, EAGER, 2048.0, 4.0, float(s)).activations
            for q in (p, merged)
        ]
        assert found[0] == found[1]


def test_report_31_routed_rows_to_the_byte() -> None:
    """K rows of the residual width in and out, K of each matrix of the unit, for every token."""
    tokens, tp = 1000.0, 2.0
    per_expert = [
        layer_activation_bytes(moe(top_k=k).dims, dims(tp=tp), EAGER, tokens, 1.0, 0.0)
        for k in (1, 2)
    ]
    one_more = (tokens / tp) * 2 * (2 * 512 + 3 * 384)
    assert per_expert[1] - per_expert[0] == one_more


def test_report_32_every_expert_is_stored_whether_it_works_or_not() -> None:
    few, many = moe(n_experts=16), moe(n_experts=32)
    extra = 3 * 16 * 3 * 512 * 384 + 3 * 512 * 16  # experts and router columns of 3 layers
    before, after = stages(few, dims())[0], stages(many, dims())[0]
    assert after.weights - before.weights == 2 * extra
    assert after.gradients - before.gradients == 4 * extra
    assert after.optimizer - before.optimizer == 12 * extra


def test_report_33_one_expert_on_each_of_two_devices_is_not_the_memory_of_a_dense_model() -> None:
    """2 experts over EP 2 hold the weights of one, but each token works in both."""
    shape = {"n_experts": 2, "d_expert": 1536, "d_shared": 0, "first_k_dense": 0, "d_ff": 1536}
    two, one = moe(**shape, top_k=2), moe(**shape, top_k=1)
    p = dims(ep=2, dp=2)
    solid = stages(dense(), dims(dp=2))[0]
    router = 4 * 512 * 2
    assert stages(two, p)[0].weights == solid.weights + 2 * router
    assert stages(one, p)[0].activations > solid.activations
    grown = stages(two, p)[0].activations - stages(one, p)[0].activations
    assert grown == 2048 * 4 * 2 * (2 * 512 + 3 * 1536)  # tokens, layers, bytes, elements


def test_report_54_three_classes_of_parameters_fall_with_their_own_degrees() -> None:
    a = moe()
    split = 4 * 2 * 512 * 64 * (8 + 4) + 3 * 512 * (1536 + 3 * 256) + 2 * 32000 * 512
    replicated = 4 * 2 * 512 + 512 + 3 * 512 * 16
    routed = 3 * 16 * 3 * 512 * 384
    for tp, etp, ep in ((1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 4), (4, 2, 8), (2, 4, 2)):
        p = dims(tp=tp, etp=etp, ep=ep, dp=16)
        assert stage_dense_parameters(a.dims, p, 0.0) == split / tp + replicated
        assert stage_expert_parameters(a.dims, p, 0.0) == routed / (etp * ep)


@given(
    st.sampled_from((1, 2, 4)),
    st.sampled_from((1, 2, 4)),
    st.sampled_from((1, 2, 4)),
    st.sampled_from((1, 2)),
    st.sampled_from((1, 2, 4, 8)),
)
def test_report_55_optimizer_shards(tp: int, cp: int, dp: int, etp: int, ep: int) -> None:
    """Dense state over DP*CP; state of experts over what is left of the stage, EDP."""
    assume(tp * cp * dp % (etp * ep) == 0)
    a, p = moe(), dims(tp=tp, cp=cp, dp=dp, etp=etp, ep=ep)
    edp = tp * cp * dp // (etp * ep)
    expected = stage_dense_parameters(a.dims, p, 0.0) / (dp * cp)
    expected += stage_expert_parameters(a.dims, p, 0.0) / edp
    assert stages(a, p)[0].optimizer == pytest.approx(12 * expected)
    # However the mesh folds, the devices of a stage hold the state of every expert once.
    per_device = 12 * stage_expert_parameters(a.dims, p, 0.0) / edp
    assert per_device * tp * cp * dp == pytest.approx(12 * 3 * 16 * 3 * 512 * 384)


def test_report_63_a_rank_holds_whole_experts() -> None:
    for ep in (1, 2, 4, 8, 16):
        held = stage_expert_parameters(moe().dims, dims(ep=ep, dp=16), 0.0)
        assert held == 3 * (16 // ep) * 3 * 512 * 384


@pytest.mark.parametrize(("optimizer", "state"), [("adamw", 12), ("muon", 8), ("scion", 8)])
def test_bytes_of_a_parameter(optimizer: str, state: int) -> None:
    """bf16 weight, fp32 gradient, and the optimizer's own state."""
    a = moe()
    stack = EAGER._replace(framework_bytes=7.0)
    m = stage_bytes(a.dims, dims(), Optimizer(optimizer).dims, stack, 2048.0, 8.0, 0.0)
    n = a.n_total(ParameterConvention.WITH_EMBEDDING)
    assert (m.weights, m.gradients, m.optimizer, m.buffers) == (2 * n, 4 * n, state * n, 7.0)


# ---------------------------------------------------------------- the heaviest stage


@given(runs())
def test_the_peak_is_the_maximum_over_every_stage(run: Run) -> None:
    """`peak_bytes` leaves stages out; none of them may be the heaviest."""
    a, p, n = run.architecture.dims, run.dims, float(run.model.n_microbatches)
    optimizer, seq_len = run.batch.optimizer.dims, float(run.batch.seq_len)
    every = [
        stage_total(stage_bytes(a, p, optimizer, EAGER, seq_len, n, float(s)))
        for s in range(run.plan.pp)
    ]
    assert peak_bytes(a, p, optimizer, EAGER, seq_len, n) == max(every)


@given(st.integers(0, 24), st.sampled_from((1, 2, 3)), st.integers(1, 3), st.sampled_from(MODES))
def test_the_peak_where_dense_layers_reach_beyond_the_first_stage(
    first_k_dense: int, vpp: int, groups: int, mode: float
) -> None:
    for d_ff in (32, 1536, 60000):
        a = moe(n_layers=24, first_k_dense=first_k_dense, d_ff=d_ff, vocab_size=8)
        p = dims(pp=4, vpp=vpp, recompute=mode)
        every = [stage_total(m) for m in stages(a, p, n_microbatches=4 * groups)]
        assert peak(a, p, 4 * groups) == max(every)


def test_total_is_the_sum_of_the_buckets() -> None:
    assert stage_total(StageBytes(1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)) == 255.0


@given(runs())
def test_only_the_last_stage_holds_logits(run: Run) -> None:
    logits = [run.model.stage(s).logits for s in range(run.plan.pp)]
    assert logits[:-1] == [0.0] * (run.plan.pp - 1)
    tokens = run.plan.micro_batch * run.batch.seq_len / run.plan.cp
    heads = 1 + run.architecture.mtp_layers
    assert logits[-1] == pytest.approx(
        heads * (2 + 4 + 4) * tokens * run.architecture.vocab_size / run.plan.tp
    )


# ---------------------------------------------------------------- laws in the degrees


@given(
    architectures(),
    st.sampled_from(MODES),
    st.sampled_from((1, 2, 8, 32)),
    st.sampled_from(("tp", "ep", "cp", "dp", "micro_batch")),
)
def test_memory_falls_with_every_degree_and_grows_with_the_microbatch(
    a: Architecture, mode: float, n_microbatches: int, degree: str
) -> None:
    found = []
    for value in (1, 2, 4):
        p = dims(**({"dp": 4, "recompute": mode} | {degree: value}))
        found.append(peak(a, p, n_microbatches))
    if degree == "micro_batch":
        found.reverse()
    slack = 1 + 1e-12
    assert found[0] * slack >= found[1]
    assert found[1] * slack >= found[2]


@given(architectures(), st.sampled_from(MODES), st.sampled_from((1, 2, 8, 32)))
def test_memory_falls_with_the_depth_of_the_pipeline_where_layers_are_alike(
    a: Architecture, mode: float, n_microbatches: int
) -> None:
    """Not where the first layers are dense: a deeper first stage may shelter fewer MoE layers."""
    a = Architecture(**(a.model_dump() | {"first_k_dense": 0, "moe_every": 1, "mtp_layers": 0}))
    depths = [pp for pp in (1, 2, 3, 6, 12) if a.n_layers % pp == 0]
    found = [peak(a, dims(pp=pp, recompute=mode), n_microbatches) for pp in depths]
    for deeper, here in zip(found[1:], found, strict=False):
        assert deeper <= here * (1 + 1e-12)


def test_memory_falls_strictly_where_there_is_much_to_divide() -> None:
    a = moe(n_layers=8, first_k_dense=0, vocab_size=1000)
    for degree in ("tp", "ep", "cp", "dp", "pp"):
        found = [peak(a, dims(**({"dp": 8} | {degree: n}))) for n in (2, 4)]
        assert found[1] < found[0], degree


@given(architectures(), st.sampled_from((1, 2, 4)), st.integers(1, 40))
def test_the_more_is_recomputed_the_less_of_a_layer_is_kept(
    a: Architecture, tp: int, thousands: int
) -> None:
    for moe_layer in {0.0, float(a.n_experts > 0)}:
        kept = [
            layer_activation_bytes(a.dims, dims(tp=tp), EAGER, 1000.0 * thousands, moe_layer, mode)
            for mode in MODES
        ]
        assert kept == sorted(kept, reverse=True)
        assert kept[-1] == 1000 * thousands / tp * 2 * a.d_model
        assert kept[0] > kept[1] > kept[2] > kept[3] > 0


@given(runs())
def test_no_mode_keeps_more_than_no_recomputation(run: Run) -> None:
    """The layer that full recomputation replays holds its input once."""
    a, p = run.architecture.dims, run.dims
    n, seq_len = float(run.model.n_microbatches), float(run.batch.seq_len)
    for s in range(run.plan.pp):
        kept = [
            stage_bytes(
                a, p._replace(recompute=mode), ADAMW, EAGER, seq_len, n, float(s)
            ).activations
            for mode in MODES
        ]
        assert kept[0] >= kept[1] >= kept[2]
        assert kept[3] <= kept[0] * (1 + 1e-12)


def test_full_recomputation_replays_the_layer_that_needs_most() -> None:
    """A stage of both kinds must hold the larger one while it is replayed."""
    a = moe(n_layers=2, d_ff=40000)
    p = dims(recompute=3)
    (stage,) = stages(a, p)
    replayed = max(
        layer_activation_bytes(a.dims, p, EAGER, 2048.0, kind, 0.0) for kind in (0.0, 1.0)
    )
    assert stage.activations >= replayed


@given(runs())
def test_activations_are_those_of_the_microbatches_in_flight(run: Run) -> None:
    """Later stages hold fewer; nobody holds more than there are."""
    a, n, seq_len = run.architecture, run.model.n_microbatches, float(run.batch.seq_len)
    a = a.model_copy(update={"mtp_layers": 0})  # which only the last stage has
    p = run.dims._replace(recompute=0.0)
    tokens = p.micro_batch * seq_len / p.cp
    for s in range(run.plan.pp):
        n_dense = dense_layers_of_stage(a.dims, p, float(s))
        n_moe = a.n_layers / run.plan.pp - n_dense
        one = n_dense * layer_activation_bytes(a.dims, p, EAGER, tokens, 0.0, 0.0)
        one += n_moe * layer_activation_bytes(a.dims, p, EAGER, tokens, 1.0, 0.0) if n_moe else 0.0
        held = stage_bytes(a.dims, p, ADAMW, EAGER, seq_len, float(n), float(s)).activations
        assert 0 < held / one <= n * (1 + 1e-12)
        if run.plan.vpp == 1:
            assert held / one == pytest.approx(min(run.plan.pp - s, n))


# ---------------------------------------------------------------- rare parts


def test_a_prediction_layer_is_on_the_last_stage_with_a_copy_of_the_embedding() -> None:
    a, p = moe(), dims(pp=2, tp=2)
    more = a.model_copy(update={"mtp_layers": 1})
    first, last = (
        stage_dense_parameters(more.dims, p, s)
        + stage_expert_parameters(more.dims, p, s)
        - stage_dense_parameters(a.dims, p, s)
        - stage_expert_parameters(a.dims, p, s)
        for s in (0.0, 1.0)
    )
    assert first == 0
    replicated = 2 * 512 + 3 * 512 + 512 * 16  # norms and router
    routed = 16 * 3 * 512 * 384  # ETP 1
    assert last == (more.mtp_parameters - replicated - routed) / 2 + replicated + routed + (
        32000 * 512 / 2
    )
    plain, predicting = stages(a, p)[1], stages(more, p)[1]
    assert predicting.logits == 2 * plain.logits
    assert predicting.activations > plain.activations


def test_projections_into_latent_vectors_are_whole_on_every_rank() -> None:
    a = moe(**latent(), d_shared=0)
    whole, half = (stage_dense_parameters(a.dims, dims(tp=tp), 0.0) for tp in (1, 2))
    replicated = 4 * (512 * (96 + 64 + 32) + 96 + 64 + 2 * 512) + 3 * 512 * 16 + 512
    assert half == (whole - replicated) / 2 + replicated


def test_a_shorter_window_keeps_as_many_activations() -> None:
    """A fused kernel stores no scores."""
    a = moe(window={"width": 128, "fraction": 0.5})
    assert stages(a, dims()) == stages(moe(), dims())


# ---------------------------------------------------------------- options of a plan


def test_a_zero_stage_shards_one_bucket_more() -> None:
    """0 nothing, 1 optimizer, 2 gradients, 3 weights; a whole layer passes through 2 and 3."""
    a, dp = dense(), 4
    n = a.n_total(ParameterConvention.WITH_EMBEDDING)
    found = [stages(a, dims(dp=dp, zero=zero))[0] for zero in range(4)]
    assert [m.optimizer for m in found] == [12 * n, 12 * n / dp, 12 * n / dp, 12 * n / dp]
    assert [m.gradients for m in found] == [4 * n, 4 * n, 4 * n / dp, 4 * n / dp]
    r = rank_parameters(a.dims, dims())
    layer = r.layer + r.extra + r.dense
    head = a.vocab_size * a.d_model
    assert [m.weights for m in found[:3]] == [2 * n] * 3
    assert found[3].weights == 2 * (n / dp + 2 * layer + head)
    assert [m.working for m in found] == [0, 0, 6 * max(layer, head), 6 * max(layer, head)]


def test_a_layer_of_zero_3_has_its_experts_as_the_rank_has_them() -> None:
    """Of a model of one kind of layers the largest unit is one of them."""
    a, p = moe(first_k_dense=0), dims(ep=4, dp=4, zero=3)
    more = moe(first_k_dense=0, n_layers=5)  # one layer more
    sharded, longer = (stages(m, p)[0].gradients / 4 for m in (a, more))
    r = rank_parameters(a.dims, p)
    assert longer - sharded == pytest.approx((r.layer + r.moe) / 4 + r.experts)
    held = stages(a, p)[0].weights / 2 - sharded
    assert held == 2 * (r.layer + r.moe + r.experts) + 32000 * 512


@pytest.mark.parametrize("instances", [1, 2, 4])
def test_replicas_of_the_optimizer_hold_more_of_its_state(instances: int) -> None:
    one, some = (stages(moe(), dims(dp=8, ep=2, instances=n))[0] for n in (1, instances))
    assert some.optimizer == instances * one.optimizer
    assert (some.weights, some.gradients) == (one.weights, one.gradients)


def test_state_on_the_host_is_not_on_the_device() -> None:
    whole, half = (stages(moe(), dims(dp=4, offload=share))[0] for share in (0.0, 0.5))
    assert half.optimizer == whole.optimizer / 2
    assert half.weights == whole.weights


def test_without_sequence_parallelism_norms_are_whole_on_every_rank() -> None:
    a, tokens, tp = dense(), 1000.0, 4
    split, whole = (
        layer_activation_bytes(a.dims, dims(tp=tp, sequence_parallel=on), EAGER, tokens, 0.0, 0.0)
        for on in (1.0, 0.0)
    )
    assert whole - split == 4 * tokens * 2 * 512 * (1 - 1 / tp)  # inputs and outputs of two norms


def test_the_fullest_rank_keeps_its_load_of_rows() -> None:
    a, tokens = moe(top_k=2), 1000.0
    even, full = (
        layer_activation_bytes(a.dims, dims(ep=2, dp=2, load=load), EAGER, tokens, 1.0, 0.0)
        for load in (1.0, 1.5)
    )
    assert full - even == 0.5 * tokens * 2 * 2 * (512 + 3 * 384)  # rows in, unit


TOKENS = 1000.0
PER_TOKEN = {  # what a module drops of a layer with latent attention, elements of bf16
    "core_attn": 2 * 8,  # log-sum-exp, fp32
    "layernorm": 2 * 512,
    "mla_up_proj": 8 * (96 + 96 + 48) + 96 + 64,
    "moe_act": 2 * 384,
    "shared_experts": 3 * 768,
    "moe": 2 * 2 * 512 + 2 * 3 * 384 + 4 * 16 + 3 * 768,
    "mlp": 3 * 1536,
}


@pytest.mark.parametrize("module", PER_TOKEN)
def test_a_module_drops_what_it_makes(module: str) -> None:
    a = moe(**latent(), top_k=2, n_experts=16, d_expert=384, d_shared=768, d_ff=1536)
    kind = 0.0 if module == "mlp" else 1.0
    code = 4.0 + MODULE_BITS[module]
    none, some = (
        layer_activation_bytes(a.dims, dims(), EAGER, TOKENS, kind, mode) for mode in (0.0, code)
    )
    assert none - some == 2 * TOKENS * PER_TOKEN[module]


@pytest.mark.parametrize("module", ["moe", "mlp"])
def test_a_block_that_is_replayed_is_held_once(module: str) -> None:
    a = moe(n_layers=8, first_k_dense=4)
    p = dims(recompute=4 + MODULE_BITS[module])
    (stage,) = stages(a, p)
    kept = sum(
        4 * layer_activation_bytes(a.dims, p, EAGER, 2048.0, kind, p.recompute)
        for kind in (0.0, 1.0)
    )
    kind = float(module == "moe")
    dropped = layer_activation_bytes(a.dims, p, EAGER, 2048.0, kind, 0.0)
    dropped -= layer_activation_bytes(a.dims, p, EAGER, 2048.0, kind, p.recompute)
    assert stage.activations == kept + dropped


def test_report_59_many_small_experts_keep_more_than_a_dense_block() -> None:
    """megablocks 166: 48 experts of width 128, 8 at work; K (2h + 3f) against 3 K f."""
    small = moe(n_experts=48, top_k=8, d_expert=128, d_shared=0)
    solid = dense(d_ff=8 * 128)
    sparse, plain = (
        layer_activation_bytes(a.dims, dims(), EAGER, 1.0, kind, 0.0)
        for a, kind in ((small, 1.0), (solid, 0.0))
    )
    assert sparse - plain == 2 * 8 * 2 * 512 + 8 * 48  # rows in and out; the router's fp32


# ---------------------------------------------------------------- constants of the stack


def test_constants_of_the_stack_to_the_byte() -> None:
    a, p, tokens = dense(d_ff=1000), dims(tp=2), 2048.0
    vocabulary, attention = 32000 / 2, 2 * 512 * 64 * (8 + 4) / 2
    base = stages(a, p)[0]

    def grown(**constants: float) -> StageBytes:
        return stages(a, p, stack=EAGER._replace(**constants))[0]

    assert grown(logit_bytes=2).logits == 2 * tokens * vocabulary
    assert grown(gradient_memory_bytes=2).gradients == base.gradients / 2
    extra = grown(hidden_copies=1).activations - base.activations
    assert extra == 4 * 2 * tokens / 2 * 512
    extra = grown(unit_copies=1).activations - base.activations
    assert extra == 4 * 2 * tokens * 1000 / 2
    extra = grown(gathered_inputs=1).activations - base.activations
    assert extra == 4 * 2 * (2 * tokens * 512) / 2  # half of both outputs, twice as long
    assert grown(working_widths=4).working == 4 * 2 * tokens * 1000 / 2
    matrices = attention + 3 * 512 * 1000 / 2 + 512 * vocabulary
    assert grown(wgrad_bytes=2).working == 2 * matrices
    reserve = grown(reserve_share=0.1, framework_bytes=7.0)
    assert reserve.reserve == pytest.approx(0.1 * stage_allocated(base))
    assert stage_total(reserve) == pytest.approx(1.1 * stage_allocated(base) + 7.0)
