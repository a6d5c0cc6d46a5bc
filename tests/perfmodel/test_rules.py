"""The rules against Megatron-Core's own arithmetic and against reports with known answers."""

from __future__ import annotations

import re
from math import lcm
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from perfmodel.constraints import Constraint
from perfmodel.errors import IllegalPlanError, PerfmodelError
from perfmodel.plan import Plan, Recompute
from perfmodel.rules import (
    ARCHITECTURE_VARIABLES,
    DERIVED,
    LAYOUT_VARIABLES,
    OPTION_VARIABLES,
    PLAN_VARIABLES,
    RULES,
    Violation,
    require_legal,
    rules_table,
    violations,
)

MOE = {
    "n_layers": 48,
    "n_heads": 32,
    "n_kv_heads": 4,
    "d_ff": 6144,
    "n_experts": 128,
    "d_expert": 768,
    "d_shared": 0,
    "first_k_dense": 0,
}
MTP = {**MOE, "mtp_layers": 2}
DENSE = {**MOE, "n_experts": 0, "d_expert": 0}


def broken(
    architecture: dict[str, int],
    text: str,
    world: int,
    seq_len: int = 4096,
    global_batch: int = 1024,
) -> set[str]:
    plan = Plan.parse(text, world=world)
    return {v.rule for v in violations(architecture, plan, world, seq_len, global_batch)}


def only(found: tuple[Violation, ...], rule: str) -> Violation:
    (violation,) = (v for v in found if v.rule == rule)
    return violation


# ---------------------------------------------------------------- reports with right answers


def test_report_14_expert_tensor_degree_is_not_the_tensor_degree() -> None:
    assert broken(MOE, "tp=4,ep=4,etp=1,pp=1", world=4) == set()
    assert broken(MOE, "tp=4,ep=4,etp=4,pp=1", world=4) == {"expert_mesh"}


def test_report_15_the_default_of_etp_is_one_and_is_shown() -> None:
    plan = Plan.parse("tp=2,ep=4", world=4)
    assert plan.etp == 1
    assert "etp=1" in str(plan)
    assert plan.etp * plan.ep * plan.pp == 4
    assert broken(MOE, "tp=2,ep=4", world=4) == set()


@pytest.mark.parametrize(("ep", "edp"), [(16, 2), (32, 1)])
def test_report_18_ep_may_exceed_dp(ep: int, edp: int) -> None:
    text = f"tp=1,cp=16,pp=1,dp=2,ep={ep}"
    assert broken(MOE, text, world=32) == set()
    assert Plan.parse(text).mesh.edp == edp


@pytest.mark.parametrize(("cp", "tp", "factor"), [(2, 4, 8), (4, 8, 32), (4, 3, 24)])
def test_report_21_sequence_factor(cp: int, tp: int, factor: int) -> None:
    shape = {**DENSE, "n_heads": 24, "n_kv_heads": 24}
    text = f"cp={cp},tp={tp}"
    legal = [s for s in range(1, 100) if broken(shape, text, cp * tp, seq_len=s) == set()]
    assert legal == [s for s in range(1, 100) if s % factor == 0]


def test_report_22_key_value_heads_are_replicated() -> None:
    assert broken(MOE, "tp=8", world=8) == set()
    assert broken({**MOE, "n_kv_heads": 6, "n_heads": 48}, "tp=8", world=8) == {"kv_heads"}


@pytest.mark.parametrize(
    ("n_microbatches", "legal"), [(3, False), (6, True), (7, False), (12, True)]
)
def test_report_25_interleaved_groups(n_microbatches: int, legal: bool) -> None:
    found = broken(MOE, "pp=6,vpp=2,dp=1", world=6, global_batch=n_microbatches)
    assert found == (set() if legal else {"interleaving_group"})
    assert broken(MOE, "pp=6,vpp=1,dp=1", world=6, global_batch=n_microbatches) == set()


def test_report_11_a_remainder_of_layers_is_refused() -> None:
    assert broken({**DENSE, "n_layers": 30}, "pp=4", world=4) == {"equal_stages"}


def test_report_63_ep_divides_the_experts_and_fits_the_world() -> None:
    assert broken({**MOE, "n_experts": 12}, "ep=8", world=8) == {"experts"}
    assert broken(MOE, "ep=8", world=4) == {"expert_mesh"}
    assert broken(MOE, "ep=8", world=8) == set()


