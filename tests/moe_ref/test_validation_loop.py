"""The loop: steps that fit a stack, predictions, and the steps that test them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

pytest.importorskip("torch")
pytest.importorskip("safetensors")

from moe_ref.microbench import campaign, command
from moe_ref.microbench.campaign import Effort
from moe_ref.microbench.errors import CalibrationError
from moe_ref.microbench.grids import Scale
from moe_ref.validation import loop
from moe_ref.validation.cases import CPU, CUDA, Cases, Design, cases_of
from moe_ref.validation.loop import Validation, validate
from moe_ref.validation.report import figure_html, rows_csv, scores_table, validation_markdown
from moe_ref.validation.scores import Prediction, ScoredStep, predicted_step, score
from moe_ref.validation.stack import (
    BUSY,
    FITTED,
    beside_busy,
    fitted_stack,
    measured_run,
    unfitted_stack,
)
from moe_ref.validation.steps import StepTime, Visits, alone, step_times
from perfmodel import check, estimate
from perfmodel.calibration.stacks import StackProfile, load_stack
from perfmodel.sources import Source

TINY = Effort(call_s=0.001, limit_s=0.002, points=10)
SCALE = Scale(flop=1e8, elements=2e6, points=12)
DESIGN = Design(
    axes={
        "d_model": (64, 128),
        "n_layers": (2, 3),
        "n_experts": (4, 8),
        "top_k": (1, 2),
        "expert_split": (1, 2),
        "micro_batch": (1, 2),
        "seq_len": (64, 128),
        "microbatches": (1, 2),
    },
    flop=(1e7, 2e9),
    parameters=3e6,
    fitted=8,
    scored=4,
    parallel=2,
    beside=2,
)
VISITS = Visits(rounds=2, steps=1)
FAST: dict[str, Any] = {
    "quick": True,
    "effort": TINY,
    "design": DESIGN,
    "visits": VISITS,
    "resamples": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("machine")


@pytest.fixture(scope="module")
def found(folder: Path) -> Validation:
    """Go through the loop once, on steps of some milliseconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(campaign, "probed_scale", lambda facts, effort: SCALE)
        return validate(folder, threads=1, **FAST)


def several(found: Validation) -> bool:
    """Say whether the machine has room for steps of two processes."""
    return found.calibration.facts.devices_per_node >= 2


# ---------------------------------------------------------------- cases


@pytest.mark.parametrize("design", [CPU, CUDA], ids=["cpu", "cuda"])
def test_no_step_is_in_two_parts_of_a_design(design: Design) -> None:
    cases = cases_of(design)
    every = [*cases.fitted, *cases.scored, *cases.parallel]
    assert len({case.id for case in every}) == len(every)
    assert len(cases.scored) >= 30
    assert cases_of(design) == cases
    assert cases_of(design, seed=1) != cases


@pytest.mark.parametrize("design", [CPU, CUDA], ids=["cpu", "cuda"])
def test_every_value_of_every_size_is_predicted(design: Design) -> None:
    scored = cases_of(design).scored
    for name, values in design.axes.items():
        assert {getattr(case, name) for case in scored} == set(values), name
    assert {case.recompute for case in scored} == {False, True}


def test_steps_of_several_processes_are_of_both_kinds() -> None:
    cases = cases_of(CPU).parallel
    assert {case.expert_parallel for case in cases} == {False, True}
    for case in cases:
        assert case.ranks == 2
        assert case.plan.dp == 2
        assert case.plan.ep == (2 if case.expert_parallel else 1)
        assert not check(case.architecture, case.plan, case.cluster("h100"), case.batch)


def test_the_flop_of_a_case_are_those_of_its_model() -> None:
    case = cases_of(CPU).fitted[1]
    tokens = case.micro_batch * case.microbatches * case.seq_len
    assert case.recompute
    assert case.flop == 8.0 * case.architecture.n_active() * tokens
    assert case.batch.tokens == tokens


# ---------------------------------------------------------------- the loop


def test_every_step_was_timed_and_predicted(found: Validation, folder: Path) -> None:
    cases = cases_of(DESIGN)
    wanted = [*cases.scored, *(cases.parallel if several(found) else ())]
    assert [row.prediction.case for row in found.rows] == wanted
    facts = found.calibration.facts
    times = step_times(folder, facts, VISITS)
    assert not step_times(folder, facts, Visits(2, 3))
    assert not step_times(folder, facts.model_copy(update={"dtype": "bf16"}), VISITS)
    beside = cases.beside if several(found) else ()
    names = {case.id for case in (*cases.fitted, *beside, *wanted)}
    assert set(times) == names | {alone(case) for case in beside}
    assert all(time.visits == 2 and 0.0 < time.low_s <= time.median_s for time in times.values())
    groups = {"one", *(row.prediction.group for row in found.rows)}
    assert groups == ({"one", "dp", "ep"} if several(found) else {"one"})


