"""Appendix D.3 of arXiv 2608.10605 on plain arrays: slopes, stationarity, exponents, paths.

Coordinates are ``N = N_tot``, ``r = 1 - S``, ``G``, and the tokens ``D``. Near an optimum

    MFU* = m0 (N/N0)^w_N (r/r0)^w_S (G/G0)^-w_G,    6 N r D = C_peak MFU*

and the four terms of the joint law (10) are in fixed ratios (28). MFU* includes the goodput here,
which may depend on the candidate.
"""

from __future__ import annotations

from math import exp, log
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lawfit import JointLaw

FloatArray = NDArray[np.float64]
COORDINATES = ("n_total", "one_minus_s", "expert_split")
MIN_SPREAD = 1e-9  # of a logarithm, under which a coordinate counts as fixed


class Geometry(NamedTuple):
    """Candidates in the coordinates of the law, and their best MFU; arrays of shape (n,)."""

    n_total: FloatArray
    one_minus_s: FloatArray
    expert_split: FloatArray
    mfu: FloatArray

    @property
    def logs(self) -> FloatArray:
        """Natural logarithms of (N, r, G), of shape (n, 3)."""
        return np.log(np.column_stack(self[:3]))


class Slopes(NamedTuple):
    """Local slopes of log MFU*, with their standard errors and the error of the fit."""

    w_n: float  # d log MFU / d log N
    w_s: float  # d log MFU / d log r
    w_g: float  # -d log MFU / d log G
    w_n_error: float
    w_s_error: float
    w_g_error: float
    log_mfu: float  # of the fit, at the anchor
    rms: float  # weighted root mean square of log MFU left over
    points: int


class Point(NamedTuple):
    """A model, its tokens, and the budget that pays for it."""

    n_total: float
    one_minus_s: float
    expert_split: float
    tokens: float
    budget: float  # C_peak [FLOP]


class Exponents(NamedTuple):
    """Exponents of (29), the first three of the law alone, and nu of (30)."""

    p: float  # r ~ N^p
    rho: float  # D ~ N^rho
    g: float  # G ~ N^g
    nu: float  # N ~ C^nu


class Conditions(NamedTuple):
    """Left-hand sides that must be above 0 for an optimum inside a regime, see (28)."""

    n_total: float  # 1 - w_N - gamma w_G / eta
    one_minus_s: float  # 1 - w_S - delta w_G / eta
    expert_split: float  # w_G

    @property
    def hold(self) -> bool:
        """Whether all are above 0."""
        return min(self) > 0.0


def fit_slopes(geometry: Geometry, anchor: int, bandwidth: float) -> Slopes | None:
    """Fit the local slopes of log MFU* by weighted least squares.

    Weights are ``exp(-d^2 / (2 h^2))`` in the distance ``d`` from the anchor in (log N, log r,
    log G). Standard errors are those of weighted least squares with a residual variance estimated
    from the weights' effective number of points.

    Parameters
    ----------
    geometry : Geometry
        The candidates of one regime.
    anchor : int
        Its row that the slopes are taken at.
    bandwidth : float
        h [-], in natural logarithms: log(2) is a factor of 2.

    Returns
    -------
    Slopes or None
        None where the candidates do not determine three slopes and their error: fewer than five,
        or all in one plane.
    """
    x = geometry.logs - geometry.logs[anchor]
    weights = np.exp(-0.5 * np.sum(x * x, axis=1) / bandwidth**2)
    kept = weights > 1e-6
    design = np.column_stack([np.ones(int(kept.sum())), x[kept]])
    w, y = weights[kept], np.log(geometry.mfu[kept])
    root = np.sqrt(w)[:, None]
    if len(w) < 5 or np.linalg.matrix_rank(root * design, tol=1e-6) < 4:
        return None
    solution, *_ = np.linalg.lstsq(root * design, root[:, 0] * y, rcond=None)
    residual = y - design @ solution
    inverse = np.linalg.inv(design.T @ (w[:, None] * design))
    hat = np.einsum("ij,jk,ik->i", design, inverse, design) * w
    mean_square = float(np.sum(w * residual**2) / np.sum(w))
    # degrees of freedom left, by the leverage of each point
    spare = float(np.sum(w * (1.0 - hat)) / np.sum(w))
    variance = mean_square / max(spare, 1e-12)
    sandwich = inverse @ (design.T @ ((w**2)[:, None] * design)) @ inverse
    errors = np.sqrt(np.maximum(np.diag(sandwich) * variance, 0.0))
    return Slopes(
        w_n=float(solution[1]),
        w_s=float(solution[2]),
        w_g=-float(solution[3]),
        w_n_error=float(errors[1]),
        w_s_error=float(errors[2]),
        w_g_error=float(errors[3]),
        log_mfu=float(solution[0]),
        rms=mean_square**0.5,
        points=len(w),
    )


