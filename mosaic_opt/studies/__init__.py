"""Studies of one envelope under many settings: `robust` has what uncertainty does to the choice."""

from __future__ import annotations
