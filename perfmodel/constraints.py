"""The kinds of constraint that a plan can be under, as data.

A constraint is a frozen value over named integer variables. It is written once and read by
many: `holds` decides it (for one plan, or for columns of plans, with the same code),
`sentence`, `numbers` and `nearest` explain it, `str` documents it, and `compile_order` tells
an enumerator how early it may prune. The set of kinds is closed, so that a solver which posts
constraints can match on all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from operator import and_, mul, or_
from typing import ClassVar, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "AnyOf",
    "AtLeast",
    "AtMost",
    "Constraint",
    "Divides",
    "Implies",
    "OneOf",
    "Product",
    "ProductIs",
    "Quotient",
    "Table",
    "Truth",
    "Value",
    "Values",
    "compile_order",
]

Value: TypeAlias = int | NDArray[np.int64]
Truth: TypeAlias = bool | NDArray[np.bool_]
Values: TypeAlias = Mapping[str, Value]
Product: TypeAlias = tuple[str | int, ...]
"""A product of variables and integers, for example ``("tp", "cp", 2)``."""


def _names(*sides: Product) -> frozenset[str]:
    return frozenset(factor for side in sides for factor in side if isinstance(factor, str))


def _value(side: Product, values: Values) -> Value:
    factors: list[Value] = [f if isinstance(f, int) else values[f] for f in side]
    return reduce(mul, factors, 1)


def _number(side: Product, values: Mapping[str, int]) -> int:
    return prod(f if isinstance(f, int) else int(values[f]) for f in side)


def _formula(side: Product) -> str:
    return "*".join(map(str, side))


def _shown(side: Product, values: Mapping[str, int]) -> str:
    """Write a side with its value, "tp*cp=16"; a literal is its own value."""
    number = _number(side, values)
    return f"{_formula(side)}={number}" if _names(side) else str(number)


class Constraint(ABC):
    """One condition on named integer variables."""

    __slots__ = ()

    @property
    @abstractmethod
    def variables(self) -> frozenset[str]:
        """The variables that it reads."""

    @abstractmethod
    def holds(self, values: Values) -> Truth:
        """Decide it, on integers or on arrays that broadcast together."""

    @abstractmethod
    def numbers(self, values: Mapping[str, int]) -> tuple[int, int]:
        """Return the value that is judged, and the number that it is judged against."""

    @abstractmethod
    def sentence(self, values: Mapping[str, int]) -> str:
        """Say what must be, with the values that are."""

    def nearest(
        self, values: Mapping[str, int], var: str, domain: Sequence[int] | NDArray[np.int64]
    ) -> tuple[int, ...]:
        """Find the legal values of one variable around its present one, the others held.

        Parameters
        ----------
        values : mapping of str to int
            The present value of every variable of the constraint.
        var : str
            The variable to move.
        domain : sequence of int
            Its possible values, in any order.

        Returns
        -------
        tuple of int
            The nearest legal value below and the nearest above: none, one or two numbers.
        """
        candidates = np.asarray(domain, dtype=np.int64)
        held = prod(max(abs(int(values[name])), 1) for name in self.variables - {var})
        widest = int(np.abs(candidates).max(initial=1))
        exact = candidates if held * widest < 2**60 else candidates.astype(object)
        legal = candidates[np.broadcast_to(self.holds({**values, var: exact}), candidates.shape)]
        below, above = legal[legal < values[var]], legal[legal > values[var]]
        return tuple(int(v) for v in (*np.sort(below)[-1:], *np.sort(above)[:1]))

    def necessary(self, bound: frozenset[str]) -> Constraint | None:
        """Return what must hold already when only some variables are bound, if anything."""
        return self if self.variables <= bound else None


class _Relation(Constraint):
    """Two products and a verb between them."""

    __slots__ = ()
    verb: ClassVar[str]
    sign: ClassVar[str]

    @property
    @abstractmethod
    def sides(self) -> tuple[Product, Product]:
        """The product that is judged, and the one that it is judged against."""

    @staticmethod
    @abstractmethod
    def related(left: Value, right: Value) -> Truth:
        """Decide the relation between the values of the two sides."""

    @property
    def variables(self) -> frozenset[str]:
        """The variables of both products."""
        return _names(*self.sides)

    def holds(self, values: Values) -> Truth:
        """Evaluate both products and compare them."""
        left, right = self.sides
        return self.related(_value(left, values), _value(right, values))

    def numbers(self, values: Mapping[str, int]) -> tuple[int, int]:
        """Return the two products."""
        left, right = self.sides
        return _number(left, values), _number(right, values)

    def sentence(self, values: Mapping[str, int]) -> str:
        """Say "left=value must <verb> right=limit"."""
        left, right = self.sides
        return f"{_shown(left, values)} must {self.verb} {_shown(right, values)}"

    def __str__(self) -> str:
        """Write the formula."""
        left, right = self.sides
        return f"{_formula(left)} {self.sign} {_formula(right)}"


@final
@dataclass(frozen=True, slots=True)
class Divides(_Relation):
    """`divisor` divides `dividend`; both are products. Every positive integer divides zero."""

    divisor: Product
    dividend: Product
    verb: ClassVar = "divide"
    sign: ClassVar = "divides"

    @property
    def sides(self) -> tuple[Product, Product]:
        """The divisor, then the dividend."""
        return self.divisor, self.dividend

    @staticmethod
    def related(left: Value, right: Value) -> Truth:
        """Ask that nothing remains."""
        return right % left == 0

    def necessary(self, bound: frozenset[str]) -> Constraint | None:
        """Every factor of a divisor divides too."""
        part = tuple(f for f in self.divisor if isinstance(f, int) or f in bound)
        return Divides(part, self.dividend) if part and _names(self.dividend) <= bound else None


@final
@dataclass(frozen=True, slots=True)
class ProductIs(_Relation):
    """The product of `factors` is the product `total`."""

    factors: Product
    total: Product
    verb: ClassVar = "equal"
    sign: ClassVar = "="

    @property
    def sides(self) -> tuple[Product, Product]:
        """The factors, then the total."""
        return self.factors, self.total

    @staticmethod
    def related(left: Value, right: Value) -> Truth:
        """Ask that they are equal."""
        return left == right

    def necessary(self, bound: frozenset[str]) -> Constraint | None:
        """Every factor of a product divides it."""
        whole = self.variables <= bound
        return self if whole else Divides(self.factors, self.total).necessary(bound)


@final
@dataclass(frozen=True, slots=True)
class AtMost(_Relation):
    """The product `left` is at most the product `right`."""

    left: Product
    right: Product
    verb: ClassVar = "be at most"
    sign: ClassVar = "<="

    @property
    def sides(self) -> tuple[Product, Product]:
        """Left, then right."""
        return self.left, self.right

    @staticmethod
    def related(left: Value, right: Value) -> Truth:
        """Ask that the left is not larger."""
        return left <= right


@final
@dataclass(frozen=True, slots=True)
class AtLeast(_Relation):
    """The product `left` is at least the product `right`."""

    left: Product
    right: Product
    verb: ClassVar = "be at least"
    sign: ClassVar = ">="

    @property
    def sides(self) -> tuple[Product, Product]:
        """Left, then right."""
        return self.left, self.right

    @staticmethod
    def related(left: Value, right: Value) -> Truth:
        """Ask that the left is not smaller."""
        return left >= right


class _Membership(Constraint):
    """Variables that together take one of the rows of a list."""

    __slots__ = ()

    @property
    @abstractmethod
    def listed(self) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
        """The variables, and the rows that they may take."""

    @property
    def variables(self) -> frozenset[str]:
        """The variables of a row."""
        return frozenset(self.listed[0])

    def holds(self, values: Values) -> Truth:
        """Compare with every row."""
        names, rows = self.listed
        return reduce(or_, (self._is(row, names, values) for row in rows))

    @staticmethod
    def _is(row: tuple[int, ...], names: tuple[str, ...], values: Values) -> Truth:
        return reduce(and_, (values[name] == entry for name, entry in zip(names, row, strict=True)))

    def numbers(self, values: Mapping[str, int]) -> tuple[int, int]:
        """Return the first variable that the nearest row would change, and its value there."""
        names, rows = self.listed
        here = tuple(int(values[name]) for name in names)
        closest = min(rows, key=lambda row: sum(abs(a - b) for a, b in zip(row, here, strict=True)))
        return next(
            (pair for pair in zip(here, closest, strict=True) if pair[0] != pair[1]),
            (here[0], here[0]),
        )

    def sentence(self, values: Mapping[str, int]) -> str:
        """Say "name=value must be one of ..."."""
        names, rows = self.listed
        here = ",".join(f"{name}={values[name]}" for name in names)
        return f"{here} must be one of {', '.join(map(_row, rows))}"

    def __str__(self) -> str:
        """Write the variables and their rows."""
        names, rows = self.listed
        return f"{','.join(names)} in {{{', '.join(map(_row, rows))}}}"


def _row(row: tuple[int, ...]) -> str:
    return str(row[0]) if len(row) == 1 else str(row)


@final
@dataclass(frozen=True, slots=True)
class OneOf(_Membership):
    """`var` takes one of `values`."""

    var: str
    values: tuple[int, ...]

    @property
    def listed(self) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
        """One variable, one value a row."""
        return (self.var,), tuple((value,) for value in self.values)


@final
@dataclass(frozen=True, slots=True)
class Table(_Membership):
    """The tuple of `vars` is one of `rows`."""

    vars: tuple[str, ...]
    rows: tuple[tuple[int, ...], ...]

    @property
    def listed(self) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
        """The table itself."""
        return self.vars, self.rows


@final
@dataclass(frozen=True, slots=True)
class Implies(Constraint):
    """Where `condition` holds, `consequence` must."""

    condition: Constraint
    consequence: Constraint

    @property
    def variables(self) -> frozenset[str]:
        """The variables of both."""
        return self.condition.variables | self.consequence.variables

    def holds(self, values: Values) -> Truth:
        """Hold where the condition fails, too."""
        return (self.condition.holds(values) ^ True) | self.consequence.holds(values)

    def numbers(self, values: Mapping[str, int]) -> tuple[int, int]:
        """Return those of the consequence."""
        return self.consequence.numbers(values)

    def sentence(self, values: Mapping[str, int]) -> str:
        """Say the consequence, and the values that ask for it."""
        given = ", ".join(f"{name}={values[name]}" for name in sorted(self.condition.variables))
        return f"{self.consequence.sentence(values)} when {given}"

    def __str__(self) -> str:
        """Write the consequence, then the condition."""
        return f"{self.consequence} where {self.condition}"


@final
@dataclass(frozen=True, slots=True)
class AnyOf(Constraint):
    """At least one of `constraints` holds; the first gives the numbers."""

    constraints: tuple[Constraint, ...]

    @property
    def variables(self) -> frozenset[str]:
        """The variables of all."""
        return frozenset().union(*(c.variables for c in self.constraints))

    def holds(self, values: Values) -> Truth:
        """Hold where any does."""
        return reduce(or_, (c.holds(values) for c in self.constraints))

    def numbers(self, values: Mapping[str, int]) -> tuple[int, int]:
        """Return those of the first."""
        return self.constraints[0].numbers(values)

    def sentence(self, values: Mapping[str, int]) -> str:
        """Say each."""
        return ", or ".join(c.sentence(values) for c in self.constraints)

    def __str__(self) -> str:
        """Write each."""
        return " or ".join(map(str, self.constraints))


@final
@dataclass(frozen=True, slots=True)
class Quotient:
    """A derived variable: `dividend` over `divisor`, which has a value only where exact."""

    dividend: Product
    divisor: Product

    @property
    def defined(self) -> Divides:
        """The condition under which the quotient is an integer."""
        return Divides(self.divisor, self.dividend)

    def value(self, values: Values) -> Value:
        """Divide; meaningful only where `defined` holds."""
        return _value(self.dividend, values) // _value(self.divisor, values)


def compile_order(
    constraints: Iterable[Constraint], variables: Sequence[str], constants: Iterable[str] = ()
) -> tuple[tuple[Constraint, ...], ...]:
    """Say what to check as each variable is bound.

    Parameters
    ----------
    constraints : iterable of Constraint
        What must hold once every variable is bound.
    variables : sequence of str
        The variables, in the order in which loops bind them.
    constants : iterable of str
        Names with a value from the start.

    Returns
    -------
    tuple of tuple of Constraint
        For each variable, the constraints that its binding can decide first: each in full
        at the last of its variables, and before that whatever it already implies. Those on
        constants alone come with the first variable.
    """
    remaining = tuple(constraints)
    bound = frozenset(constants)
    levels: list[tuple[Constraint, ...]] = []
    for variable in variables:
        bound |= {variable}
        implied = (c.necessary(bound) for c in remaining)
        level = (c for c in implied if c and (variable in c.variables or not levels))
        levels.append(tuple(dict.fromkeys(level)))
    return tuple(levels)
