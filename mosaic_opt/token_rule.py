"""How many tokens a candidate trains on, of those that the window allows."""

from __future__ import annotations

from math import inf, isnan, nan
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from perfmodel.frozen import Frozen

Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False, strict=True)]


class TokenRule(Frozen):
    """How many tokens a candidate trains on, of those that the window allows.

    ``saturate`` takes all of them (D* of equation (25)), cut by the caps. ``grid`` takes the
    largest listed tokens-per-parameter ratio that fits. Ratios are D / N_act, with N under the
    envelope's parameter convention. A candidate that cannot reach the least ratio is infeasible.
    """

    kind: Literal["saturate", "grid"] = "saturate"
    min_tokens_per_parameter: Positive | None = None
    max_tokens_per_parameter: Positive | None = None
    tokens_per_parameter: tuple[Positive, ...] = ()
    max_tokens: Positive | None = None

    @model_validator(mode="after")
    def _consistent(self) -> TokenRule:
        if self.kind == "grid" and not self.tokens_per_parameter:
            raise ValueError("tokens_per_parameter=() must list at least one ratio for kind 'grid'")
        if self.kind == "saturate" and self.tokens_per_parameter:
            raise ValueError("tokens_per_parameter is for kind 'grid'; kind is 'saturate'")
        low, high = self.min_tokens_per_parameter, self.max_tokens_per_parameter
        listed = [
            ratio
            for ratio in self.tokens_per_parameter
            if (low is None or ratio >= low) and (high is None or ratio <= high)
        ]
        if self.tokens_per_parameter and not listed:
            raise ValueError(
                f"no ratio of tokens_per_parameter lies between min_tokens_per_parameter={low} and "
                f"max_tokens_per_parameter={high}"
            )
        if low is not None and high is not None and low > high:
            raise ValueError(
                f"min_tokens_per_parameter={low:g} must be at most "
                f"max_tokens_per_parameter={high:g}; nearest: {high:g}"
            )
        return self

    def budget(
        self, available: float | NDArray[np.float64], n_active: float | NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return the tokens of candidates; NaN where a least ratio cannot be met.

        Parameters
        ----------
        available : float or array
            Tokens that the window delivers, D*.
        n_active : float or array
            Active parameters under the envelope's convention.
        """
        budget = self._cut(available, n_active)
        if self.kind == "grid":
            within, budget = budget, np.full(np.shape(budget), nan)
            for ratio in self.tokens_per_parameter:
                fits = ratio * n_active <= within
                budget = np.where(fits, np.fmax(budget, ratio * n_active), budget)
        least = self.min_tokens_per_parameter
        if least is not None:
            budget = np.where(budget < least * n_active, nan, budget)
        return np.asarray(budget)

    def binding(self, budget: float, available: float, n_active: float) -> str:
        """Name what sets a candidate's tokens, or the rule that leaves it none.

        "window", "max_tokens", "max_tokens_per_parameter" or "grid"; where the `budget` is NaN
        "tokens_per_parameter" or "min_tokens_per_parameter".
        """
        cut = float(self._cut(available, n_active))
        if isnan(budget):
            unlisted = all(ratio * n_active > cut for ratio in self.tokens_per_parameter)
            named = "tokens_per_parameter" if unlisted else "min_tokens_per_parameter"
            return named if self.kind == "grid" else "min_tokens_per_parameter"
        if self.kind == "grid":
            return "grid"
        if cut == available:
            return "window"
        return "max_tokens" if cut == self.max_tokens else "max_tokens_per_parameter"

    def _cut(
        self, available: float | NDArray[np.float64], n_active: float | NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return what the caps leave of the window's tokens."""
        cut = np.minimum(available, inf if self.max_tokens is None else self.max_tokens)
        if self.max_tokens_per_parameter is not None:
            cut = np.minimum(cut, self.max_tokens_per_parameter * n_active)
        return np.asarray(cut)

    @property
    def least_tokens_per_parameter(self) -> float:
        """Least ratio that a candidate must reach; 0 where there is none [-]."""
        least = self.min_tokens_per_parameter or 0.0
        return min((r for r in self.tokens_per_parameter if r >= least), default=least)
