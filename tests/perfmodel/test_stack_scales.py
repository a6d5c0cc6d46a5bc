"""Scales of a stack: what each stretches, bounds beside them, and their fit to runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from perfmodel.architecture import Architecture
from perfmodel.calibration.fit_stack import fit_constants, fit_profile, prepare, responds
from perfmodel.calibration.stacks import StackProfile, load_stack
from perfmodel.cluster import Batch, Cluster, Optimizer
from perfmodel.errors import PerfmodelError
from perfmodel.plan import Plan, Recompute
from perfmodel.sources import Source
from perfmodel.step import StepModel, legal_model
from perfmodel.validation.runs import MeasuredRun, layout_sweeps

SCALES = ("elementwise_scale", "router_scale", "optimizer_scale")
PARTS = {
    "elementwise_scale": {"compute_elementwise", "compute_permutation", "compute_activation"},
    "router_scale": {"compute_router"},
    "optimizer_scale": {"optimizer"},
}
CLUSTER = Cluster(hardware="p6-b200", nodes=1)
SHAPE = Architecture(
    n_layers=4,
    d_model=2048,
    n_heads=16,
    n_kv_heads=4,
    head_dim=128,
    d_ff=8192,
    vocab_size=32000,
    n_experts=32,
    top_k=4,
    d_expert=1024,
    d_shared=1024,
    first_k_dense=1,
)


def changed(**values: float) -> StackProfile:
    """Return the default profile with other assumptions, and a host that takes no time."""
    profile = load_stack("megatron-eager")
    idle = {
        k: c.model_copy(update={"value": 0.0, "low": 0.0}) for k, c in profile.constants.items()
    }
    assumed = {
        k: a.model_copy(update={"value": values.get(k, a.value)})
        for k, a in profile.assumptions.items()
    }
    return profile.model_copy(update={"constants": idle, "assumptions": assumed})


def model_under(profile: StackProfile, **options: object) -> StepModel:
    plan = Plan(ep=4, dp=8, micro_batch=1, recompute=Recompute.FULL)
    batch = Batch(global_batch=64, seq_len=4096, **options)  # type: ignore[arg-type]
    return legal_model(SHAPE, plan, CLUSTER, batch, profile)


@pytest.mark.parametrize("name", SCALES)
def test_a_scale_stretches_its_own_parts_and_no_other(name: str) -> None:
    plain, stretched = model_under(changed()), model_under(changed(**{name: 3.0}))
    before, after = plain.breakdown(), stretched.breakdown()
    for part, seconds in before.items():
        factor = 3.0 if part in PARTS[name] else 1.0
        assert after[part] == pytest.approx(factor * seconds, rel=1e-9), part
    assert sum(before[part] for part in PARTS[name]) > 0.0
    assert stretched.step_s == pytest.approx(sum(after.values()), rel=1e-9)


def test_every_shipped_profile_has_them_at_one() -> None:
    from perfmodel.calibration.stacks import shipped_stacks

    for name in shipped_stacks():
        stack = load_stack(name).stack()
        assert [getattr(stack, scale) for scale in SCALES] == [1.0, 1.0, 1.0], name


def fitted_scales(value: Source) -> StackProfile:
    """Return a profile whose scales rest on something else than an assumption."""
    profile = changed()
    assumed = {
        k: a.model_copy(update={"source": value}) if k in SCALES else a
        for k, a in profile.assumptions.items()
    }
    return profile.model_copy(update={"assumptions": assumed})


def test_what_was_fitted_is_said_to_be() -> None:
    assumed, fitted = model_under(changed()).sources(), model_under(fitted_scales(Source.FITTED))
    for part in ("compute_elementwise", "compute_permutation", "optimizer"):
        assert assumed[part] is Source.ASSUMED
        assert fitted.sources()[part] is Source.FITTED
    # five steps of an iteration on every matrix run at an efficiency that nobody measured
    muon = model_under(fitted_scales(Source.FITTED), optimizer=Optimizer.MUON)
    assert muon.sources()["optimizer"] is Source.ASSUMED


# ---------------------------------------------------------------- fit


def simulated(profile: StackProfile, dense: bool = False) -> list[MeasuredRun]:
    """Return the runs of the sweeps, some of other widths, with the MFU that a profile gives."""
    runs = []
    for at, run in enumerate(layout_sweeps()):
        a = run.architecture
        update = {"n_experts": 0, "top_k": 0, "d_expert": 0, "d_shared": 0} if dense else {}
        other = Architecture.model_validate(a.model_dump() | update)
        plan = run.plan if not dense else run.plan.model_copy(update={"ep": 1})
        batch = run.batch.model_copy(
            update={"optimizer": Optimizer.ADAMW, "seq_len": 1024 * (1 + at % 3)}
        )
        made = replace(run, architecture=other, plan=plan, batch=batch)
        model = StepModel(other, plan, run.cluster, batch, profile)
        flops = other.flops_per_token(run.mfu_convention, batch.seq_len) * batch.tokens
        peak = run.cluster.n_devices * run.cluster.peak_flops
        runs.append(replace(made, measured_mfu=flops / (model.step_s * peak)))
    return runs


def base_of(*names: str) -> StackProfile:
    """Return a profile whose constants are these."""
    profile = changed()
    unit = next(iter(profile.constants.values()))
    assumed = dict(profile.assumptions)
    constants = {}
    for name in names:
        assumed.pop(name, None)
        constants[name] = unit.model_copy(update={"value": 1.0, "low": 1.0, "high": 1.0})
    for name in profile.constants:
        if name not in names:
            assumed[name] = next(iter(profile.assumptions.values())).model_copy(
                update={"value": 0.0}
            )
    return profile.model_copy(update={"constants": constants, "assumptions": assumed})


def test_known_scales_are_found_again() -> None:
    truth = {"elementwise_scale": 2.5, "router_scale": 4.0, "optimizer_scale": 1.7}
    base = base_of(*SCALES)
    fitted = fit_profile(
        simulated(changed(**truth)), base, name="mine", provenance="simulated", resamples=2, seed=0
    )
    for name, value in truth.items():
        assert fitted.constants[name].value == pytest.approx(value, rel=1e-3), name
        assert fitted.constants[name].source is Source.FITTED
    assert fitted.errors.mape_leave_one_sweep_out < 1e-3


def test_a_scale_that_no_run_responds_to_stays_as_it_was() -> None:
    base = base_of(*SCALES)
    runs = prepare(simulated(changed(elementwise_scale=2.0), dense=True), base)
    found = fit_constants(runs, base.stack(), names=SCALES)
    assert responds(runs, base.stack(), found, SCALES).tolist() == [True, False, True]
    assert found[1] == 1.0
    assert found[[0, 2]] == pytest.approx([2.0, 1.0], rel=1e-3)


def test_a_constant_that_this_fit_does_not_know_is_refused() -> None:
    runs = prepare(layout_sweeps(), changed())
    with pytest.raises(PerfmodelError, match="The constant dp_hidden cannot be fitted to a table"):
        fit_constants(runs, changed().stack(), names=("dp_hidden", "host_layer_s"))
    assert np.isfinite(fit_constants(runs, changed().stack(), names=("host_layer_s",)))
