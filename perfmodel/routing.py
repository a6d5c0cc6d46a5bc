"""How tokens fall on experts: the load of the fullest rank, and what a capacity drops."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from perfmodel.errors import PerfmodelError
from perfmodel.frozen import Frozen

Positive = Annotated[float, Field(gt=0.0, le=1e9, allow_inf_nan=False)]
Tokens = Annotated[float, Field(ge=0.0, le=1e18, allow_inf_nan=False)]


class Routing(Frozen):
    """Load imbalance of the routed experts, and their capacity.

    Attributes
    ----------
    imbalance : float
        Rows on the fullest rank of EP over the mean, where EP > 1; 1 is forced balance [-].
    tokens_per_expert : tuple of float, optional
        In place of a factor: tokens that each expert receives, in any unit. The fullest rank is
        that of the contiguous group of ``E / ep`` experts with the most.
    capacity_factor : float, optional
        Rows that an expert takes at most, over its mean; others are dropped.
    pad_to_capacity : bool
        Whether every expert works on exactly its capacity.
    """

    imbalance: Annotated[float, Field(ge=1.0, le=1e6, allow_inf_nan=False)] = 1.0
    tokens_per_expert: tuple[Tokens, ...] | None = None
    capacity_factor: Positive | None = None
    pad_to_capacity: bool = False

    @model_validator(mode="after")
    def _one_description(self) -> Self:
        counts = self.tokens_per_expert
        if counts is not None and self.imbalance != 1.0:
            raise ValueError(
                f"imbalance={self.imbalance:g} and tokens_per_expert both say how tokens fall; "
                "keep one"
            )
        if counts is not None and (not counts or sum(counts) <= 0.0):
            raise ValueError("tokens_per_expert must have a token")
        if self.pad_to_capacity and self.capacity_factor is None:
            raise ValueError("pad_to_capacity=True needs capacity_factor")
        return self

    def check(self, n_experts: int) -> None:
        """Raise `PerfmodelError` where the distribution is not one over ``n_experts``."""
        counts = self.tokens_per_expert
        if counts is not None and len(counts) != n_experts:
            raise PerfmodelError(
                f"tokens_per_expert has {len(counts)} numbers; the model has {n_experts} experts."
            )

    @property
    def loads(self) -> tuple[float, ...] | None:
        """Rows of each expert over the mean, after the capacity; None without a distribution."""
        if self.tokens_per_expert is None:
            return None
        mean = sum(self.tokens_per_expert) / len(self.tokens_per_expert)
        cap = self.capacity_factor
        loads = (count / mean for count in self.tokens_per_expert)
        return tuple(load if cap is None else min(load, cap) for load in loads)

    def load(self, ep: int) -> float:
        """Rows on the fullest rank of EP over the mean before any drop [-].

        A rank that holds every expert has the mean. With a capacity no expert, and so no rank,
        has more than ``capacity_factor`` times its mean; padded, each has exactly that.
        """
        cap = self.capacity_factor
        if self.pad_to_capacity and cap is not None:
            return cap
        loads = self.loads
        if loads is None:
            worst = self.imbalance if ep > 1 else 1.0
            return worst if cap is None else min(worst, cap)
        local = max(1, len(loads) // ep)
        ranks = (loads[i : i + local] for i in range(0, len(loads), local))
        return max(sum(rank) / len(rank) for rank in ranks)

    @property
    def dropped(self) -> float | None:
        """Share of routed rows that the capacity drops [-]; None where it is not known.

        Exact for a distribution. A single imbalance factor does not say how full the other
        experts are, so with it a drop is known to be none or is not known.
        """
        cap = self.capacity_factor
        if cap is None:
            return 0.0
        if self.tokens_per_expert is None:
            return 0.0 if cap >= self.imbalance else None
        mean = sum(self.tokens_per_expert) / len(self.tokens_per_expert)
        over = sum(max(0.0, count / mean - cap) for count in self.tokens_per_expert)
        return over / len(self.tokens_per_expert)
