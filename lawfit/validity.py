"""The region that a law was fitted on, and the flags of a point outside it."""

from collections.abc import Mapping
from typing import Annotated, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict


def _ordered(interval: tuple[float, float]) -> tuple[float, float]:
    low, high = interval
    if not low <= high:
        raise ValueError(
            f"the interval runs from {low:g} to {high:g}, but its first bound must not exceed its "
            f"second; the nearest legal interval is ({high:g}, {low:g})"
        )
    return interval


Interval: TypeAlias = Annotated[tuple[float, float], AfterValidator(_ordered)]

_UNITS: Mapping[str, str] = {
    "n_total": "parameter",
    "n_active": "parameter",
    "sparsity": "-",
    "expert_split": "-",
    "tokens": "token",
    "tokens_per_parameter": "token/parameter",
}


class ValidRange(BaseModel):
    """Smallest and largest value of each variable over the training runs of a law.

    A variable left at None carries no statement, and is never flagged.

    Attributes
    ----------
    n_total, n_active
        Total and active parameters [parameter].
    sparsity
        ``1 - n_active / n_total`` [-].
    expert_split
        ``d_ff / d_expert`` [-].
    tokens
        Training tokens [token].
    tokens_per_parameter
        ``tokens / n_active`` [token/parameter].
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    n_total: Interval | None = None
    n_active: Interval | None = None
    sparsity: Interval | None = None
    expert_split: Interval | None = None
    tokens: Interval | None = None
    tokens_per_parameter: Interval | None = None

    def flags(
        self, *, n_total: float, n_active: float, tokens: float, expert_split: float
    ) -> tuple[str, ...]:
        """Name every variable of a point that lies outside the range.

        Parameters
        ----------
        n_total, n_active
            Total and active parameters [parameter].
        tokens
            Training tokens [token].
        expert_split
            Expert split factor [-].

        Returns
        -------
        tuple of str
            One sentence for each variable outside, with its value and the bound
            that it passes; empty inside the range.
        """
        point = {
            "n_total": n_total,
            "n_active": n_active,
            "sparsity": 1.0 - n_active / n_total,
            "expert_split": expert_split,
            "tokens": tokens,
            "tokens_per_parameter": tokens / n_active,
        }
        flags = (_flag(name, value, getattr(self, name)) for name, value in point.items())
        return tuple(flag for flag in flags if flag is not None)


def _flag(name: str, value: float, interval: tuple[float, float] | None) -> str | None:
    if interval is None or interval[0] <= value <= interval[1]:
        return None
    low, high = interval
    side, bound, end = ("below", low, "smallest") if value < low else ("above", high, "largest")
    return (
        f"{name} is {value:.4g} [{_UNITS[name]}], {side} {bound:.4g}, "
        f"the {end} of the runs that the law was fitted on."
    )
