"""Which runs to train next: the criteria, the search and its bound, and what is said of them."""

from __future__ import annotations

import math
from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lawfit import (
    CHINCHILLA_EPOCH,
    MOSAIC_TABLE2,
    Candidates,
    ChinchillaLaw,
    ChoiceGoal,
    CoefficientGoal,
    FitResult,
    LawEnsemble,
    LawError,
    NextRuns,
    PredictionGoal,
    fit,
    next_runs,
    simulate_next_runs,
)
from lawfit._choice import for_choice
from lawfit._criteria import LogVariance, Regret, normals
from lawfit._information import effect, residual_noise
from lawfit._relaxed import _corner, relaxed
from lawfit._search import Purse, whole

from .fit_tables import NOISE, dense_points, dense_runs, joint_runs, simulated

DENSE = PredictionGoal(n_total=70e9, n_active=70e9, tokens=1.4e12, expert_split=1.0)


@cache
def dense(rows: int = 60, objective: str = "least_squares") -> FitResult:
    runs = simulated(CHINCHILLA_EPOCH, dense_points(rows), NOISE, 0)
    return fit("chinchilla", runs, objective=objective, starts=[CHINCHILLA_EPOCH] * 2)  # type: ignore[arg-type]


@cache
def joint() -> FitResult:
    return fit("joint", joint_runs(), objective="least_squares", starts=[MOSAIC_TABLE2] * 2)


def spent(found: FitResult) -> float:
    runs = found.train
    return float((6.0 * runs.column("n_active") * runs.column("tokens")).sum())


def sizes_to_choose(loss: float = 1.99) -> ChoiceGoal:
    """Sizes that the fitted law predicts one loss of, so that the choice is open."""
    size = np.array([30e9, 70e9, 160e9, 370e9])
    tokens = dense().law.tokens_for(loss, n_total=size, n_active=size, expert_split=1.0)
    columns = {name: tuple(size.tolist()) for name in ("n_total", "n_active")}
    return ChoiceGoal(**columns, tokens=tuple(tokens.tolist()), expert_split=(1.0,) * 4)


def reasons(found: NextRuns) -> list[str]:
    return [remark.reason for remark in found.remarks]


# ---------------------------------------------------------------- criteria


def random_criteria(seed: int) -> tuple[LogVariance, Regret, np.ndarray]:
    """Two views of seven candidates, four parameters, and three things to know or choose from."""
    draw = np.random.default_rng(seed)
    runs = draw.normal(0.0, 1.0, (2, 7, 4))
    goal = draw.normal(0.0, 1.0, (2, 3, 4))
    mean = draw.normal(0.0, 0.5, 3)
    counts = draw.integers(0, 3, 7).astype(float)
    return LogVariance(runs, goal), Regret.of(runs, goal, mean, normals(3, seed)), counts


@given(seed=st.integers(0, 1000))
@settings(max_examples=15)
def test_after_each_is_the_value_with_one_more_run(seed: int) -> None:
    variance, regret, counts = random_criteria(seed)
    for criterion in (variance, regret):
        after = criterion.after_each(counts)
        direct = [criterion.value(counts + step) for step in np.eye(7)]
        np.testing.assert_allclose(np.maximum(after, min(direct)), direct, rtol=1e-9, atol=1e-12)
    small = [
        (variance.value(counts) - variance.value(counts + 1e-6 * step)) / 1e-6 for step in np.eye(7)
    ]
    np.testing.assert_allclose(variance.sensitivity(counts), small, rtol=1e-4, atol=1e-8)


@given(seed=st.integers(0, 1000), share=st.floats(0.05, 0.95))
@settings(max_examples=15)
def test_the_mean_log_variance_is_convex_and_falls_with_runs(seed: int, share: float) -> None:
    variance, regret, counts = random_criteria(seed)
    other = np.random.default_rng(seed + 1).uniform(0.0, 5.0, 7)
    mixed = variance.value(share * counts + (1.0 - share) * other)
    ends = share * variance.value(counts) + (1.0 - share) * variance.value(other)
    assert mixed <= ends + 1e-12
    assert variance.value(counts + other) <= variance.value(counts)
    assert regret.value(counts + other) <= regret.value(counts) + 2e-3  # of a sample