def test_report_65_only_dp_and_micro_batch_bind_the_global_batch() -> None:
    assert broken(MOE, "pp=2,vpp=4,dp=4,mbs=2", world=8, global_batch=16) == set()
    assert broken(MOE, "pp=2,dp=4,mbs=2", world=8, global_batch=12) == {"global_batch"}


def test_report_66_context_parallelism_takes_two_chunks_a_rank() -> None:
    assert broken(DENSE, "cp=4", world=4, seq_len=8) == set()
    assert broken(DENSE, "cp=4", world=4, seq_len=12) == {"sequence_halves"}
    assert broken(DENSE, "cp=1", world=4, seq_len=7) == set()


def test_report_71_interleaving_over_two_stages_is_allowed() -> None:
    assert broken(DENSE, "pp=2,vpp=2", world=2) == set()
    assert broken(DENSE, "pp=1,vpp=2", world=2) == {"interleaving_needs_pipeline"}


# ---------------------------------------------------------------- every rule can be broken

CASES: dict[str, tuple[dict[str, int], str, int, set[str]]] = {
    "world_size": (MOE, "tp=2,dp=4", 16, set()),
    "expert_mesh": (MOE, "ep=4", 2, set()),
    "global_batch": (MOE, "mbs=3", 4, set()),
    "equal_stages": (MOE, "pp=5", 5, set()),
    "pipeline_depth": (MOE, "pp=64", 64, {"equal_stages"}),
    "balanced_chunks": (MOE, "pp=32,vpp=2,layout=balanced", 32, set()),
    "layout_stages": (MOE, "pp=2,layout=16/16/16", 2, set()),
    "layout_layers": (MOE, "pp=2,layout=16/16", 2, set()),
    "layout_mtp": (MOE, "pp=2,layout=Et*24|t*24mL", 2, set()),
    "layout_embedding": (MOE, "pp=2,layout=t*24|Et*24L", 2, set()),
    "layout_loss": (MOE, "pp=2,layout=Et*24L|t*24", 2, set()),
    "mtp_behind_layers": (MTP, "pp=2,layout=Et*24mm|t*24L", 2, set()),
    "mtp_together": (MTP, "pp=2,layout=Et*48m|mL", 2, set()),
    "mtp_last_chunk": (MTP, "pp=2,vpp=2,layout=Et*24|t*24mm||L", 2, set()),
    "interleaving_needs_pipeline": (MOE, "vpp=3", 4, set()),
    "interleaving_group": (MOE, "pp=3,vpp=2", 3, set()),
    "attention_heads": ({**MOE, "n_heads": 20}, "tp=8", 8, set()),
    "kv_heads": ({**MOE, "n_kv_heads": 16, "n_heads": 48}, "tp=24", 24, {"sequence_parallel"}),
    "dense_width": ({**DENSE, "d_ff": 6}, "tp=4", 4, set()),
    "shared_width": ({**MOE, "d_shared": 6}, "tp=4", 4, set()),
    "experts": ({**MOE, "n_experts": 6}, "ep=4", 4, set()),
    "dense_model": (DENSE, "ep=4", 4, set()),
    "expert_width": ({**MOE, "d_expert": 6}, "etp=4", 4, set()),
    "sequence_halves": (MOE, "cp=4096", 4096, set()),
    "sequence_parallel": ({**MOE, "n_heads": 24, "n_kv_heads": 24}, "tp=3", 3, set()),
    "experts_need_sequence_parallel": (MOE, "tp=2,sequence_parallel=false", 2, set()),
    "heads_over_cp": (MOE, "cp=64,cp_comm=a2a", 64, {"kv_heads_over_cp"}),
    "kv_heads_over_cp": ({**MOE, "n_kv_heads": 2}, "cp=4,cp_comm=a2a", 4, set()),
    "optimizer_instances": (MOE, "dp=4,optimizer_instances=3", 4, {"expert_optimizer_instances"}),
    "expert_optimizer_instances": (MOE, "ep=4,dp=4,optimizer_instances=2", 4, set()),
    "instances_need_shards": (MOE, "dp=4,zero=0,optimizer_instances=2", 4, set()),
    "sharding_in_pipeline": (MOE, "pp=2,zero=3", 2, set()),
    "latent_recompute": (
        MOE,
        "recompute=selective,recompute_modules=mla_up_proj+mlp",
        1,
        set(),
    ),
}


