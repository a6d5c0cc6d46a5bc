"""The search over layouts against brute force with the scalar estimate, and its intervals."""

from __future__ import annotations

from functools import cache
from itertools import product
from math import log
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import perfmodel.layout_search
from perfmodel.architecture import Architecture, MfuConvention
from perfmodel.calibration.stacks import StackProfile
from perfmodel.cluster import Batch, Cluster
from perfmodel.errors import PerfmodelError
from perfmodel.layout_search import LayoutSearch, layout_space, search_layouts
from perfmodel.plan import Plan, Recompute
from perfmodel.plan_space import PlanSpace
from perfmodel.plan_table import PlanTable
from perfmodel.priced_rows import NO_ROWS, PricedRows
from perfmodel.step import StepEstimate, StepModel, check, estimate
from perfmodel.uncertainty import draw_stacks, residual_error, throughput_ratios

from .strategies import cluster, fast_profile, moe, profile

BATCH = Batch(global_batch=32, seq_len=2048)
SPACE = PlanSpace(
    max_tp=2,
    max_cp=2,
    vpp=(1, 2),
    micro_batch=(1, 2),
    recompute=(Recompute.NONE, Recompute.FULL),
    layouts=("equal", "balanced"),
)
SIX_LAYERS = moe(n_layers=6)
"""Equal on 1, 2 and 3 stages, balanced on 4."""


# ---------------------------------------------------------------- rows that are kept


@st.composite
def priced_rows(draw: st.DrawFn) -> PricedRows:
    """Draw rows with many ties."""
    pairs = draw(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), max_size=40))
    step_s, memory = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
    return PricedRows(np.arange(len(pairs)), step_s, memory)


def points(rows: PricedRows) -> list[tuple[float, float, int]]:
    return list(zip(rows.memory.tolist(), rows.step_s.tolist(), rows.rows.tolist(), strict=True))


def front_by_pairs(all_points: list[tuple[float, float, int]]) -> list[tuple[float, float, int]]:
    """Keep the points that no other dominates, and the first of equal ones; every pair."""

    def beats(p: tuple[float, float, int], q: tuple[float, float, int]) -> bool:
        no_worse = p[0] <= q[0] and p[1] <= q[1]
        return no_worse and (p[:2] != q[:2] or p[2] < q[2])

    return sorted(q for q in all_points if not any(beats(p, q) for p in all_points))


@given(priced_rows(), st.integers(1, 12))
def test_rows_that_are_kept_are_those_of_a_full_sort(rows: PricedRows, top: int) -> None:
    given_points = points(rows)
    assert points(rows.lightest(top)) == sorted(given_points)[:top]
    by_time = sorted(given_points, key=lambda p: (p[1], p[0], p[2]))
    assert points(rows.shortest(top)) == by_time[:top]
    assert points(rows.front()) == front_by_pairs(given_points)


@given(priced_rows(), st.integers(1, 12), st.integers(1, 7))
def test_block_by_block_is_all_at_once(rows: PricedRows, top: int, block: int) -> None:
    best, leanest, front = NO_ROWS, NO_ROWS, NO_ROWS
    for start in range(0, len(rows.rows), block):
        part = rows.take(np.arange(start, min(start + block, len(rows.rows))))
        best = best.joined(part).shortest(top)
        leanest = leanest.joined(part.lightest(top)).lightest(top)
        front = front.joined(part.front()).front()
    assert points(best) == points(rows.shortest(top))
    assert points(leanest) == points(rows.lightest(top))
    assert points(front) == points(rows.front())


# ---------------------------------------------------------------- against brute force


@cache
def brute(architecture: Architecture, machines: Cluster, batch: Batch) -> list[StepEstimate]:
    """Price every combination of `SPACE` that the rules allow, one by one."""
    world = machines.n_devices
    degrees = [d for d in range(1, world + 1) if world % d == 0]
    steps = []
    for tp, cp, ep, mb, pp, vpp, mode, layout in product(
        (1, 2), (1, 2), degrees, (1, 2), degrees, (1, 2), SPACE.recompute, (None, "balanced")
    ):
        if world % (tp * cp * pp):
            continue
        if layout and architecture.n_layers % (pp * vpp) == 0:
            continue  # the equal layout over again
        dp = world // (tp * cp * pp)
        fields = {"tp": tp, "cp": cp, "ep": ep, "micro_batch": mb, "pp": pp, "vpp": vpp}
        plan = Plan(**fields, dp=dp, recompute=mode, layout=layout)
        if not check(architecture, plan, machines, batch):
            steps.append(estimate(architecture, plan, machines, batch, stack=profile()))
    return steps