def test_of_all_parameters_it_is_the_determinant() -> None:
    variance, _, counts = random_criteria(3)
    whole_of = LogVariance(variance.runs[:1], np.eye(4)[None])
    u = variance.runs[0]
    information = np.eye(4) + (u * counts[:, None]).T @ u
    expected = -np.linalg.slogdet(information)[1] / 4
    assert whole_of.value(counts) == pytest.approx(expected, rel=1e-12)
    turned = LogVariance(variance.runs[:1], np.random.default_rng(0).normal(size=(1, 4, 4)))
    before = turned.value(np.zeros(7))
    assert turned.value(counts) - before == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("gap", [0.0, 0.3, 1.0])
def test_the_regret_between_two_is_the_normal_loss_integral(gap: float) -> None:
    from scipy.special import ndtr

    def loss(size: float) -> float:
        """E max(0, size z - gap)."""
        z = gap / size
        return size * math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi) - gap * float(ndtr(-z))

    runs = np.array([[[2.0, 0.0]]])
    spread = np.array([[[0.0, 0.0], [1.0, 0.5]]])
    regret = Regret.of(runs, spread, np.array([0.0, gap]), normals(2, 0, 1 << 14))
    before, known = loss(math.sqrt(1.25)), loss(math.sqrt(0.8))  # 1 - 1/(1 + 2^2) of the first
    assert regret.value(np.array([0.0])) == pytest.approx(before, rel=3e-3)
    assert regret.value(np.array([1.0])) == pytest.approx(before - known, rel=1e-2)


@pytest.mark.parametrize("width", [1e-9, 0.1, 0.3, 1.0, 3.0, 40.0])
def test_the_efficiency_of_huber_is_that_of_the_integrals(width: float) -> None:
    from scipy.integrate import quad

    def density(x: float) -> float:
        return math.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)

    noise, delta = 0.01, 0.01 * width
    reach = min(width, 9.0)
    slope = 2.0 * quad(density, 0.0, reach)[0]
    inner = 2.0 * quad(lambda x: x * x * density(x), 0.0, reach)[0]
    square = inner + 2.0 * width**2 * quad(density, reach, 20.0)[0]
    found = effect(delta, np.array([noise]))[0]
    assert found == pytest.approx(slope**2 / square, rel=1e-4)
    assert 2.0 / math.pi - 1e-9 <= found <= 1.0
    assert effect(None, np.array([noise]))[0] == 1.0


# ---------------------------------------------------------------- the search and its bound


@pytest.mark.parametrize(
    ("levels", "power", "goal", "expected"),
    [
        # D: a third each at the ends and the middle (Smith, Biometrika 12:1, 1918)
        (np.linspace(-1, 1, 21), 3, np.eye(3), {-1.0: 1 / 3, 0.0: 1 / 3, 1.0: 1 / 3}),
        (np.linspace(-1, 1, 21), 2, np.eye(2), {-1.0: 1 / 2, 1.0: 1 / 2}),
        # c: a line at 2 from runs on -1 to 1, 3/4 and 1/4 of the runs (Elfving 1952)
        (np.linspace(-1, 1, 21), 2, np.array([[1.0, 2.0]]), {-1.0: 1 / 4, 1.0: 3 / 4}),
    ],
)
def test_relaxed_designs_of_polynomials_are_those_of_the_books(
    levels: np.ndarray, power: int, goal: np.ndarray, expected: dict[float, float]
) -> None:
    runs = 1e3 * levels[None, :, None] ** np.arange(power)  # beside which what was known is nothing
    criterion = LogVariance(runs, goal[None])
    found = relaxed(criterion, Purse(np.ones(len(levels)), 100.0, None))
    share = np.array([expected.get(round(float(x), 9), 0.0) for x in levels])
    np.testing.assert_allclose(found.counts / 100.0, share, atol=0.02)
    assert 0.0 <= criterion.value(found.counts) - found.bound <= 1.1e-4


