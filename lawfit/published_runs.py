"""The runs behind Table 2 of arXiv 2608.10605, as far as its Appendix C tells.

The paper prints no list of runs. It prints how many each model family has, with their tokens
(Table 8), and the experts, top-K, sizes and sparsities at each expert split (Table 7). `run_design`
is every run that these allow, each family's count spread evenly over its own: a reconstruction,
ASSUMED, not the runs themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import gcd
from typing import NamedTuple

import numpy as np

from lawfit._values import FloatArray, LawError
from lawfit.published import MOSAIC_TABLE2
from lawfit.runs import Runs

__all__ = ["NOISE", "RunDesign", "ladder_sizes", "run_design", "sample_runs"]

N_RUNS = 150
"""Runs behind the law (Appendix C); Table 8 counts 151."""

NOISE = 0.0035
"""Standard deviation of ``log L`` around the law that the paper's R^2 and hold-out error imply [-].

Of 40 simulated sets, 0.003 gave R^2 = 0.9991 and a hold-out error of 0.0066 nats/token, 0.004 gave
0.9984 and 0.0084; the paper has 0.99877 and 0.00779.
"""

HELD_OUT = 0.1
"""Share of the runs at each expert split, those with most active parameters, outside the fit."""

EXPERTS = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
TOKENS_PER_PARAMETER = (10.8, 70.0)  # Table 6


class _Family(NamedTuple):
    """A row of Table 8; of the tokens the ends, and what Tables 6 and 7 name between them."""

    runs: int
    tokens: tuple[float, ...]
    n_total: tuple[float, float]
    expert_splits: tuple[int, ...]


class _Split(NamedTuple):
    """A row of Table 7."""

    experts: tuple[int, int]
    top_k: tuple[int, ...]
    n_total: tuple[float, float]
    n_active: tuple[float, float]
    sparsity: tuple[float, float]


_FAMILIES: Mapping[int, _Family] = {  # by q: 4q layers of width 512q
    2: _Family(52, (2.88e9, 3.84e9, 5.76e9, 7.68e9), (0.22e9, 7.14e9), (1, 2, 4, 6, 8)),
    3: _Family(56, (5.76e9, 11.52e9), (0.73e9, 25.20e9), (1, 2, 4, 6, 8)),
    4: _Family(39, (28.19e9, 56.38e9), (4.13e9, 45.66e9), (1, 2, 4, 8)),
    6: _Family(4, (50.0e9,), (40.16e9, 79.24e9), (4, 8)),
}

_SPLIT_8 = _Split((96, 512), (2, 4, 8), (0.71e9, 53.0e9), (0.104e9, 2.52e9), (0.85, 0.98))
_SPLITS: Mapping[int, _Split] = {
    1: _Split((8, 128), (1, 2), (0.54e9, 30.91e9), (0.152e9, 1.179e9), (0.72, 0.98)),
    2: _Split((32, 128), (1, 2), (0.95e9, 12.65e9), (0.124e9, 0.387e9), (0.87, 0.97)),
    4: _Split((12, 384), (2, 4, 6, 8), (0.22e9, 79.24e9), (0.110e9, 2.723e9), (0.50, 0.98)),
    6: _SPLIT_8,  # Table 7 has no row for it
    8: _SPLIT_8,
}


class RunDesign(NamedTuple):
    """Possible runs; arrays of shape (points,)."""

    n_total: FloatArray  # [parameter]
    n_active: FloatArray  # [parameter]
    tokens: FloatArray  # [token]
    expert_split: FloatArray  # [-]
    runs: FloatArray  # how many runs stand at the point, a fraction mostly [-]


def ladder_sizes(q: int, n_experts: int, top_k: int, expert_split: int) -> tuple[float, float]:
    """Return the total and the active non-embedding parameters of a model of the ladder.

    ``4q`` layers of width ``512q``, of which the first is dense; heads of 128 in up to 8 groups;
    feed-forward width ``2.5 d``, a G-th of it in each expert; one shared expert (Section 7.1 of
    arXiv 2608.10605). The gate of attention is not counted, the router is: so its Tables 4 to 9
    come out.

    Returns
    -------
    n_total, n_active : float
        [parameter]
    """
    layers, width = 4 * q, 512 * q
    feed_forward = 3.0 * width * 2.5 * width
    attention = 2.0 * width**2 + 256.0 * width * gcd(8, layers) + 2.0 * width
    fixed = layers * attention + feed_forward + width + (layers - 1) * n_experts * width
    expert = (layers - 1) * feed_forward / expert_split
    return fixed + (n_experts + 1) * expert, fixed + (top_k + 1) * expert


def _inside(value: float, interval: tuple[float, float]) -> bool:
    """Say whether a value lies in a printed interval, whose ends are rounded."""
    return 0.99 * interval[0] <= value <= 1.01 * interval[1]


def run_design(*, fitted: bool = True) -> RunDesign:
    """Return the runs that Appendix C allows, weighted so that each family has its count.

    Parameters
    ----------
    fitted : bool
        Without the `HELD_OUT` share, which no fit saw.
    """
    points = []
    for q, family in _FAMILIES.items():
        own = []
        for split, n_experts, top_k in product(family.expert_splits, EXPERTS, (1, 2, 4, 6, 8)):
            limits = _SPLITS[split]
            n_total, n_active = ladder_sizes(q, n_experts, top_k, split)
            if (
                top_k in limits.top_k
                and limits.experts[0] <= n_experts <= limits.experts[1]
                and _inside(n_total, limits.n_total)
                and _inside(n_total, family.n_total)
                and _inside(n_active, limits.n_active)
                and _inside(1.0 - n_active / n_total, limits.sparsity)
            ):
                own += [
                    (n_total, n_active, tokens, float(split))
                    for tokens in family.tokens
                    if _inside(tokens / n_active, TOKENS_PER_PARAMETER)
                ]
        points += [(*point, family.runs / len(own)) for point in own]
    columns = np.array(points, dtype=np.float64).T
    columns[-1] *= N_RUNS / columns[-1].sum()
    design = RunDesign(*columns)
    return _without_largest(design) if fitted else design


def sample_runs(rows: int = N_RUNS, *, noise: float = NOISE, seed: int = 0) -> Runs:
    """Draw runs of the design, with the losses of Table 2 and normal noise of ``log L``.

    Parameters
    ----------
    rows : int
        How many, at least 1; a point may come more than once.
    noise : float
        Standard deviation of ``log L`` [-], at least 0.
    seed : int
        Of points and noise.

    Raises
    ------
    LawError
        ``rows`` or ``noise`` is out of range.
    """
    if rows < 1 or not 0.0 <= noise < np.inf:
        raise LawError(
            f"rows is {rows} and noise {noise:g}, but rows must be at least 1 and noise a finite "
            "number of at least 0."
        )
    design = run_design(fitted=False)
    draw = np.random.default_rng(seed)
    at = draw.choice(len(design.runs), rows, p=design.runs / design.runs.sum())
    point = {name: getattr(design, name)[at] for name in RunDesign._fields[:4]}
    error = noise * draw.standard_normal(rows)
    loss = np.asarray(MOSAIC_TABLE2.loss(**point)) * np.exp(error)
    return Runs(
        **{name: tuple(values.tolist()) for name, values in point.items()},
        loss=tuple(loss.tolist()),
        weight=(1.0,) * rows,
        id=tuple(f"run {k}" for k in range(rows)),
        convention="without embeddings",
        source=f"a simulation of {MOSAIC_TABLE2.source}",
    )


def _without_largest(design: RunDesign) -> RunDesign:
    """Take the `HELD_OUT` share of the runs with most active parameters out at each split."""
    runs = design.runs.copy()
    for split in np.unique(design.expert_split):
        at = np.flatnonzero(design.expert_split == split)
        at = at[np.argsort(-design.n_active[at], kind="stable")]
        drop = HELD_OUT * runs[at].sum()
        above = np.cumsum(runs[at]) - runs[at]  # runs with more active parameters
        runs[at] -= np.clip(drop - above, 0.0, runs[at])
    kept = runs > 0.0
    return RunDesign(*(column[kept] for column in design._replace(runs=runs)))
