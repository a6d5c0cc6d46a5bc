"""Cells of a published table in one vocabulary: device, precision, recomputation, memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

from perfmodel.errors import PerfmodelError
from perfmodel.validation.published_notes import number

__all__ = [
    "Memory",
    "MemoryKind",
    "PrecisionName",
    "RecomputeCell",
    "RecomputeName",
    "hardware_of",
    "memory_of",
    "precision_of",
    "recompute_of",
]

PrecisionName: TypeAlias = Literal["bf16", "fp16", "fp8", "fp8-block", "mxfp8", "nvfp4"]
RecomputeName: TypeAlias = Literal["none", "selective", "full"]
MemoryKind: TypeAlias = Literal["allocated", "reserved", "device"]

GIB = 2.0**30
GB = 1e9

_PACKS: Mapping[str, str] = {
    "a100-80gb": "a100-80",
    "a100_80gb": "a100-80",
    "a100-80gb-sxm4": "a100-80",
    "a100_40gb": "a100-40",
    "h100": "h100",
    "h100_80gb": "h100",
    "h200": "h200",
    "h800": "h800",
    "b200": "b200",
    "b300": "b300",
    "gb200": "gb200",
    "gb300": "gb300",
    "mi300x": "mi300x",
    "mi355x": "mi355x",
}

_TAKEN_FOR: Mapping[str, tuple[str, str]] = {
    "a100": ("a100-80", "A100 whose memory is not stated taken for 80 GB"),
    "nvidia ampere (a100-class)": ("a100-80", "Ampere GPU whose name is not stated taken for A100"),
    "h100 (96gb, 500w)": ("h100", "H100 of 96 GB at 500 W taken for the 80 GB SXM"),
}

_WITHOUT_PACK: tuple[tuple[str, str], ...] = (
    ("tpu", "there is no hardware pack of TPUs"),
    ("a100-pcie", "there is no hardware pack of A100 on PCIe"),
    ("a800", "there is no hardware pack of A800"),
    ("amd instinct", "the source does not name the AMD device"),
    ("mi300", "there is no hardware pack of MI300, which may be MI300A or MI300X"),
)


def hardware_of(gpu: str) -> tuple[str, str | None]:
    """Return the hardware pack of a device, and what was assumed in choosing it.

    Raises
    ------
    PerfmodelError
        No pack describes the device.
    """
    name = gpu.strip().lower()
    if not name:
        raise PerfmodelError("The row does not state its device.")
    if name in _PACKS:
        return _PACKS[name], None
    if name in _TAKEN_FOR:
        return _TAKEN_FOR[name]
    for prefix, reason in _WITHOUT_PACK:
        if name.startswith(prefix):
            raise PerfmodelError(f"{gpu} is left out: {reason}.")
    raise PerfmodelError(f"{gpu} is left out: no hardware pack describes it.")


# What a source's rows ran in where they do not say, and whether it is said elsewhere: BigScience
# states fp16 until, and bf16 from, "Rebalancing layers" (02-28); InternEvo's configs say bfloat16.
_UNSTATED: tuple[tuple[str, PrecisionName, bool], ...] = (
    ("BigScience", "fp16", True),
    ("InternEvo", "bf16", True),
    ("vTrain", "fp16", False),
    ("Narayanan", "fp16", False),
    ("Korthikanti", "fp16", False),
)


def precision_of(
    label: str, source: str, hardware: str, facts: Mapping[str, str]
) -> tuple[PrecisionName, str | None]:
    """Return the precision of the matrix products, and what was assumed of it."""
    text = label.strip().lower()
    if not text:
        if source.startswith("BigScience") and facts.get("date") == "02-28":
            return "bf16", None
        for prefix, precision, stated in _UNSTATED:
            if source.startswith(prefix):
                return precision, None if stated else f"precision not stated: {precision} taken"
        return "bf16", "precision not stated: bf16 taken"
    if "nvfp4" in text:
        return "nvfp4", None
    if text in ("mxfp8", "fp8-mx"):
        return "mxfp8", None
    if "alternate granularity" in text:
        # MX scaling on Blackwell, blocks of 128 on Hopper, says the source of these rows.
        return ("fp8-block" if hardware in ("h100", "h200") else "mxfp8"), None
    if "fp8" in text:
        return ("fp8-block" if facts.get("scaling") == "block" else "fp8"), None
    if "bf16" in text:
        return "bf16", None
    if "fp16" in text:
        return "fp16", None
    raise PerfmodelError(f"precision={label!r} is not known.")


class RecomputeCell(NamedTuple):
    """What a row says of recomputation; None where it says nothing."""

    mode: RecomputeName | None
    modules: tuple[str, ...] | None
    layers: int | None


_ALIASES = {"norm": "layernorm", "act": "moe_act"}


def recompute_of(cell: str) -> RecomputeCell:
    """Read the recomputation of a row.

    Modules are Megatron-Core's ``recompute_modules``; ``full`` and ``none`` have an empty list,
    and a selective mode without a list, as of TorchTitan, has None.
    """
    text = cell.strip()
    if not text:
        return RecomputeCell(None, None, None)
    if text == "none":
        return RecomputeCell("none", (), None)
    full = re.fullmatch(r"full(?: \(([0-9]+) layers\))?", text)
    if full:
        return RecomputeCell("full", (), int(full[1]) if full[1] else None)
    if text.startswith("selective (attention)"):
        return RecomputeCell("selective", ("core_attn",), None)
    if text.startswith("selective"):
        return RecomputeCell("selective", None, None)
    modules = tuple(_ALIASES.get(name, name) for name in text.split(","))
    return RecomputeCell("selective", modules, None)


class Memory(NamedTuple):
    """The largest memory in use on a device [B], and who counted."""

    used_bytes: float
    kind: MemoryKind


_BY_KEY: tuple[tuple[str, float, MemoryKind], ...] = (
    ("peak_alloc_gib", GIB, "allocated"),
    ("peak_mem_gib", GIB, "reserved"),  # TorchTitan prints the allocator's reserved maximum
    ("peak_gb", GB, "allocated"),
)


def memory_of(source: str, facts: Mapping[str, str]) -> Memory | None:
    """Return the measured peak of a row.

    BigScience read ``nvidia-smi``, whose unit is MiB: a device's memory, CUDA's own included.
    nanotron prints GiB under the name GB (its ``log_throughput``).
    """
    for key, unit, kind in _BY_KEY:
        found = number(facts, key)
        if found is not None:
            return Memory(found * unit, kind)
    found = number(facts, "peak_alloc_gb")
    if found is not None:
        return Memory(found * (GIB if source.startswith("HF nanotron") else GB), "allocated")
    found = number(facts, "peak_mem_gb")
    if found is not None:
        on_device = source.startswith("BigScience")
        return Memory(found * (GIB if on_device else GB), "device" if on_device else "allocated")
    return None
