"""What this package raises: one sentence each."""

from __future__ import annotations

__all__ = ["MoeRefError", "RankError"]


class MoeRefError(ValueError):
    """An input that cannot be, explained in one sentence."""


class RankError(RuntimeError):
    """A process of several that failed or died."""
