"""What this package raises when an input cannot be: one sentence each."""

from __future__ import annotations

__all__ = ["MoeRefError"]


class MoeRefError(ValueError):
    """An input that cannot be, explained in one sentence."""
