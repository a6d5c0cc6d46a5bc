"""What holds for every row of a source: its year, sharding, and sequence parallelism."""

from __future__ import annotations

import re
from collections.abc import Mapping

from perfmodel.validation.published_notes import number

__all__ = ["sequence_parallel_of", "year_of", "zero_stage_of"]

_YEARS: tuple[tuple[str, int], ...] = (
    ("Narayanan", 2021),
    ("Korthikanti", 2022),
    ("BigScience", 2022),
    ("vTrain", 2023),
    ("InternEvo", 2023),
    ("llm-foundry", 2023),
    ("MegaScale-MoE", 2025),
    ("MegaScale", 2023),
    ("Llama 3 Herd", 2024),
    ("NeMo docs v2.0", 2024),
    ("NeMo docs", 2025),
    ("TorchTitan", 2024),
    ("HF nanotron", 2025),
    ("MoE Parallel Folding", 2025),
    ("SimuMax", 2026),
)
_LATEST_YEAR = 2026

_SHARDED: tuple[tuple[str, int], ...] = (
    ("Megatron-Bridge", 1),
    ("Megatron-LM dev", 1),
    ("Megatron-MoE-ModelZoo", 1),
    ("NeMo docs", 1),
    ("NeMo Automodel", 3),
    ("TorchTitan", 3),
    ("llm-foundry", 3),
    ("InternEvo", 1),
    ("BigScience", 1),
    ("SimuMax", 1),
    ("MoE Parallel Folding", 1),
    ("Llama 3 Herd", 2),  # shards are not gathered again for the backward pass: section 3.3.2
)
"""ZeRO stage of a source's rows unless a row says otherwise."""

_WITHOUT_SEQUENCE_PARALLELISM = ("Narayanan", "BigScience", "vTrain", "InternEvo")
"""From before arXiv 2205.05198, on code without it, or (InternEvo) in the mode ``mtp``."""

_UNKNOWN_SEQUENCE_PARALLELISM = ("MegaScale",)


def year_of(source: str, facts: Mapping[str, str]) -> int:
    """Return the year of a run, that of its container's release where it has one."""
    release = re.fullmatch(r"([0-9]{2})\.[0-9.]+", facts.get("container", ""))
    if release:
        return 2000 + int(release[1])
    return next((year for prefix, year in _YEARS if source.startswith(prefix)), _LATEST_YEAR)


def zero_stage_of(source: str, facts: Mapping[str, str]) -> int | None:
    """Return the ZeRO stage of a run; None where its source does not say."""
    for key in ("zero", "zero_stage"):
        found = number(facts, key)
        if found is not None:
            return int(found)
    sharding = facts.get("sharding")
    if sharding is not None:
        return {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2}.get(sharding)
    fully = facts.get("fsdp", "no").lower() not in ("no", "false")
    if fully or facts.get("method", "").startswith("FSDP"):
        return 3
    return next((stage for prefix, stage in _SHARDED if source.startswith(prefix)), None)


def sequence_parallel_of(source: str, facts: Mapping[str, str], tp: int) -> bool | None:
    """Say whether a run splits tokens over TP; None where it cannot, or does not say."""
    if tp == 1 or source.startswith(_UNKNOWN_SEQUENCE_PARALLELISM):
        return None
    if "tp_mode" in facts:
        return facts["tp_mode"] == "REDUCE_SCATTER"
    if facts.get("sequence_parallel") == "no":
        return False
    return not source.startswith(_WITHOUT_SEQUENCE_PARALLELISM)
