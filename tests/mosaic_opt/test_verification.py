"""A document that is what it says is verified, and one with any field changed is not."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from mosaic_opt.backends.base import Limits, Progress
from mosaic_opt.backends.branch import BranchAndBound
from mosaic_opt.backends.enumerate import Enumerate
from mosaic_opt.bounds import BlockBounds
from mosaic_opt.certificate import Certificate, certify
from mosaic_opt.cli import app
from mosaic_opt.envelope import parse_envelope
from mosaic_opt.errors import EnvelopeError, MosaicError
from mosaic_opt.outcome import Discarded
from mosaic_opt.problem import Problem
from mosaic_opt.result import Solution
from mosaic_opt.solver import assemble, solve
from mosaic_opt.verification import MOST_DIFFERENCES, claims_of, verify

from .strategies import small_envelopes, solved_tiny, tiny, tiny_envelope

Place = tuple[str | int, ...]
NOT_COMPARED = {("provenance", "backend"), ("provenance", "versions")}
BACKENDS = (Enumerate(workers=1), BranchAndBound(workers=1))


@cache
def document(backend: str = "branch") -> str:
    """Solve an envelope of which every kind of outcome remains: solve once, keep the JSON."""
    spec = tiny(
        cluster={"hardware": "p6-b200", "nodes": 4},
        window_days=10.0,
        tokens={"min_tokens_per_parameter": 50.0},
        memory_fraction=0.03,
        mfu_error=0.4,
        candidates={
            "kind": "ladder",
            "q": [1, 2, 3, 4],
            "n_experts": [8, 32, 64],
            "top_k": [1, 4],
            "expert_split": [1, 4],
        },
    )
    searcher = BranchAndBound(workers=1) if backend == "branch" else Enumerate(workers=1)
    return solve(parse_envelope(spec), backend=searcher).to_json()


def leaves(value: Any, at: Place = ()) -> Iterator[Place]:
    """List the places of everything that is no mapping, lists and what is in them."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from leaves(part, (*at, key))
        return
    yield at
    if isinstance(value, list):
        for i, part in enumerate(value):
            yield from leaves(part, (*at, i))


