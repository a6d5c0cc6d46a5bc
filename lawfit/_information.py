r"""What runs say of a law: Fisher's information at a fitted law, in units of what is known.

Of one run with noise ``tau`` in ``log L`` the information is ``m m' / tau^2``, with ``m`` the
derivatives of ``log L`` in the parameters (:mod:`lawfit._posynomial`). Everything here stands in
coordinates in which the information of the runs of the fit is the identity, so that nothing is
lost to the condition of a ridge, and the variance of ``k' theta`` after more runs is

    k' (1 + sum_j n_j u_j u_j')^-1 k.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from lawfit._posynomial import Posynomial, posynomial
from lawfit._values import FloatArray, LawError
from lawfit.base import ScalingLaw
from lawfit.candidates import Candidates
from lawfit.result import FitResult
from lawfit.runs import RUN_VARIABLES

_SINGULAR = 1e-13
"""Least over largest eigenvalue of the scaled information from which the runs determine no law."""


class Known(NamedTuple):
    """What a law's runs say, with the candidates and points of interest beside them.

    Attributes
    ----------
    names : tuple of str
        Free parameters: "log a" of a prefactor, else the field.
    raw : ndarray of shape (free, free)
        Its row is ``k`` of that parameter.
    candidates : ndarray of shape (candidates, free)
        ``u`` of a run at each.
    points : ndarray of shape (points, free)
        ``k`` of ``log L`` at each.
    log_loss : ndarray of shape (points,)
        There.
    """

    names: tuple[str, ...]
    raw: FloatArray
    candidates: FloatArray
    points: FloatArray
    log_loss: FloatArray


def known(
    found: FitResult,
    law: ScalingLaw,
    noise: float,
    candidates: Candidates,
    points: FloatArray,
) -> Known:
    """Return what the runs of a fit say, were `law` the true one.

    Parameters
    ----------
    found : FitResult
        Which runs, which parameters are free, and by what objective they are fitted.
    law : JointLaw, PerSplitLaw or ChinchillaLaw
        Where to differentiate; of the kind that was fitted.
    noise : float
        Standard deviation of ``log L`` of a run of weight 1 [-].
    candidates : Candidates
        Possible runs, of weight 1.
    points : ndarray of shape (4, points)
        Logarithms of the variables, in the order of `Monomial.exponents`.

    Raises
    ------
    LawError
        The runs do not determine the law, or no parameter is free.
    """
    logs = found.train.logs()
    asked = np.log(np.array([candidates.column(name) for name in RUN_VARIABLES]))
    rows, more = len(found.train), len(candidates)
    form = posynomial(
        law, np.concatenate([logs.variables, asked, points], axis=1), logs.loss, found.fixed
    )
    names = free_parameters(found, form)
    free = list(names.values())
    log_loss, slopes, _ = form.slopes(form.point(law.model_dump())[None])
    slopes = slopes[0][:, free]
    precision = found.train.column("weight") * effect(
        found.delta, noise / np.sqrt(found.train.column("weight"))
    )
    mine = slopes[:rows] * np.sqrt(precision)[:, None] / noise
    scale = np.sqrt((mine * mine).sum(axis=0))
    information = np.einsum("rp,rq->pq", mine / scale, mine / scale)
    values, vectors = np.linalg.eigh(information)
    if values[0] < _SINGULAR * values[-1]:
        weak = [n for n, x in zip(names, np.abs(vectors[:, 0]), strict=True) if x >= 0.3]
        raise LawError(
            f"the runs of the fit do not determine {', '.join(weak)}, so what more runs would tell "
            "depends on where they are held; hold one with fixed in the fit."
        )
    # columns of `root` are a basis in which that information is the identity
    root = vectors / np.sqrt(values) / scale[:, None]
    gain = float(np.sqrt(effect(found.delta, np.array([noise]))[0])) / noise
    return Known(
        names=tuple(names),
        raw=form.raw_map()[np.ix_(free, free)] @ root,
        candidates=gain * slopes[rows : rows + more] @ root,
        points=slopes[rows + more :] @ root,
        log_loss=log_loss[0][rows + more :],
    )


def free_parameters(found: FitResult, form: Posynomial) -> dict[str, int]:
    """Return where each coefficient stands that the fit moves: held, and at a bound, are none.

    The name of a prefactor is "log a", as in `Covariance`; an exponent of vanished terms alone
    says nothing, and is left out.

    Raises
    ------
    LawError
        None is left.
    """
    at = found.coefficients
    gone = {t for t in range(form.terms) if at[form.names[t]].at_bound == "lower"}
    free = {}
    for k, name in enumerate(form.names):
        terms = [t for t, own in enumerate(form.own) if k in own]
        if at[name].at_bound is None and not at[name].fixed and not gone.issuperset(terms):
            free[f"log {name}" if k < form.terms else name] = k
    if not free:
        raise LawError("every coefficient of this fit is held or at a bound: no run moves one.")
    return free


def effect(delta: float | None, noise: FloatArray) -> FloatArray:
    """Return the efficiency of Huber's function for normal noise, shape of `noise`.

    ``(E psi')^2 sigma^2 / E psi^2`` with ``psi`` clipped at `delta` (Huber, Ann. Math. Statist.
    35:73, 1964): 1 for least squares, 2/pi for the least absolute deviations of a small `delta`.
    """
    from scipy.special import ndtr

    if delta is None:
        return np.ones_like(noise)
    k = delta / noise
    inside = 2.0 * ndtr(k) - 1.0
    height = np.exp(-0.5 * k * k) / math.sqrt(2.0 * math.pi)
    square = inside - 2.0 * k * height + 2.0 * k * k * ndtr(-k)
    small = k < 1e-4  # the difference cancels; the limit holds to k
    limit = np.full_like(k, 2.0 / math.pi)
    return np.asarray(np.where(small, limit, inside**2 / np.where(small, 1.0, square)))


def stated_noise(found: FitResult, noise: float | None) -> float:
    """Return a noise that was given, or else that of the residuals.

    Raises
    ------
    LawError
        It is not a finite number above 0; or as `residual_noise`.
    """
    if noise is None:
        return residual_noise(found)
    if not (math.isfinite(noise) and noise > 0):
        raise LawError(f"noise is {noise:g}, but must be a finite number above 0, such as 0.003.")
    return noise


def residual_noise(found: FitResult) -> float:
    """Estimate the standard deviation of ``log L`` of a run of weight 1 [-].

    Least squares: ``sqrt(sum w r^2 / (n - p))``. Huber: the median of the sizes ``sqrt(w) |r|``
    without the `p` smallest, which a fit of small delta takes to 0, over that of a standard
    normal.

    Raises
    ------
    LawError
        There are no more runs than free coefficients, or no residual.
    """
    train = found.train
    predicted = found.law.loss(**train.point())
    residual = np.log(predicted) - np.log(train.column("loss"))
    sizes = np.sort(np.sqrt(train.column("weight")) * np.abs(residual))
    free = sum(c.at_bound is None and not c.fixed for c in found.coefficients.values())
    if len(sizes) <= free:
        raise LawError(
            f"{len(sizes)} runs fit {free} coefficients and leave no residual to take the noise "
            "from; give noise, the standard deviation of log L between seeds."
        )
    if found.delta is None:
        size = math.sqrt(float((sizes * sizes).sum()) / (len(sizes) - free))
    else:
        size = 1.4826 * float(np.median(sizes[free:]))
    if size < 1e-12:
        raise LawError(
            "the runs of the fit have no residual to take the noise from; give noise, the "
            "standard deviation of log L between seeds."
        )
    return size