@pytest.mark.parametrize("rule", [rule.name for rule in RULES])
def test_every_rule_is_broken_by_a_plan_that_breaks_little_else(rule: str) -> None:
    architecture, text, world, others = CASES[rule]
    assert broken(architecture, text, world) == {rule} | others


# ---------------------------------------------------------------- against plain arithmetic


def megatron_accepts(
    shape: dict[str, int], plan: Plan, world: int, seq_len: int, global_batch: int
) -> bool:
    """Say what Megatron-Core's assertions say, written out by hand."""
    p, s = plan, shape
    dense_layers = s["first_k_dense"] > 0 or s["n_experts"] == 0
    if p.tp * p.cp * p.pp * p.dp != world or world % (p.etp * p.ep * p.pp):
        return False
    if global_batch % (p.dp * p.micro_batch) or s["n_layers"] % (p.pp * p.vpp):
        return False
    if p.vpp > 1:
        group, m = p.pp, global_batch // (p.dp * p.micro_batch)
        if p.pp == 1 or not p.pp <= group <= m or 0 < m % group < p.pp:
            return False
    if s["n_heads"] % p.tp or (s["n_kv_heads"] % p.tp and p.tp % s["n_kv_heads"]):
        return False
    if (dense_layers and s["d_ff"] % p.tp) or s["d_shared"] % p.tp:
        return False
    if s["n_experts"]:
        if s["n_experts"] % p.ep or s["d_expert"] % p.etp:
            return False
    elif p.ep > 1 or p.etp > 1:
        return False
    return seq_len % (p.cp * lcm(2, p.tp) if p.cp > 1 else p.tp) == 0


degrees = st.sampled_from([1, 1, 1, 2, 2, 3, 4, 6])
plans = st.builds(
    Plan,
    **{name: degrees for name in PLAN_VARIABLES},
    recompute=st.sampled_from(Recompute),
)
widths = st.sampled_from([6, 8, 12, 24])
shapes = st.fixed_dictionaries(
    {
        **{name: widths for name in ARCHITECTURE_VARIABLES},
        "n_experts": st.sampled_from([0, 6, 8, 12]),
        "d_shared": st.sampled_from([0, 6, 8]),
        "first_k_dense": st.integers(0, 2),
    }
)


@given(shapes, plans, st.sampled_from([8, 12, 24]), st.sampled_from([6, 24, 36]), st.booleans())
@settings(max_examples=300)
def test_the_rules_are_the_arithmetic_of_megatron(
    shape: dict[str, int], plan: Plan, seq_len: int, global_batch: int, tiles: bool
) -> None:
    world = plan.tp * plan.cp * plan.pp * plan.dp if tiles else 12
    accepted = megatron_accepts(shape, plan, world, seq_len, global_batch)
    found = violations(shape, plan, world, seq_len, global_batch)
    assert (found == ()) == accepted
    for violation in found:
        assert violation.message.endswith(".")
        assert violation.message.count(". ") == 0


@given(shapes, plans, st.integers(1, 40), st.integers(1, 40), st.integers(1, 40))
def test_a_nearest_value_repairs_its_rule(
    shape: dict[str, int], plan: Plan, world: int, seq_len: int, global_batch: int
) -> None:
    rules = {rule.name: rule for rule in RULES}
    for violation in violations(shape, plan, world, seq_len, global_batch):
        variable = rules[violation.rule].remedy_variable
        if variable not in PLAN_VARIABLES:
            continue
        assert getattr(plan, variable) not in violation.nearest
        for value in violation.nearest:
            repaired = plan.model_copy(update={variable: value})
            again = violations(shape, repaired, world, seq_len, global_batch)
            assert violation.rule not in {v.rule for v in again}


# ---------------------------------------------------------------- messages


def test_a_message_says_what_which_value_and_what_is_near() -> None:
    found = violations({**MOE, "n_experts": 64}, Plan(ep=6, dp=12), 12, 4096, 1200)
    violation = only(found, "experts")
    assert violation.message == "ep=6 must divide n_experts=64; nearest: 4, 8."
    assert (violation.value, violation.limit, violation.nearest) == (6, 64, (4, 8))


