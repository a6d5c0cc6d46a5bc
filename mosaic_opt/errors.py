"""What this package raises: one sentence, fit for a person."""

from __future__ import annotations


class MosaicError(ValueError):
    """An input that cannot be, explained in one sentence."""


class EnvelopeError(MosaicError):
    """An envelope that cannot be read or is not valid."""
