"""Questions of users of other tools that have a known answer, one test for each.

More of them are beside the code that they concern; ``docs/reports.md`` lists all.
"""

from __future__ import annotations

from fractions import Fraction
from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel import catalogue
from perfmodel.architecture import Architecture, MfuConvention, ParameterConvention
from perfmodel.cluster import Batch, Cluster
from perfmodel.collectives import AllToAllSurface
from perfmodel.exchange import border_bytes
from perfmodel.iteration import time_of_content
from perfmodel.layer import dispatch_time, layer_cost, rows_per_expert
from perfmodel.layouts import contents_of
from perfmodel.modes import mode_totals
from perfmodel.plan import Plan, plan_dims
from perfmodel.rules import violations
from perfmodel.schedule import bubble_fraction, warmup_forwards
from perfmodel.stages import StageLayout
from perfmodel.step import StepModel, estimate

from .reports import REPORTS, defines, held_by, reports_table
from .strategies import (
    architectures,
    cluster,
    dense,
    dims,
    ideal_hardware,
    ideal_stack,
    latent,
    moe,
    profile,
    sparse_layer,
    tensors,
)

MEGATRON = MfuConvention.MEGATRON
WITH_EMBEDDING = ParameterConvention.WITH_EMBEDDING
KIB, MIB = 1024.0, 1024.0**2


def broken(a: Architecture, text: str, world: int, global_batch: int = 64) -> set[str]:
    plan = Plan.parse(text, world=world)
    return {v.rule for v in violations(a.rule_variables(), plan, world, 4096, global_batch)}


# ---------------------------------------------------------------- layouts


def test_report_24_an_instance_of_the_optimizer_spans_whole_replicas_of_the_experts() -> None:
    eight = moe(n_experts=8)
    assert broken(eight, "tp=2,ep=2,optimizer_instances=2", world=4) == set()
    found = broken(eight, "tp=2,ep=2,etp=2,optimizer_instances=2", world=4)
    assert found == {"expert_optimizer_instances"}


def test_report_68_the_pattern_of_sparse_layers_is_as_long_as_the_model() -> None:
    """A launcher that ignores the pattern builds experts on every layer."""
    every = moe(n_layers=12, first_k_dense=0)
    for a in (every, moe(n_layers=12, first_k_dense=3), moe(n_layers=12, moe_every=2)):
        pattern = [a.is_moe(layer) for layer in range(a.n_layers)]
        assert sum(pattern) == a.n_moe_layers
        assert pattern == [sparse_layer(a, layer) for layer in range(a.n_layers)]
        ignored = every.n_total() - a.n_total()
        block = 3 * 512 * (16 * 384 + 256) + 16 * 512 - 3 * 512 * 1536
        assert ignored == block * (12 - a.n_moe_layers)


def test_report_62_ranks_of_an_expert_group_work_on_different_microbatches() -> None:
    """At DP 8 and EP 8 a step has as many tokens as without EP, and experts see all of them."""
    a, batch = moe(), Batch(global_batch=64, seq_len=2048)
    plans = [Plan.parse(f"ep={ep}", world=8) for ep in (1, 2, 4, 8)]
    assert {StepModel(a, p, cluster(1), batch, profile()).n_microbatches for p in plans} == {8}
    for plan in plans:
        rows = rows_per_expert(a.dims, plan_dims(plan), 2048.0)
        assert rows == 2048 * a.top_k / a.n_experts * plan.ep


def test_report_87_experts_are_spread_without_tensor_parallelism() -> None:
    run = (moe(), Plan.parse("tp=1,ep=8", world=8), cluster(1), Batch(global_batch=64, seq_len=256))
    step = estimate(*run)
    assert step.plan.tp == 1
    assert step.breakdown_s["all_to_all"] > 0.0
    assert step.breakdown_s["compute_tensor_parallel"] == 0.0


def test_a_latent_projection_is_computed_again_where_there_is_one() -> None:
    """Megatron-Core refuses the module without latent attention; no report asks for it."""
    text = "recompute=selective,recompute_modules=mla_up_proj"
    assert broken(moe(**latent()), text, world=4) == set()
    assert broken(moe(), text, world=4) == {"latent_recompute"}
    assert broken(moe(), "recompute=selective,recompute_modules=moe_act", world=4) == set()


# ---------------------------------------------------------------- FLOPs


