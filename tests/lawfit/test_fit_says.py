"""What a fit says of itself: bounds, levels, lack of fit, runs held out, covariance and draws."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lawfit import (
    CHINCHILLA_EPOCH,
    MOSAIC_TABLE2,
    FitResult,
    KaplanLaw,
    LawError,
    fit,
)
from lawfit import _descent as descent
from lawfit._posynomial import posynomial
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
    table,
)

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
    runs = simulated(MOSAIC_TABLE2, points, NOISE, 1)
    logs = runs.logs()
    form = posynomial(MOSAIC_TABLE2.at_split(4.0), logs.variables, logs.loss)
    middle = float(np.median(logs.loss))
    problem = descent.Problem.of(form, logs.loss, runs.column("weight"), 1e-3)
    ends = descent.descend(problem, starting_points(form, middle, 30, np.random.default_rng(0)))
    best = ends.converged & (ends.value <= ends.value.min() * (1.0 + 1e-6))
    constant = form.names.index("e")
    assert best.sum() >= 20
    assert (ends.points[best, constant] == form.lower[constant]).all()
    found = fit("per_split", runs, starts=30)
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
        assert getattr(found.law, name) == value
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
        ({"law": "kaplan"}, "'kaplan', but fit takes one of joint, per_split, chinchilla"),
        ({"law": KaplanLaw}, "KaplanLaw, but .*; fit_general fits the class of any other law"),
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


def test_losses_that_are_all_the_same_are_refused() -> None:
    flat = dense_runs().model_copy(update={"loss": (2.5,) * len(dense_runs())})
    with pytest.raises(LawError, match=r"losses of all 120 runs are 2\.5"):
        fit("chinchilla", flat, starts=5)


def test_a_law_of_one_split_needs_runs_of_one_and_a_law_needs_runs() -> None:
    with pytest.raises(LawError, match=r"\d expert splits"):
        fit("per_split", joint_runs())
    with pytest.raises(LawError, match="4 runs are left for 5 coefficients"):
        fit("chinchilla", dense_runs().where([k < 4 for k in range(120)]))
    few = fit("chinchilla", dense_runs().where([k < 9 for k in range(120)]), starts=10)
    assert "too_few_runs" in reasons(few)
