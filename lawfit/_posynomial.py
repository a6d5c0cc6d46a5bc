r"""A law as a sum of exponentials, the form in which it is fitted.

The terms that a law declares are all that the fit knows of it. Its exponents are linear in its
fields, so with the logarithms ``x`` of the variables, centred on the runs,

    log L = log sum_i exp(u_i + sum_f theta_f z_if),    z_if = d_if . (x - mean x),

where ``u_i`` is the logarithm of term ``i`` at the centre and ``d_if`` how field ``f`` enters the
four exponents of that term. The parameters are the ``u_i`` and the ``theta_f``; a field in two
terms ties their exponents. A prefactor is an exponential, and so above 0 (Hoffmann et al., arXiv
2203.15556, approach 3). With the shares ``p_i`` of the terms in the loss and ``z_i`` the
derivative of the exponent of term ``i`` in the parameters, the derivatives of ``log L`` are

    m = sum_i p_i z_i,     sum_i p_i z_i z_i' - m m'.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
from pydantic import ValidationError

from lawfit._values import FloatArray, LawError
from lawfit.base import ScalingLaw
from lawfit.general import PosynomialLaw, PowerTerm

TermLaw: TypeAlias = ScalingLaw | PosynomialLaw
"""A law that lists its terms."""

EXPONENT_LIMIT = 5.0
"""Largest size of an exponent that a fit looks at [-]."""

SMALLEST_EXPONENT = 1e-3
"""Smallest exponent of a field that must be above 0 [-]."""

VANISHED = 18.0
"""A term is at its lower bound when it is exp(-18) of the median loss at the centre."""


_TINY = 1e-300
"""What a prefactor fixed at 0 is to a logarithm."""


class Posynomial(NamedTuple):
    """The parametrisation of one law on one table of runs.

    Attributes
    ----------
    names : tuple of str
        Fields of the law by parameter: prefactors, then exponents.
    terms : int
        How many of them are prefactors.
    design : ndarray of shape (terms, runs, parameters)
        ``z``: what a parameter adds to the logarithm of a term.
    centre : ndarray of shape (terms, exponents)
        What an exponent adds to it at the centre, by which the term differs from its prefactor.
    lower, upper : ndarray of shape (parameters,)
        Bounds; equal where a field is held fixed.
    own : tuple of list of int
        Of each term, the parameters that move it.
    """

    names: tuple[str, ...]
    terms: int
    design: FloatArray
    centre: FloatArray
    lower: FloatArray
    upper: FloatArray
    own: tuple[list[int], ...]

    def log_terms(self, points: FloatArray) -> FloatArray:
        """Return the logarithm of each term, shape (points, terms, runs)."""
        return np.asarray(np.einsum("trp,sp->str", self.design, points))

    def log_loss(self, points: FloatArray) -> FloatArray:
        """Return ``log L`` of each run, shape (points, runs)."""
        logs = self.log_terms(points)
        top = logs.max(axis=1)
        return np.asarray(top + np.log(np.exp(logs - top[:, None]).sum(axis=1)))

    def slopes(self, points: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return ``log L``, its derivatives (points, runs, parameters), and the terms' shares."""
        log_loss = self.log_loss(points)
        shares = np.exp(self.log_terms(points) - log_loss[:, None])
        slopes = np.zeros((*log_loss.shape, len(self.names)))
        for share, design, own in zip(shares.swapaxes(0, 1), self.design, self.own, strict=True):
            slopes[:, :, own] += share[:, :, None] * design[:, own]
        return log_loss, slopes, shares

    def raw(self, point: FloatArray) -> dict[str, float]:
        """Return the fields of the law at a point, in raw units."""
        logs = point[: self.terms] - self.centre @ point[self.terms :]
        values = np.concatenate([np.exp(logs), point[self.terms :]])
        return dict(zip(self.names, values.tolist(), strict=True))

    def point(self, fields: Mapping[str, float]) -> FloatArray:
        """Return the point of the fields of a law, moved inside the bounds."""
        exponents = np.array([fields[name] for name in self.names[self.terms :]])
        with np.errstate(divide="ignore"):
            logs = np.log([fields[name] for name in self.names[: self.terms]])
        point = np.concatenate([logs + self.centre @ exponents, exponents])
        return np.asarray(np.clip(point, self.lower, self.upper))

    def free(self, point: FloatArray) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """Return which parameters a neighbouring optimum may move, shape (parameters,).

        Not those at a bound, nor exponents of terms that have vanished.
        """
        found = (self.lower < point) & (point < self.upper)
        vanished = point[: self.terms] <= self.lower[: self.terms]
        for k in range(self.terms, len(point)):
            if all(vanished[t] for t, own in enumerate(self.own) if k in own):
                found[k] = False
        return np.asarray(found)

    def raw_map(self) -> FloatArray:
        """Return the matrix that takes a point to the log prefactors and exponents of `raw`."""
        found = np.eye(len(self.names))
        found[: self.terms, self.terms :] = -self.centre
        return found


