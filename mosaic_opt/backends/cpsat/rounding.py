"""Numbers as integers, rounded so that bounds stay bounds."""

from __future__ import annotations

from math import floor, frexp, ldexp
from typing import NamedTuple


class Scale(NamedTuple):
    """How numbers become integers: whole units, rounded down."""

    unit: float  # a power of two, in the unit of what is scaled
    largest: float

    @classmethod
    def of(cls, largest: float, bits: int) -> Scale:
        """Return the scale with which the largest number has ``bits`` bits."""
        return cls(ldexp(1.0, frexp(largest)[1] - bits) if largest > 0.0 else 1.0, largest)

    def down(self, number: float) -> int:
        """Return the whole units in a number; exact, the unit being a power of two."""
        return floor(number / self.unit)
