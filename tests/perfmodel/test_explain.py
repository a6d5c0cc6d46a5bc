"""The explanation of a step: parts that add up, and neighbours that are what they say."""

from __future__ import annotations

from math import fsum

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.architecture import MfuConvention
from perfmodel.calibration.stacks import StackProfile
from perfmodel.cluster import Batch
from perfmodel.errors import IllegalPlanError
from perfmodel.explanation import Change, Explanation, explain
from perfmodel.plan import Plan, Recompute
from perfmodel.sources import Source
from perfmodel.stages import StageLayout
from perfmodel.step import StepModel, check, estimate

from .strategies import Run, cluster, dense, fast_profile, moe, profile, profiles, runs

BATCH = Batch(global_batch=32, seq_len=2048)
MESH = ("tp", "pp", "ep", "etp", "cp")
WORK = ("peak", "kernels", "recompute", "tensor_parallel", "context_parallel")


def explained(run: Run, stack: StackProfile | None = None) -> Explanation:
    return explain(*run, stack=stack or profile())


def losses(explanation: Explanation) -> dict[str, float]:
    return {loss.name: loss.time_s for loss in explanation.waterfall}


def change(explanation: Explanation, degree: str, direction: str) -> Change:
    (found,) = (c for c in explanation.changes if (c.degree, c.direction) == (degree, direction))
    return found


def uneven(layout: str = "balanced", **degrees: int) -> Run:
    """Five layers on two stages."""
    plan = Plan(**({"pp": 2, "ep": 4, "dp": 4, "layout": layout} | degrees))
    return Run(moe(n_layers=5), plan, cluster(1), BATCH)


# ---------------------------------------------------------------- parts that add up


@given(runs(), profiles, st.sampled_from(MfuConvention))
def test_waterfall_and_terms_add_up_to_the_step(
    run: Run, stack: StackProfile, convention: MfuConvention
) -> None:
    found = explain(*run, stack=stack, mfu_convention=convention)
    step = found.step
    assert step == estimate(*run, stack=stack, mfu_convention=convention)
    assert fsum(losses(found).values()) == pytest.approx(step.step_time_s, rel=1e-12)
    assert fsum(loss.share for loss in found.waterfall) == pytest.approx(1.0, rel=1e-12)
    assert fsum(found.terms_s.values()) == pytest.approx(step.step_time_s, rel=1e-12)


@given(runs(), profiles)
def test_peak_and_device_time_are_what_they_say(run: Run, stack: StackProfile) -> None:
    found = explained(run, stack)
    architecture, plan, machines, batch = run
    flops = architecture.flops_per_token(found.step.mfu_convention, batch.seq_len) * batch.tokens
    peak = flops / (machines.n_devices * machines.peak_flops)
    assert found.peak_time_s == pytest.approx(peak, rel=1e-12)
    assert losses(found)["peak"] == found.peak_time_s
    model = run.under(stack)
    stages = [model.time_of(i) for i in range(plan.pp)]
    work = model.n_microbatches * fsum(s.device + s.head for s in stages) / plan.pp
    assert found.device_time_s == pytest.approx(work, rel=1e-9)
    assert fsum(losses(found)[name] for name in WORK) == pytest.approx(work, rel=1e-9)


@given(runs(), profiles)
def test_what_a_plan_does_not_have_costs_nothing(run: Run, stack: StackProfile) -> None:
    plan, lost = run.plan, losses(explained(run, stack))
    if plan.pp == 1:
        assert lost["pipeline_depth"] == lost["hand_off"] == 0.0
        assert lost["bubble"] == pytest.approx(0.0, abs=1e-9 * sum(lost.values()))
        assert lost["imbalance"] == pytest.approx(0.0, abs=1e-9 * sum(lost.values()))
    if plan.recompute is Recompute.NONE:
        assert lost["recompute"] == 0.0
    if plan.tp == plan.etp == 1:
        assert lost["tensor_parallel"] == 0.0
    if plan.cp == 1:
        assert lost["context_parallel"] == 0.0
    if plan.ep == plan.etp == 1:
        assert lost["all_to_all"] == 0.0
    assert lost["host_dispatch"] >= 0.0
    assert lost["jitter"] >= 0.0


