"""Envelopes to test with: one by hand, many by hypothesis, and the solutions that tests share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from mosaic_opt.backends.enumerate import Enumerate
from mosaic_opt.envelope import Envelope, example, parse_envelope
from mosaic_opt.problem import Problem
from mosaic_opt.result import Solution
from mosaic_opt.solver import solve
from perfmodel.validation.scoreboard import Scoreboard, validate

TINY: dict[str, Any] = {
    "name": "tiny",
    "cluster": {"hardware": "p6-b200", "nodes": 1},
    "window_days": 1.0,
    "batch": {"global_batch": 32, "seq_len": 1024, "optimizer": "adamw"},
    "law": "mosaic-table2",
    "candidates": {
        "kind": "ladder",
        "q": [1, 2],
        "n_experts": [4, 8],
        "top_k": [1, 2],
        "expert_split": [1, 2],
    },
    "tokens": {"kind": "saturate"},
    "plans": {"max_cp": 2, "micro_batch": [1, 2], "recompute": ["none", "full"]},
    "memory_fraction": 0.9,
}
"""16 candidates on one node."""


def tiny(**changes: Any) -> dict[str, Any]:
    """Return a copy of `TINY` with other values at the top level."""
    return copy.deepcopy(TINY) | changes


Run = Callable[..., tuple[int, str, str]]
"""The command line as a function of its words: exit code, stdout, stderr."""


def written(folder: Path, **changes: Any) -> str:
    file = folder / "tiny.yaml"
    file.write_text(yaml.safe_dump(tiny(**changes)), "utf-8")
    return str(file)


def tiny_envelope(**changes: Any) -> Envelope:
    return parse_envelope(tiny(**changes))


def tiny_problem(**changes: Any) -> Problem:
    return Problem(tiny_envelope(**changes))


def tiny_ladder(**changes: Any) -> dict[str, Any]:
    """Return the candidates of `TINY` with other values."""
    return copy.deepcopy(TINY["candidates"]) | changes


@cache
def solved_tiny() -> Solution:
    return solve(tiny_envelope())


@cache
def solved_table3() -> Solution:
    return solve(example("table3"), backend=Enumerate(workers=2))


@cache
def scoreboard() -> Scoreboard:
    """Score the shipped stack profile, with the left-out fits; some seconds."""
    return validate()


# ---------------------------------------------------------------- random small envelopes


def _some(*values: Any, at_most: int = 2) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.sampled_from(values), min_size=1, max_size=at_most, unique=True)


def ratios() -> st.SearchStrategy[float]:
    """Tokens per parameter, from what every window delivers to what few do."""
    return st.floats(0.0, 5.0).map(lambda x: 10.0**x)


@st.composite
def token_rules(draw: st.DrawFn) -> dict[str, Any]:
    rule: dict[str, Any] = {}
    if draw(st.booleans()):
        rule["max_tokens"] = 10.0 ** draw(st.floats(8.0, 12.0))
    bounds = sorted([draw(ratios()), draw(ratios())])
    if draw(st.booleans()):
        rule["min_tokens_per_parameter"] = bounds[0]
    if draw(st.booleans()):
        rule["max_tokens_per_parameter"] = bounds[1]
    if draw(st.booleans()):
        # one of them between the bounds: a rule that no window could meet is refused when read
        listed = [*draw(st.lists(ratios(), max_size=3)), draw(st.sampled_from(bounds))]
        return rule | {"kind": "grid", "tokens_per_parameter": listed}
    return rule | {"kind": "saturate"}


@st.composite
def plan_spaces(draw: st.DrawFn) -> dict[str, Any]:
    plans: dict[str, Any] = {
        "max_tp": draw(st.sampled_from([1, 2, 4])),
        "max_cp": draw(st.sampled_from([1, 2])),
        "micro_batch": draw(_some(1, 2, 3, 4)),
        "recompute": draw(_some("none", "selective", "super-selective", "full")),
    }
    if draw(st.booleans()):
        plans["etp"] = draw(_some(1, 2))
    if draw(st.booleans()):
        plans["vpp"] = draw(_some(1, 2))
    if draw(st.booleans()):
        plans["pp"] = draw(_some(1, 2, 4))
    return plans


@st.composite
def small_envelopes(draw: st.DrawFn) -> dict[str, Any]:
    """Few models on few devices, with a memory that some of them do not fit."""
    wide = draw(st.integers(0, 2)) == 0  # expert parallelism beyond what was measured
    if wide:
        nodes = 8
        experts = [64, 128]
        plans = {
            "tp": [1],
            "cp": [1],
            "pp": draw(_some(1, 2)),
            "ep": draw(st.sampled_from([[64], [8, 64], [32, 64], [8, 32]])),
            "micro_batch": [1],
            "recompute": draw(_some("none", "full")),
        }
    else:
        nodes = draw(st.sampled_from([1, 1, 2]))
        experts = [2, 4, 6, 8, 16]
        plans = draw(plan_spaces())
    return {
        "name": "random",
        "cluster": {"hardware": "p6-b200", "nodes": nodes},
        "window_days": 10.0 ** draw(st.floats(-2.0, 1.5)),
        "goodput": draw(st.floats(0.3, 1.0)),
        "batch": {
            "global_batch": draw(st.sampled_from([64, 128] if wide else [8, 24, 32, 48])),
            "seq_len": draw(st.sampled_from([256, 1024, 2048])),
            "optimizer": draw(st.sampled_from(["adamw", "muon", "scion"])),
            "precision": draw(st.sampled_from(["bf16", "bf16", "fp8", "nvfp4"])),
        },
        "candidates": {
            "kind": "ladder",
            "q": draw(_some(1, 2, 3, 4)),
            "n_experts": draw(_some(*experts)),
            "top_k": draw(_some(1, 2, 4, at_most=1)),
            "expert_split": draw(_some(1, 2, 4, at_most=1)),
            "min_sparsity": draw(st.sampled_from([0.0, 0.0, 0.5])),
        },
        "tokens": draw(token_rules()),
        "plans": plans,
        "memory_fraction": 10.0 ** draw(st.floats(-1.3 if wide else -2.0, 0.0)),
        "extrapolation": draw(st.sampled_from(["refuse", "flag"])),
    }
