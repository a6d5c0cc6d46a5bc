"""Scores of published runs: groups that add up, roles apart, ranks, and the runs themselves."""

from __future__ import annotations

import csv
from functools import cache
from io import StringIO
from pathlib import Path
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.calibration.published_stacks import SPECS, fits, layout_key
from perfmodel.calibration.stacks import load_stack
from perfmodel.errors import PerfmodelError
from perfmodel.step import StepModel
from perfmodel.validation.published import PublishedRun, published_runs
from perfmodel.validation.published_scores import (
    COLUMNS,
    LEAST_RANKED,
    ScoredRow,
    group_scores,
    main,
    peer_scores,
    profile_of,
    rank_scores,
    score_runs,
    scores_csv,
    scores_figure,
    spec_of,
    sweep_scores,
)

SMALL = ("megatron-core-2021", "internevo-2023", "megatron-bridge-h100")
"""Stacks with few runs; the last one has switches."""


@cache
def small_runs() -> tuple[PublishedRun, ...]:
    specs = [s for s in SPECS if s.name in SMALL]
    runs = (run for run in published_runs() if run.step_time_s is not None)
    return tuple(run for run in runs if any(s.takes(run) for s in specs))


@cache
def small_rows() -> tuple[ScoredRow, ...]:
    return score_runs(small_runs())


names = st.sampled_from(("a", "b", "c"))


@st.composite
def scored_rows(draw: st.DrawFn) -> ScoredRow:
    """Draw a row with any names and an error from -50% to +100%."""
    measured = draw(st.floats(0.1, 10.0))
    error = draw(st.floats(-0.5, 1.0))
    predicted = measured * (1.0 + error)
    return ScoredRow(
        row=draw(st.integers(1, 999)),
        source=draw(names),
        model=draw(names),
        kind=draw(st.sampled_from(("dense", "moe"))),
        hardware=draw(names),
        precision=draw(names),
        devices=8,
        global_batch=16,
        seq_len=2048,
        stack=draw(names),
        role=draw(st.sampled_from(("fit", "score"))),
        plan="dp=8",
        measured_s=measured,
        predicted_s=predicted,
        low_s=0.9 * predicted,
        high_s=1.1 * predicted,
        error=error,
        measured_tflops=draw(st.floats(1.0, 500.0)),
    )


# ---------------------------------------------------------------- groups


@given(st.lists(scored_rows(), min_size=1, max_size=30))
def test_groups_of_a_kind_add_up_to_all_runs(rows: list[ScoredRow]) -> None:
    groups = group_scores(rows)
    for by in {g.by for g in groups}:
        for role in ("fit", "score"):
            mine = [row for row in rows if row.role == role]
            parts = [g for g in groups if (g.by, g.role) == (by, role)]
            assert sum(g.rows for g in parts) == len(mine)
            assert len({g.name for g in parts}) == len(parts)
            if mine:
                for field, value in (
                    ("mean", mean(abs(r.error) for r in mine)),
                    ("bias", mean(r.error for r in mine)),
                    ("inside", mean(float(r.inside) for r in mine)),
                ):
                    total = sum(g.rows * getattr(g, field) for g in parts) / len(mine)
                    assert total == pytest.approx(value, abs=1e-12)
    for g in groups:
        assert abs(g.bias) <= g.mean + 1e-12
        assert 0 <= g.inside <= 1


@pytest.mark.parametrize(
    ("measured", "inside"), [(0.89, False), (0.9, True), (1.0, True), (1.1, True), (1.11, False)]
)
def test_a_run_is_inside_between_its_bounds(measured: float, inside: bool) -> None:
    row = small_rows()[0].model_copy(update={"low_s": 0.9, "high_s": 1.1, "measured_s": measured})
    assert row.inside is inside


# ---------------------------------------------------------------- ranks


def ranked(order: list[float], model: str = "m") -> list[ScoredRow]:
    """Build rows with rising measured throughput and predicted throughput in some order."""
    base = small_rows()[0].model_dump() | {"model": model, "hardware": "h"}
    return [
        ScoredRow.model_validate(
            base
            | {
                "plan": f"dp={i + 1}",
                "measured_s": 1.0,
                "predicted_s": (10.0 + i) / p,
                "measured_tflops": 10.0 + i,
            }
        )
        for i, p in enumerate(order)
    ]


def test_ranks_run_from_one_to_minus_one() -> None:
    (same,) = rank_scores(ranked([1.0, 2.0, 3.0, 4.0]))
    (reverse,) = rank_scores(ranked([4.0, 3.0, 2.0, 1.0]))
    assert (same.spearman, reverse.spearman) == pytest.approx((1, -1))
    (mixed,) = rank_scores(ranked([1.0, 2.0, 4.0, 3.0]))
    assert mixed.spearman == pytest.approx(1 - 6 * 2 / (4 * 15))


