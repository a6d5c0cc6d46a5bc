"""How often intervals hold the truth, on simulated runs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from lawfit import (
    CHINCHILLA_EPOCH,
    MOSAIC_TABLE2,
    Coverage,
    LawError,
    interval_coverage,
    simulated_runs,
)
from lawfit import _descent as descent
from lawfit.coverage import METHODS
from lawfit.published_runs import sample_runs

from .fit_tables import NOISE, dense_runs, joint_runs, predicted

LEVEL = 0.95

PAPER: dict[str, Any] = {"delta": 0.1, "holdout": "nact:0.1", "noise": NOISE}
"""As the paper fits: Huber's function at 0.1, a tenth held out, at its noise."""

KEEP = ("percentile", "profile")
"""Methods that keep their level on the paper's design."""

LIMITS = (0.92, 0.98)
"""Shares between which a level of 95 % counts as kept, but for the error of the simulation."""

SETS, DRAWS = 200, 200


def pooled(found: Coverage, method: str) -> float:
    return float(np.mean([row.share for row in found.rows if row.method == method]))


def kept(found: Coverage, method: str) -> None:
    """Each share is one that a coverage between the limits would have, but for 1 in 10 000."""
    for row in found.rows:
        if row.method == method:
            assert stats.binom.cdf(row.covered, row.sets, LIMITS[0]) > 1e-4, row
            assert stats.binom.sf(row.covered - 1, row.sets, LIMITS[1]) > 1e-4, row


# ---------------------------------------------------------------- the simulation


def test_simulated_runs_are_the_law_with_noise_by_weight() -> None:
    runs = dense_runs()
    weight = np.where(np.arange(120) % 2 == 0, 1.0, 16.0)
    runs = runs.model_copy(update={"weight": tuple(weight.tolist())})
    errors = []
    for seed in range(50):
        table = simulated_runs(CHINCHILLA_EPOCH, runs, 0.01, seed)
        assert table == simulated_runs(CHINCHILLA_EPOCH, runs, 0.01, seed)
        assert (table.tokens, table.weight, table.id) == (runs.tokens, runs.weight, runs.id)
        errors.append(np.log(table.column("loss") / predicted(CHINCHILLA_EPOCH, runs)))
    size = np.sqrt(np.mean(np.square(errors), axis=0))
    assert float(np.sqrt(np.mean(size[weight == 1.0] ** 2))) == pytest.approx(0.01, rel=0.05)
    assert float(np.sqrt(np.mean(size[weight == 16.0] ** 2))) == pytest.approx(0.0025, rel=0.05)
    assert len({row[0] for row in errors}) == 50


def test_intervals_of_a_share_are_those_of_wilson() -> None:
    found = interval_coverage(
        CHINCHILLA_EPOCH, dense_runs(rows=40), noise=NOISE, sets=9, draws=20, methods=("profile",)
    )
    for row in found.rows:
        expected = stats.binomtest(row.covered, row.sets).proportion_ci(0.95, method="wilson")
        assert row.share == row.covered / 9
        assert row.low == pytest.approx(expected.low, abs=1e-6)
        assert row.high == pytest.approx(expected.high, abs=1e-6)
        assert row.width is None
    assert found.of("profile") == {row.name: row.share for row in found.rows}
    with pytest.raises(LawError, match="method is 'bca', which was not simulated"):
        found.of("bca")


def test_a_simulation_can_be_repeated_and_tells_its_progress() -> None:
    seen: list[tuple[int, int]] = []
    options: dict[str, Any] = {"noise": NOISE, "sets": 3, "draws": 20, "methods": METHODS}
    runs = dense_runs(rows=40)
    first = interval_coverage(
        CHINCHILLA_EPOCH, runs, progress=lambda done, of: seen.append((done, of)), **options
    )
    assert first == interval_coverage(CHINCHILLA_EPOCH, runs, **options)
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert len(first.rows) == 5 * len(METHODS)
    widths = {(row.method, row.name): row.width for row in first.rows}
    other = interval_coverage(CHINCHILLA_EPOCH, runs, seed=50, **options)
    assert widths != {(row.method, row.name): row.width for row in other.rows}


def test_fixed_coefficients_have_no_row_and_options_reach_the_fit() -> None:
    options: dict[str, Any] = {"noise": NOISE, "sets": 2, "methods": ("covariance",)}
    fixed = {"alpha": CHINCHILLA_EPOCH.alpha}
    found = [
        interval_coverage(CHINCHILLA_EPOCH, dense_runs(rows=60), fixed=fixed, **options, **more)
        for more in ({}, {"objective": "least_squares"}, {"delta": 0.1}, {"holdout": "nact:0.3"})
    ]
    assert [row.name for row in found[0].rows] == ["a", "e", "b", "beta"]
    widths = [[row.width for row in each.rows] for each in found]
    assert widths[1] == pytest.approx(widths[2], rel=1e-6)
    assert widths[0] != pytest.approx(widths[1], rel=1e-3)
    assert all(more > less for more, less in zip(widths[3], widths[0], strict=True))


