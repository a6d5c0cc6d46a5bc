"""Laws that a user writes: posynomials by their terms, others by value and slopes."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lawfit
from lawfit import GeneralLaw, LawError, Monomial, PosynomialLaw, PowerTerm, ScalingLaw

Point = dict[str, float]


def logs(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(math.log(low), math.log(high)).map(math.exp)


class DepthLaw(PosynomialLaw):
    """A law of a user, as a test writes it."""

    equation: ClassVar[str] = "L = a/(w^2 l)^alpha + s w/l"
    variables: ClassVar[Mapping[str, str]] = {"width": "w [-]", "layers": "l [-]"}
    a: float
    alpha: float
    s: float

    @property
    def terms(self) -> tuple[PowerTerm, ...]:
        return (
            PowerTerm("size", self.a, {"width": -2 * self.alpha, "layers": -self.alpha}),
            PowerTerm("shape", self.s, {"width": 1.0, "layers": -1.0}),
        )


DEPTH = DepthLaw(a=60.0, alpha=0.2, s=0.001, source="test")
shapes = st.fixed_dictionaries({"width": logs(64.0, 1e4), "layers": logs(1.0, 200.0)})


@given(start=shapes, end=shapes, share=st.floats(0.0, 1.0))
def test_a_law_of_a_user_follows_from_its_terms(start: Point, end: Point, share: float) -> None:
    w, n = start["width"], start["layers"]
    size, shape = 60.0 * (w * w * n) ** -0.2, 0.001 * w / n
    assert DEPTH.loss(**start) == pytest.approx(size + shape)
    slopes = DEPTH.gradient(**start)
    assert slopes["width"] == pytest.approx(-0.4 * size + shape)
    assert slopes["layers"] == pytest.approx(-0.2 * size - shape)
    between = {v: start[v] ** (1 - share) * end[v] ** share for v in start}
    chord = (1 - share) * DEPTH.loss(**start) + share * DEPTH.loss(**end)
    assert DEPTH.loss(**between) <= chord * (1 + 1e-10)


@pytest.mark.parametrize(
    ("law", "expected"),
    [
        (DEPTH.model_copy(update={"s": -1.0}), "the coefficient of the term 'shape' is -1"),
        (DEPTH.model_copy(update={"alpha": math.inf}), "the term 'size' has the exponent -inf"),
    ],
)
def test_a_term_that_is_no_posynomial_gets_one_sentence(law: DepthLaw, expected: str) -> None:
    with pytest.raises(LawError, match=expected):
        law.loss(width=64.0, layers=2.0)


def test_an_exponent_of_no_variable_gets_one_sentence() -> None:
    class Misspelt(DepthLaw):
        @property
        def terms(self) -> tuple[PowerTerm, ...]:
            return (PowerTerm("size", 1.0, {"widht": -1.0}),)

    law = Misspelt(a=1.0, alpha=1.0, s=1.0, source="test")
    with pytest.raises(LawError, match="has an exponent of 'widht', but the variables"):
        law.loss(width=64.0, layers=2.0)


class CurvedLaw(GeneralLaw):
    """A law that is no posynomial, as a test writes it."""

    equation: ClassVar[str] = "L = a - s (ln w)^2"
    variables: ClassVar[Mapping[str, str]] = {"width": "w [-]"}
    limits: ClassVar[Mapping[str, tuple[float, float]]] = {"width": (2.0, 8.0)}
    a: float
    s: float

    def value_at(self, at: lawfit.general.Point) -> float | lawfit.FloatArray:
        return np.asarray(self.a - self.s * np.log(at["width"]) ** 2)

    def slopes_at(self, at: lawfit.general.Point) -> lawfit.general.Point:
        return {"width": np.asarray(-2.0 * self.s * np.log(at["width"]))}


def test_a_law_of_a_user_need_not_be_a_posynomial() -> None:
    law = CurvedLaw(a=3.0, s=0.5, source="test")
    assert law.loss(width=math.e) == pytest.approx(2.5)
    assert law.gradient(width=math.e) == {"width": pytest.approx(-1.0)}
    assert type(law.loss(width=4.0)) is float
    assert law.loss(width=np.array([2.0, 4.0])).shape == (2,)
    assert law.convexity == "No claim."
    assert CurvedLaw.model_validate_json(law.model_dump_json()) == law
    with pytest.raises(LawError, match="width is 9, but this law needs at most 8"):
        law.loss(width=9.0)


class DenseLaw(ScalingLaw):
    """A law of a user in the variables of a run, as a test writes it."""

    equation: ClassVar[str] = "L = a/N_act + b/D^beta + e"
    variables: ClassVar[Mapping[str, str]] = {"N_act": "n_active [parameter]"}
    a: float

    @property
    def floor_terms(self) -> tuple[Monomial, ...]:
        return Monomial("capacity", self.a, n_active=-1.0), Monomial("constant", self.e)


def test_a_law_of_a_user_in_the_variables_of_a_run_lists_its_floor() -> None:
    law = DenseLaw(a=1e9, b=100.0, beta=0.5, e=1.0, source="test")
    rest = {"n_total": 4e9, "n_active": 2e9, "expert_split": 1.0}
    assert law.loss(tokens=1e8, **rest) == pytest.approx(1.0 + 0.5 + 0.01)
    assert law.tokens_for(1.51, **rest) == pytest.approx(1e8, rel=1e-9)
    assert law.gradient(tokens=1e8, **rest).n_active == pytest.approx(-0.5)


def test_every_exported_name_is_documented() -> None:
    docs = Path(__file__).parents[2] / "docs"
    pages = "".join(page.read_text(encoding="utf-8") for page in docs.rglob("*.md"))
    for name in lawfit.__all__:
        exported = getattr(lawfit, name)
        assert f"`{name}`" in pages, name
        if isinstance(exported, type):
            assert exported.__doc__
