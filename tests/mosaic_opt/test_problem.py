"""The lower level of the problem, one candidate at a time, and how a failure is explained."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mosaic_opt.envelope import parse_envelope
from mosaic_opt.outcome import Outcome
from mosaic_opt.problem import Problem
from perfmodel.rules import RULES, violations

from .strategies import (
    small_envelopes,
    tiny,
    tiny_envelope,
    tiny_ladder,
    tiny_problem,
)

GB = 1e9
ONE = tiny_ladder(q=[2], n_experts=[8], top_k=[1], expert_split=[1])


def outcomes(spec: dict[str, Any]) -> list[Outcome]:
    problem = Problem(parse_envelope(spec))
    return [problem.solve_candidate(i) for i in range(len(problem.architectures))]


def only(**changes: Any) -> Outcome:
    """Outcome of the single candidate of a small envelope."""
    (outcome,) = outcomes(tiny(**({"candidates": ONE} | changes)))
    return outcome


# ---------------------------------------------------------------- the space


def test_candidates_are_in_the_order_of_the_grid() -> None:
    names = [a.name for a in tiny_problem().architectures]
    assert names[:3] == [
        "ladder:q=1,E=4,K=1,G=1",
        "ladder:q=1,E=4,K=1,G=2",
        "ladder:q=1,E=4,K=2,G=1",
    ]
    assert len(names) == len(set(names)) == 16


def test_order_and_repetition_of_the_axes_do_not_matter() -> None:
    shuffled = tiny_ladder(q=[2, 1, 2], n_experts=[8, 4], top_k=[2, 1, 1])
    assert tiny_problem(candidates=shuffled).architectures == tiny_problem().architectures


def test_more_active_than_stored_experts_is_no_candidate() -> None:
    grid = tiny_ladder(n_experts=[2, 4], top_k=[1, 2, 4], q=[1], expert_split=[1])
    assert [(a.n_experts, a.top_k) for a in tiny_problem(candidates=grid).architectures] == [
        (2, 1),
        (2, 2),
        (4, 1),
        (4, 2),
        (4, 4),
    ]


@given(st.floats(0.0, 0.99), st.floats(0.01, 1.0))
def test_sparsity_bounds_select(low: float, high: float) -> None:
    every = tiny_problem().architectures
    kept = tiny_problem(candidates=tiny_ladder(min_sparsity=low, max_sparsity=high)).architectures
    assert kept == tuple(a for a in every if low <= a.sparsity <= high)


@given(small_envelopes())
def test_batch_price_is_scalar_price(spec: dict[str, Any]) -> None:
    problem = Problem(parse_envelope(spec))
    assume(problem.architectures)
    rows = problem.legal_rows(0)
    assume(len(rows))
    step_s, memory = problem.price(0, rows)
    for i in np.linspace(0, len(rows) - 1, 4).astype(int):
        scalar = problem.reprice(0, problem.table.plan(int(rows[i])))
        assert scalar.step_time_s == pytest.approx(float(step_s[i]), rel=1e-9)
        assert scalar.memory_bytes == pytest.approx(float(memory[i]), rel=1e-9)


@given(small_envelopes())
def test_legal_rows_are_those_without_violations(spec: dict[str, Any]) -> None:
    problem = Problem(parse_envelope(spec))
    assume(problem.architectures)
    legal = set(problem.legal_rows(0).tolist())
    batch = problem.envelope.batch
    for row in range(0, len(problem.table), max(1, len(problem.table) // 25)):
        broken = violations(
            problem.architectures[0].rule_variables(),
            problem.table.plan(row),
            problem.envelope.cluster.n_devices,
            batch.seq_len,
            batch.global_batch,
        )
        assert (row in legal) == (not broken)


@given(small_envelopes())
def test_best_row_is_the_shortest_that_is_allowed(spec: dict[str, Any]) -> None:
    problem = Problem(parse_envelope(spec))
    for index in range(len(problem.architectures)):
        outcome = problem.solve_candidate(index)
        assert outcome.counts.plans == outcome.counts.priced + outcome.counts.infeasible
        if outcome.feasible:
            rows = problem.legal_rows(index)
            step_s, memory = problem.price(index, rows)
            fits = memory <= problem.envelope.memory_cap_bytes
            if spec["extrapolation"] == "refuse":
                fits &= problem.table.ep[rows] <= 32
            assert outcome.step_s == step_s[fits].min()
            assert outcome.row in rows[fits & (step_s == outcome.step_s)]
            assert (outcome.reason, outcome.detail) == ("", "")
        else:
            assert outcome.reason
            assert outcome.detail
            assert math.isnan(outcome.loss)


@given(small_envelopes())
def test_optimistic_loss_is_a_bound(spec: dict[str, Any]) -> None:
    problem = Problem(parse_envelope(spec))
    for index in range(len(problem.architectures)):
        outcome = problem.solve_candidate(index)
        if outcome.feasible:
            assert problem.optimistic_loss(index) <= outcome.loss


@pytest.mark.parametrize(("precision", "ratio"), [("fp8", 2.0), ("nvfp4", 4.0)])
def test_optimistic_loss_rests_on_the_peak_of_the_precision(precision: str, ratio: float) -> None:
    batch = {"global_batch": 32, "seq_len": 1024}
    low, bf16 = tiny_problem(batch=batch | {"precision": precision}), tiny_problem(batch=batch)
    for index in range(len(bf16.architectures)):
        assert bf16.peak_step_s(index) == pytest.approx(ratio * low.peak_step_s(index), rel=0.1)
        tokens = low.tokens(index, low.peak_step_s(index)).tokens
        assert low.optimistic_loss(index) == low.loss(index, tokens) < bf16.optimistic_loss(index)


def test_a_candidate_whose_failures_leave_nothing_of_the_window_has_no_tokens() -> None:
    facts = {"mtbf_node_hours": 1e-7, "storage_bytes_per_s": 5e7, "restart_s": 600.0}
    outcome = only(goodput=facts)
    assert outcome.reason == "tokens"
    assert "next to no tokens" in outcome.detail
    assert math.isnan(outcome.tokens)


@given(small_envelopes(), st.floats(1e-3, 1e3), st.floats(1.0, 10.0))
def test_tokens_fall_as_the_step_grows(spec: dict[str, Any], step_s: float, k: float) -> None:
    problem = Problem(parse_envelope(spec))
    assume(problem.architectures)
    quick, slow = problem.tokens(0, step_s), problem.tokens(0, k * step_s)
    assert slow.available <= quick.available
    if not math.isnan(slow.tokens):
        assert slow.tokens <= quick.tokens <= quick.available


# ---------------------------------------------------------------- why not: memory


@pytest.mark.parametrize("fraction", [0.002, 0.005, 0.01])
def test_memory_says_how_much_is_short(fraction: float) -> None:
    envelope = tiny_envelope(candidates=ONE, memory_fraction=fraction)
    problem = Problem(envelope)
    outcome = problem.solve_candidate(0)
    assert (outcome.feasible, outcome.reason) == (False, "memory")
    leanest = min(
        problem.reprice(0, problem.table.plan(int(row))).memory_bytes
        for row in problem.legal_rows(0)
    )
    found = re.search(
        r"needs ([\d.]+) GB of ([\d.]+) GB: ([\d.]+) GB short on every device", outcome.detail
    )
    assert found is not None
    needs, cap, short = (float(x) for x in found.groups())
    assert needs == pytest.approx(leanest / GB, abs=0.051)
    assert cap == pytest.approx(envelope.memory_cap_bytes / GB, abs=0.051)
    assert short == pytest.approx((leanest - envelope.memory_cap_bytes) / GB, abs=0.051)
    assert outcome.shortfall == pytest.approx(leanest - envelope.memory_cap_bytes, rel=1e-9)
    assert short > 0.0


def test_memory_that_was_short_is_enough() -> None:
    outcome = only(memory_fraction=0.01)
    found = re.search(r"([\d.]+) GB short", outcome.detail)
    assert found is not None
    short = float(found.group(1)) + 0.05
    device = tiny_envelope().cluster.device_memory_bytes
    assert only(memory_fraction=0.01 + short * GB / device).feasible
    assert not only(memory_fraction=0.01 + (short - 0.11) * GB / device).feasible


def test_memory_of_the_cluster_replaces_the_pack() -> None:
    small = {"hardware": "p6-b200", "nodes": 1, "memory_bytes": 1e9}
    assert only(cluster=small).reason == "memory"
    assert only(cluster=small | {"memory_bytes": 1e11}).feasible


# ---------------------------------------------------------------- why not: tokens


def more_days(outcome: Outcome) -> float:
    found = re.search(r"(\S+) more days would do", outcome.detail)
    assert found is not None, outcome.detail
    return float(found.group(1))


RATIO = only(window_days=1.0).tokens / tiny_problem(candidates=ONE).n_active(0)
"""Tokens per parameter that the candidate sees in a day."""


@pytest.mark.parametrize(
    "days",
    [
        1.26,
        3.14,
        10.01,
        25.55,
        400.02,
    ],
)
def test_stated_days_are_enough(days: float) -> None:
    rule = {"kind": "saturate", "min_tokens_per_parameter": days * RATIO}
    outcome = only(tokens=rule)
    assert (outcome.feasible, outcome.reason) == (False, "tokens")
    assert outcome.shortfall == pytest.approx((days - 1.0) * 86400.0, rel=1e-9)
    more = more_days(outcome)
    assert more <= 1.1 * (days - 1.0) + 0.1
    assert only(tokens=rule, window_days=1.0 + more).feasible
    assert not only(tokens=rule, window_days=1.0 + 0.85 * more - 0.1).feasible


@pytest.mark.parametrize("days", [1.26, 3.14])
def test_stated_days_reach_the_least_ratio_of_a_grid(days: float) -> None:
    rule = {"kind": "grid", "tokens_per_parameter": [1e9, days * RATIO]}
    outcome = only(tokens=rule)
    assert outcome.reason == "tokens"
    assert only(tokens=rule, window_days=1.0 + more_days(outcome)).feasible


def test_stated_days_reach_the_least_ratio_of_a_grid_that_is_enough() -> None:
    """The window delivers the minimum, but no listed ratio lies between the two."""
    rule = {
        "kind": "grid",
        "tokens_per_parameter": [0.5 * RATIO, 4.0 * RATIO],
        "min_tokens_per_parameter": 0.8 * RATIO,
    }
    outcome = only(tokens=rule)
    assert outcome.reason == "tokens"
    more = more_days(outcome)
    assert 3.0 <= more <= 3.4
    assert only(tokens=rule, window_days=1.0 + more).feasible


@pytest.mark.parametrize(
    "rule",
    [
        {"tokens_per_parameter": [10.0], "min_tokens_per_parameter": 20.0},
        {"tokens_per_parameter": [10.0], "max_tokens_per_parameter": 5.0},
    ],
    ids=["grid below the minimum", "grid above the maximum"],
)
def test_no_days_are_promised_where_none_would_do(rule: dict[str, Any]) -> None:
    try:
        outcome = only(tokens={"kind": "grid", **rule}, window_days=30000.0)
    except ValueError:
        return  # said when the envelope is read: better still
    assert outcome.reason == "tokens"
    assert "more days" not in outcome.detail


def test_window_that_is_short_by_a_rounding_is_explained() -> None:
    """The ratio that the window delivers, asked for, and missed in the last bit of a product."""
    missed = 0
    for k in range(300):
        days = 1.0 + k / 97.0
        problem = tiny_problem(candidates=ONE, window_days=days)
        tokens, n_active = problem.solve_candidate(0).tokens, problem.n_active(0)
        if tokens / n_active * n_active > tokens:
            missed += 1
            rule = {"kind": "saturate", "min_tokens_per_parameter": tokens / n_active}
            assert only(tokens=rule, window_days=days).reason == "tokens"
    assert missed


def test_window_of_next_to_nothing_is_explained() -> None:
    rule = {"kind": "saturate", "min_tokens_per_parameter": 1.0}
    outcome = only(tokens=rule, window_days=5e-324)
    assert outcome.reason == "tokens"
    assert not math.isinf(outcome.shortfall)


def test_cap_on_tokens_that_contradicts_the_minimum_is_said() -> None:
    rule = {"kind": "saturate", "min_tokens_per_parameter": 20.0, "max_tokens": 1e9}
    outcome = only(tokens=rule)
    assert outcome.reason == "tokens"
    assert "max_tokens=1e+09" in outcome.detail
    assert "more days" not in outcome.detail


# ---------------------------------------------------------------- why not: rules


def test_no_legal_layout_names_the_rules() -> None:
    outcome = only(plans={"tp": [8], "ep": [1]}, candidates=ONE | {"q": [1]})
    assert outcome.reason == "no_legal_layout"
    assert "tp=8 must divide n_heads=4; nearest: 4." in outcome.detail
    assert outcome.counts.priced == 0
    assert outcome.counts.infeasible == outcome.counts.plans > 0


@given(small_envelopes())
def test_named_rules_are_broken_rules(spec: dict[str, Any]) -> None:
    for outcome in outcomes(spec):
        if outcome.reason == "no_legal_layout" and outcome.counts.plans:
            assert " must " in outcome.detail
            assert outcome.detail.endswith(".")
            assert len(re.findall(r" must ", outcome.detail)) <= len(RULES)


def test_no_layout_at_all_is_said() -> None:
    outcome = only(plans={"pp": [3]})
    assert (outcome.reason, outcome.counts.plans) == ("no_legal_layout", 0)
    assert "tiles the cluster" in outcome.detail


# ---------------------------------------------------------------- why not: nobody measured it

WIDE = {
    "cluster": {"hardware": "p6-b200", "nodes": 8},
    "batch": {"global_batch": 64, "seq_len": 1024},
    "candidates": ONE | {"n_experts": [64]},
    "plans": {"tp": [1], "cp": [1], "pp": [1], "ep": [64], "micro_batch": [1]},
}


def test_beyond_measured_range_says_how_to_admit_it() -> None:
    refused = only(**WIDE)
    assert refused.reason == "beyond_measured_range"
    assert "more than 32 ranks" in refused.detail
    assert "extrapolation: flag" in refused.detail
    assert refused.counts.refused == refused.counts.priced > 0
    admitted = only(**WIDE, extrapolation="flag")
    assert admitted.feasible
    assert admitted.counts.refused == 0


def test_admitted_extrapolation_is_flagged() -> None:
    problem = tiny_problem(**WIDE, extrapolation="flag")
    best = problem.solve_candidate(0)
    flags = problem.reprice(0, problem.table.plan(best.row)).flags
    assert any("all_to_all" in flag and "64" in flag for flag in flags)


def test_measured_layouts_are_preferred_to_refused_ones() -> None:
    both = WIDE | {"plans": WIDE["plans"] | {"ep": [32, 64]}}
    problem = tiny_problem(**both)
    outcome = problem.solve_candidate(0)
    assert problem.table.plan(outcome.row).ep == 32
    assert outcome.counts.refused > 0
