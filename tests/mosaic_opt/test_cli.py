"""The command line: exit codes, and JSON that is nothing but JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

import mosaic_opt.solver
from mosaic_opt import cli
from mosaic_opt.envelope import examples, parse_envelope
from mosaic_opt.relaxation_result import Relaxation
from mosaic_opt.result import Solution
from perfmodel.architecture import Architecture, ParameterConvention
from perfmodel.explanation import Explanation
from perfmodel.ladders import ladder
from perfmodel.layout_search import LayoutSearch
from perfmodel.models import catalogue
from perfmodel.validation.memory_scores import memory_scores

from .strategies import TINY, scoreboard, solved_tiny, tiny

ROOT = Path(__file__).resolve().parent.parent.parent

CASE = (
    *("--model", "ladder:q=2,E=8,K=2,G=1", "--plan", "ep=8,pp=2,mbs=1"),
    *("--cluster", "p6-b200:2", "--global-batch", "32", "--seq", "1024"),
)


class Ran(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


class Mosaic:
    """Runs the command line in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: str) -> Ran:
        self._monkeypatch.setattr(sys, "argv", ["mosaic", *arguments])
        with pytest.raises(SystemExit) as left:
            cli.main()
        code = left.value.code
        return Ran(int(code or 0), *self._capsys.readouterr())


@pytest.fixture
def mosaic(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Mosaic:
    return Mosaic(monkeypatch, capsys)


@pytest.fixture
def envelope(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY), "utf-8")
    return path


def changed(case: tuple[str, ...], **options: str) -> list[str]:
    """Return a case with other values of its options."""
    pairs = dict(zip(case[::2], case[1::2], strict=True))
    return [word for pair in (pairs | options).items() for word in pair]


def assert_refused(ran: Ran, said: str) -> None:
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.startswith("error: ")
    assert ran.err.count("\n") == 1
    assert said in ran.err


# ---------------------------------------------------------------- relax


def test_relax_shows_a_page_and_writes_the_same_json(
    mosaic: Mosaic, envelope: Path, tmp_path: Path
) -> None:
    ran = mosaic("relax", str(envelope), "--json", str(tmp_path / "out.json"))
    assert (ran.code, ran.err) == (0, "")
    found = Relaxation.model_validate_json((tmp_path / "out.json").read_text("utf-8"))
    assert found.lower_bound is not None
    assert ran.out.startswith("tiny: BOUND")
    assert f"No candidate has a loss below {found.lower_bound:.6f}" in ran.out
    assert solved_tiny().bounds.primal is not None
    assert found.split is not None
    assert found.lower_bound < solved_tiny().bounds.primal == pytest.approx(found.split.exact)


def test_relax_takes_solver_pieces_and_mfu(mosaic: Mosaic, envelope: Path) -> None:
    options = ("--solver", "scs", "--check", "none", "--pieces", "2", "--mfu", "bound")
    ran = mosaic("relax", str(envelope), *options, "--json", "-")
    assert (ran.code, ran.err) == (0, "")
    assert ran.document["mfu"] == "bound"
    assert len(ran.document["useful_share"]) == 2
    assert {run["solver"] for run in ran.document["solvers"]} == {"scs"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--solver", "simplex"), "There is no solver 'simplex' here; cvxpy finds "),
        (("--mfu", "guess"), "mfu='guess' must be exact or bound."),
        (("--pieces", "0"), "pieces=0 must be at least 1."),
        (("--example", "table3"), "Give an envelope file or --example NAME, one of the two."),
    ],
)
def test_relax_refuses_in_one_sentence(
    mosaic: Mosaic, envelope: Path, options: tuple[str, ...], said: str
) -> None:
    assert_refused(mosaic("relax", str(envelope), *options), said)


def test_relax_of_nothing_feasible_is_one(mosaic: Mosaic, tmp_path: Path) -> None:
    path = tmp_path / "e.json"
    path.write_text(json.dumps(tiny(memory_fraction=1e-6)), "utf-8")
    ran = mosaic("relax", str(path), "--json", "-")
    assert (ran.code, ran.document["status"]) == (1, "infeasible")


