"""The score on measured runs, the fit behind it, and stack profiles that are not to be trusted."""

from __future__ import annotations

import json
import tomllib
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perfmodel.architecture import MfuConvention
from perfmodel.calibration.fit_stack import (
    bootstrap,
    errors,
    fit_constants,
    fit_profile,
    held_out_errors,
    predict,
    prepare,
)
from perfmodel.calibration.records import PackError
from perfmodel.calibration.stacks import StackProfile, load_stack, shipped_stacks
from perfmodel.calibration.writer import record_toml
from perfmodel.errors import PerfmodelError
from perfmodel.plan import Recompute
from perfmodel.rules import violations
from perfmodel.stack import SWEEP_CONSTANTS, Stack
from perfmodel.step import estimate
from perfmodel.validation.runs import (
    TABLE5_BATCH,
    MeasuredRun,
    layout_sweeps,
    staged_runs,
    table5_plan,
)
from perfmodel.validation.scoreboard import Scoreboard, validate

DATA = Path(__file__).resolve().parent.parent.parent / "perfmodel" / "validation" / "data"
PROFILE = load_stack("megatron-eager")
SHIPPED = np.array([PROFILE.constants[name].value for name in SWEEP_CONSTANTS])


@cache
def board() -> Scoreboard:
    return validate()


@cache
def prepared() -> tuple[Any, ...]:
    return prepare(layout_sweeps(), PROFILE)


# ---------------------------------------------------------------- the runs


def test_shipped_runs() -> None:
    runs = layout_sweeps()
    assert [sum(r.sweep == s for r in runs) for s in ("700m", "5p4b_256", "18b")] == [15, 5, 4]
    assert {r.batch.seq_len for r in runs} == {8192}
    assert {r.plan.recompute for r in runs} == {Recompute.FULL}
    assert {r.mfu_convention for r in runs} == {MfuConvention.SIX_N_EMBEDDING}
    assert all(0.0 < r.measured_mfu < 1.0 for r in runs)


def test_shipped_runs_are_legal() -> None:
    for r in layout_sweeps():
        assert not violations(
            r.architecture.rule_variables(),
            r.plan,
            r.cluster.n_devices,
            r.batch.seq_len,
            r.batch.global_batch,
        )


def test_staged_runs_are_those_of_table5() -> None:
    runs = staged_runs()
    assert [r.measured_ratio for r in runs] == [0.84, 0.69, 0.91, 1.0]
    assert [r.architecture.n_experts for r in runs] == [128, 128, 32, 32]
    assert table5_plan(Recompute.NONE).micro_batch == 4
    assert (TABLE5_BATCH.global_batch, TABLE5_BATCH.seq_len) == (1024, 2048)


# ---------------------------------------------------------------- the score


def test_errors_are_as_small_as_stated() -> None:
    overall = board().overall
    assert overall.rows == 24
    assert overall.mape_in_sample <= 0.065
    assert overall.mape_leave_one_out <= 0.075
    assert overall.mape_in_sample <= overall.mape_leave_one_out
    assert overall.mape_leave_one_out <= overall.mape_leave_one_sweep_out < 1.0


def test_errors_are_those_that_the_profile_states() -> None:
    overall, stated = board().overall, PROFILE.errors
    assert stated.rows == overall.rows
    for name in ("mape_in_sample", "mape_leave_one_out", "mape_leave_one_sweep_out"):
        assert getattr(overall, name) == pytest.approx(getattr(stated, name), rel=2e-3)


def test_peer_is_scored_on_the_same_rows() -> None:
    own = [
        abs(float(line.split(",")[-1]) / float(line.split(",")[-2]) - 1.0)
        for line in (DATA / "b200_layout_sweeps.csv").read_text("utf-8").splitlines()
        if line and line[0].isdigit()
    ]
    assert len(own) == 24
    assert board().overall.peer_mape == pytest.approx(sum(own) / 24)
    assert board().overall.peer_mape == pytest.approx(0.1016, abs=5e-5)
    assert board().overall.mape_leave_one_out < board().overall.peer_mape


