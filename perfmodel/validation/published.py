"""Published measured training runs, as cases that the model can price.

The shipped table holds figures of public documents, one run a row, each with its source; a row
that cannot be priced is kept too, and :func:`excluded_runs` gives it with its reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from perfmodel.architecture import Architecture, MfuConvention
from perfmodel.cluster import Optimizer
from perfmodel.errors import PerfmodelError
from perfmodel.frozen import explain
from perfmodel.step import check
from perfmodel.validation.published_cells import (
    RecomputeCell,
    hardware_of,
    memory_of,
    precision_of,
    recompute_of,
)
from perfmodel.validation.published_layouts import Cells, Degrees, degrees_of, layout_of
from perfmodel.validation.published_models import ModelRow, architecture_of
from perfmodel.validation.published_notes import facts_of, number
from perfmodel.validation.published_record import ExcludedRun, PublishedRun
from perfmodel.validation.published_sources import (
    sequence_parallel_of,
    year_of,
    zero_stage_of,
)
from perfmodel.validation.published_times import (
    CountedFlops,
    Measured,
    Timing,
    counted_flops,
    flops_per_token,
    timing_of,
)
from perfmodel.validation.runs import csv_rows

__all__ = [
    "COLUMNS",
    "ExcludedRun",
    "PublishedRun",
    "PublishedTable",
    "excluded_runs",
    "published_runs",
    "read_runs",
]

PUBLISHED = "published_runs.csv"

COLUMNS = (
    *("source", "url_or_repo_path", "model", "total_params_B", "active_params_B", "n_layers"),
    *("hidden", "ffn", "experts", "topk", "expert_ffn", "seq_len", "global_batch", "precision"),
    *("gpu", "n_gpus", "tp", "pp", "vpp", "cp", "ep", "etp", "dp", "mbs", "recompute"),
    *("measured_metric", "measured_value", "unit", "notes"),
)
"""The header of a table of runs."""

AMBIGUOUS = 0.05
"""A time from FLOPs is not used where two readings of the source's count differ by more [-]."""


class PublishedTable(NamedTuple):
    """A table of runs; every row is in one of the two."""

    runs: tuple[PublishedRun, ...]
    excluded: tuple[ExcludedRun, ...]


class _Row:
    """The cells of one row."""

    def __init__(self, place: int, cells: Mapping[str, str | None]) -> None:
        self.place = place
        self._cells = cells
        self.source = self.text("source")
        self.facts = facts_of(self.text("notes"))

    def text(self, column: str) -> str:
        return (self._cells.get(column) or "").strip()

    def whole(self, column: str) -> int | None:
        text = self.text(column)
        if not text:
            return None
        if not re.fullmatch(r"[0-9]{1,15}(\.0+)?", text):
            raise PerfmodelError(f"{column}={text!r} must be a whole number.")
        return int(float(text))

    def value(self) -> float:
        text = self.text("measured_value")
        try:
            found = float(text)
        except ValueError:
            found = float("nan")
        if not 0.0 < found < float("inf"):
            raise PerfmodelError(f"measured_value={text!r} must be a number above 0.")
        return found

    @property
    def cells(self) -> Cells:
        names = ("n_gpus", "seq_len", "global_batch", "tp", "pp", "vpp", "cp", "ep", "etp", "dp")
        numbers = {name: self.whole(name) for name in names}
        return Cells(
            source=self.source,
            label=self.text("model"),
            micro_batch=self.whole("mbs"),
            facts=self.facts,
            **numbers,
        )


def _flag(facts: Mapping[str, str], key: str, yes: str, no: str) -> bool | None:
    return {yes: True, no: False}.get(facts.get(key, ""))


_NOT_A_RUN: Mapping[str, str] = {
    "memory_per_gpu_reference": (
        "A reference value read off a figure, probably computed: it is not a measurement."
    ),
    "peak_memory": "The row has a memory alone, without the batch that needed it.",
}


