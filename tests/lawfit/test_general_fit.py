"""Fits of any law to any columns: known coefficients come back, and a fit says what it is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar

import numpy as np
import pytest
from pydantic import Field, model_validator

from lawfit import (
    ABNAR,
    CHINCHILLA_EPOCH,
    CLARK_RLR,
    KRAJEWSKI_MOE,
    LUDZIEJEWSKI,
    TIAN,
    ZHAO,
    ChinchillaLaw,
    ClarkLaw,
    DataConstrainedLaw,
    GadreLaw,
    GeneralFit,
    GeneralLaw,
    KaplanLaw,
    LawError,
    PosynomialLaw,
    PowerTerm,
    ScalingLaw,
    fit,
    fit_general,
)
from lawfit._curve import Curve
from lawfit._general_descent import Task, descend_any

from .fit_tables import dense_runs

KAPLAN = KaplanLaw(n_c=8.8e13, d_c=5.4e13, alpha_n=0.076, alpha_d=0.095, source="arXiv 2001.08361")
GADRE = GadreLaw(a=116.0, b=245.0, eta=0.135, e=1.6, source="made up")
REPEATED = DataConstrainedLaw(
    a=521.0, alpha=0.353, b=1488.0, beta=0.353, e=1.87, r_d=15.39, r_n=5.31, source="2305.16264"
)

LAWS: Mapping[str, GeneralLaw | ScalingLaw] = {
    "kaplan": KAPLAN,
    "gadre": GADRE,
    "data_constrained": REPEATED,
    "abnar": ABNAR,
    "clark": CLARK_RLR,
    "ludziejewski": LUDZIEJEWSKI,
    "zhao": ZHAO,
    "tian": TIAN,
    "krajewski": KRAJEWSKI_MOE,
    "chinchilla": CHINCHILLA_EPOCH,
}


@cache
def columns_of(name: str, rows: int = 100) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(1)

    def spread(low: float, high: float) -> np.ndarray:
        return np.exp(draw.uniform(math.log(low), math.log(high), rows))

    def one_of(*values: float) -> np.ndarray:
        return draw.choice(values, rows)

    size, tokens, share = spread(5e7, 1e10), spread(2e9, 5e11), spread(0.05, 0.9)
    experts = one_of(1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    split = one_of(1, 2, 4, 8, 16)
    return {
        "kaplan": {"n": size, "tokens": tokens},
        "gadre": {"compute": 6 * size * tokens, "tokens_per_parameter": tokens / size},
        "data_constrained": {
            "n": size,
            "tokens": tokens,
            "unique_tokens": tokens / spread(1.0, 60.0),
        },
        "abnar": {"n_total": size, "tokens": tokens, "density": share},
        "clark": {"n": size, "experts": experts},
        "ludziejewski": {"n_active": size, "tokens": tokens, "experts": experts},
        "zhao": {
            "n_total": size,
            "n_active": size * share,
            "tokens": tokens,
            "active_experts": one_of(1, 2, 4, 8, 16, 32),
            "shared_ratio": draw.uniform(0.05, 0.6, rows),
        },
        "tian": {
            "activation_ratio": share,
            "granularity": spread(2.0, 16.0),
            "compute": spread(1e18, 1e21),
        },
        "krajewski": {
            "n_total": size,
            "n_active": 0.2 * size,
            "tokens": tokens,
            "expert_split": split,
        },
        "chinchilla": {
            "n_total": size,
            "n_active": size,
            "tokens": tokens,
            "expert_split": np.ones(rows),
        },
    }[name]


def value(law: Any, columns: Mapping[str, Any]) -> np.ndarray:
    found: np.ndarray = (law.leverage if law is TIAN else law.loss)(**columns)
    return found


def noisy(law: Any, columns: Mapping[str, Any], noise: float = 0.003, seed: int = 0) -> np.ndarray:
    exact = value(law, columns)
    return exact * np.exp(noise * np.random.default_rng(seed).standard_normal(len(exact)))


def reasons(found: GeneralFit) -> set[str]:
    return {remark.reason for remark in found.warnings}


# ---------------------------------------------------------------- the truth comes back


@pytest.mark.parametrize("name", LAWS)
def test_data_without_noise_give_the_law_back(name: str) -> None:
    law, columns = LAWS[name], columns_of(name)
    kind: Any = type(law)
    # nothing saturates near the most that Tian's law prints, so no data know it
    unknown = {"most": law.most} if law is TIAN else {}  # type: ignore[union-attr]
    # of twelve coefficients hardly a random start finds all
    truth = {n: getattr(law, n) for n in kind.model_fields if isinstance(getattr(law, n), float)}
    near = {n: tuple(sorted((x / 3.0, x * 3.0))) for n, x in truth.items()} if law is ZHAO else {}
    found = fit_general(
        kind, columns, value(law, columns), starts=12, rng=1, fixed=unknown, ranges=near
    )
    assert found.converged
    assert found.rmse_log is not None
    assert found.rmse_log < 1e-13
    for coefficient, fitted in found.coefficients.items():
        assert fitted.value == pytest.approx(getattr(law, coefficient), rel=1e-9)
    terms = isinstance(law, PosynomialLaw | ScalingLaw)
    assert found.engine == ("terms" if terms else "values")


def test_a_coefficient_without_influence_is_named() -> None:
    columns = columns_of("tian")
    found = fit_general(TIAN, columns, value(TIAN, columns), starts=3)
    assert "no_influence" in reasons(found)
    assert "most" in next(w.sentence for w in found.warnings if w.reason == "no_influence")
    assert found.law.start == pytest.approx(TIAN.start, rel=1e-9)  # type: ignore[union-attr]


@pytest.mark.parametrize("objective", ["huber", "least_squares"])
@pytest.mark.parametrize("law", [ABNAR, GADRE])
def test_both_engines_find_the_same_optimum(law: GeneralLaw, objective: Any) -> None:
    columns = columns_of(law.kind)  # type: ignore[attr-defined]
    loss = noisy(law, columns)
    terms = fit_general(law, columns, loss, objective=objective, starts=20)
    legal = {"e": (0.0, 5.0)}  # bounds of a coefficient are nothing that the terms know
    values = fit_general(law, columns, loss, objective=objective, starts=2, bounds=legal)
    assert (terms.engine, values.engine) == ("terms", "values")
    assert values.objective == pytest.approx(terms.objective, rel=1e-7)
    if not values.coefficients["e"].at_bound and not terms.coefficients["e"].at_bound:
        assert values.covariance is not None
        assert terms.covariance is not None
        for name in values.covariance.names:
            error = values.covariance.std_error(name)
            gap = abs(values.coefficients[name].value - terms.coefficients[name].value)
            assert gap <= 1e-3 * error


@pytest.mark.parametrize("delta", [1e-3, 1e-2])
def test_it_agrees_with_fit(delta: float) -> None:
    runs = dense_runs()
    names = ("n_total", "n_active", "tokens", "expert_split")
    columns = {name: runs.column(name) for name in names}
    first = fit("chinchilla", runs, delta=delta, starts=20)
    found = fit_general(ChinchillaLaw, columns, runs.column("loss"), delta=delta, starts=20)
    assert found.objective == pytest.approx(first.objective, rel=1e-10)
    assert first.covariance is not None
    assert found.covariance is not None
    for name in ("alpha", "beta"):
        assert found.coefficients[name].value == pytest.approx(getattr(first.law, name), rel=1e-6)
        assert found.covariance.std_error(name) == pytest.approx(
            first.covariance.std_error(name), rel=1e-4
        )


def test_no_start_of_least_squares_of_scipy_ends_lower() -> None:
    from scipy.optimize import least_squares

    columns = columns_of("clark")
    target = np.log(noisy(CLARK_RLR, columns))
    size, experts = np.log10(columns["n"]), columns["experts"]

    def miss(point: np.ndarray) -> np.ndarray:
        a, b, c, d, start, most = point
        low, high = math.exp(start), math.exp(start) + math.exp(most)
        hat = 1.0 / (1.0 / (experts - 1.0 + 1.0 / (1.0 / low - 1.0 / high)) + 1.0 / high)
        power = a * size + b * np.log10(hat) + c * size * np.log10(hat) + d
        return np.asarray(math.log(10.0) * power - target)

    draw = np.random.default_rng(0)
    ends = [
        least_squares(
            miss,
            [*draw.uniform(-0.3, 0.3, 3), 1.0, *draw.uniform(0.0, 6.0, 2)],
            bounds=([-9.0] * 4 + [-5.0] * 2, [9.0] * 4 + [20.0] * 2),
            x_scale="jac",
            ftol=1e-15,
            xtol=1e-15,
            gtol=1e-15,
            max_nfev=500,
        ).cost
        for _ in range(10)
    ]
    found = fit_general(ClarkLaw, columns, np.exp(target), objective="least_squares", starts=20)
    assert found.converged
    assert found.objective <= min(ends) * (1.0 + 1e-9)
    assert found.objective == pytest.approx(min(ends), rel=1e-6)


# ---------------------------------------------------------------- laws of one's own


class Saturating(GeneralLaw):
    """A law with a branch and a call that take one number only, and a field with limits."""

    equation: ClassVar[str] = "L = e + a (w/1000)^-alpha exp(-d/s)"
    variables: ClassVar[Mapping[str, str]] = {"width": "w [-]", "depth": "d [-]"}

    a: Annotated[float, Field(gt=0)]
    alpha: Annotated[float, Field(ge=0.05, le=2.0)]
    s: Annotated[float, Field(gt=0)]
    e: float

    def value_at(self, at: Mapping[str, Any]) -> Any:
        scale = math.exp(-math.log(self.s)) if self.s > 0.0 else 0.0
        return self.e + self.a * (at["width"] / 1000.0) ** -self.alpha * np.exp(
            -at["depth"] * scale
        )

    def slopes_at(self, at: Mapping[str, Any]) -> Any:
        raise NotImplementedError


OWN = Saturating(a=2.0, alpha=0.4, s=20.0, e=1.5, source="made up")


def own_columns() -> dict[str, np.ndarray]:
    width, depth = np.meshgrid([256.0, 512.0, 1024.0, 4096.0], [4.0, 8.0, 16.0, 32.0, 64.0])
    return {"width": width.ravel(), "depth": depth.ravel()}


@pytest.mark.parametrize("on", ["log", "loss"])
def test_a_law_of_ones_own_whose_code_takes_one_number_at_a_time(on: Any) -> None:
    columns = own_columns()
    found = fit_general(Saturating, columns, OWN.loss(**columns), on=on, starts=8)
    assert found.converged
    for name in ("a", "alpha", "s", "e"):
        assert found.coefficients[name].value == pytest.approx(getattr(OWN, name), rel=1e-8)


def test_limits_of_a_field_bind() -> None:
    steep = OWN.model_copy(update={"alpha": 2.5})
    columns = own_columns()
    found = fit_general(Saturating, columns, steep.loss(**columns), starts=4)
    assert found.converged
    assert found.coefficients["alpha"].value == 2.0
    assert found.coefficients["alpha"].at_bound == "upper"
    assert "parameter_at_bound" in reasons(found)
    assert found.covariance is not None
    assert "alpha" not in found.covariance.names


class Ordered(GeneralLaw):
    """A line between two ends, which a rule of the whole law keeps apart."""

    equation: ClassVar[str] = "y = low + (high - low) x"
    variables: ClassVar[Mapping[str, str]] = {"x": "x [-]"}
    limits: ClassVar[Mapping[str, tuple[float, float]]] = {"x": (-1.0, 1.0)}

    low: float
    high: float

    @model_validator(mode="after")
    def _apart(self) -> Ordered:
        if not self.low < self.high:
            raise ValueError("low must be below high")
        return self

    def value_at(self, at: Mapping[str, Any]) -> Any:
        return self.low + (self.high - self.low) * at["x"]

    def slopes_at(self, at: Mapping[str, Any]) -> Any:
        raise NotImplementedError


def test_variables_and_values_of_either_sign_and_rules_of_the_whole_law() -> None:
    x = np.linspace(-1.0, 1.0, 9)
    found = fit_general(Ordered, {"x": x}, -3.0 + 4.0 * x, on="loss", starts=6)
    assert found.converged
    assert found.rmse_log is None
    assert found.law.low == pytest.approx(-3.0, rel=1e-12)  # type: ignore[union-attr]
    assert found.law.high == pytest.approx(1.0, rel=1e-12)  # type: ignore[union-attr]
    # data that fall want what the law refuses: nothing illegal comes back as an optimum
    found = fit_general(Ordered, {"x": x}, 1.0 - x, on="loss", starts=6)
    assert found.law.low < found.law.high  # type: ignore[union-attr]
    assert not found.stationary


class Straight(GeneralLaw):
    """A straight line in two coefficients, for which all is known in closed form."""

    equation: ClassVar[str] = "y = p + q x"
    variables: ClassVar[Mapping[str, str]] = {"x": "x [-]"}

    p: float
    q: float

    def value_at(self, at: Mapping[str, Any]) -> Any:
        return self.p + self.q * at["x"]

    def slopes_at(self, at: Mapping[str, Any]) -> Any:
        return {"x": self.q * at["x"]}


def test_a_straight_line_is_that_of_the_normal_equations_with_its_errors() -> None:
    draw = np.random.default_rng(5)
    x, weight = draw.uniform(1.0, 9.0, 40), draw.uniform(0.5, 2.0, 40)
    y = 1.0 - 0.3 * x + 0.1 * draw.standard_normal(40)
    design = np.column_stack([np.ones(40), x])
    information = design.T @ (weight[:, None] * design)
    best = np.linalg.solve(information, design.T @ (weight * y))
    miss = design @ best - y
    spread = (weight * miss**2).sum() / 38.0 * np.linalg.inv(information)
    found = fit_general(
        Straight, {"x": x}, y, weight=weight, on="loss", objective="least_squares", starts=5
    )
    assert [c.value for c in found.coefficients.values()] == pytest.approx(best, rel=1e-11)
    assert found.covariance is not None
    np.testing.assert_allclose(np.array(found.covariance.matrix), spread, rtol=1e-9)
    assert found.objective == pytest.approx(0.5 * (weight * miss**2).sum(), rel=1e-12)


# ---------------------------------------------------------------- properties


def test_huber_of_a_small_width_is_the_median() -> None:
    class Level(GeneralLaw):
        equation: ClassVar[str] = "y = p"
        variables: ClassVar[Mapping[str, str]] = {"x": "x [-]"}
        p: float

        def value_at(self, at: Mapping[str, Any]) -> Any:
            return self.p + 0.0 * at["x"]

        def slopes_at(self, at: Mapping[str, Any]) -> Any:
            return {"x": 0.0 * at["x"]}

    y = np.array([1.0, 2.0, 4.0, 8.0, 100.0])
    found = fit_general(Level, {"x": np.ones(5)}, y, on="loss", delta=1e-6, starts=4)
    assert found.converged
    assert found.law.p == pytest.approx(4.0, abs=1e-6)  # type: ignore[union-attr]


@pytest.mark.parametrize("objective", ["huber", "least_squares"])
def test_the_scale_of_the_objective_does_not_matter(objective: Any) -> None:
    columns = columns_of("clark")
    loss = noisy(CLARK_RLR, columns)
    light, heavy = (
        fit_general(
            ClarkLaw, columns, loss, objective=objective, weight=np.full(len(loss), w), starts=12
        )
        for w in (1e-6, 1e6)
    )
    assert light.converged
    assert heavy.converged
    assert heavy.objective == pytest.approx(1e12 * light.objective, rel=1e-9)
    for name, each in light.coefficients.items():
        assert heavy.coefficients[name].value == pytest.approx(each.value, rel=1e-6)


def test_units_of_the_loss_change_nothing_but_units() -> None:
    x = np.linspace(1.0, 5.0, 30)
    y = 2.0 + 3.0 * x + np.random.default_rng(0).standard_normal(30)
    for unit in (1e-9, 1e9):
        found = fit_general(Straight, {"x": x}, unit * y, on="loss", delta=0.3 * unit, starts=5)
        one = fit_general(Straight, {"x": x}, y, on="loss", delta=0.3, starts=5)
        assert found.converged
        assert found.law.q == pytest.approx(unit * one.law.q, rel=1e-7)  # type: ignore[union-attr]


def test_starts_do_not_depend_on_each_other() -> None:
    columns = columns_of("clark")
    target = noisy(CLARK_RLR, columns)
    names = ("start", "most", "a", "b", "c", "d")
    rest = {"source": "x", "kind": "clark"}
    curve = Curve(ClarkLaw, rest, names, columns, len(target), True, together=True, turned=True)
    low = np.array([1e-30, 1e-30, *[-np.inf] * 4])
    logged = np.array([True, True, False, False, False, False])
    task = Task.of(curve, target, np.ones(len(target)), (low, np.full(6, 1e30)), 1e-3)
    task = task._replace(logged=logged)
    truth = np.array([getattr(CLARK_RLR, name) for name in names])
    draw = np.random.default_rng(0)
    points = truth * np.exp(0.5 * draw.standard_normal((5, 6)))
    none = np.zeros(6, dtype=bool)
    together = descend_any(task, points, vanishing=none)
    for k, point in enumerate(points):
        alone = descend_any(task, point[None], vanishing=none)
        assert alone.value[0] == pytest.approx(together.value[k], rel=1e-9)
        assert alone.converged[0] == together.converged[k]


def test_the_same_generator_gives_the_same_answer_and_another_the_same_optimum() -> None:
    columns = columns_of("kaplan")
    loss = noisy(KAPLAN, columns)
    first = fit_general(KaplanLaw, columns, loss, starts=10, rng=3)
    assert first == fit_general(KaplanLaw, columns, loss, starts=10, rng=np.random.default_rng(3))
    other = fit_general(KaplanLaw, columns, loss, starts=10, rng=4)
    assert other.objective == pytest.approx(first.objective, rel=1e-9)


def test_a_law_is_one_more_start_and_progress_is_told() -> None:
    columns = columns_of("kaplan")
    told: list[tuple[int, int]] = []
    found = fit_general(
        KAPLAN,
        columns,
        noisy(KAPLAN, columns),
        starts=3,
        progress=lambda done, of: told.append((done, of)),
    )
    assert found.starts == 4
    assert told[-1] == (4, 4)


def test_ranges_hold_where_starts_are() -> None:
    columns = columns_of("kaplan")
    loss = noisy(KAPLAN, columns)
    near = {
        "n_c": (1e13, 1e15),
        "d_c": (1e13, 1e15),
        "alpha_n": (0.05, 0.1),
        "alpha_d": (0.05, 0.2),
    }
    found = fit_general(KaplanLaw, columns, loss, starts=5, ranges=near)
    assert found.starts_agreeing == 5


def test_a_fixed_coefficient_stays_and_has_no_error() -> None:
    columns = columns_of("clark")
    found = fit_general(ClarkLaw, columns, noisy(CLARK_RLR, columns), fixed={"a": -0.08}, starts=10)
    assert found.law.a == -0.08  # type: ignore[union-attr]
    assert found.coefficients["a"].fixed
    assert found.covariance is not None
    assert "a" not in found.covariance.names


def test_too_few_starts_and_few_runs_are_said() -> None:
    columns = {name: column[:7] for name, column in columns_of("clark").items()}
    found = fit_general(ClarkLaw, columns, noisy(CLARK_RLR, columns), starts=[CLARK_RLR])
    assert not found.converged
    assert {"few_starts_agree", "too_few_runs"} <= reasons(found)


def test_a_far_run_is_named() -> None:
    columns = columns_of("gadre")
    loss = noisy(GADRE, columns)
    loss[17] *= 1.3
    found = fit_general(GadreLaw, columns, loss, starts=10)
    assert "run 17 " in next(w.sentence for w in found.warnings if w.reason == "outliers")


# ---------------------------------------------------------------- what is refused


class WithText(Straight):
    kind: str


class Flat(PosynomialLaw):
    equation: ClassVar[str] = "y = a"
    variables: ClassVar[Mapping[str, str]] = {"x": "x [-]"}
    a: float
    still: float

    @property
    def terms(self) -> tuple[PowerTerm, ...]:
        return (PowerTerm("constant", self.a, {}),)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"law": 3}, "must be a law, or the class of one"),
        ({"law": GeneralLaw}, "must be a law, or the class of one"),
        ({"law": WithText}, "has the field kind, which is no coefficient"),
        (
            {"law": Flat, "columns": {"x": 1.0}},
            "has the field still, which is in none of its terms",
        ),
        ({"columns": {"n": 1.0}}, "the variable 'experts' is missing"),
        ({"columns": {"n": -1.0, "experts": 2.0}}, "n is -1"),
        ({"columns": {"n": np.ones(3), "experts": 2.0}}, "n has the shape"),
        ({"loss": np.array([1.0, -1.0])}, "loss is -1"),
        ({"loss": np.ones((2, 2))}, "must have one axis"),
        ({"loss": np.ones(5), "columns": {"n": 1.0, "experts": 2.0}}, "nearest legal number is 6"),
        ({"weight": np.zeros(100)}, "weight is 0"),
        ({"weight": np.ones(3)}, "weight has the shape"),
        ({"objective": "median"}, "objective is 'median'"),
        ({"delta": 0.0}, "delta is 0"),
        ({"on": "exp"}, "on is 'exp'"),
        ({"starts": 0}, "starts is 0"),
        ({"starts": []}, "starts is empty"),
        ({"starts": [KAPLAN]}, "starts holds a law of another kind"),
        ({"fixed": {"z": 1.0}}, "fixed names 'z'"),
        ({"fixed": {"start": -1.0}}, "fixed holds start at -1"),
        ({"bounds": {"z": (0.0, 1.0)}}, "bounds names 'z'"),
        ({"bounds": {"a": (1.0, 0.0)}}, "must ascend"),
        ({"bounds": {"start": (-2.0, -1.0)}}, "which the law does not accept"),
        ({"ranges": {"z": (0.0, 1.0)}}, "ranges names 'z'"),
        ({"ranges": {"a": (0.0, math.inf)}}, "must ascend and be finite"),
        (
            {"fixed": dict.fromkeys(("a", "b", "c", "d"), 0.1) | {"start": 1.0, "most": 9.0}},
            "all coefficients are fixed",
        ),
    ],
)
def test_illegal_input_is_refused_in_one_sentence(change: dict[str, Any], message: str) -> None:
    columns = columns_of("clark")
    given = {"law": ClarkLaw, "columns": columns, "loss": value(CLARK_RLR, columns)} | change
    law, table, loss = given.pop("law"), given.pop("columns"), given.pop("loss")
    with pytest.raises(LawError, match=message):
        fit_general(law, table, loss, **given)


def test_a_law_without_a_value_at_any_start_is_refused() -> None:
    class Nowhere(Straight):
        def value_at(self, at: Mapping[str, Any]) -> Any:
            raise LawError("nowhere")

    with pytest.raises(LawError, match="no value at any start"):
        fit_general(Nowhere, {"x": np.ones(4)}, np.ones(4))


def test_a_scaling_law_takes_its_four_columns() -> None:
    with pytest.raises(LawError, match="this law takes n_total, n_active, tokens, expert_split"):
        fit_general(ChinchillaLaw, {"n_active": 1e9, "tokens": 1e9}, np.ones(9))