def searched(**options: Any) -> LayoutSearch:
    given_options: dict[str, Any] = {"top": 5, "pairs": 4, "stack": profile()} | options
    machines = given_options.pop("machines", cluster(1))
    architecture = given_options.pop("architecture", SIX_LAYERS)
    space = given_options.pop("space", SPACE)
    return search_layouts(architecture, machines, BATCH, space, **given_options)


def capped(bytes_: float) -> Cluster:
    return cluster(1).model_copy(update={"memory_bytes": bytes_})


def costs(layouts: Any) -> list[tuple[float, float]]:
    return [(layout.step_time_s, layout.memory_bytes) for layout in layouts]


def close(found: list[tuple[float, float]], wanted: list[tuple[float, float]]) -> bool:
    return found == [pytest.approx(pair, rel=1e-9) for pair in wanted]


@pytest.mark.parametrize("n_layers", [5, 6, 8])
@pytest.mark.parametrize("quantile", [0.2, 0.6, 1.0])
def test_search_is_brute_force_with_the_scalar_estimate(n_layers: int, quantile: float) -> None:
    architecture = moe(n_layers=n_layers)
    steps = brute(architecture, cluster(1), BATCH)
    cap = float(np.quantile([s.memory_bytes for s in steps], quantile)) + 1.0
    found = searched(architecture=architecture, machines=capped(cap), top=8)
    fitting = [s for s in steps if s.memory_bytes <= cap]
    assert found.status == "found"
    assert found.reason == ""
    assert found.counts.priced == found.counts.legal == len(steps)
    assert found.counts.fit == len(fitting)
    wanted = sorted((s.step_time_s, s.memory_bytes) for s in fitting)
    assert close(costs(found.layouts), wanted[:8])
    limit = wanted[0][0] * (1.0 + profile().errors.mape_leave_one_out)
    assert found.near_ties == sum(time <= limit for time, _ in wanted)
    assert [x.near_tie for x in found.layouts] == [x.step_time_s <= limit for x in found.layouts]
    front = front_by_pairs([(s.memory_bytes, s.step_time_s, i) for i, s in enumerate(steps)])
    assert close(
        costs(found.pareto_front),
        [(steps[i].step_time_s, steps[i].memory_bytes) for *_, i in front],
    )


def test_every_layout_is_what_estimate_says_of_its_plan() -> None:
    found = searched(mfu_convention=MfuConvention.SIX_N_HEAD)
    for layout in (*found.layouts, *found.pareto_front):
        step = estimate(
            SIX_LAYERS,
            layout.plan,
            cluster(1),
            BATCH,
            stack=profile(),
            mfu_convention=MfuConvention.SIX_N_HEAD,
        )
        assert layout.step_time_s == step.step_time_s
        assert layout.tokens_per_s_per_device.value == step.tokens_per_s_per_device
        assert layout.tflops_per_device.value == step.tflops_per_device
        assert layout.mfu.value == step.mfu
        assert layout.memory_bytes == step.memory_bytes
        assert layout.heaviest_stage == step.heaviest_stage
        assert (layout.fits, layout.flags) == (step.fits, step.flags)
        assert layout.sources["step_time_s"] is step.sources["step_time_s"]