def _refuse_metric(row: _Row) -> None:
    metric, value = row.text("measured_metric"), row.text("measured_value")
    if metric in _NOT_A_RUN:
        raise PerfmodelError(_NOT_A_RUN[metric])
    if metric == "status" and value != "OOM":
        raise PerfmodelError(
            f"The run ended with status {value!r}, which is neither a time nor a lack of memory."
        )
    if "swapped" in row.facts.get("remark", ""):
        # Their product, the work, does not show it.
        raise PerfmodelError("Seconds and TFLOP/s of the row have changed places in the source.")
    if "disagree" in row.facts.get("remark", ""):
        raise PerfmodelError("Its tokens/s and TFLOP/s contradict each other by a factor of 1.7.")
    if row.facts.get("system") == "MegaScale":
        raise PerfmodelError(
            "MegaScale's own runs changed the model: parallel blocks, and windows of attention "
            "whose width is not stated."
        )
    if row.facts.get("dp_printed") == "wrong":
        raise PerfmodelError(
            f"The printed dp={row.text('dp')} does not multiply out to {row.text('n_gpus')} "
            "devices, so that one of the printed degrees is wrong."
        )


def _depth(row: _Row) -> int | None:
    """Return the layers; where a BigScience row has none, those that its TFLOP/s were counted for.

    Its first calculator counted ``96 l h^2`` FLOPs a token.
    """
    printed, width, tflops = (
        row.whole("n_layers"),
        row.whole("hidden"),
        number(row.facts, "tflops_per_gpu"),
    )
    tokens = (row.whole("global_batch") or 0) * (row.whole("seq_len") or 0)
    timed = row.text("measured_metric") == "step_time" and row.text("unit") == "s"
    if printed or not (width and tflops and tokens and timed) or "calculator" not in row.facts:
        return printed
    rate = tflops * 1e12 * (row.whole("n_gpus") or 0) * row.value() / tokens
    layers = rate / (96.0 * width**2)
    return round(layers) if abs(layers - round(layers)) < 0.1 else None


def _timing(row: _Row, d: Degrees, a: Architecture, hardware: str, counted: CountedFlops) -> Timing:
    """Return the time, unless it rests on FLOPs whose convention the source leaves open."""
    peak = {"a100": 312e12, "h100": 989.4e12, "h800": 989.4e12}.get(hardware.split("-")[0])
    stated = number(row.facts, "peak_tflops")
    peak = peak if stated is None else stated * 1e12
    if row.source.startswith("llm-foundry") and peak and "fp8" in row.text("precision"):
        peak *= 2.0  # its MFU of fp8 is over the fp8 peak
    timing = timing_of(
        Measured(
            source=row.source,
            metric=row.text("measured_metric"),
            value=row.value(),
            unit=row.text("unit"),
            facts=row.facts,
            tokens=float(d.global_batch) * d.seq_len,
            n_gpus=d.n_gpus,
            flops_per_token=flops_per_token(a, d.seq_len, counted),
            peak_flops=peak,
        )
    )
    unsaid = row.source.startswith(
        ("MoE Parallel Folding", "Llama 3 Herd", "NeMo docs long-sequence")
    )
    if unsaid and timing.metric in ("MFU", "tflops_per_gpu"):
        causal = a.flops_per_token(MfuConvention.MEGATRON, d.seq_len)
        share = a.flops_per_token(MfuConvention.MEGATRON, 2 * d.seq_len) / causal - 1.0
        if share > AMBIGUOUS:
            raise PerfmodelError(
                "Its MFU counts attention in a way that the source does not state: at "
                f"seq_len={d.seq_len} the time may be {100.0 * share:.0f}% longer."
            )
    return timing