def conditions(law: JointLaw, slopes: Slopes) -> Conditions:
    """Return the sign conditions of (28)."""
    per_eta = slopes.w_g / law.eta
    return Conditions(
        n_total=1.0 - slopes.w_n - law.gamma * per_eta,
        one_minus_s=1.0 - slopes.w_s - law.delta * per_eta,
        expert_split=slopes.w_g,
    )


def exponents(law: JointLaw, slopes: Slopes) -> Exponents:
    """Return the exponents of (29) and (30)."""
    p, rho = law.alpha / law.lambda_, law.alpha / law.beta
    g = (law.alpha - law.gamma - law.alpha * law.delta / law.lambda_) / law.eta
    inverse = (1.0 - slopes.w_n) + (1.0 - slopes.w_s) * p + rho + slopes.w_g * g
    return Exponents(p, rho, g, 1.0 / inverse)


def residuals(law: JointLaw, slopes: Slopes, point: Point) -> Conditions:
    """Return by how much (28) misses at a point, in shares of ``beta L_data``.

    They are the derivatives of the loss along log N, log r and log G at a fixed budget, combined
    as in (28): left side minus right side over ``beta L_data``. All are 0 at an optimum of the
    continuous problem; at a discrete one they say how far the grid is from it.
    """
    n, r, g, tokens, _ = point
    data = law.beta * law.b * tokens**-law.beta
    capacity = law.alpha * law.a * n**-law.alpha
    sparsity = law.lambda_ * law.c * r**-law.lambda_
    interaction = law.eta * law.j * n**-law.gamma * r**-law.delta * g**-law.eta
    needed = conditions(law, slopes)
    return Conditions(
        n_total=capacity / data - needed.n_total,
        one_minus_s=sparsity / data - needed.one_minus_s,
        expert_split=interaction / data - needed.expert_split,
    )


def stationary_point(law: JointLaw, slopes: Slopes, anchor: Point) -> Point | None:
    """Return the continuous optimum at the anchor's budget, in closed form.

    By (28) the loss terms are fixed multiples of ``L_cap``, so r, D and G are powers of N, and the
    budget, linear in logarithms, gives N.

    Parameters
    ----------
    law : JointLaw
    slopes : Slopes
        Taken at the anchor, whose N, r and G are N0, r0 and G0.
    anchor : Point

    Returns
    -------
    Point or None
        None where a sign condition fails: there is no optimum inside the regime.
    """
    needed = conditions(law, slopes)
    if not (needed.hold and min(law.a, law.c, law.j, law.lambda_, law.eta) > 0.0):
        return None
    p, rho, g, nu = exponents(law, slopes)
    # logarithms of r, D and G at N = 1
    data = log(law.alpha * law.a / (law.beta * needed.n_total))  # of L_data, at N = 1
    r1 = (log(law.c * law.lambda_ / (law.beta * needed.one_minus_s)) - data) / law.lambda_
    d1 = (log(law.b) - data) / law.beta
    interaction = log(law.beta * needed.expert_split / law.eta) + data
    g1 = (log(law.j) - law.delta * r1 - interaction) / law.eta
    n0, r0, g0 = (log(x) for x in anchor[:3])
    budget = log(anchor.budget / 6.0) + slopes.log_mfu
    at_one = (
        (r1 + d1) + slopes.w_n * n0 - slopes.w_s * (r1 - r0) + slopes.w_g * (g1 - g0)
    )  # log(6 N r D / (C MFU)) at N = 1, with its budget left out
    log_n = nu * (budget - at_one)
    return Point(
        n_total=exp(log_n),
        one_minus_s=exp(r1 + p * log_n),
        expert_split=exp(g1 + g * log_n),
        tokens=exp(d1 + rho * log_n),
        budget=anchor.budget,
    )