def test_the_stack_was_fitted_to_none_of_the_steps_that_score_it(found: Validation) -> None:
    profile = found.profile
    assert set(profile.constants) == set(FITTED)
    assert profile.errors.rows == DESIGN.fitted
    assert all(profile.source(name) is Source.FITTED for name in FITTED)
    assert load_stack(str(found.stack_path)) == profile
    assert set(profile.variants) == ({BUSY} if several(found) else set())
    case = found.rows[0].prediction.case
    step = estimate(
        case.architecture,
        case.plan,
        case.cluster(str(found.calibration.path)),
        case.batch,
        stack=str(found.stack_path),
    )
    assert step.step_time_s == pytest.approx(found.rows[0].prediction.step_s)
    assert not any(flag.startswith(f"{profile.name}: its constants") for flag in step.flags)


def test_no_time_of_a_scored_step_enters_a_prediction(
    found: Validation, folder: Path, tmp_path: Path
) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    scored = {row.prediction.case.id for row in found.rows}
    head, *lines = (tmp_path / "steps.csv").read_text().splitlines()
    at = head.split(",").index("step_ms")
    for n, line in enumerate(lines):
        cells = line.split(",")
        if cells[2] in scored:
            cells[at] = str(3.0 * float(cells[at]))
        lines[n] = ",".join(cells)
    (tmp_path / "steps.csv").write_text("\n".join([head, *lines]) + "\n")
    again = validate(tmp_path, threads=1, **FAST)
    assert [row.prediction for row in again.rows] == [row.prediction for row in found.rows]
    for row, before in zip(again.rows, found.rows, strict=True):
        assert row.measured_s == pytest.approx(3.0 * before.measured_s)


def test_an_interrupted_loop_keeps_whole_rounds(
    found: Validation, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in folder.iterdir():
        if file.name != "steps.csv":
            (tmp_path / file.name).write_bytes(file.read_bytes())

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "measure_parallel_steps", stop)
    with pytest.raises(KeyboardInterrupt):
        validate(tmp_path, threads=1, **FAST)
    cases = cases_of(DESIGN)
    times = step_times(tmp_path, found.calibration.facts, VISITS)
    assert set(times) == {case.id for case in (*cases.fitted, *cases.scored)}
    assert {time.visits for time in times.values()} == {1}


def test_what_was_timed_is_not_timed_again(found: Validation, folder: Path) -> None:
    before = (folder / "steps.csv").read_bytes()
    again = validate(folder, threads=1, **FAST)
    assert (folder / "steps.csv").read_bytes() == before
    assert again.rows == found.rows
    assert again.scores == found.scores


def test_without_room_for_two_processes_it_says_so(
    found: Validation, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = found.calibration.facts.model_copy(update={"devices_per_node": 1})
    remarks: list[str] = []
    assert not loop._has_ranks(facts, cases_of(DESIGN).parallel, remarks)
    assert remarks == [
        "No step of 2 processes: they take 2 devices of a CPU, and there are 1 of 1 threads (cpu)."
    ]
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(loop, "_has_ranks", lambda *_: False)
    alone = validate(tmp_path, threads=1, **FAST)
    assert [row.prediction.case for row in alone.rows] == list(cases_of(DESIGN).scored)
    assert set(alone.scores) == {"one"}
    assert not alone.profile.variants


def test_a_folder_without_kernels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="No pack: nothing was measured of gemm"):
        validate(
            tmp_path, threads=1, budget_s=1e-9, **(FAST | {"design": replace(DESIGN, parallel=0)})
        )
    assert not (tmp_path / "steps.csv").exists()


