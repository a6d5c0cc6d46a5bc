"""The scan of the ridge: which coefficients runs determine."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from lawfit import CHINCHILLA_EPOCH, FitResult, LawError, RidgeScan, fit, profile, ridge_scan
from lawfit import _descent as descent
from lawfit._refit import at_optimum
from lawfit.identify import HALF_WIDTH, SPREAD, WITHIN

from .fit_tables import dense_points, fitted, joint_runs, simulated

RIDGE = {"a", "c", "j", "e", "lambda_"}


@pytest.fixture(scope="module")
def joint() -> list[tuple[FitResult, RidgeScan]]:
    """Sets of runs with the paper's design, fitted as there: Huber's function at 0.1."""
    found = [
        fit("joint", joint_runs(seed=seed), delta=0.1, holdout="nact:0.1", starts=20)
        for seed in range(4)
    ]
    return [(each, ridge_scan(each, starts=60)) for each in found]


def test_of_the_joint_law_beta_and_eta_are_identified_and_the_ridge_is_not(
    joint: list[tuple[FitResult, RidgeScan]],
) -> None:
    """As a study of the paper's design found: eta and beta, with delta nearly as tight."""
    names = [set(scan.identified) for _, scan in joint]
    for name in ("beta", "eta"):
        assert sum(name in each for each in names) >= 3
    for each in names:
        assert not each & RIDGE


def extent(found: FitResult, name: str) -> float:
    """How far the coefficient moves at an objective within reach, along its profile, relative."""
    scale = at_optimum(found).deviance_scale()
    t = math.sqrt(2.0 * WITHIN * found.objective * scale)
    level = 1.0 - 2.0 * float(stats.t.sf(t, at_optimum(found).freedom))
    curve = profile(found, name, level=level, points=3)[name]
    low, high = curve.low or 0.0, curve.high
    assert high is not None
    return (high - low) / abs(found.coefficients[name].value)


@pytest.mark.parametrize("delta", [1e-3, pytest.param(0.1, marks=pytest.mark.slow)])
def test_restarts_enter_most_of_the_region_along_the_ridge_and_nothing_outside(
    delta: float,
) -> None:
    found = fit("joint", joint_runs(seed=2), delta=delta, starts=20)
    rows = {row.name: row for row in ridge_scan(found, starts=80).rows}
    for name in ("alpha", "c", "lambda_"):
        reach = extent(found, name)
        assert 0.4 * reach < rows[name].spread < 1.05 * reach
    assert rows["eta"].spread < 1.05 * extent(found, "eta")


def test_all_is_identified_where_runs_are_many_and_clean() -> None:
    # few decades of extrapolation to the prefactors, and hardly any noise
    runs = simulated(CHINCHILLA_EPOCH, dense_points(), 3e-4, 0)
    scan = ridge_scan(fit("chinchilla", runs, delta=0.1, starts=20), starts=60)
    assert set(scan.identified) == {"a", "b", "e", "alpha", "beta"}
    assert scan.within == 60
    for row in scan.rows:
        assert row.spread < 0.1
        assert row.half_width is not None
        assert row.half_width < 0.1


def test_the_rule_is_the_one_in_words(joint: list[tuple[FitResult, RidgeScan]]) -> None:
    for found, scan in joint:
        assert f"within {WITHIN:.0%}" in scan.rule
        assert f"at most {SPREAD:.0%}" in scan.rule
        assert f"at most {HALF_WIDTH:.0%}" in scan.rule
        for row in scan.rows:
            coefficient = found.coefficients[row.name]
            width = row.half_width
            assert row.value == coefficient.value
            expected = row.spread <= SPREAD and width is not None and width <= HALF_WIDTH
            assert row.identified == (expected and coefficient.at_bound is None)
            if width is not None and found.covariance is not None:
                log = f"log {row.name}"
                if log in found.covariance.names:
                    error = found.covariance.std_error(log)
                else:
                    error = found.covariance.std_error(row.name) / abs(row.value)
                assert width == pytest.approx(1.96 * error, rel=1e-4)


def test_a_coefficient_at_a_bound_is_not_identified() -> None:
    found = next(
        each
        for each in (
            fit("joint", joint_runs(noise=0.01, seed=seed), starts=20) for seed in range(12)
        )
        if each.coefficients["e"].at_bound
    )
    row = next(row for row in ridge_scan(found, starts=40).rows if row.name == "e")
    assert row.half_width is None
    assert not row.identified


def test_fixed_coefficients_have_no_row_and_the_seed_decides() -> None:
    fixed = {"alpha": CHINCHILLA_EPOCH.alpha}
    found = fit("chinchilla", fitted("chinchilla").train, fixed=fixed, starts=10)
    seen: list[tuple[int, int]] = []
    scan = ridge_scan(found, starts=30, progress=lambda done, of: seen.append((done, of)))
    assert [row.name for row in scan.rows] == ["a", "e", "b", "beta"]
    assert seen[-1] == (30, 30)
    assert scan == ridge_scan(found, starts=30)
    assert scan.rows != ridge_scan(found, starts=30, seed=1).rows
    assert (scan.starts, scan.seed, scan.basis) == (30, 0, "FITTED")


def test_too_few_restarts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LawError, match="starts is 1, but a scan needs at least 2"):
        ridge_scan(fitted("joint"), starts=1)
    monkeypatch.setattr(descent, "MOST_STEPS", 1)
    with pytest.raises(LawError, match="0 of 5 restarts came within 1% of the objective"):
        ridge_scan(fitted("joint"), starts=5)


def test_runs_without_noise_leave_no_spread() -> None:
    runs = simulated(CHINCHILLA_EPOCH, dense_points(), 0.0, 0)
    scan = ridge_scan(fit("chinchilla", runs, starts=20), starts=20)
    assert len(scan.identified) == 5
    assert np.max([row.spread for row in scan.rows]) < 1e-3