@given(seed=st.integers(0, 1000), most=st.one_of(st.none(), st.integers(1, 6)))
@settings(max_examples=25)
def test_a_corner_of_the_budget_is_that_of_linear_programming(seed: int, most: int | None) -> None:
    from scipy.optimize import linprog

    draw = np.random.default_rng(seed)
    cost, slope, budget = draw.uniform(0.5, 4.0, 8), draw.uniform(0.0, 1.0, 8), 5.0
    found = _corner(slope, Purse(cost, budget, most))
    rows = [cost] if most is None else [cost, np.ones(8)]
    done = linprog(-slope, A_ub=np.array(rows), b_ub=[budget, *([] if most is None else [most])])
    assert slope @ found == pytest.approx(-done.fun, rel=1e-9)
    assert found.min() >= 0.0
    assert cost @ found <= budget * (1 + 1e-12)
    assert most is None or found.sum() <= most * (1 + 1e-12)


def every_design(purse: Purse) -> list[np.ndarray]:
    most = [int(purse.budget / cost) for cost in purse.cost]
    grid = [np.array(n, dtype=float) for n in product(*(range(k + 1) for k in most))]
    inside = [n for n in grid if n @ purse.cost <= purse.budget * (1 + 1e-12)]
    return [n for n in inside if purse.most_runs is None or n.sum() <= purse.most_runs]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("most", [None, 3])
def test_whole_designs_are_nearly_the_best_of_all_and_never_below_the_bound(
    seed: int, most: int | None
) -> None:
    variance, regret, _ = random_criteria(seed)
    cost = np.random.default_rng(seed).uniform(1.0, 3.0, 7)
    purse = Purse(cost, 6.5, most)
    designs = every_design(purse)
    best = min(variance.value(n) for n in designs)
    frame = relaxed(variance, purse)
    found = whole(variance, purse, [frame.counts])
    assert any(np.array_equal(found, n) for n in designs)
    assert frame.bound <= best <= variance.value(found)
    assert math.exp(best - variance.value(found)) > 0.97
    choice = for_choice(regret, purse)
    assert any(np.array_equal(choice, n) for n in designs)
    least = min(regret.value(n) for n in designs)
    gain = regret.value(np.zeros(7)) - regret.value(choice)
    assert gain >= 0.9 * (regret.value(np.zeros(7)) - least)


# ---------------------------------------------------------------- the errors


def errors_by_differences(found: FitResult, more: Candidates | None, noise: float) -> np.ndarray:
    """Standard errors of (log a, log b, log e, alpha, beta) from differences of the loss."""
    names = ("n_total", "n_active", "tokens", "expert_split")
    point = {
        name: np.concatenate([found.train.column(name), [] if more is None else more.column(name)])
        for name in names
    }
    law, columns = found.law, []
    for name in ("a", "b", "e", "alpha", "beta"):
        ends = []
        for sign in (1.0, -1.0):
            value = getattr(law, name)
            moved = value * math.exp(sign * 1e-5) if len(name) == 1 else value + sign * 1e-5
            ends.append(np.log(law.model_copy(update={name: moved}).loss(**point)))
        columns.append((ends[0] - ends[1]) / 2e-5)
    slopes = np.array(columns).T / noise
    size = np.sqrt((slopes**2).sum(axis=0))
    return np.sqrt(np.diag(np.linalg.inv((slopes / size).T @ (slopes / size)))) / size


def test_expected_errors_are_those_of_gauss_and_newton() -> None:
    found = next_runs(dense(), 0.1 * spent(dense()), most_runs=10, noise=NOISE)
    names = ("log a", "log b", "log e", "alpha", "beta")
    before = errors_by_differences(dense(), None, NOISE)
    after = errors_by_differences(dense(), found.table(), NOISE)
    assert [found.error(name).before for name in names] == pytest.approx(before, rel=1e-4)
    assert [found.error(name).after for name in names] == pytest.approx(after, rel=1e-4)


def test_before_is_near_the_covariance_of_the_fit() -> None:
    found = next_runs(joint(), spent(joint()) * 0.01, goal=CoefficientGoal(names=("eta", "b")))
    assert joint().covariance is not None
    for each in found.errors:
        assert each.before == pytest.approx(joint().covariance.std_error(each.name), rel=0.4)  # type: ignore[union-attr]


@pytest.mark.parametrize("objective", ["least_squares", "huber"])
def test_the_noise_of_the_residuals_is_that_of_the_runs(objective: str) -> None:
    sizes = []
    for seed in range(12):
        runs = dense_runs(seed=seed, rows=40)
        one = fit("chinchilla", runs, objective=objective, starts=[CHINCHILLA_EPOCH])  # type: ignore[arg-type]
        sizes.append(residual_noise(one))
    assert np.mean(sizes) == pytest.approx(NOISE, rel=0.12)  # 12 sets of 40 runs: 3 to 5 %