def test_the_command_prints_scores_and_refuses_a_choice_of_families(
    found: Validation, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = typer.Typer()
    app.command()(command.calibrate)
    refused = CliRunner().invoke(app, ["--out", str(folder), "--validate", "--only", "gemm"])
    assert isinstance(refused.exception, CalibrationError)
    assert str(refused.exception).startswith("--validate takes every family")
    monkeypatch.setattr(loop, "validate", lambda out, **settings: found)
    shown = CliRunner().invoke(app, ["--out", str(folder), "--validate"])
    assert shown.exit_code == 0
    assert "one process" in shown.output
    assert "elementwise_scale = " in shown.output


def test_an_interrupted_command_says_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    app = typer.Typer()
    app.command()(command.calibrate)
    monkeypatch.setattr(loop, "validate", stop)
    stopped = CliRunner().invoke(app, ["--out", str(tmp_path), "--validate"])
    assert stopped.exit_code == 130
    assert stopped.output.startswith(f"interrupted: what was measured is in {tmp_path}")


# ---------------------------------------------------------------- fit and scores


def test_known_constants_are_found_again(found: Validation) -> None:
    """Times by a stack of known constants, of the steps of the design, give those constants."""
    calibration = found.calibration
    assert calibration.pack is not None
    base = unfitted_stack(calibration.facts, calibration.pack)
    truth = {
        "host_layer_s": 4e-4,
        "elementwise_scale": 3.0,
        "router_scale": 2.0,
        "optimizer_scale": 1.5,
    }
    known = with_values(base, truth)
    path = str(calibration.path)
    times = [
        (case, StepTime(seconds, seconds, seconds, 1))
        for case in cases_of(DESIGN).fitted
        for seconds in [predicted_step(case, path, known, base).step_s]
    ]
    profile = fitted_stack(
        calibration.facts, calibration.pack, calibration.path, times, resamples=2
    )
    for name, value in truth.items():
        assert profile.constants[name].value == pytest.approx(value, rel=1e-3), name
    assert profile.errors.mape_leave_one_sweep_out < 1e-4


NEUTRAL = {"router_scale": 1.0, "optimizer_scale": 2.0}


def with_values(profile: StackProfile, values: dict[str, float]) -> StackProfile:
    constants = {
        name: profile.constants[name].model_copy(update={"value": v, "low": v, "high": v})
        for name, v in values.items()
    }
    return profile.model_copy(update={"constants": constants})


def test_a_busy_neighbour_stretches_the_whole_of_a_step(found: Validation) -> None:
    calibration = found.calibration
    assert calibration.pack is not None
    base = unfitted_stack(calibration.facts, calibration.pack)
    known = with_values(base, {"host_layer_s": 4e-4, "elementwise_scale": 3.0} | NEUTRAL)
    busy = beside_busy(known, [1.1, 1.25, 1.4]).varied(BUSY)
    assert busy.constants["device_scale"].value == 1.25
    assert busy.constants["device_scale"].source is Source.MEASURED
    path = str(calibration.path)
    for case in cases_of(DESIGN).scored:
        alone = predicted_step(case, path, known, base).step_s
        beside = predicted_step(case, path, busy, base).step_s
        assert beside == pytest.approx(1.25 * alone, rel=1e-9)


def test_a_timed_step_is_a_run_of_its_mfu(found: Validation) -> None:
    case = cases_of(DESIGN).fitted[0]
    run = measured_run(case, found.calibration.path, 0.5)
    assert run.sweep == f"d{case.d_model}"
    flop = 6.0 * case.architecture.n_active() * case.batch.tokens
    assert run.measured_mfu == pytest.approx(flop / 0.5 / run.cluster.peak_flops)


def rows_of(predicted: list[float], measured: list[float], cases: Cases) -> list[ScoredStep]:
    """Make rows of given times, at an MFU that falls with the predicted time."""
    return [
        ScoredStep(
            prediction=Prediction(case=case, step_s=p, kernels_s=p / 2.0, mfu=0.1 / p, outside=0),
            measured_s=m,
            low_s=0.9 * m,
            high_s=1.1 * m,
        )
        for case, p, m in zip(cases.scored, predicted, measured, strict=False)
    ]


def test_scores_are_what_their_names_say() -> None:
    measured = [1.0, 2.0, 4.0, 5.0, 8.0, 10.0, 16.0]
    error = np.array([0.1, -0.1, 0.2, 0.0, 0.0, 0.0, -0.3])
    rows = rows_of((np.array(measured) * (1.0 + error)).tolist(), measured, cases_of(CPU))
    s = score(rows)
    assert s.rows == 7
    assert s.mape == pytest.approx(np.abs(error).mean())
    assert s.bias == pytest.approx(error.mean())
    assert s.kernels_bias == pytest.approx(((1.0 + error) / 2.0 - 1.0).mean())
    assert s.spread == pytest.approx(1.1 / 0.9 - 1.0)
    # 10 and 11.2, and 4.8 and 5, keep their order: nothing changes places
    assert s.spearman_time == pytest.approx(1.0)
    assert s.top_time == 5
    swapped = rows_of([1.0, 2.0, 4.0, 5.0, 10.0, 8.0, 16.0], measured, cases_of(CPU))
    assert score(swapped).spearman_time == pytest.approx(1.0 - 6 * 2 / (7 * 48))
    assert score(swapped).top_time == 4
    assert swapped[4].error == pytest.approx(0.25)
    # measured MFU is the work that was predicted over the time that it took
    assert swapped[4].measured_mfu == pytest.approx(0.1 / 8.0)


def test_the_report_has_every_row(found: Validation, folder: Path) -> None:
    text = (folder / "validation.csv").read_text()
    assert text == rows_csv(found.rows)
    assert len(text.splitlines()) == 1 + len(found.rows)
    page = (folder / "validation.md").read_text()
    calibration = found.calibration
    assert calibration.pack is not None
    assert page == validation_markdown(
        calibration.facts,
        calibration.pack,
        found.profile,
        found.rows,
        found.scores,
        found.remarks,
    )
    for row in found.rows:
        assert row.prediction.case.id in page
    assert all(
        len(line) == len(scores_table(found.scores)[0]) for line in scores_table(found.scores)
    )


def test_the_figure_shows_every_row(found: Validation) -> None:
    pytest.importorskip("plotly")
    page = figure_html(found.rows, "Steps")
    assert page is not None
    for row in found.rows:
        assert json.dumps(row.prediction.case.id) in page
