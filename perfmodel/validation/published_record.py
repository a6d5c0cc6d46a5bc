"""The record of a published run, and of a row that is not priced."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, cached_property

from perfmodel.architecture import Architecture, MfuConvention
from perfmodel.cluster import Batch, Cluster, Optimizer
from perfmodel.frozen import Frozen
from perfmodel.plan import Module, Plan, Recompute
from perfmodel.precision import Precision
from perfmodel.validation.published_cells import MemoryKind, PrecisionName, RecomputeName
from perfmodel.validation.published_times import CountedFlops

__all__ = ["ExcludedRun", "PublishedRun"]

DISTRIBUTED_OPTIMIZER_YEAR = 2023
"""Megatron's distributed optimizer is usual since."""


class PublishedRun(Frozen):
    """One measured run.

    Attributes
    ----------
    row : int
        Its place in the table, from 1.
    source, url, model, year
        The document, where it is, its label of the model, and the year of the measurement.
    architecture : Architecture
    hardware, devices
        A shipped hardware pack, and the number of devices (:attr:`cluster`).
    tp, etp, ep, pp, vpp, cp, dp, micro_batch : int
        Degrees; `vpp` is chunks of each device.
    layout : str or None
        Stage layout as :class:`perfmodel.plan.Plan` takes it.
    recompute : str or None
        ``none``, ``selective`` or ``full``; None where the source does not say.
    recompute_modules : tuple of str or None
        Megatron-Core's modules; None where the source does not say which.
    recompute_layers : int or None
        Layers of a stage that are recomputed, where not all.
    precision, precision_label : str
        Of the matrix products, in one vocabulary and as printed.
    sequence_parallel : bool or None
        None where the source does not say, or TP is 1.
    zero_stage : int or None
        0 to 3; fully sharded data parallelism is 3, Megatron's distributed optimizer 1.
    zero_group : int or None
        Ranks over which the optimizer is sharded, where not over all of dp.
    global_batch, seq_len : int
    step_time_s : float or None
        Measured time of a step [s]; None for a run that ran out of memory.
    metric : str
        The figure that the time comes from.
    counted : CountedFlops
        What the source counts where it prints FLOP/s or MFU.
    disagreements : tuple of str
        Other figures of the row that are more than 3% off.
    oom : bool
        The run ran out of memory.
    memory_bytes, memory_kind
        Largest memory of a device [B] as the allocator's ``allocated`` or ``reserved`` maximum or
        of the whole ``device``.
    phase : str
        ``pretrain`` or ``sft``.
    container, dispatcher, cuda_graph_scope, recipe : str or None
    a2a_overlap : bool or None
        Expert all-to-all overlapped with computation.
    balanced_routing : bool or None
        Tokens are forced to spread evenly over experts.
    capacity_factor : float or None
        Where tokens beyond it are dropped.
    offload : bool
        Activations, weights or optimizer state move to the host.
    optimizer : str
    facts : mapping of str to str
        Every pair of the notes.
    assumptions : tuple of str
        What the row does not say and was taken here.
    """

    row: int
    source: str
    url: str
    model: str
    year: int
    architecture: Architecture
    hardware: str
    devices: int
    tp: int
    etp: int
    ep: int
    pp: int
    vpp: int
    cp: int
    dp: int
    micro_batch: int
    layout: str | None
    recompute: RecomputeName | None
    recompute_modules: tuple[str, ...] | None
    recompute_layers: int | None
    precision: PrecisionName
    precision_label: str
    sequence_parallel: bool | None
    zero_stage: int | None
    zero_group: int | None
    global_batch: int
    seq_len: int
    step_time_s: float | None
    metric: str
    counted: CountedFlops
    disagreements: tuple[str, ...]
    oom: bool
    memory_bytes: float | None
    memory_kind: MemoryKind | None
    phase: str
    container: str | None
    dispatcher: str | None
    cuda_graph_scope: str | None
    recipe: str | None
    a2a_overlap: bool | None
    balanced_routing: bool | None
    capacity_factor: float | None
    offload: bool
    optimizer: Optimizer
    facts: Mapping[str, str]
    assumptions: tuple[str, ...]

    @cached_property
    def plan(self) -> Plan:
        """The run as a plan.

        What is sharded follows `zero_stage`; where a source does not say, nothing before 2023 and
        the optimizer's state since. Gradients and weights that are sharded in a pipeline count as
        sharded state. With `recompute` selective and no modules named it is attention alone.
        """
        zero = self.zero_stage
        if zero is None:
            zero = 0 if self.year < DISTRIBUTED_OPTIMIZER_YEAR else 1
        modules = self.recompute_modules or ()
        selective = self.recompute == "selective"
        return Plan(
            tp=self.tp,
            etp=self.etp,
            ep=self.ep,
            pp=self.pp,
            vpp=self.vpp,
            cp=self.cp,
            dp=self.dp,
            micro_batch=self.micro_batch,
            recompute=Recompute(self.recompute or "none"),
            recompute_modules=tuple(Module(m) for m in modules) if selective else (),
            layout=self.layout,
            zero=min(zero, 1) if self.pp > 1 else zero,
            sequence_parallel=self.sequence_parallel is not False,
        )

    @cached_property
    def cluster(self) -> Cluster:
        """The devices, on the fewest nodes that hold as many each."""
        return _cluster(self.hardware, self.devices)

    @property
    def batch(self) -> Batch:
        """What a step works on."""
        return Batch(
            global_batch=self.global_batch,
            seq_len=self.seq_len,
            optimizer=self.optimizer,
            precision=Precision.BF16 if self.precision == "fp16" else Precision(self.precision),
        )

    @property
    def tokens_per_s_per_gpu(self) -> float | None:
        """Tokens of a device in a second [1/s]."""
        if self.step_time_s is None:
            return None
        return self.global_batch * self.seq_len / self.step_time_s / self.devices

    @property
    def tflops_per_gpu(self) -> float | None:
        """Megatron's FLOPs of a device in a second [TFLOP/s]."""
        rate = self.tokens_per_s_per_gpu
        if rate is None:
            return None
        flops = self.architecture.flops_per_token(MfuConvention.MEGATRON, self.seq_len)
        return rate * flops / 1e12

    @property
    def mfu(self) -> float | None:
        """Megatron's FLOPs over the dense peak in the run's precision [-]."""
        rate = self.tflops_per_gpu
        device = self.cluster.pack.device
        peak = device.peak_flops
        if self.precision in ("fp8", "fp8-block", "mxfp8"):
            peak = device.peak_flops_fp8 or peak
        elif self.precision == "nvfp4":
            peak = device.peak_flops_fp4 or peak
        return None if rate is None else rate * 1e12 / float(peak.value)


class ExcludedRun(Frozen):
    """A row that is not priced, and why in one sentence."""

    row: int
    source: str
    url: str
    model: str
    reason: str


@cache
def _cluster(hardware: str, devices: int) -> Cluster:
    """Return a cluster; runs share it, since it reads its pack once."""
    return Cluster.parse(f"{hardware}:{devices}gpus")
