"""Stage layouts against brute force, the scalar model and the balanced layout."""

from __future__ import annotations

import os
import signal
from itertools import product
from math import inf
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mosaic_opt.backends.base import Limits
from mosaic_opt.backends.cpsat.running import Ran
from mosaic_opt.errors import MosaicError
from mosaic_opt.stage_search import StageProgress, StageSearch, search_stages
from mosaic_opt.stage_tables import pool_runs
from perfmodel.architecture import Architecture
from perfmodel.calibration.stacks import load_stack
from perfmodel.cluster import Batch, Cluster
from perfmodel.errors import IllegalPlanError
from perfmodel.ladders import ladder
from perfmodel.memory import stage_total
from perfmodel.models import catalogue
from perfmodel.plan import Plan, Recompute
from perfmodel.rules import violations
from perfmodel.stages import Stage, StageLayout, balanced_counts, counts_of
from perfmodel.step import StepModel, check

RANDOM = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
STACK = load_stack("megatron-eager")
BATCH = Batch(global_batch=32, seq_len=1024)


def model(
    n_layers: int, first_k_dense: int = 0, mtp_layers: int = 0, every: int = 1
) -> Architecture:
    fields = ladder(1, 8, 2, 1).model_dump()
    fields |= {
        "n_layers": n_layers,
        "first_k_dense": first_k_dense,
        "mtp_layers": mtp_layers,
        "moe_every": every,
        "d_ff": 4096,
    }
    return Architecture.model_validate(fields)


def every_layout(a: Architecture, plan: Plan, max_chunk: int | None = None) -> list[StageLayout]:
    """List the layouts without an empty stage that the rules of a plan accept."""
    stages = plan.pp * plan.vpp
    found = []
    for counts in product(range(a.n_layers + 1), repeat=stages):
        if sum(counts) != a.n_layers:
            continue
        for place in range(stages) if a.mtp_layers else (None,):
            held = [
                Stage(int(s == 0), n, a.mtp_layers * (s == place), int(s == stages - 1))
                for s, n in enumerate(counts)
            ]
            layout = StageLayout(plan.pp, tuple(held))
            proposed = plan.model_copy(update={"layout": str(layout)})
            legal = not violations(
                a.rule_variables(),
                proposed,
                plan.tp * plan.cp * plan.dp * plan.pp,
                BATCH.seq_len,
                BATCH.global_batch,
            )
            largest = max(stage.layers + stage.mtp for stage in held)
            small = max_chunk is None or plan.pp == 1 or largest <= max_chunk
            if legal and small and all(any(stage) for stage in held):
                found.append(layout)
    return found


def one_node(plan: Plan) -> Cluster:
    """Return a cluster of exactly the plan's devices."""
    devices = plan.tp * plan.cp * plan.dp * plan.pp
    return Cluster.parse(f"p6-b200:{devices}gpus")


def slowest_of(
    a: Architecture,
    plan: Plan,
    layout: StageLayout,
    run: tuple[int, ...],
    clusters: list[Cluster],
    caps: list[float],
    modes: list[Recompute],
) -> float:
    """Price a layout with the scalar model, every stage under its best mode that fits [s]."""
    slowest = 0.0
    for r in range(plan.pp):
        best = inf
        for mode in modes:
            proposed = plan.model_copy(update={"layout": str(layout), "recompute": mode})
            step = StepModel(a, proposed, clusters[run[r]], BATCH, STACK)
            if float(stage_total(step.stage(r))) <= caps[run[r]]:
                best = min(best, step.time_of(r).time)
        slowest = max(slowest, best)
    return slowest