def test_a_failed_solver_is_one_with_its_words(mosaic: Mosaic, envelope: Path) -> None:
    ran = mosaic("relax", str(envelope), "--solver", "osqp", "--check", "none")
    assert (ran.code, ran.err) == (1, "")
    assert ran.out.startswith("tiny: FAILED")
    assert "osqp: error" in ran.out


# ---------------------------------------------------------------- solve


def test_solve_with_a_backend_that_only_bounds(mosaic: Mosaic, envelope: Path) -> None:
    ran = mosaic("solve", str(envelope), "--backend", "gp", "--workers", "1")
    assert (ran.code, ran.err) == (0, "")
    assert "Bound only: no candidate has a loss below" in ran.out
    ran = mosaic("solve", str(envelope), "--backend", "gp", "--json", "-")
    assert ran.document["status"] == "unknown"
    assert ran.document["optimum"] is None
    assert ran.document["bounds"]["dual"] <= solved_tiny().bounds.primal


def test_solve_refuses_an_unknown_backend(mosaic: Mosaic, envelope: Path) -> None:
    ran = mosaic("solve", str(envelope), "--backend", "simplex")
    assert_refused(ran, "There is no backend 'simplex'; there are enumerate, branch, gp")


def test_solve_shows_a_page(mosaic: Mosaic, envelope: Path) -> None:
    ran = mosaic("solve", str(envelope))
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("tiny: OPTIMAL")


def test_solve_writes_json_to_stdout_alone(mosaic: Mosaic, envelope: Path) -> None:
    ran = mosaic("solve", str(envelope), "--json", "-", "--workers", "1")
    assert (ran.code, ran.err) == (0, "")
    assert ran.document["status"] == "optimal"
    assert Solution.from_json(ran.out) == solved_tiny()


def test_solve_writes_json_to_a_file_beside_the_page(
    mosaic: Mosaic, envelope: Path, tmp_path: Path
) -> None:
    ran = mosaic("solve", str(envelope), "--json", str(tmp_path / "out.json"))
    assert (ran.code, ran.err) == (0, "")
    assert "OPTIMAL" in ran.out
    assert Solution.from_json((tmp_path / "out.json").read_text("utf-8")) == solved_tiny()


def test_solve_takes_an_example(mosaic: Mosaic) -> None:
    ran = mosaic("solve", "--example", "listing", "--json", "-")
    assert ran.code == 0
    assert ran.document["name"] == "listing"


def test_solve_infeasible_is_one_and_says_why(mosaic: Mosaic, tmp_path: Path) -> None:
    path = tmp_path / "e.json"
    path.write_text(json.dumps(tiny(memory_fraction=0.001)), "utf-8")
    ran = mosaic("solve", str(path))
    assert (ran.code, ran.err) == (1, "")
    assert "INFEASIBLE" in ran.out
    assert "short on every device" in " ".join(ran.out.split())
    ran = mosaic("solve", str(path), "--json", "-")
    assert ran.code == 1
    assert ran.document["status"] == "infeasible"
    assert {r["reason"] for r in ran.document["rejected"]} == {"memory"}


def test_solve_under_a_time_limit_answers(mosaic: Mosaic, envelope: Path) -> None:
    ran = mosaic("solve", str(envelope), "--time-limit", "1e-9", "--workers", "1", "--json", "-")
    assert ran.code == 0
    assert (ran.document["status"], ran.document["termination"]) == ("feasible", "time_limit")


def test_solve_without_an_incumbent_is_one(mosaic: Mosaic, tmp_path: Path) -> None:
    path = tmp_path / "e.json"
    path.write_text(json.dumps(tiny(memory_fraction=0.001)), "utf-8")
    ran = mosaic("solve", str(path), "--time-limit", "1e-9", "--workers", "1", "--json", "-")
    assert (ran.code, ran.document["status"]) == (1, "unknown")