@given(runs())
def test_recompute_is_what_the_device_does_again(run: Run) -> None:
    again = run._replace(plan=run.plan.model_copy(update={"recompute": Recompute.FULL}))
    once = run._replace(plan=run.plan.model_copy(update={"recompute": Recompute.NONE}))
    more, less = explained(again), explained(once)
    exchanges = sum(
        losses(more)[name] - losses(less)[name] for name in ("tensor_parallel", "context_parallel")
    )
    difference = more.device_time_s - less.device_time_s
    assert losses(more)["recompute"] + exchanges == pytest.approx(difference, rel=1e-9)
    assert losses(more)["kernels"] == pytest.approx(losses(less)["kernels"], rel=1e-9)


@given(runs())
def test_the_slower_of_host_and_device_sets_the_pace(run: Run) -> None:
    slow, fast = explained(run), explained(run, fast_profile())
    for found, stack in ((slow, profile()), (fast, fast_profile())):
        pace = run.under(stack).time_of(found.pace_stage)
        host_first = pace.host + pace.jitter > pace.device + pace.head
        assert found.pace == ("host" if host_first else "device")
        assert ("host_dispatch" in found.terms_s) == host_first
        assert ("device" in found.terms_s) != host_first
    assert losses(fast)["jitter"] == 0.0
    assert losses(fast)["host_dispatch"] <= losses(slow)["host_dispatch"]


def test_binding_names_the_largest_term_or_memory() -> None:
    run = Run(moe(), Plan(dp=8, recompute=Recompute.FULL), cluster(1), BATCH)
    fits = explained(run)
    assert fits.step.fits
    assert fits.binding == max(fits.terms_s, key=lambda name: fits.terms_s[name])
    assert fits.binding == "host_dispatch"
    cap = fits.step.memory_bytes - 1.0
    short = explained(run._replace(cluster=cluster(1).model_copy(update={"memory_bytes": cap})))
    assert not short.step.fits
    assert short.binding == "memory"
    assert short.terms_s == fits.terms_s


def test_every_loss_says_what_it_rests_on() -> None:
    found = explained(uneven())
    sources = {loss.name: loss.source for loss in found.waterfall}
    assert sources["peak"] is Source.DATASHEET
    assert sources["all_to_all"] is found.step.sources["all_to_all"]
    assert sources["data_parallel"] is found.step.sources["data_parallel"]
    assert sources["host_dispatch"] is found.step.sources["dispatch"]
    assert sources["kernels"] is Source.ASSUMED  # some of the operators are


# ---------------------------------------------------------------- neighbours


