"""Which runs to train next, by simulation: fits to drawn losses, against random designs."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from lawfit import (
    CHINCHILLA_EPOCH,
    MOSAIC_TABLE2,
    Candidates,
    ChoiceGoal,
    CoefficientGoal,
    FitResult,
    NextRuns,
    PredictionGoal,
    fit,
    next_runs,
    simulate_next_runs,
)

from .fit_tables import NOISE, dense_points, joint_runs, simulated

MOST = 15
"""Runs of every design."""

Goal = CoefficientGoal | PredictionGoal | ChoiceGoal


@cache
def fitted_to(kind: str) -> FitResult:
    """The fit of one set of noisy runs: the design knows no more of the truth."""
    if kind == "joint":
        return fit("joint", joint_runs(), objective="least_squares", starts=[MOSAIC_TABLE2] * 2)
    runs = simulated(CHINCHILLA_EPOCH, dense_points(60), NOISE, 0)
    return fit("chinchilla", runs, objective="least_squares", starts=[CHINCHILLA_EPOCH] * 2)


def budget_of(kind: str) -> float:
    """A fifth of what the runs of the fit cost."""
    runs = fitted_to(kind).train
    return 0.2 * float((6.0 * runs.column("n_active") * runs.column("tokens")).sum())


def choice(kind: str) -> ChoiceGoal:
    """Architectures far above the runs, that the fitted law cannot tell apart."""
    if kind == "joint":
        active = np.full(4, 12e9)
        total = active / (1.0 - np.array([0.85, 0.94, 0.975, 0.94]))
        split, loss = np.array([2.0, 4.0, 4.0, 8.0]), 1.42
    else:
        active = total = np.array([30e9, 70e9, 160e9, 370e9])
        split, loss = np.ones(4), 1.99
    tokens = fitted_to(kind).law.tokens_for(
        loss, n_total=total, n_active=active, expert_split=split
    )
    columns = {"n_total": total, "n_active": active, "tokens": tokens, "expert_split": split}
    return ChoiceGoal(**{name: tuple(column.tolist()) for name, column in columns.items()})


GOALS: dict[str, Goal] = {
    "all": CoefficientGoal(),
    "alpha": CoefficientGoal(names=("alpha",)),
    "beta": CoefficientGoal(names=("beta",)),
    "eta": CoefficientGoal(names=("eta",)),
    "dense prediction": PredictionGoal(
        n_total=70e9, n_active=70e9, tokens=1.4e12, expert_split=1.0
    ),
    "sparse prediction": PredictionGoal(
        n_total=433e9, n_active=17.9e9, tokens=1e12, expert_split=4.0
    ),
}


def chosen(kind: str, goal: Goal) -> NextRuns:
    return next_runs(fitted_to(kind), budget_of(kind), goal=goal, most_runs=MOST)


def random_designs(kind: str, number: int) -> list[Candidates]:
    grid = Candidates.grid(fitted_to(kind).train)
    return [grid.random(budget_of(kind), seed, most_runs=MOST) for seed in range(number)]


def sizes(kind: str, goal: Goal, sets: int, designs: int) -> tuple[float, float, float]:
    """Simulated errors of what a goal names: without runs, with those chosen, random median.

    The geometric mean where it names several.
    """
    found = fitted_to(kind)
    tables = [None, chosen(kind, goal), *random_designs(kind, designs)]
    drawn = [simulate_next_runs(found, table, goal, sets=sets) for table in tables]
    all_ = [float(np.exp(np.mean([np.log(x.size) for x in each.errors]))) for each in drawn]
    return all_[0], all_[1], float(np.median(all_[2:]))


FAST = [("chinchilla", "all", 0.95), ("chinchilla", "alpha", 0.93), ("joint", "eta", 0.8)]
SLOW = [
    ("joint", "all", 0.9),
    ("chinchilla", "beta", 0.97),
    ("chinchilla", "dense prediction", 0.94),
    ("joint", "beta", 0.95),
    ("joint", "sparse prediction", 0.93),
]


@pytest.mark.parametrize(
    ("kind", "goal", "sets", "ratio"),
    [
        *((kind, goal, 150, ratio) for kind, goal, ratio in FAST),
        *(
            pytest.param(kind, goal, 1500, ratio, marks=pytest.mark.slow)
            for kind, goal, ratio in (*FAST, *SLOW)
        ),
    ],
)
def test_the_spread_is_below_that_of_random_designs(
    kind: str, goal: str, sets: int, ratio: float
) -> None:
    """The old runs have the same noise in every design, so that 150 sets tell designs apart."""
    before, own, random = sizes(kind, GOALS[goal], sets, 5)
    assert own < ratio * random
    assert random < before


@pytest.mark.parametrize(
    ("kind", "sets", "tolerance"),
    [
        ("chinchilla", 400, 0.12),
        pytest.param("chinchilla", 4000, 0.06, marks=pytest.mark.slow),
        pytest.param("joint", 4000, 0.15, marks=pytest.mark.slow),
    ],
)
def test_expected_errors_are_the_simulated_ones(kind: str, sets: int, tolerance: float) -> None:
    """Sampling is 3.5 % of 400 sets; the rest is what the linear approximation leaves.

    Of the joint law ``e`` is left out: it runs to 0 in some sets, and its logarithm to its bound.
    """
    found = fitted_to(kind)
    goals = [GOALS["dense prediction" if kind == "chinchilla" else "sparse prediction"]]
    for goal in (CoefficientGoal(), *goals):
        design = chosen(kind, goal)
        for runs, side in ((None, "before"), (design, "after")):
            drawn = simulate_next_runs(found, runs, goal, sets=sets)
            assert drawn.not_converged == 0
            for expected in design.errors:
                if (kind, expected.name) == ("joint", "log e"):
                    continue
                size = drawn.error(expected.name).size
                assert getattr(expected, side) == pytest.approx(size, rel=tolerance)


@pytest.mark.parametrize("objective", ["huber", "least_squares"])
def test_expected_errors_hold_for_either_objective(objective: str) -> None:
    """A Huber fit of half-width 1e-3 is nearly one of absolute deviations: errors are larger."""
    runs = fitted_to("chinchilla").train
    found = fit("chinchilla", runs, objective=objective, starts=[CHINCHILLA_EPOCH])  # type: ignore[arg-type]
    goal = CoefficientGoal(names=("alpha", "beta"))
    design = next_runs(found, budget_of("chinchilla"), goal=goal, most_runs=MOST, noise=NOISE)
    drawn = simulate_next_runs(found, design, goal, sets=400, noise=NOISE)
    for expected in design.errors:
        assert expected.after == pytest.approx(drawn.error(expected.name).size, rel=0.12)


def regrets(kind: str, sets: int, designs: int) -> tuple[NextRuns, list[float], list[float]]:
    """The design for a choice, and the regrets with no runs, its own, random ones; their errors."""
    found, goal = fitted_to(kind), choice(kind)
    design = chosen(kind, goal)
    tables = [None, design, *random_designs(kind, designs)]
    drawn = [simulate_next_runs(found, table, goal, sets=sets) for table in tables]
    means = [each.regret for each in drawn]
    errors = [each.regret_uncertainty for each in drawn]
    assert None not in means
    assert None not in errors
    return design, [float(x or 0.0) for x in means], [float(x or 0.0) for x in errors]


@pytest.mark.parametrize(
    ("kind", "sets", "designs"),
    [
        ("chinchilla", 400, 3),
        pytest.param("chinchilla", 3000, 5, marks=pytest.mark.slow),
        pytest.param("joint", 3000, 5, marks=pytest.mark.slow),
    ],
)
def test_the_regret_of_a_choice_is_below_that_of_random_designs(
    kind: str, sets: int, designs: int
) -> None:
    design, (before, own, *random), (error_before, error_own, *_) = regrets(kind, sets, designs)
    assert own < 0.8 * float(np.median(random))
    assert float(np.median(random)) < before
    assert design.regret_before is not None
    assert design.regret_after is not None
    # within three standard errors of the simulation, and a tenth for the linear approximation
    assert abs(design.regret_before - before) < 3.0 * error_before + 0.1 * before
    assert abs(design.regret_after - own) < 3.0 * error_own + 0.1 * own
