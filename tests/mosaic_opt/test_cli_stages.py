"""`mosaic stages`: pages, JSON, exit codes and one-sentence refusals."""

from __future__ import annotations

import json
import sys
from typing import NamedTuple

import pytest

from mosaic_opt import cli
from mosaic_opt.stage_search import StageSearch

CASE = {
    "--model": "ladder:q=2,E=8,K=2,G=1",
    "--plan": "pp=4,ep=4,mbs=1",
    "--cluster": "p6-b200:2",
    "--global-batch": "32",
    "--seq": "1024",
}


class Ran(NamedTuple):
    code: int
    out: str
    err: str


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], **changes: str) -> Ran:
    options = CASE | {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    words = [word for pair in options.items() for word in pair]
    monkeypatch.setattr(sys, "argv", ["mosaic", "stages", *words])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return Ran(int(left.value.code or 0), *capsys.readouterr())


def test_json_alone_on_stdout_and_progress_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = run(monkeypatch, capsys, json="-")
    assert ran.code == 0
    found = StageSearch.model_validate_json(ran.out)
    assert found.status == "optimal"
    assert len(found.stages) == 4
    lines = ran.err.strip().splitlines()
    assert lines
    assert all("slowest stage" in line and "bound" in line for line in lines)
    assert found.slowest_s is not None
    assert f"{1e3 * found.slowest_s:.3f} ms" in lines[-1]


def test_the_page_names_layout_bound_and_stages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = run(monkeypatch, capsys, recompute="full")
    assert ran.code == 0
    assert "OPTIMAL" in ran.out
    for word in ("slowest stage", "bound", "balanced", "layout  E", "plan    tp=1"):
        assert word in ran.out
    assert sum(line.startswith(tuple("0123")) for line in ran.out.splitlines()) == 4


def test_pools_share_the_stages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = run(
        monkeypatch, capsys, cluster="h100:2,b200:2", plan="pp=4,ep=8", json="-", recompute="full"
    )
    assert ran.code == 0
    found = json.loads(ran.out)
    assert [use["stages"] for use in found["pools"]] == [2, 2]
    assert found["plan"] is None
    pools = [stage["pool"] for stage in found["stages"]]
    assert sorted(pools) in (pools, pools[::-1])


def test_nothing_that_fits_is_exit_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = run(monkeypatch, capsys, memory_fraction="0.001")
    assert ran.code == 1
    assert "INFEASIBLE" in ran.out


def test_a_broken_rule_is_exit_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = run(monkeypatch, capsys, plan="pp=4,ep=16")
    assert ran.code == 1
    assert "expert_mesh" in ran.out or "ep" in ran.out


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"recompute": "most"}, "--recompute 'most' must be one of none"),
        ({"cluster": "h100"}, "is not PACK:NODES"),
        ({"cluster": "h100:1,b200:1", "plan": "pp=4,ep=8,dp=8"}, "the pools have room for 1 + 1"),
        ({"time_limit": "0"}, "time_s=0 must be above 0"),
        ({"memory_fraction": "2"}, "memory_fraction=2 must be above 0"),
        ({"workers": "0"}, "workers=0 must be at least 1"),
    ],
)
def test_bad_input_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, str],
    said: str,
) -> None:
    ran = run(monkeypatch, capsys, **changes)
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.startswith("error: ")
    assert said in ran.err
    assert ran.err.count("\n") == 1
