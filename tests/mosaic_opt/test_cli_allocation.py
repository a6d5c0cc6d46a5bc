"""The commands phases, invert and allocation-law: pages, JSON and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mosaic_opt.allocation.inverse import Inverse
from mosaic_opt.allocation.phases import Phases, PhasesByNodes, phases
from mosaic_opt.allocation.regime import AllocationLaw

from .strategies import Run, tiny_envelope, written


def test_phases_as_a_page(mosaic: Run, tmp_path: Path) -> None:
    code, out, err = mosaic("phases", written(tmp_path))
    assert (code, err) == (0, "")
    found = phases(tiny_envelope())
    assert f"tiny on 1 nodes (8 devices): {len(found.phases)} phases" in out
    for phase in found.phases:
        assert phase.architecture.removeprefix("ladder:") in out
        assert f"{phase.days_to:.5g}" in out
        assert f"{phase.loss_to:.4f}" in out


def test_phases_as_json(mosaic: Run, tmp_path: Path) -> None:
    code, out, _ = mosaic("phases", written(tmp_path), "--days", "0.5,2", "--json", "-")
    assert code == 0
    document = json.loads(out)
    assert document["schema_version"] == 1
    keys = {"days_from", "days_to", "architecture", "plan", "loss_from", "loss_to"}
    assert keys <= set(document["phases"][0])
    found = Phases.model_validate_json(out)
    assert found == phases(tiny_envelope(), days_from=0.5, days_to=2.0)


def test_phases_of_several_node_counts(mosaic: Run, tmp_path: Path) -> None:
    file = written(tmp_path)
    target = tmp_path / "out.json"
    code, out, _ = mosaic("phases", file, "--nodes", "2,1", "--json", str(target))
    assert code == 0
    assert "tiny on 1 nodes" in out
    assert "tiny on 2 nodes" in out
    found = PhasesByNodes.model_validate_json(target.read_text("utf-8"))
    assert [p.nodes for p in found.clusters] == [1, 2]


def test_no_phase_is_exit_1(mosaic: Run, tmp_path: Path) -> None:
    code, out, _ = mosaic("phases", written(tmp_path, memory_fraction=0.001))
    assert code == 1
    assert "no candidate has a layout that is legal and fits" in out
    rule = {"min_tokens_per_parameter": 50.0, "max_tokens": 1e3}
    code, out, _ = mosaic("phases", written(tmp_path, tokens=rule))
    assert code == 1
    assert "no candidate meets the token rule" in out


def test_invert_as_a_page_and_json(mosaic: Run, tmp_path: Path) -> None:
    file, target = written(tmp_path), tmp_path / "out.json"
    options = ("--loss", "4.0", "--least", "gpu-hours", "--nodes", "1,2", "--price", "2")
    code, out, err = mosaic("invert", file, *options, "--watts", "1000", "--json", str(target))
    assert (code, err) == (0, "")
    found = Inverse.model_validate_json(target.read_text("utf-8"))
    assert found.best is not None
    assert f"{found.best.nodes} *" in out
    assert f"{found.best.days:.5g}" in out
    assert "2 for a GPU-hour [ASSUMED]; 1000 W for a device [ASSUMED]" in out
    assert found.value == found.best.gpu_hours


def test_a_target_out_of_reach_is_exit_1(mosaic: Run, tmp_path: Path) -> None:
    code, out, _ = mosaic("invert", written(tmp_path), "--loss", "0.1")
    assert code == 1
    assert "Nothing reaches it." in out
    assert "the lowest that any reaches is" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["invert", "FILE"], "--loss is missing"),
        (["invert", "FILE", "--loss", "2", "--least", "time"], "--least 'time' must be one of"),
        (["invert", "FILE", "--loss", "2", "--least", "cost"], "needs price_per_gpu_hour"),
        (["invert", "FILE", "--loss", "2", "--nodes", "a"], "--nodes 'a' must be whole numbers"),
        (["phases"], "Give an envelope file or --example NAME"),
        (["phases", "FILE", "--days", "3"], "--days '3' must be two numbers"),
        (["phases", "FILE", "--days", "3,1"], "must ascend"),
        (["phases", "FILE", "--json", "/no/such/out"], "cannot be written"),
        (["allocation-law", "FILE", "--figure", "/no/such/out.html"], "cannot be written"),
        (["allocation-law", "FILE", "--bandwidth", "0"], "bandwidth=0 must be above 0"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(
    mosaic: Run, tmp_path: Path, arguments: list[str], words: str
) -> None:
    file = written(tmp_path)
    code, out, err = mosaic(*(file if a == "FILE" else a for a in arguments))
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert words in err
    assert len(err.splitlines()) == 1


def test_allocation_law_as_a_page_json_and_figure(mosaic: Run, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    target, figure = tmp_path / "out.json", tmp_path / "path.html"
    code, out, _ = mosaic(
        "allocation-law", written(tmp_path), "--json", str(target), "--figure", str(figure)
    )
    assert code == 0
    found = AllocationLaw.model_validate_json(target.read_text("utf-8"))
    assert found.architecture in out
    assert f"p {found.exponents.p:.4f}" in out
    for reason in found.violated:
        assert reason in out
    assert "exact optimum" in figure.read_text("utf-8")
