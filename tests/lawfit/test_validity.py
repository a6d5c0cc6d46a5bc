"""Flags outside the training runs, and the sentences that bad input gets."""

import math
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from lawfit import (
    CHINCHILLA_EPOCH,
    MOSAIC_TABLE2,
    JointLaw,
    LawError,
    ScalingLaw,
    ValidRange,
)

INSIDE: dict[str, float] = {"n_total": 20e9, "n_active": 1e9, "tokens": 40e9, "expert_split": 4.0}
LEGAL = {k: v for k, v in MOSAIC_TABLE2.model_dump().items() if k != "kind"}


def test_no_flag_inside_the_range() -> None:
    assert MOSAIC_TABLE2.flags(**INSIDE) == ()


@pytest.mark.parametrize(
    ("change", "variable", "value", "bound"),
    [
        ({"n_total": 30e9, "n_active": 2.8e9, "tokens": 50e9}, "n_active", "2.8e+09", "2.72e+09"),
        ({"n_total": 80e9, "n_active": 2e9}, "n_total", "8e+10", "7.924e+10"),
        ({"n_total": 1.5e9}, "sparsity", "0.3333", "0.499"),
        ({"n_total": 60e9}, "sparsity", "0.9833", "0.981"),
        ({"expert_split": 16.0}, "expert_split", "16", "8"),
        ({"expert_split": 0.5}, "expert_split", "0.5", "1"),
        ({"tokens": 60e9}, "tokens", "6e+10", "5.638e+10"),
        ({"tokens": 10e9}, "tokens_per_parameter", "10", "10.8"),
    ],
)
def test_each_variable_outside_is_named_with_value_and_bound(
    change: dict[str, float], variable: str, value: str, bound: str
) -> None:
    flags = MOSAIC_TABLE2.flags(**{**INSIDE, **change})
    assert len(flags) == 1
    assert flags[0].startswith(f"{variable} is {value} [")
    assert f" {bound}, the " in flags[0]


def test_range_of_table_2_is_that_of_its_runs() -> None:
    assert MOSAIC_TABLE2.valid_range.model_dump() == {
        "n_total": (0.22e9, 79.24e9),
        "n_active": (0.104e9, 2.72e9),
        "sparsity": (0.499, 0.981),
        "expert_split": (1.0, 8.0),
        "tokens": (2.88e9, 56.38e9),
        "tokens_per_parameter": (10.8, 70.0),
    }


def test_published_optimum_is_flagged_as_extrapolation() -> None:
    flags = MOSAIC_TABLE2.flags(n_total=327.2e9, n_active=14.52e9, tokens=1.42e12, expert_split=4.0)
    named = [flag.split()[0] for flag in flags]
    assert named == ["n_total", "n_active", "tokens", "tokens_per_parameter"]


def test_dense_law_flags_a_sparse_model() -> None:
    dense = {"n_total": 1e9, "n_active": 1e9, "tokens": 20e9, "expert_split": 1.0}
    assert CHINCHILLA_EPOCH.flags(**dense) == ()
    (flag,) = CHINCHILLA_EPOCH.flags(**{**dense, "n_total": 4e9})
    assert flag.startswith("sparsity is 0.75 [-], above 0,")


def test_split_range_survives_folding() -> None:
    point = {**INSIDE, "expert_split": 16.0}
    (flag,) = MOSAIC_TABLE2.at_split(16.0).flags(**point)
    assert flag.startswith("expert_split is 16")


def test_law_without_a_range_flags_nothing() -> None:
    law = MOSAIC_TABLE2.model_copy(update={"valid_range": ValidRange()})
    assert law.flags(n_total=1e15, n_active=1.0, tokens=1.0, expert_split=99.0) == ()


@pytest.mark.parametrize("variable", list(INSIDE))
@pytest.mark.parametrize(
    "bad", [0, 0.0, -3.0, math.nan, math.inf, -math.inf, "8", None, True, 1j, np.array([1.0, -2.0])]
)
def test_bad_value_gets_one_sentence(variable: str, bad: Any) -> None:
    point: dict[str, Any] = {**INSIDE, variable: bad}
    for method in (MOSAIC_TABLE2.loss, CHINCHILLA_EPOCH.loss, MOSAIC_TABLE2.gradient):
        with pytest.raises(LawError) as caught:
            method(**point)
        message = str(caught.value)
        assert message.startswith(f"{variable} is ")
        assert message.endswith(".")
        assert "\n" not in message
        assert ("nearest legal value" in message) or ("floor()" in message)


def test_array_error_shows_the_offending_value() -> None:
    tokens: Any = np.array([[1e9, 2e9], [-2.0, 3e9]])
    with pytest.raises(LawError, match=r"tokens is -2, but"):
        MOSAIC_TABLE2.loss(**{**INSIDE, "tokens": tokens})


def test_infinite_tokens_point_to_the_floor() -> None:
    with pytest.raises(LawError, match=r"floor\(\) gives that limit"):
        MOSAIC_TABLE2.loss(**{**INSIDE, "tokens": math.inf})


