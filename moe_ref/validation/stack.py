"""The stack profile of the reference model on one machine, fitted to some of its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from moe_ref.microbench.machine import Facts
from moe_ref.validation.cases import StepCase
from moe_ref.validation.steps import StepTime
from perfmodel import MfuConvention
from perfmodel.calibration.fit_stack import fit_profile
from perfmodel.calibration.memory_profiles import load_memory_profile
from perfmodel.calibration.packs import HardwarePack
from perfmodel.calibration.stacks import (
    Assumption,
    Constant,
    StackErrors,
    StackProfile,
    Variant,
)
from perfmodel.sources import Source
from perfmodel.validation.runs import MeasuredRun

__all__ = ["BUSY", "RESAMPLES", "beside_busy", "fitted_stack", "measured_run", "unfitted_stack"]

BUSY = "busy"
"""Variant of the stack in which the other devices of the machine work too."""

RESAMPLES = 100
"""Of the bootstrap behind the intervals of constants."""

CONVENTION = MfuConvention.SIX_N_NONEMBEDDING

NO_OVERLAP = "no exchange overlaps with compute in moe_ref"

FITTED = {
    "host_layer_s": (0.0, "s", "A: host time of a sparse layer, forward, replay and backward"),
    "elementwise_scale": (1.0, "-", "norms, gated units and permutation, over the pack's surface"),
    "router_scale": (1.0, "-", "the router of arXiv 2608.10605 over one product and selection"),
    "optimizer_scale": (
        1.0,
        "-",
        "AdamW, an operation at a time, over 30 B a parameter",
    ),
}
"""What steps fit: where nothing is fitted, unit and meaning."""

ASSUMED = {
    "host_microbatch_s": (0.0, "not told apart from the host time of layers"),
    "jitter_s": (0.0, "no run has a pipeline"),
    "pipeline_node_cost": (0.0, "no run has a pipeline"),
    "device_scale": (1.0, "products and attention run as they were measured, on this machine"),
    "attention_scale": (1.0, "attention runs as the pack's surface says"),
    "step_host_s": (0.0, "not told apart from the optimizer's time"),
    "tp_exposed": (1.0, "no run has TP"),
    "dp_hidden": (0.0, NO_OVERLAP),
    "pp_hidden": (1.0, "no run has a pipeline"),
    "a2a_hidden": (0.0, NO_OVERLAP),
    "score_bytes": (0.0, "attention is fused: no score is written"),
    "copies_once": (0.0, "an all-to-all of all K copies of a token"),
    "launch_share": (1.5, "an expert has three products, of which the surface launches two"),
    "forward_share": (
        2.0 / 7.0,
        "forward : backward : replay = 1 : 1.5 : 1 of a layer's host time",
    ),
    "backward_share": (3.0 / 7.0, "see forward_share"),
    "dense_layer_share": (0.25, "a dense layer has no router and no grouped products"),
    "selective_replay": (0.05, "attention is one call of about twenty in a forward pass"),
    "super_selective_replay": (0.15, "norms, attention and the gated unit of a forward pass"),
    "gradient_bytes": (4.0, "gradients are reduced in fp32"),
    "optimizer_matmul_eff": (0.5, "of peak; no run has matrix iterations"),
}
"""What they do not, each with its note."""

MEMORY = "torchtitan"
"""Memory profile of eager PyTorch."""

PROCESS_BYTES = 5e8
"""A process with torch in it [B]. ASSUMED."""


def unfitted_stack(facts: Facts, pack: HardwarePack) -> StackProfile:
    """Return the profile before any step was timed: kernels alone, as the formulas count them."""
    memory = dict(load_memory_profile(MEMORY).constants)
    if facts.device == "cpu":
        memory["framework_bytes"] = _assumed(PROCESS_BYTES, "torch's libraries in one process")
    return StackProfile(
        schema_version=1,
        name=f"moe-ref-{facts.key}",
        description=f"moe_ref of mosaic-opt, eager torch {facts.torch_version}, {facts.name}",
        hardware=(pack.name,),
        provenance="nothing is fitted",
        constants={
            name: Constant(
                value=value,
                low=value,
                high=value,
                identified=0.0,
                unit=unit,
                source=Source.ASSUMED,
                meaning=meaning,
            )
            for name, (value, unit, meaning) in FITTED.items()
        },
        assumptions={name: _assumed(*each) for name, each in ASSUMED.items()} | memory,
        ranges={},
        errors=StackErrors(
            rows=1,
            mape_in_sample=0.0,
            mape_leave_one_out=0.0,
            mape_leave_one_sweep_out=0.0,
            low=1.0,
            high=1.0,
        ),
    )


def _assumed(value: float, note: str) -> Assumption:
    return Assumption(value=value, source=Source.ASSUMED, note=note)


def measured_run(case: StepCase, pack: Path, seconds: float) -> MeasuredRun:
    """Return a timed step as a run that a stack is fitted to; cases of one width are a sweep."""
    cluster = case.cluster(str(pack))
    flop = case.architecture.flops_per_token(CONVENTION, case.seq_len) * case.batch.tokens
    return MeasuredRun(
        sweep=f"d{case.d_model}",
        architecture=case.architecture,
        plan=case.plan,
        cluster=cluster,
        batch=case.batch,
        measured_mfu=flop / (seconds * cluster.n_devices * cluster.peak_flops),
        mfu_convention=CONVENTION,
    )


def fitted_stack(
    facts: Facts,
    pack: HardwarePack,
    path: Path,
    times: Sequence[tuple[StepCase, StepTime]],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> StackProfile:
    """Fit the constants to timed steps.

    Parameters
    ----------
    facts : Facts
    pack : HardwarePack
        Of the kernels, at ``path``.
    path : Path
    times : sequence of (StepCase, StepTime)
        At least as many as there are constants, besides those of any one width.
    resamples, seed : int
        Of the bootstrap.
    progress : callable, optional
        Told resamples done and all of them.

    Raises
    ------
    PerfmodelError
        Fewer steps.
    """
    runs = [measured_run(case, path, time.median_s) for case, time in times]
    base = unfitted_stack(facts, pack)
    return fit_profile(
        runs,
        base,
        name=base.name,
        provenance=(
            f"{len(runs)} steps of moe_ref on this machine, each the median of visits; soft-L1 on "
            f"the log ratio of MFU; intervals 5-95% of {resamples} bootstrap resamples, seed {seed}"
        ),
        resamples=resamples,
        seed=seed,
        progress=progress,
    )


def beside_busy(profile: StackProfile, ratios: Sequence[float]) -> StackProfile:
    """Return the profile with a variant for devices whose neighbours work as well.

    Cores of one CPU share caches, memory and clocks. The same steps, timed in one process and in
    several at once that exchange nothing, say by how much everything that a device does takes
    longer.

    Parameters
    ----------
    profile : StackProfile
    ratios : sequence of float
        Time of each step in several processes over that in one [-].
    """
    low, middle, high = (float(f"{q:.5g}") for q in np.quantile(ratios, (0.05, 0.5, 0.95)))
    note = f"as of the plain stack, times the {middle:.4g} of device_scale"
    stretched = ("host_layer_s", "optimizer_scale", "launch_share")
    stack = profile.stack()
    variant = Variant(
        description="several devices of this machine at once, each a process",
        constants={
            "device_scale": Constant(
                value=middle,
                low=low,
                high=high,
                identified=1.0,
                unit="-",
                source=Source.MEASURED,
                meaning=f"steps beside busy neighbours over steps alone: the median, "
                f"and 5% and 95%, of {len(ratios)}",
            )
        },
        assumptions={
            name: Assumption(
                value=float(f"{middle * getattr(stack, name):.5g}"),
                source=profile.source(name),
                note=note,
            )
            for name in stretched
        },
    )
    return profile.model_copy(update={"variants": {BUSY: variant}})
