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
from mosaic_opt.result import Solution
from perfmodel.architecture import Architecture, ParameterConvention
from perfmodel.ladders import ladder
from perfmodel.models import catalogue

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


# ---------------------------------------------------------------- solve


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
    ids=lambda v: " ".join(*v.items()) if isinstance(v, dict) else "",
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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--stack", "jax"], "no stack profile 'jax'"),
        (["--runs", "no.csv"], "no.csv cannot be read"),
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


@pytest.mark.parametrize("command", [[], *([c] for c in ("solve", "step", "check", "validate"))])
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