def test_rows_are_what_the_scores_are_made_of() -> None:
    b = board()
    for row in b.rows:
        assert row.error == pytest.approx(row.predicted_mfu / row.measured_mfu - 1.0)
    for score, name in (
        (b.overall.mape_in_sample, "error"),
        (b.overall.mape_leave_one_out, "error_leave_one_out"),
        (b.overall.mape_leave_one_sweep_out, "error_leave_one_sweep_out"),
    ):
        assert score == pytest.approx(np.mean([abs(getattr(row, name)) for row in b.rows]))
    for sweep in b.sweeps:
        rows = [row for row in b.rows if row.sweep == sweep.name]
        assert sweep.rows == len(rows)
        assert sweep.mape == pytest.approx(np.mean([abs(row.error) for row in rows]))
        assert sweep.bias == pytest.approx(np.mean([row.error for row in rows]))


def test_ranks_inside_a_sweep_are_predicted() -> None:
    def ranks(values: list[float]) -> np.ndarray:
        return np.argsort(np.argsort(values)).astype(float)

    for sweep in board().sweeps:
        rows = [row for row in board().rows if row.sweep == sweep.name]
        measured = ranks([row.measured_mfu for row in rows])
        predicted = ranks([row.predicted_mfu for row in rows])
        assert sweep.spearman == pytest.approx(np.corrcoef(measured, predicted)[0, 1])
        assert sweep.spearman >= 0.6


def test_predictions_are_the_scalar_estimates() -> None:
    for run, row in zip(layout_sweeps(), board().rows, strict=True):
        mfu = estimate(
            run.architecture,
            run.plan,
            run.cluster,
            run.batch,
            stack=PROFILE,
            mfu_convention=run.mfu_convention,
        ).mfu
        assert row.predicted_mfu == pytest.approx(mfu, rel=1e-9)


def test_table5_is_closer_than_the_paper() -> None:
    table5 = board().table5
    assert table5.measured == (0.84, 0.69, 0.91, 1.0)
    assert set(table5.predicted) == {mode.value for mode in Recompute}
    assert table5.paper_mean_absolute_error == pytest.approx(0.114, abs=5e-4)
    for mode, ratios in table5.predicted.items():
        assert max(ratios) == 1.0
        error = np.mean(np.abs(np.array(ratios) - np.array(table5.measured)))
        assert table5.mean_absolute_error[mode] == pytest.approx(error)
        assert error <= 0.05
        assert np.argsort(ratios).tolist() == np.argsort(table5.measured).tolist()


def test_score_is_the_same_without_the_name() -> None:
    subset = [r for r in layout_sweeps() if r.sweep != "5p4b_256"][8:]
    assert validate(PROFILE, subset) == validate("megatron-eager", subset)


def test_progress_reaches_the_end() -> None:
    runs = layout_sweeps()
    seen: list[tuple[str, int, int]] = []
    chosen = [*runs[0:8:2], *runs[15:19]]  # four of each of two sweeps: enough to leave one out
    validate(PROFILE, chosen, progress=lambda *x: seen.append(x))
    assert seen == [
        *(("leave one row out", i, 8) for i in range(1, 9)),
        *(("leave one sweep out", i, 2) for i in (1, 2)),
    ]


def test_document_round_trips() -> None:
    assert Scoreboard.model_validate_json(board().model_dump_json()) == board()


# ---------------------------------------------------------------- the fit


def test_few_constants_are_fitted() -> None:
    assert len(SWEEP_CONSTANTS) <= 4
    assert set(board().constants) == set(board().refitted) == set(SWEEP_CONSTANTS)


def test_refit_gives_the_shipped_constants() -> None:
    for name, value in board().refitted.items():
        constant = PROFILE.constants[name]
        assert value == pytest.approx(constant.value, rel=1e-3)
        assert constant.low <= constant.value <= constant.high
        assert constant.low < constant.high


def test_fit_does_not_depend_on_the_start() -> None:
    other = fit_constants(prepared(), PROFILE.stack(), starts=[(0.05, 0.01, 0.02, 0.3)])
    assert other == pytest.approx(SHIPPED, rel=1e-3)


