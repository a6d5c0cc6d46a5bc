"""What this package raises: one sentence, fit for a person."""

from __future__ import annotations


class MosaicError(ValueError):
    """An input that cannot be, explained in one sentence."""


class EnvelopeError(MosaicError):
    """An envelope that cannot be read or is not valid."""


def said(error: BaseException) -> str:
    """Return what an exception says, in one line without a full stop at its end."""
    words = " ".join(str(error).split()).rstrip(".")
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
