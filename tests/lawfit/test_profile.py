"""Profiles: the statistic, where it crosses its threshold, and ends that the runs do not set."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from lawfit import (
    CHINCHILLA_EPOCH,
    FitResult,
    LawError,
    ProfileCurve,
    fit,
    profile,
    profile_statistic,
)
from lawfit import _descent as descent
from lawfit._refit import at_optimum

from .fit_tables import NOISE, dense_points, dense_runs, fitted, predicted, simulated, table

EXPONENTS = {"alpha": CHINCHILLA_EPOCH.alpha, "beta": CHINCHILLA_EPOCH.beta}


def weighted_fit(rows: int, noise: float, seed: int = 0) -> FitResult:
    """Least squares of runs with weights, the exponents known: linear for a small noise."""
    runs = simulated(CHINCHILLA_EPOCH, dense_points(rows, seed=seed), noise, seed)
    weight = np.exp(np.random.default_rng(seed).uniform(-2.0, 2.0, rows))
    return fit(
        "chinchilla",
        runs.model_copy(update={"weight": tuple(weight.tolist())}),
        objective="least_squares",
        fixed=EXPONENTS,
        starts=4,
    )


def regression(found: FitResult) -> tuple[dict[str, float], int]:
    """Standard errors of log A, B, E of a weighted linear regression, and its freedom."""
    law, runs = found.law, found.train
    terms = {
        "a": law.a * runs.column("n_active") ** -law.alpha,  # type: ignore[union-attr]
        "b": law.b * runs.column("tokens") ** -law.beta,
        "e": np.full(len(runs), law.e),
    }
    slopes = (np.array(list(terms.values())) / sum(terms.values())).T
    weight = runs.column("weight")
    residual = np.log(runs.column("loss")) - np.log(predicted(law, runs))
    variance = (weight * residual**2).sum() / (len(runs) - 3)
    inverse = np.linalg.inv(slopes.T @ (weight[:, None] * slopes))
    errors = np.sqrt(variance * np.diag(inverse))
    return dict(zip(terms, errors.tolist(), strict=True)), len(runs) - 3


def reasons_of(curve: ProfileCurve) -> list[str]:
    return [remark.reason for remark in curve.remarks]


# ---------------------------------------------------------------- what the statistic is


@pytest.mark.parametrize("level", [0.68, 0.95])
def test_the_profile_of_a_linear_problem_is_the_t_interval(level: float) -> None:
    found = weighted_fit(rows=20, noise=1e-5)
    errors, freedom = regression(found)
    threshold = float(stats.t.ppf(0.5 + 0.5 * level, freedom))
    for name, curve in profile(found, level=level).items():
        assert curve.threshold == pytest.approx(threshold, rel=1e-9)
        assert curve.low is not None
        assert curve.high is not None
        reach = threshold * errors[name]
        assert math.log(curve.low / curve.estimate) == pytest.approx(
            -reach, abs=1e-6 + 1e-3 * reach
        )
        assert math.log(curve.high / curve.estimate) == pytest.approx(
            reach, abs=1e-6 + 1e-3 * reach
        )
        line = np.log(np.array(curve.values) / curve.estimate) / errors[name]
        np.testing.assert_allclose(curve.statistic, line, rtol=1e-3, atol=1e-3)
        assert not curve.remarks


@pytest.mark.parametrize("kind", ["chinchilla", "joint"])
def test_curves_pass_the_estimate_rise_and_end_at_the_threshold(kind: str) -> None:
    found = fitted(kind)
    names = ["beta", "alpha", "b"] if kind == "joint" else None
    for name, curve in profile(found, names).items():
        values, statistic = np.array(curve.values), np.array(curve.statistic)
        assert len(values) == 21
        assert (np.diff(values) > 0.0).all()
        assert (np.diff(statistic) > -1e-3).all()
        at = int(np.flatnonzero(values == curve.estimate)[0])
        assert statistic[at] == 0.0
        assert curve.estimate == pytest.approx(found.coefficients[name].value, rel=1e-12)
        assert curve.threshold == pytest.approx(
            stats.t.ppf(0.975, found.n_train - len(found.coefficients)), rel=1e-9
        )
        for end, sign in ((curve.low, -1.0), (curve.high, 1.0)):
            assert end is not None
            assert values[0] < end < values[-1]
            again = profile_statistic(found, name, end)
            assert again == pytest.approx(sign * curve.threshold, abs=1e-3)
        assert not curve.remarks


def test_no_fit_with_the_coefficient_held_is_lower() -> None:
    """From many random starts, with the exponent fixed where the curve has it."""
    found = fitted("chinchilla")
    curve = profile(found, "beta", points=5)["beta"]
    scale = at_optimum(found).deviance_scale()
    for value, t in zip(curve.values, curve.statistic, strict=True):
        held = fit("chinchilla", found.train, fixed={"beta": value}, starts=20)
        rise = 2.0 * (held.objective - found.objective) * scale
        assert math.sqrt(max(rise, 0.0)) == pytest.approx(abs(t), abs=1e-3)


def test_least_squares_is_huber_with_every_run_inside() -> None:
    runs = dense_runs()
    curves = [
        profile(fit("chinchilla", runs, starts=10, **options), "alpha")["alpha"]  # type: ignore[arg-type]
        for options in ({"objective": "least_squares"}, {"delta": 10.0})
    ]
    assert curves[0].low == pytest.approx(curves[1].low, rel=1e-6)
    assert curves[0].high == pytest.approx(curves[1].high, rel=1e-6)


def test_weights_count_as_ratios() -> None:
    found = weighted_fit(rows=20, noise=1e-3)
    more = found.train.model_copy(update={"weight": tuple(9.0 * w for w in found.train.weight)})
    other = fit("chinchilla", more, objective="least_squares", fixed=EXPONENTS, starts=4)
    for name, curve in profile(found).items():
        again = profile(other, name)[name]
        assert again.low == pytest.approx(curve.low, rel=1e-7)
        assert again.high == pytest.approx(curve.high, rel=1e-7)


@pytest.mark.parametrize("shape", ["normal", "heavy"])
def test_the_statistic_of_the_truth_is_a_t_for_huber_too(shape: str) -> None:
    """Half-width far below the noise, so that the objective is nearly one of absolute values."""
    law, found = CHINCHILLA_EPOCH, []
    for seed in range(40):
        runs, draw = dense_runs(noise=0.0), np.random.default_rng(seed)
        noise = draw.standard_normal(120) if shape == "normal" else draw.standard_t(2.5, 120)
        loss = np.array(runs.loss) * np.exp(NOISE * noise)
        noisy = runs.model_copy(update={"loss": tuple(loss.tolist())})
        result = fit(law, noisy, fixed=EXPONENTS, starts=1)
        found += [profile_statistic(result, name, getattr(law, name)) for name in ("a", "b", "e")]
    # 40 sets of three coefficients that go together: the error of their variance is a fifth or so
    assert 0.6 < np.mean(np.square(found)) < 1.6
    assert abs(np.mean(found)) < 0.4


def test_the_unit_of_tokens_does_not_matter() -> None:
    runs = dense_runs()
    billions = runs.model_copy(update={"tokens": tuple(x / 1e9 for x in runs.tokens)})
    curves = [profile(fit("chinchilla", each, starts=20)) for each in (runs, billions)]
    for name in ("a", "e", "alpha", "beta"):
        assert curves[1][name].low == pytest.approx(curves[0][name].low, rel=1e-4)
        assert curves[1][name].high == pytest.approx(curves[0][name].high, rel=1e-4)
    assert curves[1]["b"].high != pytest.approx(curves[0]["b"].high, rel=0.1)


# ---------------------------------------------------------------- ends that the runs do not set


def test_a_constant_that_may_be_zero_has_no_lower_end() -> None:
    found = fitted("joint")
    curve = profile(found, "e")["e"]
    assert curve.low is None
    assert curve.high is not None
    assert reasons_of(curve) == ["open"]
    assert "no lower end for e" in curve.remarks[0].sentence
    assert curve.values[0] < 0.05 * curve.estimate
    # also with no such term at all, the fit is within the threshold
    assert -curve.threshold < profile_statistic(found, "e", 1e-30) < -0.1
    assert -curve.threshold < curve.statistic[0] < 0.9 * profile_statistic(found, "e", 1e-30)
    assert profile_statistic(found, "e", curve.high) == pytest.approx(curve.threshold, abs=1e-3)


def test_a_term_that_vanished_leaves_its_exponent_open() -> None:
    size, _, tokens, split = dense_points()
    flat = np.full(len(size), 1e9)
    draw = np.random.default_rng(0).standard_normal(len(size))
    loss = CHINCHILLA_EPOCH.loss(
        n_total=flat, n_active=flat, tokens=tokens, expert_split=split
    ) * np.exp(NOISE * draw)
    found = fit("chinchilla", table(size, size, tokens, split, np.asarray(loss)), starts=20)
    assert found.coefficients["a"].at_bound == "lower"
    curves = profile(found)
    assert curves["a"].low is None
    assert curves["alpha"].low is None
    beta = curves["beta"]
    assert beta.low is not None
    assert beta.high is not None
    assert beta.low < CHINCHILLA_EPOCH.beta < beta.high
    at = list(curves["alpha"].values)
    assert len(at) == len(set(at))
    # the coefficients of a term that vanished count for nothing in the freedom
    assert beta.threshold == pytest.approx(stats.t.ppf(0.975, found.n_train - 3), rel=1e-9)


def test_a_fit_that_is_no_optimum_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as short:
        short.setattr(descent, "MOST_STEPS", 3)
        short.setattr(descent, "_STEPS_BEFORE", 1)
        found = fit("chinchilla", dense_runs(), starts=2)
    assert not found.converged
    curve = profile(found, "alpha")["alpha"]
    assert "lower_elsewhere" in reasons_of(curve)
    assert "fit again with more starts" in curve.remarks[-1].sentence


def test_fits_along_a_curve_that_do_not_converge_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = fitted("chinchilla")
    monkeypatch.setattr(descent, "MOST_STEPS", 2)
    curve = profile(found, "a")["a"]
    assert "not_converged" in reasons_of(curve)
    assert "values along the profile of a no fit converged" in curve.remarks[0].sentence


# ---------------------------------------------------------------- calls


def test_one_name_points_and_progress() -> None:
    found, seen = fitted("chinchilla"), []
    curves = profile(
        found, ["e", "alpha"], points=8, progress=lambda done, of: seen.append((done, of))
    )
    assert list(curves) == ["e", "alpha"]
    assert seen == [(1, 2), (2, 2)]
    assert [len(curve.values) for curve in curves.values()] == [9, 9]
    one = profile(found, "alpha", points=8)
    assert one == {"alpha": curves["alpha"]}


def test_a_single_free_coefficient_has_a_profile() -> None:
    fixed = {**EXPONENTS, "a": CHINCHILLA_EPOCH.a, "b": CHINCHILLA_EPOCH.b}
    found = fit("chinchilla", dense_runs(), fixed=fixed, starts=3)
    curve = profile(found)["e"]
    assert list(profile(found)) == ["e"]
    assert curve.low is not None
    assert curve.high is not None
    assert curve.low < CHINCHILLA_EPOCH.e < curve.high


def test_illegal_arguments_are_refused_in_a_sentence() -> None:
    found = weighted_fit(rows=20, noise=1e-3)
    calls = [
        (lambda: profile(found, ["beta"]), "the fit held it fixed, so it has no profile"),
        (lambda: profile(found, ["a", "x"]), "name is 'x', but the coefficients are a, e, b"),
        (lambda: profile(found, level=1.5), "level is 1.5, but must lie between 0 and 1"),
        (lambda: profile(found, points=2), "points is 2, but a curve needs at least 3"),
        (lambda: profile_statistic(found, "beta", 0.3), "the fit held it fixed"),
        (lambda: profile_statistic(found, "a", 0.0), "the prefactor a must be above 0"),
        (lambda: profile_statistic(found, "a", math.nan), "the prefactor a must be above 0"),
        (lambda: profile_statistic(fitted("chinchilla"), "alpha", 9.0), "the nearest is 5"),
        (lambda: profile_statistic(fitted("chinchilla"), "alpha", -1.0), "the nearest is 0.001"),
    ]
    for call, sentence in calls:
        with pytest.raises(LawError, match=sentence):
            call()