@pytest.mark.parametrize("arguments", [[], ["e.yaml", "--example", "table3"]])
def test_solve_takes_a_file_or_an_example(mosaic: Mosaic, arguments: list[str]) -> None:
    assert_refused(mosaic("solve", *arguments), "one of the two.")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--example", "nope"], "no example 'nope'"),
        (["--example", "listing", "--workers", "0"], "workers=0"),
        (["--example", "listing", "--workers", "x"], "--workers"),
        (["--example", "listing", "--time-limit", "0"], "time_s=0"),
        (["--example", "listing", "--time-limit", "nan"], "time_s=nan"),
        (["--example", "listing", "--time-limit", "inf"], "time_s=inf"),
        (["--exmaple", "listing"], "--exmaple"),
        (["a.yaml", "b.yaml"], "b.yaml"),
        (["missing.yaml"], "missing.yaml cannot be read"),
        (["table3"], "table3 must end in"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_solve_refuses(mosaic: Mosaic, arguments: list[str], said: str) -> None:
    assert_refused(mosaic("solve", *arguments), said)


@pytest.mark.parametrize("where", ["missing/out.json", "."])
@pytest.mark.parametrize("command", ["solve", "check", "examples", "models"])
def test_json_that_cannot_be_written_is_two(
    mosaic: Mosaic, envelope: Path, tmp_path: Path, command: str, where: str
) -> None:
    case = {"solve": [str(envelope)], "check": CASE, "examples": [], "models": []}[command]
    ran = mosaic(command, *case, "--json", str(tmp_path / where))
    assert ran.code == 2
    assert ran.err.startswith("error: ")
    assert ran.err.count("\n") == 1
    assert "cannot be written" in ran.err


def test_interrupt_outside_the_search(
    mosaic: Mosaic, envelope: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(mosaic_opt.solver, "solve", interrupted)
    ran = mosaic("solve", str(envelope))
    assert (ran.code, ran.out) == (130, "")
    assert "Traceback" not in ran.err


# ---------------------------------------------------------------- step and check


def test_step_shows_a_page(mosaic: Mosaic) -> None:
    ran = mosaic("step", *CASE)
    assert (ran.code, ran.err) == (0, "")
    assert "MFU" in ran.out


def test_step_json_is_the_page(mosaic: Mosaic) -> None:
    ran = mosaic("step", *CASE, "--json", "-")
    assert (ran.code, ran.err) == (0, "")
    document = ran.document
    assert document["plan"]["dp"] == 8
    assert f"{document['step_time_s']:.4f} s" in mosaic("step", *CASE).out


def test_step_takes_the_convention_and_the_optimizer(mosaic: Mosaic) -> None:
    plain = mosaic("step", *CASE, "--json", "-").document
    head = mosaic("step", *CASE, "--mfu-convention", "6n-head", "--json", "-").document
    assert head["mfu"] > plain["mfu"]
    assert head["step_time_s"] == plain["step_time_s"]
    muon = mosaic("step", *CASE, "--optimizer", "muon", "--json", "-").document
    assert muon["memory_bytes"] < plain["memory_bytes"]


def test_step_takes_the_precision(mosaic: Mosaic) -> None:
    plain = mosaic("step", *CASE, "--json", "-").document
    fp8 = mosaic("step", *CASE, "--precision", "fp8", "--json", "-").document
    key = "compute_experts"
    assert fp8["breakdown_s"][key] < plain["breakdown_s"][key]
    assert fp8["breakdown_s"]["compute_attention_core"] == pytest.approx(
        plain["breakdown_s"]["compute_attention_core"]
    )
    assert any("precision=fp8" in flag for flag in fp8["flags"])
    assert mosaic("step", *CASE, "--precision", "bf16", "--json", "-").document == plain


def test_step_takes_a_model_from_a_file(mosaic: Mosaic, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(ladder(2, 8, 2, 1).model_dump_json(), "utf-8")
    from_file = mosaic("step", *changed(CASE, **{"--model": str(path)}), "--json", "-")
    assert from_file.document == mosaic("step", *CASE, "--json", "-").document


@pytest.mark.parametrize(
    ("layout", "kept"),
    [
        ("balanced", "balanced"),
        ("3/2/3", "3/2/3"),
        ('"Et*3|t*2,|t*3L"', "Et*3|tt|t*3L"),
    ],
)
def test_uneven_stages_are_checked_and_priced(mosaic: Mosaic, layout: str, kept: str) -> None:
    plan = f"ep=2,pp=3,dp=16,layout={layout}"
    case = ("--plan", plan, *CASE[:2], "--cluster", "p6-b200:6", *CASE[6:])
    assert mosaic("check", *case, "--json", "-").document["legal"] is True
    step = mosaic("step", *case, "--json", "-").document
    assert step["plan"]["layout"] == kept
    assert len(step["memory_by_stage_bytes"]) == 3
    assert f"layout={kept}" in mosaic("step", *case).out
    short = mosaic("check", *case[2:], "--plan", "ep=2,pp=3,dp=16")
    assert short.code == 1
    said = " ".join(short.out.split())
    assert "or give a layout, such as layout=balanced or layout=3/3/2." in said


def test_check_says_legal(mosaic: Mosaic) -> None:
    assert mosaic("check", *CASE) == Ran(0, "legal\n", "")
    document = mosaic("check", *CASE, "--json", "-").document
    assert (document["legal"], document["violations"]) == (True, [])


@pytest.mark.parametrize("command", ["step", "check"])
def test_illegal_plan_is_one_and_says_why(mosaic: Mosaic, command: str) -> None:
    case = changed(CASE, **{"--plan": "tp=16,ep=16,pp=1"})
    ran = mosaic(command, *case)
    assert (ran.code, ran.err) == (1, "")
    assert "attention_heads: tp=16 must divide n_heads=8" in " ".join(ran.out.split())
    ran = mosaic(command, *case, "--json", "-")
    assert ran.code == 1
    assert ran.document["legal"] is False
    broken = {v["rule"]: v for v in ran.document["violations"]}
    assert {"attention_heads", "experts"} <= set(broken)
    assert broken["attention_heads"]["value"] == 16
    assert broken["attention_heads"]["limit"] == 8
    assert broken["attention_heads"]["nearest"] == [8]
    assert all(v["message"].endswith(".") for v in broken.values())


@pytest.mark.parametrize("command", ["step", "check"])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"--model": "ladder:q=2,E=8"}, "lacks K, G"),
        ({"--model": "gpt-4"}, "--model 'gpt-4'"),
        ({"--model": "DeepSek-V3"}, "did you mean DeepSeek-V3"),
        ({"--model": "missing.yaml"}, "missing.yaml cannot be read"),
        ({"--plan": "ep=8,pp"}, "'pp' is not key=value"),
        ({"--plan": "ep=0"}, "ep='0'"),
        ({"--plan": "epp=8"}, "did you mean"),
        ({"--plan": "recompute=all"}, "recompute='all'"),
        ({"--cluster": "p6-b200"}, "PACK:NODES"),
        ({"--cluster": "p6-b200:0"}, "nodes=0"),
        ({"--cluster": "h900:4"}, "no hardware pack 'h900'"),
        ({"--global-batch": "0"}, "global_batch=0"),
        ({"--global-batch": "1.5"}, "--global-batch"),
        ({"--seq": "-1"}, "seq_len=-1"),
        ({"--seq": "99999999999999999999"}, "seq_len="),
        ({"--optimizer": "sgd"}, "optimizer='sgd'"),
        ({"--precision": "fp6"}, "precision='fp6'"),
    ],
    ids=lambda v: " ".join(map(" ".join, v.items())) if isinstance(v, dict) else "",
)
def test_bad_case_is_two(mosaic: Mosaic, command: str, options: dict[str, str], said: str) -> None:
    assert_refused(mosaic(command, *changed(CASE, **options)), said)