# ---------------------------------------------------------------- designs


GOALS = [
    CoefficientGoal(),
    CoefficientGoal(names=("alpha", "beta")),
    CoefficientGoal(names=("alpha",)),
    DENSE,
]


@pytest.mark.parametrize("goal", GOALS, ids=["D", "D_s", "c", "prediction"])
@pytest.mark.parametrize("most", [None, 6])
def test_a_design_keeps_its_budget_and_says_how_good_it_is(
    goal: CoefficientGoal | PredictionGoal, most: int | None
) -> None:
    budget = 0.02 * spent(dense())
    found = next_runs(dense(), budget, goal=goal, most_runs=most)
    assert found == next_runs(dense(), budget, goal=goal, most_runs=most)
    assert NextRuns.model_validate_json(found.model_dump_json()) == found
    assert sum(run.cost for run in found.runs) == pytest.approx(found.cost)
    assert found.cost <= budget * (1 + 1e-9)
    assert most is None or sum(run.repeats for run in found.runs) <= most
    assert found.efficiency is not None
    assert found.gain_share is not None
    assert 0.9 < found.gain_share <= 1.0
    assert 0.97 < found.efficiency <= 1.0
    assert all(each.after < each.before for each in found.errors)
    assert not any(run.flags for run in found.runs)  # the grid stays in the range
    more = next_runs(dense(), 4.0 * budget, goal=goal, most_runs=most and 4 * most)
    if len(found.errors) == 1:
        assert more.errors[0].after < found.errors[0].after


@pytest.mark.parametrize("goal", GOALS[2:], ids=["c", "prediction"])
def test_no_random_design_is_better_than_the_bound_allows(
    goal: CoefficientGoal | PredictionGoal,
) -> None:
    budget, possible = 0.02 * spent(dense()), Candidates.grid(dense().train)
    found = next_runs(dense(), budget, goal=goal, candidates=possible)
    assert found.efficiency is not None
    floor = found.errors[0].after * math.sqrt(found.efficiency)
    assert error_of(found.table(), goal) == pytest.approx(found.errors[0].after, rel=1e-9)
    for seed in range(10):
        assert error_of(possible.random(budget, seed), goal) > floor


def error_of(runs: Candidates, goal: CoefficientGoal | PredictionGoal) -> float:
    """The error after exactly these runs: that before any others, were they in the fit."""
    one = dense()
    names = ("n_total", "n_active", "tokens", "expert_split")
    table = one.train.model_dump()
    for name in names:
        table[name] = (*table[name], *getattr(runs, name))
    point = {name: runs.column(name) for name in names}
    table["loss"] = (*table["loss"], *one.law.loss(**point).tolist())
    table["weight"] = (*table["weight"], *(1.0,) * len(runs))
    table["id"] = (*table["id"], *(f"new {k}" for k in range(len(runs))))
    joined = one.model_copy(update={"train": type(one.train).model_validate(table)})
    cheapest = Candidates.of(n_active=[1e9], tokens=[20e9], cost=[1.0])
    noise = residual_noise(one)
    return next_runs(joined, 1.0, goal=goal, candidates=cheapest, noise=noise).errors[0].before


def test_the_sparse_goals_choose_what_they_name() -> None:
    budget = 0.02 * spent(joint())
    found = {
        name: next_runs(joint(), budget, goal=CoefficientGoal(names=(name,)), most_runs=8)
        for name in ("eta", "beta")
    }
    both = CoefficientGoal(names=("eta", "beta"))
    for name, own in found.items():
        assert own.criterion == "c"
        other = next(x for key, x in found.items() if key != name)
        crossed = simulate_next_runs(joint(), other, both, sets=200).error(name)
        assert own.error(name).after < crossed.size
    splits = {run.expert_split for run in found["eta"].runs}
    assert min(splits) == min(joint().train.expert_split)  # where the interaction is largest


