"""Stage layouts: laws of the text and of the balance, and reports with known answers."""

from __future__ import annotations

import re
from itertools import combinations_with_replacement, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel import catalogue
from perfmodel.architecture import Architecture
from perfmodel.errors import PerfmodelError
from perfmodel.mesh import layers_before, stage_content
from perfmodel.plan import Plan
from perfmodel.rules import violations
from perfmodel.stages import Stage, StageLayout, balanced_counts, stages_of

from .strategies import dense, dims, moe

DEEPSEEK = "Et*3|(tt|)*29,m|L"


def letters(text: str) -> str:
    """Write a layout out, by Megatron's two substitutions."""
    text = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, lambda m: m[1] * int(m[2]), text)
    return text


def model(n_layers: int, mtp_layers: int = 0) -> Architecture:
    return moe(n_layers=n_layers, first_k_dense=1, mtp_layers=mtp_layers)


inner = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 2)).map(lambda c: Stage(0, *c, 0)), max_size=8
)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Stage, ...]:
    found = draw(inner | st.integers(0, 12).map(lambda n: [Stage(0, 2, 0, 0)] * n))
    found = [Stage(1, draw(st.integers(0, 4)), 0, 0), *found]
    return (*found, Stage(0, draw(st.integers(0, 4)), draw(st.integers(0, 2)), 1))


# ---------------------------------------------------------------- the text


@given(layouts())
def test_a_layout_reads_back_from_its_text(stages: tuple[Stage, ...]) -> None:
    text = str(StageLayout(len(stages), stages))
    assert stages_of(text) == stages
    assert letters(text).count("|") == len(stages) - 1  # Megatron reads the same
    assert [s.count("t") for s in letters(text).split("|")] == [s.layers for s in stages]
    assert str(StageLayout.parse(text, 1)) == text


@given(layouts())
def test_a_plan_keeps_its_layout_in_text_and_json(stages: tuple[Stage, ...]) -> None:
    plan = Plan(pp=len(stages), dp=1, layout=str(StageLayout(1, stages)))
    assert Plan.parse(str(plan)) == plan
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    assert plan.stages(0) == stages


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("Ettt|(tt|)*2,m|L", "Ettt|tt|tt|m|L"),
        ("E(tt|)*3L", "Ett|tt|tt|L"),
        ("(E)*1(t)*2|t*0mL", "Ett|mL"),
        ("E|*3L", "E|||L"),
        ("E(t*8|)*3L", "Et*8|t*8|t*8|L"),
        ("E(|tt)*2,L", "E|tt|ttL"),
    ],
)
def test_repetitions(text: str, written: str) -> None:
    assert stages_of(text) == stages_of(written)


def test_plans_that_mean_the_same_are_equal() -> None:
    one = Plan.parse(f'pp=16,vpp=2,dp=1,layout="{DEEPSEEK}",tp=2')
    assert one == Plan.parse("pp=16,vpp=2,dp=1,layout='Ettt|(t*2|)*29m|L',tp=2")
    assert one.layout == "Et*3|(tt|)*29m|L"
    assert str(one).endswith(",recompute=none,layout=Et*3|(tt|)*29m|L")
    assert "layout" not in str(Plan(dp=1))
    assert Plan.parse("pp=4,dp=1,layout=16/16/16/13").layout == "16/16/16/13"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Ettx|L", "has 'x' where only E, t, m, L"),
        ("Et*|L", "has '*' where only"),
        ("E((t|)*2)*2L", "has '(' where only"),
        ("Et*2*3|L", "has '*' where only"),
        ("tE|L", "Stage 0 of layout='tE|L' must have its parts in the order E, t, m, L."),
        ("tt|tL", "must have the embedding (E) exactly once, not 0 times."),
        ("Et|t", "must have the loss (L) exactly once, not 0 times."),
        ("", "must have the embedding"),
        ("Et*999999999|L", "is longer than 65536"),
        ("E(t*9999|)*9999L", "is longer than 65536"),
        ("balance", "has 'b' where only"),
    ],
)
def test_a_text_that_is_no_layout_is_explained_in_one_sentence(text: str, says: str) -> None:
    for read in (stages_of, lambda text: Plan.parse(f"dp=1,layout={text}")):
        with pytest.raises(PerfmodelError, match=re.escape(says)) as caught:
            read(text)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 240