def brute_force(
    a: Architecture,
    plan: Plan,
    clusters: list[Cluster],
    fraction: float,
    modes: list[Recompute],
    max_chunk: int | None = None,
) -> float:
    caps = [fraction * cluster.device_memory_bytes for cluster in clusters]
    devices = plan.tp * plan.cp * plan.dp
    room = [cluster.n_devices // devices for cluster in clusters]
    return min(
        (
            slowest_of(a, plan, layout, run, clusters, caps, modes)
            for layout in every_layout(a, plan, max_chunk)
            for run in all_runs(room, plan.pp)
        ),
        default=inf,
    )


def all_runs(room: list[int], pp: int) -> list[tuple[int, ...]]:
    """Every assignment with each pool's stages side by side, and no more than it has room for."""
    found = []
    for run in product(range(len(room)), repeat=pp):
        blocks = [q for i, q in enumerate(run) if i == 0 or run[i - 1] != q]
        if len(blocks) == len(set(blocks)) and all(run.count(q) <= n for q, n in enumerate(room)):
            found.append(run)
    return found


@given(room=st.lists(st.integers(0, 4), min_size=1, max_size=3), pp=st.integers(1, 5))
def test_pool_runs_are_all_contiguous_assignments(room: list[int], pp: int) -> None:
    assert set(pool_runs(room, pp)) == set(all_runs(room, pp))


# ---------------------------------------------------------------- against brute force


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    pp, vpp = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (2, 2)]))
    n_layers = draw(st.integers(max(1, pp * vpp - 2), 7))
    every = draw(st.sampled_from([1, 1, 2]))
    a = model(
        n_layers,
        first_k_dense=draw(st.integers(0, min(2, n_layers))) if every == 1 else 0,
        mtp_layers=draw(st.sampled_from([0, 1, 2])),
        every=every,
    )
    dp = draw(st.sampled_from([1, 2]))
    plan = Plan(pp=pp, vpp=vpp, dp=dp, ep=draw(st.sampled_from([1, dp])))
    modes = draw(st.lists(st.sampled_from(list(Recompute)), min_size=1, max_size=3, unique=True))
    return {
        "a": a,
        "plan": plan,
        "modes": modes,
        "max_chunk": draw(st.sampled_from([None, None, 2, 3])),
        "fraction": 10.0 ** draw(st.floats(-2.2, 0.0)),
    }


def assert_is(found: StageSearch, truth: float) -> None:
    if truth == inf:
        assert found.status == "infeasible"
        assert found.slowest_s is None
        assert found.bound_s is None
        assert found.layout is None
        return
    assert found.status == "optimal"
    assert found.slowest_s is not None
    assert found.bound_s is not None
    assert truth * (1 - 1e-12) <= found.slowest_s <= truth * (1 + 1e-12) + found.rounding_s
    assert found.bound_s <= truth
    assert found.slowest_s - found.bound_s <= found.rounding_s
    assert found.rounding_s <= 1e-9 * found.slowest_s


@RANDOM
@given(case=cases())
def test_one_pool_equals_brute_force(case: dict[str, Any]) -> None:
    a, plan, modes, chunk = case["a"], case["plan"], case["modes"], case["max_chunk"]
    cluster = one_node(plan)
    found = search_stages(
        a,
        plan,
        cluster,
        BATCH,
        recompute=modes,
        memory_fraction=case["fraction"],
        max_chunk=chunk,
    )
    assert_is(found, brute_force(a, plan, [cluster], case["fraction"], modes, chunk))
    if found.balanced_slowest_s is not None and chunk is None:
        assert found.slowest_s is not None
        assert found.slowest_s <= found.balanced_slowest_s


@RANDOM
@given(case=cases(), nodes=st.tuples(st.integers(1, 3), st.integers(1, 3)))
def test_two_pools_equal_brute_force(case: dict[str, Any], nodes: tuple[int, int]) -> None:
    a, plan, modes = case["a"], case["plan"].model_copy(update={"dp": 8, "ep": 1}), case["modes"]
    clusters = [
        Cluster(hardware=name, nodes=n) for name, n in zip(("h100", "b200"), nodes, strict=True)
    ]
    if sum(nodes) < plan.pp:
        with pytest.raises(MosaicError, match="the pools have room for"):
            search_stages(a, plan, clusters, BATCH)
        return
    found = search_stages(
        a, plan, clusters, BATCH, recompute=modes, memory_fraction=case["fraction"]
    )
    assert_is(found, brute_force(a, plan, clusters, case["fraction"], modes))
    assert found.plan is None
    if found.stages:
        assert sum(use.stages for use in found.pools) == plan.pp


def assert_is_a_stream(found: StageSearch, seen: list[StageProgress]) -> None:
    """Layouts get faster, the bound rises and stays below the answer, and the end closes it."""
    slowest = [state.slowest_s for state in seen]
    known = [s for s in slowest if s is not None]
    assert slowest == [None] * (len(slowest) - len(known)) + sorted(known, reverse=True)
    bounds = [state.bound_s for state in seen]
    assert bounds == sorted(bounds)
    if found.status == "optimal":
        assert found.bound_s is not None
        assert all(bound <= found.bound_s for bound in bounds)
        assert seen[-1].bound_s == found.bound_s
        assert seen[-1].slowest_s is not None
        assert 0.0 <= seen[-1].slowest_s - found.bound_s <= found.rounding_s