@pytest.mark.parametrize(
    "truth", [(0.02, 0.03, 0.008, 0.5), (0.035, 0.012, 0.015, 0.9), (0.01, 0.05, 0.004, 0.25)]
)
def test_known_constants_are_recovered(truth: tuple[float, ...]) -> None:
    base = PROFILE.stack()
    mfu = predict(prepared(), base, np.array(truth))
    runs = [replace(r, measured=float(m)) for r, m in zip(prepared(), mfu, strict=True)]
    fitted = fit_constants(runs, base)
    assert fitted == pytest.approx(np.array(truth), rel=1e-2)
    assert errors(runs, base, fitted) == pytest.approx(np.zeros(len(runs)), abs=1e-4)


def test_known_constants_are_recovered_from_estimates() -> None:
    """The same, with MFU from the scalar estimate: the fit and the estimate are one model."""
    truth = dict(zip(SWEEP_CONSTANTS, (0.03, 0.02, 0.012, 0.4), strict=True))
    known = PROFILE.model_copy(
        update={
            "constants": {
                name: c.model_copy(update={"value": truth[name]})
                for name, c in PROFILE.constants.items()
            }
        }
    )
    runs = [
        replace(
            r,
            measured_mfu=estimate(
                r.architecture,
                r.plan,
                r.cluster,
                r.batch,
                stack=known,
                mfu_convention=r.mfu_convention,
            ).mfu,
        )
        for r in layout_sweeps()
    ]
    fitted = fit_constants(prepare(runs, PROFILE), PROFILE.stack())
    assert fitted == pytest.approx(np.array([*truth.values()]), rel=1e-2)


def test_one_wild_run_bends_the_fit_little() -> None:
    wild = [replace(prepared()[0], measured=3.0 * prepared()[0].measured), *prepared()[1:]]
    fitted = fit_constants(wild, PROFILE.stack())
    assert fitted[0] == pytest.approx(SHIPPED[0], rel=0.15)


def test_weight_is_repetition() -> None:
    runs = list(prepared())
    weights = np.ones(len(runs))
    weights[3] = 2.0
    by_weight = fit_constants(runs, PROFILE.stack(), weights)
    assert by_weight == pytest.approx(fit_constants([*runs, runs[3]], PROFILE.stack()), rel=1e-4)
    assert by_weight != pytest.approx(SHIPPED, rel=1e-6)


def test_constant_that_no_run_shows_is_left_out() -> None:
    """Pipelines within one node say nothing of what a further node of depth costs."""
    shallow = [r for r in prepared() if r.model.plan.pp <= 8]
    assert 4 < len(shallow) < len(prepared())
    fitted = fit_constants(shallow, PROFILE.stack())
    assert fitted[SWEEP_CONSTANTS.index("pipeline_node_cost")] == 0.0
    assert np.count_nonzero(fitted) == 3


def test_left_out_runs_do_not_enter_their_own_fit() -> None:
    runs = list(prepared())[:6]
    groups = ["a", "b", "a", "b", "c", "c"]
    base = PROFILE.stack()
    out = held_out_errors(runs, base, groups)
    doubled = [*runs]
    doubled[4] = replace(runs[4], measured=2.0 * runs[4].measured)
    again = held_out_errors(doubled, base, groups)
    assert (again[5], (1.0 + out[4]) / 2.0 - 1.0) == pytest.approx((out[5], again[4]), rel=1e-6)
    assert again[0] != pytest.approx(out[0], rel=1e-6)


def test_bootstrap_is_seeded() -> None:
    runs = prepared()[:10]
    draws = [
        bootstrap(runs, PROFILE.stack(), 3, np.random.default_rng(seed), SHIPPED)
        for seed in (1, 1, 2)
    ]
    assert np.array_equal(draws[0], draws[1], equal_nan=True)
    assert not np.array_equal(draws[0], draws[2], equal_nan=True)
    assert draws[0].shape == (3, 4)
    # no run of a pipeline over several nodes says nothing of what one costs
    assert not np.isnan(draws[0][:, :3]).any()