@pytest.mark.parametrize("command", ["step", "check"])
def test_a_precision_that_the_device_lacks_is_two(mosaic: Mosaic, command: str) -> None:
    case = changed(CASE, **{"--cluster": "h100:2"})
    said = "precision=nvfp4 has no rate on H100-SXM5-80GB; it has bf16, fp8, fp8-block."
    assert_refused(mosaic(command, *case, "--precision", "nvfp4"), said)


def test_step_refuses_unknown_stack_and_convention(mosaic: Mosaic) -> None:
    assert_refused(mosaic("step", *CASE, "--stack", "jax"), "no stack profile 'jax'")
    assert_refused(mosaic("step", *CASE, "--mfu-convention", "hfu"), "6n-head")


@pytest.mark.parametrize("option", CASE[::2])
def test_missing_option_is_two(mosaic: Mosaic, option: str) -> None:
    words = [
        w for pair in zip(CASE[::2], CASE[1::2], strict=True) for w in pair if pair[0] != option
    ]
    assert_refused(mosaic("check", *words), option)


# ---------------------------------------------------------------- step --explain and plan

WHERE = (*CASE[:2], *CASE[4:])
"""The case without its plan."""


def test_explain_shows_the_step_and_why(mosaic: Mosaic) -> None:
    ran = mosaic("step", *CASE, "--explain")
    assert (ran.code, ran.err) == (0, "")
    assert mosaic("step", *CASE).out in ran.out
    for said in ("sets the pace, on stage", "from peak to step", "one change", "peak"):
        assert said in ran.out
    assert "expert_mesh: " in ran.out
    lines = ran.out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("from peak to step"))
    rows = [line.split() for line in lines[start + 1 :]]
    rows = rows[: rows.index([])]
    times = [float(row[-3]) for row in rows[:-1]]
    assert sum(times) == pytest.approx(float(rows[-1][1]), abs=0.1 * len(times))