def test_a_layout_goes_round_its_devices() -> None:
    with pytest.raises(PerfmodelError, match="3 stages does not go round pp=2"):
        StageLayout.parse("Et|t|L", 2)
    with pytest.raises(PerfmodelError, match="0 layers or more"):
        StageLayout.from_counts([1, -1])


# ---------------------------------------------------------------- reports


def test_report_27_deepseek_v3_over_16_devices_and_2_chunks() -> None:
    layout = StageLayout.parse(DEEPSEEK, 16)
    assert (len(layout.stages), layout.vpp, layout.n_layers, layout.n_mtp) == (32, 2, 61, 1)
    assert layout.device(0) == Stage(1, 5, 0, 0)
    assert all(layout.device(rank) == Stage(0, 4, 0, 0) for rank in range(1, 14))
    assert layout.device(14) == Stage(0, 2, 1, 0)
    assert layout.device(15) == Stage(0, 2, 0, 1)
    eight = StageLayout.parse("Et*8|(t*8|)*6t*5mL", 8)
    assert eight.counts == (8,) * 7 + (5,)
    assert eight.stages[-1] == Stage(0, 5, 1, 1)
    four = StageLayout.first_last(61, 4, last=13, mtp=1)
    assert four.counts == (16, 16, 16, 13)


def test_report_70_layer_61_is_the_prediction_layer() -> None:
    deepseek = catalogue["DeepSeek-V3"]
    assert (deepseek.n_layers, deepseek.mtp_layers) == (61, 1)
    assert StageLayout.balanced(deepseek, 4, head=1.5, mtp=1.0).counts == (16, 16, 16, 13)
    assert StageLayout.balanced(deepseek, 8, head=1.0, mtp=1.0).counts == (8,) * 7 + (5,)


def test_report_11_thirty_layers_over_four_stages() -> None:
    shape = {**dense().rule_variables(), "n_layers": 30}

    def said(text: str) -> list[str]:
        found = violations(shape, Plan.parse(text, world=4), 4, 4096, 8)
        return [v.message for v in found]

    assert said("pp=4") == [
        "pp*vpp=4 must divide n_layers=30; nearest pp: 3, 5; "
        "or give a layout, such as layout=balanced or layout=7/8/8/7."
    ]
    assert said("pp=4,layout=7/7/7/7") == ["layout_layers=28 must equal n_layers=30; nearest: 30."]
    for layout in ("8/7/7/8", "7/8/8/7", "balanced", "Et*8|t*7|t*7|t*8L"):
        assert said(f"pp=4,layout={layout}") == []


def test_report_13_first_and_last_need_more_than_one_stage() -> None:
    with pytest.raises(PerfmodelError, match="with pp >= 2 only, not pp=1"):
        StageLayout.first_last(20, 1, last=1)
    assert StageLayout.first_last(20, 1).counts == (20,)
    assert StageLayout.first_last(20, 2, first=12, last=8).counts == (12, 8)
    assert StageLayout.first_last(30, 4, first=8, last=8).counts == (8, 7, 7, 8)
    for first, last in ((7, None), (21, None), (12, 7)):
        with pytest.raises(PerfmodelError, match="must share them equally"):
            StageLayout.first_last(20, 2 if last else 3, first=first, last=last)


