"""What the refits of one fit say: intervals of coefficients, bands of the loss, draws of laws."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from lawfit._intervals import bca_tails, checked_level, tails
from lawfit._refit import at_optimum
from lawfit._values import FloatArray, LawError, Quantity
from lawfit.ensemble import LawEnsemble
from lawfit.result import FitResult
from lawfit.runs import Remark

__all__ = ["Bootstrap", "CoefficientInterval"]

LEAST_REFITS = 20
"""Refits that count below which no interval is given."""

_SHARE_LOST = 0.05
"""Share of refits that did not converge, from which an interval says so."""


class CoefficientInterval(BaseModel):
    """Where a coefficient lies, with a stated confidence.

    Attributes
    ----------
    name : str
        The coefficient.
    low, high : float
        Ends, in the units of the law.
    level : float
        Nominal coverage [-].
    method : {"percentile", "bca"}
        How the ends were taken from the refits.
    remarks : tuple of Remark
        What speaks against reading it as it stands: ``boundary``, ``vanished``, ``refits_lost``,
        ``not_converged``, ``fit_not_converged``, ``few_refits``, ``no_bca``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    low: float
    high: float
    level: float
    method: Literal["percentile", "bca"]
    remarks: tuple[Remark, ...]


class Bootstrap(BaseModel):
    """Refits of one fit.

    Attributes
    ----------
    fit : FitResult
        What was refitted.
    kind : {"wild", "pairs"}
        How runs were made.
    mode : {"converged", "paper"}
        How they were refitted.
    seed : int
        Of the generator.
    names : tuple of str
        Coefficients, in the order of `values`.
    values : tuple of tuple of float
        Of each refit that counts, in the units of the law: those that converged, or all of them
        where ``mode`` is "paper".
    at_bound : tuple of tuple of bool
        Of each refit, which coefficients stand at a bound.
    vanished : tuple of tuple of bool
        And which are exponents of a term that vanished, and mean nothing.
    draws, not_converged : int
        Refits made, and those of them that did not reach a stationary point.
    gradient_median, gradient_largest : float
        Of the relative projected gradient over all refits [-].
    jackknife : tuple of tuple of float
        The coefficients without each run in turn; of more than 500 runs, without each of 500
        groups at random.
    jackknife_not_converged : int
        Those of these fits that did not reach a stationary point.
    estimate : tuple of float
        The coefficients that the refits started from: those of the fit, or in mode "paper" of one
        that stopped early.
    objective : float
        Of the fit's runs there [-].
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    basis: ClassVar[Literal["FITTED"]] = "FITTED"

    fit: FitResult
    kind: Literal["wild", "pairs"]
    mode: Literal["converged", "paper"]
    seed: int
    names: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]
    at_bound: tuple[tuple[bool, ...], ...]
    vanished: tuple[tuple[bool, ...], ...]
    draws: int
    not_converged: int
    gradient_median: float
    gradient_largest: float
    jackknife: tuple[tuple[float, ...], ...]
    jackknife_not_converged: int
    estimate: tuple[float, ...]
    objective: float

    def __len__(self) -> int:
        """Return the number of refits that count."""
        return len(self.values)

    def coefficients(self, name: str) -> FloatArray:
        """Return one coefficient of every refit that counts, shape (refits,).

        Raises
        ------
        LawError
            The law has no such coefficient.
        """
        return np.array([row[self._at(name)] for row in self.values])

    def interval(
        self,
        name: str,
        *,
        level: float = 0.95,
        method: Literal["percentile", "bca"] = "percentile",
    ) -> CoefficientInterval:
        """Return the interval of one coefficient.

        Percentiles are those of the refits. BCa (Efron, J. Am. Stat. Assoc. 82:171, 1987) moves
        them by the bias and the acceleration, the latter from refits without each run in turn; of
        a prefactor it is that of its logarithm. Near a boundary and along ridges BCa falls short
        of its level, and percentiles do not.

        Parameters
        ----------
        name : str
            A coefficient.
        level : float
            Nominal coverage, between 0 and 1.
        method : {"percentile", "bca"}
            As above.

        Raises
        ------
        LawError
            The name or the level is illegal, the fit held the coefficient fixed, or fewer than 20
            refits count.
        """
        level = checked_level(level)
        if method not in ("percentile", "bca"):
            raise LawError(f"method is {method!r}, but must be 'percentile' or 'bca'.")
        values = self.coefficients(name)
        if self.fit.coefficients[name].fixed:
            raise LawError(f"name is {name!r}, but the fit held it fixed, so it has no interval.")
        self._enough()
        remarks, moved = self._remarks(name), None
        if method == "bca":
            moved = self._bca(name, values, level)
            if moved is None:
                sentence = (
                    f"BCa has no bias or acceleration for {name}: refits stand at one value, all "
                    "lie on one side of the fit, or fits without a run did not converge; these "
                    "are percentiles."
                )
                remarks.append(Remark(reason="no_bca", sentence=sentence))
        ends = tails(level) if moved is None else moved
        outside = float(min(ends[0], 1.0 - ends[1]))
        if outside * len(values) < 1.0:
            sentence = (
                f"Less than one of {len(values)} refits is to lie beyond an end at the level "
                f"{level:g}, which is then the outermost refit; ask for more draws."
            )
            remarks.append(Remark(reason="few_refits", sentence=sentence))
        low, high = np.quantile(values, ends)
        return CoefficientInterval(
            name=name,
            low=float(low),
            high=float(high),
            level=level,
            method="percentile" if moved is None else "bca",
            remarks=tuple(remarks),
        )

    def band(
        self,
        *,
        n_total: Quantity,
        n_active: Quantity,
        tokens: Quantity,
        expert_split: Quantity = 1.0,
        level: float = 0.95,
        of: Literal["mean", "run"] = "mean",
    ) -> tuple[FloatArray, FloatArray]:
        """Return where the loss lies at points, as percentiles over the refits that count.

        Parameters
        ----------
        n_total, n_active, tokens, expert_split : float or ndarray
            As `ScalingLaw.loss` takes them; they broadcast.
        level : float
            Nominal coverage, between 0 and 1, of each point by itself.
        of : {"mean", "run"}
            The expected loss, or that of one run more, of weight 1, whose noise is drawn from the
            residuals (HC2) of the fit.

        Returns
        -------
        low, high : ndarray
            Loss [nats/token].

        Raises
        ------
        LawError
            An argument is illegal, or fewer than 20 refits count.
        """
        level = checked_level(level)
        if of not in ("mean", "run"):
            raise LawError(f"of is {of!r}, but must be 'mean' or 'run'.")
        self._enough()
        point = {"n_total": n_total, "n_active": n_active, "tokens": tokens}
        laws = self.ensemble().laws
        losses = np.array(
            [np.asarray(law.loss(**point, expert_split=expert_split)) for law in laws]
        )
        if of == "run":
            fit = at_optimum(self.fit)
            noise = fit.noise_residuals() * np.sqrt(fit.problem.weight[0])
            # a stream of its own: that of the seed alone drew the refits
            drawn = np.random.default_rng([self.seed, 1]).choice(noise, losses.shape)
            losses = losses * np.exp(drawn)
        low, high = np.quantile(losses, tails(level), axis=0)
        return np.asarray(low), np.asarray(high)

    def ensemble(self) -> LawEnsemble:
        """Return the refits as draws of the law, equally likely.

        Raises
        ------
        LawError
            No refit counts.
        """
        if not self.values:
            raise LawError(f"none of {self.draws} refits converged, so there is nothing to draw.")
        law = self.fit.law
        return LawEnsemble(
            laws=tuple(
                law.model_copy(update=dict(zip(self.names, row, strict=True)))
                for row in self.values
            ),
            source=law.source,
            method=f"{self.kind} bootstrap of {len(self.fit.train)} runs, {self.mode} refits",
            basis="FITTED",
            seed=self.seed,
        )

    def _enough(self) -> None:
        if len(self) < LEAST_REFITS:
            raise LawError(
                f"{len(self)} of {self.draws} refits count, but an interval needs at least "
                f"{LEAST_REFITS}; ask for more draws."
            )

    def _at(self, name: str) -> int:
        if name not in self.names:
            raise LawError(f"name is {name!r}, but the coefficients are {', '.join(self.names)}.")
        return self.names.index(name)

    def _remarks(self, name: str) -> list[Remark]:
        at, found = self._at(name), []
        bound = sum(row[at] for row in self.at_bound)
        if bound:
            sentence = (
                f"{name} stands at a bound of the fit in {bound} of {len(self)} refits, so the "
                "interval ends at the bound there and its coverage is not the nominal one."
            )
            found.append(Remark(reason="boundary", sentence=sentence))
        gone = sum(row[at] for row in self.vanished)
        if gone:
            sentence = (
                f"The term of {name} vanished in {gone} of {len(self)} refits, where the exponent "
                "means nothing; it counts there with the value at which the term vanished."
            )
            found.append(Remark(reason="vanished", sentence=sentence))
        if not self.fit.converged:
            sentence = (
                "The fit itself did not converge, or too few starts agree on it, so the refits "
                "may spread around a point that is not the optimum."
            )
            found.append(Remark(reason="fit_not_converged", sentence=sentence))
        if self.not_converged:
            share = self.not_converged / self.draws
            reason = "not_converged" if self.mode == "paper" else "refits_lost"
            sentence = f"{self.not_converged} of {self.draws} refits did not converge"
            sentence += (
                ", and count all the same: the interval is too narrow."
                if self.mode == "paper"
                else " and are left out."
            )
            if self.mode == "paper" or share > _SHARE_LOST:
                found.append(Remark(reason=reason, sentence=sentence))
        return found

    def _bca(self, name: str, values: FloatArray, level: float) -> FloatArray | None:
        """Return the moved shares of BCa, or None where it has none."""
        if self.jackknife_not_converged and self.mode == "converged":
            return None
        at = self._at(name)
        without = np.array([row[at] for row in self.jackknife])
        if at < len(self.fit.law.terms):  # a prefactor
            without = np.log(without)
        return bca_tails(values, self.estimate[at], without, level)
