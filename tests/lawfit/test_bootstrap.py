"""Refits of runs that might have been: what they are, what is left out, intervals, bands, draws."""

from __future__ import annotations

import math
import os
import threading
from typing import Any

import numpy as np
import pytest
from scipy import stats

from lawfit import (
    CHINCHILLA_EPOCH,
    Bootstrap,
    FitResult,
    LawError,
    Runs,
    bootstrap,
    fit,
)
from lawfit import _descent as descent
from lawfit._descent import Problem
from lawfit._intervals import bca_tails
from lawfit._refit import at_optimum
from lawfit.resampling import GROUPS, all_but_a_group

from .fit_tables import (
    NOISE,
    dense_points,
    dense_runs,
    fitted,
    joint_runs,
    predicted,
    simulated,
    table,
)

EXPONENTS = {"alpha": CHINCHILLA_EPOCH.alpha, "beta": CHINCHILLA_EPOCH.beta}
PREFACTORS = ("a", "b", "e")


def linear_fit(rows: int, noise: float, seed: int = 0) -> FitResult:
    """A dense law with known exponents, whose log L is linear in log A, B, E for a small noise."""
    runs = simulated(CHINCHILLA_EPOCH, dense_points(rows, seed=seed), noise, seed)
    weight = np.random.default_rng(seed).uniform(0.3, 3.0, rows)
    return fit(
        "chinchilla",
        runs.model_copy(update={"weight": tuple(weight.tolist())}),
        objective="least_squares",
        fixed=EXPONENTS,
        starts=4,
    )


def shares(found: FitResult) -> np.ndarray:
    """Derivatives of log L in log A, B, E, shape (runs, 3)."""
    law, runs = found.law, found.train
    terms = [
        law.a * runs.column("n_active") ** -law.alpha,  # type: ignore[union-attr]
        law.b * runs.column("tokens") ** -law.beta,
        np.full(len(runs), law.e),
    ]
    return (np.array(terms) / sum(terms)).T


def sandwich(found: FitResult, power: int) -> np.ndarray:
    """Covariance of a weighted linear regression, HC0, HC2 or HC3 by the power of 1 - leverage."""
    weight, slopes = found.train.column("weight"), shares(found)
    residual = np.log(found.train.column("loss")) - np.log(predicted(found.law, found.train))
    bread = np.linalg.inv(slopes.T @ (weight[:, None] * slopes))
    leverage = weight * np.einsum("ri,ij,rj->r", slopes, bread, slopes)
    middle = slopes.T @ ((weight**2 * residual**2 / (1.0 - leverage) ** power)[:, None] * slopes)
    return bread @ middle @ bread


def log_prefactors(refits: Bootstrap) -> np.ndarray:
    return np.log([refits.coefficients(name) for name in PREFACTORS])


def exponent_off(size: float, runs: Runs) -> Runs:
    """Losses that do not depend on parameters, so that the term in them vanishes."""
    law, tokens = CHINCHILLA_EPOCH, runs.column("tokens")
    flat = np.full(len(runs), 1e9)
    loss = law.loss(n_total=flat, n_active=flat, tokens=tokens, expert_split=1.0)
    loss = loss * np.exp(size * np.random.default_rng(2).standard_normal(len(runs)))
    return table(runs.column("n_total"), runs.column("n_active"), tokens, np.ones(1), loss)


# ---------------------------------------------------------------- against linear regression


def test_wild_refits_of_a_linear_problem_have_the_covariance_of_hc3() -> None:
    found = linear_fit(rows=12, noise=1e-4)  # few runs, so that leverage counts for a quarter
    draws = 3000
    drawn = np.cov(log_prefactors(bootstrap(found, draws=draws)))
    size = np.sqrt(np.diag(sandwich(found, 2)))
    off = [np.abs(drawn - sandwich(found, power)) / np.outer(size, size) for power in (0, 1, 2)]
    assert off[2].max() < 4.0 * math.sqrt(2.0 / draws) < 0.15 < off[1].max() < off[0].max()


