"""The step time of a published run from whatever its source measured.

A source's TFLOP/s or MFU is turned back into seconds with the FLOPs that this source counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from perfmodel.architecture import Architecture, MfuConvention, ParameterConvention
from perfmodel.errors import PerfmodelError
from perfmodel.validation.published_notes import number

__all__ = [
    "CountedFlops",
    "Measured",
    "Timing",
    "counted_flops",
    "flops_per_token",
    "step_times",
    "timing_of",
]

TOLERANCE = 0.03
"""Two figures of one row that differ by more contradict each other [-]."""


class CountedFlops(StrEnum):
    """What a source counts for one token.

    ``MEGATRON``: matrix products, the causal half of attention, logits (:mod:`perfmodel.flops`).
    ``FULL``: the same with all of attention, as of NeMo 2.0 and arXiv 2205.05198, eq. 7.
    ``RECOMPUTE``: ``FULL`` and once more the forward pass of the layers, which full recomputation
    repeats: ``96 l h^2 (1 + s/6h + V/16lh)``, arXiv 2104.04473, eq. 3.
    ``BLOCKS``: ``96 l h^2`` alone, the first calculator of BigScience.
    ``PARAMETERS``: ``6 N`` with embeddings and all of attention, ``12 l h s`` (llm-foundry).
    """

    MEGATRON = "megatron"
    FULL = "full attention"
    RECOMPUTE = "full attention and recomputation"
    BLOCKS = "layers and recomputation"
    PARAMETERS = "parameters and full attention"


_BY_SOURCE: tuple[tuple[str, CountedFlops], ...] = (
    ("NeMo docs", CountedFlops.FULL),
    ("Narayanan", CountedFlops.RECOMPUTE),
    ("BigScience", CountedFlops.RECOMPUTE),
    ("InternEvo", CountedFlops.FULL),
    ("llm-foundry", CountedFlops.PARAMETERS),
    ("Korthikanti", CountedFlops.FULL),
    ("MegaScale", CountedFlops.FULL),
    ("HF nanotron", CountedFlops.FULL),
)


def counted_flops(source: str, facts: Mapping[str, str], recompute: str | None) -> CountedFlops:
    """Return what a source counts; Megatron's count where it says nothing else."""
    found = next((c for prefix, c in _BY_SOURCE if source.startswith(prefix)), None)
    if found is CountedFlops.RECOMPUTE and facts.get("calculator") == "older":
        return CountedFlops.BLOCKS
    if source.startswith("InternEvo") and recompute == "full":
        return CountedFlops.RECOMPUTE
    return found or CountedFlops.MEGATRON


def flops_per_token(a: Architecture, seq_len: int, counted: CountedFlops) -> float:
    """Return the FLOPs that a source counts for one token [FLOP].

    Megatron's count is linear in the sequence where no layer has a window, so that all of
    attention at ``seq_len`` is the causal half at twice that length.
    """
    if counted is CountedFlops.MEGATRON:
        return float(a.flops_per_token(MfuConvention.MEGATRON, seq_len))
    if counted is CountedFlops.BLOCKS:
        return 96.0 * a.n_layers * a.d_model**2
    if counted is CountedFlops.PARAMETERS:
        stored = a.n_total(ParameterConvention.WITH_EMBEDDING)
        return 6.0 * stored + 12.0 * a.n_layers * a.d_model * seq_len
    if a.window is not None:
        raise PerfmodelError(f"{a.name} has a window: its {counted} FLOPs are not known.")
    full = float(a.flops_per_token(MfuConvention.MEGATRON, 2 * seq_len))
    if counted is CountedFlops.FULL:
        return full
    head = 6.0 * a.vocab_size * a.d_model
    return full + (full - head) / 3.0


class Measured(NamedTuple):
    """What a row needs for its times."""

    source: str
    metric: str
    value: float
    unit: str
    facts: Mapping[str, str]
    tokens: float  # of a step [-]
    n_gpus: int
    flops_per_token: float  # as the source counts [FLOP]
    peak_flops: float | None  # denominator of the source's MFU [FLOP/s]


def _total(facts: Mapping[str, str]) -> float | None:
    text = facts.get("tokens_per_s_total", "")
    found = number(facts, "tokens_per_s_total")
    return None if found is None else found * (1e3 if re.search(r"[0-9]k", text) else 1.0)


def step_times(m: Measured) -> dict[str, float]:
    """Return the step time by each figure of the row, best first [s].

    A time or a rate of tokens needs no count of FLOPs and comes before TFLOP/s, which come
    before MFU.
    """
    seconds = {"s": 1.0, "ms": 1e-3}.get(m.unit)
    figures: dict[str, float | None] = {
        "step_time": m.value * seconds if m.metric == "step_time" and seconds else None
    }
    figures |= {
        name: m.value if m.metric == name else number(m.facts, name)
        for name in ("tokens_per_s_per_gpu", "tflops_per_gpu")
    }
    mfu = m.value if m.metric == "MFU" else number(m.facts, "mfu_pct")
    work = m.tokens * m.flops_per_token / m.n_gpus
    total = _total(m.facts)
    rate, tflops = figures["tokens_per_s_per_gpu"], figures["tflops_per_gpu"]
    found = {
        "step_time": figures["step_time"],
        "tokens_per_s_per_gpu": m.tokens / m.n_gpus / rate if rate else None,
        "tokens_per_s_total": m.tokens / total if total else None,
        "tflops_per_gpu": work / (tflops * 1e12) if tflops else None,
        "MFU": work / (mfu / 100.0 * m.peak_flops) if mfu and m.peak_flops else None,
    }
    return {name: value for name, value in found.items() if value}


class Timing(NamedTuple):
    """A step time, the figure that it comes from, and the figures that contradict it."""

    step_time_s: float
    metric: str
    disagreements: tuple[str, ...]


def timing_of(m: Measured) -> Timing:
    """Choose a row's step time.

    Raises
    ------
    PerfmodelError
        No figure of the row gives one.
    """
    found = step_times(m)
    if not found:
        raise PerfmodelError(f"The row has no time: its figure is {m.metric} in {m.unit or '-'}.")
    metric, seconds = next(iter(found.items()))
    against = tuple(
        f"{name} gives {other:.4g} s, {100.0 * (other / seconds - 1.0):+.1f}% of {metric}"
        for name, other in found.items()
        if abs(other / seconds - 1.0) > TOLERANCE
    )
    return Timing(seconds, metric, against)