@pytest.mark.parametrize("workers", [1, 3])
def test_the_answer_does_not_depend_on_blocks_and_threads(
    monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    whole = searched(machines=capped(3.5e9))
    for block in (1, 7, 64):
        monkeypatch.setattr(perfmodel.layout_search, "BLOCK", block)
        assert searched(machines=capped(3.5e9), workers=workers) == whole


def test_search_is_deterministic_and_reads_back() -> None:
    found = searched()
    assert searched() == found
    assert LayoutSearch.model_validate_json(found.model_dump_json()) == found
    other = searched(seed=1)
    assert costs(other.layouts) == costs(found.layouts)
    assert other.layouts[0].mfu != found.layouts[0].mfu


def test_no_more_than_a_block_is_priced_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    whole = perfmodel.layout_search.plan_matrix

    def measured(table: PlanTable) -> Any:
        sizes.append(len(table))
        return whole(table)

    monkeypatch.setattr(perfmodel.layout_search, "BLOCK", 16)
    monkeypatch.setattr(perfmodel.layout_search, "plan_matrix", measured)
    found = searched(top=2)
    assert found.counts.priced > 8 * 16
    shown = {str(layout.plan) for layout in (*found.layouts, *found.pareto_front)}
    assert max(sizes) <= max(16, len(shown)) < found.counts.priced / 4


# ---------------------------------------------------------------- intervals


def sure(stack: StackProfile, **errors: float) -> StackProfile:
    """Take the intervals of the constants away, and set the errors."""
    constants = {
        name: c.model_copy(update={"low": c.value, "high": c.value})
        for name, c in stack.constants.items()
    }
    both = {"mape_leave_one_out": 0.0, "mape_leave_one_sweep_out": 0.0} | errors
    return stack.model_copy(
        update={"constants": constants, "errors": stack.errors.model_copy(update=both)}
    )


def width(search: LayoutSearch) -> float:
    interval = search.layouts[0].mfu
    return (interval.high - interval.low) / interval.value


def test_intervals_hold_the_point_and_keep_proportions() -> None:
    found = searched(pairs=64)
    for layout in (*found.layouts, *found.pareto_front):
        tokens, tflops, mfu = (
            layout.tokens_per_s_per_device,
            layout.tflops_per_device,
            layout.mfu,
        )
        for interval in (tokens, tflops, mfu):
            assert 0.0 < interval.low < interval.value < interval.high
        assert tokens.low / tokens.value == pytest.approx(mfu.low / mfu.value)
        assert tflops.high / tflops.value == pytest.approx(mfu.high / mfu.value)


def test_intervals_come_from_the_constants_and_from_the_error() -> None:
    nothing = searched(stack=sure(profile()))
    assert width(nothing) == pytest.approx(0.0, abs=1e-12)
    small = searched(stack=sure(profile(), mape_leave_one_sweep_out=0.1), pairs=64)
    large = searched(stack=sure(profile(), mape_leave_one_sweep_out=0.2), pairs=64)
    assert 0.0 < width(small) < width(large)
    errors = sure(profile()).errors
    of_constants = searched(stack=profile().model_copy(update={"errors": errors}), pairs=64)
    assert of_constants.layouts[0].mfu.high > of_constants.layouts[0].mfu.value
    assert width(of_constants) < width(searched(pairs=64))


def test_an_error_alone_gives_the_quantiles_of_its_normal_distribution() -> None:
    found = searched(stack=sure(profile(), mape_leave_one_sweep_out=0.1), pairs=4000)
    mfu = found.layouts[0].mfu
    sigma = 0.1 * np.sqrt(np.pi / 2)
    assert log(mfu.high / mfu.value) == pytest.approx(1.645 * sigma, rel=0.05)
    assert log(mfu.low / mfu.value) == pytest.approx(-1.645 * sigma, rel=0.05)


def test_draws_have_the_intervals_of_the_profile() -> None:
    draws = draw_stacks(profile(), 4000, seed=3)
    for name, constant in profile().constants.items():
        drawn = [getattr(stack, name) for stack in draws.stacks]
        spread = constant.high - constant.low
        for quantile, wanted in (
            (0.05, constant.low),
            (0.5, constant.value),
            (0.95, constant.high),
        ):
            assert np.quantile(drawn, quantile) == pytest.approx(wanted, abs=0.05 * spread)
    for name in profile().assumptions:
        assert len({getattr(stack, name) for stack in draws.stacks}) == 1
    assert float(np.abs(draws.residual).mean()) == pytest.approx(np.sqrt(2 / np.pi), rel=0.05)
    assert draws.residual.sum() == pytest.approx(0.0, abs=1e-9)


def test_no_draw_is_negative() -> None:
    wide = {
        name: c.model_copy(update={"low": 0.0, "high": 100.0 * c.value + 1.0})
        for name, c in fast_profile().constants.items()
    }
    draws = draw_stacks(fast_profile().model_copy(update={"constants": wide}), 100, seed=0)
    assert min(min(stack) for stack in draws.stacks) >= 0.0


def test_an_interval_holds_the_point_whatever_the_draws() -> None:
    slower = np.array([2.0, 2.0, 2.0])
    assert throughput_ratios(1.0, slower, np.zeros(3), 0.0) == (0.5, 1.0)
    assert throughput_ratios(1.0, 1.0 / slower, np.zeros(3), 0.0) == (1.0, 2.0)


def test_runs_unlike_the_fitted_ones_have_the_larger_error() -> None:
    like = moe(n_layers=16, d_model=2048, n_heads=16, head_dim=128, n_experts=32, first_k_dense=0)
    plan = Plan(ep=8, pp=2, dp=16, recompute=Recompute.FULL)
    batch = Batch(global_batch=64, seq_len=8192)
    errors = profile().errors
    inside = StepModel(like, plan, cluster(4), batch, profile())
    assert residual_error(inside) == ("mape_leave_one_out", errors.mape_leave_one_out)
    sweep = ("mape_leave_one_sweep_out", errors.mape_leave_one_sweep_out)
    for other in (
        StepModel(like, plan, cluster(4), batch.model_copy(update={"seq_len": 4096}), profile()),
        StepModel(like, plan, Cluster(hardware="h100", nodes=4), batch, profile()),
        StepModel(
            like,
            plan.model_copy(update={"recompute": Recompute.NONE}),
            cluster(4),
            batch,
            profile(),
        ),
    ):
        assert residual_error(other) == sweep


# ---------------------------------------------------------------- no answer


def test_nothing_fits_shows_the_leanest_and_the_shortfall() -> None:
    steps = brute(SIX_LAYERS, cluster(1), BATCH)
    least = min(s.memory_bytes for s in steps)
    found = searched(machines=capped(least - 1e9), top=4)
    assert (found.status, found.layouts, found.near_ties) == ("nothing_fits", (), 0)
    assert found.counts.fit == 0
    wanted = sorted((s.memory_bytes, s.step_time_s) for s in steps)[:4]
    assert close([(m, t) for t, m in costs(found.leanest)], wanted)
    assert found.leanest[0].shortfall_bytes == pytest.approx(1e9)
    assert not any(x.fits or x.near_tie for x in (*found.leanest, *found.pareto_front))
    assert "1.0 GB short" in found.reason
    assert searched().leanest == ()
    assert all(x.shortfall_bytes == 0.0 for x in searched().layouts)


@pytest.mark.parametrize(
    ("space", "said"),
    [
        (PlanSpace(pp=(4,)), "pp*vpp=4 must divide n_layers=6"),
        (PlanSpace(tp=(3,)), "no layout of the space tiles the cluster and the batch"),
    ],
)
def test_nothing_legal_names_the_rule(space: PlanSpace, said: str) -> None:
    found = searched(space=space)
    assert (found.status, found.layouts, found.leanest) == ("nothing_legal", (), ())
    assert found.pareto_front == ()
    assert found.counts.legal == found.counts.priced == 0
    assert said in found.reason


def test_layouts_beyond_the_measured_all_to_all_are_refused_unless_asked_for() -> None:
    wide = moe(n_layers=6, n_experts=64)
    space = SPACE.model_copy(update={"ep": (64,)})
    options: dict[str, Any] = {"architecture": wide, "machines": cluster(8), "space": space}
    refused = searched(**options)
    assert (refused.status, refused.layouts) == ("nothing_measured", ())
    assert refused.counts.refused == refused.counts.legal > 0
    assert "more than 32 ranks" in refused.reason
    flagged = searched(**options, extrapolation="flag")
    assert flagged.status == "found"
    assert flagged.counts.refused == 0
    assert {x.plan.ep for x in flagged.layouts} == {64}


@pytest.mark.parametrize("options", [{"top": 0}, {"pairs": 0}, {"workers": 0}, {"top": 10_001}])
def test_bad_numbers_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(PerfmodelError, match="must be from 1 to 10000"):
        searched(**options)


# ---------------------------------------------------------------- where it searches


def test_default_space_follows_the_nodes_and_the_sequences() -> None:
    short = layout_space(cluster(2), BATCH)
    assert (short.max_tp, short.max_cp) == (8, 1)
    assert short.layouts == ("equal", "balanced")
    assert short.vpp == (1, 2, 4, 8)
    long = layout_space(cluster(2), Batch(global_batch=32, seq_len=16384))
    assert long.max_cp == 4
    assert layout_space(cluster(2), Batch(global_batch=32, seq_len=2**20)).max_cp == 8


def test_what_is_given_takes_the_place_of_a_default() -> None:
    space = layout_space(cluster(2), BATCH, cp=(1, 2), max_tp=2, vpp=(1,))
    assert (space.cp, space.max_cp, space.max_tp, space.vpp) == ((1, 2), None, 2, (1,))


def test_default_space_is_searched_unless_another_is_given() -> None:
    found = searched(space=None)
    assert found.space == layout_space(cluster(1), BATCH)
    assert found == searched(space=layout_space(cluster(1), BATCH))


def test_a_model_with_a_prime_number_of_layers_gets_balanced_stages() -> None:
    found = searched(
        architecture=moe(n_layers=7), space=PlanSpace(pp=(2, 4), layouts=("equal", "balanced"))
    )
    assert {x.plan.layout for x in found.layouts} == {"balanced"}
