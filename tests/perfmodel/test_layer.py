"""Costs of a layer: laws in its sizes, conservation of tokens, and FLOPs on an ideal machine."""

from __future__ import annotations

from itertools import pairwise
from math import inf, isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.architecture import Architecture
from perfmodel.attention import attention_weights, kv_heads_per_rank
from perfmodel.calibration.packs import load_pack
from perfmodel.layer import (
    LayerCost,
    OperatorTimes,
    layer_cost,
    rows_per_expert,
    total,
)
from perfmodel.parameters import attention_matrices

from .strategies import (
    PACK,
    PEAK,
    Run,
    architectures,
    core_flop,
    dense,
    dims,
    ideal_hardware,
    moe,
    runs,
)

HARDWARE = load_pack(PACK).constants()
PASSES = ("moe_forward", "moe_backward", "dense_forward", "dense_backward")


def cost_of(run: Run, *, longer: int = 1, wider: int = 1) -> LayerCost:
    p = run.dims._replace(micro_batch=wider * run.dims.micro_batch)
    return layer_cost(run.architecture.dims, HARDWARE, float(longer * run.batch.seq_len), p)


def simple(a: Architecture, **changes: float) -> LayerCost:
    seq_len = changes.pop("seq_len", 2048.0)
    return layer_cost(a.dims, HARDWARE, seq_len, dims(**changes))


def flat(cost: LayerCost) -> dict[str, float]:
    """Name every number of a cost; the ring of CP with the attention that hides it."""
    numbers: dict[str, float] = {}
    for name in PASSES:
        times = getattr(cost, name)._asdict()
        exposed = times.pop("context_parallel")
        times["attention_core"] += exposed
        numbers |= {f"{name}.{operator}": seconds for operator, seconds in times.items()}
    return numbers | {n: getattr(cost, n) for n in LayerCost._fields if n not in PASSES}


@given(runs())
def test_every_time_is_finite_and_not_negative(run: Run) -> None:
    cost = cost_of(run)
    for name in PASSES:
        for operator, seconds in getattr(cost, name)._asdict().items():
            assert isfinite(seconds), (name, operator)
            assert seconds >= 0, (name, operator)
    assert all(isfinite(v) and v >= 0 for v in flat(cost).values())


@given(runs(), st.sampled_from((2, 3, 8)))
def test_no_time_falls_with_more_sequences_or_longer_ones(run: Run, times: int) -> None:
    here = flat(cost_of(run))
    for more in (flat(cost_of(run, wider=times)), flat(cost_of(run, longer=times))):
        for name, seconds in here.items():
            assert more[name] >= seconds * (1 - 1e-12), name


@given(runs())
def test_attention_and_norms_are_alike_in_both_kinds_of_layer(run: Run) -> None:
    cost = cost_of(run)
    if run.architecture.n_experts:
        for way in ("forward", "backward"):
            sparse, solid = getattr(cost, f"moe_{way}"), getattr(cost, f"dense_{way}")
            for operator in (
                "attention_linear",
                "attention_core",
                "elementwise",
                "context_parallel",
            ):
                assert getattr(sparse, operator) == getattr(solid, operator)
            assert solid.router == solid.permutation == solid.experts == 0
    else:
        assert total(cost.moe_forward) == total(cost.moe_backward) == 0
        assert cost.dispatch == cost.launch_forward == cost.launch_backward == 0


def test_total_is_the_sum_of_the_operators() -> None:
    powers = OperatorTimes(*(2.0**i for i in range(len(OperatorTimes._fields))))
    assert total(powers) == 2.0 ** len(OperatorTimes._fields) - 1


# ---------------------------------------------------------------- experts


