"""Fits of laws: the objective and its derivatives, the optimum, and what a fit says of itself."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lawfit import (
    CHINCHILLA_EPOCH,
    MOSAIC_TABLE2,
    AnyLaw,
    ChinchillaLaw,
    FitResult,
    JointLaw,
    LawError,
    Runs,
    fit,
)
from lawfit import _descent as descent
from lawfit._descent import Problem, descend
from lawfit._posynomial import Posynomial, posynomial
from lawfit.fitting import starting_points

from .fit_tables import NOISE, dense_points, dense_runs, joint_runs, paper_points, simulated, table

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
    return Problem(form, logs.loss, weight, delta), form, runs


def near(form: Posynomial, law: AnyLaw, seed: int, reach: float = 0.2) -> np.ndarray:
    draw = np.random.default_rng(seed).uniform(-reach, reach, len(form.names))
    return np.clip(form.point(law.model_dump()) + draw, form.lower, form.upper)


@cache
def fitted(kind: str, seed: int = 0, delta: float = 1e-3) -> FitResult:
    runs = joint_runs(seed=seed) if kind == "joint" else dense_runs(seed=seed)
    return fit(kind, runs, delta=delta, starts=40)


def reasons(result: FitResult) -> list[str]:
    return [remark.reason for remark in result.warnings]


def predicted(law: AnyLaw, runs: Runs) -> np.ndarray:
    names = ("n_total", "n_active", "tokens", "expert_split")
    return law.loss(**{name: runs.column(name) for name in names})


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
    problem = Problem(form, logs.loss, runs.column("weight"), delta)
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
    problem = Problem(form, logs.loss, runs.column("weight"), 1e-3)
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
    monkeypatch.setattr(descent, "_CHUNK", 1)
    for all_, alone in zip(together, descend(problem, points), strict=True):
        np.testing.assert_allclose(all_, alone, rtol=1e-6, atol=1e-7)


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


# ---------------------------------------------------------------- what a fit says of itself


def test_a_fit_cut_short_is_not_converged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descent, "MOST_STEPS", 2)
    monkeypatch.setattr(descent, "_STEPS_BEFORE", 1)
    found = fit("joint", joint_runs(), starts=10)
    assert not found.converged
    assert "not_stationary" in reasons(found)
    assert found.gradient_norm > descent.GRADIENT


def test_one_start_agrees_with_nobody() -> None:
    found = fit("chinchilla", dense_runs(), starts=1)
    assert found.gradient_norm <= descent.GRADIENT
    assert not found.converged
    assert "few_starts_agree" in reasons(found)


def test_a_term_that_is_not_there_is_at_its_bound() -> None:
    law = CHINCHILLA_EPOCH.model_copy(update={"e": 0.0})
    found = fit("chinchilla", simulated(law, dense_points(), 1e-4, 3), starts=40)
    lost = {name for name, c in found.coefficients.items() if c.at_bound == "lower"}
    if not lost:  # the noise may want a little of it
        assert found.law.e < 0.05
    bound = fit("chinchilla", simulated(law, dense_points(), 0.0, 3), starts=40)
    assert bound.law.e < 1e-4
    # where the runs want less than nothing of a constant, it is nothing
    runs = dense_runs(noise=0.0)
    less = tuple(x - 1.9 for x in runs.loss)
    less_runs = runs.where([x > 0.01 for x in less]).model_copy(
        update={"loss": tuple(x for x in less if x > 0.01)}
    )
    found = fit("chinchilla", less_runs, starts=40)
    assert found.coefficients["e"].at_bound == "lower"
    assert "parameter_at_bound" in reasons(found)
    assert found.covariance is None or "log e" not in found.covariance.names


def test_trading_coefficients_are_named() -> None:
    assert "ill_conditioned" in reasons(fitted("joint"))
    found = [w.sentence for w in fitted("joint").warnings if w.reason == "ill_conditioned"]
    named = found[0].split(": ")[1].split(" trade")[0].split(", ")
    assert len(named) >= 2
    assert set(named) <= {"a", "c", "e", "alpha", "lambda_"}  # what does not move with D or G
    assert "ill_conditioned" not in reasons(fitted("chinchilla"))


@pytest.mark.parametrize("ratio", [5.0, 20.0, 200.0])
def test_a_fixed_number_of_tokens_per_parameter_is_said(ratio: float) -> None:
    size, _, tokens, split = dense_points()
    draw = np.random.default_rng(0).normal(0.0, 0.02, len(size))
    runs = simulated(CHINCHILLA_EPOCH, (size, size, ratio * size * np.exp(draw), split), NOISE, 1)
    found = fit("chinchilla", runs, starts=20)
    said = [w.sentence for w in found.warnings if w.reason == "fixed_tokens_per_parameter"]
    assert len(said) == 1
    assert f"{ratio:.3g} per parameter"[:1] in said[0]
    assert "ill_conditioned" in reasons(found)
    assert "fixed_tokens_per_parameter" not in reasons(fitted("chinchilla"))
    assert len(tokens) == len(size)


def test_too_few_levels_are_said() -> None:
    total, active, tokens, split = paper_points()
    two = np.where(split > 2.0, 4.0, 1.0)
    found = fit(
        "joint", simulated(MOSAIC_TABLE2, (total, active, tokens, two), NOISE, 1), starts=20
    )
    said = [w.sentence for w in found.warnings if w.reason == "too_few_levels"]
    assert len(said) == 1
    assert "2 levels" in said[0]
    assert "exponent eta" in said[0]
    assert "too_few_levels" not in reasons(fitted("joint"))


def test_lack_of_fit_is_said_of_the_wrong_form_and_not_of_the_right_one() -> None:
    wrong = fit("chinchilla", joint_runs(), starts=20)
    assert "lack_of_fit" in reasons(wrong)
    said = sum("lack_of_fit" in reasons(fitted("chinchilla", seed)) for seed in range(10))
    assert said <= 1  # at a chance of 0.001 each


def test_losses_that_grow_with_size_lack_fit_at_every_bound() -> None:
    size, _, tokens, split = dense_points()
    grown = 2.0 * (size / 1e9) ** 0.1 * (tokens / 1e10) ** 0.1
    found = fit("chinchilla", table(size, size, tokens, split, grown), starts=20)
    assert {"lack_of_fit", "parameter_at_bound"} <= set(reasons(found))
    assert {c.at_bound for c in found.coefficients.values()} == {None, "lower"}


def test_a_term_fades_to_its_bound_from_every_start() -> None:
    """At one expert split these runs leave the constant nothing, on a nearly flat ridge."""
    total, active, tokens, _ = paper_points()
    points = (total, active, tokens, np.full(len(total), 4.0))
    found = fit("per_split", simulated(MOSAIC_TABLE2, points, NOISE, 1), starts=30)
    assert found.converged
    assert found.starts_agreeing >= 20
    assert found.coefficients["e"].at_bound == "lower"
    assert len(found.ensemble(20, 1)) == 20


@pytest.mark.parametrize("name", ["beta", "eta", "lambda_"])
def test_an_exponent_of_what_never_moves_is_refused(name: str) -> None:
    total, active, tokens, split = paper_points()
    points = {
        "beta": (total, active, np.full(len(total), 1e10), split),
        "eta": (total, active, tokens, np.full(len(total), 4.0)),
        "lambda_": (total, total / 8.0, tokens, split),
    }[name]
    with pytest.raises(LawError, match=f"exponent {name} acts on is the same in all runs"):
        fit("joint", simulated(MOSAIC_TABLE2, points, NOISE, 1))


@pytest.mark.parametrize("kind", ["chinchilla", "joint"])
@given(seed=st.integers(0, 100), size=st.floats(1e-6, 1e-4))
@settings(max_examples=10)
def test_a_small_step_is_the_same_straight_in_parameters_and_in_terms(
    kind: str, seed: int, size: float
) -> None:
    law = MOSAIC_TABLE2 if kind == "joint" else CHINCHILLA_EPOCH
    _, form, _ = problem_of(law, 1e-3)
    point = near(form, law, seed)[None]
    step = size * np.random.default_rng(seed).standard_normal(point.shape)
    bent = form.along_terms(point, step)
    np.testing.assert_allclose(bent, point + step, rtol=0, atol=100.0 * size**2 + 1e-14)


@pytest.mark.parametrize(("noise", "lacks"), [(NOISE, False), (NOISE / 2.0, True)])
def test_a_known_noise_tests_the_fit(noise: float, lacks: bool) -> None:
    found = fit("joint", joint_runs(), objective="least_squares", starts=20, noise=noise)
    assert ("lack_of_fit" in reasons(found)) == lacks


# ---------------------------------------------------------------- held out, dropped, fixed


def test_runs_held_out_play_no_part() -> None:
    runs = joint_runs()
    found = fit("joint", runs, holdout="nact:0.1", starts=20)
    assert found.n_train + found.n_holdout == len(runs) == 150
    assert len(found.held_out) == found.n_holdout
    out = [name in found.held_out for name in runs.id]
    loss = tuple(9.0 if gone else x for gone, x in zip(out, runs.loss, strict=True))
    other = fit("joint", runs.model_copy(update={"loss": loss}), holdout="nact:0.1", starts=20)
    assert other.objective == found.objective
    assert other.coefficients == found.coefficients
    assert "holdout_misses" in reasons(other)
    assert "holdout_misses" not in reasons(found)
    miss = predicted(found.law, runs)[out] - runs.column("loss")[out]
    assert found.rmse_holdout == pytest.approx(math.sqrt(float(np.mean(miss**2))))
    assert found.law.valid_range.n_active is not None
    kept = runs.column("n_active")[~np.array(out)]
    assert found.law.valid_range.n_active == (kept.min(), kept.max())


def test_dropped_runs_are_stated() -> None:
    runs = dense_runs()
    found = fit("chinchilla", runs, outliers="highest:5", starts=5)
    worst = [runs.id[k] for k in np.argsort(-runs.column("loss"))[:5]]
    assert found.n_train == len(runs) - 5
    assert all(name in found.outlier_rule for name in worst)
    by_name = fit("chinchilla", runs, outliers=worst, starts=5)
    assert by_name.coefficients == found.coefficients


@pytest.mark.parametrize(
    "held", [{"alpha": 0.5}, {"e": 0.0}, {"e": 1.7, "beta": 0.3}, {"b": 900.0}]
)
def test_fixed_coefficients_stay(held: dict[str, float]) -> None:
    runs = dense_runs()
    found = fit("chinchilla", runs, fixed=held, starts=20)
    assert found.converged
    assert {name for name, c in found.coefficients.items() if c.fixed} == set(held)
    for name, value in held.items():
        assert getattr(found.law, name) == pytest.approx(value, rel=1e-12)
    assert found.objective >= fitted("chinchilla").objective
    best = fitted("chinchilla").law
    there = fit("chinchilla", runs, fixed={"alpha": best.alpha, "b": best.b}, starts=20)  # type: ignore[union-attr]
    assert there.objective == pytest.approx(fitted("chinchilla").objective, rel=1e-9)


# ---------------------------------------------------------------- the result


@pytest.mark.parametrize("kind", ["chinchilla", "joint"])
def test_it_round_trips_and_is_frozen(kind: str) -> None:
    found = fitted(kind)
    assert FitResult.model_validate_json(found.model_dump_json()) == found
    with pytest.raises(ValueError, match="frozen"):
        found.converged = False  # type: ignore[misc]
    assert found.law.source.startswith("fit of ")


def test_the_joint_law_is_recovered_from_the_design_of_the_paper() -> None:
    for seed in range(3):
        found = fitted("joint", seed, 1e-2)
        assert found.converged
        assert found.rmse_train == pytest.approx(NOISE * 2.1, rel=0.3)
        assert found.covariance is not None
        for name in ("beta", "eta", "delta", "alpha", "gamma"):
            off = getattr(found.law, name) - getattr(MOSAIC_TABLE2, name)
            assert abs(off) <= 4.0 * found.covariance.std_error(name)
        truth = predicted(MOSAIC_TABLE2, joint_runs())
        off_loss = np.log(predicted(found.law, joint_runs()) / truth)
        assert float(np.sqrt(np.mean(off_loss**2))) < NOISE / 2.0


def test_standard_errors_are_those_of_other_runs() -> None:
    for objective in ("huber", "least_squares"):
        errors, values = [], []
        for seed in range(60):
            runs = dense_runs(seed=seed)
            found = fit("chinchilla", runs, objective=objective, starts=2, rng=seed)  # type: ignore[arg-type]
            assert found.covariance is not None
            errors.append([found.covariance.std_error(n) for n in ("alpha", "beta", "log e")])
            law = found.law
            values.append([law.alpha, law.beta, math.log(law.e)])  # type: ignore[union-attr]
        spread = np.std(values, axis=0, ddof=1)
        np.testing.assert_allclose(np.median(errors, axis=0), spread, rtol=0.35)
        truth = [CHINCHILLA_EPOCH.alpha, CHINCHILLA_EPOCH.beta, math.log(CHINCHILLA_EPOCH.e)]
        inside = np.abs(np.array(values) - truth) <= 1.96 * np.array(errors)
        assert (inside.mean(axis=0) >= 0.85).all()


@pytest.mark.parametrize("kind", ["chinchilla", "joint"])
def test_draws_spread_as_the_covariance_says(kind: str) -> None:
    found = fitted(kind, delta=1e-2)
    assert found.covariance is not None
    draws = found.ensemble(600, 3)
    assert draws == found.ensemble(600, 3)
    assert draws.basis == "FITTED"
    assert len(draws) == 600
    runs = joint_runs() if kind == "joint" else dense_runs()
    names = ("n_total", "n_active", "tokens", "expert_split")
    loss = draws.loss(**{name: runs.column(name) for name in names})
    logs = runs.logs()
    form = posynomial(found.law, logs.variables, logs.loss)
    point = form.point({name: c.value for name, c in found.coefficients.items()})
    slopes = form.slopes(point[None])[1][0] @ np.linalg.inv(form.raw_map())
    at = [
        found.covariance.names.index(n if n in found.covariance.names else f"log {n}")
        for n in form.names
    ]
    covariance = np.array(found.covariance.matrix)[np.ix_(at, at)]
    expected = np.sqrt(np.einsum("rp,pq,rq->r", slopes, covariance, slopes))
    ratio = np.log(loss).std(axis=0) / expected
    assert 0.8 < np.median(ratio) < 1.25
    assert (ratio < 2.0).all()


def test_draws_leave_bound_and_fixed_coefficients_alone() -> None:
    found = fit("chinchilla", dense_runs(), fixed={"alpha": 0.35}, starts=20)
    draws = found.ensemble(50, 1)
    assert set(draws.coefficients("alpha").tolist()) == {0.35}
    assert draws.coefficients("beta").std() > 0.0
    assert (draws.coefficients("e") > 0.0).all()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"law": "kaplan"}, "'kaplan', but must be one of joint, per_split, chinchilla"),
        ({"delta": 0.0}, "delta is 0"),
        ({"objective": "mean"}, "'huber' or 'least_squares'"),
        ({"starts": 0}, "must be at least 1"),
        ({"starts": []}, "starts is empty"),
        (
            {"law": "joint", "runs": joint_runs(), "starts": [MOSAIC_TABLE2.at_split(1.0)]},
            "another kind",
        ),
        ({"noise": -1.0}, "noise is -1"),
        ({"outliers": "lowest:3"}, "'highest:'"),
        ({"outliers": ["nobody"]}, "'nobody'"),
        ({"holdout": "nact"}, "holdout is 'nact'"),
        ({"fixed": {"q": 1.0}}, "'q', but the parameters are"),
        ({"fixed": {"alpha": -1.0}}, "alpha at -1"),
        ({"law": MOSAIC_TABLE2.at_split(4.0)}, "holds at 4 only"),
    ],
)
def test_bad_input_is_one_sentence(arguments: dict[str, object], words: str) -> None:
    call = {"law": "chinchilla", "runs": dense_runs(), **arguments}
    with pytest.raises(LawError, match=words):
        fit(**call)  # type: ignore[arg-type]


def test_a_law_of_one_split_needs_runs_of_one_and_a_law_needs_runs() -> None:
    with pytest.raises(LawError, match=r"\d expert splits"):
        fit("per_split", joint_runs())
    with pytest.raises(LawError, match="4 runs are left for 5 coefficients"):
        fit("chinchilla", dense_runs().where([k < 4 for k in range(120)]))
    few = fit("chinchilla", dense_runs().where([k < 9 for k in range(120)]), starts=10)
    assert "too_few_runs" in reasons(few)
