"""A legality rule: a constraint with the words around it."""

from __future__ import annotations

from dataclasses import dataclass

from perfmodel.constraints import Constraint


@dataclass(frozen=True, slots=True)
class Rule:
    """A constraint with the words around it.

    Attributes
    ----------
    name : str
        Stable identifier.
    constraint : Constraint
        What must hold.
    reason : str
        Why, in a clause.
    remedy_variable : str
        The variable whose nearest legal values are offered.
    source : str
        Where the rule comes from.
    note : str
        What the explanation of a violation adds, if anything.
    """

    name: str
    constraint: Constraint
    reason: str
    remedy_variable: str
    source: str
    note: str = ""
