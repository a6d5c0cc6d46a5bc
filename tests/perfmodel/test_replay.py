"""What the backward pass computes again, module by module, and what that costs."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.errors import PerfmodelError
from perfmodel.layer import OperatorTimes
from perfmodel.modes import ModeTotals, host_replay, mode_totals, with_replay
from perfmodel.plan import Module, Plan, Recompute
from perfmodel.replay import FIRST_MODULE_CODE, MODULE_BITS, latent_up_share, replay_of

from .option_strategies import OPTIONS, is_legal, modules, with_options
from .strategies import Run, ideal_stack, latent, moe, plans, profile, runs

FULL = float(Recompute.FULL.code)

SPARSE: dict[str, set[str]] = {
    "core_attn": {"attention_core", "context_parallel"},
    "layernorm": {"elementwise"},
    "moe_act": {"activation"},
    "mla_up_proj": {"attention_linear"},
    "mlp": set(),
    "moe": {"router", "permutation", "experts", "activation", "dense_ffn"},
    "shared_experts": {"dense_ffn"},
}
"""Operators of a layer with experts that each module computes again."""

DENSE = SPARSE | {
    "moe_act": set(),
    "mlp": {"activation", "dense_ffn"},
    "moe": {"router", "permutation", "experts"},  # a dense layer has none of these
    "shared_experts": set(),
}


def code_of(chosen: frozenset[Module] | set[Module]) -> float:
    plan = Plan(dp=1, recompute=Recompute.SELECTIVE, recompute_modules=tuple(chosen))
    return float(plan.recompute_code)


def totals(run: Run, mode: float) -> ModeTotals:
    return mode_totals(run.model.cost, run.architecture.dims, profile().stack(), mode)


def assert_no_dearer(less: ModeTotals, more: ModeTotals) -> None:
    for name in ("moe_device", "dense_device", "launches", "dispatch", "host_share"):
        assert getattr(less, name) <= getattr(more, name) * (1 + 1e-12), name


# ---------------------------------------------------------------- codes


def test_every_choice_of_modules_has_a_code_of_its_own() -> None:
    assert set(MODULE_BITS) == {*Module}
    every = [set(c) for n in range(1, len(Module) + 1) for c in combinations(Module, n)]
    codes = [code_of(chosen) for chosen in every]
    assert len(set(codes)) == len(codes) == 2 ** len(Module) - 1
    assert min(codes) > FULL == FIRST_MODULE_CODE - 1


@given(
    plans.flatmap(
        lambda plan: st.fixed_dictionaries(
            {name: st.sampled_from(values) for name, values in OPTIONS.items()}
        ).map(lambda options: plan.model_copy(update=options))
    ),
    st.frozensets(st.sampled_from(Module)),
)
def test_a_plan_reads_back_from_its_text(plan: Plan, chosen: frozenset[Module]) -> None:
    if chosen:
        update = {"recompute": Recompute.SELECTIVE, "recompute_modules": tuple(chosen)}
        plan = Plan.model_validate({**plan.model_dump(), **update})
    assert Plan.parse(str(plan)) == plan
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


def test_what_is_by_default_is_not_written() -> None:
    text = str(Plan(dp=2))
    assert not any(name in text for name in OPTIONS)
    assert "recompute_modules" not in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dp=1,recompute=selective,recompute_modules=moe+act", "must be one of core_attn"),
        ("dp=1,zero=4", "zero='4' must be one of 0, 1, 2, 3"),
        ("dp=1,cp_comm=ring", "cp_comm='ring' must be one of p2p, a2a"),
        ("dp=1,sequence_parallel=no", "must be one of true, false"),
        ("dp=1,optimizer_offload=1.1", "must be a number from 0 to 1"),
        ("dp=1,optimizer_offload=.", "must be a number from 0 to 1"),
    ],
)
def test_an_option_that_cannot_be_is_said(text: str, said: str) -> None:
    with pytest.raises(PerfmodelError, match=r"^[^\n]*$") as refused:
        Plan.parse(text)
    assert said in str(refused.value)


def test_modules_are_for_selective_recomputation() -> None:
    with pytest.raises(ValueError, match="needs recompute=selective, not full"):
        Plan.parse("dp=1,recompute=full,recompute_modules=mlp")


# ---------------------------------------------------------------- operators


@pytest.mark.parametrize(("moe_layer", "table"), [(1.0, SPARSE), (0.0, DENSE)])
@given(modules)
def test_a_module_computes_its_own_operators_again(
    moe_layer: float, table: dict[str, set[str]], chosen: frozenset[Module]
) -> None:
    forward = OperatorTimes(*(10.0**i for i in range(len(OperatorTimes._fields))))
    none = OperatorTimes(*([0.0] * len(forward)))
    times = with_replay(forward, none, replay_of(code_of(chosen)), moe_layer, 1.0)
    again = {
        name for name, seconds in times._asdict().items() if seconds == 2 * getattr(forward, name)
    }
    assert again == set().union(*(table[module] for module in chosen))
    once = {"gradient"}  # has no forward pass
    for name in set(OperatorTimes._fields) - again - once:
        assert getattr(times, name) == getattr(forward, name)


def test_a_latent_projection_is_part_of_attentions_projections() -> None:
    forward = OperatorTimes(*([1.0] * len(OperatorTimes._fields)))
    replay = replay_of(code_of({Module.MLA_UP_PROJ}))
    assert with_replay(forward, forward, replay, 1.0, 0.25).attention_linear == 2.25


def test_share_of_the_latent_projections_by_weights() -> None:
    """8 heads; queries from 96 to 8 x 96, keys and values from 64 to 8 x (64 + 48)."""
    up = 96 * 8 * 96 + 64 * 8 * (64 + 48)
    into_and_out = 512 * 96 + 512 * (64 + 32) + 8 * 48 * 512
    assert latent_up_share(moe(**latent()).dims) == pytest.approx(up / (up + into_and_out))
    up = 64 * 8 * (64 + 48)  # queries straight from the width are no latent's
    rest = 512 * 8 * 96 + 512 * (64 + 32) + 8 * 48 * 512
    found = latent_up_share(moe(**latent(q_lora_rank=0)).dims)
    assert found == pytest.approx(up / (up + rest))
    assert latent_up_share(moe().dims) == 0


# ---------------------------------------------------------------- costs


@given(runs())
def test_attention_alone_is_the_selective_mode(run: Run) -> None:
    selective = float(Recompute.SELECTIVE.code)
    alone = code_of({Module.CORE_ATTN})
    assert replay_of(alone) == replay_of(selective)
    assert totals(run, alone) == totals(run, selective)


@given(runs(), modules)
def test_modules_cost_no_less_than_nothing_and_no_more_than_everything(
    run: Run, chosen: frozenset[Module]
) -> None:
    some = totals(run, code_of(chosen))
    assert_no_dearer(totals(run, 0.0), some)
    assert_no_dearer(some, totals(run, FULL))


@given(runs(), modules, st.sampled_from(Module))
def test_one_more_module_costs_no_less(run: Run, chosen: frozenset[Module], more: Module) -> None:
    assert_no_dearer(totals(run, code_of(chosen)), totals(run, code_of(chosen | {more})))


@given(runs(), modules)
def test_a_step_with_modules_lies_between_none_and_full(
    run: Run, chosen: frozenset[Module]
) -> None:
    given_modules = tuple(chosen)
    some = with_options(run, recompute=Recompute.SELECTIVE, recompute_modules=given_modules)
    if not is_legal(some):
        return
    none, full = (with_options(run, recompute=mode) for mode in (Recompute.NONE, Recompute.FULL))
    # A full replay is part of the backward pass, which a fill of the pipeline sees otherwise.
    assert none.model.step_s <= some.model.step_s * (1 + 1e-12)
    assert some.model.pipeline.steady <= full.model.pipeline.steady * (1 + 1e-12)


# ---------------------------------------------------------------- the host


@given(modules)
def test_the_host_launches_at_most_one_more_forward_pass(chosen: frozenset[Module]) -> None:
    share = host_replay(profile().stack(), replay_of(code_of(chosen)))
    assert 0 <= share <= 1 == host_replay(profile().stack(), replay_of(FULL))


def test_what_the_host_launches_again() -> None:
    stack = ideal_stack(selective_replay=0.05, super_selective_replay=0.15)
    shares = [host_replay(stack, replay_of(mode)) for mode in (0.0, 1.0, 2.0)]
    assert shares == pytest.approx([0, 0.05, 0.15])
    expected = {
        "core_attn": 0.05,
        "layernorm": 0.6 * 0.1,
        "moe_act": 0.4 * 0.1,
        "mla_up_proj": 0.1,
        "mlp": 0.15,
        "moe": 0.5 + 0.4 * 0.1,
        "shared_experts": 0.1,
    }
    for module in Module:
        found = host_replay(stack, replay_of(code_of({module})))
        assert found == pytest.approx(expected[module]), module
    norms_and_units = {Module.CORE_ATTN, Module.LAYERNORM, Module.MOE_ACT}
    found = host_replay(stack, replay_of(code_of(norms_and_units)))
    assert found == pytest.approx(stack.super_selective_replay)