@RANDOM
@given(case=cases())
def test_layouts_and_bounds_are_streamed(case: dict[str, Any]) -> None:
    seen: list[StageProgress] = []
    found = search_stages(
        case["a"],
        case["plan"],
        one_node(case["plan"]),
        BATCH,
        recompute=case["modes"],
        memory_fraction=case["fraction"],
        max_chunk=case["max_chunk"],
        progress=seen.append,
    )
    assert_is_a_stream(found, seen)


@RANDOM
@given(case=cases(), at=st.integers(1, 4))
def test_an_interrupt_keeps_what_was_told(case: dict[str, Any], at: int) -> None:
    a, plan, modes, chunk = case["a"], case["plan"], case["modes"], case["max_chunk"]
    seen: list[StageProgress] = []

    def interrupt(state: StageProgress) -> None:
        seen.append(state)
        if len(seen) == at:
            raise KeyboardInterrupt

    cluster = one_node(plan)
    asked = {"recompute": modes, "memory_fraction": case["fraction"], "max_chunk": chunk}
    found = search_stages(a, plan, cluster, BATCH, **asked, progress=interrupt)
    if not seen:
        return
    truth = search_stages(a, plan, cluster, BATCH, **asked)
    assert (found.termination == "exhausted") == (found.status in ("optimal", "infeasible"))
    assert found.termination in ("exhausted", "interrupted")
    if found.status == "infeasible":
        assert truth.status == "infeasible"
        return
    assert found.bound_s is not None
    assert found.bound_s >= seen[-1].bound_s
    if seen[-1].slowest_s is None:
        return
    assert found.slowest_s is not None
    assert truth.slowest_s is not None
    assert found.slowest_s <= seen[-1].slowest_s + found.rounding_s
    assert found.bound_s <= truth.slowest_s <= found.slowest_s + found.rounding_s


@RANDOM
@given(case=cases())
def test_the_layout_is_one_that_a_plan_accepts(case: dict[str, Any]) -> None:
    """Megatron's string, read back as a plan, has the same times and bytes in the scalar model."""
    a, plan = case["a"], case["plan"]
    cluster = one_node(plan)
    found = search_stages(a, plan, cluster, BATCH, recompute=[Recompute.FULL])
    assert found.plan is not None
    assert found.layout == found.plan.layout
    assert counts_of(found.layout or "") is None
    assert check(a, found.plan, cluster, BATCH) == ()
    step = StepModel(a, found.plan, cluster, BATCH, STACK)
    for placed in found.stages:
        assert placed.time_s == pytest.approx(step.time_of(placed.stage).time, rel=1e-12)
        assert placed.memory_bytes == pytest.approx(
            float(stage_total(step.stage(placed.stage))), rel=1e-12
        )
        assert placed.memory_bytes <= placed.memory_cap_bytes
    assert found.step_time_s == pytest.approx(step.step_s, rel=1e-12)


# ---------------------------------------------------------------- laws


def test_more_memory_and_more_modes_are_never_slower() -> None:
    a, plan = model(7, first_k_dense=1, mtp_layers=1), Plan(pp=2, vpp=2, dp=2)
    slowest = []
    for fraction, modes in (
        (0.02, [Recompute.FULL]),
        (0.02, list(Recompute)),
        (1.0, list(Recompute)),
    ):
        found = search_stages(
            a, plan, one_node(plan), BATCH, memory_fraction=fraction, recompute=modes
        )
        slowest.append(found.slowest_s or inf)
    assert slowest == sorted(slowest, reverse=True)


def test_a_step_is_never_longer_than_the_balanced_one_of_the_same_slowest_stage() -> None:
    """The slowest stage alone would allow chunks that wait for each other."""
    plan = Plan(pp=2, vpp=2, dp=2)
    equal = 0
    for n_layers in range(4, 12):
        a = model(n_layers, first_k_dense=n_layers % 3, mtp_layers=1)
        found = search_stages(a, plan, one_node(plan), BATCH, recompute=[Recompute.FULL])
        assert found.step_time_s is not None
        assert found.balanced_step_time_s is not None
        if found.slowest_s == found.balanced_slowest_s:
            equal += 1
            assert found.step_time_s <= found.balanced_step_time_s
    assert equal


