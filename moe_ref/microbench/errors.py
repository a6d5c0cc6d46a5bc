"""What is raised here."""

from __future__ import annotations

from perfmodel.errors import PerfmodelError

__all__ = ["CalibrationError"]


class CalibrationError(PerfmodelError):
    """A measurement that cannot be made, or a claim that rests on none; one sentence."""