def rederived(run: Run, degree: str, value: object) -> Plan | None:
    """Return the plan with another value, or None where no dp fills the devices."""
    plan = run.plan.model_copy(update={degree: value})
    replica = plan.tp * plan.cp * plan.pp
    if run.cluster.n_devices % replica:
        return None
    return plan.model_copy(update={"dp": run.cluster.n_devices // replica})


def legal(run: Run, degree: str, value: object) -> bool:
    plan = rederived(run, degree, value)
    return plan is not None and not check(run.architecture, plan, run.cluster, run.batch)


def assert_priced(run: Run, change: Change, found: Explanation) -> None:
    assert change.plan is not None
    direct = estimate(run.architecture, change.plan, run.cluster, run.batch, stack=profile())
    assert change.step_time_s == direct.step_time_s
    assert change.step_time_change_s == direct.step_time_s - found.step.step_time_s
    assert change.memory_bytes == direct.memory_bytes
    assert change.memory_change_bytes == direct.memory_bytes - found.step.memory_bytes
    assert change.fits == direct.fits
    assert (change.rule, change.reason) == ("", "")


@settings(max_examples=20)
@given(runs())
def test_neighbours_are_the_nearest_legal_values_and_priced_by_estimate(run: Run) -> None:
    found, world = explained(run), run.cluster.n_devices
    widest = {
        **dict.fromkeys(MESH, 2 * world),
        "vpp": run.architecture.n_layers + 2,
        "micro_batch": run.batch.global_batch,
    }
    for degree, most in widest.items():
        current = getattr(run.plan, degree)
        for direction, values in (
            ("smaller", range(current - 1, 0, -1)),
            ("larger", range(current + 1, most + 1)),
        ):
            nearest = next((v for v in values if legal(run, degree, v)), None)
            one = change(found, degree, direction)
            assert one.value == nearest, (degree, direction)
            if nearest is None:
                assert one.plan is one.step_time_s is one.fits is None
                assert one.reason.endswith(".")
                assert bool(one.rule) == bool(values)
                continue
            assert one.plan == rederived(run, degree, nearest)
            assert_priced(run, one, found)


@settings(max_examples=20)
@given(runs())
def test_recompute_has_a_neighbour_on_each_side(run: Run) -> None:
    found, modes = explained(run), list(Recompute)
    at = modes.index(run.plan.recompute)
    for direction, index in (("smaller", at - 1), ("larger", at + 1)):
        one = change(found, "recompute", direction)
        if not 0 <= index < len(modes):
            assert (one.plan, one.rule) == (None, "")
            continue
        assert one.value == modes[index].value
        assert one.plan == run.plan.model_copy(update={"recompute": modes[index]})
        assert_priced(run, one, found)


def test_why_nothing_is_legal_names_the_rule() -> None:
    found = explained(Run(dense(n_layers=3), Plan(dp=8), cluster(1), BATCH))
    assert change(found, "ep", "larger").rule == "dense_model"
    assert change(found, "pp", "larger").rule == "equal_stages"
    assert "layout=balanced" in change(found, "pp", "larger").reason
    assert change(found, "vpp", "larger").rule in ("equal_stages", "interleaving_needs_pipeline")
    assert change(found, "tp", "smaller").reason == "tp=1 has no smaller value."
    whole = explained(Run(dense(), Plan(tp=8, dp=1), cluster(1), BATCH))
    assert change(whole, "tp", "larger").rule == "world_size"


def test_only_a_plan_with_a_layout_is_offered_others() -> None:
    equal = explained(Run(moe(), Plan(pp=2, ep=4, dp=4), cluster(1), BATCH))
    assert not [c for c in equal.changes if c.degree == "layout"]
    balanced = explained(uneven())
    assert change(balanced, "layout", "equal").rule == "equal_stages"
    assert "balanced" not in [c.direction for c in balanced.changes]
    run = uneven("4/1", ep=1)
    given = explained(run)
    for direction in ("balanced", "moved"):
        assert_priced(run, change(given, "layout", direction), given)
    assert change(given, "layout", "balanced").value == "balanced"
    assert change(given, "pp", "larger").rule == "layout_stages"


def test_an_equal_layout_is_offered_where_it_is_legal() -> None:
    run = uneven("3/1")._replace(architecture=moe())
    found = explained(run)
    assert change(found, "layout", "equal").value == "equal"
    assert_priced(run, change(found, "layout", "equal"), found)


def test_a_layer_moves_from_the_slowest_device_to_the_fastest() -> None:
    run = uneven("1/3/1", pp=3, dp=8)._replace(cluster=cluster(3))
    model = StepModel(*run, profile())
    times = [model.time_of(i).time for i in range(3)]
    assert times.index(max(times)) == 1
    moved = change(explained(run), "layout", "moved")
    counts = StageLayout.parse(str(moved.value), 3).counts
    to = times.index(min(times))
    assert counts == tuple(n + (i == to) - (i == 1) for i, n in enumerate((1, 3, 1)))


def test_no_layer_moves_where_there_is_one_stage() -> None:
    moved = change(explained(uneven("5", pp=1, dp=8)), "layout", "moved")
    assert (moved.plan, moved.rule) == (None, "")
    assert moved.reason.startswith("No layer can be moved")


@given(runs())
def test_best_change_is_the_fastest_that_fits(run: Run) -> None:
    found = explained(run)
    times = [c.step_time_s for c in found.changes if c.fits and c.step_time_s is not None]
    faster = [t for t in times if t < found.step.step_time_s]
    if not found.step.fits:
        faster = times
    if not faster:
        assert found.best_change is None
        return
    assert found.best_change in found.changes
    assert found.best_change is not None
    assert found.best_change.step_time_s == min(faster)


def test_a_plan_that_does_not_fit_is_shown_the_fastest_that_does() -> None:
    run = Run(moe(), Plan(dp=8, micro_batch=4), cluster(1), BATCH)
    cap = explained(run).step.memory_bytes - 1.0
    found = explained(run._replace(cluster=cluster(1).model_copy(update={"memory_bytes": cap})))
    assert found.best_change is not None
    assert found.best_change.fits
    assert (found.best_change.memory_bytes or cap) <= cap


# ---------------------------------------------------------------- edges


def test_an_illegal_plan_is_refused_with_every_rule() -> None:
    run = Run(moe(), Plan(tp=16, dp=1), cluster(1), BATCH)
    with pytest.raises(IllegalPlanError) as caught:
        explained(run)
    assert caught.value.violations == check(*run)


@pytest.mark.parametrize("run", [uneven(), uneven("4/1")], ids=["balanced", "explicit"])
def test_document_reads_back(run: Run) -> None:
    found = explained(run)
    assert found == explained(run)
    assert Explanation.model_validate_json(found.model_dump_json()) == found