def changed(value: Any) -> Any:
    """Return something else of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * (1.0 + 1e-6) if value else 1e-6
    if isinstance(value, str):
        return f"{value}, or not"
    if isinstance(value, list):
        return value[:-1] if value else [1]
    return 1.0


def with_change(text: str, place: Place) -> str:
    whole = json.loads(text)
    part = whole
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = changed(part[place[-1]])
    return json.dumps(whole)


def is_refused(text: str, **how: Any) -> bool:
    """Say whether a document is not read, or not verified."""
    try:
        found = verify(Solution.from_json(text), workers=1, **how)
    except MosaicError:
        return True
    assert found.verified == (found.certified and not found.differences)
    return not found.verified


def places(*under: str) -> list[Place]:
    """List the places of the document under some of its fields; all unless given."""
    whole = json.loads(document())
    return [
        place
        for place in leaves(whole)
        if place[:2] not in NOT_COMPARED and (not under or place[0] in under)
    ]


# ---------------------------------------------------------------- what is true


@pytest.mark.parametrize("backend", ["branch", "enumerate"])
@pytest.mark.parametrize("how", [{}, {"sample": 0}, {"sample": 3, "seed": 5}], ids=str)
def test_a_solution_is_verified(backend: str, how: dict[str, Any]) -> None:
    solution = Solution.from_json(document(backend))
    found = verify(solution, **how)
    assert found.verified
    assert found.differences == ()
    assert found.mode == ("sample" if how else "full")
    assert found.checked == found.candidates if not how else found.checked < found.candidates


def test_the_document_has_every_kind_of_outcome() -> None:
    solution = Solution.from_json(document())
    assert len(solution.near_ties) > 1
    assert solution.near_feasible
    assert {r.reason for r in solution.rejected} == {"memory", "tokens"}
    assert any(r.layouts.priced for r in solution.ruled_out)
    assert any(not r.layouts.priced for r in solution.ruled_out)
    assert any(c.layouts.discarded for c in solution.candidates)


@settings(max_examples=60)
@given(small_envelopes(), st.sampled_from(BACKENDS))
def test_every_solution_is_verified(spec: dict[str, Any], backend: Any) -> None:
    solution = solve(parse_envelope(spec), backend=backend)
    found = verify(Solution.from_json(solution.to_json()), workers=2)
    assert found.verified, found.differences


def test_other_versions_and_another_name_of_the_backend_are_no_difference() -> None:
    whole = json.loads(document())
    whole["provenance"]["versions"] = {"numpy": "9.9"}
    whole["provenance"]["backend"] = "by hand"
    assert verify(Solution.from_json(json.dumps(whole))).verified


@pytest.mark.parametrize("by", [1.0 + 1e-15, 1.0 - 1e-15, 1.0 + 1e-13, 1.0 - 1e-13])
def test_the_rounding_of_another_machine_is_no_difference(by: float) -> None:
    """Every number of the document, cutoffs of bounds among them."""

    def jittered(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: jittered(part) for key, part in value.items()}
        if isinstance(value, list):
            return [jittered(part) for part in value]
        return value * by if isinstance(value, float) else value

    whole = json.loads(document())
    envelope = whole["provenance"]
    whole = jittered(whole) | {"provenance": envelope}
    assert verify(Solution.from_json(json.dumps(whole))).verified


# ---------------------------------------------------------------- what is not


@pytest.mark.parametrize("how", [{}, {"sample": 0}], ids=["full", "sample"])
def test_every_field_of_the_certificate_counts(how: dict[str, Any]) -> None:
    of_certificate = places("certificate", "bounds", "counts", "status", "near_tie_rule")
    assert len(of_certificate) > 60
    for place in of_certificate:
        assert is_refused(with_change(document(), place), **how), place


@settings(max_examples=150)
@given(st.data())
def test_every_field_of_the_document_counts(data: st.DataObject) -> None:
    place = data.draw(st.sampled_from(places()))
    assert is_refused(with_change(document(), place)), place


@settings(max_examples=40)
@given(st.data())
def test_every_field_of_an_exhaustive_document_counts(data: st.DataObject) -> None:
    whole = json.loads(document("enumerate"))
    kept = [place for place in leaves(whole) if place[:2] not in NOT_COMPARED]
    place = data.draw(st.sampled_from(kept))
    assert is_refused(with_change(document("enumerate"), place)), place


def test_a_better_candidate_left_out_is_found_missing() -> None:
    """Drop the optimum from the document, and tell the rest of the story without it."""
    solution = Solution.from_json(document("enumerate"))
    rest = solution.candidates[1:]
    without = solution.model_copy(update={"candidates": rest})
    found = verify(without)
    assert not found.verified
    assert not found.certified


def test_a_search_that_was_stopped_is_no_certificate() -> None:
    def stop(state: Progress) -> None:
        if state.done >= 3:
            raise KeyboardInterrupt

    solution = solve(tiny_envelope(), backend=Enumerate(workers=1), progress=stop)
    found = verify(solution)
    assert (found.verified, found.certified, found.differences) == (False, False, ())
    never = solve(tiny_envelope(), backend="branch", limits=Limits(time_s=1e-9))
    assert not verify(never).verified


def test_the_differences_are_few_and_say_where() -> None:
    whole = json.loads(document("enumerate"))
    for candidate in whole["candidates"]:
        for name in ("loss", "tokens", "mfu", "delta_loss", "memory_bytes", "step_time_s"):
            candidate[name] = changed(candidate[name])
    found = verify(Solution.from_json(json.dumps(whole)))
    assert 0 < len(found.differences) <= MOST_DIFFERENCES
    assert any(d.where.endswith(".loss") for d in found.differences)
    one = verify(Solution.from_json(with_change(document(), ("bounds", "gap"))))
    assert [d.where for d in one.differences] == ["bounds.gap"]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("termination",), "foo"),
        (("termination",), "interrupted"),
        (("termination",), "time_limit"),
        (("ruled_out", 0, "layouts", "discarded"), 10**400),
        (("ruled_out", 0, "index"), 10**30),
        (("ruled_out", 0, "index"), -1),
        (("ruled_out", 0, "step_bound_s"), 0.0),
        (("candidates", 0, "step_time_s"), 0.0),
        (("candidates", 0, "index"), "0"),
        (("candidates", 0, "layouts", "cutoff_s"), -1.0),
        (("counts", "plans"), -1),
    ],
    ids=str,
)
def test_what_nothing_can_be_is_refused(place: Place, value: Any) -> None:
    whole = json.loads(document())
    part = whole
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    assert is_refused(json.dumps(whole))


def test_a_field_that_is_not_there_is_told_from_the_word_nothing() -> None:
    whole = json.loads(document())
    whole["provenance"]["note"] = "nothing"
    assert is_refused(json.dumps(whole))


@pytest.mark.parametrize("how", [{}, {"sample": 0}], ids=["full", "sample"])
@pytest.mark.parametrize("everything", [True, False])
def test_the_optimum_hidden_in_a_consistent_story_is_found(
    how: dict[str, Any], everything: bool
) -> None:
    """Put the optimum among those ruled out, and assemble the document anew from that."""
    solution = Solution.from_json(document())
    problem = Problem(parse_envelope(solution.provenance["envelope"]))
    claims = claims_of(problem, solution)
    optimum = claims.incumbent
    assert optimum is not None
    floors = BlockBounds(problem).floors(np.array([optimum.index]))[0]
    ahead = float(floors[floors > optimum.cutoff_s].min(initial=inf))
    gone = Discarded(optimum.index, optimum.cutoff_s, ahead, optimum.counts)
    if everything:
        gone = problem.discarded_whole(optimum.index, float(floors.min()))
    left = tuple(o for o in claims.outcomes if o.index != optimum.index)
    second = min((o for o in left if o.feasible), key=lambda o: (o.loss, o.index))
    forged = dataclasses.replace(
        claims,
        outcomes=left,
        discarded=tuple(sorted((*claims.discarded, gone), key=lambda d: d.index)),
        incumbent=second,
        dual_bound=second.loss,
    )
    checks = certify(problem, forged).checks
    passed = tuple(check.model_copy(update={"passed": True}) for check in checks)
    told = assemble(problem, forged, Certificate(certified=True, checks=passed), "branch")
    assert told.status == "optimal"
    assert is_refused(told.to_json(), **how)


def test_another_pack_is_said_first() -> None:
    changed_hash = with_change(document(), ("provenance", "hardware", "sha256"))
    found = verify(Solution.from_json(changed_hash))
    assert [d.where for d in found.differences] == ["provenance.hardware.sha256"]
    assert found.checked == 0


@pytest.mark.parametrize("place", [("cluster", "hardware"), ("stack",), ("law",), ("window_days",)])
def test_an_envelope_that_cannot_be_read_is_a_sentence(place: Place) -> None:
    whole = json.loads(document())
    part = whole["provenance"]["envelope"]
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = "nobody-has-this"
    with pytest.raises(Exception, match=r"^[^\n]*\.$") as error:
        verify(Solution.from_json(json.dumps(whole)))
    assert isinstance(error.value, EnvelopeError) or "nobody-has-this" in str(error.value)


@pytest.mark.parametrize("workers", [0, -1])
def test_impossible_workers_are_refused(workers: int) -> None:
    with pytest.raises(MosaicError, match=f"workers={workers} must be at least 1; nearest: 1"):
        verify(solved_tiny(), workers=workers)


def test_a_sample_below_zero_is_refused() -> None:
    with pytest.raises(MosaicError, match="sample=-1 must be at least 0; nearest: 0"):
        verify(solved_tiny(), sample=-1)


# ---------------------------------------------------------------- the command


def run(*args: str) -> Any:
    return CliRunner().invoke(app, ["verify", *args])


def test_command_says_whether_it_is_verified(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(document())
    bad.write_text(with_change(document(), ("optimum", "loss")))
    found = run(str(good))
    assert found.exit_code == 0
    assert "tiny: VERIFIED, of the model" in found.output
    found = run(str(bad), "--sample", "2", "--seed", "3")
    assert found.exit_code == 1
    assert "NOT VERIFIED" in found.output
    assert "optimum.loss" in found.output
    found = run(str(good), "--json", "-")
    assert json.loads(found.output)["verified"] is True


def test_command_refuses_what_is_no_solution(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"schema_version": 1}')
    found = run(str(other))
    assert found.exit_code != 0
    assert isinstance(found.exception, MosaicError)
    assert "Not a solution" in str(found.exception)
    missing = run(str(tmp_path / "missing.json"))
    assert "cannot be read" in str(missing.exception)
