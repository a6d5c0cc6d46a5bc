"""How sure predictions of the published law are over its draws. Prints figures, asserts nothing.

The figures of `docs/theory/uncertainty.md`: standard deviations in the middle of the runs, at the
optimum of ``table3`` and of the difference of its two best candidates, for draws that keep to what
the runs allow and for coefficients drawn each from its printed interval.
"""

from __future__ import annotations

import numpy as np

from lawfit import MOSAIC_TABLE2, MOSAIC_TABLE2_PRINTED, LawEnsemble, published_ensemble
from mosaic_opt import BranchAndBound, Problem, example, solve

DRAWS, SEED = 500, 0
MIDDLE = {"n_total": 5e9, "n_active": 0.33e9, "tokens": 5.76e9, "expert_split": 4.0}


def independent() -> LawEnsemble:
    """Draw each coefficient from its printed interval, alone."""
    generator = np.random.default_rng(SEED)
    laws = []
    for _ in range(DRAWS):
        values = {}
        for name, row in MOSAIC_TABLE2_PRINTED.items():
            half = (float(row.interval[1]) - float(row.interval[0])) / 2.0 / 1.96
            values[name] = getattr(MOSAIC_TABLE2, name) + half * generator.standard_normal()
        laws.append(MOSAIC_TABLE2.model_copy(update=values))
    method = "each coefficient from its printed interval"
    return LawEnsemble(
        laws=tuple(laws), source="arXiv 2608.10605", method=method, basis="ASSUMED", seed=SEED
    )


def main() -> None:
    """Print every figure."""
    envelope = example("table3")
    problem = Problem(envelope)
    ties = solve(envelope, backend=BranchAndBound()).near_ties[:2]
    points = [
        {
            "n_total": float(problem.n_total(c.index)),
            "n_active": float(problem.n_active(c.index)),
            "tokens": c.tokens,
            "expert_split": problem.expert_split(c.index),
        }
        for c in ties
    ]
    for name, ensemble in (
        ("draws along the runs", published_ensemble(DRAWS, SEED)),
        ("intervals, each alone", independent()),
    ):
        first, second = (ensemble.loss(**point) for point in points)
        print(
            f"{name:22s} middle of the runs {np.std(ensemble.loss(**MIDDLE)):.4f}, optimum "
            f"{np.std(first):.4f}, difference of the two best {np.std(first - second):.4f} nats"
        )


if __name__ == "__main__":
    main()
