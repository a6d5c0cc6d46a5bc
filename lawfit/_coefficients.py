"""The numbers that a law is made of, as field types that check themselves."""

import math
from typing import Annotated, TypeAlias

from pydantic import AfterValidator


def _prefactor(value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(
            f"{value:g} is no prefactor, which must be a finite number of at least 0; "
            "the nearest legal value is 0"
        )
    return value


def _exponent(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(
            f"{value:g} is no exponent, which must be a finite number; "
            "the nearest legal value in use is 0"
        )
    return value


def _above_zero(value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(
            f"{value:g} is out of bounds, because this coefficient must be a finite number "
            "above 0; the nearest legal value is a small positive number such as 0.01"
        )
    return value


Prefactor: TypeAlias = Annotated[float, AfterValidator(_prefactor)]
Exponent: TypeAlias = Annotated[float, AfterValidator(_exponent)]
AboveZero: TypeAlias = Annotated[float, AfterValidator(_above_zero)]
