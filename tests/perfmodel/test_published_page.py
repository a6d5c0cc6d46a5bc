"""The committed scores of published runs are what the program prints today."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

import pytest

from perfmodel.calibration.published_stacks import layout_key
from perfmodel.errors import PerfmodelError
from perfmodel.validation.published import published_runs
from perfmodel.validation.published_page import scores_tables, with_tables
from perfmodel.validation.published_scores import (
    PublishedScores,
    ScoredRow,
    published_scores,
    scores_csv,
    scores_figure,
)

DOCS = Path(__file__).parents[2] / "docs"


@cache
def scores() -> PublishedScores:
    return published_scores()


def test_committed_rows_are_those_of_the_model() -> None:
    with (DOCS / "data" / "published_scores.csv").open(encoding="utf-8") as file:
        kept = list(csv.DictReader(file))
    now = list(csv.DictReader(scores_csv(scores().rows).splitlines()))
    assert len(kept) == len(now) == len(scores().rows)
    for old, new in zip(kept, now, strict=True):
        assert old.keys() == new.keys()
        for name in old:
            kind = ScoredRow.model_fields[name].annotation
            if kind is float:
                assert float(old[name]) == pytest.approx(float(new[name]), rel=1e-4, abs=1e-6)
            else:
                assert old[name] == new[name]


def test_committed_page_has_the_tables_of_the_model() -> None:
    page = (DOCS / "published-runs.md").read_text("utf-8")
    assert with_tables(page, scores()) == page


def test_page_without_room_for_tables_is_refused() -> None:
    with pytest.raises(PerfmodelError, match="scores: begin"):
        with_tables("# A page", scores())


def test_tables_name_every_stack_that_scores() -> None:
    text = scores_tables(scores())
    for stack in {row.stack for row in scores().rows}:
        assert f"| {stack} |" in text


def test_figure_has_a_point_for_every_scored_run() -> None:
    pytest.importorskip("plotly")
    page = scores_figure(scores().rows)
    for stack in {row.stack for row in scores().rows if row.role == "score"}:
        assert stack in page


def test_aims_that_hold() -> None:
    """What the page claims of runs that took part in no fit."""
    overall = scores().overall()
    assert overall.rows >= 300
    assert overall.median <= 0.10
    assert overall.mean <= 0.13
    assert 0.85 <= overall.inside <= 0.95
    dense = next(g for g in scores().groups if g.name == "megatron-core-2021" and g.role == "score")
    assert dense.mean <= 0.06


def test_rows_that_fit_score_nothing() -> None:
    runs = {run.row: run for run in published_runs()}
    layouts: dict[str, set[str]] = {"fit": set(), "score": set()}
    for row in scores().rows:
        layouts[row.role].add(layout_key(runs[row.row]))
    assert layouts["fit"]
    assert layouts["score"]
    assert not layouts["fit"] & layouts["score"]
