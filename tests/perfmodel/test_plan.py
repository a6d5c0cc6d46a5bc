"""Plans and their meshes, and the law that an enumerated space is the brute-force one."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from perfmodel.errors import PerfmodelError
from perfmodel.plan import MAX_DEGREE, Mesh, Plan, Recompute
from perfmodel.plan_space import PlanSpace
from perfmodel.plan_table import PlanTable, legal_mask
from perfmodel.rules import PLAN_VARIABLES, RULES, violations

MOE = {
    "n_layers": 48,
    "n_heads": 48,
    "n_kv_heads": 8,
    "d_ff": 15360,
    "n_experts": 96,
    "d_expert": 3840,
    "d_shared": 3840,
    "first_k_dense": 1,
}
ORDER = ("tp", "etp", "cp", "ep", "micro_batch", "pp", "vpp", "dp", "recompute")

degrees = st.integers(1, MAX_DEGREE)
any_plan = st.builds(
    Plan, **{name: degrees for name in PLAN_VARIABLES}, recompute=st.sampled_from(Recompute)
)


def rank_key(plan: Plan) -> tuple[int, ...]:
    return tuple(plan.recompute.code if n == "recompute" else getattr(plan, n) for n in ORDER)


# ---------------------------------------------------------------- a plan


def test_recompute_codes_run_from_least_to_most() -> None:
    assert [mode.code for mode in Recompute] == [0, 1, 2, 3]
    assert Recompute("super-selective") is Recompute.SUPER_SELECTIVE
    assert Recompute.FULL.code == 3


@given(any_plan)
def test_a_plan_reads_back_from_its_text_and_its_json(plan: Plan) -> None:
    assert Plan.parse(str(plan)) == plan
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


def test_the_text_hides_no_default() -> None:
    text = "tp=1,etp=1,ep=8,pp=8,vpp=1,cp=1,dp=32,mbs=4,recompute=none"
    assert str(Plan(ep=8, pp=8, dp=32, micro_batch=4)) == text


def test_dp_follows_from_the_world() -> None:
    plan = Plan.parse("tp=1, ep=8, pp=8, mbs=4, recompute=none", world=256)
    assert plan == Plan(ep=8, pp=8, dp=32, micro_batch=4)
    assert Plan.parse("dp=3", world=256).dp == 3
    assert Plan.parse("", world=7) == Plan(dp=7)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tensor=2,dp=1", "'tensor' is not a key of a plan, which are tp, etp, ep"),
        ("micro_bach=2,dp=1", "did you mean micro_batch?"),
        ("ttp=2,dp=1", "did you mean tp?"),
        ("ep=two,dp=1", "ep='two' must be a whole number from 1 to 1048576."),
        ("ep=2.0,dp=1", "ep='2.0' must be a whole number"),
        ("ep=0,dp=1", "ep='0' must be a whole number"),
        ("ep=-2,dp=1", "ep='-2' must be a whole number"),
        ("ep=,dp=1", "ep='' must be a whole number"),
        ("ep=٣,dp=1", "must be a whole number"),
        ("ep=1_0,dp=1", "must be a whole number"),
        ("ep=1048577,dp=1", "ep='1048577' must be a whole number"),
        ("ep=" + "9" * 5000, "...' must be a whole number"),
        ("ep=2,ep=2,dp=1", "ep is given twice"),
        ("mbs=2,micro_batch=2,dp=1", "micro_batch is given twice"),
        ("ep,dp=1", "'ep' is not key=value"),
        ("recompute=some,dp=1", "must be one of none, selective, super-selective, full."),
        ("ep=2", "dp is missing"),
    ],
)
def test_a_text_that_is_no_plan_is_explained_in_one_sentence(text: str, says: str) -> None:
    with pytest.raises(PerfmodelError, match=re.escape(says)) as caught:
        Plan.parse(text)
    message = str(caught.value)
    assert len(message) < 200
    assert "\n" not in message


def test_a_world_that_the_degrees_do_not_divide_is_explained() -> None:
    says = "tp*cp*pp=6 must divide world=32; nearest pp: 2, 4."
    with pytest.raises(PerfmodelError, match=re.escape(says)):
        Plan.parse("tp=2,pp=3", world=32)
    with pytest.raises(PerfmodelError, match="world=1048577 must be at most"):
        Plan.parse("", world=2**20 + 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"tp": 0, "dp": 1},
        {"tp": -1, "dp": 1},
        {"tp": 2.0, "dp": 1},
        {"tp": True, "dp": 1},
        {"tp": "2", "dp": 1},
        {"tp": MAX_DEGREE + 1, "dp": 1},
        {"dp": 1, "tensor": 2},
        {"dp": 1, "recompute": "some"},
        {},
    ],
)
def test_impossible_fields_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Plan.model_validate(fields)


def test_a_plan_is_frozen() -> None:
    plan = Plan(dp=2)
    with pytest.raises(ValidationError):
        plan.dp = 4


# ---------------------------------------------------------------- meshes


def test_strides_in_megatrons_default_order() -> None:
    mesh = Plan(tp=2, cp=4, dp=8, pp=3, etp=2, ep=16).mesh
    assert (mesh.world, mesh.edp) == (192, 2)
    assert (mesh.tp_stride, mesh.cp_stride, mesh.dp_stride) == (1, 2, 8)
    assert (mesh.etp_stride, mesh.ep_stride, mesh.edp_stride) == (1, 2, 32)
    assert mesh.pp_stride == 64


small = st.sampled_from([1, 2, 3, 4])


@given(st.builds(Plan, tp=small, cp=small, dp=small, pp=small, etp=small, ep=small))
def test_both_meshes_number_every_device_once(plan: Plan) -> None:
    stage = plan.tp * plan.cp * plan.dp
    if stage % (plan.etp * plan.ep):
        with pytest.raises(PerfmodelError, match=f"etp\\*ep={plan.etp * plan.ep} must divide"):
            Mesh.of(plan)
        return
    mesh = plan.mesh
    for axes in (("pp", "dp", "cp", "tp"), ("pp", "edp", "ep", "etp")):
        sizes = [getattr(mesh, axis) for axis in axes]
        strides = [getattr(mesh, f"{axis}_stride") for axis in axes]
        ranks = [
            sum(i * stride for i, stride in zip(index, strides, strict=True))
            for index in np.ndindex(*sizes)
        ]
        assert ranks == list(range(mesh.world))


# ---------------------------------------------------------------- spaces


def few(*values: int, most: int = 2) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.sampled_from(values), min_size=1, max_size=most, unique=True).map(tuple)


spaces = st.builds(
    PlanSpace,
    tp=st.none() | few(1, 2, 3),
    etp=few(1, 2, 4),
    ep=few(1, 2, 3, 4),
    pp=st.none() | few(1, 2, 4),
    vpp=few(1, 2, 3),
    cp=few(1, 2, 4),
    micro_batch=few(1, 2, 3),
    max_tp=st.none() | st.sampled_from([1, 2, 4]),
    max_pp=st.none() | st.sampled_from([2, 4]),
    recompute=st.lists(st.sampled_from(Recompute), min_size=1, max_size=2).map(tuple),
)
architectures = st.fixed_dictionaries(
    {
        "n_layers": st.sampled_from([4, 6, 8, 12]),
        "n_heads": st.sampled_from([4, 6, 12]),
        "n_kv_heads": st.sampled_from([1, 2, 3, 6]),
        "d_ff": st.sampled_from([6, 8, 12]),
        "n_experts": st.sampled_from([0, 4, 6, 12]),
        "d_expert": st.sampled_from([2, 3, 12]),
        "d_shared": st.sampled_from([0, 2, 3, 12]),
        "first_k_dense": st.integers(0, 1),
    }
)


def allowed(space: PlanSpace, name: str, world: int) -> list[int]:
    values = getattr(space, name) or [v for v in range(1, world + 1) if world % v == 0]
    return [v for v in values if v <= (getattr(space, f"max_{name}", None) or max(values))]


def brute_force(
    space: PlanSpace, shape: dict[str, int], world: int, seq_len: int, global_batch: int
) -> list[Plan]:
    names = ("tp", "etp", "ep", "pp", "vpp", "cp", "micro_batch")
    found = []
    for values in itertools.product(*(allowed(space, name, world) for name in names)):
        for dp in (v for v in range(1, world + 1) if world % v == 0):
            plan = Plan.model_validate({**dict(zip(names, values, strict=True)), "dp": dp})
            if violations(shape, plan, world, seq_len, global_batch) == ():
                found += [plan.model_copy(update={"recompute": m}) for m in set(space.recompute)]
    return sorted(found, key=rank_key)


@given(
    spaces,
    architectures,
    st.sampled_from([1, 2, 4, 6, 8, 12]),
    st.sampled_from([6, 8, 24]),
    st.sampled_from([4, 6, 12, 24]),
)
@settings(max_examples=40, deadline=None)
def test_skeleton_and_mask_are_the_brute_force_space_in_order(
    space: PlanSpace, shape: dict[str, int], world: int, seq_len: int, global_batch: int
) -> None:
    expected = brute_force(space, shape, world, seq_len, global_batch)
    assert list(space.plans(shape, world, seq_len, global_batch)) == expected
    table = space.skeleton(world, seq_len, global_batch)
    keys = [rank_key(table.plan(i)) for i in range(len(table))]
    assert keys == sorted(set(keys))
    kept = table.select(legal_mask(table, shape))
    assert [kept.plan(i) for i in range(len(kept))] == expected


def test_derived_columns_are_those_of_the_plans() -> None:
    table = PlanSpace(etp=(1, 2), vpp=(1, 2), max_tp=4).skeleton(64, 4096, 128)
    assert len(table) > 100
    assert all(column.dtype == np.int64 for column in table.columns.values())
    np.testing.assert_array_equal(table.tp * table.cp * table.pp * table.dp, 64)
    np.testing.assert_array_equal(table.n_microbatches * table.dp * table.micro_batch, 128)
    np.testing.assert_array_equal(table.edp * table.etp * table.ep * table.pp, 64)
    for i in (0, len(table) // 2, len(table) - 1):
        assert table.plan(i).mesh.edp == table.edp[i]


def test_none_means_every_divisor_up_to_the_cap() -> None:
    assert PlanSpace().domain("ep", 12).tolist() == [1, 2, 3, 4, 6, 12]
    assert PlanSpace(max_ep=4).domain("ep", 12).tolist() == [1, 2, 3, 4]
    assert PlanSpace(tp=(8, 2, 2)).domain("tp", 12).tolist() == [2, 8]
    assert PlanSpace(tp=(8, 2), max_tp=4).domain("tp", 12).tolist() == [2]
    assert PlanSpace().etp == (1,)


def test_a_space_without_plans_is_an_empty_table() -> None:
    table = PlanSpace(tp=(3,)).skeleton(256, 2048, 1024)
    assert len(table) == 0
    assert legal_mask(table, MOE).shape == (0,)
    assert list(PlanSpace(tp=(3,)).plans(MOE, 256, 2048, 1024)) == []


@pytest.mark.parametrize(
    "fields",
    [{"tp": ()}, {"tp": (0,)}, {"tp": (2.0,)}, {"etp": None}, {"max_tp": 0}, {"dp": (1,)}],
)
def test_impossible_spaces_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        PlanSpace.model_validate(fields)


@pytest.mark.parametrize(("world", "seq_len", "batch"), [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_impossible_runs_are_refused(world: int, seq_len: int, batch: int) -> None:
    with pytest.raises(PerfmodelError, match="=0 must be a whole number, at least 1"):
        PlanSpace().skeleton(world, seq_len, batch)


def test_a_space_reads_back_from_json() -> None:
    space = PlanSpace(tp=(1, 2), max_ep=8, recompute=(Recompute.FULL, Recompute.NONE))
    assert space.recompute == (Recompute.NONE, Recompute.FULL)
    assert PlanSpace.model_validate_json(space.model_dump_json()) == space


def paper_table() -> PlanTable:
    return PlanSpace(max_tp=8, max_cp=8).skeleton(256, 2048, 1024)


def test_the_space_of_the_papers_cluster_holds_its_optimum() -> None:
    table = paper_table()
    optimum = Plan.parse("tp=1,ep=8,pp=8,cp=1,mbs=4,recompute=none", world=256)
    (row,) = (i for i in range(len(table)) if table.plan(i) == optimum)
    assert legal_mask(table, MOE)[row]
    assert not legal_mask(table, {**MOE, "n_experts": 12})[row]


def test_a_ladder_of_architectures_costs_only_its_distinct_widths() -> None:
    table = paper_table()
    experts, widths = range(1, 92), (256, 384, 512, 640)
    for n_experts, width in itertools.product(experts, widths * 3):
        legal_mask(table, {**MOE, "n_experts": n_experts, "d_expert": width})
    evaluated = table.rule_masks.evaluated
    assert evaluated <= len(RULES) + 4 * (len(experts) + len(widths))
    assert evaluated < len(experts) * len(widths) * 3  # one evaluation an architecture at least


def test_masks_of_one_table_do_not_share_memory() -> None:
    table = paper_table()
    mask = legal_mask(table, MOE)
    mask[:] = False
    assert legal_mask(table, MOE).any()


def test_columns_cannot_be_written() -> None:
    table = paper_table()
    with pytest.raises(ValueError, match="read-only"):
        table.tp[0] = 2


def test_a_space_without_end_is_refused_in_one_sentence() -> None:
    many = tuple(range(1, 257))
    space = PlanSpace(vpp=many, etp=many, micro_batch=many)
    with pytest.raises(PerfmodelError, match=r"layouts at \w+, which must be at most 20000000"):
        space.skeleton(2**16, 2**16, 2**16)
    with pytest.raises(ValidationError, match="at most 256"):
        PlanSpace(vpp=tuple(range(1, 258)))
