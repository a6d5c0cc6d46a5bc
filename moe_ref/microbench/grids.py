"""Which sizes to measure: powers over the range that the machine gets through in time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from random import Random

from pydantic import Field

from perfmodel.frozen import Frozen

__all__ = ["Point", "Scale", "thinned"]

Point = dict[str, int | str]
"""Values of the key columns of one row."""


class Scale(Frozen):
    """How large a measurement may be.

    Attributes
    ----------
    flop : float
        Of one call [FLOP].
    elements : float
        Of all operands of one call [-].
    points : int
        Rows of a family; of more, a seeded choice is measured.
    large : bool
        An accelerator: grids begin and end where one does.
    """

    flop: float = Field(gt=0)
    elements: float = Field(gt=0)
    points: int = Field(ge=1)
    large: bool = False

    def allows(self, flop: float, elements: float) -> bool:
        """Say whether a call is small enough."""
        return flop <= self.flop and elements <= self.elements


def thinned(points: Iterable[Point], most: int, name: str) -> list[Point]:
    """Return the points, or as many of them as may be measured: the same ones every time."""
    every = list(points)
    if len(every) <= most:
        return every
    chosen = sorted(Random(name).sample(range(len(every)), most))
    return [every[i] for i in chosen]


def powers(low: int, high: int, step: int = 2) -> list[int]:
    """Return ``low``, ``low * step`` and so on up to ``high``."""
    values = [low]
    while values[-1] * step <= high:
        values.append(values[-1] * step)
    return values


def volume(*sizes: Sequence[int]) -> int:
    """Return the elements of several operands, each by its shape."""
    return sum(prod(size) for size in sizes)
