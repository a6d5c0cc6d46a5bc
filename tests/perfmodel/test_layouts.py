"""Steps over uneven stages: parameters, memory and time, by layout and by kernel."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel import catalogue
from perfmodel.architecture import Architecture
from perfmodel.batch import plan_matrix, price
from perfmodel.cluster import Batch
from perfmodel.layouts import contents_of
from perfmodel.memory import (
    dense_parameters,
    expert_parameters,
    stage_total,
)
from perfmodel.mesh import StageContent
from perfmodel.plan import Plan
from perfmodel.plan_space import PlanSpace
from perfmodel.plan_table import PlanTable
from perfmodel.schedule_graph import makespan_of_stages, simulate
from perfmodel.schedule_stages import makespan_1f1b_stages, makespan_of_chunks
from perfmodel.stages import StageLayout
from perfmodel.step import StepModel, check, estimate

from .strategies import (
    Run,
    architectures,
    cluster,
    dense,
    dims,
    fast_profile,
    legal_rows,
    moe,
    profile,
)

SECONDS = st.integers(0, 30)


# ---------------------------------------------------------------- makespans


@given(st.lists(SECONDS, min_size=1, max_size=7), st.integers(1, 16), st.sampled_from((0.25, 0.5)))
def test_1f1b_of_any_stages_is_the_longest_path(tau: list[int], m: int, share: float) -> None:
    forward, backward = [share * t for t in tau], [(1 - share) * t for t in tau]
    found = makespan_1f1b_stages(np.array(tau, dtype=float), float(len(tau)), float(m), share)
    assert found == makespan_of_stages(forward, backward, m)
    assert found == simulate("1f1b", forward, backward, m)


@given(
    st.integers(1, 5),
    st.integers(2, 3),
    st.integers(1, 4),
    st.lists(st.integers(0, 12), min_size=15, max_size=15),
)
def test_interleaved_of_any_chunks_is_the_longest_path(
    pp: int, vpp: int, groups: int, times: list[int]
) -> None:
    chunks = 4.0 * np.array(times[: pp * vpp], dtype=float).reshape(vpp, pp)
    m = groups * pp
    path = simulate("interleaved", chunks / 4, 3 * chunks / 4, m)
    found = makespan_of_chunks(chunks, float(m), 0.25)
    assert found == path if pp > 1 else found <= path


@pytest.mark.parametrize(("pp", "vpp"), [(2, 2), (3, 3), (4, 2), (4, 3), (6, 2)])
def test_balanced_interleaving_goes_on_as_its_first_groups_did(pp: int, vpp: int) -> None:
    for n_layers in range(2 * pp * vpp, 4 * pp * vpp, 3):
        for head in (0.0, 0.7, 3.0):
            layout = StageLayout.balanced(moe(n_layers=n_layers), pp, vpp)
            chunks = np.array(layout.counts, dtype=float).reshape(vpp, pp)
            chunks[-1, -1] += head
            m = 9 * pp
            path = simulate("interleaved", chunks / 3, 2 * chunks / 3, m)
            found = makespan_of_chunks(chunks, float(m), 1 / 3)
            assert 0.975 * path <= found <= 1.005 * path  # as the document states


# ---------------------------------------------------------------- reports

TOY = {"d_model": 16, "d_ff": 64, "vocab_size": 32, "n_heads": 4, "n_kv_heads": 4, "head_dim": 4}
UNGATED = {"gated": False, "biases": {"norms": True}}
TOY_PLAN = Plan(pp=4, dp=4, layout="1/2/2/3")


def test_report_1_the_most_loaded_device_of_an_uneven_pipeline() -> None:
    """Averages over the pipeline said 6,792; the last stage has 9,952 (Megatron-Bridge #5077)."""
    a = dense(n_layers=8, **TOY, **UNGATED)
    model = StepModel(a, TOY_PLAN, cluster(2), Batch(global_batch=16, seq_len=8), profile())
    held = [dense_parameters(a.dims, model.dims, c) for c in model.contents]
    assert max(held) == held[3] == 9_952
    states = model.stage(3)
    assert states.weights + states.gradients + states.optimizer == 9 * 9_952 == 89_568


def test_report_2_dense_and_routed_parameters_of_an_uneven_pipeline() -> None:
    """Layers with experts in no regular order; the report does not count routers, 2 x 32 here."""
    a = moe(n_layers=8, first_k_dense=0, moe_every=2, n_experts=2, d_expert=32, d_shared=0, **TOY)
    a = Architecture.model_validate({**a.model_dump(), **UNGATED})
    pattern, at = (0, 1, 0, 0, 1, 0, 1, 1), (0, 1, 3, 5, 8)
    held = []
    for stage in range(4):
        sparse = sum(pattern[at[stage] : at[stage + 1]])
        layers = at[stage + 1] - at[stage]
        ends = {"embedding": float(stage == 0), "loss": float(stage == 3)}
        c = StageContent(layers, layers - sparse, sparse, prediction=0.0, **ends)
        p = dims(pp=4, dp=4)
        held.append((dense_parameters(a.dims, p, c), expert_parameters(a.dims, p, c)))
    assert max(held, key=sum) == held[3] == (5_856 + 2 * 16 * 2, 4_096)


def test_report_57_a_prediction_layer_apart_from_the_loss_has_a_copy_of_the_embedding() -> None:
    a = moe(n_layers=8, mtp_layers=1, tied_embeddings=True)
    matrix = a.vocab_size * a.d_model
    p = dims(pp=4)

    def held(text: str) -> list[float]:
        contents = contents_of(a.dims, p, StageLayout.parse(text, 4))
        return [dense_parameters(a.dims, p, c) for c in contents]

    together, apart = held("Ett|tt|tt|ttmL"), held("Ett|tt|ttttm|L")
    assert sum(apart) - sum(together) == matrix
    untied = a.model_copy(update={"tied_embeddings": False})
    a = untied
    assert sum(held("Ett|tt|tt|ttmL")) == sum(held("Ett|tt|ttttm|L"))


# ---------------------------------------------------------------- laws of layouts


@given(architectures(), st.integers(1, 6), st.integers(1, 3), st.data())
def test_no_layout_changes_what_the_stages_hold_together(
    a: Architecture, pp: int, vpp: int, data: st.DataObject
) -> None:
    cuts = sorted(
        data.draw(
            st.lists(st.integers(0, a.n_layers), min_size=pp * vpp - 1, max_size=pp * vpp - 1)
        )
    )
    counts = [y - x for x, y in zip([0, *cuts], [*cuts, a.n_layers], strict=True)]
    p = dims(pp=pp, vpp=vpp)
    layout = StageLayout.from_counts(counts, pp, mtp=a.mtp_layers)
    one, many = contents_of(a.dims, dims(), None)[0], contents_of(a.dims, p, layout)
    assert [sum(c) for c in zip(*many, strict=True)] == list(one)
    experts = sum(expert_parameters(a.dims, p, c) for c in many)
    assert experts == pytest.approx(expert_parameters(a.dims, p, one), rel=1e-12)


def model_of(run: Run, **changes: object) -> StepModel:
    plan = Plan.model_validate({**run.plan.model_dump(), **changes})
    return run._replace(plan=plan).under(fast_profile())


def cost(model: StepModel) -> list[float]:
    memory = [stage_total(model.stage(i)) for i in range(model.plan.pp)]
    return [model.step_s, *model.synchronisation, *memory]


@lru_cache
def table(both: bool = True) -> PlanTable:
    kinds = ("equal", "balanced") if both else ("balanced",)
    return PlanSpace(vpp=(1, 2, 3), micro_batch=(1, 2), layouts=kinds).skeleton(16, 2048, 96)


BATCH = Batch(global_batch=96, seq_len=2048)


@st.composite
def uneven_runs(draw: st.DrawFn) -> Run:
    """Draw a run whose layers its stages cannot share equally."""
    a = draw(architectures())
    n_layers = draw(st.sampled_from((5, 7, 9, 11, 13, 22, 43, 61, 94)))
    fields = {**a.model_dump(), "n_layers": n_layers, "window": None, "extra": None}
    fields["first_k_dense"] = min(a.first_k_dense, n_layers)
    a = Architecture.model_validate(fields)
    rows = legal_rows(a, table())
    rows = rows[(table().layout[rows] == 1) & (table().pp[rows] > 1)]
    if not len(rows):
        rows = legal_rows(a, table(False))
        return Run(a, table(False).plan(int(rows[0])), cluster(2), BATCH)
    row = rows[draw(st.integers(0, len(rows) - 1))]
    return Run(a, table().plan(int(row)), cluster(2), BATCH)


@given(uneven_runs())
def test_a_balanced_layout_written_out_costs_the_same(run: Run) -> None:
    layout = StageLayout.balanced(run.architecture, run.plan.pp, run.plan.vpp)
    balanced, written = model_of(run), model_of(run, layout=str(layout))
    assert check(run.architecture, written.plan, run.cluster, run.batch) == ()
    if layout.counts != (layout.counts[0],) * len(layout.counts):
        assert cost(written) == pytest.approx(cost(balanced), rel=1e-12)
        assert written.breakdown() == pytest.approx(balanced.breakdown(), rel=1e-9, abs=1e-12)
    parts = written.breakdown()
    assert sum(parts.values()) == pytest.approx(written.step_s, rel=1e-12)
    assert all(parts[name] >= -1e-12 * written.step_s for name in parts)


@given(uneven_runs())
def test_1f1b_of_a_balanced_layout_is_the_longest_path(run: Run) -> None:
    model = model_of(run, vpp=1)
    if model.architecture.n_layers % model.plan.pp == 0:
        return
    tau = [model.time_of(i).time for i in range(model.plan.pp)]
    share = 0.25 if model.plan.recompute == "full" else 1 / 3
    path = simulate(
        "1f1b", [share * t for t in tau], [(1 - share) * t for t in tau], model.n_microbatches
    )
    made = model.pipeline
    assert made.steady + made.bubble == pytest.approx(path, rel=1e-9)


@given(uneven_runs())
def test_equal_stages_written_out_cost_no_more(run: Run) -> None:
    """The closed form of equal stages takes the slowest between the ends for all of them."""
    n = 2 * run.plan.pp
    a = Architecture.model_validate(
        {**run.architecture.model_dump(), "n_layers": n, "first_k_dense": 0, "moe_every": 1}
        | ({"d_ff": 64} if not run.architecture.n_experts else {})
    )
    run = run._replace(architecture=a)
    equal = model_of(run, vpp=1, layout=None)
    written = model_of(run, vpp=1, layout=str(StageLayout.equal(n, run.plan.pp, mtp=a.mtp_layers)))
    assert cost(written) == pytest.approx(cost(equal), rel=1e-12)


# ---------------------------------------------------------------- many plans


def test_a_space_of_both_layouts_has_each_plan_once() -> None:
    a = moe(n_layers=12)
    found = [table().plan(int(i)) for i in legal_rows(a, table())]
    assert len(set(found)) == len(found)
    alone = [table(False).plan(int(i)) for i in legal_rows(a, table(False))]
    keys = {str(plan).removesuffix(",layout=balanced") for plan in found}
    assert keys == {str(plan).removesuffix(",layout=balanced") for plan in alone}
    for plan in found:
        assert (plan.layout == "balanced") == (12 % (plan.pp * plan.vpp) > 0)
        assert check(a, plan, cluster(2), BATCH) == ()


@given(uneven_runs(), st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_the_kernel_prices_uneven_stages_as_the_scalar_estimate_does(run: Run, seed: int) -> None:
    rows = legal_rows(run.architecture, table())
    rows = np.random.default_rng(seed).permutation(rows)[:12]
    stack = fast_profile()
    step_s, memory = price(
        run.architecture,
        plan_matrix(table()),
        rows,
        hardware=run.cluster.constants,
        stack=stack.stack(),
        optimizer=BATCH.optimizer.dims,
        seq_len=BATCH.seq_len,
        global_batch=BATCH.global_batch,
    )
    for i, row in enumerate(rows):
        model = run._replace(plan=table().plan(int(row))).under(stack)
        heaviest = max(stage_total(model.stage(s)) for s in range(model.plan.pp))
        assert step_s[i] == pytest.approx(model.step_s, rel=1e-12, abs=0)
        assert memory[i] == pytest.approx(heaviest, rel=1e-12, abs=0)


# ---------------------------------------------------------------- a published layout


def test_deepseek_v3_over_16_stages_and_2_chunks() -> None:
    deepseek = catalogue["DeepSeek-V3"]
    batch = Batch(global_batch=512, seq_len=4096)
    text = 'ep=8,pp=16,vpp=2,dp=8,recompute=full,layout="Et*3|(tt|)*29,m|L"'
    plan = Plan.parse(text)
    step = estimate(deepseek, plan, cluster(16), batch)
    assert step.plan.layout == "Et*3|(tt|)*29m|L"
    assert len(step.memory_by_stage_bytes) == 16
    assert step.heaviest_stage == int(np.argmax(step.memory_by_stage_bytes))
    assert step.memory_buckets_bytes[15]["logits"] > 0 == step.memory_buckets_bytes[14]["logits"]
    assert any("stages of 2 to 5 layers" in flag for flag in step.flags)
    assert step.model_dump(mode="json")["plan"]["layout"] == plan.layout
    total = sum(step.breakdown_s.values())
    assert total == pytest.approx(step.step_time_s, rel=1e-12)