@pytest.mark.parametrize(
    ("layout", "rule"),
    [
        ("Et*4|t*4|t*4|L", "layout_mtp"),
        ("t*4|Et*4|t*4|mL", "layout_embedding"),
        ("Et*4|t*4|t*4L|m", "layout_loss"),
        ("Et*4|t*4m|t*4|L", "mtp_behind_layers"),
        ("Et*4|t*4|t*4m|mL", "mtp_together"),
        ("Et*4|t*4|t*3|mL", "layout_layers"),
        ("Et*4|t*8|mL", "layout_stages"),
    ],
)
def test_layouts_that_megatron_refuses(layout: str, rule: str) -> None:
    shape = model(12, 2 if rule == "mtp_together" else 1).rule_variables()
    found = violations(shape, Plan(pp=4, dp=1, layout=layout), 4, 4096, 8)
    assert [v.rule for v in found] == [rule]
    assert found[0].message.count(". ") == 0


def test_prediction_layers_are_in_the_last_chunk_of_their_device() -> None:
    shape = model(12, 1).rule_variables()
    for layout, rules in (("Et*6|t*6m||L", ["mtp_last_chunk"]), ("Et*6|t*5|tm|L", [])):
        found = violations(shape, Plan(pp=2, vpp=2, dp=1, layout=layout), 2, 4096, 8)
        assert [v.rule for v in found] == rules


# ---------------------------------------------------------------- balance


@given(st.integers(1, 100), st.integers(1, 16), st.integers(1, 4))
def test_without_weights_counts_differ_by_one_at_most(n: int, pp: int, vpp: int) -> None:
    layout = StageLayout.balanced(model(n), pp, vpp)
    assert (layout.n_layers, layout.pp, layout.vpp) == (n, pp, vpp)
    assert max(layout.counts) - min(layout.counts) <= 1
    assert layout.counts[-1] == min(layout.counts)
    if n % (pp * vpp) == 0:
        assert layout == StageLayout.equal(n, pp, vpp)
    a, p = model(n).dims, dims(pp=pp, vpp=vpp)
    before = [layers_before(a, p, float(s)) for s in range(pp * vpp + 1)]
    assert [int(y - x) for x, y in pairwise(before)] == list(layout.counts)
    for rank in range(pp):
        c = stage_content(a, p, float(rank))
        held = layout.device(rank)
        assert (c.layers, c.embedding, c.loss) == (held.layers, held.embedding, held.loss)
        assert c.dense + c.moe == c.layers


@pytest.mark.parametrize("n_layers", [43, 61, 94])
@pytest.mark.parametrize("pp", range(1, 17))
def test_any_number_of_layers_over_any_pipeline(n_layers: int, pp: int) -> None:
    for vpp in range(1, 5):
        for head in (0.0, 0.7, 2.5):
            layout = StageLayout.balanced(model(n_layers, 1), pp, vpp, head=head, mtp=1.0)
            assert (layout.n_layers, layout.n_mtp) == (n_layers, 1)
            assert min(layout.counts) >= int(n_layers >= pp * vpp)
            assert StageLayout.parse(str(layout), pp) == layout


@given(
    st.integers(1, 9),
    st.integers(1, 4),
    st.sampled_from((0.0, 0.5, 1.5)),
    st.sampled_from((0.0, 0.5, 2.5)),
)
def test_no_layout_has_a_lighter_heaviest_stage(
    n: int, stages: int, embedding: float, head: float
) -> None:
    def heaviest(counts: tuple[int, ...]) -> float:
        loads = [float(count) for count in counts]
        loads[0] += embedding
        loads[-1] += head
        return max(loads)

    least = int(n >= stages)
    ways = (
        tuple(b - a for a, b in zip((0, *cuts), (*cuts, n), strict=True))
        for cuts in combinations_with_replacement(range(n + 1), stages - 1)
    )
    best = min(heaviest(way) for way in ways if min(way) >= least)
    assert heaviest(tuple(balanced_counts(n, stages, embedding, head))) == best


def test_equal_stages_need_a_number_that_divides() -> None:
    assert StageLayout.equal(12, 3, 2).counts == (2,) * 6
    with pytest.raises(PerfmodelError, match="layout=balanced takes any number"):
        StageLayout.equal(13, 3)
    with pytest.raises(PerfmodelError, match="weights >= 0"):
        StageLayout.balanced(model(3), 2, head=-1.0)
