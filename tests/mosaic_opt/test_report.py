"""Pages of text say what the documents say."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from mosaic_opt.backends.base import Progress
from mosaic_opt.backends.enumerate import Enumerate
from mosaic_opt.envelope import example, parse_envelope
from mosaic_opt.report import as_text, number, render_scoreboard, render_step, render_violations
from mosaic_opt.solver import solve
from perfmodel.cluster import Batch, Cluster
from perfmodel.ladders import ladder
from perfmodel.plan import Plan
from perfmodel.step import check, estimate

from .strategies import (
    scoreboard,
    small_envelopes,
    solved_table3,
    tiny_envelope,
)

CLUSTER, BATCH = Cluster(hardware="p6-b200", nodes=1), Batch(global_batch=32, seq_len=1024)


def flat(text: Any) -> str:
    return " ".join(str(text).split())


def test_page_of_table3() -> None:
    solution = solved_table3()
    page, best = flat(solution), solution.optimum
    assert best is not None
    for said in (
        "table3: OPTIMAL",
        str(best.architecture["name"]),
        f"{best.loss:.4f} nats/token",
        str(best.plan),
        f"MFU {100 * best.mfu:.2f}%",
        f"{best.memory_bytes / 1e9:.1f} GB",
        f"{len(solution.near_ties)} candidates within",
        "1,092 architectures",
        "5,890,956 priced",
        "Certified, of the model",
        "gap 0",
        best.flags[0],
        solution.provenance["hardware"]["sha256"][:12],
    ):
        assert said in page


def test_page_is_the_same_every_time_and_fits() -> None:
    text = str(solved_table3())
    assert text == str(solved_table3())
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "\x1b" not in text


def test_parts_of_the_step_add_up_on_the_page() -> None:
    lines = str(solved_table3()).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("part of the step"))
    rows = []
    for line in lines[start + 1 :]:
        if line.startswith("total"):
            break
        rows.append(line.split()[-3:])
    assert sum(float(row[0]) for row in rows) == pytest.approx(float(line.split()[1]), rel=0.01)
    assert {row[2] for row in rows} <= {"MEASURED", "FITTED", "DATASHEET", "ASSUMED"}


@given(small_envelopes())
def test_every_solution_has_a_page(spec: dict[str, Any]) -> None:
    solution = solve(parse_envelope(spec), backend=Enumerate(workers=1))
    page = flat(solution)
    assert page.startswith(f"random: {solution.status.value.upper()}")
    assert f"{solution.counts.priced:,} priced" in page
    assert "nan" not in page.split()
    for reason in {r.reason for r in solution.rejected}:
        assert reason.replace("_", " ") in page


def test_infeasible_page_says_why() -> None:
    page = flat(solve(tiny_envelope(memory_fraction=1e-3)))
    assert "tiny: INFEASIBLE" in page
    assert "GB short on every device" in page
    assert "memory: 16" in page


def test_no_sentence_ends_twice() -> None:
    page = flat(solve(tiny_envelope(plans={"tp": [8], "cp": [1], "ep": [8]})))
    assert "must divide" in page
    assert ".." not in page


def test_empty_space_page() -> None:
    candidates = {
        "kind": "ladder",
        "q": [1],
        "n_experts": [4],
        "top_k": [8],
        "expert_split": [1],
    }
    assert "INFEASIBLE" in flat(solve(tiny_envelope(candidates=candidates)))


def test_interrupted_page_says_what_is_left() -> None:
    def interrupt(state: Progress) -> None:
        if state.done == 2:
            raise KeyboardInterrupt

    solution = solve(tiny_envelope(), progress=interrupt)
    page = flat(solution)
    assert "tiny: FEASIBLE" in page
    assert "Not certified (interrupted)" in page
    assert f"{solution.counts.unexamined:,} not reached" in page
    assert solution.bounds.gap is not None
    assert f"gap {solution.bounds.gap:.6f} nats" in page


def test_dense_model_has_a_page() -> None:
    dense = {
        "name": "dense",
        "n_layers": 8,
        "d_model": 1024,
        "n_heads": 8,
        "n_kv_heads": 8,
        "head_dim": 128,
        "d_ff": 2560,
        "vocab_size": 50257,
    }
    solution = solve(tiny_envelope(candidates={"kind": "explicit", "models": [dense]}))
    assert solution.candidates[0].expert_split is None
    assert "dense (8 layers, width 1024)" in flat(solution)


@pytest.mark.parametrize(
    "name",
    ["a[/b]", "[bold]x", "[link"],
)
def test_name_of_a_model_is_text_and_not_markup(name: str) -> None:
    model = ladder(1, 4, 1, 1).model_copy(update={"name": name})
    solution = solve(tiny_envelope(candidates={"kind": "explicit", "models": [model]}))
    assert flat(solution).count(name) >= 2
    step = estimate(model, Plan(dp=8), CLUSTER, BATCH)
    assert name in flat(as_text(render_step(step)))


def test_page_of_a_step() -> None:
    step = estimate(ladder(1, 4, 1, 1), Plan(dp=8), CLUSTER, BATCH)
    page = flat(as_text(render_step(step)))
    for said in ("ladder:q=1,E=4,K=1,G=1", f"{step.step_time_s:.4f} s", ": fits", "weights"):
        assert said in page


def test_page_of_a_step_that_does_not_fit() -> None:
    small = Cluster(hardware="p6-b200", nodes=1, memory_bytes=1e9)
    page = flat(as_text(render_step(estimate(ladder(1, 4, 1, 1), Plan(dp=8), small, BATCH))))
    assert "DOES NOT FIT" in page


def test_page_of_violations() -> None:
    assert as_text(render_violations(())) == "legal"
    broken = check(ladder(1, 4, 1, 1), Plan(tp=8, dp=1), CLUSTER, BATCH)
    page = flat(as_text(render_violations(broken)))
    assert page.startswith(f"illegal: {len(broken)} broken")
    for violation in broken:
        assert f"{violation.rule}: {violation.message}" in page


def test_page_of_the_scoreboard() -> None:
    board = scoreboard()
    page = flat(as_text(render_scoreboard(board), 160))
    for said in (
        "24 measured runs",
        f"{100 * board.overall.mape_in_sample:.2f}% in sample",
        f"{100 * board.overall.mape_leave_one_out:.2f}% leaving one row out",
        "ScalePlan 10.16%",
        "700m",
        "host_layer_s",
        "recompute full",
    ):
        assert said in page


def test_listing_page() -> None:
    assert "18b" in flat(solve(example("listing")))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.4236e12, "1.424T"),
        (14.52e9, "14.52B"),
        (1e6, "1M"),
        (999.0, "999"),
        (1000, "1k"),
        (0.0, "0"),
        (-2e9, "-2B"),
    ],
)
def test_numbers_wear_suffixes(value: float, text: str) -> None:
    assert number(value) == text
