"""Random options of plans, routings and stacks, and machines of which one part is slow."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from hypothesis import strategies as st

from perfmodel.architecture import Architecture
from perfmodel.calibration.stacks import StackProfile
from perfmodel.dims import ArchitectureDims
from perfmodel.exchange import synchronisation_time
from perfmodel.hardware import Hardware
from perfmodel.iteration import pipeline_time, step_total
from perfmodel.layer import layer_cost
from perfmodel.memory import OptimizerDims
from perfmodel.mesh import PlanDims
from perfmodel.modes import mode_totals
from perfmodel.plan import Module, Plan
from perfmodel.routing import Routing
from perfmodel.stack import Stack
from perfmodel.step import check

from .strategies import Run, ideal_hardware, profile, runs

SLOW = 1e9
"""Bandwidth of the part that is slow [B/s]."""


# ---------------------------------------------------------------- plans


OPTIONS: dict[str, tuple[Any, ...]] = {
    "sequence_parallel": (True, False),
    "zero": (0, 1, 2, 3),
    "optimizer_instances": (1, 2, 4),
    "cp_comm": ("p2p", "a2a"),
    "optimizer_offload": (0.0, 0.25, 1.0),
}


def with_options(run: Run, **options: Any) -> Run:
    """Return the run with other options of its plan."""
    return run._replace(plan=Plan.model_validate({**run.plan.model_dump(), **options}))


def is_legal(run: Run) -> bool:
    return not check(*run)


modules = st.frozensets(st.sampled_from(Module), min_size=1)
"""Choices of modules that the backward pass computes again."""

any_modules = st.lists(st.sampled_from(Module), min_size=1, max_size=3, unique=True)


@st.composite
def routings(draw: st.DrawFn, n_experts: int) -> Routing:
    """Draw a routing for a model: even, a factor, or tokens of each expert; with a capacity."""
    fields: dict[str, Any] = {}
    if n_experts and draw(st.booleans()):
        counts = st.lists(st.integers(0, 1000), min_size=n_experts, max_size=n_experts)
        fields["tokens_per_expert"] = draw(counts.filter(any))
    else:
        fields["imbalance"] = draw(st.sampled_from((1.0, 1.25, 3.0)))
    if draw(st.booleans()):
        fields["capacity_factor"] = draw(st.sampled_from((0.5, 1.0, 1.5, 4.0)))
        fields["pad_to_capacity"] = draw(st.booleans())
    return Routing(**fields)


@st.composite
def optioned_runs(draw: st.DrawFn, *, sparse: bool | None = None) -> Run:
    """Draw a legal run with any options that are legal for it, and any routing."""
    run = draw(runs(sparse=sparse))
    for name, values in OPTIONS.items():
        ways = (with_options(run, **{name: value}) for value in values)
        run = draw(st.sampled_from([way for way in ways if is_legal(way)]))
    routing = draw(routings(run.architecture.n_experts))
    return run._replace(batch=run.batch.model_copy(update={"routing": routing}))


# ---------------------------------------------------------------- stacks


SHARES = (
    *("tp_exposed", "dp_hidden", "pp_hidden", "a2a_hidden", "copies_once", "launch_share"),
    *("forward_share", "dense_layer_share", "selective_replay"),
)
SIZES = {
    "host_layer_s": 1e-3,
    "host_microbatch_s": 1e-3,
    "jitter_s": 1e-3,
    "device_scale": 2.0,
    "attention_scale": 2.0,
    "elementwise_scale": 1.6,
    "router_scale": 1.4,
    "optimizer_scale": 1.5,
    "step_host_s": 1.0,
    "score_bytes": 12.0,
    "gradient_bytes": 4.0,
}


@st.composite
def stack_changes(draw: st.DrawFn) -> dict[str, float]:
    """Draw values of the constants that a stack may state; shares from 0 to 1."""
    changes = {name: draw(st.sampled_from((0.0, 0.3, 1.0))) for name in SHARES}
    scales = {name: draw(st.sampled_from((0.5, 1.0))) * size for name, size in SIZES.items()}
    return changes | scales


def stack_with(**changes: float) -> StackProfile:
    """Return the shipped profile with other values of some constants."""
    constants, assumptions = dict(profile().constants), dict(profile().assumptions)
    for name, value in changes.items():
        if name in constants:
            interval = {"value": value, "low": value, "high": value}
            constants[name] = constants[name].model_copy(update=interval)
        else:
            assumptions[name] = assumptions[name].model_copy(update={"value": value})
    return profile().model_copy(update={"constants": constants, "assumptions": assumptions})


# ---------------------------------------------------------------- machines of which a part is slow


@lru_cache
def slow_ring(*names: str, devices_per_node: int = 8) -> Hardware:
    """Build an ideal machine some of whose ring collectives move `SLOW` bytes a second."""
    hardware = ideal_hardware(devices_per_node)
    slow = {
        name: getattr(hardware.fabric, name)._replace(intra_bw=SLOW, inter_bw=SLOW, strided_bw=SLOW)
        for name in names
    }
    return hardware._replace(fabric=hardware.fabric._replace(**slow))


def slow_all_to_all(devices_per_node: int = 8, **bandwidths: float) -> Hardware:
    """Build an ideal machine whose all-to-all has some of these bandwidths [B/s]."""
    hardware = ideal_hardware(devices_per_node)
    surface = hardware.fabric.all_to_all._replace(**bandwidths)
    return hardware._replace(fabric=hardware.fabric._replace(all_to_all=surface))


def slow_memory() -> Hardware:
    """Build an ideal machine that moves `SLOW` bytes a second in its own memory."""
    hardware = ideal_hardware()
    return hardware._replace(device=hardware.device._replace(memory_bw=SLOW))


def step_seconds(
    architecture: Architecture,
    hardware: Hardware,
    stack: Stack,
    optimizer: OptimizerDims,
    p: PlanDims,
    seq_len: float,
    n_microbatches: float,
) -> float:
    """Return the time of a step from the formulas alone [s]."""
    a: ArchitectureDims = architecture.dims
    totals = mode_totals(layer_cost(a, hardware, seq_len, p), a, stack, p.recompute)
    pipeline = pipeline_time(a, hardware, stack, p, totals, seq_len, n_microbatches)
    sync = synchronisation_time(a, hardware, stack, optimizer, p, seq_len)
    return float(step_total(stack, pipeline, sync, n_microbatches))
