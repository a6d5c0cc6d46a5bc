"""What one optimizer step of one plan costs: time, MFU, memory, and what each number rests on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from perfmodel.architecture import Architecture, MfuConvention
from perfmodel.calibration.stacks import StackProfile, fitted_stacks, load_stack
from perfmodel.cluster import Batch, Cluster
from perfmodel.errors import IllegalPlanError
from perfmodel.exchange import SynchronisationTime, synchronisation_time
from perfmodel.frozen import Frozen
from perfmodel.hardware import Hardware
from perfmodel.iteration import (
    PipelineTime,
    StageTime,
    exposed_exchange,
    pipeline_time,
    step_total,
    time_of_content,
)
from perfmodel.layer import LayerCost, OperatorTimes, layer_cost
from perfmodel.layouts import contents_of, pipeline_of_layout, synchronisation_of_layout
from perfmodel.memory import StageBytes, content_bytes, stage_total
from perfmodel.mesh import PlanDims, StageContent, is_uneven
from perfmodel.modes import layer_times, mode_totals
from perfmodel.plan import Plan, Recompute, plan_dims
from perfmodel.precision import saved_activation_bytes
from perfmodel.ranges import (
    machine_flags,
    option_flags,
    partial_nodes,
    range_flags,
    unmeasured_parts,
)
from perfmodel.replay import latent_up_share, replay_of
from perfmodel.rules import Violation, violations
from perfmodel.sources import Source, weakest
from perfmodel.stack import Stack
from perfmodel.stages import StageLayout

DEFAULT_STACK = "megatron-eager"

HEADLINE_SHARE = 0.1
"""A step time rests on the weakest source that carries at least this share of it [-]."""


class StepEstimate(Frozen):
    """One plan's step, as plain numbers (SI units).

    Attributes
    ----------
    step_time_s : float
        Time of one optimizer step, t_iter [s].
    step_time_interval_s : (float, float)
        The step time times 5% and 95% quantiles of measured over predicted time, on runs that the
        stack's constants were fitted without [s].
    interval_applies : bool
        Whether hardware, plan and model lie inside what the stack was fitted on. Where they do
        not, the interval is still that of runs inside.
    mfu : float
        ``model FLOPs / (t_iter N_dev F_peak)`` [-], with the numerator of ``mfu_convention``.
    tokens_per_s, tokens_per_s_per_device : float
        Throughput [token/s].
    tflops_per_device : float
        Model FLOP/s of a device under ``mfu_convention`` [1e12 FLOP/s].
    memory_bytes : float
        Memory of a device of the heaviest stage [B]; ``fits`` compares it with the device.
    dropped_tokens_share : float or None
        Share of routed tokens that the capacity of the experts drops; None where it is not
        known [-].
    memory_by_stage_bytes : tuple of float
        The same for each stage, first to last; ``memory_buckets_bytes`` splits it.
    breakdown_s : dict
        Parts of ``step_time_s`` that add up to it [s].
    sources : dict
        What each part, and each headline number, rests on.
    flags : tuple of str
        Every value outside the range that a surface or the stack was fitted on, one sentence each.
    """

    schema_version: Literal[1] = 1
    step_time_s: float
    step_time_interval_s: tuple[float, float]
    interval_applies: bool
    mfu: float
    mfu_convention: MfuConvention
    tokens_per_s: float
    tokens_per_s_per_device: float
    tflops_per_device: float
    memory_bytes: float
    device_memory_bytes: float
    fits: bool
    heaviest_stage: int
    dropped_tokens_share: float | None
    memory_by_stage_bytes: tuple[float, ...]
    memory_buckets_bytes: tuple[dict[str, float], ...]
    breakdown_s: dict[str, float]
    sources: dict[str, Source]
    flags: tuple[str, ...]
    architecture: dict[str, object]
    plan: Plan
    stack: str
    hardware: str


def check(
    architecture: Architecture, plan: Plan, cluster: Cluster, batch: Batch
) -> tuple[Violation, ...]:
    """Return every rule that the plan breaks; empty if it is legal.

    Raises
    ------
    PerfmodelError
        The batch's routing is a distribution over another number of experts.
    """
    batch.routing.check(architecture.n_experts)
    return violations(
        architecture.rule_variables(),
        plan,
        cluster.n_devices,
        batch.seq_len,
        batch.global_batch,
    )


@dataclass(frozen=True)
class StepModel:
    """One plan on one cluster, with the pieces of its step computed once and on demand."""

    architecture: Architecture
    plan: Plan
    cluster: Cluster
    batch: Batch
    profile: StackProfile

    @cached_property
    def dims(self) -> PlanDims:
        """The plan as the formulas take it."""
        saved = saved_activation_bytes(self.batch.precision)
        return plan_dims(self.plan, self.batch.routing.load(self.plan.ep), saved)

    @cached_property
    def n_microbatches(self) -> int:
        """Microbatches of a pipeline in one step, n_mb [-]."""
        return self.batch.global_batch // (self.plan.dp * self.plan.micro_batch)

    @cached_property
    def hardware(self) -> Hardware:
        """The machine's constants in the precision of the batch."""
        return self.cluster.constants_for(self.batch.precision)

    @cached_property
    def cost(self) -> LayerCost:
        """Costs of a layer; they depend on the hardware and not on the stack."""
        seq_len = float(self.batch.seq_len)
        return layer_cost(self.architecture.dims, self.hardware, seq_len, self.dims)

    @cached_property
    def pipeline(self) -> PipelineTime:
        """The pipeline's part of the step [s]."""
        return self.pipeline_under(self.profile.stack())

    @cached_property
    def layout(self) -> StageLayout | None:
        """The explicit stage layout, if the plan has one."""
        stages = self.plan.stages(self.architecture.mtp_layers)
        return None if stages is None else StageLayout(self.plan.pp, stages)

    @cached_property
    def contents(self) -> tuple[StageContent, ...]:
        """What each device of the pipeline holds."""
        return contents_of(self.architecture.dims, self.dims, self.layout)

    def pipeline_under(self, stack: Stack) -> PipelineTime:
        """Return the pipeline's part of the step under other constants of the stack [s]."""
        a, p, n = self.architecture.dims, self.dims, float(self.n_microbatches)
        totals = mode_totals(self.cost, a, stack, p.recompute)
        hw, seq_len = self.hardware, float(self.batch.seq_len)
        if self.layout is None:
            return pipeline_time(a, hw, stack, p, totals, seq_len, n)
        return pipeline_of_layout(a, hw, stack, p, totals, seq_len, n, self.layout)

    @cached_property
    def synchronisation(self) -> SynchronisationTime:
        """The part of the step outside the pipeline's stages [s]."""
        return self.synchronisation_under(self.profile.stack())

    def synchronisation_under(self, stack: Stack) -> SynchronisationTime:
        """Return the part of the step outside the stages under other constants [s]."""
        a, p, hw = self.architecture.dims, self.dims, self.hardware
        optimizer = self.batch.optimizer.dims
        seq_len = float(self.batch.seq_len)
        if self.layout is None:
            return synchronisation_time(a, hw, stack, optimizer, p, seq_len)
        return synchronisation_of_layout(a, hw, stack, optimizer, p, seq_len, self.contents)

    @property
    def dropped_share(self) -> float | None:
        """Share of routed tokens that a capacity drops; None where it is not known [-]."""
        return self.batch.routing.dropped if self.architecture.n_experts else 0.0

    @property
    def step_s(self) -> float:
        """Time of the step [s]."""
        stack, n = self.profile.stack(), float(self.n_microbatches)
        return float(step_total(stack, self.pipeline, self.synchronisation, n))

    def time_of(self, index: int) -> StageTime:
        """One microbatch on a stage [s]."""
        stack, a, p = self.profile.stack(), self.architecture.dims, self.dims
        totals = mode_totals(self.cost, a, stack, p.recompute)
        hw, seq_len = self.hardware, float(self.batch.seq_len)
        return time_of_content(a, hw, stack, p, totals, seq_len, self.contents[index])

    @cached_property
    def pace_stage(self) -> int:
        """The stage whose microbatches make the steady part: the last, or the slowest of uneven."""
        if self.layout is None and not is_uneven(self.architecture.dims, self.dims):
            return self.plan.pp - 1
        return max(range(self.plan.pp), key=lambda i: self.time_of(i).time)

    def stage(self, index: int) -> StageBytes:
        """Memory of a stage, by bucket [B]."""
        return content_bytes(
            self.architecture.dims,
            self.dims,
            self.batch.optimizer.dims,
            self.profile.stack(),
            float(self.batch.seq_len),
            float(self.n_microbatches),
            float(index),
            self.contents[index],
        )

    @cached_property
    def memory_by_stage_bytes(self) -> tuple[float, ...]:
        """Memory of a device of each stage [B]."""
        return tuple(float(stage_total(self.stage(i))) for i in range(self.plan.pp))

    def breakdown(self) -> dict[str, float]:
        """Split the step time into parts that add up to it [s].

        The steady part is ``n_mb`` microbatches on `pace_stage`: device time by operator, the
        head, what of the host's dispatch the device does not hide, and the expert all-to-all.
        """
        pace, n = self.time_of(self.pace_stage), float(self.n_microbatches)
        dense, moe = self.contents[self.pace_stage].dense, self.contents[self.pace_stage].moe
        replay, up = replay_of(self.dims.recompute), latent_up_share(self.architecture.dims)
        stack, cost = self.profile.stack(), self.cost
        per_moe = layer_times(cost, stack, replay, 1.0, up)
        per_dense = layer_times(cost, stack, replay, 0.0, up)
        parts = {
            f"compute_{name}": n * (moe * per_moe[i] + dense * per_dense[i])
            for i, name in enumerate(OperatorTimes._fields)
        }
        parts["head"] = n * pace.head
        exposed = pace.host + pace.jitter
        if not self.hardware.blocking:
            exposed = max(0.0, pace.host + pace.jitter - pace.device - pace.head)
        parts["dispatch"] = n * exposed
        parts["all_to_all"] = n * pace.dispatch
        parts["sharding"] = n * pace.sharding
        parts["bubble"] = self.pipeline.bubble
        parts["pipeline_depth"] = self.pipeline.pipeline_depth
        sync = self.synchronisation
        parts |= sync._asdict()
        parts["hand_off"] += n * pace.hand_off
        parts["data_parallel"] = exposed_exchange(stack, self.pipeline, sync, n)
        return {name: float(value) for name, value in parts.items()}

    def sources(self) -> dict[str, Source]:
        """Return what each part of the breakdown, and each headline number, rests on."""
        pack, precision = self.cluster.pack, self.batch.precision
        # The fitted runs recompute in full: other modes split A by assumed shares.
        host = [constant.source for constant in self.profile.constants.values()]
        if self.plan.recompute is not Recompute.FULL:
            host.append(self.profile.source("forward_share"))
        if self.architecture.n_dense_layers:
            host.append(self.profile.source("dense_layer_share"))
        devices = self.cluster.n_devices
        levels = [level.source for level in self.cluster.levels if level.devices < devices]
        ring = weakest([pack.source("reduce_scatter"), pack.source("all_gather"), *levels])
        exchange = weakest([pack.source("all_to_all"), *levels])
        elementwise = pack.source("elementwise")
        update = [elementwise, self.profile.source("optimizer_scale")]
        if self.batch.optimizer.dims.matrix_iterations:
            update.append(self.profile.source("optimizer_matmul_eff"))
        if self.plan.optimizer_offload:
            update.append(Source.ASSUMED)
        # how many kernels there are is assumed, unless steps told
        moved = weakest([elementwise, self.profile.source("elementwise_scale")])
        parts = {
            "compute_attention_linear": pack.source("gemm", precision),
            "compute_attention_core": weakest(
                [pack.source("attention_forward"), pack.source("attention_backward")]
            ),
            "compute_elementwise": moved,
            "compute_router": weakest([pack.source("topk"), pack.device.fp32_flops.source]),
            "compute_permutation": moved,
            "compute_experts": weakest(
                [
                    pack.source("grouped_forward", precision),
                    pack.source("grouped_backward", precision),
                ]
            ),
            "compute_activation": elementwise,
            "compute_dense_ffn": pack.source("gemm", precision),
            "compute_tensor_parallel": ring,
            "compute_context_parallel": weakest([exchange, Source.ASSUMED]),
            "compute_gradient": weakest([elementwise, Source.ASSUMED]),
            "head": pack.source("head"),
            "dispatch": weakest(host),
            "all_to_all": exchange,
            "bubble": weakest(host),
            "pipeline_depth": self.profile.source("pipeline_node_cost"),
            "hand_off": weakest([exchange, Source.ASSUMED]),
            "sharding": weakest([ring, Source.ASSUMED]),
            "step_host": self.profile.source("step_host_s"),
            "data_parallel": ring,
            "optimizer": weakest(update),
        }
        overall = self._headline(parts)
        return parts | {
            "step_time_s": overall,
            "step_time_interval_s": overall,
            "dropped_tokens_share": Source.ASSUMED,
            "mfu": overall,
            "tokens_per_s": overall,
            "memory_bytes": Source.ASSUMED,
        }

    def _headline(self, parts: dict[str, Source]) -> Source:
        """Return the weakest source that carries at least a tenth of the step."""
        carried = dict.fromkeys(Source, 0.0)
        for name, seconds in self.breakdown().items():
            carried[parts[name]] += seconds / self.step_s
        order = list(Source)
        cumulative = 0.0
        for source in reversed(order):
            cumulative += carried[source]
            if cumulative >= HEADLINE_SHARE:
                return source
        return order[0]


