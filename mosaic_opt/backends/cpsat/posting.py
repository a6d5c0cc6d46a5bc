"""The declared constraint model, posted to CP-SAT.

Every relation is a table over at most two integers: the products on its sides. A product of several
variables is built factor by factor, each partial product a variable of its own with the values that
it can reach, tied to its factors by a table. That stays small where a multiplication over bounds
does not, and no number leaves 64 bits in silence, which would make a model invalid.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product as product_of
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from mosaic_opt.errors import MosaicError
from perfmodel.constraints import (
    AnyOf,
    AtLeast,
    AtMost,
    Constraint,
    Divides,
    Implies,
    OneOf,
    Product,
    ProductIs,
    Quotient,
    Table,
)

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, IntVar

__all__ = ["Poster"]

MAX_ROWS = 2_000_000
"""The longest table that is posted."""

LARGEST = 2**62
"""Integers of a model stay below."""

Relation = (Divides, ProductIs, AtMost, AtLeast)
Literal: TypeAlias = "IntVar | bool"


class Term(NamedTuple):
    """An integer of the model: a variable, or None for a number, and the values it can take."""

    variable: Any  # an IntVar
    values: tuple[int, ...]


class Poster:
    """Posts constraints over named variables with finite domains.

    Parameters
    ----------
    model : CpModel
        Where to post.
    domains : mapping of str to sequence of int
        The values of each variable. Partial products are built in this order.
    constants : mapping of str to int
        Names with a value.
    """

    def __init__(
        self,
        model: CpModel,
        domains: Mapping[str, Sequence[int]],
        constants: Mapping[str, int],
    ) -> None:
        self.model = model
        self.constants = dict(constants)
        self.terms: dict[str, Term] = {}
        self._products: dict[tuple[str, ...], Term] = {}
        self._truths: dict[Constraint, Literal] = {}
        for name, values in domains.items():
            self._add(name, values)

    def variable(self, name: str) -> IntVar:
        """Return the variable of a name."""
        found: IntVar = self.terms[name].variable
        return found

    def _add(self, name: str, values: Iterable[int]) -> Term:
        self.terms[name] = self._integer(values, name)
        return self.terms[name]

    def _integer(self, values: Iterable[int], name: str = "") -> Term:
        from ortools.sat.python.cp_model import Domain

        listed = tuple(sorted({int(v) for v in values}))
        if not listed:
            self.model.add_bool_or([])  # nothing can hold
            listed = (1,)
        if max(abs(listed[0]), abs(listed[-1])) >= LARGEST:
            raise MosaicError(
                f"{name or 'a product'} reaches {listed[-1]}, which must be below 2^62; "
                "list fewer values."
            )
        domain = Domain.from_values(list(listed))
        return Term(self.model.new_int_var_from_domain(domain, name), listed)

    # ------------------------------------------------------------ products

    def _ordered(self, product: Product) -> tuple[tuple[str, ...], int]:
        """Split a product in the variables, in the order of the model, and the number."""
        names = [f for f in product if isinstance(f, str) and f not in self.constants]
        order = list(self.terms)
        known = (f if isinstance(f, int) else self.constants.get(f, 1) for f in product)
        return tuple(sorted(names, key=order.index)), prod(known)

    def _side(self, product: Product) -> tuple[Term, int]:
        """Return the term of a product's variables, and the number that goes with it."""
        names, number = self._ordered(product)
        return (self._term(names) if names else Term(None, (1,))), number

    def _term(self, names: tuple[str, ...], must_divide: int = 0) -> Term:
        """Return the product of variables; of a divisor of a number only where one is given."""
        if len(names) == 1:
            return self.terms[names[0]]
        if names not in self._products:
            left, right = self._term(names[:-1], must_divide), self.terms[names[-1]]
            self._within(left, right)
            rows = [(a, b, a * b) for a in left.values for b in right.values]
            if must_divide:
                rows = [row for row in rows if row[2] and must_divide % row[2] == 0]
            made = self._integer(row[2] for row in rows)
            self._table((left, right, made), rows)
            self._products[names] = made
        return self._products[names]

    @staticmethod
    def _within(left: Term, right: Term) -> None:
        rows = len(left.values) * len(right.values)
        if rows > MAX_ROWS:
            raise MosaicError(
                f"A table of {rows} rows is needed, of at most {MAX_ROWS}; list fewer values."
            )

    def _table(self, terms: Sequence[Term], rows: Sequence[tuple[int, ...]]) -> None:
        self.model.add_allowed_assignments([t.variable for t in terms], rows)

    # ------------------------------------------------------------ constraints

    def derive(self, name: str, quotient: Quotient) -> None:
        """Add a variable that is a quotient, which must be exact."""
        (above, over), (below, under) = self._side(quotient.dividend), self._side(quotient.divisor)
        self._within(above, below)
        rows = [
            (a, b, a * over // (b * under))
            for a in above.values
            for b in below.values
            if a * over % (b * under) == 0
        ]
        made = self._add(name, (row[2] for row in rows))
        named = [i for i, t in enumerate((above, below, made)) if t.variable is not None]
        self._table(
            [(above, below, made)[i] for i in named], [tuple(r[i] for i in named) for r in rows]
        )

    def require_all(self, constraints: Iterable[Constraint]) -> None:
        """Post constraints, products with a given total first: they keep the other tables short."""
        for constraint in sorted(constraints, key=self._free_total):
            self.require(constraint)

    def _free_total(self, constraint: Constraint) -> bool:
        return not (
            isinstance(constraint, ProductIs)
            and all(isinstance(f, int) or f in self.constants for f in constraint.total)
        )

    def require(self, constraint: Constraint) -> None:
        """Post a constraint that must hold."""
        if isinstance(constraint, ProductIs) and not self._free_total(constraint):
            names, number = self._ordered(constraint.factors)
            total = self._ordered(constraint.total)[1]
            if len(names) > 1 and number and total % number == 0:
                self._term(names, total // number)
        if isinstance(constraint, Implies):
            given, then = self.truth(constraint.condition), constraint.consequence
            if given is True:
                self.require(then)
            elif given is not False:
                self._clause([given.negated(), self.truth(then)])
        elif isinstance(constraint, AnyOf):
            self._clause([self.truth(one) for one in constraint.constraints])
        else:
            self._clause([self.truth(constraint)])

    def forbid_together(self, one: Any, other: Any) -> None:
        """Post that two truths do not both hold."""
        self._clause([_not(one), _not(other)])

    def _clause(self, literals: Sequence[Any]) -> None:
        if not any(one is True for one in literals):
            self.model.add_bool_or([one for one in literals if one is not False])

    def truth(self, constraint: Constraint) -> Any:
        """Return whether a constraint holds: a literal of the model, or a bool where it is known.

        Raises
        ------
        TypeError
            A kind of constraint that this does not know.
        """
        if constraint not in self._truths:
            self._truths[constraint] = self._decide(constraint)
        return self._truths[constraint]

    def _decide(self, constraint: Constraint) -> Any:
        if isinstance(constraint, Relation):
            return self._relation(constraint)
        if isinstance(constraint, OneOf | Table):
            return self._membership(constraint)
        if isinstance(constraint, Implies):
            given, then = self.truth(constraint.condition), self.truth(constraint.consequence)
            return self._any([_not(given), then])
        if isinstance(constraint, AnyOf):
            return self._any([self.truth(one) for one in constraint.constraints])
        raise TypeError(f"{type(constraint).__name__} is a kind of constraint without a posting")

    def _any(self, literals: Sequence[Any]) -> Any:
        if any(one is True for one in literals):
            return True
        open_ = [one for one in literals if one is not False]
        if len(open_) < 2:
            return open_[0] if open_ else False
        made = self.model.new_bool_var("")
        self.model.add_bool_or([*open_, made.negated()])
        for one in open_:
            self.model.add_implication(one, made)
        return made

    def _relation(self, constraint: Divides | ProductIs | AtMost | AtLeast) -> Any:
        (left, a), (right, b) = (self._side(side) for side in constraint.sides)
        self._within(left, right)
        rows = [
            (x, y, bool(constraint.related(a * x, b * y)))
            for x in left.values
            for y in right.values
        ]
        return self._reified((left, right), rows)

    def _membership(self, constraint: OneOf | Table) -> Any:
        names, listed = constraint.listed
        sides = [self._side((name,)) for name in names]
        size = prod(len(term.values) for term, _ in sides)
        if size > MAX_ROWS:
            raise MosaicError(f"A table of {size} rows is needed, of at most {MAX_ROWS}.")
        numbers = [number for _, number in sides]
        rows = [
            (*row, tuple(v * n for v, n in zip(row, numbers, strict=True)) in {*listed})
            for row in product_of(*(term.values for term, _ in sides))
        ]
        return self._reified([term for term, _ in sides], rows)

    def _reified(self, terms: Sequence[Term], rows: Sequence[tuple[int | bool, ...]]) -> Any:
        """Return the literal that the last entry of a row says, or the bool that all rows say."""
        said = {bool(row[-1]) for row in rows}
        if len(said) == 1:
            return said.pop()
        named = [i for i, t in enumerate(terms) if t.variable is not None]
        made = self.model.new_bool_var("")
        self.model.add_allowed_assignments(
            [*(terms[i].variable for i in named), made],
            [(*(row[i] for i in named), int(row[-1])) for row in rows],
        )
        return made


def _not(literal: Any) -> Any:
    return (not literal) if isinstance(literal, bool) else literal.negated()
