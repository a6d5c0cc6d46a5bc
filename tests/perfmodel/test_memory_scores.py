"""Predicted peaks of memory against measured ones; the profiles that they rest on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from perfmodel.calibration.fit_memory import fit_memory
from perfmodel.calibration.fit_memory import main as fit_main
from perfmodel.calibration.memory_profiles import (
    MemoryProfile,
    load_memory_profile,
    shipped_memory_profiles,
)
from perfmodel.calibration.records import PackError
from perfmodel.calibration.stacks import load_stack
from perfmodel.cluster import Batch
from perfmodel.errors import PerfmodelError
from perfmodel.plan import Plan
from perfmodel.stack import MEMORY_CONSTANTS
from perfmodel.step import estimate
from perfmodel.validation.memory_runs import (
    MemoryCase,
    measured_runs,
    nanotron_cases,
    nanotron_layers,
    predicted_bytes,
    published_cases,
    why_not,
)
from perfmodel.validation.memory_scores import (
    LabelScore,
    MemoryScores,
    memory_scores,
    shipped_sweep,
    stack_of,
    sweep_score,
)

from .strategies import cluster, dense, moe

SWEEP = "published_runs/hf_ultrascale_h100.csv"


@pytest.fixture(scope="module")
def scores() -> MemoryScores:
    return memory_scores()


# ---------------------------------------------------------------- measured peaks


def test_megatron_with_transformer_engine_is_within_two_percent(scores: MemoryScores) -> None:
    """37 runs on B200: dense and sparse, TP 1 to 8, PP 1 and 2, CP 1 to 8, EP 4 and 8."""
    rows = [row for row in scores.rows if row.stack == "megatron-te"]
    assert len(rows) == 37
    assert max(abs(row.error) for row in rows) < 0.02


def test_the_constants_of_one_half_predict_the_other_half() -> None:
    """Fitted on half 0, the fit is as good on half 1: its constants are not of single rows."""
    profile = load_memory_profile("megatron-te")
    runs = [c for c in published_cases() if c.stack == profile.name]
    start = profile.on(load_stack("megatron-eager").stack())
    fitted = fit_memory([c for c in runs if c.half == 0], profile.fitted, start)
    other = [c for c in runs if c.half == 1]
    assert len(other) >= 10
    for case in other:
        assert case.measured_bytes is not None
        assert predicted_bytes(case, fitted) == pytest.approx(case.measured_bytes, rel=0.025)


def test_recipes_with_bf16_gradients_and_moments(scores: MemoryScores) -> None:
    """Megatron-Bridge on H100; without its two facts Moonlight would be a third too large."""
    rows = [row for row in scores.rows if row.stack == "megatron-bridge"]
    assert len(rows) == 11
    assert sum(abs(row.error) < 0.05 for row in rows) >= 9
    assert all(abs(row.error) < 0.04 for row in rows if row.model == "Moonlight-16B")


def test_every_run_with_a_memory_is_compared_or_has_a_reason(scores: MemoryScores) -> None:
    runs = measured_runs()
    without = [run for run in runs if why_not(run)]
    assert len(scores.left_out) == len(without)
    assert len(scores.rows) == sum(run.memory_bytes is not None for run in runs) - len(without)


def test_groups_are_of_their_rows(scores: MemoryScores) -> None:
    for group in scores.peaks:
        errors = [abs(r.error) for r in scores.rows if f"{r.stack}, {r.peak}" == group.group]
        assert len(errors) == group.rows
        assert group.median == pytest.approx(float(np.median(errors)))
        assert group.within_5 == pytest.approx(np.mean([e <= 0.05 for e in errors]))


# ---------------------------------------------------------------- the sweep of nanotron


def test_shipped_score_of_the_sweep() -> None:
    """At least 95% of the labels are right on the half that fitted nothing."""
    labels = {score.group: score for score in shipped_sweep().labels}
    assert labels["half 1"].accuracy > 0.95
    assert labels["all"].rows == labels["half 0"].rows + labels["half 1"].rows
    assert LabelScore(group="", fit_right=3, out_right=1, missed=2, alarms=4).accuracy == 0.4


def test_the_shipped_score_is_what_the_table_gives(shared_data: Path) -> None:
    shipped = shipped_sweep()
    assert sweep_score(shared_data / SWEEP, shipped.date).labels == shipped.labels


def test_constants_of_nanotron_are_what_the_fit_prints(
    shared_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit_main(["--profile", "nanotron", "--nanotron", str(shared_data / SWEEP)])
    printed = capsys.readouterr().out
    profile = load_memory_profile("nanotron")
    for name in profile.fitted:
        line = next(line for line in printed.splitlines() if line.startswith(f"{name} = "))
        assert float(line.split("=")[1]) == pytest.approx(profile.constants[name].value, rel=0.01)


def test_nanotron_deals_out_blocks_by_their_cost() -> None:
    """16 layers and a head worth 4 of them over 2 stages: 10 before the head's stage, or 11."""
    a = dense(n_layers=16, d_model=2048, n_heads=32, n_kv_heads=32, d_ff=8192, vocab_size=131072)
    assert nanotron_layers(a, 2, fixed=True) == ((10, 6), 1)
    assert nanotron_layers(a, 2, fixed=False) == ((11, 5), 1)
    assert nanotron_layers(a, 1, fixed=True) == ((16,), 0)
    counts, head = nanotron_layers(a, 8, fixed=True)
    assert (sum(counts), counts[0]) == (16, 3)
    assert head >= max(i for i, n in enumerate(counts) if n)