def test_every_broken_rule_is_named_in_order() -> None:
    plan = Plan(tp=3, ep=6, pp=5, dp=3)
    found = violations({**MOE, "n_experts": 64}, plan, 256, 2048, 1024)
    assert [v.rule for v in found] == [
        "world_size",
        "expert_mesh",
        "global_batch",
        "equal_stages",
        "attention_heads",
        "kv_heads",
        "experts",
        "sequence_parallel",
    ]


def test_another_degree_is_offered_where_the_remedy_has_no_legal_value() -> None:
    violation = only(violations(MOE, Plan(tp=3, dp=4), 32, 4096, 1024), "world_size")
    assert violation.nearest == ()
    assert violation.message == "tp*cp*pp*dp=12 must equal world=32; nearest tp: 8."


def test_a_remainder_of_layers_is_offered_a_layout() -> None:
    found = violations({**MOE, "n_layers": 61}, Plan(pp=4, dp=1), 4, 4096, 4)
    violation = only(found, "equal_stages")
    assert violation.message == (
        "pp*vpp=4 must divide n_layers=61; nearest pp: 1, 61; "
        "or give a layout, such as layout=balanced or layout=15/16/15/15."
    )


def test_interleaving_offers_the_nearest_number_of_microbatches() -> None:
    found = violations(MOE, Plan(pp=6, vpp=2, dp=1), 6, 4096, 7)
    assert only(found, "interleaving_group").nearest == (6, 12)


def test_a_rule_on_an_undefined_quotient_waits_for_its_parent() -> None:
    found = violations(MOE, Plan(pp=6, vpp=2, dp=5, micro_batch=3), 30, 4096, 7)
    assert {v.rule for v in found} == {"global_batch"}


def test_huge_degrees_are_judged_exactly() -> None:
    big = 2**20
    found = violations(MOE, Plan(tp=big, cp=big, pp=big, dp=big), 256, 4096, 1024)
    assert only(found, "world_size").value == 2**80


@pytest.mark.parametrize(
    ("shape", "world", "says"),
    [
        ({k: v for k, v in MOE.items() if k != "d_ff"}, 8, "lack d_ff"),
        ({**MOE, "n_kv_heads": 0}, 8, "n_kv_heads=0"),
        ({**MOE, "d_ff": -1}, 8, "d_ff=-1"),
        (MOE, 0, "world=0"),
        (MOE, True, "world=True"),
    ],
)
def test_impossible_numbers_are_refused(shape: dict[str, int], world: int, says: str) -> None:
    with pytest.raises(PerfmodelError, match=re.escape(says)):
        violations(shape, Plan(dp=8), world, 4096, 1024)


def test_an_illegal_plan_carries_its_violations() -> None:
    require_legal(MOE, Plan(dp=8), 8, 4096, 1024)
    with pytest.raises(IllegalPlanError, match="ep=3 must divide") as caught:
        require_legal(MOE, Plan(ep=3, dp=8), 8, 4096, 1024)
    assert [v.rule for v in caught.value.violations] == ["expert_mesh", "experts"]


def test_a_violation_is_a_frozen_public_record() -> None:
    (violation,) = violations(MOE, Plan(ep=3, dp=3), 3, 4096, 3)
    assert list(violation.model_dump()) == ["rule", "message", "value", "limit", "nearest"]
    with pytest.raises(ValidationError):
        violation.rule = "other"


# ---------------------------------------------------------------- the declaration itself


def test_rules_are_named_once_and_offer_a_remedy_that_they_read() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert len({rule.constraint for rule in RULES}) == len(RULES)
    known = {
        *PLAN_VARIABLES,
        *ARCHITECTURE_VARIABLES,
        *DERIVED,
        *LAYOUT_VARIABLES,
        "layout",
        *OPTION_VARIABLES,
    }
    known |= {*OPTION_VARIABLES, "world", "seq_len", "global_batch"}
    for rule in RULES:
        assert isinstance(rule.constraint, Constraint)
        assert rule.remedy_variable in rule.constraint.variables <= known
        assert rule.reason
        assert rule.source


def test_the_documentation_prints_the_rules() -> None:
    page = Path(__file__).parents[2] / "docs" / "theory" / "plans.md"
    text = page.read_text(encoding="utf-8")
    _, _, rest = text.partition("<!-- rules: begin -->\n")
    table, end, _ = rest.partition("<!-- rules: end -->")
    assert end
    assert table == rules_table()
