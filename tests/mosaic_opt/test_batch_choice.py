"""The global batch as a decision, held against solving each batch by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from mosaic_opt import batch_choice
from mosaic_opt.allocation.phases import phases
from mosaic_opt.allocation.variants import changed
from mosaic_opt.backends.base import Limits
from mosaic_opt.batch_choice import BatchChoice, at_batch, solve_batches
from mosaic_opt.cli import app
from mosaic_opt.envelope import Envelope, parse_envelope
from mosaic_opt.errors import MosaicError
from mosaic_opt.report import as_text
from mosaic_opt.report_batches import render_batches
from mosaic_opt.result import Solution, Status
from mosaic_opt.solver import solve
from mosaic_opt.verification_batches import verify_batches

from .strategies import tiny, tiny_envelope, tiny_ladder

CRITICAL = {"kind": "constant", "batch_tokens": 3e5, "reference_batch_tokens": 2e4}
BATCHES = [8, 16, 32, 64, 256]
CHOICE: dict[str, Any] = {
    "global_batches": BATCHES,
    "critical_batch": CRITICAL,
    "candidates": tiny_ladder(q=[2]),
}


def choice_envelope(**changes: Any) -> Envelope:
    return tiny_envelope(**(CHOICE | changes))


@pytest.fixture(scope="module")
def choice() -> BatchChoice:
    return solve_batches(choice_envelope())


def test_each_row_is_what_solve_finds_at_that_batch(choice: BatchChoice) -> None:
    assert [row.global_batch for row in choice.rows] == BATCHES
    for row, solution in zip(choice.rows, choice.solutions, strict=True):
        batch = {"global_batch": row.global_batch, "seq_len": 1024, "optimizer": "adamw"}
        by_hand = solve(choice_envelope(global_batches=None, batch=batch))
        assert solution == by_hand
        assert by_hand.optimum is not None
        assert row.loss == by_hand.optimum.loss
        assert row.plan == by_hand.optimum.plan
        assert row.efficiency == by_hand.optimum.token_efficiency
        assert by_hand.certificate.certified
        assert by_hand.counts.layouts == solution.counts.layouts


def test_the_best_batch_has_the_least_loss_and_it_is_neither_end(choice: BatchChoice) -> None:
    losses = {row.global_batch: row.loss for row in choice.rows}
    assert choice.best_batch == min(losses, key=lambda b: losses[b] or 0.0)
    assert choice.status is Status.OPTIMAL
    assert choice.best is not None
    assert choice.best.optimum is not None
    assert choice.best.optimum.loss == min(v for v in losses.values() if v is not None)
    # idle stages make small batches slow, and the critical batch makes large ones wasteful
    assert BATCHES[0] < choice.best_batch < BATCHES[-1]
    assert choice.gain == losses[32] - losses[choice.best_batch]
    assert all((row.delta_loss or 0.0) >= 0.0 for row in choice.rows)
    assert [row.global_batch for row in choice.rows if row.delta_loss == 0.0] == [choice.best_batch]


def test_near_ties_are_what_the_error_of_mfu_moves(choice: BatchChoice) -> None:
    assert choice.best is not None
    tolerance = choice.best.near_tie_rule.loss_tolerance
    assert tolerance is not None
    for row in choice.rows:
        assert row.near_tie == (row.delta_loss is not None and row.delta_loss <= tolerance)


def test_a_larger_critical_batch_never_asks_for_a_smaller_batch() -> None:
    found = [
        solve_batches(choice_envelope(critical_batch=CRITICAL | {"batch_tokens": c})).best_batch
        for c in (1e3, 1e5, 1e6, 1e9)
    ]
    assert None not in found
    assert found == sorted(found, key=lambda b: b or 0)
    assert found[0] < found[-1]  # type: ignore[operator]


def test_one_batch_is_that_envelope_solved() -> None:
    (solution,) = solve_batches(choice_envelope(global_batches=[32])).solutions
    assert solution == solve(choice_envelope(global_batches=None))


def test_json_round_trip_and_order_of_the_list(choice: BatchChoice) -> None:
    assert BatchChoice.from_json(choice.to_json()) == choice
    again = solve_batches(choice_envelope(global_batches=[*BATCHES[::-1], 32]))
    assert again.rows == choice.rows
    with pytest.raises(MosaicError, match="Not a choice of a batch"):
        BatchChoice.from_json("{}")


def test_a_batch_without_an_answer_has_an_empty_row() -> None:
    plans = {"tp": [1], "cp": [1], "pp": [1], "ep": [1], "micro_batch": [4], "recompute": ["full"]}
    found = solve_batches(choice_envelope(global_batches=[16, 32], plans=plans))  # dp=8: 16 < 8*4
    empty, full = found.rows
    assert (empty.status, empty.loss, empty.plan, empty.near_tie) == (
        Status.INFEASIBLE,
        None,
        None,
        False,
    )
    assert found.best_batch == full.global_batch == 32
    assert found.status is Status.OPTIMAL
    none = solve_batches(choice_envelope(memory_fraction=1e-6))
    assert (none.status, none.best_batch, none.gain, none.best) == (
        Status.INFEASIBLE,
        None,
        None,
        None,
    )
    assert "No batch has an answer." in as_text(render_batches(none), 160)


def test_what_answers_for_one_batch_refuses_several() -> None:
    envelope = choice_envelope()
    for ask in (lambda: solve(envelope), lambda: phases(envelope)):
        with pytest.raises(MosaicError, match="global_batches lists several batches"):
            ask()
    with pytest.raises(MosaicError, match="global_batches is missing"):
        solve_batches(tiny_envelope())
    one = at_batch(envelope, 64)
    assert (one.batch.global_batch, one.global_batches) == (64, None)
    assert changed(one, batch=envelope.batch) == parse_envelope(
        tiny(**(CHOICE | {"global_batches": None}))
    )


def test_an_interrupt_keeps_the_batches_that_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def interrupted(envelope: Envelope, **options: Any) -> Solution:
        asked.append(envelope.batch.global_batch)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return solve(envelope, **options)

    monkeypatch.setattr(batch_choice, "solve", interrupted)
    found = solve_batches(choice_envelope())
    assert [row.global_batch for row in found.rows] == BATCHES[:2]
    assert found.not_reached == tuple(BATCHES[2:])
    assert found.status is Status.FEASIBLE
    assert "Not reached: 32, 64, 256." in as_text(render_batches(found), 160)


def test_an_interrupted_search_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(envelope: Envelope, **options: Any) -> Solution:
        solution = solve(envelope, **options)
        return solution.model_copy(update={"termination": "interrupted", "status": "feasible"})

    monkeypatch.setattr(batch_choice, "solve", stopped)
    found = solve_batches(choice_envelope())
    assert found.not_reached == tuple(BATCHES[1:])
    assert found.status is Status.FEASIBLE


def test_a_limit_is_for_each_batch_and_the_answer_is_then_not_proved() -> None:
    started: list[int] = []
    found = solve_batches(
        choice_envelope(), limits=Limits(time_s=1e-9), started=lambda b: started.append(b)
    )
    assert started == BATCHES
    assert found.not_reached == ()
    assert found.status is Status.FEASIBLE
    assert all(s.termination == "time_limit" for s in found.solutions)


# ---------------------------------------------------------------- the command


def test_the_command_solves_each_batch(tmp_path: Path, choice: BatchChoice) -> None:
    file, out = tmp_path / "e.yaml", tmp_path / "e.json"
    file.write_text(yaml.safe_dump(tiny(**CHOICE)), "utf-8")
    done = CliRunner().invoke(app, ["solve", str(file), "--json", str(out)])
    assert done.exit_code == 0, done.output
    page = " ".join(done.output.split())
    assert "tiny: 5 global batches, OPTIMAL" in page
    assert f"At a global batch of {choice.best_batch}: tiny: OPTIMAL" in page
    assert f"{choice.best_batch} *" in page
    assert f"the best one gains {choice.gain:.4f} nats." in page
    assert BatchChoice.from_json(out.read_text("utf-8")).rows == choice.rows
    assert json.loads(out.read_text("utf-8"))["schema_version"] == 1
    bare = tmp_path / "bare.yaml"
    bare.write_text(yaml.safe_dump(tiny(**(CHOICE | {"memory_fraction": 1e-6}))), "utf-8")
    assert CliRunner().invoke(app, ["solve", str(bare)]).exit_code == 1


# ---------------------------------------------------------------- verified


@pytest.mark.parametrize("backend", ["enumerate", "branch"])
def test_a_choice_is_verified(backend: str) -> None:
    choice = solve_batches(choice_envelope(), backend=backend)
    found = verify_batches(BatchChoice.from_json(choice.to_json()))
    assert found.verified
    assert len(found.solutions) == len(BATCHES)
    assert verify_batches(choice, sample=2).verified


def test_every_field_of_a_choice_counts(choice: BatchChoice) -> None:
    whole = json.loads(choice.to_json())
    for key in set(whole) - {"solutions", "schema_version"}:
        changed = dict(whole)
        value = changed[key]
        if isinstance(value, list):
            changed[key] = [*value, value[0]] if value else [7]
        elif isinstance(value, str):
            changed[key] = "unknown"
        else:
            changed[key] = (value or 0) + 1
        assert not is_verified(changed), key
    for row in range(len(whole["rows"])):
        for key, value in whole["rows"][row].items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                changed = json.loads(choice.to_json())
                changed["rows"][row][key] = value * 2 + 1
                assert not is_verified(changed), key
    changed = json.loads(choice.to_json())
    changed["solutions"][0]["optimum"]["loss"] *= 1.001
    assert not is_verified(changed)


def test_solutions_of_two_envelopes_are_no_choice(choice: BatchChoice) -> None:
    other = solve_batches(choice_envelope(window_days=2.0))
    mixed = choice.model_copy(update={"solutions": (other.solutions[0], *choice.solutions[1:])})
    found = verify_batches(mixed)
    assert not found.verified
    assert any("window_days" in d.where for d in found.differences)


def is_verified(document: dict[str, Any]) -> bool:
    try:
        return verify_batches(BatchChoice.from_json(json.dumps(document))).verified
    except MosaicError:
        return False


def test_the_command_verifies_a_choice(choice: BatchChoice, tmp_path: Path) -> None:
    file = tmp_path / "choice.json"
    file.write_text(choice.to_json())
    ran = CliRunner().invoke(app, ["verify", str(file)])
    assert ran.exit_code == 0
    assert f"VERIFIED, of the model, at {len(BATCHES)} batches" in ran.output
    whole = json.loads(choice.to_json())
    whole["best_batch"] = BATCHES[0]
    file.write_text(json.dumps(whole))
    ran = CliRunner().invoke(app, ["verify", str(file), "--json", "-"])
    assert ran.exit_code == 1
    assert json.loads(ran.output)["verified"] is False