def test_fitted_profile_is_a_profile(tmp_path: Path) -> None:
    runs = [r for r in layout_sweeps() if r.sweep != "700m"] + list(layout_sweeps()[:3])
    profile = fit_profile(runs, PROFILE, name="mine", provenance="a test", resamples=20, seed=1)
    assert profile.assumptions == PROFILE.assumptions
    assert profile.errors.rows == len(runs) == 12
    assert profile.ranges["pp"] == (1.0, 16.0)
    assert profile.ranges["n_devices"] == (32.0, 512.0)
    (tmp_path / "mine.toml").write_text(record_toml(profile, "by a test"), "utf-8")
    again = load_stack(str(tmp_path / "mine.toml"))
    assert again.digest == profile.digest
    assert again == profile


# ---------------------------------------------------------------- profiles that are not valid


def shipped_content() -> dict[str, Any]:
    path = DATA.parent.parent / "calibration" / "data" / "stacks" / "megatron-eager.toml"
    return tomllib.loads(path.read_text("utf-8"))


def test_shipped_profile_loads() -> None:
    assert "megatron-eager" in shipped_stacks()
    assert StackProfile.model_validate(shipped_content()) == PROFILE
    assert set(PROFILE.stack()._fields) == set(Stack._fields)
    for name in Stack._fields:
        table = PROFILE.constants if name in SWEEP_CONSTANTS else PROFILE.assumptions
        assert getattr(PROFILE.stack(), name) == table[name].value


def changed(*path: str, to: Any) -> dict[str, Any]:
    """Return the shipped profile with one value changed, or without it for ``...``."""
    content = shipped_content()
    at = content
    for key in path[:-1]:
        at = at[key]
    if to is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = to
    return content


def toml(content: dict[str, Any], prefix: str = "") -> str:
    """Write nested tables as TOML."""

    def value(v: Any) -> str:
        if isinstance(v, float) and not np.isfinite(v):
            return str(v)
        return json.dumps(v)

    lines = [f"{k} = {value(v)}" for k, v in content.items() if not isinstance(v, dict)]
    for key, table in content.items():
        if isinstance(table, dict):
            lines += [f"[{prefix}{key}]", toml(table, f"{prefix}{key}.")]
    return "\n".join(lines)


