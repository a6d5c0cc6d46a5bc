"""What a design is chosen by: variances of linear functions, or the regret of a choice.

A criterion is a function of how often each candidate is run, ``n``, by the information
``M = 1 + sum_j n_j u_j u_j'`` (:mod:`lawfit._information`). Arrays have a leading axis of views:
the same criterion at other laws, over which it is averaged.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from lawfit._values import FloatArray

SAMPLE = 512
"""Points of the quasi-random normal sample of a regret."""


class Criterion(Protocol):
    """A number to make small."""

    def value(self, counts: FloatArray) -> float:
        """Return it at counts of shape (candidates,)."""

    def after_each(self, counts: FloatArray) -> FloatArray:
        """Return it after one more run of each, shape (candidates,)."""


class LogVariance(NamedTuple):
    """Mean over the views of ``log det(K' M^-1 K) / s``: D-, D_s- and, with s = 1, c-optimality.

    It is convex in ``n`` (Pukelsheim, Optimal Design of Experiments, 1993, chapter 5).

    Attributes
    ----------
    runs : ndarray of shape (views, candidates, free)
        ``u``.
    goal : ndarray of shape (views, s, free)
        Rows of ``K'``.
    """

    runs: FloatArray
    goal: FloatArray

    def value(self, counts: FloatArray) -> float:
        """Return it [-]; its exponential is a variance, the s-th root of a determinant."""
        return self._of(_inverse_on(self.runs, counts, self.goal))

    def after_each(self, counts: FloatArray) -> FloatArray:
        """Return it after one more run of each, by the rank of one of the change."""
        solved = _inverse_on(self.runs, counts, self.runs)
        own = (self.runs * solved.swapaxes(1, 2)).sum(axis=2)
        left = _inverse_on(self.runs, counts, self.goal)
        inside = self._toward(left) / (1.0 + own)
        return self._of(left) + self._mean(np.log1p(-inside))

    def sensitivity(self, counts: FloatArray) -> FloatArray:
        """Return minus its derivatives in the counts, shape (candidates,)."""
        return self._mean(self._toward(_inverse_on(self.runs, counts, self.goal)))

    def _mean(self, values: FloatArray) -> FloatArray:
        return np.asarray(values.mean(axis=0) / self.goal.shape[1])

    def _of(self, left: FloatArray) -> float:
        """Return the value from ``M^-1 K``, shape (views, free, s)."""
        sizes = np.linalg.slogdet(np.matmul(self.goal, left))[1]
        return float(sizes.mean() / self.goal.shape[1])

    def _toward(self, left: FloatArray) -> FloatArray:
        """Return ``u' M^-1 K (K' M^-1 K)^-1 K' M^-1 u``, shape (views, candidates)."""
        across = np.matmul(self.runs, left)
        inner = np.linalg.inv(np.matmul(self.goal, left))
        return np.asarray((across * np.matmul(across, inner)).sum(axis=2))


class Regret(NamedTuple):
    """Expected loss of choosing after the runs, over that of the best architecture.

    With normal beliefs ``N(mu, G G')`` of the losses, the beliefs' mean after the runs will be
    ``N(mu, R)`` with ``R = G (1 - M^-1) G'``, and the regret

        E min of N(mu, R) - E min of N(mu, G G')

    (Raiffa and Schlaifer, Applied Statistical Decision Theory, 1961, chapter 5), mean over the
    views. Both expectations are over the same quasi-random sample.

    Attributes
    ----------
    runs : ndarray of shape (views, candidates, free)
        ``u``.
    spread : ndarray of shape (views, architectures, free)
        ``G`` [nats/token].
    mean : ndarray of shape (architectures,)
        ``mu`` [nats/token].
    sample : ndarray of shape (points, architectures)
        Of standard normals.
    square : ndarray of shape (views, architectures, architectures)
        ``G G'``.
    best : float
        Expected loss of the best architecture [nats/token].
    """

    runs: FloatArray
    spread: FloatArray
    mean: FloatArray
    sample: FloatArray
    square: FloatArray
    best: float

    @classmethod
    def of(
        cls, runs: FloatArray, spread: FloatArray, mean: FloatArray, sample: FloatArray
    ) -> Regret:
        """Return the regret of these beliefs."""
        square = np.asarray(np.matmul(spread, spread.swapaxes(1, 2)))
        best = float(_least(square, mean, sample).mean())
        return cls(runs, spread, mean, sample, square, best)

    def value(self, counts: FloatArray) -> float:
        """Return it [nats/token]."""
        return max(float(self._least(self._resolved(counts)).mean() - self.best), 0.0)

    def after_each(self, counts: FloatArray) -> FloatArray:
        """Return it after one more run of each [nats/token]."""
        solved = _inverse_on(self.runs, counts, self.runs)
        own = (self.runs.swapaxes(1, 2) * solved).sum(axis=1)
        across = np.matmul(self.spread, solved) / np.sqrt(1.0 + own)[:, None]
        now = self._resolved(counts)
        found = np.empty((len(self.runs), self.runs.shape[1]))
        for view, (start, steps) in enumerate(zip(now, across, strict=True)):
            found[view] = self._least(start + np.einsum("kc,lc->ckl", steps, steps))
        return np.asarray(found.mean(axis=0) - self.best)

    def _resolved(self, counts: FloatArray) -> FloatArray:
        """Return ``R``, shape (views, architectures, architectures)."""
        left = np.matmul(self.spread, _inverse_on(self.runs, counts, self.spread))
        return np.asarray(self.square - left)

    def _least(self, covariance: FloatArray) -> FloatArray:
        return _least(covariance, self.mean, self.sample)


def _least(covariance: FloatArray, mean: FloatArray, sample: FloatArray) -> FloatArray:
    """Return the expected least of normals of these covariances, shape (matrices,)."""
    values, vectors = np.linalg.eigh(covariance)
    root = (vectors * np.sqrt(np.maximum(values, 0.0))[:, None]) @ vectors.swapaxes(1, 2)
    drawn = np.matmul(sample, root) + mean
    return np.asarray(drawn.min(axis=2).mean(axis=1))


def normals(columns: int, seed: int, points: int = SAMPLE) -> FloatArray:
    """Return a scrambled Sobol sample of standard normals and its mirror, (points, columns)."""
    from scipy.special import ndtri
    from scipy.stats.qmc import Sobol

    drawn = Sobol(columns, seed=seed).random(points // 2)
    half = ndtri(np.clip(drawn, 1e-12, 1.0 - 1e-12))
    return np.concatenate([half, -half])


def _inverse_on(runs: FloatArray, counts: FloatArray, rows: FloatArray) -> FloatArray:
    """Return ``M^-1 rows'``, shape (views, free, rows)."""
    used = np.flatnonzero(counts)
    some = runs[:, used] * np.sqrt(counts[used])[:, None]
    information = np.eye(runs.shape[2]) + np.matmul(some.swapaxes(1, 2), some)
    return np.linalg.solve(information, rows.swapaxes(1, 2))