@given(st.integers(1, 5), st.integers(1, 24), st.sampled_from((1, 2, 3)))
def test_report_36_the_last_of_every_so_many_layers_is_sparse(
    step: int, n_layers: int, leading: int
) -> None:
    """Configurations say: not in ``mlp_only_layers``, and ``(idx + 1) % decoder_sparse_step`` 0."""
    a = moe(n_layers=n_layers, first_k_dense=0, moe_every=step)
    assert [a.is_moe(i) for i in range(n_layers)] == [(i + 1) % step == 0 for i in range(n_layers)]
    k = min(leading, n_layers)
    a = moe(n_layers=n_layers, first_k_dense=k)
    assert [a.is_moe(i) for i in range(n_layers)] == [i not in range(k) for i in range(n_layers)]


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Qwen1.5-MoE-A2.7B", 2.7), ("Ling-lite", 2.75), ("dots.llm1", 14.0)],
)
def test_report_37_a_shared_expert_is_anchored_on_the_published_active_count(
    name: str, billions: float
) -> None:
    """A test that shares the mistake of the code cannot see a width that is too small by three."""
    a = catalogue[name]
    assert a.d_shared > 0
    assert a.n_active(WITH_EMBEDDING) / 1e9 == pytest.approx(billions, rel=0.005)
    third = a.model_copy(update={"d_shared": a.d_shared // 3})
    assert third.n_active(WITH_EMBEDDING) / 1e9 < 0.95 * billions
    lost = a.flops_per_token(MEGATRON, 4096) - third.flops_per_token(MEGATRON, 4096)
    assert lost == 6 * 3 * a.d_model * (a.d_shared - a.d_shared // 3) * a.n_moe_layers


@given(architectures())
def test_report_38_an_untied_embedding_is_no_product(a: Architecture) -> None:
    untied = a.model_copy(update={"tied_embeddings": False, "learned_positions": 0})
    head, both = (untied.flops_per_token(f"6n-{name}") for name in ("head", "embedding"))
    assert both - head == 6 * a.vocab_size * a.d_model  # what must not be in the numerator
    tied = untied.model_copy(update={"tied_embeddings": True})
    assert untied.flops_per_token(MEGATRON, 64) == tied.flops_per_token(MEGATRON, 64)


@given(architectures(rare=False), st.integers(1, 4096))
def test_report_49_causal_attention_counts_half_of_its_scores(
    a: Architecture, seq_len: int
) -> None:
    """Six, not twelve, for each layer, width of the heads and token of the sequence."""
    grown = a.flops_per_token(MEGATRON, 2 * seq_len) - a.flops_per_token(MEGATRON, seq_len)
    assert grown == 6 * a.n_layers * a.n_heads * a.head_dim * seq_len
    # counted in full, a run at 189 TFLOP/s of 312 had more than the peak
    assert 189 / 312 < 1.0 < 189 * 2 / 312


@given(architectures(rare=False), st.integers(1, 2048))
def test_report_50_the_head_counts_and_the_embedding_does_not(
    a: Architecture, seq_len: int
) -> None:
    """Count over the tensors one by one: six for each weight of a product, K experts of E."""
    weights = Fraction(a.d_model * a.vocab_size)  # the head, tied or not
    for t in tensors(a):
        product = len(t.shape) == 2 and t.layer not in ("embedding", "head")
        router = t.split == "none"
        share = Fraction(a.top_k, a.n_experts) if t.split == "expert" else Fraction(1)
        weights += t.size * share if product and not router else 0
    scores = a.n_layers * a.n_heads * a.head_dim * seq_len
    assert a.flops_per_token(MEGATRON, seq_len) == 6 * (weights + scores)


def test_report_51_experts_work_at_their_own_width() -> None:
    """The dense width counts on dense layers alone; routed and shared ones on the others."""
    for layers in (0, 1, 4):
        a = moe(first_k_dense=layers)
        wide = a.model_copy(update={"d_ff": a.d_ff + 64})
        grown = wide.flops_per_token(MEGATRON, 64) - a.flops_per_token(MEGATRON, 64)
        assert grown == 6 * layers * 3 * 512 * 64
        wide = a.model_copy(update={"d_expert": a.d_expert + 64, "d_shared": a.d_shared + 32})
        grown = wide.flops_per_token(MEGATRON, 64) - a.flops_per_token(MEGATRON, 64)
        assert grown == 6 * (4 - layers) * 3 * 512 * (2 * 64 + 32)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_report_53_mixtral_over_experts_alone_is_faster_than_over_tensors_as_well(
    recompute: str,
) -> None:
    """Two nodes of H100: the maintainers' advice of TP 1 and EP 8, against EP 8 and TP 2."""
    batch = Batch(global_batch=256, seq_len=4096)
    found = {}
    for tp in (1, 2):
        plan = Plan.parse(f"tp={tp},ep=8,pp=2,recompute={recompute}", world=16)
        step = estimate(catalogue["Mixtral-8x7B"], plan, Cluster.parse("h100:2"), batch)
        found[tp] = step.tflops_per_device
    assert found[1] > 1.2 * found[2]


# ---------------------------------------------------------------- pipelines


@pytest.mark.parametrize(("pp", "vpp", "first"), [(4, 2, 10), (8, 4, 38)])
def test_report_26_warm_up_of_the_interleaved_schedule(pp: int, vpp: int, first: int) -> None:
    found = [warmup_forwards(rank, pp, vpp, 64) for rank in range(pp)]
    assert found[0] == first
    assert found == [2 * (pp - rank - 1) + (vpp - 1) * pp for rank in range(pp)]
    assert found[0] != (pp - 1) * vpp  # as was expected


def test_report_30_larger_microbatches_make_a_larger_bubble() -> None:
    """At one global batch there are fewer of them; and the two fractions have two names."""
    bubble = bubble_fraction(16, 2, 64)
    assert f"{bubble.of_compute:.4f} {bubble.of_total:.4f}" == "0.1172 0.1049"
    a, batch = dense(), Batch(global_batch=256, seq_len=256)
    counts = []
    for micro_batch in (1, 2, 4, 8):
        plan = Plan.parse(f"pp=4,dp=2,mbs={micro_batch}")
        counts.append(StepModel(a, plan, cluster(1), batch, profile()).n_microbatches)
    assert counts == [256 // (2 * micro_batch) for micro_batch in (1, 2, 4, 8)]
    bubbles = [bubble_fraction(4, 1, m).of_compute for m in counts]
    assert bubbles == sorted(bubbles)
    assert bubbles[-1] == 8 * bubbles[0]


def test_report_72_logits_of_prediction_layers_are_where_the_loss_is() -> None:
    """Apart from the loss a prediction layer leaves its projection only, so slots are not equal."""
    a, hw, stack = moe(mtp_layers=2), ideal_hardware(), ideal_stack()
    p = dims(pp=2)
    totals = mode_totals(layer_cost(a.dims, hw, 256.0, p), a.dims, stack, 0.0)
    heads = {}
    for where in ("Et*4|mmL", "Et*4mm|L"):
        contents = contents_of(a.dims, p, StageLayout.parse(where, 2))
        heads[where] = [
            time_of_content(a.dims, hw, stack, p, totals, 256.0, c).head for c in contents
        ]
    together, apart = heads.values()
    assert together == [0.0, totals.head]
    assert apart == pytest.approx([2 * totals.joined, totals.head - 2 * totals.joined])
    single = mode_totals(layer_cost(moe().dims, hw, 256.0, p), moe().dims, stack, 0.0).head
    assert apart[1] == pytest.approx(3 * single)  # the model's and two predictions'


# ---------------------------------------------------------------- communication


def bytes_sent(ep: int, *, nic: bool) -> float:
    """Bytes that a token's dispatch and combine send on 48 layers, to peers or to other nodes."""
    one = AllToAllSurface(0.0, inf, inf, 0.0, 0.0, 1.0, inf, 0.0)
    surface = one._replace(nic_bw=1.0) if nic else one._replace(link_bw=1.0)
    hw = ideal_hardware(8 if nic else 1024)
    hw = hw._replace(fabric=hw.fabric._replace(all_to_all=surface))
    a = moe(n_layers=48, d_model=6144, n_experts=64, top_k=4)
    return 2 * 48 * float(dispatch_time(a.dims, hw, dims(ep=ep, dp=ep), 1.0))


def test_report_43_bytes_of_expert_parallelism_to_the_token() -> None:
    """Width 6144 in bf16 is 12 KiB; top-4 on 48 layers, there and back."""
    assert f"{bytes_sent(8, nic=False) / MIB:.2f}" == "3.94"
    assert f"{bytes_sent(16, nic=False) / MIB:.2f}" == "4.22"
    assert f"{bytes_sent(16, nic=True) / MIB:.2f}" == "2.25"  # half of the experts are away
    a = moe(n_layers=48, d_model=6144).dims
    assert border_bytes(a, dims(pp=2), 1.0) == 12 * KIB
    assert border_bytes(a, dims(pp=2, tp=2), 2.0) == 12 * KIB


def test_report_74_more_nodes_than_were_measured_have_no_silent_bandwidth() -> None:
    """On two and on four nodes one library had 44.4 and 12.5 GB/s: one number is not enough."""
    a, batch = moe(n_experts=64), Batch(global_batch=64, seq_len=256)

    def said(pack: str, ep: int) -> list[str]:
        plan = Plan.parse(f"ep={ep}", world=64)
        flags = estimate(a, plan, Cluster(hardware=pack, nodes=8), batch).flags
        return [flag for flag in flags if flag.startswith(("all_to_all: size", "all_to_all on"))]

    assert said("p6-b200", 32) == []
    (beyond,) = said("p6-b200", 64)
    assert "which a search refuses" in beyond
    assert len(said("h200", 16)) == 1
    assert "nothing was measured" in said("h200", 16)[0]


# ---------------------------------------------------------------- the list


def test_every_report_has_a_test_or_says_where_it_belongs() -> None:
    tests = held_by()
    numbers = [report.number for report in REPORTS]
    assert numbers == sorted(set(numbers))
    assert set(tests) <= set(numbers)
    for report in REPORTS:
        assert all(defines(test) for test in report.others)
        assert tests.get(report.number) or report.others or report.left


def test_the_documentation_prints_the_reports() -> None:
    page = Path(__file__).parents[2] / "docs" / "reports.md"
    _, _, rest = page.read_text(encoding="utf-8").partition("<!-- reports: begin -->\n")
    table, end, _ = rest.partition("<!-- reports: end -->")
    assert end
    assert table == reports_table()
