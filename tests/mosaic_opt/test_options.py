"""Options of routing and of plans: on the command line and in envelopes, down to the kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from mosaic_opt.envelope import load_envelope
from mosaic_opt.errors import EnvelopeError
from mosaic_opt.problem import Problem
from mosaic_opt.report import as_text, render_step
from perfmodel.layout_search import LayoutSearch
from perfmodel.routing import Routing
from perfmodel.step import StepEstimate

from .strategies import tiny, tiny_ladder
from .test_cli import CASE, WHERE, Mosaic, assert_refused, changed, mosaic

__all__ = ["mosaic"]

JSON = ("--json", "-")
BY_DATA = changed(CASE, **{"--plan": "ep=8,dp=16"})


# ---------------------------------------------------------------- routing on the command line


def test_step_takes_an_imbalance(mosaic: Mosaic) -> None:
    even = StepEstimate.model_validate_json(mosaic("step", *CASE, *JSON).out)
    ran = mosaic("step", *CASE, "--imbalance", "1.5", *JSON)
    uneven = StepEstimate.model_validate_json(ran.out)
    ratio = uneven.breakdown_s["compute_experts"] / even.breakdown_s["compute_experts"]
    assert 1.2 < ratio <= 1.5
    assert uneven.breakdown_s["all_to_all"] > even.breakdown_s["all_to_all"]
    assert uneven.breakdown_s["compute_attention_core"] == pytest.approx(
        even.breakdown_s["compute_attention_core"]
    )
    assert any("load=1.5" in flag and "ASSUMED" in flag for flag in uneven.flags)
    assert not any("load=" in flag for flag in even.flags)
    assert mosaic("step", *CASE, "--imbalance", "1", *JSON).out == mosaic("step", *CASE, *JSON).out


def test_a_capacity_bounds_the_load_and_says_what_it_drops(mosaic: Mosaic) -> None:
    routing = ("--imbalance", "2", "--capacity-factor", "1.25")
    capped = mosaic("step", *CASE, *routing, *JSON).document
    bounded = mosaic("step", *CASE, "--imbalance", "1.25", *JSON).document
    assert capped["step_time_s"] == bounded["step_time_s"]
    assert capped["dropped_tokens_share"] is None  # one factor does not say of all experts
    assert bounded["dropped_tokens_share"] == 0
    assert capped["sources"]["dropped_tokens_share"] == "ASSUMED"
    assert "dropped" in mosaic("step", *CASE, *routing).out
    assert "dropped" not in mosaic("step", *CASE, "--imbalance", "2").out


def test_a_known_share_of_dropped_tokens_is_printed(mosaic: Mosaic) -> None:
    step = StepEstimate.model_validate_json(mosaic("step", *CASE, *JSON).out)
    page = as_text(render_step(step.model_copy(update={"dropped_tokens_share": 0.0625})))
    assert "6.25% of the routed tokens" in " ".join(page.split())


@pytest.mark.parametrize("command", ["step", "check"])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--imbalance", "0.5"), "imbalance=0.5"),
        (("--imbalance", "nan"), "imbalance"),
        (("--capacity-factor", "0"), "capacity_factor=0"),
        (("--capacity-factor", "-1"), "capacity_factor=-1"),
        (("--imbalance", "much"), "imbalance"),
    ],
)
def test_a_routing_that_cannot_be_is_two(
    mosaic: Mosaic, command: str, options: tuple[str, ...], said: str
) -> None:
    assert_refused(mosaic(command, *CASE, *options), said)


def test_check_takes_the_routing_of_a_step(mosaic: Mosaic) -> None:
    assert mosaic("check", *CASE, "--imbalance", "2", "--capacity-factor", "2").code == 0


def test_plan_ranks_layouts_under_an_imbalance(mosaic: Mosaic) -> None:
    where = (*WHERE, "--ep", "8", "--micro-batch", "1", "--recompute", "none", *JSON)
    even, uneven = (
        LayoutSearch.model_validate_json(mosaic("plan", *where, *more).out)
        for more in ((), ("--imbalance", "4"))
    )
    best = uneven.layouts[0]
    assert best.step_time_s > even.layouts[0].step_time_s
    case = changed(CASE, **{"--plan": str(best.plan)})
    step = mosaic("step", *case, "--imbalance", "4", *JSON).document
    assert step["step_time_s"] == best.step_time_s


# ---------------------------------------------------------------- spaces on the command line


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        (("--zero", "0"), "zero", 0),
        (("--zero", "3", "--pp", "1"), "zero", 3),
        (("--cp-comm", "a2a", "--cp", "2"), "cp_comm", "a2a"),
        (("--no-sequence-parallel", "--tp", "1"), "sequence_parallel", False),
        (("--sequence-parallel",), "sequence_parallel", True),
        (("--optimizer-offload", "0.5"), "optimizer_offload", 0.5),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, tuple) else "",
)
def test_plan_takes_an_option_of_every_layout(
    mosaic: Mosaic, options: tuple[str, ...], field: str, value: Any
) -> None:
    ran = mosaic("plan", *WHERE, *options, "--micro-batch", "1", "--top", "2", *JSON)
    assert (ran.code, ran.err) == (0, "")
    found = LayoutSearch.model_validate_json(ran.out)
    assert getattr(found.space, field) == value
    best = found.layouts[0]
    assert {getattr(layout.plan, field) for layout in found.layouts} == {value}
    step = mosaic("step", *changed(CASE, **{"--plan": str(best.plan)}), *JSON).document
    assert step["step_time_s"] == best.step_time_s
    assert step["memory_bytes"] == pytest.approx(best.memory_bytes)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--zero", "4"), "zero=4"),
        (("--zero", "-1"), "zero=-1"),
        (("--zero", "x"), "zero"),
        (("--cp-comm", "ring"), "cp_comm='ring': input should be 'p2p' or 'a2a'"),
        (("--optimizer-offload", "2"), "optimizer_offload=2"),
        (("--optimizer-offload", "nan"), "optimizer_offload"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, tuple) else "",
)
def test_plan_refuses_an_option(mosaic: Mosaic, options: tuple[str, ...], said: str) -> None:
    assert_refused(mosaic("plan", *WHERE, *options), said)


# ---------------------------------------------------------------- the page of a step


def test_step_prints_its_interval_and_whose_it_is(mosaic: Mosaic) -> None:
    step = mosaic("step", *BY_DATA, *JSON).document
    low, high = step["step_time_interval_s"]
    page = " ".join(mosaic("step", *BY_DATA).out.split())
    assert f"{low:.4f} to {high:.4f} s, by runs left out of the stack's fit" in page
    assert ("lies outside of what they cover" in page) is (not step["interval_applies"])
    inside = StepEstimate.model_validate(step | {"interval_applies": True})
    assert "outside of what they cover" not in as_text(render_step(inside))


def test_step_prices_the_options_of_its_plan_and_says_them(mosaic: Mosaic) -> None:
    plain = mosaic("step", *BY_DATA, *JSON).document
    for option, grows in (
        ("zero=2", "sharding"),
        ("zero=3", "sharding"),
        ("optimizer_offload=1", "optimizer"),
    ):
        case = changed(CASE, **{"--plan": f"ep=8,dp=16,{option}"})
        step = mosaic("step", *case, *JSON).document
        assert step["breakdown_s"][grows] > plain["breakdown_s"][grows], option
        assert sum(step["breakdown_s"].values()) == pytest.approx(step["step_time_s"])
        name = option.removeprefix("optimizer_")
        assert any(name in flag and "no run" in flag for flag in step["flags"]), option


# ---------------------------------------------------------------- envelopes


OPTIONS: dict[str, dict[str, Any]] = {
    "zero": {"plans": {"zero": 3, "pp": [1]}},
    "instances": {"plans": {"optimizer_instances": 2}},
    "heads": {"plans": {"cp_comm": "a2a", "cp": [2]}},
    "sequence": {"plans": {"sequence_parallel": False}},
    "offload": {"plans": {"optimizer_offload": 0.5}},
    "imbalance": {"batch": {"routing": {"imbalance": 2.5}}},
    "capacity": {"batch": {"routing": {"imbalance": 2.5, "capacity_factor": 1.5}}},
    "padded": {"batch": {"routing": {"capacity_factor": 1.25, "pad_to_capacity": True}}},
    "distribution": {
        "batch": {"routing": {"tokens_per_expert": [1, 1, 1, 1, 1, 1, 1, 5]}},
        "candidates": {"n_experts": [8]},
    },
}


def with_option(name: str) -> dict[str, Any]:
    content = tiny()
    content["candidates"] = tiny_ladder(q=[2], expert_split=[1], top_k=[2], n_experts=[8])
    for field, changes in OPTIONS[name].items():
        content[field] = content[field] | changes
    return content


@pytest.mark.parametrize("name", OPTIONS)
def test_an_envelopes_options_reach_the_kernel(name: str, tmp_path: Path) -> None:
    """Written as YAML and read again; the kernel and the scalar estimate say the same."""
    path = tmp_path / "envelope.yaml"
    path.write_text(yaml.safe_dump(with_option(name)), "utf-8")
    envelope = load_envelope(path)
    plans, routing = OPTIONS[name].get("plans", {}), envelope.batch.routing
    for field, value in plans.items():
        kept = getattr(envelope.plans, field)
        assert kept == (tuple(value) if isinstance(value, list) else value)
    if "batch" in OPTIONS[name]:
        assert routing == Routing.model_validate(OPTIONS[name]["batch"]["routing"])
    problem = Problem(envelope)
    rows = problem.legal_rows(0)
    rows = rows[:: max(1, len(rows) // 12)]
    step_s, memory = problem.price(0, rows)
    assert len(rows) > 3
    for i, row in enumerate(rows):
        step = problem.reprice(0, problem.table.plan(int(row)))
        assert step_s[i] == pytest.approx(step.step_time_s, rel=1e-12)
        assert memory[i] == pytest.approx(step.memory_bytes, rel=1e-12)


@pytest.mark.parametrize("name", OPTIONS)
def test_an_envelopes_options_change_the_prices(name: str) -> None:
    content = with_option(name)
    default = content | {"batch": tiny()["batch"]}
    default["plans"] = {k: v for k, v in content["plans"].items() if k in ("pp", "cp")}
    default["plans"] |= tiny()["plans"]
    found, plain = (_prices(c) for c in (content, default))
    same = [plan for plan in found if plan in plain]
    assert len(same) > 3
    changed_s = [plan for plan in same if found[plan] != plain[plan]]
    assert changed_s or name == "sequence"  # no layout with TP is legal for experts without it
    if name == "sequence":
        assert {plan[0] for plan in found} == {1} < {plan[0] for plan in plain}


def _prices(content: dict[str, Any]) -> dict[tuple[int, ...], tuple[float, float]]:
    """Return time and memory of every legal layout of the first candidate, by its degrees."""
    from mosaic_opt.envelope import parse_envelope

    problem = Problem(parse_envelope(content))
    rows = problem.legal_rows(0)
    step_s, memory = problem.price(0, rows)
    columns = np.stack(list(problem.table.columns.values()), axis=1)[rows]
    return {
        tuple(map(int, row)): (float(s), float(m))
        for row, s, m in zip(columns, step_s, memory, strict=True)
    }


@pytest.mark.parametrize(
    ("field", "changes", "said"),
    [
        ("plans", {"zero": 4}, "plans.zero=4"),
        ("plans", {"cp_comm": "ring"}, "plans.cp_comm='ring'"),
        ("plans", {"optimizer_offload": 1.5}, "plans.optimizer_offload=1.5"),
        ("batch", {"routing": {"imbalance": 0.5}}, "batch.routing.imbalance=0.5"),
        ("batch", {"routing": {"pad_to_capacity": True}}, "needs capacity_factor"),
        (
            "batch",
            {"routing": {"tokens_per_expert": [1.0] * 8}},
            "tokens_per_expert has 8 numbers, and some candidates have 4 experts",
        ),
    ],
)
def test_an_envelopes_option_that_cannot_be_is_refused(
    field: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "envelope.yaml"
    content = tiny()
    path.write_text(yaml.safe_dump(content | {field: content[field] | changes}), "utf-8")
    with pytest.raises(EnvelopeError, match=r"^[^\n]+\.$") as refused:
        load_envelope(path)
    assert said in str(refused.value)