def test_choices_report_regret_and_two_architectures_a_bound() -> None:
    budget, goal = 0.2 * spent(dense()), sizes_to_choose()
    found = next_runs(dense(), budget, goal=goal, most_runs=10)
    assert found.criterion == "regret"
    assert found.efficiency is None
    assert found.regret_before is not None
    assert found.regret_after is not None
    assert 0.0 < found.regret_after < 0.7 * found.regret_before
    assert "goal_outside" in reasons(found)
    pair = goal.model_copy(
        update={n: getattr(goal, n)[:2] for n in goal.model_fields_set - {"name"}}
    )
    two = next_runs(dense(), budget, goal=pair, most_runs=10)
    assert (two.criterion, len(two.errors)) == ("c", 1)
    assert two.efficiency is not None
    # the regret of two that are level is the mean size of a normal error, over two
    gain = math.sqrt(two.errors[0].before ** 2 - two.errors[0].after ** 2)
    scale = 1.0 / math.sqrt(2.0 * math.pi)
    assert two.regret_before == pytest.approx(scale * two.errors[0].before, rel=0.02)
    expected = scale * (two.errors[0].before - gain)
    assert two.regret_after == pytest.approx(expected, rel=0.05)


def test_averaging_over_one_law_changes_nothing_and_over_many_is_robust() -> None:
    budget, goal = 0.02 * spent(joint()), CoefficientGoal(names=("eta",))
    local = next_runs(joint(), budget, goal=goal, most_runs=8)
    same = next_runs(
        joint(), budget, goal=goal, most_runs=8, average_over=LawEnsemble.of(joint().law)
    )
    assert same == local
    many = next_runs(
        joint(), budget, goal=goal, most_runs=8, average_over=joint().ensemble(8, seed=1)
    )
    assert many.laws == 8
    assert local.errors[0].after <= many.errors[0].after * (1 + 1e-9) < 1.1 * local.errors[0].after


# ---------------------------------------------------------------- candidates, and what is said


def test_a_grid_spans_the_runs_and_costs_six_n_d() -> None:
    for found in (dense(), joint()):
        grid = Candidates.grid(found.train)
        np.testing.assert_allclose(
            grid.column("cost"), 6.0 * grid.column("n_active") * grid.column("tokens")
        )
        for name in ("n_total", "n_active", "tokens", "expert_split"):
            own, all_ = grid.column(name), found.train.column(name)
            assert all_.min() * (1 - 1e-9) <= own.min() <= own.max() <= all_.max() * (1 + 1e-9)
        assert 60 <= len(grid) <= 800
    given_ = Candidates.grid(
        joint().train, n_active=[1e9, 1e11], sparsity=[0.9], tokens_per_parameter=[20.0]
    )
    assert len(given_) == 2 * 5
    assert given_.n_total == pytest.approx([1e10] * 5 + [1e12] * 5)


def test_random_designs_keep_the_budget_and_the_seed() -> None:
    grid = Candidates.grid(dense().train)
    budget = 5.0 * max(grid.cost)
    drawn = grid.random(budget, 1)
    assert drawn == grid.random(budget, 1) != grid.random(budget, 2)
    assert sum(drawn.cost) <= budget
    assert budget - sum(drawn.cost) < min(grid.cost)
    assert len(grid.random(budget, 1, most_runs=3)) == 3