def test_a_set_without_an_interval_counts_as_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descent, "MOST_STEPS", 1)
    found = interval_coverage(
        CHINCHILLA_EPOCH,
        dense_runs(rows=40),
        noise=NOISE,
        sets=2,
        draws=20,
        methods=("percentile",),
        starts=2,
    )
    assert (found.not_converged, found.refits_not_converged) == (2, 40)
    assert all((row.covered, row.sets, row.width) == (0, 2, None) for row in found.rows)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"sets": 0}, "sets is 0, but must be at least 1; the nearest is 1"),
        ({"draws": 19}, "draws is 19, but must be at least 20; the nearest is 20"),
        ({"noise": 0.0}, "noise is 0, but must be a finite number above 0"),
        ({"noise": math.nan}, "noise is nan"),
        ({"level": 95}, "level is 95, but must lie between 0 and 1"),
        ({"methods": ()}, "may hold only percentile, bca, profile, covariance, early_stop"),
        ({"methods": ("bayes",)}, "may hold only percentile"),
    ],
)
def test_illegal_arguments_are_refused_in_a_sentence(
    options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(LawError, match=sentence):
        interval_coverage(CHINCHILLA_EPOCH, dense_runs(), **{"noise": NOISE, **options})


# ---------------------------------------------------------------- what it finds


def test_of_a_law_that_is_nearly_linear_every_method_keeps_its_level_and_early_stops_do_not() -> (
    None
):
    honest: tuple[Any, ...] = ("percentile", "bca", "profile", "covariance")
    options: dict[str, Any] = {"noise": NOISE, "delta": 0.1, "starts": 3}
    found = interval_coverage(
        CHINCHILLA_EPOCH, dense_runs(rows=60), sets=30, draws=100, methods=honest, **options
    )
    assert (found.not_converged, found.refits_not_converged) == (0, 0)
    for method in honest:
        kept(found, method)
        assert pooled(found, method) > 0.87
    few = interval_coverage(
        CHINCHILLA_EPOCH,
        dense_runs(rows=60),
        sets=10,
        draws=20,
        methods=("early_stop",),
        **options,
    )
    assert pooled(few, "early_stop") < 0.5
    width = {(row.method, row.name): row.width for row in found.rows}
    for name in ("e", "alpha", "beta"):
        middle = width["covariance", name]
        assert middle is not None
        assert width["percentile", name] == pytest.approx(middle, rel=0.15)


def test_on_the_papers_design_converged_refits_and_profiles_cover_and_early_stops_do_not() -> None:
    options: dict[str, Any] = {"sets": 6, "starts": 2, **PAPER}
    found = interval_coverage(MOSAIC_TABLE2, joint_runs(), draws=50, methods=KEEP, **options)
    for method in KEEP:
        kept(found, method)
        assert pooled(found, method) > 0.8
    few = interval_coverage(
        MOSAIC_TABLE2, joint_runs(), draws=20, methods=("early_stop",), **{**options, "sets": 3}
    )
    assert pooled(few, "early_stop") < 0.5


@pytest.mark.slow
def test_on_the_papers_design_nominal_95_percent_is_92_to_98() -> None:
    """As `benchmarks/law_intervals.py coverage`, with fewer sets and other ones."""
    found = interval_coverage(
        MOSAIC_TABLE2,
        sample_runs(),
        sets=SETS,
        draws=DRAWS,
        level=LEVEL,
        methods=KEEP,
        starts=10,
        seed=5000,
        **PAPER,
    )
    assert found.not_converged <= 0.02 * SETS
    assert found.refits_not_converged <= 1e-3 * SETS * DRAWS
    for method in KEEP:
        kept(found, method)
        assert LIMITS[0] < pooled(found, method) < LIMITS[1]


@pytest.mark.slow
def test_on_the_papers_design_intervals_of_early_stops_hold_the_truth_less_than_half_the_time() -> (
    None
):
    found = interval_coverage(
        MOSAIC_TABLE2,
        sample_runs(),
        sets=40,
        draws=100,
        methods=("early_stop",),
        starts=10,
        seed=5000,
        **PAPER,
    )
    shares = sorted(found.of("early_stop").values())
    assert shares[-3] < 0.5
    assert pooled(found, "early_stop") < 0.3
