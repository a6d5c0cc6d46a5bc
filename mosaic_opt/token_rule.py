"""How many tokens a candidate trains on, of those that the window allows."""

from __future__ import annotations

from typing import Annotated, Literal

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

    @property
    def least_tokens_per_parameter(self) -> float:
        """Least ratio that a candidate must reach; 0 where there is none [-]."""
        least = self.min_tokens_per_parameter or 0.0
        return min((r for r in self.tokens_per_parameter if r >= least), default=least)
