"""The JSON documents: names that others rely on, numbers that JSON has, nothing lost."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from pydantic import ValidationError

from mosaic_opt.backends.base import Progress
from mosaic_opt.backends.enumerate import Enumerate
from mosaic_opt.envelope import parse_envelope
from mosaic_opt.errors import MosaicError
from mosaic_opt.result import SCHEMA_VERSION, Solution
from mosaic_opt.solver import solve
from perfmodel.cluster import Batch, Cluster
from perfmodel.ladders import ladder
from perfmodel.plan import Plan
from perfmodel.sources import Source
from perfmodel.step import check, estimate

from .strategies import (
    scoreboard,
    small_envelopes,
    solved_table3,
    solved_tiny,
    tiny_envelope,
)


def read(text: str) -> Any:
    """Read JSON as the standard has it: no NaN, no infinities."""

    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is not JSON")

    return json.loads(text, parse_constant=refuse)


def numbers(document: Any) -> Iterator[float]:
    if isinstance(document, dict):
        document = list(document.values())
    if isinstance(document, list):
        for item in document:
            yield from numbers(item)
    elif isinstance(document, float):
        yield document


def step_document() -> Any:
    cluster, batch = Cluster(hardware="p6-b200", nodes=2), Batch(global_batch=32, seq_len=1024)
    plan = Plan(tp=1, ep=8, pp=2, dp=8, micro_batch=1)
    return read(estimate(ladder(2, 8, 2, 1), plan, cluster, batch).model_dump_json())


# ---------------------------------------------------------------- names

OPTIMUM = {
    "architecture": {
        *("name", "n_layers", "d_model", "n_experts", "top_k", "expert_split"),
        *("n_active", "n_total", "sparsity"),
    },
    "plan": {
        *("tp", "etp", "ep", "pp", "vpp", "cp", "dp", "micro_batch", "recompute", "layout"),
        *("recompute_modules", "sequence_parallel", "zero", "optimizer_instances", "cp_comm"),
        "optimizer_offload",
    },
}


@pytest.mark.parametrize("solved", [solved_tiny, solved_table3])
def test_names_of_a_solution(solved: Any) -> None:
    document = read(solved().to_json())
    assert document["schema_version"] == SCHEMA_VERSION == 1
    assert document["status"] == "optimal"
    best = document["optimum"]
    for name in ("tokens", "loss", "mfu", "step_time_s", "memory_bytes"):
        assert isinstance(best[name], float)
        assert best[name] > 0.0
    for name, parts in OPTIMUM.items():
        assert parts <= set(best[name])
    assert set(best["plan"]) == OPTIMUM["plan"]
    assert set(document["bounds"]) == {"primal", "dual", "gap"}
    assert isinstance(document["near_ties"], list)
    assert document["near_ties"][0]["name"] == best["architecture"]["name"]
    counts = {"architectures", "plans", "priced", "discarded", "infeasible"}
    assert counts <= set(document["counts"])
    assert all(isinstance(value, int) for value in document["counts"].values())
    assert {"hardware", "stack", "law", "versions", "envelope"} <= set(document["provenance"])


def test_provenance_leads_back_to_the_envelope() -> None:
    document = read(solved_tiny().to_json())
    assert parse_envelope(document["provenance"]["envelope"]) == tiny_envelope()
    for rests_on in ("hardware", "stack", "law"):
        assert len(document["provenance"][rests_on]["sha256"]) == 64


def test_names_of_a_step() -> None:
    document = step_document()
    assert {
        *("step_time_s", "mfu", "mfu_convention", "tokens_per_s_per_device"),
        *("tflops_per_device", "memory_bytes", "memory_by_stage_bytes", "breakdown_s"),
        *("sources", "architecture", "plan"),
    } <= set(document)
    assert len(document["memory_by_stage_bytes"]) == 2
    assert max(document["memory_by_stage_bytes"]) == document["memory_bytes"]
    assert sum(document["breakdown_s"].values()) == pytest.approx(document["step_time_s"])
    assert set(document["breakdown_s"]) <= set(document["sources"])
    assert set(document["sources"].values()) <= {source.value for source in Source}
    assert set(document["plan"]) == OPTIMUM["plan"]


def test_names_of_a_violation() -> None:
    cluster, batch = Cluster(hardware="p6-b200", nodes=1), Batch(global_batch=32, seq_len=1024)
    broken = check(ladder(1, 4, 1, 1), Plan(tp=8, dp=1), cluster, batch)
    assert broken
    for violation in broken:
        names = {"rule", "message", "value", "limit", "nearest"}
        assert set(read(violation.model_dump_json())) == names


def test_names_of_a_scoreboard() -> None:
    document = read(scoreboard().model_dump_json())
    for sweep in document["sweeps"]:
        assert {"name", "rows", "mape", "bias", "spearman"} <= set(sweep)
    overall = {"mape_in_sample", "mape_leave_one_out", "mape_leave_one_sweep_out"}
    assert overall <= set(document["overall"])
    assert all({"value", "low", "high"} <= set(c) for c in document["constants"].values())
    assert document["schema_version"] == 1


# ---------------------------------------------------------------- numbers


def test_shares_are_fractions() -> None:
    solution = read(solved_table3().to_json())
    assert 0.0 < solution["optimum"]["mfu"] < 1.0
    assert 0.0 < solution["optimum"]["architecture"]["sparsity"] < 1.0
    assert all(0.0 < c["mfu"] < 1.0 and 0.0 <= c["sparsity"] < 1.0 for c in solution["candidates"])
    assert solution["near_tie_rule"]["mfu_error"] == 0.06
    assert 0.0 < step_document()["mfu"] < 1.0
    overall = read(scoreboard().model_dump_json())["overall"]
    assert all(0.0 < value < 1.0 for name, value in overall.items() if name != "rows")


@given(small_envelopes())
def test_every_number_is_json(spec: dict[str, Any]) -> None:
    text = solve(parse_envelope(spec), backend=Enumerate(workers=1)).to_json()
    assert all(math.isfinite(x) for x in numbers(read(text)))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_json_lacks_is_refused(value: float) -> None:
    document = solved_tiny().model_dump()
    document["bounds"]["dual"] = value
    with pytest.raises(ValidationError, match="finite number"):
        Solution.model_validate(document)


# ---------------------------------------------------------------- round trips


@given(small_envelopes())
def test_json_round_trip(spec: dict[str, Any]) -> None:
    solution = solve(parse_envelope(spec), backend=Enumerate(workers=1))
    again = Solution.from_json(solution.to_json())
    assert again == solution
    assert again.to_json() == solution.to_json()
    assert Solution.from_json(solution.to_json(indent=None)) == solution


def test_interrupted_solution_round_trips() -> None:
    def interrupt(state: Progress) -> None:
        raise KeyboardInterrupt

    solution = solve(tiny_envelope(memory_fraction=1e-6), progress=interrupt)
    document = read(solution.to_json())
    assert (document["status"], document["optimum"]) == ("unknown", None)
    assert document["bounds"]["primal"] is None
    assert Solution.from_json(solution.to_json()) == solution


def test_infeasible_bounds_are_null() -> None:
    document = read(solve(tiny_envelope(memory_fraction=1e-6)).to_json())
    assert document["status"] == "infeasible"
    assert document["bounds"] == {"primal": None, "dual": None, "gap": None}
    assert document["near_ties"] == document["candidates"] == []
    assert len(document["rejected"]) == 16
    for item in document["rejected"]:
        assert item["reason"] == "memory"
        assert item["shortfall"] > 0.0


def test_saved_file_is_the_document(tmp_path: Path) -> None:
    solved_tiny().save(tmp_path / "s.json")
    text = (tmp_path / "s.json").read_text("utf-8")
    assert text == solved_tiny().to_json() + "\n"
    assert Solution.from_json(text) == solved_tiny()


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "null", "{", '{"schema_version": 2}', "\0", "1" * 5000]
)
def test_other_text_is_no_solution(text: str) -> None:
    with pytest.raises(MosaicError, match=r"^Not a solution: .*\.$") as caught:
        Solution.from_json(text)
    assert "\n" not in str(caught.value)


def test_unknown_field_is_no_solution() -> None:
    document = read(solved_tiny().to_json())
    with pytest.raises(MosaicError, match=r"optimum\.note is not a field"):
        Solution.from_json(json.dumps(document | {"optimum": document["optimum"] | {"note": 1}}))


def test_solution_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        solved_tiny().status = "feasible"  # type: ignore[assignment]