TAMPERED = {
    "host_layer_s": changed("constants", "host_layer_s", to=...),
    "jitter": changed("constants", "jitter", to=shipped_content()["constants"]["jitter_s"]),
    "forward_share": changed("assumptions", "forward_share", to=...),
    "mood": changed("mood", to=1),
    "errors": changed("errors", to=...),
    "schema_version": changed("schema_version", to=2),
    "name": changed("name", to="Not A Name"),
    "provenance": changed("provenance", to=""),
    "constants.host_layer_s.value": changed("constants", "host_layer_s", "value", to=1.0),
    "constants.jitter_s.value": changed("constants", "jitter_s", "value", to=-0.01),
    "constants.jitter_s.low": changed("constants", "jitter_s", "low", to=float("nan")),
    "constants.jitter_s.high": changed("constants", "jitter_s", "high", to=float("inf")),
    "constants.jitter_s.source": changed("constants", "jitter_s", "source", to="GUESSED"),
    "constants.jitter_s.unit": changed("constants", "jitter_s", "unit", to=...),
    "ranges.pp": changed("ranges", "pp", to=[1.0]),
    "errors.rows": changed("errors", "rows", to=0),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_tampered_profile_is_refused_in_one_sentence(what: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(toml(TAMPERED[what]), "utf-8")
    with pytest.raises(PackError) as caught:
        load_stack(str(path))
    message = str(caught.value)
    assert message.startswith("Stack profile ")
    assert what in message
    assert message.endswith((".", "?"))
    assert "\n" not in message


def test_untouched_profile_survives_the_writing(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(toml(shipped_content()), "utf-8")
    assert load_stack(str(tmp_path / "mine.toml")) == PROFILE


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.toml", b"a = ["), ("a.toml", b"\xff\xfe"), ("a.toml", None), ("a.yaml", b"a: 1")],
)
def test_file_that_is_no_profile(name: str, content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(PackError) as caught:
        load_stack(str(tmp_path / name))
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


def test_unknown_profile_lists_the_shipped_ones() -> None:
    with pytest.raises(PackError, match=r"no stack profile 'jax'.*megatron-eager"):
        load_stack("jax")


def test_values_outside_the_runs_are_flagged() -> None:
    assert PROFILE.check(pp=16.0, recompute=3.0) == ()
    (flag,) = PROFILE.check(pp=32.0, unheard_of=1.0)
    assert (flag.variable, flag.value, flag.high) == ("pp", 32.0, 16.0)


# ---------------------------------------------------------------- tables of runs of one's own

LINES = [
    line
    for line in (DATA / "b200_layout_sweeps.csv").read_text("utf-8").splitlines()
    if not line.startswith("#")
]


def table(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "runs.csv"
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def test_own_table_is_read(tmp_path: Path) -> None:
    assert layout_sweeps(table(tmp_path, *LINES)) == layout_sweeps()
    assert layout_sweeps(table(tmp_path, "# mine", *LINES[:3])) == layout_sweeps()[:2]


def test_peer_column_is_optional(tmp_path: Path) -> None:
    path = table(tmp_path, *(line.rpartition(",")[0] for line in LINES))
    runs: tuple[MeasuredRun, ...] = layout_sweeps(path)
    assert {run.peer_mfu for run in runs} == {None}


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([LINES[0]], "no rows"),
        ([], "no rows"),
        (["a,b", "1,2"], "Row 1 .*n_layers"),
        ([*LINES[:2], LINES[2].replace(",2048,", ",wide,", 1)], "Row 2 .*'wide'"),
        ([*LINES[:2], LINES[2].replace(",full,", ",some,")], "Row 2 .*'some'"),
        ([*LINES[:2], LINES[2].replace(",scion,", ",sgd,")], "Row 2 .*'sgd'"),
        ([*LINES[:2], LINES[2].replace("0.0633", "high")], "Row 2 .*'high'"),
    ],
    ids=["header only", "empty", "columns", "size", "recompute", "optimizer", "mfu"],
)
def test_bad_table_is_refused(lines: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(PerfmodelError, match=said) as caught:
        layout_sweeps(table(tmp_path, *lines))
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


def score(path: Path) -> None:
    validate(PROFILE, layout_sweeps(path))


def test_short_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PerfmodelError, match="Row 1"):
        score(table(tmp_path, LINES[0], "700m,16,2048"))


def test_impossible_size_is_named(tmp_path: Path) -> None:
    with pytest.raises(PerfmodelError, match="n_layers"):
        score(table(tmp_path, LINES[0], LINES[1].replace(",16,2048", ",0,2048", 1)))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("mfu", ["0", "-0.1", "nan", "inf", "6.45"])
def test_impossible_mfu_is_refused(mfu: str, tmp_path: Path) -> None:
    with pytest.raises(PerfmodelError, match=r"Row 1 .*measured_mfu"):
        score(table(tmp_path, LINES[0], LINES[1].replace("0.0645", mfu), *LINES[16:18]))


def test_illegal_layout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PerfmodelError, match="Row 1"):
        score(table(tmp_path, LINES[0], LINES[1].replace(",2,8,16,", ",3,8,16,"), *LINES[16:18]))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("rows", [slice(1, 2), slice(1, 5)], ids=["one row", "one sweep"])
def test_too_few_runs_are_scored_or_refused(rows: slice, tmp_path: Path) -> None:
    with suppress(PerfmodelError):
        score(table(tmp_path, LINES[0], *LINES[rows]))


@pytest.mark.parametrize("name", ["missing.csv", "."])
def test_file_that_cannot_be_read(name: str, tmp_path: Path) -> None:
    with pytest.raises(PerfmodelError, match="cannot be read"):
        layout_sweeps(tmp_path / name)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PerfmodelError, match="not UTF-8"):
        layout_sweeps(tmp_path / "a.csv")