@given(architectures(sparse=True), st.sampled_from((1, 2, 4)), st.data())
def test_every_token_meets_k_experts(a: Architecture, tp: int, data: st.DataObject) -> None:
    ep = data.draw(st.sampled_from([n for n in (1, 2, 3, 4, 8) if a.n_experts % n == 0]))
    etp = data.draw(st.sampled_from((1, 2)))
    tokens = 4096.0  # of a TP group: each of its ranks routes its share of them
    rows = rows_per_expert(a.dims, dims(tp=tp, etp=etp, ep=ep), tokens)
    # The ETP ranks of an expert see the same rows, so an expert's rows count once.
    worked_on = a.n_experts * rows
    routed = ep * etp * (tokens / tp) * a.top_k
    assert worked_on == pytest.approx(routed, rel=1e-12)


@given(
    st.sampled_from((1, 2, 4, 8, 16)),
    st.sampled_from((1, 2, 3)),
    st.sampled_from((1, 2, 4)),
    st.booleans(),
)
def test_where_weights_are_free_no_degree_changes_the_work_on_experts(
    ep: int, etp: int, top_k: int, gated: bool
) -> None:
    a = moe(top_k=top_k, gated=gated)
    cost = layer_cost(a.dims, ideal_hardware(), 2048.0, dims(etp=etp, ep=ep))
    flop = 2 * 2048 * top_k * (3 if gated else 2) * 512 * 384
    assert cost.moe_forward.experts * PEAK == pytest.approx(flop, rel=1e-12)
    assert cost.moe_backward.experts * PEAK == pytest.approx(2 * flop, rel=1e-12)


def test_fewer_local_experts_read_fewer_weights_and_launch_less() -> None:
    costs = [simple(moe(), ep=float(ep)) for ep in (1, 2, 4, 8, 16)]
    for more, fewer in pairwise(costs):
        assert fewer.moe_forward.experts < more.moe_forward.experts
        assert fewer.launch_forward < more.launch_forward
        assert fewer.launch_backward < more.launch_backward


@given(runs(sparse=True))
def test_only_a_group_of_several_ranks_exchanges_tokens(run: Run) -> None:
    cost = cost_of(run)
    if run.plan.ep == run.plan.etp == 1:
        assert cost.dispatch == 0
    else:
        assert cost.dispatch > 0


def test_there_is_no_all_to_all_at_ep_1() -> None:
    assert simple(moe(), ep=1.0).dispatch == 0
    assert simple(moe(), ep=2.0).dispatch > 0
    assert simple(moe(), ep=2.0).moe_forward.permutation > simple(moe()).moe_forward.permutation


def test_dispatch_grows_with_the_group_and_with_the_tokens_that_each_rank_sends() -> None:
    a = moe()
    times = [simple(a, ep=float(ep)).dispatch for ep in (2, 4, 8, 16)]
    assert times == sorted(times)
    assert simple(moe(top_k=4), ep=8.0).dispatch > simple(moe(top_k=2), ep=8.0).dispatch
    # With sequence parallelism a rank sends its share of the tokens.
    assert simple(a, ep=8.0, tp=2.0).dispatch < simple(a, ep=8.0).dispatch


# ---------------------------------------------------------------- tensor and context parallelism


def test_key_value_heads_are_split_and_then_replicated() -> None:
    """4 KV heads over TP 8: each rank holds one whole head."""
    a = moe(n_heads=32, n_kv_heads=4, head_dim=128).dims
    assert [kv_heads_per_rank(a, tp) for tp in (1.0, 2.0, 4.0, 8.0)] == [4, 2, 1, 1]
    for tp in (1.0, 2.0, 4.0):
        assert attention_weights(a, tp) == attention_weights(a, 1.0) / tp
    query_and_output = 2 * 512 * 32 * 128 / 8
    one_head_of_keys_and_values = 2 * 512 * 128
    assert attention_weights(a, 8.0) == query_and_output + one_head_of_keys_and_values


def test_tensor_parallelism_talks_only_where_there_is_more_than_one_rank() -> None:
    a = moe()
    assert simple(a).moe_forward.tensor_parallel == 0
    with_shared, without = simple(a, tp=2.0), simple(moe(d_shared=0), tp=2.0)
    block = without.moe_forward.tensor_parallel
    assert block > 0
    # A shared expert is a second block that gathers and scatters; a dense layer has two as well.
    assert with_shared.moe_forward.tensor_parallel == 2 * block
    assert with_shared.dense_forward.tensor_parallel == 2 * block


