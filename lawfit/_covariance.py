"""Covariance of coefficients at the optimum of a fit."""

from __future__ import annotations

import numpy as np

from lawfit._misfit import curvature
from lawfit._values import FloatArray

_SINGULAR = 1e13
"""Condition of the scaled information from which there is no covariance."""


def sandwich(
    slopes: FloatArray, residual: FloatArray, weight: FloatArray, delta: float
) -> FloatArray | None:
    """Return the sandwich of M-estimation (Huber, Proc. 5th Berkeley Symp. 1:221, 1967).

    ``H^-1 V H^-1`` with ``V = sum w^2 psi^2 m m' n / (n - p)`` and ``H = sum w psi' m m'``, of
    which ``psi'`` is that of `curvature`.

    Parameters
    ----------
    slopes : ndarray of shape (runs, coefficients)
        Derivatives of the fitted function.
    residual, weight : ndarray of shape (runs,)
        Of the runs.
    delta : float
        Half-width of Huber's function, or inf.

    Returns
    -------
    ndarray of shape (coefficients, coefficients) or None
        None where the information is singular.
    """
    rows, size = slopes.shape
    scale = np.sqrt((weight[:, None] * slopes * slopes).sum(axis=0))
    if rows <= size or size == 0 or not (scale > 0.0).all():
        return None
    slopes = slopes / scale
    density = curvature(residual, weight, delta)
    inverse = _inverse(np.einsum("r,rp,rq->pq", density, slopes, slopes))
    if inverse is None:
        return None
    pull = weight * np.clip(residual, -delta, delta)
    middle = np.einsum("r,rp,rq->pq", pull * pull, slopes, slopes) * rows / (rows - size)
    return np.asarray(inverse @ middle @ inverse / np.outer(scale, scale))


def classical(slopes: FloatArray, residual: FloatArray, weight: FloatArray) -> FloatArray | None:
    """Return the covariance of least squares, ``s^2 (sum w m m')^-1``.

    ``s^2 = sum w r^2 / (n - p)``: the noise is alike in all runs of one weight, and the law true.
    Parameters and result are those of `sandwich`.
    """
    rows, size = slopes.shape
    root = np.sqrt(weight)[:, None] * slopes
    scale = np.sqrt((root * root).sum(axis=0))
    if rows <= size or size == 0 or not (scale > 0.0).all():
        return None
    # by singular values, which lose half as many digits as the inverse of the product
    _, sizes, vectors = np.linalg.svd(root / scale, full_matrices=False)
    if sizes[0] > 1e12 * sizes[-1]:
        return None
    noise = float((weight * residual**2).sum()) / (rows - size)
    back = vectors.T / sizes
    return np.asarray(noise * (back @ back.T) / np.outer(scale, scale))


def _inverse(information: FloatArray) -> FloatArray | None:
    values, vectors = np.linalg.eigh(information)
    if values[0] * _SINGULAR < values[-1]:
        return None
    return np.asarray((vectors / values) @ vectors.T)
