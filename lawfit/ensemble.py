"""Draws of a scaling law: how sure we are of it, as laws that may be the true one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from lawfit._values import FloatArray, LawError, Quantity
from lawfit.base import ScalingLaw
from lawfit.laws import LawValue


class LawEnsemble(BaseModel):
    """Laws drawn from what is known of one law.

    Each draw is a law of its own, whole: coefficients that trade off against each other do so
    inside a draw, and a prediction is spread as far as the draws' predictions are.

    Attributes
    ----------
    laws : tuple of ScalingLaw
        The draws, all of one class, equally likely.
    source : str
        Of what law they are draws.
    method : str
        How they were made.
    basis : {"FITTED", "ASSUMED"}
        What the spread rests on: the runs of the fit, or a reconstruction of them.
    seed : int or None
        Of the generator; None where nothing was drawn.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    laws: tuple[LawValue, ...] = Field(min_length=1)
    source: str
    method: str
    basis: Literal["FITTED", "ASSUMED"]
    seed: int | None

    @classmethod
    def of(cls, law: ScalingLaw) -> LawEnsemble:
        """Return the ensemble of one draw, the law itself: nothing is uncertain."""
        return cls(
            laws=(law,), source=law.source, method="the law as it is", basis="ASSUMED", seed=None
        )

    def __len__(self) -> int:
        """Return the number of draws."""
        return len(self.laws)

    def first(self, draws: int) -> LawEnsemble:
        """Return the ensemble of the first draws.

        Raises
        ------
        LawError
            There are not as many.
        """
        if not 1 <= draws <= len(self):
            near = min(max(draws, 1), len(self))
            raise LawError(
                f"draws is {draws}, but this ensemble holds 1 to {len(self)} draws; "
                f"the nearest legal value is {near}."
            )
        return self.model_copy(update={"laws": self.laws[:draws]})

    def coefficients(self, name: str) -> FloatArray:
        """Return one coefficient of every draw, shape (draws,).

        Raises
        ------
        LawError
            The laws have no such coefficient.
        """
        if any(not isinstance(getattr(law, name, None), float) for law in self.laws):
            raise LawError(f"name is {name!r}, which is no coefficient of {type(self.laws[0])}.")
        return np.array([getattr(law, name) for law in self.laws], dtype=np.float64)

    def loss(
        self, *, n_total: Quantity, n_active: Quantity, tokens: Quantity, expert_split: Quantity
    ) -> FloatArray:
        """Predict the loss of candidates under every draw.

        Parameters
        ----------
        n_total, n_active, expert_split
            As in `ScalingLaw.loss`, scalars or arrays of shape (candidates,).
        tokens
            The same, or an array of shape (draws, candidates).

        Returns
        -------
        ndarray of shape (draws, candidates)
            Loss [nats/token]; each row is `ScalingLaw.loss` of that draw's law.

        Raises
        ------
        LawError
            As `ScalingLaw.loss`; or the tokens are of another number of draws.
        """
        sizes = {"n_total": n_total, "n_active": n_active, "expert_split": expert_split}
        rows = self._rows("tokens", tokens)
        found = [law.loss(tokens=row, **sizes) for law, row in zip(self.laws, rows, strict=True)]
        return np.atleast_2d(np.array([np.atleast_1d(row) for row in found]))

    def tokens_for(
        self, loss: Quantity, *, n_total: Quantity, n_active: Quantity, expert_split: Quantity
    ) -> FloatArray:
        """Invert every draw: the tokens that reach a loss.

        Parameters
        ----------
        loss
            Target [nats/token], as the tokens of `loss`.
        n_total, n_active, expert_split
            As in `loss`.

        Returns
        -------
        ndarray of shape (draws, candidates)
            Tokens [token]; inf where no finite number of them reaches the target under that draw.

        Raises
        ------
        LawError
            As `ScalingLaw.floor`; or the targets are of another number of draws.
        """
        sizes = {"n_total": n_total, "n_active": n_active, "expert_split": expert_split}
        found = []
        for law, target in zip(self.laws, self._rows("loss", loss), strict=True):
            floor = np.atleast_1d(law.floor(**sizes))
            b, beta = law.token_term
            gap = np.maximum(np.asarray(target) - floor, 0.0)
            with np.errstate(divide="ignore", over="ignore"):
                found.append(np.exp((np.log(b) - np.log(gap)) / beta))
        return np.array(found)

    def _rows(self, name: str, value: Quantity) -> Iterator[Quantity]:
        """Return what each draw gets of a value: its row of a matrix, or all of it."""
        if np.ndim(value) < 2:
            return iter([value] * len(self))
        if np.shape(value)[0] != len(self):
            raise LawError(
                f"{name} has {np.shape(value)[0]} rows, one for each draw, but this ensemble has "
                f"{len(self)} draws."
            )
        return iter(np.asarray(value))