def test_pairs_refits_of_a_linear_problem_have_a_sandwich_covariance() -> None:
    found = linear_fit(rows=200, noise=1e-4)
    draws = 1000
    drawn = np.cov(log_prefactors(bootstrap(found, kind="pairs", draws=draws)))
    expected = sandwich(found, 1)
    size = np.sqrt(np.diag(expected))
    # pairs and HC2 differ by terms of the order of parameters over runs
    assert (np.abs(drawn - expected) / np.outer(size, size)).max() < 4.0 * math.sqrt(
        2.0 / draws
    ) + (3.0 * 3 / 200)


def test_residuals_of_the_size_of_the_noise_are() -> None:
    """Over many sets of few runs: their variance is that of the noise, and not smaller."""
    squares = []
    for seed in range(60):
        at = at_optimum(linear_fit(rows=9, noise=1e-4, seed=seed))
        squares.append((at.noise_residuals() ** 2).mean())
    error = np.std(squares) / math.sqrt(len(squares))
    assert abs(np.mean(squares) - 1e-8) < 4.0 * error < 0.4e-8


def test_leverages_are_those_of_the_hat_matrix() -> None:
    at = at_optimum(fitted("joint"))
    columns = at.slopes[:, at.free] * np.sqrt(at.problem.weight[0])[:, None]
    hat = columns @ np.linalg.pinv(columns, rcond=1e-14)
    np.testing.assert_allclose(at.leverage(), np.minimum(np.diag(hat), 0.99), atol=1e-5)
    assert at.leverage().sum() == pytest.approx(at.free.sum(), abs=0.1)


@pytest.mark.parametrize("kind", ["wild", "pairs"])
def test_runs_without_noise_leave_no_spread(kind: Any) -> None:
    found = fit("chinchilla", dense_runs(noise=0.0), objective="least_squares", starts=10)
    refits = bootstrap(found, kind=kind, draws=30)
    assert refits.not_converged == 0
    for name in refits.names:
        values = refits.coefficients(name)
        np.testing.assert_allclose(values, getattr(found.law, name), rtol=1e-5)


# ---------------------------------------------------------------- what a refit is


def test_every_refit_is_an_optimum_of_its_own_runs() -> None:
    """Fitted again as a table of its own, from random starts too, it comes out the same."""
    found = fitted("chinchilla")
    refits = bootstrap(found, draws=20, seed=4)
    assert refits.not_converged == 0
    assert refits.gradient_largest <= descent.GRADIENT
    at = at_optimum(found)
    sign = 2.0 * np.random.default_rng(4).integers(0, 2, (20, len(at.residual))) - 1.0
    target = at.log_loss + sign * at.wild_residuals()
    for k in range(20):
        again = fit(
            found.law,
            found.train.model_copy(update={"loss": tuple(np.exp(target[k]).tolist())}),
            starts=5,
            rng=k,
        )
        for name in refits.names:
            assert refits.coefficients(name)[k] == pytest.approx(
                again.coefficients[name].value, rel=1e-4
            )


def test_the_same_seed_gives_the_same_refits_however_many_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = fitted("joint")
    first = bootstrap(found, draws=24, seed=3)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(descent, "_BATCH", 5)
    assert bootstrap(found, draws=24, seed=3) == first
    assert bootstrap(found, draws=30, seed=3).values[:24] == first.values
    assert bootstrap(found, draws=24, seed=5).values != first.values


def test_the_unit_of_tokens_changes_the_prefactor_of_their_term_only() -> None:
    runs = dense_runs()
    found = fit("chinchilla", runs, starts=20)
    billions = runs.model_copy(update={"tokens": tuple(x / 1e9 for x in runs.tokens)})
    other = fit("chinchilla", billions, starts=20)
    for kind in ("wild", "pairs"):
        first, second = (bootstrap(each, kind=kind, draws=40) for each in (found, other))
        for name in ("a", "e", "alpha", "beta"):
            ends = [each.interval(name, method="bca") for each in (first, second)]
            assert ends[1].low == pytest.approx(ends[0].low, rel=1e-5)
            assert ends[1].high == pytest.approx(ends[0].high, rel=1e-5)
        moved = first.coefficients("b") * 1e9 ** -first.coefficients("beta")
        np.testing.assert_allclose(second.coefficients("b"), moved, rtol=1e-5)