@RANDOM
@given(case=cases(), mode=st.sampled_from(list(Recompute)))
def test_what_is_recommended_is_never_slower_than_either(
    case: dict[str, Any], mode: Recompute
) -> None:
    """The steps are those of the scalar model, which knows nothing of the search."""
    a, plan, cluster = case["a"], case["plan"], one_node(case["plan"])
    found = search_stages(a, plan, cluster, BATCH, recompute=[mode], max_chunk=case["max_chunk"])
    if found.recommended is None:
        assert found.layout is None
        return
    assert found.recommended_plan is not None
    assert check(a, found.recommended_plan, cluster, BATCH) == ()
    taken_s = StepModel(a, found.recommended_plan, cluster, BATCH, STACK).step_s
    assert found.plan is not None
    searched_s = StepModel(a, found.plan, cluster, BATCH, STACK).step_s
    balanced_s = inf
    if a.n_layers >= plan.pp * plan.vpp:
        counts = balanced_counts(a.n_layers, plan.pp * plan.vpp)
        last = len(counts) - 1
        held = (
            Stage(int(s == 0), n, a.mtp_layers * (s == last), int(s == last))
            for s, n in enumerate(counts)
        )
        update = {"layout": str(StageLayout(plan.pp, tuple(held))), "recompute": mode}
        even = plan.model_copy(update=update)
        assert found.balanced_plan == even
        balanced_s = StepModel(a, even, cluster, BATCH, STACK).step_s
        assert found.balanced_step_time_s == pytest.approx(balanced_s, rel=1e-12)
    else:
        assert found.balanced_layout is found.balanced_plan is None
        assert found.recommended == "search"
    assert taken_s <= min(searched_s, balanced_s) * (1.0 + 1e-12)


def test_either_layout_may_be_recommended() -> None:
    """With chunks, the layout of the fastest slowest stage can have the longer step."""
    plan, taken = Plan(pp=2, vpp=2, dp=2), []
    for n_layers in (8, 13):
        a = model(n_layers, mtp_layers=1)
        found = search_stages(a, plan, one_node(plan), BATCH, recompute=[Recompute.FULL])
        taken.append(found.recommended)
        assert found.status == "optimal"
        chosen = {"search": found.stages, "balanced": found.balanced_stages}
        assert found.recommended is not None
        assert found.recommended_stages == chosen[found.recommended]
    assert taken == ["search", "balanced"]


def test_a_heavy_head_makes_its_stage_lighter() -> None:
    """A head as heavy as several layers: the last stage gets fewer of them than the others."""
    a = model(12).model_copy(update={"vocab_size": 500_000})
    plan = Plan(pp=4, dp=2, micro_batch=4)  # long enough that no host is waited for
    batch = Batch(global_batch=32, seq_len=8192)
    found = search_stages(a, plan, one_node(plan), batch, recompute=[Recompute.NONE])
    counts = [sum(placed.layers) for placed in found.stages]
    assert counts[-1] < max(counts[:-1])
    assert found.balanced_slowest_s is not None
    assert found.slowest_s is not None
    assert found.slowest_s < found.balanced_slowest_s


@pytest.mark.slow
def test_deepseek_v3_over_32_virtual_stages_is_proved() -> None:
    a, cluster = catalogue["DeepSeek-V3"], Cluster.parse("gb200:256gpus")
    plan = Plan.parse("ep=16,pp=16,vpp=2", world=256)
    seen: list[StageProgress] = []
    found = search_stages(
        a, plan, cluster, Batch(global_batch=2048, seq_len=4096), progress=seen.append
    )
    assert found.status == "optimal"
    assert found.slowest_s is not None
    assert found.balanced_slowest_s is not None
    assert found.slowest_s < found.balanced_slowest_s
    assert sum(placed.dense for placed in found.stages) == 3
    assert sum(placed.moe for placed in found.stages) == 58
    assert sum(placed.mtp for placed in found.stages) == 1
    assert_is_a_stream(found, seen)
    assert found.recommended == "balanced"  # uneven chunks wait for each other
    assert found.step_time_s is not None
    assert found.balanced_step_time_s is not None
    assert found.balanced_step_time_s < found.step_time_s
    assert found.recommended_layout == found.balanced_layout == "Et|(tt|)*29t|tmL"


# ---------------------------------------------------------------- limits, bad input


def test_a_time_limit_keeps_the_balanced_layout() -> None:
    a, plan = model(8), Plan(pp=4, dp=2)
    found = search_stages(a, plan, one_node(plan), BATCH, limits=Limits(time_s=1e-9))
    assert found.status == "feasible"
    assert found.termination == "time_limit"
    assert found.slowest_s == found.balanced_slowest_s
    assert found.bound_s == 0.0


