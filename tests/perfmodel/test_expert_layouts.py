"""Layouts of experts: what is read of them, and how near the search's best they come."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from perfmodel.calibration.stacks import load_stack
from perfmodel.errors import PerfmodelError
from perfmodel.layout_search import search_layouts
from perfmodel.overlap_rules import OVERLAP_RULES, overlap_mask
from perfmodel.plan import Plan, Recompute
from perfmodel.step import estimate
from perfmodel.validation.expert_layouts import (
    AIM,
    FIELDS,
    ROOM,
    ExpertScore,
    main,
    score_case,
    score_cases,
    scores_csv,
    share_of_layouts,
    shares_of,
)
from perfmodel.validation.expert_rows import COLUMNS, ExpertCase, ExpertTable, expert_cases
from perfmodel.validation.expert_spaces import spaces_of

ROWS = 400

# Of each kind one: dense with ZeRO-3 in its space, experts within a node, experts over nodes.
FEW = (
    ("LLAMA3_8B", "h100", "bf16", 128),
    ("QWEN3_30B_A3B", "gb200", "bf16", 512),
    ("GPT_OSS_120B", "b300", "bf16", 512),
    ("DEEPSEEK_V3", "b200", "bf16", 4096),
)


@cache
def table() -> ExpertTable:
    return expert_cases()


def case(model: str, hardware: str, precision: str, batch: int) -> ExpertCase:
    wanted = (model, hardware, precision, batch)
    return next(
        c
        for c in table().cases
        if (c.run.model, c.run.hardware, c.run.precision, c.run.global_batch) == wanted
    )


@cache
def score(of: tuple[str, str, str, int]) -> ExpertScore:
    return score_case(case(*of))


# ---------------------------------------------------------------- the table


def test_every_row_is_priced_or_has_a_reason() -> None:
    priced = [row for c in table().cases for row in c.rows]
    left = [e.row for e in table().excluded]
    assert sorted(priced + left) == list(range(1, ROWS + 1))
    assert all(e.reason.endswith(".") and e.reason.count("\n") == 0 for e in table().excluded)
    assert len(table().cases) == 190


def test_no_case_is_there_twice() -> None:
    keys = [(c.run.model, c.run.phase, c.run.hardware, c.run.devices) for c in table().cases]
    full = [(*k, c.run.batch, c.run.plan) for k, c in zip(keys, table().cases, strict=True)]
    assert all(full.count(key) == 1 for key in full)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("kimi_k2_pretrain_256gpu_b300_bf16_config", "Weights alone"),
        ("LLAMA3_70B_PRETRAIN_CONFIG_GB300_BF16_V2", "Offload"),
        ("LLAMA3_8B_PRETRAIN_CONFIG_H100_FP8_CS_V1", "5 of a stage's layers"),
    ],
)
def test_reasons(name: str, words: str) -> None:
    reasons = [e.reason for e in table().excluded if e.name == name]
    assert reasons
    assert all(words in reason for reason in reasons)


def test_peft_is_left_out() -> None:
    found = [e.reason for e in table().excluded if "adapters" in e.reason]
    assert len(found) == 7


def test_plans_are_those_of_the_rows() -> None:
    h100 = case("DEEPSEEK_V3", "h100", "fp8", 8192).run
    assert (h100.plan.layout or "").startswith("Et")
    assert (h100.tp, h100.pp, h100.vpp, h100.ep, h100.dp) == (2, 8, 4, 64, 64)
    assert h100.plan.recompute_modules == ("mla_up_proj", "mlp")
    b200 = case("DEEPSEEK_V3", "b200", "bf16", 4096).run
    assert b200.layout == "/".join(["4"] * 15 + ["1"])
    fsdp = case("LLAMA3_70B", "b300", "bf16", 256).run
    assert (fsdp.plan.zero, fsdp.pp) == (3, 1)


def test_switches_follow_from_the_row() -> None:
    assert case("DEEPSEEK_V3", "h100", "fp8", 8192).stack == "megatron-bridge-h100"
    assert case("DEEPSEEK_V3", "b200", "bf16", 4096).stack == "megatron-bridge+26.08"
    assert case("DEEPSEEK_V3", "gb300", "mxfp8", 2048).stack.count("+overlap+ultra") == 1
    assert case("GPT_OSS_120B", "b300", "bf16", 512).stack == "megatron-bridge+ultra+sinks"


def test_a_bad_cell_is_a_reason_and_a_missing_column_an_error(tmp_path: Path) -> None:
    cells = dict.fromkeys(COLUMNS, "")
    cells |= {"model": "LLAMA3_8B", "phase": "PRETRAIN", "gpu": "B200", "precision": "BF16"}
    cells |= {"n_gpus": "8", "gbs": "lots", "mbs": "1", "name": "odd"}
    path = tmp_path / "rows.csv"
    path.write_text(",".join(cells) + "\n" + ",".join(cells.values()) + "\n", "utf-8")
    assert "gbs='lots'" in expert_cases(path).excluded[0].reason
    path.write_text("tag,name\nx,y\n", "utf-8")
    with pytest.raises(PerfmodelError, match="lacks the columns model"):
        expert_cases(path)


# ---------------------------------------------------------------- rules of overlap


def test_recipes_with_overlap_obey_its_rules() -> None:
    with_it = [c.run.plan for c in table().cases if "overlap" in c.stack]
    assert len(with_it) >= 15
    assert overlap_mask(_columns(with_it)).all()


def test_each_rule_of_overlap_refuses_something() -> None:
    good = Plan(ep=8, pp=2, vpp=2, dp=8)
    bad = [
        good.model_copy(update={"ep": 1}),
        good.model_copy(update={"vpp": 1}),
        good.model_copy(update={"recompute": Recompute.FULL}),
    ]
    assert overlap_mask(_columns([good, *bad])).tolist() == [True, False, False, False]
    assert len(OVERLAP_RULES) == len(bad)


def _columns(plans: list[Plan]) -> dict[str, np.ndarray]:
    return {
        "ep": np.array([p.ep for p in plans]),
        "pp": np.array([p.pp for p in plans]),
        "vpp": np.array([p.vpp for p in plans]),
        "recompute": np.array([p.recompute.code if not p.recompute_modules else 1 for p in plans]),
    }


# ---------------------------------------------------------------- scores


@pytest.mark.parametrize("of", FEW)
def test_scores_are_those_of_the_scalar_estimate(of: tuple[str, str, str, int]) -> None:
    chosen, found = case(*of), score(of)
    run, stack = chosen.run, load_stack(chosen.stack)
    expert = estimate(run.architecture, run.plan, run.cluster, run.batch, stack=stack)
    best = Plan.parse(found.best)
    priced = estimate(run.architecture, best, run.cluster, run.batch, stack=stack)
    assert found.expert_s == pytest.approx(expert.step_time_s, rel=1e-12)
    assert found.expert_bytes == pytest.approx(expert.memory_bytes, rel=1e-12)
    assert found.best_s == pytest.approx(priced.step_time_s, rel=1e-9)
    assert priced.fits
    assert found.ratio == pytest.approx(priced.step_time_s / expert.step_time_s, rel=1e-9)
    assert (found.rank == 1) == (found.ratio >= 1.0 - 1e-9)
    assert 0 <= found.near_plans <= found.fitting <= found.priced
    assert found.roomy_ratio <= found.ratio <= found.search_ratio


@pytest.mark.parametrize("of", FEW)
def test_the_best_is_the_searchs(of: tuple[str, str, str, int]) -> None:
    chosen, found = case(*of), score(of)
    run = chosen.run
    room = ROOM * run.cluster.device_memory_bytes
    cluster = run.cluster.model_copy(update={"memory_bytes": room})
    searched = [
        search_layouts(
            run.architecture,
            cluster,
            run.batch,
            space,
            stack=chosen.stack,
            top=1,
            pairs=1,
            extrapolation="flag",
        )
        for space in spaces_of(chosen)
    ]
    best = min(s.layouts[0].step_time_s for s in searched)
    assert found.fitting == sum(s.counts.fit for s in searched)
    assert found.search_ratio * found.expert_s == pytest.approx(best, rel=1e-9)
    own = found.expert_s if found.expert_fits else best
    assert found.best_s <= min(best, own) * (1.0 + 1e-9)


def test_what_an_expert_may_choose_others_may() -> None:
    found = score(("DEEPSEEK_V3", "b200", "bf16", 4096))
    assert found.search_ratio > 1.0  # the search itself knows no mla_up_proj alone
    assert found.ratio <= 1.0
    assert found.rank == 1 or "mla_up_proj" in found.best or "layout=" in found.best


def test_newer_recipe_moves_to_the_best() -> None:
    older, newer = score(FEW[2]), score(("GPT_OSS_120B", "b300", "bf16", 1280))
    assert "ep 64>8" in older.differs
    assert "ep=8," in newer.expert
    assert newer.near
    assert not older.near


def test_an_expert_that_does_not_fit_is_said_to() -> None:
    found = score(("QWEN3_30B_A3B", "b300", "bf16", 512))
    assert not found.expert_fits
    assert found.expert_bytes > found.device_bytes
    assert found.heaviest == "activations"
    assert found.roomy_ratio <= found.ratio


def test_less_room_leaves_fewer_plans() -> None:
    chosen = case("QWEN3_30B_A3B", "gb200", "bf16", 512)
    less = score_case(chosen, room=0.7)
    assert less.fitting < score(("QWEN3_30B_A3B", "gb200", "bf16", 512)).fitting
    assert less.best_bytes <= 0.7 * chosen.run.cluster.device_memory_bytes
    with pytest.raises(PerfmodelError, match="No layout of the space fits"):
        score_case(chosen, room=1e-6)


def test_shares_and_csv() -> None:
    scores = [score(of) for of in FEW]
    every = {(s.by, s.name): s for s in shares_of(scores)}
    assert (every["all", "all"].near, every["all", "all"].cases) == (3, 4)
    assert every["device", "b300"].share == 0.0
    assert share_of_layouts([*scores, scores[2]]) == (4, 0.75)
    lines = scores_csv(scores).splitlines()
    assert tuple(lines[0].split(",")) == FIELDS
    assert len(lines) == 1 + len(scores)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "nothing"]) == 2
    path = tmp_path / "scores.csv"
    assert main(["--only", "llama3_8b h100", "--csv", str(path)]) == 0
    out = capsys.readouterr().out
    assert "LLAMA3_8B 8xh100 bf16" in out
    assert "1 different layouts" in out
    assert len(path.read_text("utf-8").splitlines()) == 2


@pytest.mark.slow
def test_experts_are_near_the_best() -> None:
    scores = score_cases(table().cases)
    every = shares_of(scores)[0]
    assert every.share >= AIM
    assert every.roomy_near >= AIM * every.cases
    assert every.chance < 0.1  # a plan at random is seldom as near
    assert share_of_layouts(scores)[1] >= AIM
