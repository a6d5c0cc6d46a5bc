"""Tables of runs that the tests of fits share."""

from __future__ import annotations

from functools import cache

import numpy as np

from lawfit import CHINCHILLA_EPOCH, AnyLaw, FitResult, Runs, ScalingLaw, fit
from lawfit.published_runs import NOISE, run_design, sample_runs


def table(
    n_total: np.ndarray,
    n_active: np.ndarray,
    tokens: np.ndarray,
    expert_split: np.ndarray,
    loss: np.ndarray,
    weight: np.ndarray | None = None,
) -> Runs:
    ones = np.ones(len(loss))
    return Runs(
        n_total=tuple(n_total.tolist()),
        n_active=tuple(n_active.tolist()),
        tokens=tuple(tokens.tolist()),
        expert_split=tuple((ones * expert_split).tolist()),
        loss=tuple(loss.tolist()),
        weight=tuple((ones if weight is None else weight).tolist()),
        id=tuple(f"run {k}" for k in range(len(loss))),
        convention="without embeddings",
        source="a simulation",
    )


def simulated(law: ScalingLaw, points: tuple[np.ndarray, ...], noise: float, seed: int) -> Runs:
    """Runs of a law at points, their losses off by a relative noise."""
    total, active, tokens, split = points
    loss = law.loss(n_total=total, n_active=active, tokens=tokens, expert_split=split)
    error = noise * np.random.default_rng(seed).standard_normal(len(total))
    return table(total, active, tokens, split, loss * np.exp(error))


@cache
def paper_points(rows: int = 150, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Runs drawn from the design of the paper's Appendix C."""
    design = run_design(fitted=False)
    chance = design.runs / design.runs.sum()
    at = np.random.default_rng(seed).choice(len(chance), rows, p=chance)
    return design.n_total[at], design.n_active[at], design.tokens[at], design.expert_split[at]


@cache
def dense_points(rows: int = 120, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Dense runs of 70 M to 16 B parameters and 5 B to 500 B tokens, independent in the logs."""
    draw = np.random.default_rng(seed)
    size = np.exp(draw.uniform(np.log(70e6), np.log(16e9), rows))
    tokens = np.exp(draw.uniform(np.log(5e9), np.log(500e9), rows))
    return size, size, tokens, np.ones(rows)


def joint_runs(noise: float = NOISE, seed: int = 0) -> Runs:
    return sample_runs(noise=noise, seed=seed)


def dense_runs(noise: float = NOISE, seed: int = 0, rows: int = 120) -> Runs:
    return simulated(CHINCHILLA_EPOCH, dense_points(rows), noise, seed)


@cache
def fitted(kind: str, seed: int = 0, delta: float = 1e-3) -> FitResult:
    runs = joint_runs(seed=seed) if kind == "joint" else dense_runs(seed=seed)
    return fit(kind, runs, delta=delta, starts=40)


def reasons(result: FitResult) -> list[str]:
    return [remark.reason for remark in result.warnings]


def predicted(law: AnyLaw, runs: Runs) -> np.ndarray:
    names = ("n_total", "n_active", "tokens", "expert_split")
    return law.loss(**{name: runs.column(name) for name in names})