@pytest.mark.parametrize("time_s", [1e-9, 1e-6, 1e-3, 3e-3, 0.01, 0.02, 0.04, 0.08, 0.2, 0.5])
def test_no_limit_ends_as_an_interrupt(time_s: float) -> None:
    a, plan = model(24, first_k_dense=3, mtp_layers=1), Plan(pp=4, vpp=2, dp=2)
    found = search_stages(a, plan, one_node(plan), BATCH, limits=Limits(time_s=time_s))
    proved = found.status == "optimal"
    assert found.termination == ("exhausted" if proved else "time_limit")


@pytest.mark.parametrize(
    ("limits", "interrupted", "said"),
    [
        (Limits(time_s=1e6), False, "time_limit"),  # CP-SAT's clock is not ours
        (Limits(time_s=1e6), True, "interrupted"),
        (None, True, "interrupted"),
    ],
)
def test_why_it_stopped_is_what_happened_whatever_the_clock_says(
    monkeypatch: pytest.MonkeyPatch, limits: Limits | None, interrupted: bool, said: str
) -> None:
    stopped = Ran(None, None, 0, proved=False, interrupted=interrupted)
    monkeypatch.setattr("mosaic_opt.backends.cpsat.stages.run", lambda *_, **__: stopped)
    a, plan = model(8), Plan(pp=4, dp=2)
    found = search_stages(a, plan, one_node(plan), BATCH, limits=limits)
    assert found.termination == said
    assert found.status == "feasible"
    assert found.slowest_s == found.balanced_slowest_s


@pytest.mark.parametrize("pressed", [False, True])
def test_an_interrupt_keeps_a_layout_faster_than_the_balanced_one(pressed: bool) -> None:
    """DeepSeek-V3 over 32 virtual stages, stopped at its third layout."""
    seen: list[StageProgress] = []

    def interrupt(state: StageProgress) -> None:
        seen.append(state)
        faster = {s.slowest_s for s in seen if s.slowest_s is not None}
        if len(faster) == 3 and state.slowest_s != seen[-2].slowest_s:
            if not pressed:
                raise KeyboardInterrupt
            os.kill(os.getpid(), signal.SIGINT)

    a, cluster = catalogue["DeepSeek-V3"], Cluster.parse("gb200:256gpus")
    plan = Plan.parse("ep=16,pp=16,vpp=2", world=256)
    batch = Batch(global_batch=2048, seq_len=4096)
    found = search_stages(a, plan, cluster, batch, limits=Limits(time_s=3600.0), progress=interrupt)
    assert found.slowest_s is not None
    assert found.bound_s is not None
    assert found.balanced_slowest_s is not None
    told = [s.slowest_s for s in seen if s.slowest_s is not None]
    assert told[-1] < 0.99 * found.balanced_slowest_s
    assert found.slowest_s <= told[-1] + found.rounding_s
    assert 0.0 < seen[-1].bound_s <= found.bound_s <= found.slowest_s
    if not pressed:  # the search may have been done before the signal came
        assert found.status == "feasible"
        assert found.termination == "interrupted"


def test_an_interrupt_keeps_the_best_layout() -> None:
    def interrupt(state: StageProgress) -> None:
        raise KeyboardInterrupt

    a, plan = model(8), Plan(pp=4, dp=2)
    found = search_stages(a, plan, one_node(plan), BATCH, progress=interrupt)
    assert found.termination == "interrupted"
    assert found.status == "feasible"
    assert found.slowest_s is not None
    assert found.balanced_slowest_s is not None
    assert found.slowest_s <= found.balanced_slowest_s


def test_a_plan_that_breaks_a_rule_is_refused() -> None:
    plan = Plan(pp=2, dp=2, ep=3)
    with pytest.raises(IllegalPlanError, match="ep"):
        search_stages(model(4), plan, one_node(plan), BATCH)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"recompute": []}, "recompute is empty"),
        ({"max_chunk": 0}, "max_chunk=0 must be at least 1"),
        ({"memory_fraction": 0.0}, "memory_fraction=0 must be above 0"),
        ({"plan": Plan(pp=8, dp=1)}, "need at least 6 layers, one on each between"),
        ({"plan": Plan(pp=2, dp=4), "pools": []}, "0 pools are given"),
        (
            {"plan": Plan.parse("pp=2,dp=4,recompute=selective,recompute_modules=mlp")},
            "recompute_modules=mlp is not searched",
        ),
    ],
)
def test_requests_that_make_no_sense(changes: dict[str, Any], said: str) -> None:
    asked: dict[str, Any] = {"plan": Plan(pp=2, dp=4), "pools": Cluster.parse("p6-b200:1")}
    asked |= changes
    with pytest.raises(MosaicError, match=said):
        search_stages(model(3), batch=BATCH, **asked)