def test_explain_json_is_the_explanation(mosaic: Mosaic) -> None:
    ran = mosaic("step", *CASE, "--explain", "--json", "-")
    assert (ran.code, ran.err) == (0, "")
    found = Explanation.model_validate_json(ran.out)
    assert ran.document["step"] == mosaic("step", *CASE, "--json", "-").document
    assert sum(loss.time_s for loss in found.waterfall) == pytest.approx(found.step.step_time_s)


def test_explain_of_an_illegal_plan_is_one(mosaic: Mosaic) -> None:
    case = changed(CASE, **{"--plan": "tp=16,ep=16,pp=1"})
    assert mosaic("step", *case, "--explain") == mosaic("step", *case)


def test_explain_says_that_memory_binds(mosaic: Mosaic) -> None:
    case = ("--model", "DeepSeek-V3", "--plan", "ep=16", *CASE[4:])
    out = " ".join(mosaic("step", *case, "--explain").out.split())
    assert "Memory binds: " in out
    assert "does not fit" in out


def test_plan_lists_what_step_says(mosaic: Mosaic) -> None:
    ran = mosaic("plan", *WHERE, "--top", "3", "--json", "-")
    assert (ran.code, ran.err) == (0, "")
    found = LayoutSearch.model_validate_json(ran.out)
    assert (found.status, len(found.layouts)) == ("found", 3)
    assert found.mfu_convention == "megatron"
    best = found.layouts[0]
    priced = mosaic(
        "step",
        *changed(CASE, **{"--plan": str(best.plan)}),
        *("--mfu-convention", "megatron", "--json", "-"),
    ).document
    assert priced["step_time_s"] == best.step_time_s
    assert priced["mfu"] == best.mfu.value
    page = mosaic("plan", *WHERE, "--top", "3")
    assert (page.code, page.err) == (0, "")
    assert f"{best.step_time_s:.3f}" in page.out
    assert f"{found.counts.fit:,} fit." in page.out
    assert f"{found.near_ties:,} layouts that fit are within" in page.out


def test_plan_searches_where_it_is_told(mosaic: Mosaic) -> None:
    where = ("--tp", "1,2", "--max-ep", "4", "--micro-batch", "2", "--recompute", "full,none")
    ran = mosaic("plan", *WHERE, *where, "--layouts", "equal", "--cp", "2", "--json", "-")
    found = LayoutSearch.model_validate_json(ran.out)
    space = found.space
    assert (space.tp, space.max_tp, space.max_ep) == ((1, 2), None, 4)
    assert (space.cp, space.micro_batch, space.layouts) == ((2,), (2,), ("equal",))
    plans = [layout.plan for layout in (*found.layouts, *found.pareto_front)]
    assert {plan.cp for plan in plans} == {2}
    assert {plan.recompute.value for plan in plans} <= {"none", "full"}
    assert max(plan.ep for plan in plans) <= 4