def test_refits_that_do_not_converge_are_counted_and_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = fitted("joint")
    whole = bootstrap(found, draws=60)
    assert whole.not_converged == 0
    monkeypatch.setattr(descent, "MOST_STEPS", 14)
    monkeypatch.setattr(descent, "_STEPS_BEFORE", 1)
    cut = bootstrap(found, draws=60)
    assert 20 <= len(cut) < 60
    assert len(cut) + cut.not_converged == 60
    assert len(cut.at_bound) == len(cut.vanished) == len(cut)
    assert cut.gradient_largest > descent.GRADIENT
    off = np.log(np.array(cut.values)[:, None] / np.array(whole.values))
    beta = np.abs(off[..., cut.names.index("beta")]).min(axis=1)
    assert beta.max() < 1e-4  # each that counts is one of the converged
    interval = cut.interval("eta")
    assert f"{cut.not_converged} of 60 refits did not converge" in interval.remarks[0].sentence
    assert "refits_lost" in [remark.reason for remark in interval.remarks]
    monkeypatch.setattr(descent, "MOST_STEPS", 2)
    with pytest.raises(LawError, match=r"of 60 refits converged, too few to draw 60 laws.*laplace"):
        found.ensemble(60, 0, method="wild")
    few = bootstrap(found, draws=60)
    with pytest.raises(LawError, match=f"{len(few)} of 60 refits count, but an interval needs"):
        few.interval("eta")
    with pytest.raises(LawError, match="of 60 refits count"):
        few.band(n_total=1e9, n_active=1e9, tokens=1e10)


def test_a_fit_at_a_bound_is_refitted_as_one() -> None:
    """Its place survives the way through the units of the law, which rounds."""
    found = fit("chinchilla", exponent_off(NOISE, dense_runs()), starts=20)
    assert found.coefficients["a"].at_bound == "lower"
    at = at_optimum(found)
    assert {n for n, free in zip(at.form.names, at.free, strict=True) if not free} == {"a", "alpha"}
    assert at.freedom == found.n_train - 3
    refits = bootstrap(found, draws=60)
    on = np.array(refits.at_bound)[:, refits.names.index("a")]
    assert 0 < on.sum() <= 60
    for name, reason in (("a", "boundary"), ("alpha", "vanished")):
        remark = next(r for r in refits.interval(name).remarks if r.reason == reason)
        assert f"of {len(refits)} refits" in remark.sentence
    assert not refits.interval("beta").remarks
    free = refits.coefficients("a")[~on]
    assert free.size == 0 or free.min() > found.law.a  # type: ignore[union-attr]


def test_a_constant_that_may_be_zero_says_so() -> None:
    found = fitted("joint")
    refits = bootstrap(found, draws=100)
    at = np.array(refits.at_bound)[:, refits.names.index("e")]
    assert 0 < at.sum() < 100
    interval = refits.interval("e")
    assert f"bound of the fit in {at.sum()} of 100" in interval.remarks[0].sentence
    assert interval.low < 1e-6
    assert found.coefficients["e"].value < interval.high


# ---------------------------------------------------------------- intervals


def test_percentiles_are_quantiles_of_the_refits() -> None:
    refits = bootstrap(fitted("chinchilla"), draws=50)
    for name in refits.names:
        for level in (0.5, 0.9):
            interval = refits.interval(name, level=level)
            expected = np.quantile(refits.coefficients(name), [(1 - level) / 2, (1 + level) / 2])
            assert [interval.low, interval.high] == pytest.approx(list(expected), rel=1e-12)
            assert (interval.method, interval.level, interval.remarks) == ("percentile", level, ())


