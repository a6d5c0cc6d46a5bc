"""What chosen runs bring, against random ones. Prints the table of docs/howto/next-runs.md.

Two fits to simulated runs (the joint law on 150 runs of the design of arXiv 2608.10605, the dense
law on 60 runs), each with a fifth of the compute of its runs to spend on 15 more. It asserts
nothing; `tests/lawfit/test_design_simulated.py` does.
"""

from __future__ import annotations

import argparse

import numpy as np

from lawfit import (
    CHINCHILLA_EPOCH,
    MOSAIC_TABLE2,
    Candidates,
    ChoiceGoal,
    CoefficientGoal,
    FitResult,
    PredictionGoal,
    Runs,
    fit,
    next_runs,
    simulate_next_runs,
    simulated_runs,
)
from lawfit.published_runs import run_design

NOISE, MOST, SHARE = 0.0035, 15, 0.2


def fitted(law: object, columns: dict[str, np.ndarray], seed: int = 0) -> FitResult:
    """Fit a law to runs of it with noise."""
    rows = len(columns["n_active"])
    names = {name: name for name in columns} | {"loss": "loss"}
    table = {**columns, "loss": np.ones(rows)}
    runs = Runs.from_columns(table, names, convention="without embeddings", source="simulated")
    runs = simulated_runs(law, runs, NOISE, seed)  # type: ignore[arg-type]
    return fit(law, runs, objective="least_squares", starts=20)  # type: ignore[arg-type]


def joint() -> FitResult:
    """Fit the joint law to 150 runs drawn from the design of the paper."""
    design = run_design(fitted=False)
    chance = design.runs / design.runs.sum()
    at = np.random.default_rng(0).choice(len(chance), 150, p=chance)
    names = ("n_total", "n_active", "tokens", "expert_split")
    return fitted(MOSAIC_TABLE2, {name: getattr(design, name)[at] for name in names})


def dense() -> FitResult:
    """Fit the dense law to 60 runs, independent in size and tokens."""
    draw = np.random.default_rng(0)
    size = np.exp(draw.uniform(np.log(70e6), np.log(16e9), 60))
    tokens = np.exp(draw.uniform(np.log(5e9), np.log(500e9), 60))
    return fitted(CHINCHILLA_EPOCH, {"n_active": size, "tokens": tokens})


def level_choice(
    found: FitResult, active: list[float], sparsity: list[float], split: list[float], loss: float
) -> ChoiceGoal:
    """Architectures that the fitted law predicts one loss of, so that the choice is open."""
    size, parts = np.array(active), np.array(split)
    total = size / (1.0 - np.array(sparsity))
    tokens = found.law.tokens_for(loss, n_total=total, n_active=size, expert_split=parts)
    columns = {"n_total": total, "n_active": size, "tokens": tokens, "expert_split": parts}
    return ChoiceGoal(**{name: tuple(column.tolist()) for name, column in columns.items()})


def row(found: FitResult, title: str, goal: object, sets: int, designs: int) -> None:
    """Print one goal: expected and simulated, without runs, with those chosen, with random ones."""
    runs = found.train
    budget = SHARE * float((6.0 * runs.column("n_active") * runs.column("tokens")).sum())
    grid = Candidates.grid(runs)
    chosen = next_runs(found, budget, goal=goal, candidates=grid, most_runs=MOST)  # type: ignore[arg-type]
    rivals = [grid.random(budget, seed, most_runs=MOST) for seed in range(designs)]
    drawn = [
        simulate_next_runs(found, table, goal, sets=sets)  # type: ignore[arg-type]
        for table in (None, chosen, *rivals)
    ]
    if isinstance(goal, ChoiceGoal):
        expected = [chosen.regret_before or 0.0, chosen.regret_after or 0.0]
        size = [each.regret or 0.0 for each in drawn]
    else:
        errors = [(each.before, each.after) for each in chosen.errors]
        expected = np.exp(np.log(errors).mean(axis=0)).tolist()
        size = [float(np.exp(np.mean([np.log(x.size) for x in each.errors]))) for each in drawn]
    others = np.array(size[2:])
    share = "" if chosen.efficiency is None else f"{chosen.efficiency:.3f}"
    print(
        f"| {title} | {expected[0]:.3g} | {size[0]:.3g} | {expected[1]:.3g} | {size[1]:.3g} "
        f"| {np.median(others):.3g} ({others.min():.3g} to {others.max():.3g}) | {share} |",
        flush=True,
    )


def main() -> None:
    """Print every row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", type=int, default=2000)
    parser.add_argument("--designs", type=int, default=9)
    given = parser.parse_args()
    small, large = dense(), joint()
    size = [30e9, 70e9, 160e9, 370e9]
    rows: list[tuple[FitResult, str, object]] = [
        (small, "dense: all coefficients (geometric mean)", CoefficientGoal()),
        (small, "dense: `alpha`", CoefficientGoal(names=("alpha",))),
        (
            small,
            "dense: log L of 70 B on 1.4 T tokens",
            PredictionGoal(n_total=70e9, n_active=70e9, tokens=1.4e12, expert_split=1.0),
        ),
        (
            small,
            "dense: regret among 30, 70, 160, 370 B [nats/token]",
            level_choice(small, size, [0.0] * 4, [1.0] * 4, 1.99),
        ),
        (large, "joint: `eta`", CoefficientGoal(names=("eta",))),
        (large, "joint: `beta`", CoefficientGoal(names=("beta",))),
        (
            large,
            "joint: log L of 433 B with 17.9 B active, G = 4, on 1 T tokens",
            PredictionGoal(n_total=433e9, n_active=17.9e9, tokens=1e12, expert_split=4.0),
        ),
        (
            large,
            "joint: regret among four of 12 B active [nats/token]",
            level_choice(large, [12e9] * 4, [0.85, 0.94, 0.975, 0.94], [2.0, 4.0, 4.0, 8.0], 1.42),
        ),
    ]
    for found, title, goal in rows:
        row(found, title, goal, given.sets, given.designs)
    goal = CoefficientGoal(names=("e",))
    plan = next_runs(large, 1e21, goal=goal, most_runs=MOST)
    drawn = simulate_next_runs(large, None, goal, sets=given.sets)
    print(
        f"log e of the joint law, no new run: expected {plan.error('log e').before:.2g}, "
        f"simulated {drawn.error('log e').size:.2g}"
    )


if __name__ == "__main__":
    main()
