"""What a fit returns: the law, whether it is the optimum, and what speaks against it."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from lawfit._posynomial import Posynomial, posynomial
from lawfit._values import FloatArray, LawError
from lawfit.ensemble import LawEnsemble
from lawfit.laws import AnyLaw
from lawfit.runs import Remark, Runs

__all__ = ["Coefficient", "Covariance", "FitResult"]

MAX_DRAWS = 100_000

_BATCHES = 200
"""Batches of proposals after which draws inside the bounds are given up."""


_REACH = 4.0
"""Standard errors of an exponent that a draw may be off; slopes over a term near 0 lead far."""


class Coefficient(BaseModel):
    """One coefficient of a fitted law.

    Attributes
    ----------
    value : float
        In the units of the law.
    at_bound : {"lower", "upper"} or None
        The bound of the fit that it stands at. A prefactor at its lower bound means that the
        runs want no such term.
    fixed : bool
        True where the user held it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: float
    at_bound: Literal["lower", "upper"] | None
    fixed: bool


class Covariance(BaseModel):
    """Covariance of the free coefficients over fits to other runs of the same design.

    Attributes
    ----------
    names : tuple of str
        Coefficients; "log a" is the logarithm of the prefactor ``a``.
    matrix : tuple of tuple of float
        Row by row.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    names: tuple[str, ...]
    matrix: tuple[tuple[float, ...], ...]

    def listed(self, name: str) -> str | None:
        """Return the name under which a coefficient stands, "log a" of a prefactor, or None."""
        return next((key for key in (name, f"log {name}") if key in self.names), None)

    def std_error(self, name: str) -> float:
        """Return the standard error of one coefficient, of its logarithm for "log a".

        Raises
        ------
        LawError
            It is not among the free coefficients.
        """
        if name not in self.names:
            raise LawError(f"name is {name!r}, but the covariance is of {', '.join(self.names)}.")
        at = self.names.index(name)
        return float(np.sqrt(self.matrix[at][at]))


class FitResult(BaseModel):
    """A fitted law and what is known of the fit.

    Attributes
    ----------
    law : JointLaw, PerSplitLaw or ChinchillaLaw
        With the coefficients found, the source and the range of the runs.
    coefficients : dict of str to Coefficient
        By the field of the law.
    objective : float
        Sum over the runs of weight times the loss function of ``log L`` [-].
    loss_function : {"huber", "least_squares"}
        ``q |r| - q^2 / 2`` with ``q = min(|r|, delta)``, or ``r^2 / 2``.
    delta : float or None
        Half-width of Huber's function [-]; None for least squares.
    converged : bool
        The projected gradient vanishes at the optimum, by `gradient_norm` and by the Newton
        decrement, and enough starts agree on it.
    gradient_norm : float
        Largest component of the projected gradient over the sum of the sizes of the runs'
        contributions to it [-].
    starts, starts_agreeing : int
        Starts, and those of them that converged to an objective within 1e-6 of the best.
    n_train, n_holdout : int
        Runs in the fit and held out.
    rmse_train : float
        Weighted root mean square of predicted minus measured loss [nats/token].
    rmse_holdout : float or None
        The same over the runs held out; None where there are none.
    held_out : tuple of str
        Ids of the runs held out.
    holdout_rule, outlier_rule : str
        How they were chosen, and which runs were dropped.
    convention : str
        What the counts of the runs count.
    warnings : tuple of Remark
        What speaks against the runs or the fit.
    covariance : Covariance or None
        Sandwich at the optimum; None where it is singular.
    centre : tuple of float
        Mean logarithm of the four variables over the runs of the fit.
    train : Runs
        The runs of the fit.
    held : Runs or None
        Those held out.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    basis: ClassVar[Literal["FITTED"]] = "FITTED"

    law: AnyLaw
    coefficients: dict[str, Coefficient]
    objective: float = Field(ge=0)
    loss_function: Literal["huber", "least_squares"]
    delta: float | None
    converged: bool
    gradient_norm: float
    starts: int
    starts_agreeing: int
    n_train: int
    n_holdout: int
    rmse_train: float
    rmse_holdout: float | None
    held_out: tuple[str, ...]
    holdout_rule: str
    outlier_rule: str
    convention: str
    warnings: tuple[Remark, ...]
    covariance: Covariance | None
    centre: tuple[float, float, float, float]
    train: Runs
    held: Runs | None

    @property
    def fixed(self) -> dict[str, float]:
        """Coefficients that the user held, with their values."""
        return {name: each.value for name, each in self.coefficients.items() if each.fixed}

    @property
    def moving(self) -> tuple[str, ...]:
        """Names of the others, in the order of `coefficients`."""
        return tuple(name for name, each in self.coefficients.items() if not each.fixed)

    def ensemble(
        self, draws: int, seed: int, method: Literal["laplace", "wild", "pairs"] = "laplace"
    ) -> LawEnsemble:
        """Draw laws that other runs of the same design might have led to.

        Laplace's approximation: normal draws with `covariance`, in the terms at the centre of the
        runs and their slopes there (``A alpha`` in place of ``alpha``), in which the loss is
        nearly linear, so that coefficients that trade off do so within a draw. Draws with a
        term below 0, or an exponent outside the bounds of the fit or more than 4 standard errors
        off, are drawn again. Coefficients at a bound or fixed stay where they are, so the spread
        leaves out what they add.

        Refits take no such shortcut: each draw is the optimum of runs that might have been, and a
        coefficient may leave its bound, or come to stand at it. Refits that do not converge are
        replaced by others, which leaves out the runs that determine the law least.

        Parameters
        ----------
        draws : int
            How many, 1 to 100000.
        seed : int
            Of the generator; the same seed and number give the same draws.
        method : {"laplace", "wild", "pairs"}
            Laplace's approximation, or converged refits of `bootstrap` of that kind.

        Raises
        ------
        LawError
            ``draws`` is out of range or the method unknown; there is no covariance, or hardly a
            draw is legal; there is nothing to resample, or hardly a refit converges.
        """
        if not 1 <= draws <= MAX_DRAWS:
            near = min(max(draws, 1), MAX_DRAWS)
            raise LawError(
                f"draws is {draws}, but must be 1 to {MAX_DRAWS}; the nearest is {near}."
            )
        if method not in ("laplace", "wild", "pairs"):
            raise LawError(f"method is {method!r}, but must be 'laplace', 'wild' or 'pairs'.")
        if method != "laplace":
            from lawfit.resampling import refitted_ensemble  # it imports this module

            return refitted_ensemble(self, method, draws, seed)
        if self.covariance is None:
            raise LawError("this fit has no covariance to draw from; its warnings say why.")
        form, point, spread = self._at_centre(self.covariance)
        generator = np.random.default_rng(seed)
        found: list[FloatArray] = []
        for _ in range(_BATCHES):
            z = generator.standard_normal((draws, len(point)))
            found += list(_laplace(form, point, spread, z))
            if len(found) >= draws:
                break
        else:
            raise LawError(
                f"only {len(found)} of {_BATCHES * draws} draws had terms above 0 and exponents "
                "inside the bounds, so the runs do not determine this law well enough to draw it."
            )
        update = [form.raw(at) for at in found[:draws]]
        held = [name for name in self.coefficients if not self._free(name)]
        for fields in update:
            fields.update({name: self.coefficients[name].value for name in held})
        return LawEnsemble(
            laws=tuple(self.law.model_copy(update=fields) for fields in update),
            source=self.law.source,
            method="Laplace draws from the sandwich covariance at the optimum, terms above 0",
            basis="FITTED",
            seed=seed,
        )

    def _free(self, name: str) -> bool:
        return self.covariance is not None and self.covariance.listed(name) is not None

    def _at_centre(self, covariance: Covariance) -> tuple[Posynomial, FloatArray, FloatArray]:
        """Return the form at the centre, the optimum there, and its covariance."""
        variables = np.array(self.centre)[:, None]
        names = list(self.coefficients)
        values = {name: self.coefficients[name].value for name in names}
        at = sum(
            term.coefficient * math.exp(float(np.dot(term.exponents, self.centre)))
            for term in self.law.terms
        )
        form = posynomial(self.law, variables, np.log([at]))
        free = [k for k, name in enumerate(form.names) if self._free(name)]
        order = [
            covariance.names.index(form.names[k] if k >= form.terms else f"log {form.names[k]}")
            for k in free
        ]
        raw = np.zeros((len(form.names),) * 2)
        raw[np.ix_(free, free)] = np.array(covariance.matrix)[np.ix_(order, order)]
        back = np.linalg.inv(form.raw_map())
        return form, form.point(values), back @ raw @ back.T