def posynomial(
    law: TermLaw,
    variables: FloatArray,
    log_loss: FloatArray,
    fixed: Mapping[str, float] | None = None,
    origin: Collection[str] = (),
) -> Posynomial:
    """Return the parametrisation of a law of this kind on runs.

    Parameters
    ----------
    law : ScalingLaw or PosynomialLaw
        Any law of the kind; its coefficients play no part.
    variables : ndarray of shape (variables, runs)
        Logarithms of the variables of the runs, in the order of `Monomial.exponents`, or of the
        `variables` of the law.
    log_loss : ndarray of shape (runs,)
        Of the runs.
    fixed : mapping, optional
        Fields that a fit must not move, with their values.
    origin : collection of str
        Prefactors, besides fixed ones, whose logarithm itself is the parameter of their term.

    Raises
    ------
    LawError
        ``fixed`` names no parameter, or a value that the law does not accept; or the terms of the
        law are no monomials with exponents linear in its fields and a field for each coefficient.
    """
    fields = [
        name
        for name in type(law).model_fields
        if isinstance(getattr(law, name), float) and moves(law, name)
    ]
    prefactors = _prefactors(law, fields)
    exponents = [name for name in fields if name not in prefactors]
    none = _exponents(law, dict.fromkeys(exponents, 0.0))
    directions = np.array(
        [_exponents(law, dict.fromkeys(exponents, 0.0) | {name: 1.0}) - none for name in exponents]
    )  # (exponents, terms, variables)
    trial = {name: 0.3 + 0.1 * k for k, name in enumerate(exponents)}
    linear = np.einsum("f,ftv->tv", np.array(list(trial.values())), directions)
    if none.any() or not np.allclose(_exponents(law, trial), linear, rtol=1e-12, atol=1e-12):
        raise LawError(
            f"the exponents of {type(law).__name__} are not linear in its fields, so it cannot be "
            "fitted as a posynomial."
        )
    fixed = fixed or {}
    names = (*prefactors, *exponents)
    for name in fixed:
        if name not in names:
            raise LawError(f"fixed names {name!r}, but the parameters are {', '.join(names)}.")
    terms = len(prefactors)
    mean = np.repeat(variables.mean(axis=1)[None], terms, axis=0)
    # such a term has its prefactor at the centre
    mean[[name in fixed or name in origin for name in prefactors]] = 0.0
    design = np.zeros((terms, variables.shape[1], len(names)))
    design[range(terms), :, range(terms)] = 1.0
    design[:, :, terms:] = np.einsum("ftv,tvr->trf", directions, variables - mean[:, :, None])
    middle = float(np.median(log_loss))
    positive = [not _accepts(law, name, -1.0) for name in exponents]
    lower = [middle - VANISHED] * terms
    lower += [SMALLEST_EXPONENT if only else -EXPONENT_LIMIT for only in positive]
    upper = [middle + VANISHED] * terms + [EXPONENT_LIMIT] * len(exponents)
    for name in origin:  # its bounds are for the term at the centre
        at = prefactors.index(name)
        lower[at], upper[at] = math.log(_TINY), -math.log(_TINY)
    for name, value in fixed.items():
        at = names.index(name)
        if not _accepts(law, name, value):
            raise LawError(f"fixed holds {name} at {value:g}, which the law does not accept.")
        lower[at] = upper[at] = value if at >= terms else math.log(max(value, _TINY))
    moved = np.abs(directions).sum(axis=2) > 0.0  # (exponents, terms)
    own = tuple([t, *(terms + np.flatnonzero(moved[:, t])).tolist()] for t in range(terms))
    centre = np.einsum("ftv,tv->tf", directions, mean)
    return Posynomial(names, terms, design, centre, np.array(lower), np.array(upper), own)


def _with(law: TermLaw, values: Mapping[str, float]) -> TermLaw:
    return law.model_copy(update=dict(values))


def _exponents(law: TermLaw, values: Mapping[str, float]) -> FloatArray:
    """Return the exponents of every term with fields of these values, shape (terms, variables)."""
    rows = [
        [term.exponents.get(name, 0.0) for name in law.variables]
        if isinstance(term, PowerTerm)
        else term.exponents
        for term in _with(law, values).terms
    ]
    return np.array(rows, dtype=np.float64)


def moves(law: TermLaw, name: str) -> bool:
    """Return whether a field is in any term of the law."""
    return _with(law, {name: 0.7}).terms != _with(law, {name: 1.3}).terms


def _prefactors(law: TermLaw, fields: list[str]) -> list[str]:
    """Return the field that is the coefficient of each term, in the order of the terms."""
    marks = {name: 2.0 + k for k, name in enumerate(fields)}
    by_value = {value: name for name, value in marks.items()}
    found = [by_value.get(term.coefficient, "") for term in _with(law, marks).terms]
    if "" in found or len(set(found)) != len(found):
        raise LawError(
            f"the coefficients of the terms of {type(law).__name__} are not one field each, so it "
            "cannot be fitted as a posynomial."
        )
    return found


def _accepts(law: TermLaw, name: str, value: float) -> bool:
    try:
        type(law).model_validate({**law.model_dump(), name: value})
    except ValidationError:
        return False
    return True