@pytest.mark.parametrize("level", [0.8, 0.95])
def test_shares_of_bca_are_those_of_scipy(level: float) -> None:
    sample = np.random.default_rng(0).exponential(size=25)
    found = stats.bootstrap(
        (sample,), np.var, n_resamples=2000, confidence_level=level, rng=np.random.default_rng(1)
    )
    without = np.array([np.var(np.delete(sample, k)) for k in range(25)])
    cut = bca_tails(found.bootstrap_distribution, float(np.var(sample)), without, level)
    assert cut is not None
    low, high = np.quantile(found.bootstrap_distribution, cut)
    assert low == pytest.approx(found.confidence_interval.low, rel=1e-9)
    assert high == pytest.approx(found.confidence_interval.high, rel=1e-9)


@pytest.mark.parametrize("name", ["a", "beta"])
def test_bca_moves_the_percentiles_by_bias_and_acceleration(name: str) -> None:
    found = fit("chinchilla", dense_runs(rows=30), starts=20)
    refits = bootstrap(found, draws=400)
    values, estimate = refits.coefficients(name), found.coefficients[name].value
    at = refits.names.index(name)
    without = np.array([row[at] for row in refits.jackknife])
    without = np.log(without) if name == "a" else without
    bias = stats.norm.ppf(stats.percentileofscore(values, estimate, "mean") / 100.0)
    off = without.mean() - without
    acceleration = (off**3).sum() / (6.0 * (off**2).sum() ** 1.5)
    z = bias + stats.norm.ppf([0.025, 0.975])
    shares = stats.norm.cdf(bias + z / (1.0 - acceleration * z))
    interval = refits.interval(name, method="bca")
    expected = np.quantile(values, shares)
    assert [interval.low, interval.high] == pytest.approx(list(expected), rel=1e-9)
    assert interval.method == "bca"
    plain = refits.interval(name)
    assert abs(interval.low / plain.low - 1.0) > 1e-6


def test_the_jackknife_leaves_out_each_run_in_turn() -> None:
    found = fit("chinchilla", dense_runs(rows=15), starts=20)
    refits = bootstrap(found, draws=1)
    assert len(refits.jackknife) == 15
    assert refits.jackknife_not_converged == 0
    for k in (0, 7, 14):
        rest = found.train.where(np.arange(15) != k)
        again = fit("chinchilla", rest, starts=20)
        for name, value in zip(refits.names, refits.jackknife[k], strict=True):
            assert value == pytest.approx(again.coefficients[name].value, rel=1e-4)


def test_of_many_runs_the_jackknife_leaves_out_groups() -> None:
    assert (all_but_a_group(500, 0) == 1.0 - np.eye(500)).all()
    flags = all_but_a_group(1203, 1)
    assert flags.shape == (GROUPS, 1203)
    assert set((flags == 0.0).sum(axis=0)) == {1}
    assert set((flags == 0.0).sum(axis=1)) == {2, 3}
    assert (flags != all_but_a_group(1203, 2)).any()


def test_the_acceleration_of_groups_is_that_of_runs() -> None:
    """Of a mean it is the skewness over 6 sqrt(n), here that of draws from an exponential."""
    values = np.random.default_rng(0).standard_exponential(2000)
    found = []
    for seed in range(40):
        flags = all_but_a_group(2000, seed)
        pull = values.mean() - flags @ values / flags.sum(axis=1)
        found.append((pull**3).sum() / (6.0 * (pull**2).sum() ** 1.5))
    expected = stats.skew(values) / (6.0 * math.sqrt(2000))
    error = np.std(found) / math.sqrt(len(found))
    assert abs(np.mean(found) - expected) < 4.0 * error
    assert error < 0.05 * expected


def test_bca_that_does_not_exist_is_refused_in_words() -> None:
    refits = bootstrap(fitted("chinchilla"), draws=40)
    plain = refits.interval("beta")
    at = refits.names.index("beta")
    one = tuple((*row[:at], refits.estimate[at] + 1.0, *row[at + 1 :]) for row in refits.values)
    for spoiled in (
        refits.model_copy(update={"jackknife": refits.jackknife[:1] * 120}),
        refits.model_copy(update={"jackknife_not_converged": 1}),
        refits.model_copy(update={"values": one}),
    ):
        interval = spoiled.interval("beta", method="bca")
        assert interval.method == "percentile"
        assert "no_bca" in [remark.reason for remark in interval.remarks]
    assert refits.interval("beta", method="bca").method == "bca"
    assert plain.method == "percentile"