def test_plan_takes_a_model_with_a_prime_number_of_layers(mosaic: Mosaic) -> None:
    case = changed(WHERE, **{"--model": "DeepSeek-V3", "--cluster": "p6-b200:32"})
    ran = mosaic("plan", *case, "--pp", "4,8", "--max-tp", "2", "--json", "-")
    assert ran.code == 0
    layouts = LayoutSearch.model_validate_json(ran.out).layouts
    assert {layout.plan.layout for layout in layouts} == {"balanced"}


def test_plan_without_a_fitting_layout_is_one_and_shows_the_leanest(mosaic: Mosaic) -> None:
    ran = mosaic("plan", *WHERE, "--memory", "2.1")
    assert (ran.code, ran.err) == (1, "")
    assert "NOTHING FITS" in ran.out
    assert "short by GB" in ran.out
    ran = mosaic("plan", *WHERE, "--memory", "2.1", "--json", "-")
    assert ran.code == 1
    assert ran.document["device_memory_bytes"] == 2.1e9
    leanest = ran.document["leanest"]
    assert leanest[0]["memory_bytes"] == min(x["memory_bytes"] for x in leanest) > 2.1e9


def test_plan_without_a_legal_layout_is_one_and_names_the_rule(mosaic: Mosaic) -> None:
    ran = mosaic("plan", *WHERE, "--ep", "16", "--json", "-")
    assert (ran.code, ran.document["status"]) == (1, "nothing_legal")
    assert "must divide n_experts=8" in ran.document["reason"]
    assert "NOTHING LEGAL" in mosaic("plan", *WHERE, "--ep", "16").out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--memory", "0"], "--memory 0 must be a number of GB above 0"),
        (["--memory", "nan"], "--memory nan"),
        (["--micro-batch", "1,x"], "--micro-batch '1,x' is not a list"),
        (["--tp", "0"], "tp.0=0"),
        (["--max-tp", "0"], "max_tp=0"),
        (["--recompute", "all"], "recompute.0='all'"),
        (["--layouts", "odd"], "layouts.0='odd'"),
        (["--extrapolation", "no"], "must be refuse or flag"),
        (["--top", "0"], "top=0"),
        (["--workers", "0"], "workers=0"),
        (["--mfu-convention", "hfu"], "6n-head"),
        (["--stack", "jax"], "no stack profile 'jax'"),
        (["--json", "missing/out.json"], "its folder does not exist"),
        (["--plan", "tp=1"], "--plan"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_plan_refuses(mosaic: Mosaic, options: list[str], said: str) -> None:
    assert_refused(mosaic("plan", *WHERE, *options), said)


@pytest.mark.parametrize(
    "options",
    [
        {"--model": "gpt-4"},
        {"--cluster": "h900:4"},
        {"--seq": "-1"},
        {"--optimizer": "sgd"},
        {"--precision": "nvfp4", "--cluster": "h100:2"},
    ],
    ids=lambda v: " ".join(map(" ".join, v.items())),
)
def test_plan_of_a_bad_case_is_two(mosaic: Mosaic, options: dict[str, str]) -> None:
    bad = mosaic("plan", *changed(WHERE, **options))
    assert_refused(bad, "")
    assert bad == mosaic("check", *changed(CASE, **options))


# ---------------------------------------------------------------- the others


def test_validate_json_is_the_scoreboard(mosaic: Mosaic, monkeypatch: pytest.MonkeyPatch) -> None:
    board = scoreboard()
    monkeypatch.setattr("perfmodel.validation.scoreboard.validate", lambda *_, **__: board)
    ran = mosaic("validate", "--json", "-")
    assert (ran.code, ran.err) == (0, "")
    assert ran.document == json.loads(board.model_dump_json())
    page = mosaic("validate")
    assert (page.code, page.err) == (0, "")
    assert "24 measured runs" in page.out


def test_validate_memory_scores_peaks_run_by_run(mosaic: Mosaic) -> None:
    ran = mosaic("validate", "--memory", "--json", "-")
    assert (ran.code, ran.err) == (0, "")
    scores = memory_scores()
    assert ran.document == json.loads(scores.model_dump_json())
    page = mosaic("validate", "--memory")
    assert (page.code, page.err) == (0, "")
    assert all(f" {100 * row.error:+.1f}" in page.out for row in scores.rows)
    assert "half 1" in page.out
    assert all(reason.split()[0] in page.out for reason in scores.left_out.values())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--stack", "jax"], "no stack profile 'jax'"),
        (["--runs", "no.csv"], "no.csv cannot be read"),
        (["--memory", "--runs", "no.csv"], "no.csv cannot be read"),
    ],
)
def test_validate_refuses(mosaic: Mosaic, arguments: list[str], said: str) -> None:
    assert_refused(mosaic("validate", *arguments), said)