def test_integer_beyond_float_is_an_error_and_not_an_overflow() -> None:
    with pytest.raises(LawError, match=r"n_total is inf"):
        MOSAIC_TABLE2.loss(**{**INSIDE, "n_total": 10**400})


@pytest.mark.parametrize("n_total", [0.5e9, np.array([20e9, 0.5e9])])
def test_more_active_than_total_parameters_is_an_error(n_total: Any) -> None:
    with pytest.raises(LawError, match=r"the nearest legal n_active is 5e\+08"):
        MOSAIC_TABLE2.loss(**{**INSIDE, "n_total": n_total})


def test_dense_model_is_legal() -> None:
    dense = {**INSIDE, "n_total": INSIDE["n_active"]}
    assert MOSAIC_TABLE2.loss(**dense) > 0


def test_shapes_that_do_not_broadcast_are_an_error() -> None:
    with pytest.raises(LawError, match=r"n_total \(2,\).*tokens \(3,\)"):
        MOSAIC_TABLE2.loss(
            n_total=np.full(2, 2e10), n_active=1e9, tokens=np.full(3, 1e9), expert_split=4.0
        )
    with pytest.raises(LawError, match=r"loss \(3,\), floor \(2,\)"):
        MOSAIC_TABLE2.tokens_for(
            np.full(3, 2.0), n_total=np.full(2, 2e10), n_active=1e9, expert_split=4.0
        )


@pytest.mark.parametrize("law", [MOSAIC_TABLE2, CHINCHILLA_EPOCH], ids=lambda law: law.kind)
@pytest.mark.parametrize("below", [0.0, 0.2])
def test_target_at_or_below_the_floor_is_an_error(law: ScalingLaw, below: float) -> None:
    model = {"n_total": 20e9, "n_active": 1e9, "expert_split": 4.0}
    floor = law.floor(**model)
    with pytest.raises(LawError, match=rf"infinitely many tokens reach {floor:.6g}"):
        law.tokens_for(floor - below, **model)
    with pytest.raises(LawError, match=rf"loss is {floor - below:.6g} nats/token"):
        law.tokens_for(np.array([floor + 0.1, floor - below]), **model)


@pytest.mark.parametrize("target", [0.0, -1.0, math.nan, math.inf])
def test_target_must_be_finite_and_above_zero(target: float) -> None:
    with pytest.raises(LawError, match=r"^loss is "):
        MOSAIC_TABLE2.tokens_for(target, n_total=20e9, n_active=1e9, expert_split=4.0)


def test_tokens_beyond_float_are_an_error() -> None:
    law = MOSAIC_TABLE2.model_copy(update={"beta": 0.01})
    model = {"n_total": 20e9, "n_active": 1e9, "expert_split": 4.0}
    with pytest.raises(LawError, match=r"exceed the largest float"):
        law.tokens_for(law.floor(**model) + 1e-6, **model)


def test_per_split_law_refuses_another_split() -> None:
    law = MOSAIC_TABLE2.at_split(4.0)
    with pytest.raises(LawError, match=r"expert_split is 8, .*nearest legal value is 4\."):
        law.loss(**{**INSIDE, "expert_split": 8.0})
    with pytest.raises(LawError, match=r"expert_split is 2, "):
        law.floor(n_total=20e9, n_active=1e9, expert_split=np.array([4.0, 2.0]))
    with pytest.raises(LawError, match=r"expert_split is 8, "):
        law.flags(**{**INSIDE, "expert_split": 8.0})
    with pytest.raises(LawError, match=r"expert_split is -1, "):
        MOSAIC_TABLE2.at_split(-1.0)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("a", -1.0, "at least 0"),
        ("j", math.inf, "at least 0"),
        ("e", math.nan, "at least 0"),
        ("b", 0.0, "above 0"),
        ("beta", -0.2, "above 0"),
        ("alpha", 0.0, "above 0"),
        ("eta", math.nan, "finite number"),
    ],
)
def test_illegal_coefficient_is_refused(name: str, value: float, rule: str) -> None:
    with pytest.raises(ValidationError, match=rule):
        JointLaw(**{**LEGAL, name: value})


@pytest.mark.parametrize("name", ["lambda_", "delta", "gamma", "eta"])
def test_negative_exponent_is_legal_where_the_literature_has_one(name: str) -> None:
    law = JointLaw(**{**LEGAL, name: -0.1666})
    assert math.isfinite(law.loss(**INSIDE))


def test_laws_are_frozen_and_closed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        MOSAIC_TABLE2.a = 1.0  # type: ignore[misc]
    with pytest.raises(ValidationError, match="Extra inputs"):
        JointLaw(**LEGAL, extra=1.0)  # type: ignore[call-arg]


def test_interval_must_be_ordered() -> None:
    with pytest.raises(ValidationError, match="must not exceed"):
        ValidRange(tokens=(2.0, 1.0))


def test_base_class_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        ScalingLaw(b=1.0, beta=1.0, e=0.0, source="none")  # type: ignore[abstract]
