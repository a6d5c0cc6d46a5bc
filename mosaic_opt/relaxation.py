"""The convex relaxation of an envelope, as arrays: points, rows, and bounds checked by hand.

In ``x = (log N_tot, log(1-S), log D, log G)`` every law is a sum of exponentials of affine
functions with coefficients of at least 0, so it is convex, and every monomial constraint is a row
``A x <= b``. The relaxation keeps rows that no candidate breaks:

    6 (1-S) N_tot D tau(N_tot, 1-S, G) <= C_peak,   tau <= 1 / (MFU* eta_good) on each candidate

and the caps on tokens, the box of the candidates, and ladder cuts. Its least loss is a lower bound
of that of every candidate. No solver is trusted for it: :func:`certified_bound` and
:func:`hull_bound` are lower bounds for any point and any multipliers that they are given.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import fsum, inf, isfinite, log
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lawfit import ScalingLaw
from mosaic_opt.errors import MosaicError
from mosaic_opt.problem import Problem

Array = NDArray[np.float64]

MARGIN = 1e-11
"""What is taken off a bound, relative to the sum of the sizes of its terms [-].

Rounding of doubles, logarithms and exponentials moves a term by less than a hundredth of it."""

STEEPEST = 10.0
"""Largest exponent of a fitted monomial [-]; it keeps the linear programs bounded."""

LOOSE = 4.0
"""How far the box of log D lies beyond what candidates have, or may have; it must never bind."""

N, U, D, G = range(4)  # log N_tot, log(1-S), log D, log G


class Terms(NamedTuple):
    """A posynomial: ``sum of exp(logs + powers @ x)`` [nats/token]."""

    logs: Array  # (terms,)
    powers: Array  # (terms, 4)

    def values(self, x: Array) -> Array:
        """Return every term at a point (4,)."""
        return np.asarray(np.exp(self.logs + self.powers @ x), dtype=np.float64)


class Points(NamedTuple):
    """Candidates that are not known to be infeasible."""

    candidate: NDArray[np.int64]  # (n,) index in the problem
    x: Array  # (n, 4): with the tokens that the rule allows
    available: Array  # (n,) log of the tokens that the window allows
    loss: Array  # (n,) [nats/token]


class MonomialAbove(NamedTuple):
    """A monomial above data: ``log value = constant + powers @ features``."""

    constant: float
    powers: Array

    def at(self, features: Array) -> Array:
        """Return the logarithms at features (n, k)."""
        return np.asarray(self.constant + features @ self.powers, dtype=np.float64)


@dataclass(frozen=True)
class Program:
    """Minimise ``terms`` under ``rows @ x <= limits`` within a box; arrays as in the module."""

    terms: Terms
    names: tuple[str, ...]  # of the rows; equal names are parts of one constraint
    rows: Array  # (m, 4)
    limits: Array  # (m,)
    lower: Array  # (4,)
    upper: Array  # (4,)

    def with_row(self, name: str, row: Array, limit: float) -> Program:
        """Return the program with one row more."""
        return Program(
            self.terms,
            (*self.names, name),
            np.vstack([self.rows, row]),
            np.append(self.limits, limit),
            self.lower,
            self.upper,
        )


# ---------------------------------------------------------------- from a problem to points


def terms_of(law: ScalingLaw) -> Terms:
    """Return a law as a posynomial in ``(N_tot, 1-S, D, G)``; ``N_act = N_tot (1-S)``.

    Raises
    ------
    MosaicError
        A term has a coefficient below 0: the law is then no posynomial.
    """
    kept = []
    for term in law.terms:
        if term.coefficient < 0.0 or not isfinite(term.coefficient):
            raise MosaicError(
                f"The law's term {term.name!r} has the coefficient {term.coefficient:g}, so the "
                "law is no posynomial and has no convex relaxation; it must be at least 0."
            )
        if term.coefficient > 0.0:
            powers = (
                term.n_total + term.n_active,
                term.n_active,
                term.tokens,
                term.expert_split,
            )
            kept.append((log(term.coefficient), powers))
    return Terms(np.array([c for c, _ in kept]), np.array([p for _, p in kept], dtype=np.float64))


def points_of(problem: Problem, step_s: Array) -> Points:
    """Return the candidates that are feasible if their best steps take ``step_s`` [s].

    A step time that is a lower bound gives more tokens than there are, so whoever is left out is
    infeasible; inf stands for a candidate without a layout.
    """
    index, x, available, loss = [], [], [], []
    for i, seconds in enumerate(step_s):
        if not isfinite(seconds):
            continue
        budget = problem.tokens(i, float(seconds))
        if not budget.tokens > 0.0 or not isfinite(budget.tokens):
            continue
        total, active = log(problem.n_total(i)), log(problem.n_active(i))
        index.append(i)
        x.append((total, active - total, log(budget.tokens), log(problem.expert_split(i))))
        available.append(log(budget.available))
        loss.append(problem.loss(i, budget.tokens))
    return Points(
        np.array(index, dtype=np.int64),
        np.array(x, dtype=np.float64).reshape(-1, 4),
        np.array(available, dtype=np.float64),
        np.array(loss, dtype=np.float64),
    )


# ---------------------------------------------------------------- monomials above data


def monomial_above(features: Array, values: Array, at: Array | None = None) -> MonomialAbove:
    """Fit the tightest monomial that is nowhere below the data, by a linear program.

    Minimises ``sum_i log m(z_i)``, or ``log m(at)``, subject to ``log m(z_i) >= values_i``. What
    the program's tolerance leaves below the data is made good by the constant.

    Parameters
    ----------
    features : ndarray
        Logarithms of the variables, shape (n, k), n >= 1.
    values : ndarray
        Logarithms of the data, shape (n,).
    at : ndarray, optional
        The point (k,) at which it is tightest, in place of the mean of the data.
    """
    from scipy.optimize import linprog

    n, k = features.shape
    centre = features.mean(axis=0)
    moved = features - centre
    spread = np.abs(moved).max(axis=0)
    used = spread > 1e-9  # what does not vary has no exponent
    powers = np.zeros(k)
    target = moved.mean(axis=0) if at is None else at - centre
    if used.any():
        scaled = moved[:, used] / spread[used]
        found = linprog(
            np.append(target[used] / spread[used], 1.0),
            A_ub=-np.hstack([scaled, np.ones((n, 1))]),
            b_ub=-values,
            bounds=[*((-STEEPEST * s, STEEPEST * s) for s in spread[used]), (None, None)],
            method="highs",
        )
        if found.x is not None:  # else the constant alone: valid, and less tight
            powers[used] = found.x[:-1] / spread[used]
    lift = float(np.max(values - moved @ powers))
    lift += MARGIN * (1.0 + abs(lift) + float(np.abs(powers) @ (spread + np.abs(centre))))
    return MonomialAbove(lift - float(centre @ powers), powers)


def _cuts(x: Array) -> list[tuple[str, Array, float]]:
    """Return monomial inequalities between N_tot, 1-S and G that every candidate meets."""
    found = []
    for axis, name in ((N, "N_tot"), (U, "1-S"), (G, "G")):
        others = [a for a in (N, U, G) if a != axis]
        if np.ptp(x[:, axis]) < 1e-9 or not (np.ptp(x[:, others], axis=0) > 1e-9).any():
            continue
        for sign, word in ((1.0, "at most"), (-1.0, "at least")):
            above = monomial_above(x[:, others], sign * x[:, axis])
            row = np.zeros(4)
            row[axis], row[others] = sign, -above.powers
            found.append((f"ladder cut: {name} {word}", row, above.constant))
    return found


# ---------------------------------------------------------------- the program


def delivered_share(problem: Problem, points: Points) -> Array:
    """Return the logarithm of MFU* eta_good of each point, with MFU = 6 N_act D* / C_peak."""
    active = points.x[:, N] + points.x[:, U]
    return points.available + active + log(6.0 / problem.envelope.peak_compute_flop)


def compute_row(problem: Problem, points: Points, at: Array | None = None) -> tuple[Array, float]:
    """Return the row and limit of ``6 N_act D tau <= C_peak``, and so ``1/tau`` as a monomial.

    ``1/tau`` is at least MFU* eta_good on every point; goodput that differs between candidates is
    part of it. Several such rows are the one constraint in which tau is the maximum of their
    monomials, a generalised posynomial: ``max_k f_k <= C`` is ``f_k <= C`` for every k.
    """
    axes = [N, U, G]
    above = monomial_above(
        points.x[:, axes], delivered_share(problem, points), None if at is None else at[axes]
    )
    row = np.array([1.0, 1.0, 1.0, 0.0])
    row[axes] -= above.powers
    return row, log(problem.envelope.peak_compute_flop / 6.0) + above.constant


def token_caps(problem: Problem) -> dict[str, float]:
    """Return the caps of the token rule that the relaxation keeps, by name.

    Under ``grid`` the largest and the least listed ratio that the rule admits are caps.
    """
    rule = problem.envelope.tokens
    most = rule.max_tokens_per_parameter
    if rule.kind == "grid":
        most = max(r for r in rule.tokens_per_parameter if r <= (most or inf))
    caps = {
        "max_tokens": rule.max_tokens,
        "max_tokens_per_parameter": most,
        "min_tokens_per_parameter": rule.least_tokens_per_parameter or None,
    }
    return {name: value for name, value in caps.items() if value is not None}


_MOST_PER_PARAMETER = "max_tokens_per_parameter"

_CAP_ROWS = {
    "max_tokens": (1.0, np.array([0.0, 0.0, 1.0, 0.0])),
    _MOST_PER_PARAMETER: (1.0, np.array([-1.0, -1.0, 1.0, 0.0])),
    "min_tokens_per_parameter": (-1.0, np.array([1.0, 1.0, -1.0, 0.0])),
}


def program_of(problem: Problem, points: Points) -> Program:
    """Build the relaxation of a problem over points, of which there must be one at least.

    Raises
    ------
    MosaicError
        The law is no posynomial.
    """
    terms = terms_of(problem.envelope.law)
    slack = MARGIN * 100.0  # of logarithms of up to 100
    row, limit = compute_row(problem, points)
    named = [("compute", row, limit)]
    caps = token_caps(problem)
    for name, cap in caps.items():
        sign, direction = _CAP_ROWS[name]
        named.append((name, direction, sign * log(cap)))
    named += _cuts(points.x)
    lower, upper = points.x.min(axis=0), points.x.max(axis=0)
    # under a grid a candidate may have far fewer tokens than the program allows it
    most = [points.available.max(), log(caps.get("max_tokens", inf))]
    most.append((points.x[:, N] + points.x[:, U]).max() + log(caps.get(_MOST_PER_PARAMETER, inf)))
    lower[D], upper[D] = lower[D] - LOOSE, min(most) + LOOSE
    for axis, name in ((N, "N_tot"), (U, "1-S"), (G, "G")):
        unit = np.eye(4)[axis]
        named.append((f"box: {name} at most", unit, upper[axis]))
        named.append((f"box: {name} at least", -unit, -lower[axis]))
    return Program(
        terms,
        tuple(name for name, _, _ in named),
        np.array([r for _, r, _ in named], dtype=np.float64),
        np.array([b for _, _, b in named], dtype=np.float64) + slack,
        lower - slack,
        upper + slack,
    )


def without_opposites(program: Program, multipliers: Array) -> Array:
    """Take off what the multipliers of two opposite rows have in common.

    Of ``a x <= b`` and ``-a x <= c`` with ``b + c >= 0`` an equal part t of both adds
    ``-t (b + c)``, which is never above 0, to the bound. Where both bind (one listed ratio is the
    largest and the least) t is arbitrary; without it each multiplier is the price of its own row.
    """
    kept = multipliers.copy()
    for i in range(len(kept)):
        for j in range(i + 1, len(kept)):
            common = min(kept[i], kept[j])
            if common > 0.0 and np.array_equal(program.rows[i], -program.rows[j]):
                kept[i] -= common
                kept[j] -= common
    return kept


# ---------------------------------------------------------------- bounds that trust no solver


def certified_bound(program: Program, x: Array, multipliers: Array) -> float:
    """Return a lower bound of the program's least loss, for any point and multipliers [nats/token].

    With y = max(multipliers, 0) and the tangent of the convex loss at x, weak duality gives for
    every z of the program ``L(z) >= L(x) + y (A x - b) + r (z - x)``, ``r = grad L(x) + A' y``.
    The last part is at least its minimum over the box. At an optimum with its multipliers this
    is the optimum. The margin of rounding is taken off. -inf where an argument is not finite.
    """
    y = np.maximum(np.asarray(multipliers, dtype=np.float64), 0.0)
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return -inf
    point = np.clip(x, program.lower, program.upper)
    values = program.terms.values(point)
    residual = values @ program.terms.powers + y @ program.rows
    over_box = np.minimum(residual * (program.lower - point), residual * (program.upper - point))
    rows = y * (program.rows @ point - program.limits)
    sizes = y * (np.abs(program.rows) @ np.abs(point) + np.abs(program.limits))
    width = program.upper - program.lower
    gradient_sizes = values @ np.abs(program.terms.powers) + y @ np.abs(program.rows)
    size = fsum([*values, *sizes, float(gradient_sizes @ width)])
    bound = fsum([*values, *rows, *over_box]) - MARGIN * size
    return bound if isfinite(bound) else -inf


def hull_bound(terms: Terms, points: Array, x: Array) -> float:
    """Return a lower bound of the loss over the convex hull of points (n, 4) [nats/token].

    The tangent at x, at its least vertex: a bound for any x, and the optimum at the optimum.
    """
    if not np.isfinite(x).all():
        return -inf
    values = terms.values(x)
    gradient = values @ terms.powers
    size = fsum([*values, *np.abs(gradient * np.abs(points - x).max(axis=0))])
    bound = fsum(values) + float(np.min((points - x) @ gradient)) - MARGIN * size
    return bound if isfinite(bound) else -inf
