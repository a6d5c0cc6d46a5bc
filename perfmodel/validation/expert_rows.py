"""Layouts that experts chose, as runs without a time: the recipes of NVIDIA's Megatron-Bridge.

The shipped table holds what each recipe of a benchmark sets, one a row. A row that cannot be
priced is kept, with its reason. What a recipe takes over from another is not in the table, so rows
that lack their batch, or whose weights alone exceed a device, are among those.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from perfmodel.architecture import Architecture
from perfmodel.cluster import Optimizer
from perfmodel.errors import PerfmodelError
from perfmodel.frozen import Frozen, explain
from perfmodel.models import catalogue
from perfmodel.plan import Module
from perfmodel.step import StepModel, check
from perfmodel.validation.published_cells import PrecisionName, hardware_of
from perfmodel.validation.published_layouts import layout_of
from perfmodel.validation.published_record import PublishedRun
from perfmodel.validation.published_scores import profile_of
from perfmodel.validation.published_times import CountedFlops
from perfmodel.validation.runs import csv_rows

__all__ = ["ExcludedRecipe", "ExpertCase", "ExpertTable", "expert_cases"]

TABLE = "expert_layouts.csv"
SOURCE = "Megatron-Bridge recipes"
URL = "https://github.com/NVIDIA-NeMo/Megatron-Bridge"

COLUMNS = (
    *("tag", "name", "model", "phase", "gpu", "precision", "n_gpus", "gbs", "mbs", "tp", "pp"),
    *("vpp", "cp", "ep", "etp", "recompute_modules", "recompute_num_layers", "cuda_graph_impl"),
    *("cuda_graph_scope", "dispatcher", "a2a_overlap", "pp_layout", "cpu_offload_layers", "file"),
)
"""The header of the table."""

CONTAINERS: Mapping[str, str] = {"v0.6.0": "26.08"}
"""Release of the container that a tag of the recipes is for, as the published runs name both."""

_MODELS: Mapping[str, tuple[str, int]] = {
    "DEEPSEEK_V3": ("DeepSeek-V3", 4096),
    "KIMI_K2": ("Kimi-K2", 4096),
    "QWEN3_235B_A22B": ("Qwen3-235B-A22B", 4096),
    "QWEN3_30B_A3B": ("Qwen3-30B-A3B", 4096),
    "GPT_OSS_120B": ("gpt-oss-120b", 4096),
    "GPT_OSS_20B": ("gpt-oss-20b", 8192),
    "LLAMA3_8B": ("Llama-3-8B", 8192),
    "LLAMA3_70B": ("Llama-3-70B", 8192),
    "LLAMA31_405B": ("Llama-3-405B", 8192),
}
"""Models of the catalogue, and tokens of a sequence, which the table lacks: those of the published
runs of the model in pretraining; of gpt-oss-20b as its recipes set it
(scripts/performance/configs/gpt_oss/gpt_oss_llm_pretrain.py)."""

_SFT_SEQUENCE: Mapping[str, int] = {"LLAMA3_70B": 4096}
"""Tokens of a packed sequence in the published runs of supervised fine-tuning."""

_NOT_MODELLED: tuple[tuple[str, str], ...] = (
    ("NEMOTRON", "its layers are Mamba's and attention's in turn, which is not modelled"),
    ("QWEN3_NEXT", "three of four of its layers have gated delta rules, which are not modelled"),
    ("QWEN3_VL", "its images go through an encoder that is not modelled"),
    ("QWEN35_VL", "its images go through an encoder that is not modelled"),
    ("WAN", "it is a diffusion transformer, which is not modelled"),
    ("DEEPSEEK_V4", "the catalogue does not have it"),
    ("GLM52", "the catalogue does not have it"),
)

_PRECISIONS: tuple[tuple[str, PrecisionName], ...] = (
    ("bf16", "bf16"),
    ("fp8mx", "mxfp8"),
    ("fp8cs", "fp8"),
    ("fp8sc", "fp8-block"),
    ("nvfp4", "nvfp4"),
)
"""First letters of a recipe's precision: MX blocks of 32; current scaling, one scale a tensor;
sub-channel scaling, blocks of 128."""

_FSDP_WITHOUT_PIPELINE = ("LLAMA3_70B", "LLAMA31_405B")
"""Models whose recipes with pp=1 set use_megatron_fsdp, which the table has no column for
(scripts/performance/configs/llama)."""


class ExpertCase(Frozen):
    """What one expert chose, once for all rows that say the same.

    Attributes
    ----------
    run : PublishedRun
        The recipe as a run without a time; its plan is the expert's.
    stack : str
        The stack profile with the switches that the row has on; the whole search is under it.
    rows : tuple of int
        Rows of the table, from 1; the first has the switches.
    tag : str
    """

    run: PublishedRun
    stack: str
    rows: tuple[int, ...]
    tag: str


class ExcludedRecipe(Frozen):
    """A row that is not priced, and why in one sentence."""

    row: int
    name: str
    model: str
    reason: str


class ExpertTable(NamedTuple):
    """Every row of the table is in one of the two."""

    cases: tuple[ExpertCase, ...]
    excluded: tuple[ExcludedRecipe, ...]


class _Cells:
    def __init__(self, cells: Mapping[str, str | None]) -> None:
        self._cells = cells

    def text(self, column: str) -> str:
        return (self._cells.get(column) or "").strip()

    def whole(self, column: str) -> int | None:
        text = self.text(column)
        if not text:
            return None
        if not re.fullmatch(r"[0-9]{1,9}(\.0)?", text):
            raise PerfmodelError(f"{column}={text!r} must be a whole number.")
        return int(float(text))

    def stated(self, column: str, what: str) -> int:
        found = self.whole(column)
        if found is None:
            raise PerfmodelError(
                f"The recipe does not set its {what}: it takes it over from another, which the "
                "table does not resolve."
            )
        return found


def _architecture(row: _Cells) -> tuple[Architecture, int, str]:
    """Return the model, the tokens of a sequence, and the phase."""
    label, phase = row.text("model"), row.text("phase")
    for prefix, reason in _NOT_MODELLED:
        if label.startswith(prefix):
            raise PerfmodelError(f"{label} is left out: {reason}.")
    if phase not in ("PRETRAIN", "SFT"):
        raise PerfmodelError(f"{phase} trains adapters alone, a step that is not modelled.")
    if label not in _MODELS:
        raise PerfmodelError(f"{label} is left out: the catalogue does not have it.")
    name, seq_len = _MODELS[label]
    if phase == "SFT":
        if label not in _SFT_SEQUENCE:
            raise PerfmodelError(
                f"No published run says how long the sequences of {label} are in fine-tuning."
            )
        seq_len = _SFT_SEQUENCE[label]
    return catalogue[name], seq_len, "sft" if phase == "SFT" else "pretrain"


def _precision(label: str) -> PrecisionName:
    letters = label.lower().replace("_", "")
    for prefix, precision in _PRECISIONS:
        if letters.startswith(prefix):
            return precision
    raise PerfmodelError(f"precision={label!r} names a version of the recipe, not a precision.")


def _modules(row: _Cells) -> tuple[str, ...]:
    layers = row.whole("recompute_num_layers")
    if layers is not None:
        raise PerfmodelError(
            f"Full recompute of {layers} of a stage's layers is not modelled, only that of all."
        )
    modules = tuple(filter(None, row.text("recompute_modules").split("+")))
    unknown = [module for module in modules if module not in tuple(Module)]
    if unknown:
        raise PerfmodelError(f"Recompute of {unknown[0]} is not modelled.")
    return modules


def _run(row: _Cells, place: int) -> PublishedRun:
    a, seq_len, phase = _architecture(row)
    if row.whole("cpu_offload_layers"):
        raise PerfmodelError("Offload of activations to the host is not modelled.")
    batch = row.stated("gbs", "global batch")
    micro = row.stated("mbs", "micro-batch")
    modules = _modules(row)
    devices, tp, pp = row.stated("n_gpus", "devices"), row.whole("tp") or 1, row.whole("pp") or 1
    cp, vpp = row.whole("cp") or 1, row.whole("vpp") or 1
    if devices % (tp * pp * cp):
        raise PerfmodelError(f"tp*pp*cp={tp * pp * cp} does not divide {devices} devices.")
    scope, impl = row.text("cuda_graph_scope"), row.text("cuda_graph_impl")
    if impl == "full_iteration":
        scope = impl
    elif impl == "none":
        scope = ""
    overlap = {"True": True, "False": False}.get(row.text("a2a_overlap"))
    facts = {"pp_layout": row.text("pp_layout")}
    layout, assumed = layout_of(SOURCE, facts, a, pp, vpp)
    sharded = row.text("model") in _FSDP_WITHOUT_PIPELINE and pp == 1
    hardware, _ = hardware_of(row.text("gpu"))
    notes = (f"sequences of {seq_len} tokens taken", assumed)
    return PublishedRun(
        row=place,
        source=SOURCE,
        url=f"{URL}/blob/{row.text('tag')}/{row.text('file')}",
        model=row.text("model"),
        year=2026,
        architecture=a,
        hardware=hardware,
        devices=devices,
        tp=tp,
        etp=row.whole("etp") or 1,
        ep=(row.whole("ep") or 1) if a.n_experts else 1,
        pp=pp,
        vpp=vpp if pp > 1 else 1,
        cp=cp,
        dp=devices // (tp * pp * cp),
        micro_batch=micro,
        layout=layout,
        recompute="selective" if modules else "none",
        recompute_modules=modules,
        recompute_layers=None,
        precision=_precision(row.text("precision")),
        precision_label=row.text("precision"),
        sequence_parallel=True if tp > 1 else None,
        zero_stage=3 if sharded else 1,
        zero_group=None,
        global_batch=batch,
        seq_len=seq_len,
        step_time_s=None,
        metric="status",
        counted=CountedFlops.MEGATRON,
        disagreements=(),
        oom=False,
        memory_bytes=None,
        memory_kind=None,
        phase=phase,
        container=CONTAINERS.get(row.text("tag")),
        dispatcher=row.text("dispatcher") or None,
        cuda_graph_scope=scope or None,
        recipe=row.text("name"),
        a2a_overlap=overlap,
        balanced_routing=True,
        capacity_factor=None,
        offload=False,
        optimizer=Optimizer.ADAMW,
        facts={},
        assumptions=tuple(note for note in notes if note),
    )


def _case(row: _Cells, place: int) -> ExpertCase:
    run = _run(row, place)
    broken = check(run.architecture, run.plan, run.cluster, run.batch)
    if broken:
        raise PerfmodelError(f"The layout is not legal: {broken[0].message}")
    profile = profile_of(run.model_copy(update={"source": "Megatron-Bridge"}))
    if profile is None:
        raise PerfmodelError(f"No stack profile is fitted to recipes on {run.hardware}.")
    model = StepModel(run.architecture, run.plan, run.cluster, run.batch, profile)
    weights = max(model.stage(i).weights for i in range(run.pp))
    room = run.cluster.device_memory_bytes
    if weights > room:
        raise PerfmodelError(
            f"Weights alone would take {weights / 1e9:.0f} GB of {room / 1e9:.0f} GB: the recipe "
            "takes degrees over from another, which the table does not resolve."
        )
    return ExpertCase(run=run, stack=profile.name, rows=(place,), tag=row.text("tag"))


def _same(case: ExpertCase) -> tuple[object, ...]:
    run = case.run
    return (run.model, run.phase, run.hardware, run.devices, run.batch, run.plan)


def expert_cases(path: Path | None = None, tag: str | None = None) -> ExpertTable:
    """Read the shipped table of recipes, or another with its header.

    Rows of one model, phase, device, number of devices, precision, batch and layout are one case;
    the switches of its stack are those of the first row, of the newest tag. With `tag`, the rows
    of that tag alone.

    Raises
    ------
    PerfmodelError
        The file cannot be read, or lacks a column. A row that cannot be priced is not an error:
        it is among the excluded.
    """
    cases: dict[tuple[object, ...], ExpertCase] = {}
    excluded: list[ExcludedRecipe] = []
    for place, cells in enumerate(csv_rows(path, TABLE), start=1):
        missing = [name for name in COLUMNS if name not in cells]
        if missing:
            raise PerfmodelError(f"The table of recipes lacks the columns {', '.join(missing)}.")
        row = _Cells(cells)
        if tag is not None and row.text("tag") != tag:
            continue
        try:
            found = _case(row, place)
        except ValidationError as error:
            reason = f"A value is not possible: {explain(error)}."
        except PerfmodelError as error:
            reason = str(error)
        else:
            first = cases.setdefault(_same(found), found)
            if first is not found:
                update = {"rows": (*first.rows, place)}
                cases[_same(found)] = first.model_copy(update=update)
            continue
        name, model = row.text("name"), row.text("model")
        excluded.append(ExcludedRecipe(row=place, name=name, model=model, reason=reason))
    return ExpertTable(tuple(cases.values()), tuple(excluded))