def test_an_interval_says_what_speaks_against_it() -> None:
    refits = bootstrap(fitted("chinchilla"), draws=30)
    assert [r.reason for r in refits.interval("beta").remarks] == ["few_refits"]
    assert not refits.interval("beta", level=0.9).remarks
    doubtful = refits.fit.model_copy(update={"converged": False})
    other = refits.model_copy(update={"fit": doubtful})
    assert [r.reason for r in other.interval("beta", level=0.9).remarks] == ["fit_not_converged"]


# ---------------------------------------------------------------- bands


def held_back(seed: int, rows: int = 400) -> dict[str, Any]:
    size, _, tokens, _ = dense_points(rows, seed=seed)
    return {"n_total": size, "n_active": size, "tokens": tokens}


def test_bands_hold_the_law_and_bands_of_runs_hold_runs() -> None:
    refits = bootstrap(fitted("chinchilla"), draws=300)
    points = held_back(seed=9)
    truth = np.asarray(CHINCHILLA_EPOCH.loss(**points, expert_split=1.0))
    low, high = refits.band(**points)
    wide_low, wide_high = refits.band(**points, of="run")
    assert np.mean((low <= truth) & (truth <= high)) > 0.8  # of points that share one fit
    assert ((wide_low < low) & (high < wide_high)).all()
    measured = truth * np.exp(NOISE * np.random.default_rng(8).standard_normal(len(truth)))
    assert 0.9 < np.mean((wide_low <= measured) & (measured <= wide_high)) < 0.99
    np.testing.assert_array_equal(low, refits.band(**points)[0])
    np.testing.assert_array_equal(wide_low, refits.band(**points, of="run")[0])
    narrow = refits.band(**points, level=0.5)
    assert (low < narrow[0]).all()
    one = refits.band(n_total=1e9, n_active=1e9, tokens=2e10)
    assert np.shape(one[0]) == ()


def test_a_band_of_runs_is_for_a_run_of_weight_one() -> None:
    """Runs of weight 4 have half the noise of the run that the band is for."""
    found, points = linear_fit(rows=60, noise=1e-3), held_back(seed=1, rows=5)
    heavy = found.train.model_copy(update={"weight": tuple(4.0 * w for w in found.train.weight)})
    four = fit("chinchilla", heavy, objective="least_squares", fixed=EXPONENTS, starts=4)
    width = {}
    for key, each in (("one", found), ("four", four)):
        refits = bootstrap(each, draws=200)
        low, high = refits.band(**points, of="run")
        width[key] = high - low
        width[f"mean {key}"] = np.subtract(*refits.band(**points)[::-1])
    np.testing.assert_allclose(width["mean four"], width["mean one"], rtol=1e-5)
    np.testing.assert_allclose(width["four"] / width["one"], 2.0, atol=0.25)


# ---------------------------------------------------------------- draws


@pytest.mark.parametrize("method", ["wild", "pairs"])
def test_draws_of_refits_are_refits(method: Any) -> None:
    found = fitted("chinchilla")
    draws = found.ensemble(25, 6, method=method)
    assert draws == bootstrap(found, kind=method, draws=25, seed=6).ensemble()
    assert len(draws) == 25
    assert draws.basis == "FITTED"
    assert method in draws.method
    assert draws == found.ensemble(25, 6, method=method)


def test_draws_of_refits_spread_as_those_of_laplace_where_the_law_is_well_known() -> None:
    found = fit("chinchilla", dense_runs(noise=5e-4), delta=0.1, starts=20)
    for name in ("e", "alpha", "beta"):
        laplace = found.ensemble(800, 1).coefficients(name)
        for method in ("wild", "pairs"):
            refits = found.ensemble(400, 1, method=method).coefficients(name)  # type: ignore[arg-type]
            assert refits.std() == pytest.approx(laplace.std(), rel=0.2)
            assert abs(refits.mean() - laplace.mean()) < 0.3 * laplace.std()