def _mismatch(model: StepModel) -> tuple[str, ...]:
    fitted_with, priced_with = model.profile.hardware, model.cluster.pack.name
    if priced_with in fitted_with:
        return ()
    packs = "pack" if len(fitted_with) == 1 else "packs"
    others = fitted_stacks(priced_with)
    hint = f"; fitted with it: {', '.join(others)}" if others else ""
    return (
        f"{model.profile.name}: its constants were fitted with hardware {packs} "
        f"{', '.join(fitted_with)} and are used with {priced_with}{hint}.",
    )


def legal_model(
    architecture: Architecture,
    plan: Plan,
    cluster: Cluster,
    batch: Batch,
    stack: str | StackProfile = DEFAULT_STACK,
) -> StepModel:
    """Return the model of one step; parameters and errors are those of :func:`estimate`."""
    broken = check(architecture, plan, cluster, batch)
    if broken:
        raise IllegalPlanError(broken)
    profile = load_stack(stack) if isinstance(stack, str) else stack
    return StepModel(architecture, plan, cluster, batch, profile)


def estimate(
    architecture: Architecture,
    plan: Plan,
    cluster: Cluster,
    batch: Batch,
    *,
    stack: str | StackProfile = DEFAULT_STACK,
    mfu_convention: MfuConvention = MfuConvention.SIX_N_NONEMBEDDING,
) -> StepEstimate:
    """Estimate one optimizer step.

    Parameters
    ----------
    architecture, plan, cluster, batch
        What runs, how it is laid out, where, and on how many tokens.
    stack : str or StackProfile
        Software stack: the name of a shipped profile, a path, or a profile.
    mfu_convention : MfuConvention
        What MFU's numerator counts.

    Raises
    ------
    IllegalPlanError
        The plan breaks a rule; the error carries every violation.
    PackError
        No such hardware pack or stack profile.
    PerfmodelError
        The batch's routing is a distribution over another number of experts.
    """
    model = legal_model(architecture, plan, cluster, batch, stack)
    profile, totals = model.profile, model.memory_by_stage_bytes
    stages = tuple(model.stage(i) for i in range(plan.pp))
    heaviest = max(range(plan.pp), key=lambda i: totals[i])
    step = model.step_s
    flops = architecture.flops_per_token(mfu_convention, batch.seq_len) * batch.tokens
    devices = cluster.n_devices
    unlike = (*_mismatch(model), *unmeasured_parts(model), *option_flags(model))
    outside = range_flags(model)
    return StepEstimate(
        step_time_s=step,
        step_time_interval_s=(step * profile.errors.low, step * profile.errors.high),
        interval_applies=not (unlike or any(f.surface == profile.name for f in outside)),
        mfu=flops / (step * devices * cluster.peak_flops),
        mfu_convention=mfu_convention,
        tokens_per_s=batch.tokens / step,
        tokens_per_s_per_device=batch.tokens / step / devices,
        tflops_per_device=flops / step / devices / 1e12,
        memory_bytes=totals[heaviest],
        device_memory_bytes=cluster.device_memory_bytes,
        fits=totals[heaviest] <= cluster.device_memory_bytes,
        heaviest_stage=heaviest,
        dropped_tokens_share=model.dropped_share,
        memory_by_stage_bytes=totals,
        memory_buckets_bytes=tuple(
            {name: float(value) for name, value in stage._asdict().items()} for stage in stages
        ),
        breakdown_s=model.breakdown(),
        sources=model.sources(),
        flags=(
            *unlike,
            *machine_flags(model),
            *partial_nodes(model),
            *(flag.message for flag in outside),
        ),
        architecture=architecture.summary(),
        plan=plan,
        stack=profile.name,
        hardware=cluster.pack.name,
    )
