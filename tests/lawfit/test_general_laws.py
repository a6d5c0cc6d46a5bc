"""Laws in variables of their own, against differences, their inverses and their own claims."""

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from lawfit import (
    ABNAR,
    CLARK_HASH,
    CLARK_RLR,
    CLARK_SBASE,
    LUDZIEJEWSKI,
    TIAN,
    ZHAO,
    AnyGeneralLaw,
    DataConstrainedLaw,
    EfficiencyLeverage,
    GadreLaw,
    GeneralLaw,
    KaplanLaw,
    LawError,
    PosynomialLaw,
)

# Coefficients of no paper: the shape of the law is what is tested.
KAPLAN = KaplanLaw(n_c=5e13, d_c=2e13, alpha_n=0.08, alpha_d=0.1, source="test")
GADRE = GadreLaw(a=120.0, b=150.0, eta=0.13, e=1.6, source="test")
REPEATED = DataConstrainedLaw(
    a=500.0, alpha=0.35, b=1500.0, beta=0.37, e=1.8, r_d=12.0, r_n=4.0, source="test"
)

Point = dict[str, float]


def logs(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(math.log(low), math.log(high)).map(math.exp)


counts, tokens = logs(1e7, 1e12), logs(1e9, 1e13)


def with_unique(point: Point) -> Point:
    return {
        "n": point["n"],
        "tokens": point["tokens"],
        "unique_tokens": point["tokens"] / point["passes"],
    }


def with_active(point: Point) -> Point:
    rest = {name: value for name, value in point.items() if name != "ratio"}
    return {**rest, "n_active": point["n_total"] * point["ratio"]}


class Case(NamedTuple):
    """A law, points of it, and the variables in which it claims to be convex."""

    law: GeneralLaw
    points: st.SearchStrategy[Point]
    convex: tuple[str, ...]


CASES = {
    "kaplan": Case(KAPLAN, st.fixed_dictionaries({"n": counts, "tokens": tokens}), ("n", "tokens")),
    "gadre": Case(
        GADRE,
        st.fixed_dictionaries(
            {"compute": logs(1e17, 1e26), "tokens_per_parameter": logs(1.0, 1e4)}
        ),
        ("compute", "tokens_per_parameter"),
    ),
    "repeated": Case(
        REPEATED,
        st.fixed_dictionaries({"n": counts, "tokens": tokens, "passes": logs(1.01, 60.0)}).map(
            with_unique
        ),
        ("n", "tokens"),
    ),
    "abnar": Case(
        ABNAR,
        st.fixed_dictionaries({"n_total": counts, "tokens": tokens, "density": logs(0.01, 0.99)}),
        ("n_total", "tokens", "density"),
    ),
    **{
        name: Case(law, st.fixed_dictionaries({"n": counts, "experts": logs(1.01, 512.0)}), ("n",))
        for name, law in (("sbase", CLARK_SBASE), ("rlr", CLARK_RLR), ("hash", CLARK_HASH))
    },
    "ludziejewski": Case(
        LUDZIEJEWSKI,
        st.fixed_dictionaries({"n_active": counts, "tokens": tokens, "experts": logs(1.01, 64.0)}),
        ("n_active", "tokens"),
    ),
    "zhao": Case(
        ZHAO,
        st.fixed_dictionaries(
            {
                "n_total": counts,
                "ratio": logs(0.01, 0.99),
                "tokens": tokens,
                "active_experts": logs(1.0, 64.0),
                "shared_ratio": logs(0.01, 0.9),
            }
        ).map(with_active),
        ("n_total", "n_active", "tokens"),
    ),
    "tian": Case(
        TIAN,
        st.fixed_dictionaries(
            {
                "activation_ratio": logs(0.005, 0.9),
                "granularity": logs(1.0, 64.0),
                "compute": logs(1e17, 1e25),
            }
        ),
        (),
    ),
}
cases = pytest.mark.parametrize("name", CASES)


def value(law: GeneralLaw, **point: float) -> float:
    return law.leverage(**point) if isinstance(law, EfficiencyLeverage) else law.loss(**point)


@cases
@given(data=st.data())
def test_gradient_equals_finite_differences(name: str, data: st.DataObject) -> None:
    law, points, _ = CASES[name]
    point = data.draw(points)
    gradient, size, h = law.gradient(**point), value(law, **point), 1e-5
    assert list(gradient) == list(law.variables)
    for variable in law.variables:
        up, down = ({**point, variable: point[variable] * math.exp(s)} for s in (h, -h))
        difference = (value(law, **up) - value(law, **down)) / (2 * h)
        assert gradient[variable] == pytest.approx(difference, rel=1e-6, abs=1e-7 * size)


@cases
@given(data=st.data(), share=st.floats(0.0, 1.0))
def test_law_is_convex_in_the_logarithms_that_it_names(
    name: str, data: st.DataObject, share: float
) -> None:
    law, points, convex = CASES[name]
    start, other = data.draw(points), data.draw(points)
    end = {**start, **{variable: other[variable] for variable in convex}}
    if name == "repeated":
        end["tokens"] = max(end["tokens"], end["unique_tokens"])
    if name == "zhao":
        end["n_active"] = min(end["n_active"], end["n_total"])
    between = {v: start[v] ** (1 - share) * end[v] ** share for v in start}
    if name == "repeated":
        between["unique_tokens"] = start["unique_tokens"]
        between["tokens"] = max(between["tokens"], between["unique_tokens"])
    chord = (1 - share) * value(law, **start) + share * value(law, **end)
    assert value(law, **between) <= chord * (1 + 1e-9)


@cases
def test_arrays_give_what_scalars_give(name: str) -> None:
    law = CASES[name].law
    middle = {
        "kaplan": {"n": 1e9, "tokens": 1e11},
        "gadre": {"compute": 1e21, "tokens_per_parameter": 20.0},
        "repeated": {"n": 1e9, "tokens": 1e11, "unique_tokens": 1e10},
        "abnar": {"n_total": 1e10, "tokens": 1e11, "density": 0.1},
        "ludziejewski": {"n_active": 1e9, "tokens": 1e11, "experts": 8.0},
        "zhao": {
            "n_total": 1e10,
            "n_active": 1e9,
            "tokens": 1e11,
            "active_experts": 6.0,
            "shared_ratio": 0.2,
        },
        "tian": {"activation_ratio": 0.05, "granularity": 8.0, "compute": 1e21},
    }.get(name, {"n": 1e8, "experts": 16.0})
    first, *others = middle
    row = middle[first] * np.array([0.5, 0.7, 0.9])
    point: dict[str, Any] = {**middle, first: row, others[0]: middle[others[0]] * np.ones((2, 1))}
    law_of: Any = law.leverage if isinstance(law, EfficiencyLeverage) else law.loss
    found, slopes = law_of(**point), law.gradient(**point)
    assert type(law_of(**middle)) is float
    assert found.shape == (2, 3)
    for k in range(3):
        at = {**middle, first: float(row[k])}
        assert found[1, k] == pytest.approx(value(law, **at), rel=1e-13)
        for variable, slope in law.gradient(**at).items():
            component = slopes[variable]
            assert isinstance(slope, float)
            assert isinstance(component, np.ndarray)
            assert component.shape == (2, 3)
            assert component[1, k] == pytest.approx(slope, rel=1e-12, abs=1e-15)


@cases
@given(data=st.data())
def test_inverse_gives_the_variable_back(name: str, data: st.DataObject) -> None:
    law, points, _ = CASES[name]
    point = data.draw(points)
    variable, inverse = {
        "gadre": ("compute", "compute_for"),
        "sbase": ("n", "size_for"),
        "rlr": ("n", "size_for"),
        "hash": ("n", "size_for"),
        "tian": ("compute", "compute_for"),
    }.get(name, ("tokens", "tokens_for"))
    target = value(law, **point)
    slope = law.gradient(**point)[variable]
    assert isinstance(slope, float)
    rest = {v: x for v, x in point.items() if v != variable}
    back = getattr(law, inverse)(target, **rest)
    # The rounding of the target is magnified by target / slope.
    assert back == pytest.approx(point[variable], rel=1e-13 * target / abs(slope) + 1e-11)


@given(n=counts, tokens=tokens)
def test_kaplan_is_its_equation_and_tends_to_its_limits(n: float, tokens: float) -> None:
    by_hand = ((5e13 / n) ** 0.8 + 2e13 / tokens) ** 0.1
    assert KAPLAN.loss(n=n, tokens=tokens) == pytest.approx(by_hand, rel=1e-12)
    assert KAPLAN.loss(n=n, tokens=1e40) == pytest.approx((5e13 / n) ** 0.08, rel=1e-12)
    assert KAPLAN.loss(n=1e60, tokens=tokens) == pytest.approx((2e13 / tokens) ** 0.1, rel=1e-9)


@given(n=counts, tokens=tokens)
def test_over_training_law_is_a_chinchilla_law(n: float, tokens: float) -> None:
    dense = GADRE.as_chinchilla()
    loss = GADRE.loss(compute=6 * n * tokens, tokens_per_parameter=tokens / n)
    at = {"n_total": n, "n_active": n, "expert_split": 1.0}
    assert dense.loss(tokens=tokens, **at) == pytest.approx(loss, rel=1e-12)
    assert GADRE.tokens_for(loss, n=n) == pytest.approx(tokens, rel=1e-6)


@given(tokens=tokens, share=st.floats(0.01, 1.0))
def test_without_repetition_the_data_constrained_law_is_chinchilla(
    tokens: float, share: float
) -> None:
    n = share * float(REPEATED.optimal_size(tokens))
    by_hand = 500.0 / n**0.35 + 1500.0 / tokens**0.37 + 1.8
    assert REPEATED.loss(n=n, tokens=tokens, unique_tokens=tokens) == pytest.approx(by_hand)


def test_optimal_size_per_token_of_a_public_script() -> None:
    """Public code of the law, with these coefficients, takes 0.051 parameters for a token."""
    law = DataConstrainedLaw(
        a=521.0, alpha=0.353, b=1488.0, beta=0.353, e=1.87, r_d=15.4, r_n=5.3, source="test"
    )
    assert round(float(law.optimal_size(1e9)) / 1e9, 3) == 0.051


@given(tokens=tokens)
def test_optimal_size_is_the_compute_optimum(tokens: float) -> None:
    n = float(REPEATED.optimal_size(tokens))

    def loss(step: float) -> float:
        size, data = n * math.exp(step), tokens * math.exp(-step)
        return 500.0 / size**0.35 + 1500.0 / data**0.37

    assert loss(0.0) < loss(0.01)
    assert loss(0.0) < loss(-0.01)


@given(n=counts, tokens=tokens, passes=logs(1.5, 50.0))
def test_a_repeated_token_is_worth_less_than_a_new_one(
    n: float, tokens: float, passes: float
) -> None:
    new = REPEATED.loss(n=n, tokens=tokens * passes, unique_tokens=tokens * passes)
    repeated = REPEATED.loss(n=n, tokens=tokens * passes, unique_tokens=tokens)
    assert new < repeated < REPEATED.loss(n=n, tokens=tokens, unique_tokens=tokens)


def test_slopes_of_the_data_constrained_law_join_at_the_optimal_size() -> None:
    n = float(REPEATED.optimal_size(1e10))
    low, high = (
        REPEATED.gradient(n=n * f, tokens=5e10, unique_tokens=1e10) for f in (1 - 1e-9, 1 + 1e-9)
    )
    for variable in REPEATED.variables:
        assert low[variable] == pytest.approx(high[variable], rel=1e-6)


@given(n=counts, tokens=tokens, density=logs(0.01, 1.0))
def test_abnar_is_its_equation_and_its_lambda_is_negative(
    n: float, tokens: float, density: float
) -> None:
    by_hand = (
        16612.50 / n**0.5962
        + 5455.67 / tokens**0.3954
        + 0.4598 / density**-0.1666
        + 17.26 / (density**0.1603 * n**0.1595)
        + 0.94
    )
    assert ABNAR.loss(n_total=n, tokens=tokens, density=density) == pytest.approx(by_hand)
    assert ABNAR.lambda_ < 0


@pytest.mark.parametrize("law", [CLARK_SBASE, CLARK_RLR, CLARK_HASH, LUDZIEJEWSKI])
def test_number_of_experts_saturates_at_both_ends(law: Any) -> None:
    assert law.effective_experts(1.0) == pytest.approx(law.start, rel=1e-12)
    assert law.effective_experts(1e12) == pytest.approx(law.most, rel=1e-6)
    found = law.effective_experts(np.geomspace(1.0, 4096.0, 50))
    assert np.all(np.diff(found) > 0)


@given(n=counts, experts=logs(1.0, 512.0))
def test_clark_is_its_equation(n: float, experts: float) -> None:
    hat = 1 / (1 / (experts - 1 + 1 / (1 / 1.847 - 1 / 314.478)) + 1 / 314.478)
    log_n, log_e = math.log10(n), math.log10(hat)
    by_hand = 10 ** (-0.082 * log_n - 0.108 * log_e + 0.009 * log_n * log_e + 1.104)
    assert CLARK_SBASE.loss(n=n, experts=experts) == pytest.approx(by_hand, rel=1e-12)


@given(n=counts, tokens=tokens, experts=logs(1.0, 32.0))
def test_ludziejewski_at_a_number_of_experts_is_a_chinchilla_law(
    n: float, tokens: float, experts: float
) -> None:
    hat = 1 / (1 / (experts - 1 + 1 / (1 / 2.0732 - 1 / 290.4521)) + 1 / 290.4521)
    by_hand = (
        35.91 * hat**-0.2285 * n ** (-0.1889 + 0.0098 * math.log(hat))
        + 35.98 * hat**0.5529 * tokens ** (-0.1775 - 0.0259 * math.log(hat))
        + 1.3637
    )
    loss = LUDZIEJEWSKI.loss(n_active=n, tokens=tokens, experts=experts)
    folded = LUDZIEJEWSKI.at_experts(experts)
    assert loss == pytest.approx(by_hand, rel=1e-12)
    assert folded.loss(n_total=n, n_active=n, tokens=tokens, expert_split=1.0) == pytest.approx(
        loss, rel=1e-12
    )


def test_leverage_of_the_paper() -> None:
    leverage = TIAN.leverage(activation_ratio=0.031, granularity=12.0, compute=1e22)
    assert round(leverage, 2) == 7.24
    assert round(TIAN.best_granularity(), 1) == 11.3
    best = TIAN.leverage(activation_ratio=0.031, granularity=TIAN.best_granularity(), compute=1e22)
    for factor in (0.9, 1.1):
        near = factor * TIAN.best_granularity()
        assert TIAN.leverage(activation_ratio=0.031, granularity=near, compute=1e22) < best


@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_best_number_of_active_experts_has_the_least_loss(factor: float) -> None:
    rest = {"n_total": 1e10, "n_active": 1e9, "tokens": 1e11, "shared_ratio": 0.3}
    best = ZHAO.best_active_experts()
    assert ZHAO.loss(active_experts=best, **rest) < ZHAO.loss(active_experts=factor * best, **rest)


@given(data=st.data())
def test_zhao_is_its_equation(data: st.DataObject) -> None:
    point = data.draw(CASES["zhao"].points)
    n, na, d = point["n_total"], point["n_active"], point["tokens"]
    g, s = point["active_experts"], point["shared_ratio"]
    by_hand = (
        (0.1577 * g + 7.2446 / g + 5.1395 * s**2 - 3.2363 * s)
        * (n**-0.2383 + 0.0013 * na**-0.2383 + 0.0450 * na / n)
        + 38.051 * n**-0.2383
        + 27129.05 * d**-0.4694
        + 31.096 * na**-0.2383
        + 1.8182
    )
    assert ZHAO.loss(**point) == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize("law", [ABNAR, GADRE], ids=["abnar", "gadre"])
def test_terms_of_a_posynomial_add_up_to_the_loss(law: PosynomialLaw) -> None:
    point = {name: 0.5 + 0.1 * k for k, name in enumerate(law.variables)}
    total = sum(
        term.coefficient * math.prod(point[v] ** p for v, p in term.exponents.items())
        for term in law.terms
    )
    assert law.loss(**point) == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: KAPLAN.loss(n=1e9), "'tokens' is missing, but this law takes n, tokens"),
        (lambda: KAPLAN.loss(n=1e9, tokens=1e9, size=1.0), "'size' is unknown"),
        (lambda: KAPLAN.loss(n=-1.0, tokens=1e9), "n is -1, but a law needs a finite number"),
        (lambda: KAPLAN.tokens_for(0.1, n=1e9), "here whatever the tokens"),
        (lambda: KAPLAN.tokens_for(1e300, n=1e9), "would not fit a float"),
        (lambda: ABNAR.loss(n_total=1e9, tokens=1e9, density=1.5), "at most 1; the nearest"),
        (lambda: ABNAR.tokens_for(0.5, n_total=1e9, density=0.5), "must lie above"),
        (lambda: CLARK_SBASE.loss(n=1e9, experts=0.5), "at least 1; the nearest"),
        (lambda: LUDZIEJEWSKI.loss(n_active=1e9, tokens=1e9, experts=0.0), "experts is 0"),
        (
            lambda: REPEATED.loss(n=1e9, tokens=1e9, unique_tokens=2e9),
            "cannot see more different tokens than tokens; the nearest legal value is 1e",
        ),
        (
            lambda: REPEATED.tokens_for(1.9, n=1e9, unique_tokens=1e6),
            "whatever the number of repetitions",
        ),
        (
            lambda: REPEATED.tokens_for(9.0, n=1e9, unique_tokens=1e12),
            "one pass over the unique tokens reaches",
        ),
        (
            lambda: ZHAO.loss(
                n_total=1e9, n_active=2e9, tokens=1e9, active_experts=2.0, shared_ratio=0.1
            ),
            "cannot activate more parameters than it has",
        ),
        (lambda: TIAN.loss(activation_ratio=0.1, granularity=1.0, compute=1e20), "not a loss"),
        (
            lambda: TIAN.compute_for(1e300, activation_ratio=0.5, granularity=2.0),
            "does not fit a float",
        ),
        (lambda: GADRE.compute_for(1.6, tokens_per_parameter=20.0), "must lie above 1.6"),
        (lambda: KAPLAN.loss(n=np.ones(3), tokens=np.ones(2)), "must broadcast"),
    ],
)
def test_bad_input_gets_one_sentence(call: Any, expected: str) -> None:
    with pytest.raises(LawError, match=expected) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")


def test_ends_of_the_transform_must_be_in_order() -> None:
    with pytest.raises(ValueError, match="most must exceed start"):
        CLARK_SBASE.model_validate({**CLARK_SBASE.model_dump(), "most": 1.0})


@cases
def test_law_survives_json(name: str) -> None:
    law = CASES[name].law
    adapter: TypeAdapter[AnyGeneralLaw] = TypeAdapter(AnyGeneralLaw)
    back = adapter.validate_json(law.model_dump_json())
    assert back == law
    assert type(back) is type(law)
    assert type(law).model_validate_json(law.model_dump_json()) == law
    assert hash(law) == hash(law.model_copy())
    with pytest.raises(ValueError, match="frozen"):
        law.source = "another"


@cases
def test_every_law_says_what_it_is(name: str) -> None:
    law = CASES[name].law
    assert law.basis == "FITTED"
    assert len(law.equation.split(" = ")) >= 2
    assert law.variables
    assert all("[" in meaning for meaning in law.variables.values())
    assert len(law.convexity) > 20
