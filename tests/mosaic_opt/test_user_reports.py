"""Questions of users of other tools about whole decisions; ``docs/reports.md`` lists all."""

from __future__ import annotations

import json

import pytest

from mosaic_opt import Envelope, solve
from mosaic_opt.result import Status
from perfmodel import catalogue

from .strategies import tiny_envelope

DEEPSEEK = json.loads(catalogue["DeepSeek-V3"].model_dump_json())


def test_report_60_what_does_not_fit_has_no_answer_but_what_is_missing() -> None:
    """DeepSeek-V3 over two H100: no number in silence, and the degree that would do by search."""
    spec = {
        "candidates": {"kind": "explicit", "models": [DEEPSEEK]},
        "batch": {"global_batch": 64, "seq_len": 4096},
        "plans": {"tp": [2], "micro_batch": [1], "recompute": ["full"]},
    }
    none = solve(tiny_envelope(cluster="h100:2gpus", **spec))
    assert none.status is Status.INFEASIBLE
    assert none.optimum is None
    (rejected,) = none.rejected
    assert (rejected.reason, rejected.unit) == ("memory", "B")
    assert rejected.shortfall is not None
    assert rejected.shortfall > 5e12  # two devices hold 0.17 of the 8 TB that it takes
    assert "GB short on every device" in rejected.detail


@pytest.mark.parametrize(("fraction", "admitted"), [(1.0, True), (0.92, False)])
def test_report_61_a_plan_at_the_last_byte_is_refused_unless_asked_for(
    fraction: float, admitted: bool
) -> None:
    """179.7 of 180 GiB is no plan: the share of memory is a field, and 0.92 unless given."""
    assert Envelope.model_fields["memory_fraction"].default == 0.92
    base = tiny_envelope(memory_fraction=1.0)
    best = solve(base).optimum
    assert best is not None
    memory = best.memory_bytes * 180 / 179.7  # a device that the plan fills but for a hair
    cluster = {"hardware": "p6-b200", "nodes": 1, "memory_bytes": memory}
    (chosen,) = (m for m in base.candidates.architectures() if m.name == best.architecture["name"])
    one = {"kind": "explicit", "models": [json.loads(chosen.model_dump_json())]}
    envelope = tiny_envelope(cluster=cluster, memory_fraction=fraction, candidates=one)
    found = solve(envelope).optimum
    used = 0.0 if found is None else found.memory_bytes
    assert used <= fraction * memory
    assert (found is not None and found.plan == best.plan) is admitted
