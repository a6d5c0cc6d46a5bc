"""What this package raises when an input cannot be: one sentence each."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perfmodel.rules import Violation

__all__ = ["IllegalPlanError", "PerfmodelError"]


class PerfmodelError(ValueError):
    """An input that cannot be, explained in one sentence."""


class IllegalPlanError(PerfmodelError):
    """A plan that breaks at least one rule.

    Attributes
    ----------
    violations : tuple of Violation
        Every broken rule, in the order in which the rules are declared.
    """

    def __init__(self, violations: Sequence[Violation]) -> None:
        self.violations = tuple(violations)
        super().__init__(" ".join(violation.message for violation in self.violations))
