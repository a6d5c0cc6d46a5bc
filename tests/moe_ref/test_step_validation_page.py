"""The page of measured steps has the figures of its table, and pack and stack predict them."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from statistics import fmean

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

from moe_ref.validation.cases import CPU, StepCase, cases_of
from moe_ref.validation.report import scores_table
from moe_ref.validation.scores import Prediction, ScoredStep, predicted_step, score
from moe_ref.validation.stack import BUSY, FITTED
from perfmodel import load_stack
from perfmodel.calibration.packs import load_pack

ROOT = Path(__file__).resolve().parents[2]
PACK = ROOT / "benchmarks" / "data" / "mini_sweep" / "pack.toml"
STACK = PACK.with_name("stack.toml")
SIZES = ("d_model", "n_layers", "n_experts", "top_k", "expert_split", "micro_batch", "microbatches")
OTHERS = ("seq_len", "ranks", "recompute", "expert_parallel")


def rows_of_the_table() -> list[ScoredStep]:
    """Read the committed rows."""
    with (ROOT / "docs" / "data" / "step_validation.csv").open(encoding="utf-8") as file:
        cells = list(csv.DictReader(file))
    return [
        ScoredStep(
            prediction=Prediction(
                case=StepCase.model_validate({n: int(row[n]) for n in (*SIZES, *OTHERS)}),
                step_s=1e-3 * float(row["predicted_ms"]),
                kernels_s=1e-3 * float(row["kernels_ms"]),
                mfu=float(row["predicted_mfu"]),
                outside=int(row["outside"]),
            ),
            measured_s=1e-3 * float(row["measured_ms"]),
            low_s=1e-3 * float(row["least_ms"]),
            high_s=1e-3 * float(row["largest_ms"]),
        )
        for row in cells
    ]


ROWS = rows_of_the_table()
PAGE = (ROOT / "docs" / "step-validation.md").read_text("utf-8")


def test_the_rows_are_those_of_the_design_that_fits_nothing() -> None:
    cases = cases_of(CPU)
    assert {row.prediction.case.id for row in ROWS} == {
        c.id for c in (*cases.scored, *cases.parallel)
    }
    assert len(ROWS) == 48


def test_the_scores_of_the_page_are_those_of_the_table() -> None:
    """To the digits of the table, whose times have four."""
    groups: dict[str, list[ScoredStep]] = {}
    for row in ROWS:
        groups.setdefault(row.prediction.group, []).append(row)
    found = {name: score(mine) for name, mine in groups.items()} | {"all": score(ROWS)}
    for line in scores_table(found)[1:]:
        said = next(text for text in PAGE.splitlines() if text.startswith(f"| {line[0]} |"))
        cells = [cell.strip() for cell in said.strip("|").split("|")]
        assert cells[1] == line[1]
        for mine, theirs in zip(line[2:], cells[2:], strict=True):
            words = zip(numbers(mine), numbers(theirs), strict=True)
            for (mine_is, digits), (theirs_is, _) in words:
                assert abs(mine_is - theirs_is) <= 1.1 * 10.0**-digits, (line[0], mine, theirs)


def numbers(text: str) -> list[tuple[float, int]]:
    """Return the numbers of a cell, each with its digits behind the point."""
    found = re.findall(r"[+-]?\d+(?:\.(\d+))?", text)
    values = re.findall(r"[+-]?\d+(?:\.\d+)?", text)
    return [(float(v), len(d)) for v, d in zip(values, found, strict=True)]


def test_every_row_of_the_table_is_on_the_page() -> None:
    for row in ROWS:
        (line,) = [
            text for text in PAGE.splitlines() if text.startswith(f"| {row.prediction.case.id} |")
        ]
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert abs(float(cells[1]) - 1e3 * row.prediction.step_s) <= 0.6
        assert abs(float(cells[2]) - 1e3 * row.measured_s) <= 0.6


def test_pack_and_stack_still_predict_what_the_page_says() -> None:
    stack = load_stack(str(STACK))
    assert load_pack(str(PACK)).name in stack.hardware
    assert set(stack.constants) == set(FITTED)
    for row in ROWS[::5]:
        case = row.prediction.case
        used = stack.varied(BUSY) if case.ranks > 1 else stack
        again = predicted_step(case, str(PACK), used, stack)
        assert again.step_s == pytest.approx(row.prediction.step_s, rel=1e-3)
        assert again.outside == row.prediction.outside


def test_the_page_states_the_constants_of_the_stack() -> None:
    for name, constant in load_stack(str(STACK)).constants.items():
        assert f"| `{name}` | {constant.value:.4g} |" in PAGE


def test_the_page_on_packs_states_the_errors_of_this_one() -> None:
    page = (ROOT / "docs" / "howto" / "calibrate.md").read_text("utf-8")
    pack = load_pack(str(PACK))
    assert pack.surfaces
    for name, surface in pack.surfaces.items():
        if (e := surface.errors) is not None:
            assert f"| `{name}` | {e.n} | {e.median_in:.1f} / {e.p90_in:.1f} |" in page
    assert f"Peak {pack.device.peak_flops.value / 1e9:.1f} GFLOP/s" in page


def test_the_sentences_on_one_process_are_those_of_the_table() -> None:
    one = [row for row in ROWS if row.prediction.group == "one"]
    within = sum(abs(row.error) < 0.1 for row in one)
    assert f"{within} of {len(one)} steps are within 10 %" in PAGE
    again, kept = (
        fmean(row.error for row in one if row.prediction.case.recompute is recompute)
        for recompute in (True, False)
    )
    assert f"a mean error of {again:+.1%}, the others one of {kept:+.1%}" in PAGE.replace(" %", "%")
