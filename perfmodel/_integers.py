"""Divisors, for enumeration and for the nearest legal value of a message."""

from __future__ import annotations

from math import isqrt


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number, ascending."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def nearest_divisor(number: int, value: int) -> int:
    """Return the divisor of a positive number that is nearest to ``value``, the lower of equals."""
    return min(divisors(number), key=lambda d: (abs(d - value), d))
