"""The command compare: its page, its document and its exit codes."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from mosaic_opt.backends.base import Availability, Limits, Report
from mosaic_opt.backends.cpsat.search import CpSat
from mosaic_opt.backends.entries import BACKENDS
from mosaic_opt.backends.enumerate import Enumerate
from mosaic_opt.comparison import Comparison
from mosaic_opt.problem import Problem

from .distributions import BACKEND, install
from .strategies import Run, tiny


@pytest.fixture
def envelope(tmp_path: Path) -> str:
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(tiny()), "utf-8")
    return str(file)


def test_a_page_and_its_document(mosaic: Run, envelope: str, tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    code, out, err = mosaic("compare", envelope, "--json", str(target))
    assert (code, err) == (0, "")
    found = Comparison.model_validate_json(target.read_text("utf-8"))
    assert Comparison.model_validate_json(found.model_dump_json()) == found
    assert found.agreement.agree
    assert f"tiny: {len(BACKENDS)} backends on 16 candidates x {found.layouts} layouts" in out
    for row in found.rows:
        assert row.backend in out
        if row.incumbent is not None:
            assert f"{row.incumbent.loss:.6f}" in out
        assert row.effort is not None
        assert str(row.effort.priced) in out
    assert "AGREE: " in out
    assert "name one optimum; no bound is above the best incumbent." in out
    assert "Loss [FITTED]" in out


def test_the_document_alone(mosaic: Run, envelope: str) -> None:
    names = "cpsat,enumerate"
    code, out, err = mosaic("compare", envelope, "--backends", names, "--json", "-")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["schema_version"] == 1
    assert [row["backend"] for row in document["rows"]] == names.split(",")
    assert document["agreement"]["exact"] == names.split(",")


def test_nothing_feasible_is_an_answer(mosaic: Run, tmp_path: Path) -> None:
    file = tmp_path / "e.json"
    file.write_text(json.dumps(tiny(memory_fraction=1e-6)), "utf-8")
    code, out, _ = mosaic("compare", str(file), "--backends", "enumerate,cpsat")
    assert code == 0
    assert "AGREE: enumerate and cpsat find nothing feasible" in out


def test_one_exact_backend_alone_is_said_to_be(mosaic: Run, envelope: str) -> None:
    code, out, _ = mosaic("compare", envelope, "--backends", "enumerate,gp")
    assert code == 0
    assert "AGREE: enumerate alone is exact and done" in out
    code, out, _ = mosaic("compare", envelope, "--backends", "gp")
    assert code == 0
    assert "AGREE: no exact search is done" in out


@pytest.mark.parametrize(
    ("source", "code", "words"),
    [
        (
            BACKEND.replace(
                "return Enumerate(workers=1).search(problem, limits, progress=progress)",
                "raise RuntimeError('boom')",
            ),
            1,
            "mine failed: RuntimeError: boom.",
        ),
        ("import no_such_module", 0, "mine cannot run here: cli_mine_1:Mine fails with Module"),
    ],
)
def test_a_backend_of_another_distribution(
    mosaic: Run,
    envelope: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    code: int,
    words: str,
) -> None:
    module = f"cli_mine_{1 - code}"
    install(tmp_path, module, source)
    monkeypatch.syspath_prepend(str(tmp_path))
    got, out, err = mosaic("compare", envelope, "--backends", "enumerate,mine")
    monkeypatch.delitem(sys.modules, module, raising=False)
    assert (got, err) == (code, "")
    assert words in out
    assert "OPTIMAL" in out


def test_a_disagreement_is_one(mosaic: Run, envelope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Enumerate.search

    def lie(self: Enumerate, problem: Problem, limits: Limits, **options: Any) -> Report:
        report = honest(self, problem, limits, **options)
        last = max((o for o in report.outcomes if o.feasible), key=lambda o: o.loss)
        return dataclasses.replace(report, incumbent=last, dual_bound=last.loss)

    monkeypatch.setattr(Enumerate, "search", lie)
    code, out, err = mosaic("compare", envelope, "--backends", "enumerate,cpsat")
    assert (code, err) == (1, "")
    assert "DISAGREE (3 contradictions):" in out
    assert "enumerate fails the check incumbent_is_best" in out
    assert "enumerate names" in out
    assert "enumerate says that no candidate has a loss below" in out


def test_an_interrupt_shows_what_was_done(
    mosaic: Run, envelope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: Any, **__: Any) -> Report:
        raise KeyboardInterrupt

    monkeypatch.setattr(CpSat, "search", stopped)
    code, out, _ = mosaic("compare", envelope, "--backends", "enumerate,cpsat,gp")
    assert code == 130
    assert "OPTIMAL" in out
    assert "Interrupted: what was done is shown." in out
    assert "gp has no answer: interrupted before it was done." in out


def test_none_that_answers_is_one(
    mosaic: Run, envelope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Enumerate, "availability", classmethod(lambda cls: Availability.NOT_INSTALLED)
    )
    code, out, _ = mosaic("compare", envelope, "--backends", "enumerate")
    assert code == 1
    assert "enumerate cannot run here: not installed." in out
    assert "No backend gave an answer." in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["FILE", "--backends", "enumerate,x"], "There is no backend 'x'; there are enumerate"),
        (["FILE", "--backends", ","], "No backend is named"),
        (["FILE", "--backends", "gp,gp"], "Backend gp is named twice"),
        (["FILE", "--time-limit", "0"], "time_s=0 must be above 0"),
        (["FILE", "--example", "table5"], "Give an envelope file or --example NAME"),
        (["FILE", "--json", f"{os.sep}no{os.sep}such{os.sep}out"], "cannot be written"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(
    mosaic: Run, envelope: str, arguments: list[str], words: str
) -> None:
    code, out, err = mosaic("compare", *(envelope if a == "FILE" else a for a in arguments))
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert words in err


def test_the_page_shows_every_built_in_backend() -> None:
    page = (Path(__file__).parents[2] / "docs" / "howto" / "compare.md").read_text("utf-8")
    shown = page[page.index("```text") :]
    for name in BACKENDS:
        assert f"\n{name} " in shown
