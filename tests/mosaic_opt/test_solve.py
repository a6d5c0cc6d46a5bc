"""What `solve` promises: the true optimum, in order, the same every time, and explained."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic_opt.backends.base import Limits, Progress
from mosaic_opt.backends.enumerate import Enumerate
from mosaic_opt.envelope import Envelope, example, examples, parse_envelope
from mosaic_opt.errors import MosaicError
from mosaic_opt.result import Solution, Status
from mosaic_opt.solver import solve
from perfmodel.architecture import Architecture
from perfmodel.calibration.stacks import load_stack
from perfmodel.ladders import ladder
from perfmodel.plan import Plan, Recompute
from perfmodel.rules import violations
from perfmodel.step import estimate

from .strategies import (
    ratios,
    small_envelopes,
    solved_table3,
    solved_tiny,
    tiny,
    tiny_envelope,
    tiny_ladder,
)

ROOT = Path(__file__).resolve().parent.parent.parent
MEASURED_ALL_TO_ALL = 32
PROFILE = load_stack("megatron-eager")

# ---------------------------------------------------------------- brute force, from the formulas


def paper_counts(a: Architecture) -> tuple[float, float]:
    """N_tot and N_act of a ladder model, as Section 7.1 counts them."""
    attention = 2 * a.d_model**2 + 256 * a.d_model * a.n_kv_heads + 2 * a.d_model
    expert = 3 * a.d_model * a.d_expert

    def count(experts: int) -> int:
        block = (experts + 1) * expert + a.d_model * a.n_experts
        dense = 3 * a.d_model * a.d_ff
        return a.n_layers * attention + dense + (a.n_layers - 1) * block + a.d_model

    return float(count(a.n_experts)), float(count(a.top_k))


def law_loss(law: Any, n_total: float, n_active: float, tokens: float, split: float) -> float:
    """Equation (10), term by term."""
    density = n_active / n_total
    return (
        law.a / n_total**law.alpha
        + law.b / tokens**law.beta
        + law.c / density**law.lambda_
        + law.j / (density**law.delta * n_total**law.gamma * split**law.eta)
        + law.e
    )


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def layouts(spec: dict[str, Any], world: int) -> Iterator[Plan]:
    def domain(name: str) -> list[int]:
        values = spec.get(name) or divisors(world)
        return [v for v in values if v <= spec.get(f"max_{name}", world)]

    for tp, etp, cp, ep, mbs, pp, vpp, mode in product(
        domain("tp"),
        spec.get("etp", [1]),
        domain("cp"),
        domain("ep"),
        spec.get("micro_batch", [1, 2, 4]),
        domain("pp"),
        spec.get("vpp", [1]),
        spec.get("recompute", list(Recompute)),
    ):
        if world % (tp * cp * pp) == 0:
            yield Plan(
                tp=tp,
                etp=etp,
                ep=ep,
                pp=pp,
                vpp=vpp,
                cp=cp,
                dp=world // (tp * cp * pp),
                micro_batch=mbs,
                recompute=mode,
            )


def token_budget(rule: dict[str, Any], available: float, n_active: float) -> float | None:
    """Tokens of a candidate, or None if the rule cannot be met."""
    budget = min(available, rule.get("max_tokens", math.inf))
    budget = min(budget, rule.get("max_tokens_per_parameter", math.inf) * n_active)
    if rule["kind"] == "grid":
        fitting = [r * n_active for r in rule["tokens_per_parameter"] if r * n_active <= budget]
        if not fitting:
            return None
        budget = max(fitting)
    return budget if budget >= rule.get("min_tokens_per_parameter", 0.0) * n_active else None


def brute_force(spec: dict[str, Any]) -> dict[str, tuple[float, float, float] | None]:
    """Name -> (loss, tokens, shortest step), or None where nothing fits; every plan, by hand."""
    envelope = parse_envelope(spec)  # for the cluster, the batch and the law: no search
    cluster, batch, law = envelope.cluster, envelope.batch, envelope.law
    grid = spec["candidates"]
    found: dict[str, tuple[float, float, float] | None] = {}
    for q, e, k, g in product(*(grid[a] for a in ("q", "n_experts", "top_k", "expert_split"))):
        if k > e:
            continue
        a = ladder(q, e, k, g)
        n_total, n_active = paper_counts(a)
        if 1.0 - n_active / n_total < grid["min_sparsity"]:
            continue
        steps = []
        for plan in layouts(spec["plans"], cluster.n_devices):
            if violations(
                a.rule_variables(), plan, cluster.n_devices, batch.seq_len, batch.global_batch
            ):
                continue
            if spec["extrapolation"] == "refuse" and plan.ep > MEASURED_ALL_TO_ALL:
                continue
            priced = estimate(a, plan, cluster, batch, stack=PROFILE)
            if priced.memory_bytes <= spec["memory_fraction"] * cluster.device_memory_bytes:
                steps.append(priced.step_time_s)
        found[a.name] = None
        if steps:
            seconds = spec["window_days"] * 86400.0 * spec["goodput"]
            available = seconds / min(steps) * batch.global_batch * batch.seq_len
            tokens = token_budget(spec["tokens"], available, n_active)
            if tokens is not None:
                loss = law_loss(law, n_total, n_active, tokens, float(g))
                found[a.name] = (loss, tokens, min(steps))
    return found


@settings(max_examples=40)
@given(small_envelopes())
def test_enumerator_is_brute_force(spec: dict[str, Any]) -> None:
    solution = solve(parse_envelope(spec), backend=Enumerate(workers=1))
    expected = brute_force(spec)
    feasible = {name: found for name, found in expected.items() if found is not None}
    assert {c.name for c in solution.candidates} == set(feasible)
    assert {r.name for r in solution.rejected} == set(expected) - set(feasible)
    for c in solution.candidates:
        loss, tokens, step_s = feasible[c.name]
        assert c.loss == pytest.approx(loss, rel=1e-9)
        assert c.tokens == pytest.approx(tokens, rel=1e-9)
        assert c.step_time_s == pytest.approx(step_s, rel=1e-9)
    if feasible:
        assert solution.status is Status.OPTIMAL
        best = min(loss for loss, *_ in feasible.values())
        assert solution.bounds.primal == pytest.approx(best, rel=1e-9)
        assert solution.bounds.dual == solution.bounds.primal
    else:
        assert solution.status is Status.INFEASIBLE
        assert solution.optimum is None
    assert solution.certificate.certified


def test_brute_force_meets_every_kind_of_answer() -> None:
    """The law above is about something: the strategy reaches all four ends of a candidate."""
    seen: set[str] = set()

    @settings(max_examples=150, database=None)
    @given(small_envelopes())
    def look(spec: dict[str, Any]) -> None:
        solution = solve(parse_envelope(spec), backend=Enumerate(workers=1))
        seen.update(r.reason for r in solution.rejected)
        seen.update(["feasible"] if solution.candidates else [])

    look()
    assert {"feasible", "memory", "tokens", "no_legal_layout", "beyond_measured_range"} <= seen


# ---------------------------------------------------------------- more is never worse


def best_loss(spec: dict[str, Any]) -> float:
    """Loss of the optimum, infinite where nothing is feasible."""
    primal = solve(parse_envelope(spec), backend=Enumerate(workers=1)).bounds.primal
    return math.inf if primal is None else primal


def at_most(better: float, worse: float) -> bool:
    return better <= worse * (1.0 + 1e-12)


@given(small_envelopes(), st.floats(1.0, 30.0))
def test_longer_window_is_never_worse(spec: dict[str, Any], factor: float) -> None:
    longer = spec | {"window_days": spec["window_days"] * factor}
    assert at_most(best_loss(longer), best_loss(spec))


@given(small_envelopes(), st.floats(0.0, 1.0), st.booleans())
def test_more_memory_is_never_worse(spec: dict[str, Any], share: float, device: bool) -> None:
    fraction = spec["memory_fraction"]
    more = spec | {"memory_fraction": fraction + share * (1.0 - fraction)}
    if device:
        more = spec | {"cluster": spec["cluster"] | {"memory_bytes": 180e9 * (1.0 + 5.0 * share)}}
    assert at_most(best_loss(more), best_loss(spec))


@given(small_envelopes(), st.data())
def test_more_layouts_are_never_worse(spec: dict[str, Any], data: st.DataObject) -> None:
    plans = dict(spec["plans"])
    key = data.draw(st.sampled_from(["micro_batch", "recompute", "etp", "vpp", "max_tp", "pp"]))
    if key == "recompute":
        plans[key] = list(Recompute)
    elif key == "max_tp":
        plans[key] = 8
    elif key == "pp":
        plans.pop("pp", None)
    else:
        plans[key] = sorted({*plans.get(key, [1]), 1, 2})
    assert at_most(best_loss(spec | {"plans": plans}), best_loss(spec))


@given(small_envelopes(), st.data())
def test_more_candidates_are_never_worse(spec: dict[str, Any], data: st.DataObject) -> None:
    grid = dict(spec["candidates"])
    axis = data.draw(st.sampled_from(["q", "n_experts", "top_k", "expert_split"]))
    grid[axis] = [*grid[axis], data.draw(st.sampled_from([1, 2, 4]))]
    grid["min_sparsity"] = 0.0
    assert at_most(best_loss(spec | {"candidates": grid}), best_loss(spec))


@given(small_envelopes())
def test_admitting_extrapolation_is_never_worse(spec: dict[str, Any]) -> None:
    assert at_most(
        best_loss(spec | {"extrapolation": "flag"}), best_loss(spec | {"extrapolation": "refuse"})
    )


# ---------------------------------------------------------------- what holds of every solution


def own_tolerance(envelope: Envelope, solution: Solution) -> float:
    """L(D') - L(D) of the optimum, D' the tokens at an MFU lower by e, from the coefficients."""
    best = solution.candidates[0]
    split = best.expert_split or 1.0
    available = envelope.window_s * envelope.goodput * envelope.batch.tokens / best.step_time_s
    at = [
        law_loss(envelope.law, best.n_total, best.n_active, tokens, split)
        for tokens in (
            min(best.tokens, available * (1.0 - envelope.mfu_error)),
            best.tokens,
        )
    ]
    return at[0] - at[1]


def assert_sound(envelope: Envelope, solution: Solution) -> None:
    losses = [c.loss for c in solution.candidates]
    assert losses == sorted(losses)
    assert [c.rank for c in solution.candidates] == list(range(1, len(losses) + 1))
    assert all(0.0 < c.mfu <= 1.0 for c in solution.candidates)
    assert all(c.memory_bytes <= envelope.memory_cap_bytes for c in solution.candidates)
    counts = solution.counts
    assert counts.plans == counts.architectures * counts.layouts
    assert counts.priced + counts.infeasible + counts.discarded + counts.unexamined == counts.plans
    assert counts.over_memory + counts.refused <= counts.priced
    assert counts.feasible_architectures == len(losses)
    assert len(losses) + len(solution.rejected) <= counts.architectures <= counts.grid_points
    if not losses:
        assert (solution.optimum, solution.near_ties) == (None, ())
        assert solution.near_tie_rule.loss_tolerance is None
        return
    assert all(c.delta_loss == c.loss - losses[0] for c in solution.candidates)
    tolerance = solution.near_tie_rule.loss_tolerance
    assert tolerance == pytest.approx(own_tolerance(envelope, solution), rel=1e-6, abs=1e-13)
    assert solution.near_ties == tuple(c for c in solution.candidates if c.delta_loss <= tolerance)
    best, first = solution.optimum, solution.candidates[0]
    assert best is not None
    assert (best.loss, best.plan, best.tokens) == (first.loss, first.plan, first.tokens)
    assert best.architecture["name"] == first.name
    assert best.step.step_time_s == pytest.approx(first.step_time_s, rel=1e-9)
    assert best.mfu == pytest.approx(first.mfu, rel=1e-9)
    assert solution.bounds.primal == best.loss
    assert best.model_flop == pytest.approx(6.0 * first.n_active * best.tokens)


@given(small_envelopes(), st.sampled_from([0.0, 0.06, 0.3]))
def test_every_solution_is_sound(spec: dict[str, Any], mfu_error: float) -> None:
    envelope = parse_envelope(spec | {"mfu_error": mfu_error})
    assert_sound(envelope, solve(envelope, backend=Enumerate(workers=1)))


def test_tiny_tells_near_ties_from_the_rest() -> None:
    solution = solved_tiny()
    assert_sound(tiny_envelope(), solution)
    wide = solve(tiny_envelope(mfu_error=0.5))
    assert 1 <= len(solution.near_ties) < len(wide.near_ties) < len(wide.candidates)


@settings(max_examples=15)
@given(small_envelopes())
def test_same_answer_for_any_number_of_workers(spec: dict[str, Any]) -> None:
    envelope = parse_envelope(spec)
    one = solve(envelope, backend=Enumerate(workers=1)).to_json()
    assert solve(envelope, backend=Enumerate(workers=3)).to_json() == one
    assert solve(envelope, backend=Enumerate(workers=1)).to_json() == one


def test_equal_candidates_tie_by_position() -> None:
    model = json.loads(ladder(1, 4, 1, 1).model_dump_json())
    models = [model | {"name": name} for name in ("b", "a", "c")]
    solution = solve(tiny_envelope(candidates={"kind": "explicit", "models": models}))
    assert [c.name for c in solution.candidates] == ["b", "a", "c"]
    assert len(solution.near_ties) == 3


def test_goodput_scales_tokens() -> None:
    full, half = solved_tiny(), solve(tiny_envelope(goodput=0.5))
    tokens = {c.name: c.tokens for c in full.candidates}
    assert all(c.tokens == pytest.approx(0.5 * tokens[c.name]) for c in half.candidates)


def test_goodput_from_failures_scales_tokens_and_is_certified() -> None:
    facts = {"mtbf_device_hours": 500.0, "storage_bytes_per_s": 1e8, "restart_s": 900.0}
    envelope = tiny_envelope(goodput=facts)
    full, found = solved_tiny(), solve(envelope)
    tokens = {c.name: c.tokens for c in full.candidates}
    share = {m.name: envelope.goodput_of(m).value for m in envelope.candidates.architectures()}
    assert len({round(value, 6) for value in share.values()}) > 1
    for c in found.candidates:
        assert c.tokens == pytest.approx(share[c.name] * tokens[c.name])
    assert found.certificate.certified
    assert found.optimum.goodput == share[found.optimum.architecture["name"]]
    assert found.optimum.goodput_source == "ASSUMED"


def test_mfu_convention_moves_no_decision() -> None:
    one, other = solved_tiny(), solve(tiny_envelope(mfu_convention="6n-embedding"))
    assert [(c.name, c.plan, c.loss) for c in one.candidates] == [
        (c.name, c.plan, c.loss) for c in other.candidates
    ]
    assert all(a.mfu < b.mfu for a, b in zip(one.candidates, other.candidates, strict=True))


def test_unknown_backend_is_named() -> None:
    with pytest.raises(MosaicError, match=r"no backend 'gurobi'; there are .*enumerate"):
        solve(tiny_envelope(), backend="gurobi")


# ---------------------------------------------------------------- Table 3


def test_table3_is_optimal_and_certified() -> None:
    solution = solved_table3()
    assert solution.status is Status.OPTIMAL
    assert solution.certificate.certified
    assert all(check.passed for check in solution.certificate.checks)
    assert solution.bounds.gap == 0.0
    assert_sound(example("table3"), solution)


def test_table3_counts() -> None:
    counts = solved_table3().counts
    assert (counts.grid_points, counts.architectures) == (1560, 1092)
    assert counts.priced == 5_890_956
    assert (counts.discarded, counts.unexamined) == (0, 0)


def test_table3_tolerance() -> None:
    tolerance = solved_table3().near_tie_rule.loss_tolerance
    assert tolerance is not None
    assert 0.003 < tolerance < 0.004


def test_table3_paper_geometry_is_a_near_miss() -> None:
    """The model that the paper returns is feasible here, and not the best."""
    solution = solved_table3()
    (paper,) = [c for c in solution.candidates if c.name == "ladder:q=12,E=96,K=2,G=4"]
    assert paper.rank > 1
    assert paper.delta_loss > 0.0
    assert paper.tokens_per_parameter >= 40.0


def test_table3_keeps_the_token_rule() -> None:
    for c in solved_table3().candidates:
        assert 40.0 * (1 - 1e-12) <= c.tokens_per_parameter <= 150.0 * (1 + 1e-12)
        if c.binding == "max_tokens_per_parameter":
            assert c.tokens_per_parameter == pytest.approx(150.0)


def test_table3_peak_compute() -> None:
    assert example("table3").peak_compute_flop == pytest.approx(9.95328e23, rel=1e-12)


def test_table3_is_the_same_on_one_worker() -> None:
    again = solve(example("table3"), backend=Enumerate(workers=1))
    assert again.to_json() == solved_table3().to_json()


# ---------------------------------------------------------------- the other examples


def test_examples_are_known() -> None:
    assert {"table3", "table5", "listing", "fig1", "fig11"} <= set(examples())


@pytest.mark.parametrize("name", examples())
def test_example_loads(name: str) -> None:
    envelope = example(name)
    assert envelope.name == name
    assert envelope.candidates.architectures()


def test_unknown_example_is_named() -> None:
    with pytest.raises(MosaicError, match=r"no example 'table9'; there are .*table3"):
        example("table9")


@pytest.mark.parametrize("name", ["table5", "listing"])
def test_example_solves(name: str) -> None:
    solution = solve(example(name))
    assert solution.status is Status.OPTIMAL
    assert_sound(example(name), solution)


def test_table5_keeps_the_published_layout() -> None:
    solution = solve(example("table5"))
    assert len(solution.candidates) + len(solution.rejected) == 4
    for c in solution.candidates:
        assert (c.plan.tp, c.plan.cp, c.plan.pp, c.plan.ep, c.plan.micro_batch) == (1, 1, 4, 8, 4)


def test_fig1_counts() -> None:
    envelope = example("fig1")
    plans = envelope.plans.model_copy(update={"tp": (1,), "cp": (1,), "micro_batch": (4,)})
    solution = solve(envelope.model_copy(update={"plans": plans}))
    assert (solution.counts.grid_points, solution.counts.architectures) == (2400, 1738)
    assert solution.status is Status.OPTIMAL
    assert_sound(envelope, solution)


# ---------------------------------------------------------------- interruption and limits


def raise_after(n: int, error: type[BaseException]) -> Any:
    def progress(state: Progress) -> None:
        if state.done >= n:
            raise error

    return progress


def assert_partial(partial: Solution, full: Solution, examined: int) -> None:
    """A search that stopped early says so, keeps its best, and bounds the rest."""
    layouts_ = partial.counts.layouts
    assert not partial.certificate.certified
    assert partial.counts.unexamined == (partial.counts.architectures - examined) * layouts_
    assert len(partial.candidates) + len(partial.rejected) == examined
    assert partial.bounds.dual is not None
    if full.bounds.primal is not None:
        assert partial.bounds.dual <= full.bounds.primal
    if partial.candidates:
        assert partial.status is Status.FEASIBLE
        assert partial.bounds.primal is not None
        assert full.bounds.primal is not None
        assert partial.bounds.dual <= full.bounds.primal <= partial.bounds.primal
        assert partial.bounds.gap == partial.bounds.primal - partial.bounds.dual
    else:
        assert partial.status is Status.UNKNOWN
        assert partial.optimum is None
        assert partial.bounds.gap is None


@pytest.mark.parametrize("n", [1, 2, 7, 15])
@pytest.mark.parametrize("workers", [1, 3])
def test_keyboard_interrupt_keeps_the_incumbent(n: int, workers: int) -> None:
    partial = solve(
        tiny_envelope(),
        backend=Enumerate(workers=workers),
        progress=raise_after(n, KeyboardInterrupt),
    )
    assert partial.termination == "interrupted"
    assert_partial(partial, solved_tiny(), n)
    assert_sound(tiny_envelope(), partial)


@settings(max_examples=25)
@given(small_envelopes(), st.integers(1, 3))
def test_interrupted_bound_is_below_the_true_optimum(spec: dict[str, Any], n: int) -> None:
    envelope = parse_envelope(spec)
    full = solve(envelope, backend=Enumerate(workers=1))
    if full.counts.architectures <= n:
        return
    partial = solve(
        envelope, backend=Enumerate(workers=1), progress=raise_after(n, KeyboardInterrupt)
    )
    dual = math.inf if partial.bounds.dual is None else partial.bounds.dual
    assert dual <= (math.inf if full.bounds.primal is None else full.bounds.primal)
    if partial.candidates:
        assert partial.status is Status.FEASIBLE
    else:
        assert partial.status is Status.UNKNOWN


def test_interrupt_before_anything_feasible_is_unknown() -> None:
    grid = tiny_ladder(q=[4, 1])  # in order of q: make the first the infeasible one
    models = [json.loads(ladder(q, 8, 1, 1).model_dump_json()) for q in sorted(grid["q"])[::-1]]
    envelope = tiny_envelope(
        candidates={"kind": "explicit", "models": models}, memory_fraction=0.02
    )
    full = solve(envelope)
    assert [c.name for c in full.candidates] == ["ladder:q=1,E=8,K=1,G=1"]
    partial = solve(envelope, progress=raise_after(1, KeyboardInterrupt))
    assert partial.status is Status.UNKNOWN
    assert_partial(partial, full, 1)


def test_interrupt_after_the_last_candidate_changes_nothing() -> None:
    whole = solve(tiny_envelope(), progress=raise_after(16, KeyboardInterrupt))
    assert whole.to_json() == solved_tiny().to_json()


def test_real_signal_is_an_interrupt() -> None:
    def progress(state: Progress) -> None:
        if state.done == 3:
            signal.raise_signal(signal.SIGINT)

    partial = solve(tiny_envelope(), backend=Enumerate(workers=2), progress=progress)
    assert partial.termination == "interrupted"
    assert partial.status is Status.FEASIBLE


def test_command_line_answers_after_an_interrupt() -> None:
    code = (
        "import os, signal, sys\n"
        "from mosaic_opt import cli\n"
        "def update(self, state):\n"
        "    if state.done == 30:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "cli.Bar.update = update\n"
        "sys.argv = ['mosaic', 'solve', '--example', 'table3', '--json', '-']\n"
        "cli.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    partial = Solution.from_json(done.stdout)
    assert (partial.status, partial.termination) == (Status.FEASIBLE, "interrupted")
    assert_partial(partial, solved_table3(), len(partial.candidates) + len(partial.rejected))


def test_error_of_the_callback_is_not_swallowed() -> None:
    with pytest.raises(ZeroDivisionError):
        solve(tiny_envelope(), progress=raise_after(2, ZeroDivisionError))


def test_time_limit_stops_the_search() -> None:
    partial = solve(tiny_envelope(), limits=Limits(time_s=1e-9), backend=Enumerate(workers=1))
    assert partial.termination == "time_limit"
    assert_partial(partial, solved_tiny(), 1)


def test_generous_time_limit_changes_nothing() -> None:
    assert solve(tiny_envelope(), limits=Limits(time_s=1e6)).to_json() == solved_tiny().to_json()


@pytest.mark.parametrize("time_s", [0.0, -1.0, math.nan, math.inf])
def test_impossible_time_limit_is_refused(time_s: float) -> None:
    with pytest.raises(MosaicError, match="time_s="):
        Limits(time_s=time_s)


def test_progress_counts_up() -> None:
    seen: list[Progress] = []
    solve(tiny_envelope(), progress=seen.append)
    assert [p.done for p in seen] == list(range(1, 17))
    assert {p.of for p in seen} == {16}
    best = [p.incumbent.loss for p in seen if p.incumbent is not None]
    assert best == sorted(best, reverse=True)
    assert best[-1] == solved_tiny().bounds.primal


# ---------------------------------------------------------------- token rules


@given(ratios(), st.floats(0.01, 10.0))
def test_cap_on_ratio_is_reached_or_the_window_binds(ratio: float, days: float) -> None:
    rule = {"kind": "saturate", "max_tokens_per_parameter": ratio}
    one = tiny_ladder(q=[1], n_experts=[4], top_k=[1], expert_split=[1])
    (c,) = solve(tiny_envelope(tokens=rule, window_days=days, candidates=one)).candidates
    if c.binding == "window":
        assert c.tokens_per_parameter <= ratio
    else:
        assert c.binding == "max_tokens_per_parameter"
        assert c.tokens_per_parameter == pytest.approx(ratio)


def test_grid_takes_the_largest_ratio_that_fits() -> None:
    rule = {"kind": "grid", "tokens_per_parameter": [0.5, 1e9, 2.0]}
    solution = solve(parse_envelope(tiny(tokens=rule)))
    assert {c.binding for c in solution.candidates} == {"grid"}
    assert all(c.tokens_per_parameter == pytest.approx(2.0) for c in solution.candidates)


def test_megatrons_convention_changes_the_mfu_that_is_reported_and_not_the_choice() -> None:
    plain, counted = solved_tiny(), solve(tiny_envelope(mfu_convention="megatron"))
    assert plain.optimum is not None
    assert counted.optimum is not None
    assert counted.optimum.architecture == plain.optimum.architecture
    assert counted.optimum.step_time_s == plain.optimum.step_time_s
    assert counted.optimum.mfu_convention == "megatron"
    assert counted.candidates[0].mfu == pytest.approx(counted.optimum.mfu)
    assert counted.optimum.mfu != plain.optimum.mfu


def test_a_model_that_no_pipeline_shares_equally_is_laid_out_balanced() -> None:
    model = {"name": "seven", "n_layers": 7, "d_model": 1024, "n_heads": 8, "n_kv_heads": 8}
    model |= {"head_dim": 128, "d_ff": 2560, "vocab_size": 50257}
    plans = {"pp": [2, 4], "max_cp": 1, "micro_batch": [1]}

    def solved(*layouts: str) -> Solution:
        candidates = {"kind": "explicit", "models": [model]}
        return solve(tiny_envelope(candidates=candidates, plans={**plans, "layouts": [*layouts]}))

    assert solved("equal").optimum is None
    both, alone = solved("equal", "balanced"), solved("balanced")
    assert both.optimum is not None
    assert alone.optimum is not None
    assert both.optimum.step.plan == alone.optimum.step.plan
    assert both.optimum.step.plan.layout == "balanced"
    assert both.status is Status.OPTIMAL
    assert Solution.from_json(both.to_json()) == both
