"""`mosaic stages`: pages, JSON, exit codes and one-sentence refusals."""

from __future__ import annotations

import io
import json
import sys
from typing import NamedTuple

import pytest
from rich.console import Console

from mosaic_opt import cli
from mosaic_opt.report_stages import ProgressLines, render_stages
from mosaic_opt.stage_search import StageProgress, StageSearch, search_stages
from perfmodel.architecture import Architecture
from perfmodel.cluster import Batch, Cluster
from perfmodel.ladders import ladder
from perfmodel.plan import Plan, Recompute

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
    assert lines[-1].endswith("gap 0.00%")
    assert len(set(lines)) == len(lines)


def test_the_page_names_layout_bound_and_stages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = run(monkeypatch, capsys, recompute="full")
    assert ran.code == 0
    assert "OPTIMAL" in ran.out
    for word in ("slowest stage", "bound", "balanced", "layout  E", "plan    tp=1"):
        assert word in ran.out
    assert sum(line.startswith(tuple("0123")) for line in ran.out.splitlines()) == 4


def shown(search: StageSearch) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render_stages(search))
    return console.export_text()


@pytest.mark.parametrize(("n_layers", "taken"), [(8, "search"), (13, "balanced")])
def test_the_page_shows_the_layout_to_take(n_layers: int, taken: str) -> None:
    fields = ladder(1, 8, 2, 1).model_dump() | {"n_layers": n_layers, "mtp_layers": 1}
    fields |= {"first_k_dense": 0, "d_ff": 4096}
    found = search_stages(
        Architecture.model_validate(fields),
        Plan(pp=2, vpp=2, dp=2),
        Cluster.parse("p6-b200:4gpus"),
        Batch(global_batch=32, seq_len=1024),
        recompute=[Recompute.FULL],
    )
    assert found.recommended == taken
    page = shown(found)
    assert page.count("Recommended: ") == 1
    assert f"layout  {found.recommended_layout}\n" in page
    assert f"plan    {found.recommended_plan}\n" in page
    other = f"fastest slowest stage  {found.layout}"
    assert (other in page) == (taken == "balanced")
    if taken == "balanced":
        assert "Recommended: the balanced layout, whose step is" in page
    assert StageSearch.model_validate_json(found.model_dump_json()) == found


def state(slowest_s: float | None, bound_s: float) -> StageProgress:
    return StageProgress(slowest_s=slowest_s, bound_s=bound_s, seconds=0.0)


def test_a_line_only_for_what_is_news() -> None:
    lines: list[str] = []
    written = ProgressLines(lines.append)
    for one in (
        state(None, 0.100),
        state(None, 0.1005),  # not by 1%
        state(None, 0.102),
        state(0.2, 0.102),
        state(0.2 * (1 - 1e-12), 0.102),  # the search's rounding
        state(0.19, 0.102),
        state(0.19, 0.1899),
        state(0.19, 0.19),  # the last
    ):
        written.update(one)
    assert len(lines) == 5
    written.finish()
    written.finish()
    assert [line.split("s  ")[1] for line in lines] == [
        "no layout yet, bound 100.000 ms",
        "no layout yet, bound 102.000 ms",
        "slowest stage 200.000 ms, bound 102.000 ms, gap 49.00%",
        "slowest stage 190.000 ms, bound 102.000 ms, gap 46.32%",
        "slowest stage 190.000 ms, bound 189.900 ms, gap 0.05%",
        "slowest stage 190.000 ms, bound 190.000 ms, gap 0.00%",
    ]


def test_nothing_told_is_no_line() -> None:
    lines: list[str] = []
    ProgressLines(lines.append).finish()
    assert lines == []


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
