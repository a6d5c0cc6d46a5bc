"""Spaces of candidates: families hold the ladder, unions hold each shape once, grids add up."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from lawfit import MOSAIC_TABLE2, ShapeRange
from mosaic_opt.cli import app
from mosaic_opt.envelope import example, parse_envelope
from mosaic_opt.errors import EnvelopeError
from mosaic_opt.problem import Problem
from mosaic_opt.report import render_text
from mosaic_opt.result import Status
from mosaic_opt.solver import solve
from mosaic_opt.spaces import FamilySpace, LadderSpace, UnionSpace, shape_key, shape_of
from perfmodel.families import parse_family
from perfmodel.ladders import ladder

from .strategies import TINY, tiny, tiny_envelope, tiny_ladder

FAMILY: dict[str, Any] = {
    "kind": "family",
    "d_model": [512, 1024],
    "n_experts": [4, 8],
    "top_k": [1, 2],
    "expert_split": [1, 2],
}
"""The candidates of `TINY`, as a family: rungs 1 and 2 of the ladder."""


def family(**changes: Any) -> FamilySpace:
    return FamilySpace.model_validate(FAMILY | changes)


@st.composite
def families(draw: st.DrawFn) -> FamilySpace:
    def some(*values: Any) -> list[Any]:
        return draw(st.lists(st.sampled_from(values), min_size=1, max_size=3))

    return family(
        d_model=[512, *some(640, 1000, 1024, 1536)],
        aspect_ratio=[128.0, *some(64, 100, 96.0, 200.5)],
        ff_ratio=[2.5, *some(2.0, 8.0 / 3.0, 4)],
        head_dim=[128, *some(64, 96)],
        n_kv_heads=draw(st.sampled_from([None, [4, 3], [1, 8]])),
        first_k_dense=some(0, 1, 4),
        n_experts=[4, *some(1, 8)],
        top_k=[1, *some(2, 4)],
        expert_split=[1, *some(2, 3)],
        shared_experts=[1, *some(0, 2)],
        tile=draw(st.sampled_from([None, 64, 128])),
        layers_multiple=draw(st.sampled_from([None, 1, 4])),
        min_sparsity=draw(st.sampled_from([0.0, 0.2])),
    )


# ---------------------------------------------------------------- families


def test_a_family_with_the_ladders_ratios_is_the_ladder() -> None:
    rungs = LadderSpace.model_validate(TINY["candidates"]).architectures()
    models = family().architectures()
    assert [shape_key(m) for m in models] == [shape_key(r) for r in rungs]
    tiled = family(tile=128, layers_multiple=4)
    assert tiled.architectures() == models  # nothing was rounded, and no name says so


@settings(max_examples=40)
@given(families())
def test_a_grid_adds_up_and_every_model_is_one_of_a_kind(space: FamilySpace) -> None:
    models = space.architectures()
    assert len(models) + sum(space.dropped.values()) == space.grid_size
    assert len({shape_key(m) for m in models}) == len({m.name for m in models}) == len(models)
    for model in models[:20]:
        assert parse_family(model.name) == model
        assert model.n_heads * model.head_dim == model.d_model
        assert model.sparsity >= space.min_sparsity
        if space.tile is not None:
            assert model.d_ff % space.tile == model.d_expert % space.tile == 0
        if space.layers_multiple is not None:
            assert model.n_layers % space.layers_multiple == 0
    assert FamilySpace.model_validate_json(space.model_dump_json()).architectures() == models


def test_the_order_of_a_list_does_not_matter_and_a_repetition_counts_once() -> None:
    assert family(d_model=[1024, 512, 512]).architectures() == family().architectures()
    assert family(d_model=[512, 512]).grid_size == family(d_model=[512]).grid_size


def test_widths_are_rounded_to_the_nearest_tile_and_the_name_says_so() -> None:
    (model,) = family(
        d_model=[1024], ff_ratio=[8.0 / 3.0], n_experts=[4], top_k=[1], expert_split=[3], tile=128
    ).architectures()
    assert (model.d_ff, model.d_expert) == (2688, 896)  # of 2730.67 and 910.22
    assert model.expert_split == 3.0
    assert model.name == "family:d=1024,L=8,ff=2688,E=4,K=1,de=896,tile=128"


def test_without_a_tile_what_is_not_whole_is_dropped_and_counted() -> None:
    space = family(ff_ratio=[2.5, 8.0 / 3.0], n_kv_heads=[4, 3])
    assert space.grid_size == 64
    assert space.dropped == {
        "d_ff or d_expert is no whole number": 32,
        "n_kv_heads does not divide the heads": 16,
    }
    assert len(space.architectures()) == 16


def test_a_family_without_a_model_is_refused_with_its_reasons() -> None:
    with pytest.raises(EnvelopeError, match=r"no point of the grid .* 4 because head_dim does not"):
        tiny_envelope(candidates=FAMILY | {"head_dim": [100], "d_model": [512], "top_k": [1]})


def test_a_grid_that_is_too_large_is_refused_unseen() -> None:
    many = list(range(1, 2001))
    with pytest.raises(EnvelopeError, match="points, which must be at most 1000000"):
        tiny_envelope(candidates=FAMILY | {"n_experts": many, "top_k": many})


# ---------------------------------------------------------------- unions


def test_a_union_keeps_the_first_of_each_shape() -> None:
    rungs = LadderSpace.model_validate(TINY["candidates"]).architectures()
    both = UnionSpace.model_validate(
        {"kind": "union", "spaces": [TINY["candidates"], FAMILY | {"aspect_ratio": [64, 128]}]}
    )
    models = both.architectures()
    assert models[: len(rungs)] == rungs
    assert len(models) == 2 * len(rungs)  # of the family, the half of another depth
    assert all(m.name.startswith("family:") for m in models[len(rungs) :])
    assert both.dropped == {"the same shape came before": len(rungs)}
    assert len(models) + sum(both.dropped.values()) == both.grid_size == 48


def test_a_list_of_spaces_is_their_union_and_survives_json() -> None:
    listed = tiny_envelope(candidates=[TINY["candidates"], FAMILY])
    assert listed == tiny_envelope(
        candidates={"kind": "union", "spaces": [TINY["candidates"], FAMILY]}
    )
    assert parse_envelope(json.loads(listed.model_dump_json())) == listed


def test_points_of_a_union_that_no_ladder_keeps_are_counted() -> None:
    spaces = [tiny_ladder(min_sparsity=0.7), FAMILY | {"head_dim": [128, 96]}]
    both = UnionSpace.model_validate({"kind": "union", "spaces": spaces})
    assert len(both.architectures()) + sum(both.dropped.values()) == both.grid_size


def test_two_shapes_of_one_name_are_refused() -> None:
    one, two = (ladder(q, 8, 2, 2).model_copy(update={"name": "mine"}) for q in (1, 2))
    listed = [{"kind": "explicit", "models": [m.model_dump(mode="json")]} for m in (one, two)]
    with pytest.raises(EnvelopeError, match="two models of different shape have the name 'mine'"):
        tiny_envelope(candidates=listed)


# ---------------------------------------------------------------- what is solved, and what is said


def test_a_family_with_the_ladders_ratios_has_the_ladders_answer() -> None:
    rungs, models = solve(tiny_envelope()), solve(tiny_envelope(candidates=FAMILY))
    for one, other in zip(rungs.candidates, models.candidates, strict=True):
        assert other.model_copy(update={"name": one.name}) == one
    assert models.status is Status.OPTIMAL


def test_more_shapes_are_never_worse() -> None:
    ladder_only = solve(tiny_envelope())
    wider = solve(tiny_envelope(candidates=[TINY["candidates"], FAMILY | {"aspect_ratio": [64]}]))
    assert ladder_only.optimum is not None
    assert wider.optimum is not None
    assert wider.optimum.loss <= ladder_only.optimum.loss
    assert wider.status is Status.OPTIMAL


def test_a_shape_that_the_law_never_saw_is_flagged() -> None:
    one = {"d_model": [1024], "n_experts": [8], "top_k": [2], "expert_split": [2]}
    odd = one | {"aspect_ratio": [64], "head_dim": [64], "shared_experts": [2], "n_kv_heads": [16]}
    solution = solve(tiny_envelope(candidates=FAMILY | odd))
    assert solution.optimum is not None
    said = [f for f in solution.optimum.flags if "shape outside the family" in f]
    assert [f.split(": ")[2].split()[0] for f in said] == [
        "aspect_ratio",
        "head_dim",
        "n_kv_heads",
        "shared_experts",
    ]
    assert (
        "law: shape outside the family it was fitted on: aspect_ratio (d_model / n_layers) is "
        in said[0]
    )
    assert said[0].endswith("64, and 128 in its runs.")


def test_no_rung_of_the_ladder_is_flagged_for_its_shape() -> None:
    for q in (1, 2, 3, 4, 6, 12):
        assert MOSAIC_TABLE2.shape_range.flags(shape_of(ladder(q, 8, 2, 2))) == ()


def test_a_law_without_a_family_flags_no_shape() -> None:
    model = Problem(example("listing")).architectures[0]
    assert ShapeRange().flags(shape_of(model)) == ()
    assert len(MOSAIC_TABLE2.shape_range.flags(shape_of(model))) == 2  # no shared expert, no dense
    assert MOSAIC_TABLE2.at_split(4.0).shape_range == MOSAIC_TABLE2.shape_range


def test_the_page_says_what_was_dropped() -> None:
    solution = solve(parse_envelope(tiny(candidates=FAMILY | {"head_dim": [128, 96]})))
    assert solution.dropped_points == {"head_dim does not divide d_model": 16}
    page = " ".join(render_text(solution).split())
    assert "Of 32 points of the grid some are no candidate: head_dim does not divide" in page
    assert solve(tiny_envelope()).dropped_points is None


def test_the_name_of_a_candidate_is_a_model_of_the_command_line() -> None:
    (model,) = family(
        d_model=[1024], aspect_ratio=[64.0], n_experts=[8], top_k=[2], expert_split=[2]
    ).architectures()
    options = ["--plan", "ep=8", "--cluster", "p6-b200:1", "--global-batch", "32", "--seq", "1024"]
    done = CliRunner().invoke(app, ["step", "--model", model.name, *options, "--json", "-"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["architecture"]["n_layers"] == model.n_layers == 16