def test_models_lists_the_catalogue(mosaic: Mosaic) -> None:
    ran = mosaic("models")
    assert (ran.code, ran.err) == (0, "")
    assert all(name in ran.out for name in catalogue)
    assert "259.993" in ran.out
    listed = mosaic("models", "--json", "-").document["models"]
    assert [model["name"] for model in listed] == list(catalogue)
    for model in listed:
        a = Architecture.model_validate(model["architecture"])
        assert a == catalogue[model["name"]]
        assert model["n_total"] == {c.value: a.n_total(c) for c in ParameterConvention}


def test_a_model_by_name_is_priced_under_megatrons_convention(mosaic: Mosaic) -> None:
    case = changed(CASE, **{"--model": "qwen3-30b-a3b"})
    ran = mosaic("step", *case, "--mfu-convention", "megatron", "--json", "-")
    assert ran.code == 0
    document = ran.document
    assert document["architecture"]["name"] == "Qwen3-30B-A3B"
    assert document["mfu_convention"] == "megatron"
    per_token = 1e12 * document["tflops_per_device"] / document["tokens_per_s_per_device"]
    seq_len = int(CASE[CASE.index("--seq") + 1])
    assert per_token == pytest.approx(
        catalogue["Qwen3-30B-A3B"].flops_per_token("megatron", seq_len)
    )


def test_examples_lists_every_example(mosaic: Mosaic) -> None:
    ran = mosaic("examples")
    assert (ran.code, ran.err) == (0, "")
    assert all(name in ran.out for name in examples())
    document = mosaic("examples", "--json", "-").document
    assert tuple(document["examples"]) == examples()
    assert all(parse_envelope(e).name == name for name, e in document["examples"].items())


def test_schema_is_a_schema(mosaic: Mosaic) -> None:
    ran = mosaic("schema")
    assert (ran.code, ran.err) == (0, "")
    assert "window_days" in ran.document["properties"]


def test_unknown_command_is_two(mosaic: Mosaic) -> None:
    assert_refused(mosaic("optimise"), "optimise")


@pytest.mark.parametrize(
    "command", [[], *([c] for c in ("solve", "step", "plan", "check", "validate"))]
)
def test_help_is_zero(mosaic: Mosaic, command: list[str]) -> None:
    ran = mosaic(*command, "--help")
    assert (ran.code, ran.err) == (0, "")
    assert "Usage" in ran.out


# ---------------------------------------------------------------- as a process


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["examples", "--json", "-"], 0),
        (["check", *CASE, "--json", "-"], 0),
        (["check", *changed(CASE, **{"--plan": "tp=16"}), "--json", "-"], 1),
        (["check", *changed(CASE, **{"--plan": "tp=x"}), "--json", "-"], 2),
        (["solve", "--example", "nope", "--json", "-"], 2),
    ],
    ids=["examples", "legal", "illegal", "bad plan", "bad example"],
)
def test_process(arguments: list[str], code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mosaic_opt", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code
    if code == 2:
        assert (done.stdout, done.stderr.count("\n")) == ("", 1)
        assert done.stderr.startswith("error: ")
    else:
        assert done.stderr == ""
        json.loads(done.stdout)


def test_plan_whose_dp_cannot_tile_is_checked_all_the_same(mosaic: Mosaic) -> None:
    """Every broken rule is named, not only the one that the missing degree hides."""
    done = mosaic("check", *changed(CASE, **{"--plan": "pp=3"}), "--json", "-")
    assert done.code == 1
    assert {"world_size", "equal_stages"} <= {v["rule"] for v in done.document["violations"]}