def test_draws_that_do_not_converge_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    found = fitted("joint")
    monkeypatch.setattr(descent, "MOST_STEPS", 14)
    monkeypatch.setattr(descent, "_STEPS_BEFORE", 1)
    short = bootstrap(found, draws=40)
    assert 20 <= len(short) < 40
    draws = found.ensemble(40, 0, method="wild")
    assert len(draws) == 40
    assert draws.laws[: len(short)] == short.ensemble().laws


# ---------------------------------------------------------------- progress, interrupts, refusals


def test_progress_tells_how_many_have_ended() -> None:
    seen: list[tuple[int, int]] = []
    bootstrap(fitted("chinchilla"), draws=20, progress=lambda done, of: seen.append((done, of)))
    assert seen == [(8, 20), (16, 20), (20, 20)]


def test_an_interrupt_ends_every_thread() -> None:
    def stop(done: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bootstrap(fitted("joint"), draws=400, progress=stop)
    assert not [t for t in threading.enumerate() if t.name.startswith("lawfit")]


def test_illegal_arguments_are_refused_in_a_sentence() -> None:
    found = fitted("chinchilla")
    refits = bootstrap(linear_fit(rows=30, noise=1e-3), draws=20)
    calls = [
        (
            lambda: bootstrap(found, draws=0),
            "draws is 0, but must be 1 to 100000; the nearest is 1",
        ),
        (lambda: bootstrap(found, kind="x"), "kind is 'x', but must be 'wild' or 'pairs'"),  # type: ignore[arg-type]
        (lambda: bootstrap(found, mode="x"), "mode is 'x', but must be 'converged' or 'paper'"),  # type: ignore[arg-type]
        (lambda: found.ensemble(5, 0, method="x"), "method is 'x', but must be 'laplace'"),  # type: ignore[arg-type]
        (lambda: found.ensemble(0, 0, method="wild"), "draws is 0, but must be 1 to 100000"),
        (lambda: refits.interval("x"), "name is 'x', but the coefficients are a, e, b"),
        (lambda: refits.coefficients("x"), "name is 'x'"),
        (lambda: refits.interval("beta"), "the fit held it fixed, so it has no interval"),
        (lambda: refits.interval("a", level=1.0), "level is 1, but must lie between 0 and 1"),
        (lambda: refits.interval("a", method="x"), "method is 'x', but must be 'percentile'"),  # type: ignore[arg-type]
        (lambda: refits.band(n_total=1e9, n_active=1e9, tokens=1e9, of="x"), "of is 'x'"),  # type: ignore[arg-type]
        (lambda: refits.band(n_total=1e9, n_active=1e9, tokens=1e9, level=0), "level is 0"),
    ]
    for call, sentence in calls:
        with pytest.raises(LawError, match=sentence):
            call()


def test_as_many_runs_as_coefficients_leave_nothing_to_resample() -> None:
    found = fit("chinchilla", dense_runs(rows=5), starts=40)
    with pytest.raises(LawError, match="5 runs leave nothing to resample"):
        bootstrap(found)


def test_a_problem_is_the_fit_again() -> None:
    found = fit("joint", joint_runs(), holdout="nact:0.1", delta=1e-2, starts=20)
    at = at_optimum(found)
    assert isinstance(at.problem, Problem)
    assert at.problem.value(at.point[None])[0] == pytest.approx(found.objective, rel=1e-10)
    assert len(at.residual) == found.n_train < 150
    ends = descent.stationarity(at.problem, at.point[None])
    assert ends.converged.all()
    np.testing.assert_array_equal(ends.points[0], at.point)
    off = descent.stationarity(at.problem, at.point[None] * 1.001)
    assert not off.converged.any()
    assert off.value[0] > found.objective