def _laplace(form: Posynomial, point: FloatArray, spread: FloatArray, z: FloatArray) -> FloatArray:
    """Return the points of those standard normals `z` that give a legal law."""
    terms = form.terms
    held = np.diag(spread) <= 0.0
    size, exponents = np.exp(point[:terms]), point[terms:]
    belongs = np.zeros((len(exponents), terms))
    for term, own in enumerate(form.own):
        belongs[np.array(own[1:], dtype=int) - terms, term] = 1.0
    total = belongs @ size
    turn = np.zeros_like(spread)
    turn[:terms, :terms] = np.diag(size)
    turn[terms:, :terms] = exponents[:, None] * belongs * size
    turn[terms:, terms:] = np.diag(total)
    values, vectors = np.linalg.eigh(turn @ spread @ turn.T)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    drawn = np.concatenate([size, exponents * total]) + np.einsum("dk,pk->dp", z, root)
    drawn[:, :terms] = np.where(held[:terms], size, drawn[:, :terms])
    drawn = drawn[(drawn[:, :terms] > 0.0).all(axis=1)]
    slopes = drawn[:, terms:] / np.einsum("ft,dt->df", belongs, drawn[:, :terms])
    slopes = np.where(held[terms:], exponents, slopes)
    reach = _REACH * np.sqrt(np.diag(spread)[terms:])
    near = (np.abs(slopes - exponents) <= reach).all(axis=1)
    inside = ((slopes >= form.lower[terms:]) & (slopes <= form.upper[terms:])).all(axis=1) & near
    return np.concatenate([np.log(drawn[:, :terms]), slopes], axis=1)[inside]