def test_the_ring_of_keys_hides_behind_long_attention_only() -> None:
    short = simple(moe(), cp=8.0, seq_len=512.0).moe_forward
    long = simple(moe(), cp=8.0, seq_len=2.0**17).moe_forward
    assert simple(moe()).moe_forward.context_parallel == 0
    assert short.context_parallel > 0
    assert long.context_parallel == 0


# ---------------------------------------------------------------- FLOPs on an ideal machine


@given(runs())
def test_on_an_ideal_machine_a_layer_takes_its_flops(run: Run) -> None:
    """Six per parameter that multiplies a token, and causal attention; nothing counted twice."""
    a, p = run.architecture, run.dims
    seq_len = float(run.batch.seq_len)
    tokens = p.micro_batch * seq_len / p.cp  # of a TP group of `tp` ranks
    cost = layer_cost(a.dims, ideal_hardware(), seq_len, p)
    copies = max(1, run.plan.tp // a.n_kv_heads)  # of every head of keys and values
    attention = 2 * a.d_model * a.head_dim * (a.n_heads + copies * a.n_kv_heads)
    if a.latent is not None:
        attention = attention_matrices(a)
    if a.extra is not None:
        attention += a.extra.parameters // a.n_layers
    core, core_backward = core_flop(a, run.batch.seq_len)
    sizes = {
        "dense": a.ffn_matrices * a.d_model * a.d_ff,
        "moe": a.d_model * (a.n_experts + a.ffn_matrices * (a.top_k * a.d_expert + a.d_shared)),
    }
    for kind, weights in sizes.items():
        if kind == "moe" and not a.n_experts:
            continue
        forward = total(getattr(cost, f"{kind}_forward")) * run.plan.tp * PEAK / tokens
        backward = total(getattr(cost, f"{kind}_backward")) * run.plan.tp * PEAK / tokens
        assert forward == pytest.approx(2 * (attention + weights) + core, rel=1e-9)
        assert backward == pytest.approx(4 * (attention + weights) + core_backward, rel=1e-9)
    heads, joined = 1 + a.mtp_layers, 2 * a.d_model * a.mtp_layers
    head = 6 * a.d_model * (heads * a.vocab_size + joined)
    assert cost.head * run.plan.tp * PEAK / tokens == pytest.approx(head, rel=1e-9)
    assert cost.dispatch == cost.launch_forward == cost.launch_backward == 0


def test_slower_memory_makes_every_operator_that_moves_bytes_slower() -> None:
    ideal = ideal_hardware()
    slow = ideal._replace(device=ideal.device._replace(memory_bw=1e9))
    a = moe()
    fast_cost = layer_cost(a.dims, ideal, 2048.0, dims(ep=2))
    slow_cost = layer_cost(a.dims, slow, 2048.0, dims(ep=2))
    bound = {"elementwise", "router", "permutation", "experts", "activation", "attention_linear"}
    for name in OperatorTimes._fields:
        fast, slower = getattr(fast_cost.moe_forward, name), getattr(slow_cost.moe_forward, name)
        assert (slower > fast) is (name in bound | {"dense_ffn"}), name
    assert slow_cost.moe_backward.gradient > fast_cost.moe_backward.gradient == 0
    assert ideal.device.memory_bw == inf


def test_a_wider_dense_block_costs_a_dense_layer_only() -> None:
    narrow, wide = simple(moe(d_ff=1536)), simple(moe(d_ff=3072))
    assert narrow.moe_forward == wide.moe_forward
    assert narrow.moe_backward == wide.moe_backward
    assert wide.dense_forward.dense_ffn > narrow.dense_forward.dense_ffn
    assert wide.dense_backward.gradient > narrow.dense_backward.gradient


def test_a_model_without_experts_has_no_cost_of_experts() -> None:
    cost = simple(dense())
    assert cost.moe_forward == cost.moe_backward == OperatorTimes(*([0.0] * 11))
    assert cost.dense_forward == simple(moe()).dense_forward