def test_a_sweep_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PerfmodelError, match="cannot be read"):
        nanotron_cases(tmp_path / "none.csv")


# ---------------------------------------------------------------- profiles and their fit


@pytest.mark.parametrize("name", shipped_memory_profiles())
def test_shipped_profiles(name: str) -> None:
    profile = load_memory_profile(name)
    assert profile.name == name
    assert set(profile.constants) == set(MEMORY_CONSTANTS)
    stack = profile.on(load_stack("megatron-eager").stack())
    assert stack.host_layer_s == load_stack("megatron-eager").stack().host_layer_s
    assert stack.logit_bytes == profile.constants["logit_bytes"].value


def test_a_profile_must_be_complete() -> None:
    content = load_memory_profile("nanotron").model_dump()
    del content["constants"]["logit_bytes"]
    with pytest.raises(ValueError, match="constants lack logit_bytes"):
        MemoryProfile.model_validate(content)
    with pytest.raises(PackError, match="no memory profile 'nano'"):
        load_memory_profile("nano")


def test_a_profile_goes_onto_a_stack() -> None:
    """The step keeps its time and gets another memory."""
    profile = load_stack("megatron-eager")
    other = load_memory_profile("megatron-te").onto(profile)
    batch = Batch(global_batch=16, seq_len=2048)
    one, two = (
        estimate(moe(), Plan(dp=16), cluster(2), batch, stack=stack) for stack in (profile, other)
    )
    assert one.step_time_s == two.step_time_s
    assert two.memory_buckets_bytes[0]["logits"] == one.memory_buckets_bytes[0]["logits"] / 5
    assert two.memory_buckets_bytes[0]["working"] > 0


def test_a_fit_finds_the_constants_that_made_the_peaks() -> None:
    truth = stack_of("nanotron")._replace(
        logit_bytes=11.0, working_widths=3.0, wgrad_bytes=1.5, gradient_memory_bytes=5.0
    )
    names = ("logit_bytes", "working_widths", "wgrad_bytes", "gradient_memory_bytes")
    cases = [
        case._replace(measured_bytes=float(predicted_bytes(case, truth)))
        for case in published_cases()
        if case.stack == "megatron-te"
    ]
    found = fit_memory(cases, names, truth._replace(**dict.fromkeys(names, 1.0)))
    for name in names:
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=1e-6)


def test_kinds_of_peaks_are_nested() -> None:
    """Allocated is within reserved, which is within what the device holds."""
    case: MemoryCase = published_cases()[0]
    stack = stack_of("nanotron")._replace(reserve_share=0.1, framework_bytes=1e9)
    allocated, reserved, device = (
        predicted_bytes(case._replace(peak=kind, stage=0), stack)
        for kind in ("allocated", "reserved", "device")
    )
    assert reserved == pytest.approx(1.1 * allocated)
    assert device == pytest.approx(reserved + 1e9)
