"""What a number rests on."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Source(StrEnum):
    """Where a number comes from, strongest first.

    ``MEASURED`` was timed or read off a device; ``FITTED`` is a parameter or a value of a surface
    fitted to measurements; ``DATASHEET`` is a vendor's statement; ``ASSUMED`` is our judgement,
    stated where it is used.
    """

    MEASURED = "MEASURED"
    FITTED = "FITTED"
    DATASHEET = "DATASHEET"
    ASSUMED = "ASSUMED"


def weakest(sources: Iterable[Source]) -> Source:
    """Return the weakest of the sources that a composed number rests on."""
    order = list(Source)
    return max(sources, key=order.index)
