"""The command robust: page, JSON and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mosaic_opt.studies import draws
from mosaic_opt.studies.robust import robust
from mosaic_opt.studies.robust_result import Robust

from .strategies import Run, tiny_envelope, written


def test_a_page_and_the_document(mosaic: Run, tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    options = ("--draws", "20", "--seed", "3", "--workers", "2", "--json", str(target))
    code, out, err = mosaic("robust", written(tmp_path), *options)
    assert (code, err) == (0, "")
    found = Robust.from_json(target.read_text("utf-8"))
    assert found == robust(tiny_envelope(), draws=20, seed=3)
    assert "tiny: the choice in 20 draws, seed 3" in out
    assert found.most_probable is not None
    best = found.candidate(found.most_probable)
    assert best.name.removeprefix("ladder:") in out
    assert f"{100 * best.probability:.1f}+-{100 * best.probability_error:.1f}%" in out
    flat = " ".join(out.split())
    assert f"near-ties hold the optimum in {100 * found.near_ties_hold:.1f}% of the draws" in flat
    for words in ("Law [ASSUMED]", "Stack [FITTED]", "Error of the step time [ASSUMED]"):
        assert words in out


def test_json_alone_and_a_part_of_what_is_uncertain(mosaic: Run, tmp_path: Path) -> None:
    options = ("--draws", "5", "--uncertain", "stack", "--json", "-")
    code, out, _ = mosaic("robust", written(tmp_path), *options)
    assert code == 0
    document = json.loads(out)
    assert document["schema_version"] == 1
    assert document["rests_on"]["law"] is None
    assert Robust.from_json(out) == robust(tiny_envelope(), draws=5, uncertain=("stack",))


def test_nothing_feasible_is_exit_1(mosaic: Run, tmp_path: Path) -> None:
    code, out, _ = mosaic("robust", written(tmp_path, memory_fraction=0.001), "--draws", "2")
    assert code == 1
    assert "No candidate is feasible in any draw." in out


def test_an_interrupt_shows_what_was_done(
    mosaic: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(_: object, what: str, done: int, of: int) -> None:
        if what == "draws" and done >= 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(draws, "BLOCK", 2)
    monkeypatch.setattr("mosaic_opt.console.Bar.count", stop)
    code, out, _ = mosaic("robust", written(tmp_path), "--draws", "6")
    assert code == 130
    assert "the choice in 2 draws of the 6 asked for" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["robust"], "Give an envelope file or --example NAME"),
        (["robust", "FILE", "--draws", "0"], "draws=0 must be from 1"),
        (["robust", "FILE", "--uncertain", "law,luck"], "--uncertain 'luck' must be one or more"),
        (["robust", "FILE", "--seed", "-1"], "seed=-1 must be at least 0"),
        (["robust", "FILE", "--json", "/no/such/out"], "cannot be written"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(
    mosaic: Run, tmp_path: Path, arguments: list[str], words: str
) -> None:
    file = written(tmp_path)
    code, out, err = mosaic(*(file if a == "FILE" else a for a in arguments))
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert words in err
    assert len(err.splitlines()) == 1