def test_remarks_say_what_limits_the_answer() -> None:
    budget = 0.1 * spent(dense())
    far = Candidates.of(n_active=[1e11, 1e9], tokens=[1e10, 1e10])
    outside = next_runs(dense(), budget, candidates=far, goal=CoefficientGoal(names=("alpha",)))
    assert "runs_outside" in reasons(outside)
    assert any("n_active is 1e+11" in flag for run in outside.runs for flag in run.flags)
    few = next_runs(dense(), budget, most_runs=1)
    assert {"unspent", "little_gain"} <= set(reasons(few))
    held = fit(
        "chinchilla",
        dense().train,
        objective="least_squares",
        starts=[CHINCHILLA_EPOCH],
        fixed={"alpha": 0.35},
    )
    known = next_runs(held, budget)
    assert {"held", "not_converged"} <= set(reasons(known))
    assert [each.name for each in known.errors] == ["log a", "log e", "log b", "beta"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: next_runs(dense(), 1e15),
            "of 67 candidates; the nearest legal value is 2.73088e",
        ),
        (lambda: next_runs(dense(), math.inf), "budget is inf"),
        (lambda: next_runs(dense(), 1e21, most_runs=0), "most_runs is 0"),
        (lambda: next_runs(dense(), 1e21, noise=-1.0), "noise is -1"),
        (
            lambda: next_runs(dense(), 1e21, goal=CoefficientGoal(names=("eta",))),
            "'eta', but the coefficients that this fit moves are a, e, b, beta, alpha",
        ),
        (lambda: next_runs(dense(), 1e21, goal=CoefficientGoal(names=())), "names is empty"),
        (
            lambda: next_runs(dense(), 1e21, goal=DENSE.model_copy(update={"tokens": -1.0})),
            "tokens is -1",
        ),
        (
            lambda: next_runs(dense(), 1e21, average_over=LawEnsemble.of(MOSAIC_TABLE2)),
            "JointLaw of another kind than the fit",
        ),
        (
            lambda: next_runs(
                dense(),
                1e21,
                goal=ChoiceGoal(
                    n_total=(1e9, 2e9), n_active=(1e9, 1e9), tokens=(1e10,) * 2, expert_split=(1, 1)
                ),
            ),
            "all the same to this law",
        ),
        (lambda: simulate_next_runs(dense(), None, DENSE, sets=1), "sets is 1"),
        (lambda: Candidates.of(n_active=[1e9], tokens=[0.0]), "tokens of candidate 0 is 0"),
        (lambda: Candidates.of(n_active=[1e9], tokens=[1e9, 1e9]), "tokens has 2 rows"),
        (
            lambda: Candidates.of(n_active=[2e9], n_total=[1e9], tokens=[1e9]),
            "the nearest legal value is 1e\\+09",
        ),
        (lambda: Candidates.grid(dense().train, sparsity=[1.0]), "sparsity holds 1"),
        (lambda: Candidates.grid(dense().train, n_active=[]), "n_active is empty"),
        (
            lambda: Candidates.of(n_active=[1e9], tokens=[1e9]).random(1.0, 0),
            "the cheapest of 1 candidates",
        ),
        (lambda: Candidates.of(n_active=[1e9], tokens=[1e9]).take([1]), "rows must name"),
        (lambda: next_runs(dense(), 1e21).error("eta"), "the errors are of log a"),
    ],
)
def test_bad_input_is_one_sentence(call: object, words: str) -> None:
    with pytest.raises(LawError, match=words):
        call()  # type: ignore[operator]


def test_a_choice_needs_two_of_one_length() -> None:
    one = {"n_total": (1e9,), "n_active": (1e9,), "tokens": (1e9,), "expert_split": (1.0,)}
    with pytest.raises(ValueError, match="must have at least 2"):
        ChoiceGoal(**one)
    with pytest.raises(ValueError, match="all columns must have one length"):
        ChoiceGoal(**{**one, "n_total": (1e9, 2e9)})


def test_runs_that_determine_no_law_are_refused() -> None:
    size = np.geomspace(1e8, 1e10, 12)
    runs = simulated(CHINCHILLA_EPOCH, (size, size, 20.0 * size, np.ones(12)), NOISE, 0)
    # with one exponent and tokens at 20 per parameter two terms are one: (a + b / 20^0.35) N^-0.35
    law = ChinchillaLaw(a=400.0, alpha=0.35, b=400.0, beta=0.35, e=1.8, source="a test")
    found = fit(law, runs, objective="least_squares", starts=[law])
    level = found.model_copy(
        update={
            "law": law,
            "coefficients": {
                name: c.model_copy(update={"value": getattr(law, name), "at_bound": None})
                for name, c in found.coefficients.items()
            },
        }
    )
    with pytest.raises(LawError, match=r"do not determine .*hold one with fixed"):
        next_runs(level, 1e21, noise=NOISE)


def test_the_budget_named_as_legal_is() -> None:
    for cost in (1.0, 1 / 3, 2.730856e18, 9.999994e20):
        one = Candidates.of(n_active=[1e9], tokens=[1e10], cost=[cost])
        with pytest.raises(LawError) as caught:
            next_runs(dense(), 0.5 * cost, candidates=one)
        named = float(str(caught.value).rstrip(".").rpartition(" ")[2])
        assert cost <= named <= cost * 1.00002
        assert len(next_runs(dense(), named, candidates=one).runs) == 1
