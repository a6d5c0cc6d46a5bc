"""Fits of laws: the objective and its derivatives, the optimum, and what a fit says of itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lawfit import (
    CHINCHILLA_EPOCH,
    MOSAIC_TABLE2,
    AnyLaw,
    ChinchillaLaw,
    JointLaw,
    Runs,
    fit,
)
from lawfit import _descent as descent
from lawfit._descent import Problem, descend
from lawfit._newton import along_terms, jacobi, terms_of, value
from lawfit._posynomial import Posynomial, posynomial
from lawfit.fitting import starting_points

from .fit_tables import (
    NOISE,
    dense_points,
    dense_runs,
    fitted,
    joint_runs,
    paper_points,
    predicted,
    reasons,
    simulated,
)

LAWS = (CHINCHILLA_EPOCH, MOSAIC_TABLE2, MOSAIC_TABLE2.at_split(4.0))


def points_of(law: AnyLaw) -> tuple[np.ndarray, ...]:
    if isinstance(law, ChinchillaLaw):
        return dense_points()
    total, active, tokens, split = paper_points()
    return total, active, tokens, split if isinstance(law, JointLaw) else np.full(len(split), 4.0)


def problem_of(law: AnyLaw, delta: float, noise: float = NOISE) -> tuple[Problem, Posynomial, Runs]:
    runs = simulated(law, points_of(law), noise, 5)
    logs = runs.logs()
    form = posynomial(law, logs.variables, logs.loss)
    weight = np.random.default_rng(6).uniform(0.5, 2.0, len(runs))
    return Problem.of(form, logs.loss, weight, delta), form, runs


def near(form: Posynomial, law: AnyLaw, seed: int, reach: float = 0.2) -> np.ndarray:
    draw = np.random.default_rng(seed).uniform(-reach, reach, len(form.names))
    return np.clip(form.point(law.model_dump()) + draw, form.lower, form.upper)


# ---------------------------------------------------------------- the parametrisation


@pytest.mark.parametrize("law", LAWS)
@given(seed=st.integers(0, 1000))
def test_the_parametrisation_is_the_law(law: AnyLaw, seed: int) -> None:
    _, form, runs = problem_of(law, 1e-3)
    point = near(form, law, seed, reach=1.0)
    fields = form.raw(point)
    np.testing.assert_allclose(form.point(fields), point, rtol=1e-12, atol=1e-10)
    assert set(fields) == {term for term in form.names}
    other = type(law).model_validate({**law.model_dump(), **fields})
    np.testing.assert_allclose(
        form.log_loss(point[None])[0], np.log(predicted(other, runs)), rtol=0, atol=1e-11
    )
    raw = np.concatenate(
        [np.log([fields[n] for n in form.names[: form.terms]]), point[form.terms :]]
    )
    np.testing.assert_allclose(form.raw_map() @ point, raw, rtol=1e-11, atol=1e-9)


def test_the_parameters_are_the_coefficients_and_their_signs_those_of_the_law() -> None:
    _, form, _ = problem_of(MOSAIC_TABLE2, 1e-3)
    assert set(form.names[: form.terms]) == {"a", "b", "c", "j", "e"}
    above = {n for n, low in zip(form.names, form.lower, strict=True) if low > 0}
    assert above - set(form.names[: form.terms]) == {"alpha", "beta"}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("delta", [1e-2, math.inf])
@given(seed=st.integers(0, 1000))
@settings(max_examples=10)
def test_derivatives_are_those_of_finite_differences(law: AnyLaw, delta: float, seed: int) -> None:
    problem, form, _ = problem_of(law, delta)
    point = near(form, law, seed)
    step = 1e-6 * np.eye(len(point))
    found = problem.derivatives(point[None])
    slope = (problem.value(point + step) - problem.value(point - step)) / 2e-6
    np.testing.assert_allclose(found.gradient[0], slope, rtol=1e-5, atol=1e-7 * slope.max())
    # the second derivative jumps where a residual crosses delta: compare those that do not
    ends = form.log_loss(np.concatenate([point + step, point - step])) - problem.log_loss
    inside = np.abs(ends) <= delta
    if (inside.all(axis=0) == inside.any(axis=0)).all():
        up, down = (problem.derivatives(point + sign * step).gradient for sign in (1.0, -1.0))
        bend = (up - down) / 2e-6
        np.testing.assert_allclose(
            found.hessian[0], bend, rtol=1e-4, atol=1e-6 * np.abs(bend).max()
        )
    np.testing.assert_allclose(found.hessian[0], found.hessian[0].T, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["chinchilla", "joint"])
@given(seed=st.integers(0, 100), size=st.floats(1e-6, 1e-4))
@settings(max_examples=10)
def test_a_small_step_is_the_same_straight_in_parameters_and_in_terms(
    kind: str, seed: int, size: float
) -> None:
    law = MOSAIC_TABLE2 if kind == "joint" else CHINCHILLA_EPOCH
    _, form, _ = problem_of(law, 1e-3)
    point = near(form, law, seed)
    step = size * np.random.default_rng(seed).standard_normal(point.shape)
    bent = np.empty_like(point)
    along_terms(terms_of(form), point, step, bent)
    np.testing.assert_allclose(bent, point + step, rtol=0, atol=100.0 * size**2 + 1e-14)


# ---------------------------------------------------------------- the optimum


@pytest.mark.parametrize("law", LAWS)
def test_runs_without_noise_give_the_law_back(law: AnyLaw) -> None:
    runs = simulated(law, points_of(law), 0.0, 0)
    for objective in ("huber", "least_squares"):
        found = fit(type(law), runs, objective=objective, starts=20)  # type: ignore[arg-type]
        assert found.converged
        assert found.rmse_train < 1e-8
        for name, coefficient in found.coefficients.items():
            assert coefficient.value == pytest.approx(getattr(law, name), rel=2e-3)
            assert coefficient.at_bound is None
        assert set(reasons(found)) <= {"ill_conditioned", "duplicate"}


@pytest.mark.parametrize(
    ("kind", "delta", "seed"),
    [
        ("chinchilla", 1e-3, 0),
        ("chinchilla", 1e-2, 1),
        ("joint", 1e-2, 0),
        pytest.param("joint", 1e-2, 1, marks=pytest.mark.slow),
    ],
)
def test_no_start_of_lbfgs_with_tight_tolerances_ends_lower(
    kind: str, delta: float, seed: int
) -> None:
    from scipy.optimize import minimize

    runs = joint_runs(seed=seed) if kind == "joint" else dense_runs(seed=seed)
    found = fit(kind, runs, delta=delta, starts=8, rng=seed)
    logs = runs.logs()
    form = posynomial(found.law, logs.variables, logs.loss)
    problem = Problem.of(form, logs.loss, runs.column("weight"), delta)
    generator = np.random.default_rng(seed)
    points = starting_points(form, float(np.median(logs.loss)), 8, generator)

    def scaled(point: np.ndarray) -> tuple[float, np.ndarray]:
        gradient = problem.derivatives(point[None]).gradient[0]
        return 1e4 * float(problem.value(point[None])[0]), 1e4 * gradient

    options = {"ftol": 1e-15, "gtol": 1e-10, "maxcor": 20, "maxiter": 5000, "maxfun": 10000}
    bounds = list(zip(form.lower, form.upper, strict=True))
    ends = [
        minimize(scaled, x, jac=True, method="L-BFGS-B", bounds=bounds, options=options).fun / 1e4
        for x in points
    ]
    assert found.objective <= min(ends) * (1.0 + 1e-9)
    assert found.objective == pytest.approx(min(ends), rel=1e-3)  # and both know the same minimum
    assert found.converged


@pytest.mark.parametrize("kind", ["chinchilla", "joint"])
def test_no_point_nearby_is_lower(kind: str) -> None:
    found = fitted(kind)
    runs = joint_runs() if kind == "joint" else dense_runs()
    logs = runs.logs()
    form = posynomial(found.law, logs.variables, logs.loss)
    problem = Problem.of(form, logs.loss, runs.column("weight"), 1e-3)
    best = form.point({name: c.value for name, c in found.coefficients.items()})
    assert problem.value(best[None])[0] == pytest.approx(found.objective, rel=1e-9)
    for reach in (1e-5, 1e-3, 1e-1):
        draw = np.random.default_rng(1).normal(0.0, reach, (200, len(best)))
        around = np.clip(best + draw, form.lower, form.upper)
        assert (problem.value(around) >= found.objective * (1.0 - 1e-10)).all()


@pytest.mark.parametrize("kind", ["chinchilla", "joint"])
def test_the_same_generator_gives_the_same_answer_and_another_the_same_optimum(kind: str) -> None:
    runs = joint_runs() if kind == "joint" else dense_runs()
    first = fit(kind, runs, starts=20, rng=7)
    assert first == fit(kind, runs, starts=20, rng=np.random.default_rng(7))
    other = fit(kind, runs, starts=20, rng=8)
    assert other.objective == pytest.approx(first.objective, rel=1e-6)
    np.testing.assert_allclose(predicted(other.law, runs), predicted(first.law, runs), rtol=1e-4)


@pytest.mark.parametrize("kind", ["chinchilla", "joint"])
def test_most_starts_agree(kind: str) -> None:
    found = fitted(kind)
    assert found.converged
    assert found.gradient_norm <= descent.GRADIENT
    assert found.starts_agreeing >= 0.7 * found.starts


def test_starts_do_not_depend_on_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, form, _ = problem_of(MOSAIC_TABLE2, 1e-3)
    points = starting_points(form, float(np.median(problem.log_loss)), 6, np.random.default_rng(2))
    together = descend(problem, points)
    monkeypatch.setattr(descent, "_BATCH", 1)
    for workers in (1, 3):
        for all_, alone in zip(together, descend(problem, points, workers=workers), strict=True):
            np.testing.assert_array_equal(all_, alone)


def test_targets_weights_and_bounds_of_each_start_are_its_own() -> None:
    problem, form, _ = problem_of(MOSAIC_TABLE2, 1e-2)
    best = near(form, MOSAIC_TABLE2, 0, 0.0)
    draw = np.random.default_rng(3)
    target = problem.log_loss + draw.normal(0.0, 1e-3, (3, problem.log_loss.shape[1]))
    weight = draw.uniform(0.5, 2.0, target.shape)
    upper = np.repeat(form.upper[None], 3, axis=0)
    upper[1, 6] = 0.8 * best[6]
    each = problem._replace(log_loss=target, weight=weight, upper=upper)
    found = descend(each, np.repeat(best[None], 3, axis=0))
    assert found.converged.all()
    for i in range(3):
        alone = Problem.of(form, target[i], weight[i], 1e-2)._replace(upper=upper[i][None])
        for all_, one in zip(found, descend(alone, best[None]), strict=True):
            np.testing.assert_array_equal(all_[i], one[0])
    assert found.points[1, 6] == upper[1, 6] < found.points[0, 6]


def test_the_compiled_objective_is_that_of_the_form() -> None:
    problem, form, _ = problem_of(MOSAIC_TABLE2, 1e-3)
    for seed in range(5):
        point = near(form, MOSAIC_TABLE2, seed)
        compiled = value(terms_of(form), problem.log_loss[0], problem.weight[0], 1e-3, point)
        assert compiled == pytest.approx(problem.value(point[None])[0], rel=1e-12)


@given(seed=st.integers(0, 2**32 - 1), size=st.integers(1, 12))
@settings(max_examples=30)
def test_rotations_find_the_values_of_a_symmetric_matrix(seed: int, size: int) -> None:
    draw = np.random.default_rng(seed)
    half = draw.standard_normal((size, size)) * np.exp(draw.uniform(-6, 6, size))
    matrix = half + half.T
    turned, vectors = matrix.copy(), np.empty((size, size))
    jacobi(turned, vectors)
    reach = np.abs(matrix).max()
    found = np.sort(np.diag(turned))
    np.testing.assert_allclose(found, np.linalg.eigvalsh(matrix), atol=1e-12 * reach, rtol=0)
    np.testing.assert_allclose(vectors @ vectors.T, np.eye(size), atol=1e-12)
    np.testing.assert_allclose(vectors @ turned @ vectors.T, matrix, atol=1e-12 * reach)


def scaled_by(runs: Runs, **factors: float) -> Runs:
    update = {
        name: tuple(factor * x for x in getattr(runs, name)) for name, factor in factors.items()
    }
    return runs.model_copy(update=update)


def test_units_of_counts_change_prefactors_only() -> None:
    runs, first = joint_runs(), fitted("joint", delta=1e-2)
    billions = scaled_by(runs, n_total=1e-9, n_active=1e-9, tokens=1e-9)
    other = fit("joint", billions, delta=1e-2, starts=40)
    assert other.objective == pytest.approx(first.objective, rel=1e-9)
    for name in ("alpha", "beta", "lambda_", "delta", "gamma", "eta"):
        assert getattr(other.law, name) == pytest.approx(getattr(first.law, name), rel=1e-4)
    assert other.law.a == pytest.approx(first.law.a * 1e9**-first.law.alpha, rel=1e-3)  # type: ignore[union-attr]
    assert other.law.b == pytest.approx(first.law.b * 1e9**-first.law.beta, rel=1e-3)


def test_weights_count_runs() -> None:
    runs, first = dense_runs(), fitted("chinchilla")
    heavy = fit("chinchilla", scaled_by(runs, weight=3.0), starts=40)
    assert heavy.objective == pytest.approx(3.0 * first.objective, rel=1e-9)
    assert heavy.law.alpha == pytest.approx(first.law.alpha, rel=1e-7)  # type: ignore[union-attr]
    double = runs.model_copy(update={"weight": (2.0,) * 10 + (1.0,) * (len(runs) - 10)})
    data = runs.model_dump()
    twice = {k: (*v, *v[:10]) for k, v in data.items() if isinstance(v, tuple) and v}
    twice["id"] = (*runs.id, *(f"again {k}" for k in range(10)))
    again = fit("chinchilla", Runs.model_validate({**data, **twice}), starts=20)
    once = fit("chinchilla", double, starts=20)
    assert again.objective == pytest.approx(once.objective, rel=1e-9)
    assert again.law.beta == pytest.approx(once.law.beta, rel=1e-6)
    assert "duplicate" in reasons(again)


def test_the_law_is_one_more_start() -> None:
    runs = dense_runs()
    found = fit(CHINCHILLA_EPOCH, runs, starts=3)
    assert found.starts == 4
    assert found.objective == pytest.approx(fitted("chinchilla").objective, rel=1e-9)


def test_one_far_run_moves_least_squares_more_than_huber() -> None:
    runs = dense_runs()
    spoiled = runs.model_copy(update={"loss": (runs.loss[0] * 1.5, *runs.loss[1:])})
    moved = {}
    for objective in ("huber", "least_squares"):
        clean = fit("chinchilla", runs, objective=objective, starts=20)  # type: ignore[arg-type]
        dirty = fit("chinchilla", spoiled, objective=objective, starts=20)  # type: ignore[arg-type]
        moved[objective] = abs(math.log(dirty.law.beta / clean.law.beta))
        assert "outliers" in reasons(dirty)
        assert "run 0 " in next(w.sentence for w in dirty.warnings if w.reason == "outliers")
    assert moved["least_squares"] > 5.0 * moved["huber"]
