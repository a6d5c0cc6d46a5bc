"""The laws that the small sweep is fitted with, and the price of a step by its own timings."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from lawfit import Bootstrap, FitResult, Runs, bootstrap, fit
from moe_ref import SweepRow
from perfmodel import Architecture

HOLDOUT = "nact:0.15"
DRAWS = 500
CONVENTION = "without_embedding_and_head"


def runs_of(rows: Sequence[SweepRow]) -> Runs:
    """Return the rows as `lawfit` takes them."""
    names = ("n_total", "n_active", "tokens", "expert_split", "loss", "id")
    return Runs.from_columns(
        {name: [getattr(row, name) for row in rows] for name in names},
        {name: name for name in names},
        convention=CONVENTION,
        source="the small sweep of benchmarks/mini_sweep.py",
    )


def seed_noise(rows: Sequence[SweepRow]) -> tuple[float, int]:
    """Return the deviation of ``log L`` between seeds, pooled over shapes, and its freedom [-].

    Rows that differ in their seed alone are a group; groups of one say nothing.
    """
    groups: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        groups[row.id.rpartition("-s")[0]].append(math.log(row.loss))
    repeated = [np.array(group) for group in groups.values() if len(group) > 1]
    freedom = sum(len(group) - 1 for group in repeated)
    squares = sum(float(((group - group.mean()) ** 2).sum()) for group in repeated)
    return math.sqrt(squares / freedom), freedom


def fitted(kind: str, rows: Sequence[SweepRow], noise: float) -> FitResult:
    """Fit a law to the grid, the tenth with most active parameters of each split held out.

    Least squares, because no run is left out as an outlier and none was stopped early.
    """
    return fit(kind, runs_of(rows), objective="least_squares", holdout=HOLDOUT, noise=noise)


def intervals(found: FitResult) -> Bootstrap:
    """Return converged refits for the intervals of the coefficients."""
    return bootstrap(found, draws=DRAWS, seed=0)


def residuals(found: FitResult, *, held: bool) -> np.ndarray:
    """Return predicted over measured loss, less 1, of the runs fitted or held out."""
    runs = found.held if held else found.train
    if runs is None:
        return np.zeros(0)
    names = ("n_total", "n_active", "tokens", "expert_split")
    predicted = found.law.loss(**{name: runs.column(name) for name in names})
    return np.asarray(predicted / runs.column("loss") - 1.0)


@dataclass(frozen=True)
class StepTimes:
    """Seconds of processor of a training step, fitted to the sweep's own runs.

    ``t = fixed + expert E L_moe + product 6 N_act T + optimizer N_tot``: what a step takes whatever
    the shape, what each expert adds (small products, one after the other), the products, and the
    optimizer, which passes over every parameter. Coefficients are least squares of the relative
    error, none below 0.

    Attributes
    ----------
    fixed, expert, product, optimizer : float
        [s], [s/expert], [s/FLOP], [s/parameter].
    tokens : int
        T of a step [token].
    error : float
        Root mean square of the relative error over the runs of the fit [-].
    error_largest : float
        The same over the runs of the largest width, priced by a fit without them [-].
    """

    fixed: float
    expert: float
    product: float
    optimizer: float
    tokens: int
    error: float
    error_largest: float

    def of(self, architecture: Architecture) -> float:
        """Return the time of a step of a shape [s]."""
        parts = _parts(
            architecture.n_experts * architecture.n_moe_layers,
            architecture.n_active(),
            architecture.n_total(),
            self.tokens,
        )
        return float(parts @ np.array([self.fixed, self.expert, self.product, self.optimizer]))


def seconds_of_step(row: SweepRow) -> float:
    """Return the processor time of a step, the mean of the run [s]."""
    return row.cpu_s * row.sequences * row.seq_len / row.tokens


def step_times(rows: Sequence[SweepRow]) -> StepTimes:
    """Fit the time of a step to the processor time of the runs."""
    (tokens,) = {row.sequences * row.seq_len for row in rows}
    parts = np.array(
        [
            _parts(row.n_experts * (row.n_layers - 1), row.n_active, row.n_total, tokens)
            for row in rows
        ]
    )
    taken = np.array([seconds_of_step(row) for row in rows])
    widths = np.array([row.d_model for row in rows])
    small = widths < widths.max()

    def solved(at: np.ndarray) -> np.ndarray:
        return nnls(parts[at] / taken[at, None], np.ones(int(at.sum())))[0]

    every = np.ones(len(rows), dtype=bool)
    found, without = solved(every), solved(small)

    def error(by: np.ndarray, at: np.ndarray) -> float:
        return float(np.sqrt(np.mean((parts[at] @ by / taken[at] - 1.0) ** 2)))

    return StepTimes(*found.tolist(), tokens, error(found, every), error(without, ~small))


def _parts(experts: float, n_active: float, n_total: float, tokens: int) -> np.ndarray:
    return np.array([1.0, experts, 6.0 * n_active * tokens, n_total])
