"""Ensembles of laws, and the reconstruction of what the published runs leave open."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lawfit import (
    CHINCHILLA_EPOCH,
    CHINCHILLA_HOFFMANN,
    MOSAIC_TABLE2,
    MOSAIC_TABLE2_PRINTED,
    JointLaw,
    LawEnsemble,
    LawError,
    published_ensemble,
)
from lawfit.published_runs import N_RUNS, RunDesign, ladder_sizes, run_design
from lawfit.reconstruction import R_SQUARED, _Density, residual
from perfmodel.architecture import ParameterConvention
from perfmodel.ladders import ladder

NAMES = tuple(MOSAIC_TABLE2_PRINTED)
PLAIN = ParameterConvention.WITHOUT_EMBEDDING_AND_HEAD


@cache
def drawn(draws: int = 400, seed: int = 3) -> LawEnsemble:
    return published_ensemble(draws, seed)


def mixed(*laws: JointLaw) -> LawEnsemble:
    return LawEnsemble(laws=laws, source="a test", method="by hand", basis="ASSUMED", seed=None)


def spread(values: np.ndarray) -> float:
    """Standard deviation over the draws."""
    return float(np.std(values))


# ---------------------------------------------------------------- any ensemble

LAWS = (CHINCHILLA_EPOCH, CHINCHILLA_HOFFMANN, MOSAIC_TABLE2, MOSAIC_TABLE2.at_split(4.0))

sizes = st.lists(
    st.tuples(st.floats(1e8, 1e12), st.floats(0.02, 1.0), st.floats(1e9, 1e13)),
    min_size=1,
    max_size=5,
)


@given(st.lists(st.sampled_from(LAWS), min_size=1, max_size=4), sizes)
def test_each_row_is_the_loss_of_that_draw_exactly(
    laws: list[JointLaw], points: list[tuple[float, float, float]]
) -> None:
    ensemble = mixed(*laws)
    n_total, density, tokens = (np.array(column) for column in zip(*points, strict=True))
    given_ = {"n_total": n_total, "n_active": n_total * density, "expert_split": 4.0}
    found = ensemble.loss(tokens=tokens, **given_)
    assert found.shape == (len(laws), len(points))
    by_draw = np.outer(np.arange(1.0, len(laws) + 1.0), tokens)
    other = ensemble.loss(tokens=by_draw, **given_)
    for d, law in enumerate(laws):
        np.testing.assert_array_equal(found[d], law.loss(tokens=tokens, **given_))
        np.testing.assert_array_equal(other[d], law.loss(tokens=by_draw[d], **given_))
        for c, (n, share, seen) in enumerate(points):
            one = law.loss(n_total=n, n_active=n * share, tokens=seen, expert_split=4.0)
            assert found[d, c] == one


@given(st.lists(st.sampled_from(LAWS), min_size=1, max_size=4), sizes)
def test_tokens_for_a_loss_are_those_of_each_law(
    laws: list[JointLaw], points: list[tuple[float, float, float]]
) -> None:
    ensemble = mixed(*laws)
    n_total, density, tokens = (np.array(column) for column in zip(*points, strict=True))
    given_ = {"n_total": n_total, "n_active": n_total * density, "expert_split": 4.0}
    back = ensemble.tokens_for(ensemble.loss(tokens=tokens, **given_), **given_)
    np.testing.assert_allclose(back, np.broadcast_to(tokens, back.shape), rtol=1e-6)
    target = 2.5
    found = ensemble.tokens_for(target, **given_)
    for d, law in enumerate(laws):
        floors = law.floor(**given_)
        for c, floor in enumerate(np.broadcast_to(floors, len(points))):
            one = {"n_total": n_total[c], "n_active": given_["n_active"][c], "expert_split": 4.0}
            if floor >= target:
                assert found[d, c] == np.inf
            elif np.isfinite(found[d, c]):
                assert found[d, c] == pytest.approx(law.tokens_for(target, **one), rel=1e-12)


def test_an_ensemble_of_one_is_the_law() -> None:
    one = LawEnsemble.of(MOSAIC_TABLE2)
    assert (len(one), one.laws, one.seed) == (1, (MOSAIC_TABLE2,), None)
    assert one.coefficients("eta").tolist() == [MOSAIC_TABLE2.eta]


def test_it_round_trips_and_is_frozen() -> None:
    ensemble = drawn().first(3)
    assert len(ensemble) == 3
    assert ensemble.laws == drawn().laws[:3]
    assert LawEnsemble.model_validate_json(ensemble.model_dump_json()) == ensemble
    with pytest.raises(ValueError, match="frozen"):
        ensemble.seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: drawn().first(0), "holds 1 to 400 draws; the nearest legal value is 1"),
        (lambda: drawn().first(401), "the nearest legal value is 400"),
        (lambda: drawn().coefficients("kind"), "no coefficient"),
        (lambda: published_ensemble(0, 1), "must be 1 to 100000; the nearest is 1"),
        (
            lambda: drawn().loss(
                n_total=1e9, n_active=1e8, tokens=np.ones((2, 1)), expert_split=1.0
            ),
            "2 rows, one for each draw, but this ensemble has 400",
        ),
        (
            lambda: drawn().loss(n_total=-1.0, n_active=1.0, tokens=1.0, expert_split=1.0),
            "n_total is -1",
        ),
    ],
)
def test_bad_input_is_one_sentence(call: object, words: str) -> None:
    with pytest.raises(LawError, match=words):
        call()  # type: ignore[operator]


# ---------------------------------------------------------------- the runs


@pytest.mark.parametrize("q", [2, 3, 4, 6, 12])
@pytest.mark.parametrize(("e", "k", "g"), [(8, 1, 1), (96, 2, 4), (384, 8, 8)])
def test_sizes_of_the_ladder_are_those_of_the_performance_model(
    q: int, e: int, k: int, g: int
) -> None:
    model = ladder(q, e, k, g)
    assert ladder_sizes(q, e, k, g) == (model.n_total(PLAIN), model.n_active(PLAIN))


def weighted_median(design: RunDesign, values: np.ndarray) -> float:
    order = np.argsort(values)
    at = np.searchsorted(np.cumsum(design.runs[order]), design.runs.sum() / 2)
    return float(values[order][at])


def test_the_design_has_the_counts_ranges_and_medians_of_table_6() -> None:
    design = run_design(fitted=False)
    assert design.runs.sum() == pytest.approx(N_RUNS)
    sparsity = 1.0 - design.n_active / design.n_total
    ratio = design.tokens / design.n_active
    for values, low, median, high, near in (
        (design.n_total, 0.22e9, 5.34e9, 79.24e9, 0.15),
        (design.n_active, 0.104e9, 0.339e9, 2.72e9, 0.15),
        (design.tokens, 2.88e9, 5.76e9, 56.38e9, 0.35),  # 7.68e9: a family's levels count alike
        (sparsity, 0.499, 0.944, 0.981, 0.02),
    ):
        assert values.min() == pytest.approx(low, rel=0.01)
        assert values.max() == pytest.approx(high, rel=0.01)
        assert weighted_median(design, values) == pytest.approx(median, rel=near)
    assert ratio.min() >= 0.99 * 10.8
    assert ratio.max() <= 1.01 * 70.0
    assert set(design.expert_split) == {1.0, 2.0, 4.0, 6.0, 8.0}


def test_the_fit_does_not_see_the_tenth_with_most_active_parameters() -> None:
    every, fitted = run_design(fitted=False), run_design()
    assert fitted.runs.sum() == pytest.approx(0.9 * N_RUNS)
    for split in np.unique(every.expert_split):
        of = every.expert_split == split
        kept = fitted.expert_split == split
        assert fitted.runs[kept].sum() == pytest.approx(0.9 * every.runs[of].sum())
        cut = fitted.n_active[kept].max()
        above = of & (every.n_active > cut)
        assert every.runs[above].sum() <= 0.1 * every.runs[of].sum() + 1e-9


def test_the_residual_is_that_of_the_printed_r_squared() -> None:
    """About 0.35 %, as a simulation of the form at the printed R^2 gives."""
    assert 0.0032 < residual() < 0.0040
    design = run_design(fitted=False)
    point = {name: getattr(design, name) for name in ("n_total", "n_active", "tokens")}
    logs = np.log(MOSAIC_TABLE2.loss(**point, expert_split=design.expert_split))
    noise = np.random.default_rng(0).normal(0.0, residual(), (2000, len(logs)))
    weights = design.runs / design.runs.sum()
    total = (weights * (logs - (weights * logs).sum()) ** 2).sum()
    left = (noise**2 * weights).sum(axis=1).mean() * (N_RUNS - 11) / N_RUNS
    assert 1.0 - left / total == pytest.approx(R_SQUARED, abs=2e-5)


# ---------------------------------------------------------------- the density and its draws


def test_the_covariance_is_that_of_finite_differences() -> None:
    density = _Density()
    rows = []
    for k, value in enumerate(density.printed):
        step = np.zeros(len(density.printed))
        step[k] = 1e-6 * value
        up, down = (np.log(density.loss((density.printed + s)[None]))[0] for s in (step, -step))
        rows.append((up - down) / (2.0 * step[k]))
    fisher = np.einsum("ir,jr,r->ij", rows, rows, density.runs) / density.sigma**2
    np.testing.assert_allclose(density.covariance(), np.linalg.inv(fisher), rtol=1e-4)


def test_a_point_of_the_density_is_a_law() -> None:
    density, design = _Density(), run_design()
    law = density.law(density.printed)
    for name in NAMES:
        assert getattr(law, name) == pytest.approx(getattr(MOSAIC_TABLE2, name), rel=1e-12)
    other = density.law(density.printed * np.linspace(0.9, 1.1, 11))
    point = {name: getattr(design, name) for name in ("n_total", "n_active", "tokens")}
    np.testing.assert_allclose(
        density.loss((density.printed * np.linspace(0.9, 1.1, 11))[None])[0],
        other.loss(**point, expert_split=design.expert_split),
        rtol=1e-12,
    )


def test_the_same_seed_gives_the_same_laws() -> None:
    assert published_ensemble(5, 1) == published_ensemble(5, 1)
    assert published_ensemble(5, 1).laws != published_ensemble(5, 2).laws


def test_draws_have_the_signs_of_the_printed_law() -> None:
    for name in NAMES:
        assert drawn().coefficients(name).min() > 0.0


def test_draws_fit_the_runs_as_well_as_the_printed_law_could() -> None:
    """Their squared misfit, in units of the residual, is chi-square of eleven coefficients.

    Where the terms' signs cut the ridge off there are fewer, never more.
    """
    design, density = run_design(), _Density()
    point = {name: getattr(design, name) for name in ("n_total", "n_active", "tokens")}
    losses = drawn().loss(**point, expert_split=design.expert_split)
    misfit = (((np.log(losses) - density.log_loss) / density.sigma) ** 2) @ design.runs
    assert 8.0 < misfit.mean() < 12.0
    assert np.quantile(misfit, 0.95) < 24.0  # 19.7 of chi-square with eleven


def test_the_printed_law_is_in_the_middle_of_its_draws() -> None:
    for name in NAMES:
        low, high = np.quantile(drawn().coefficients(name), [0.05, 0.95])
        assert low < getattr(MOSAIC_TABLE2, name) < high


def test_what_the_paper_calls_identified_is_better_known_than_the_ridge() -> None:
    relative = {name: spread(drawn().coefficients(name)) for name in NAMES}
    relative = {name: s / getattr(MOSAIC_TABLE2, name) for name, s in relative.items()}
    assert relative["beta"] == min(relative.values())
    for ridge in ("a", "b", "c", "j", "e", "lambda_", "gamma"):
        assert relative["eta"] < relative[ridge]
    low, high = np.quantile(drawn().coefficients("eta"), [0.025, 0.975])
    assert low > 0.5  # "remains well above zero"
    assert high < 1.5


def independent(draws: int) -> LawEnsemble:
    """Draw each coefficient from its printed interval, alone."""
    generator = np.random.default_rng(0)
    laws = []
    for _ in range(draws):
        values = {}
        for name, row in MOSAIC_TABLE2_PRINTED.items():
            half = (float(row.interval[1]) - float(row.interval[0])) / 2.0 / 1.96
            values[name] = getattr(MOSAIC_TABLE2, name) + half * generator.standard_normal()
        laws.append(MOSAIC_TABLE2.model_copy(update=values))
    return mixed(*laws)


def test_predictions_at_the_runs_are_surer_than_from_coefficients_drawn_alone() -> None:
    """Though every coefficient is far less sure than its printed interval says."""
    middle = {"n_total": 5e9, "n_active": 0.33e9, "tokens": 5.76e9, "expert_split": 4.0}
    along, alone = drawn(), independent(400)
    assert spread(along.loss(**middle)) < 0.1 * spread(alone.loss(**middle))
    for name in ("a", "b", "alpha", "beta", "eta", "gamma"):
        assert spread(along.coefficients(name)) > 2.0 * spread(alone.coefficients(name))


def test_predictions_are_less_sure_the_further_from_the_runs() -> None:
    near = {"n_total": 5e9, "n_active": 0.33e9, "tokens": 5.76e9, "expert_split": 4.0}
    far = {"n_total": 350e9, "n_active": 20e9, "tokens": 1.2e12, "expert_split": 4.0}
    assert spread(drawn().loss(**near)) < residual() * MOSAIC_TABLE2.loss(**near)
    assert spread(drawn().loss(**far)) > 5.0 * spread(drawn().loss(**near))


def test_differences_of_candidates_are_surer_than_their_losses() -> None:
    """What the choice depends on: the draws move like models together."""
    one = {"n_total": 356.7e9, "n_active": 28.2e9, "tokens": 1.19e12, "expert_split": 2.0}
    other = {"n_total": 433.7e9, "n_active": 21.2e9, "tokens": 1.17e12, "expert_split": 4.0}
    first, second = drawn().loss(**one), drawn().loss(**other)
    assert spread(first - second) < 0.3 * min(spread(first), spread(second))


@pytest.mark.slow
def test_chains_are_long_enough() -> None:
    """Chains four times as long have the same quartiles, within what 400 draws can tell."""
    import lawfit.reconstruction as module

    short = drawn()
    steps = module.STEPS
    try:
        module.STEPS = 4 * steps
        long = published_ensemble(400, 7)
    finally:
        module.STEPS = steps
    for name in NAMES:
        one, other = short.coefficients(name), long.coefficients(name)
        width = float(np.subtract(*np.quantile(other, [0.75, 0.25])))
        for quantile in (0.25, 0.5, 0.75):
            gap = abs(float(np.quantile(one, quantile) - np.quantile(other, quantile)))
            assert gap < 0.25 * width, (name, quantile)