def test_groups_without_an_order_have_no_rank() -> None:
    assert rank_scores(ranked([1.0] * LEAST_RANKED)) == ()
    assert rank_scores(ranked([1.0, 2.0, 3.0][: LEAST_RANKED - 1])) == ()
    again = ranked([1.0, 2.0, 3.0, 4.0])[: LEAST_RANKED - 1] * 3
    assert rank_scores(again) == ()  # a layout that was measured again is one layout
    two = [*ranked([1.0, 2.0, 3.0, 4.0]), *ranked([2.0, 1.0, 3.0, 4.0], "n")]
    assert [r.model for r in rank_scores(two)] == ["m", "n"]


# ---------------------------------------------------------------- runs


def test_a_scored_run_is_the_estimate_under_its_stack() -> None:
    rows = {row.row: row for row in small_rows()}
    assert len(rows) == len(small_runs())
    for run in small_runs():
        row, profile = rows[run.row], profile_of(run)
        assert profile is not None
        step = StepModel(run.architecture, run.plan, run.cluster, run.batch, profile).step_s
        assert row.predicted_s == step
        assert row.error == step / row.measured_s - 1
        assert row.low_s == step * profile.errors.low <= step * profile.errors.high == row.high_s
        assert row.role == ("fit" if fits(run) else "score")
        assert row.stack == profile.name.partition("+")[0]


def test_no_layout_is_in_both_roles() -> None:
    rows = {row.row: row.role for row in small_rows()}
    roles: dict[str, set[str]] = {}
    for run in small_runs():
        roles.setdefault(layout_key(run), set()).add(rows[run.row])
    assert all(len(role) == 1 for role in roles.values())
    assert {role for (role,) in roles.values()} == {"fit", "score"}


def test_a_runs_profile_has_the_switches_that_the_run_has_on() -> None:
    seen = set()
    for run in published_runs():
        spec, profile = spec_of(run), profile_of(run)
        if spec is None or profile is None:
            assert (spec, profile) == (None, None)
            continue
        on = spec.switches_of(run)
        seen |= {*on}
        assert profile.name == "+".join((spec.name, *on))
    assert {"eager", "overlap", "ultra", "26.08", "sinks", "once"} <= seen


@pytest.mark.parametrize("name", SMALL)
def test_scores_of_a_stack_are_those_that_its_profile_states(name: str) -> None:
    errors = load_stack(name).errors
    groups = {g.role: g for g in group_scores(small_rows()) if (g.by, g.name) == ("stack", name)}
    assert groups["fit"].rows == errors.rows
    assert groups["fit"].mean == pytest.approx(errors.mape_in_sample, rel=0.02)
    assert groups["score"].rows == errors.scored_rows
    assert groups["score"].mean == pytest.approx(errors.scored_mean, rel=0.02)
    assert groups["score"].median == pytest.approx(errors.scored_median, rel=0.02)


def test_most_left_out_runs_lie_in_their_intervals() -> None:
    """90% would; runs of a stack that fitted nothing are another half of its layouts."""
    rows = [row for row in small_rows() if row.role == "score"]
    assert mean(float(row.inside) for row in rows) > 0.75


def test_peers_are_scored_on_their_own_rows() -> None:
    peers = peer_scores(small_rows())
    assert [p.peer for p in peers] == ["Calculon"]
    theirs = [r for r in small_rows() if r.source.startswith("Korthikanti et al. 2022 (Table 5)")]
    assert peers[0].ours_rows == len(theirs)
    assert peers[0].ours_mean == pytest.approx(mean(abs(r.error) for r in theirs))
    assert peers[0].ours_worst == max(abs(r.error) for r in theirs)


# ---------------------------------------------------------------- files


def test_csv_has_every_run_and_column() -> None:
    rows = list(csv.DictReader(StringIO(scores_csv(small_rows()))))
    assert len(rows) == len(small_rows())
    assert tuple(rows[0]) == COLUMNS
    for written, row in zip(rows, small_rows(), strict=True):
        assert int(written["row"]) == row.row
        assert float(written["predicted_s"]) == pytest.approx(row.predicted_s, rel=1e-5)
        assert written["plan"] == row.plan


def test_the_figure_has_the_runs_that_score() -> None:
    pytest.importorskip("plotly")
    page = scores_figure(small_rows())
    assert "<html>" in page
    assert 'id="published-scores"' in page
    for name in SMALL:
        assert name in page


def test_a_table_without_a_stacks_runs_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "none.csv"
    path.write_text("nothing\n1\n", "utf-8")
    with pytest.raises(PerfmodelError, match=r"^[^\n]+\.$"):
        sweep_scores(path)
    assert main(["--runs", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
