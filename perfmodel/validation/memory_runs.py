"""Runs whose peak of memory was measured, or that ran out of it, as the memory formulas take them.

Two tables: published runs (:mod:`perfmodel.validation.published`), and the sweep of nanotron on
H100 behind the Ultra-Scale Playbook (Hugging Face, 2025), which a file of the same columns gives.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from perfmodel.activations import layer_bytes
from perfmodel.architecture import Architecture
from perfmodel.cluster import Optimizer
from perfmodel.dims import ArchitectureDims
from perfmodel.errors import PerfmodelError
from perfmodel.layouts import contents_of
from perfmodel.memory import (
    OptimizerDims,
    StageBytes,
    bytes_on,
    hold_of,
    stage_allocated,
    stage_parameters,
    stage_total,
)
from perfmodel.mesh import PlanDims, StageContent
from perfmodel.plan import Plan, Recompute, plan_dims
from perfmodel.precision import saved_activation_bytes
from perfmodel.stack import Stack
from perfmodel.stages import StageLayout
from perfmodel.validation.published import PublishedRun, published_runs
from perfmodel.validation.runs import csv_rows

__all__ = ["MemoryCase", "Peak", "nanotron_cases", "predicted_bytes", "published_cases"]

Peak = Literal["allocated", "reserved", "device"]
"""What was measured: bytes in tensors; held by the allocator; of the whole device."""

NANOTRON_VOCABULARY = 131072
"""From the printed sizes of the sweep: 1.34e9 parameters of 16 layers of width 2048, tied."""

GIB = 2.0**30

H100_BYTES = 79.1 * GIB
"""What CUDA reports of an H100 with 80 GB."""


class MemoryCase(NamedTuple):
    """One run."""

    name: str
    stack: str  # memory profile that it is predicted with
    model: str
    a: ArchitectureDims
    p: PlanDims
    optimizer: OptimizerDims
    seq_len: float
    n_microbatches: float
    contents: tuple[StageContent, ...]
    peak: Peak
    measured_bytes: float | None
    stage: int | None  # the one measured; None for the heaviest
    oom: bool
    device_bytes: float

    @property
    def half(self) -> int:
        """0 or 1, by a hash of the model and the layout: constants are fitted on half 0."""
        p = self.p
        key = f"{self.model} {p.tp:g} {p.pp:g} {p.dp:g} {p.micro_batch:g} {p.zero:g}"
        return zlib.crc32(key.encode()) % 2


def stages_of_case(case: MemoryCase, stack: Stack) -> tuple[StageBytes, ...]:
    """Return the buckets of every stage of a run [B]."""
    t = layer_bytes(case.a, case.p, stack, case.seq_len, case.p.recompute)
    a, p, n = case.a, case.p, case.n_microbatches
    holds = (
        hold_of(a, p, case.optimizer, stack, n, float(i), c, stage_parameters(a, p, c))
        for i, c in enumerate(case.contents)
    )
    return tuple(bytes_on(stack, hold, t) for hold in holds)


def measured_part(m: StageBytes, peak: Peak) -> float:
    """Return what a measurement of this kind counts [B]."""
    if peak == "allocated":
        return stage_allocated(m)
    return stage_total(m) - (m.buffers if peak == "reserved" else 0.0)


def predicted_bytes(case: MemoryCase, stack: Stack) -> float:
    """Return what the run's measurement should have been [B]."""
    found = [measured_part(m, case.peak) for m in stages_of_case(case, stack)]
    return max(found) if case.stage is None else found[case.stage]


STACK_OF_SOURCE: Mapping[str, str] = {
    "SimuMax": "megatron-te",
    "Megatron-Bridge": "megatron-bridge",
    "TorchTitan": "torchtitan",
    "BigScience": "megatron-deepspeed",
}


STATE_BYTES: Mapping[tuple[str, str], float] = {
    # bf16 moments: exp_avg_dtype and exp_avg_sq_dtype of the recipe moonlight_16b.py
    ("megatron-bridge", "Moonlight-16B"): 8.0,
}
"""Optimizer's state of a parameter where it is not AdamW's 12 bytes."""

DEEPSPEED_STATE_BYTES = 16.0
"""fp32 weight, two moments and fp32 gradient of a partition (arXiv 1910.02054, section 3.1)."""


def _stack_of(source: str) -> str | None:
    found = (name for start, name in STACK_OF_SOURCE.items() if source.startswith(start))
    return next(found, None)


def _dims(run: PublishedRun) -> PlanDims:
    saved = saved_activation_bytes(run.batch.precision)
    p = plan_dims(run.plan, run.batch.routing.load(run.ep), saved)
    if run.zero_group is not None and run.dp * run.cp % run.zero_group == 0:
        p = p._replace(instances=run.dp * run.cp / run.zero_group)
    if run.source.startswith("TorchTitan") and run.recompute == "selective":
        # keeps the outputs of every other product: no mode does, this one comes nearest
        p = p._replace(recompute=float(Recompute.SUPER_SELECTIVE.code))
    return p


def why_not(run: PublishedRun) -> str | None:
    """Say why a run with a measured memory is not compared; None if it is."""
    if run.pp > 1 and (run.zero_stage or 0) >= 2:
        return (
            "ZeRO-3 with a pipeline: weights and gradients of all layers stay whole between "
            "microbatches, which no rule of a plan allows"
        )
    if run.recompute is None and run.source.startswith("TorchTitan"):
        return "the source does not say what is recomputed, and TorchTitan's default does recompute"
    return None


