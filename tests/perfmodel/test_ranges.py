"""What lies outside the ranges of the fits is flagged: once each, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from perfmodel.architecture import Architecture
from perfmodel.calibration.packs import RangeFlag
from perfmodel.cluster import Batch
from perfmodel.plan import Plan, Recompute
from perfmodel.ranges import partial_nodes, range_flags, stack_variables, unmeasured_parts
from perfmodel.step import estimate

from .strategies import PACK, STACK, Run, cluster, profile, runs

INSIDE: dict[str, Any] = {
    "n_layers": 16,
    "d_model": 2048,
    "n_heads": 16,
    "n_kv_heads": 8,
    "head_dim": 128,
    "vocab_size": 257664,
    "n_experts": 64,
    "top_k": 2,
    "d_expert": 1024,
}


def run_of(
    architecture: dict[str, Any] | None = None,
    plan: dict[str, Any] | None = None,
    *,
    nodes: int = 4,
    seq_len: int = 8192,
) -> Run:
    """Build a run inside of every range, with some values changed."""
    layout = {"ep": 8, "pp": 4, "dp": 8, "recompute": Recompute.FULL} | (plan or {})
    return Run(
        Architecture(**(INSIDE | (architecture or {}))),
        Plan(**layout),
        cluster(nodes),
        Batch(global_batch=64, seq_len=seq_len),
    )


def flagged(run: Run) -> set[tuple[str, str]]:
    return {(flag.surface, flag.variable) for flag in range_flags(run.model)}


def volumes_apart(pairs: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Leave out how much is moved at once, which follows from everything else."""
    return {pair for pair in pairs if pair[1] not in ("volume", "traffic_bytes")}


def test_a_run_like_the_measured_ones_is_not_flagged() -> None:
    assert volumes_apart(flagged(run_of())) == set()


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (run_of({"vocab_size": 50257}), {("head", "vocab")}),
        (run_of({"first_k_dense": 1, "d_ff": 4096}), {(STACK, "n_dense_layers")}),
        (run_of({"n_layers": 64}), {(STACK, "n_layers")}),
        (run_of(plan={"recompute": Recompute.NONE}), {(STACK, "recompute")}),
        (run_of({"n_experts": 1024}, {"ep": 32, "pp": 1, "dp": 32}), {("topk", "n_experts")}),
        (
            run_of(seq_len=32768),
            {
                (STACK, "seq_len"),
                ("attention_forward", "seq_len"),
                ("attention_backward", "seq_len"),
                ("grouped_forward", "rows"),
                ("grouped_backward", "rows"),
            },
        ),
        (
            run_of(plan={"ep": 32, "pp": 1, "dp": 32}),
            {
                (STACK, "local_experts"),
                *(
                    (f"grouped_{way}", name)
                    for way in ("forward", "backward")
                    for name in ("n_gemms", "rows")
                ),
            },
        ),
        (
            run_of({"d_expert": 512}),
            {
                *((f"grouped_{way}", "k") for way in ("forward", "backward")),
            },
        ),
        (
            run_of(plan={"tp": 2, "dp": 4}),
            {(STACK, "tp"), ("head", "vocab")},
        ),
        (
            run_of(plan={"cp": 2, "dp": 4}),
            {(STACK, "cp")},
        ),
        (
            run_of({"head_dim": 256}),
            {("attention_forward", "head_dim"), ("attention_backward", "head_dim")},
        ),
    ],
    ids=lambda value: None if isinstance(value, Run) else "+".join(sorted(v for _, v in value)),
)
def test_a_value_outside_is_flagged_and_no_other(run: Run, expected: set[tuple[str, str]]) -> None:
    assert volumes_apart(flagged(run)) == expected


def test_groups_of_more_ranks_than_were_measured_are_flagged() -> None:
    found = flagged(run_of({"n_experts": 256}, {"ep": 64, "pp": 1, "dp": 64}, nodes=8))
    assert {("all_to_all", "size"), ("reduce_scatter", "size"), ("all_gather", "size")} <= found


def test_a_group_of_expert_tensor_parallelism_is_asked_for_as_well() -> None:
    """Its all-gather spans 64 ranks, the groups of TP and DP 8 each."""
    run = run_of(plan={"etp": 64, "ep": 1, "pp": 1, "tp": 8, "dp": 8}, nodes=8)
    assert run.model.cost.dispatch > 0
    assert ("all_gather", "size") in flagged(run)


def test_what_a_pack_refuses_is_said_to_be_refused() -> None:
    run = run_of({"n_experts": 256}, {"ep": 64, "pp": 1, "dp": 64}, nodes=8)
    (flag,) = (
        f for f in range_flags(run.model) if (f.surface, f.variable) == ("all_to_all", "size")
    )
    assert flag.policy == "refuse"
    assert "a search refuses" in flag.message


@given(runs())
def test_a_flag_is_outside_of_its_range_and_stands_once(run: Run) -> None:
    flags = range_flags(run.model)
    for flag in flags:
        assert not flag.low <= flag.value <= flag.high
        record = run.cluster.pack.surfaces.get(flag.surface)
        ranges = record.ranges if record else profile().ranges
        assert ranges[flag.variable] == (flag.low, flag.high)
        assert f"{flag.variable} = {flag.value:g}" in flag.message
        assert flag.surface in flag.message
    assert len({(flag.surface, flag.variable) for flag in flags}) == len(flags)
    rare = unmeasured_parts(run.model)
    assert estimate(*run, stack=profile()).flags == (
        *rare,
        *partial_nodes(run.model),
        *(flag.message for flag in flags),
    )


@given(runs())
def test_every_part_that_no_fitted_run_had_is_said_once(run: Run) -> None:
    a, said = run.architecture, unmeasured_parts(run.model)
    parts = (a.latent, a.window, a.extra, a.mtp_layers or None, None if a.moe_every == 1 else 1)
    assert len(set(said)) == len(said) == sum(part is not None for part in parts)
    for sentence in said:
        assert sentence.startswith(f"{a.name}: ")
        assert sentence.endswith(".")


@given(runs())
def test_every_range_of_the_stack_is_watched(run: Run) -> None:
    values = stack_variables(run.model)
    assert set(values) >= set(profile().ranges)
    outside = {
        name for name, (low, high) in profile().ranges.items() if not low <= values[name] <= high
    }
    assert {flag.variable for flag in range_flags(run.model) if flag.surface == STACK} == outside


def test_the_farthest_value_stands_for_a_variable() -> None:
    """Both products of an expert ask; the one that is farther from the range is told."""
    found: list[RangeFlag] = [
        flag
        for flag in range_flags(run_of({"d_expert": 8192, "d_model": 8192}).model)
        if (flag.surface, flag.variable) == ("grouped_forward", "n")
    ]
    assert [flag.value for flag in found] == [2 * 8192]


def test_a_stack_that_was_fitted_on_other_hardware_is_flagged() -> None:
    run = run_of()
    elsewhere = profile().model_copy(update={"hardware": ("some-other-pack",)})
    step = estimate(*run, stack=elsewhere)
    assert any("some-other-pack" in flag and PACK in flag for flag in step.flags)


def test_a_ring_with_some_devices_of_a_node_is_said() -> None:
    """Rings were measured with one device of each node and with all of them."""
    said = partial_nodes(run_of(plan={"tp": 2, "dp": 4}).model)
    assert len(said) == 2
    assert "tensor-parallel group has 2 of the 8 devices" in said[0]
    assert "data-parallel group has 4 of the 8 devices" in said[1]
    assert partial_nodes(run_of(plan={"dp": 8}).model) == ()