def along(exponents_: Exponents, start: Point, budget: float) -> Point:
    """Follow the path (30) from a point on it to another budget."""
    p, rho, g, nu = exponents_
    step = nu * log(budget / start.budget)
    return Point(
        n_total=start.n_total * exp(step),
        one_minus_s=start.one_minus_s * exp(p * step),
        expert_split=start.expert_split * exp(g * step),
        tokens=start.tokens * exp(rho * step),
        budget=budget,
    )


def losses_at(law: JointLaw, geometry: Geometry, budget: float) -> FloatArray:
    """Return the loss of every candidate at a budget, its tokens by (26) [nats/token]."""
    n, r, g, mfu = geometry
    losses: FloatArray = law.loss(
        n_total=n, n_active=n * r, tokens=budget * mfu / (6.0 * n * r), expert_split=g
    )
    return losses


def best_at_budget(law: JointLaw, geometry: Geometry, budget: float) -> tuple[int, Point]:
    """Return the row and the point of the discrete optimum at a budget."""
    row = int(np.argmin(losses_at(law, geometry, budget)))
    n, r, g, mfu = (float(column[row]) for column in geometry)
    return row, Point(n, r, g, budget * mfu / (6.0 * n * r), budget)


class Edge(NamedTuple):
    """A side of the candidates' hull that a candidate lies on."""

    coordinate: str
    side: str  # "least", "largest" or "fixed"


def edges(logs: FloatArray, row: int) -> tuple[Edge, ...]:
    """Name the sides of the convex hull of the candidates that one of them lies on.

    Parameters
    ----------
    logs : ndarray, shape (n, 3)
        Candidates in (log N, log r, log G).
    row : int
        The candidate.

    Returns
    -------
    tuple of Edge
        A facet is named after the coordinate that most sets its direction. Empty where the
        candidate lies strictly inside. A coordinate that does not vary is "fixed".
    """
    spread = np.ptp(logs, axis=0)
    free = np.flatnonzero(spread > MIN_SPREAD)
    found = [Edge(COORDINATES[i], "fixed") for i in range(3) if i not in free]
    scaled = (logs[:, free] - logs[:, free].mean(axis=0)) / spread[free]
    if len(free) == 1:
        normals = np.array([[-1.0], [1.0]])
        offsets = np.array([scaled.min(), -scaled.max()])
    elif len(free) == 0:
        return tuple(found)
    else:
        from scipy.spatial import ConvexHull, QhullError

        try:
            hull = ConvexHull(scaled)
        except (QhullError, ValueError):  # too few, or all in one plane
            return (*found, *(Edge(COORDINATES[i], "fixed") for i in free))
        normals, offsets = hull.equations[:, :-1], hull.equations[:, -1]
    touching = normals[np.abs(normals @ scaled[row] + offsets) < 1e-7]
    for normal in touching:
        axis = int(np.argmax(np.abs(normal)))
        edge = Edge(COORDINATES[free[axis]], "largest" if normal[axis] > 0.0 else "least")
        if edge not in found:
            found.append(edge)
    return tuple(found)