def published_cases() -> tuple[MemoryCase, ...]:
    """Return the published runs with a measured peak, or that ran out of memory."""
    return tuple(_published(run) for run in measured_runs() if why_not(run) is None)


def measured_runs() -> tuple[PublishedRun, ...]:
    """Return the published runs that say something of memory, compared or not."""
    return tuple(run for run in published_runs() if run.memory_bytes or run.oom)


def _published(run: PublishedRun) -> MemoryCase:
    stack = _stack_of(run.source)
    if stack is None:
        raise PerfmodelError(f"No memory profile is stated for runs of {run.source}.")
    p, a = _dims(run), run.architecture.dims
    stages = run.plan.stages(run.architecture.mtp_layers)
    layout = None if stages is None else StageLayout(run.pp, stages)
    state = STATE_BYTES.get((stack, run.model), run.optimizer.dims.state_bytes)
    if stack == "megatron-deepspeed":
        state = DEEPSPEED_STATE_BYTES
    return MemoryCase(
        name=f"row {run.row}",
        stack=stack,
        model=run.model,
        a=a,
        p=p,
        optimizer=run.optimizer.dims._replace(state_bytes=state),
        seq_len=float(run.seq_len),
        n_microbatches=float(run.global_batch // (run.dp * run.micro_batch)),
        contents=contents_of(a, p, layout),
        peak=run.memory_kind or "device",
        measured_bytes=run.memory_bytes,
        stage=None,
        oom=run.oom,
        device_bytes=run.cluster.device_memory_bytes,
    )


def nanotron_layers(a: Architecture, pp: int, fixed: bool) -> tuple[tuple[int, ...], int]:
    """Return the layers of each stage and the stage of the head, as nanotron deals out blocks.

    Blocks go to a stage until their cost passes its equal share: a layer costs its matrices with
    as many key-value heads as heads, the head its own. ``fixed`` is the later rule, under which a
    stage is full as soon as its share is reached.
    """
    layer = 4.0 * a.d_model * a.n_heads * a.head_dim + 3.0 * a.d_model * a.d_ff
    head = float(a.vocab_size * a.d_model)
    share = (a.n_layers * layer + head) / pp
    counts, stage, spent = [0] * pp, 0, 0.0
    for _ in range(a.n_layers):
        counts[stage] += 1
        spent += layer
        full = (
            spent >= share * (stage + 1) * (1.0 - 1e-12) if fixed else spent > share * (stage + 1)
        )
        if full and stage + 1 < pp:
            stage += 1
    return tuple(counts), stage


def nanotron_cases(path: Path) -> tuple[MemoryCase, ...]:
    """Read the nanotron sweep; runs that failed in another way than for memory are left out.

    The reserved peaks are those of the first stage's rank. Runs that ran out of memory do not say
    how many key-value heads they had: as many as heads, which is so in all but 12 of the others.

    Raises
    ------
    PerfmodelError
        The file cannot be read.
    """
    return tuple(_nanotron(csv_rows(path, path.name)))


def _nanotron(rows: Iterator[Mapping[str, str]]) -> Iterator[MemoryCase]:
    for place, row in enumerate(rows, start=1):
        pairs = (item.split("=", 1) for item in row["notes"].split(";") if "=" in item)
        facts = {key.strip(): value.strip() for key, value in pairs}
        oom = row["measured_value"] == "OOM"
        if (row["measured_metric"] == "status" and not oom) or not row["ffn"]:
            continue
        width, heads = int(row["hidden"]), int(facts["heads"] or 0)
        if heads == 0:
            continue
        a = Architecture(
            n_layers=int(row["n_layers"]),
            d_model=width,
            n_heads=heads,
            n_kv_heads=int(facts["kv_heads"] or heads),
            head_dim=width // heads,
            d_ff=int(float(row["ffn"])),
            vocab_size=NANOTRON_VOCABULARY,
            n_experts=0,
            top_k=0,
            d_expert=0,
            d_shared=0,
            first_k_dense=0,
            tied_embeddings=width <= 3072,
        )
        pp, dp = int(row["pp"]), int(row["dp"])
        plan = Plan(
            tp=int(row["tp"]),
            pp=pp,
            dp=dp,
            micro_batch=int(row["mbs"]),
            zero=int(facts["zero"]),
            sequence_parallel=facts["tp_mode"] == "REDUCE_SCATTER",
        )
        counts, head = nanotron_layers(a, pp, facts["after_pp_fix"] == "True")
        yield MemoryCase(
            name=f"row {place}",
            stack="nanotron",
            model=f"{a.n_layers}x{width}",
            a=a.dims,
            p=plan_dims(plan),
            optimizer=Optimizer.ADAMW.dims,
            seq_len=float(row["seq_len"]),
            n_microbatches=float(facts["ga"]),
            contents=tuple(
                StageContent(
                    layers=float(n),
                    dense=float(n),
                    moe=0.0,
                    prediction=0.0,
                    embedding=float(i == 0),
                    loss=float(i == head),
                )
                for i, n in enumerate(counts)
            ),
            peak="reserved",
            measured_bytes=None if oom else float(facts["peak_reserved_gb"]) * GIB,
            stage=0,
            oom=oom,
            device_bytes=H100_BYTES,
        )