def _run(row: _Row) -> PublishedRun:
    label, facts = row.text("model"), row.facts
    shape = ModelRow(
        row.source,
        label,
        _depth(row),
        row.whole("hidden"),
        row.whole("ffn"),
        row.whole("seq_len") or 2048,
        facts,
    )
    hardware, as_device = hardware_of(row.text("gpu"))
    _refuse_metric(row)
    a = architecture_of(shape)
    d = degrees_of(row.cells, a)
    precision, as_precision = precision_of(row.text("precision"), row.source, hardware, facts)
    layout, as_layout = layout_of(row.source, facts, a, d.pp, d.vpp)
    recompute: RecomputeCell = recompute_of(row.text("recompute"))
    counted = counted_flops(row.source, facts, recompute.mode)
    oom = row.text("measured_metric") == "status"
    timing = None if oom else _timing(row, d, a, hardware, counted)
    memory = memory_of(row.source, facts)
    group = number(facts, "zero1")
    packed = "(SFT)" in label and timing is not None and timing.metric == "tflops_per_gpu"
    as_packed = "packed sequences taken to be counted as whole ones" if packed else None
    assumed = (*d.assumptions, as_device, as_precision, as_layout, as_packed)
    run = PublishedRun(
        row=row.place,
        source=row.source,
        url=row.text("url_or_repo_path"),
        model=label,
        year=year_of(row.source, facts),
        architecture=a,
        hardware=hardware,
        devices=d.n_gpus,
        tp=d.tp,
        etp=d.etp,
        ep=d.ep,
        pp=d.pp,
        vpp=d.vpp,
        cp=d.cp,
        dp=d.dp,
        micro_batch=d.micro_batch,
        layout=layout,
        recompute=recompute.mode,
        recompute_modules=recompute.modules,
        recompute_layers=recompute.layers,
        precision=precision,
        precision_label=row.text("precision"),
        sequence_parallel=sequence_parallel_of(row.source, facts, d.tp),
        zero_stage=zero_stage_of(row.source, facts),
        zero_group=int(group) if group is not None and group > 0 else None,
        global_batch=d.global_batch,
        seq_len=d.seq_len,
        step_time_s=timing.step_time_s if timing else None,
        metric=timing.metric if timing else "status",
        counted=counted,
        disagreements=timing.disagreements if timing else (),
        oom=oom,
        memory_bytes=memory.used_bytes if memory else None,
        memory_kind=memory.kind if memory else None,
        phase="sft" if "(SFT)" in label else "pretrain",
        container=facts.get("container"),
        dispatcher=facts.get("dispatcher"),
        cuda_graph_scope=facts.get("cg_scope"),
        recipe=facts.get("recipe"),
        a2a_overlap=_flag(facts, "a2a_overlap", "True", "False"),
        balanced_routing=_flag(facts, "routing", "balanced", "natural"),
        capacity_factor=number(facts, "capacity_factor"),
        offload=bool(
            {"cpu_offload_layers", "act_offload", "activation_offload"} & set(facts)
            or "optimizer_state_offload" in facts.get("remark", "")
        ),
        optimizer=Optimizer(facts.get("optimizer", Optimizer.ADAMW.value)),
        facts=facts,
        assumptions=tuple(note for note in assumed if note),
    )
    broken = check(run.architecture, run.plan, run.cluster, run.batch)
    if broken:
        raise PerfmodelError(f"The layout is not legal: {broken[0].message}")
    return run


def _table(path: Path | None) -> PublishedTable:
    runs: list[PublishedRun] = []
    excluded: list[ExcludedRun] = []
    for place, cells in enumerate(csv_rows(path, PUBLISHED), start=1):
        missing = [name for name in COLUMNS if name not in cells]
        if missing:
            raise PerfmodelError(f"The table of runs lacks the columns {', '.join(missing)}.")
        row = _Row(place, cells)
        try:
            runs.append(_run(row))
        except ValidationError as error:
            reason = f"A value is not possible: {explain(error)}."
        except PerfmodelError as error:
            reason = str(error)
        else:
            continue
        excluded.append(
            ExcludedRun(
                row=place,
                source=row.source,
                url=row.text("url_or_repo_path"),
                model=row.text("model"),
                reason=reason,
            )
        )
    return PublishedTable(tuple(runs), tuple(excluded))


def read_runs(path: Path) -> PublishedTable:
    """Read a table of runs with the shipped one's header.

    Raises
    ------
    PerfmodelError
        The file cannot be read, or lacks a column. A row that cannot be priced is not an error:
        it is among the excluded.
    """
    return _table(path)


@cache
def _shipped() -> PublishedTable:
    return _table(None)


def published_runs() -> tuple[PublishedRun, ...]:
    """Return the runs of the shipped table that can be priced."""
    return _shipped().runs


def excluded_runs() -> tuple[ExcludedRun, ...]:
    """Return the other rows of the shipped table, each with its reason."""
    return _shipped().excluded
