"""Laws of the constraint kinds: one code for integers and arrays, and honest explanations."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    compile_order,
)

NAMES = ("a", "b", "c")
SMALL = st.integers(1, 12)

products: st.SearchStrategy[Product] = st.lists(
    st.one_of(st.sampled_from(NAMES), st.integers(1, 4)), min_size=1, max_size=3
).map(tuple)
leaves: st.SearchStrategy[Constraint] = st.one_of(
    *(st.builds(kind, products, products) for kind in (Divides, ProductIs, AtMost, AtLeast)),
    st.builds(OneOf, st.sampled_from(NAMES), st.lists(SMALL, min_size=1, max_size=3).map(tuple)),
    st.builds(
        Table,
        st.just(("a", "b")),
        st.lists(st.tuples(SMALL, SMALL), min_size=1, max_size=3).map(tuple),
    ),
)
constraints: st.SearchStrategy[Constraint] = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(Implies, inner, inner),
        st.builds(AnyOf, st.lists(inner, min_size=1, max_size=3).map(tuple)),
    ),
    max_leaves=4,
)
assignments = st.fixed_dictionaries({name: SMALL for name in NAMES})


@pytest.mark.parametrize(
    ("constraint", "legal", "illegal"),
    [
        (Divides(("a", 2), ("b", "c")), (3, 2, 9), (3, 2, 4)),
        (ProductIs(("a", "b"), ("c",)), (3, 4, 12), (3, 4, 11)),
        (AtMost(("a",), ("b",)), (3, 3, 1), (4, 3, 1)),
        (AtLeast(("a",), ("b",)), (3, 3, 1), (3, 4, 1)),
        (OneOf("a", (1, 4)), (4, 9, 9), (3, 9, 9)),
        (Table(("a", "b"), ((1, 2), (3, 4))), (3, 4, 9), (1, 4, 9)),
        (Implies(AtLeast(("a",), (2,)), AtLeast(("b",), (2,))), (1, 1, 1), (2, 1, 1)),
        (AnyOf((Divides(("a",), ("b",)), Divides(("b",), ("a",)))), (8, 4, 1), (3, 4, 1)),
    ],
)
def test_each_kind_tells_legal_from_illegal(
    constraint: Constraint, legal: Sequence[int], illegal: Sequence[int]
) -> None:
    assert constraint.holds(dict(zip(NAMES, legal, strict=True))) is True
    assert constraint.holds(dict(zip(NAMES, illegal, strict=True))) is False


def test_every_positive_integer_divides_zero() -> None:
    assert Divides(("a",), ("b",)).holds({"a": 7, "b": 0})


@given(constraints, st.lists(assignments, min_size=1, max_size=8))
def test_columns_agree_with_integers(constraint: Constraint, rows: list[dict[str, int]]) -> None:
    columns = {name: np.array([row[name] for row in rows], dtype=np.int64) for name in NAMES}
    mask = np.broadcast_to(constraint.holds(columns), len(rows))
    assert mask.dtype == np.bool_
    assert mask.tolist() == [constraint.holds(row) for row in rows]


@given(constraints, assignments)
def test_axes_broadcast(constraint: Constraint, row: dict[str, int]) -> None:
    a, b = np.arange(1, 5)[:, None], np.arange(1, 7)[None, :]
    mask = np.broadcast_to(constraint.holds({**row, "a": a, "b": b}), (4, 6))
    for i, j in itertools.product(range(4), range(6)):
        assert mask[i, j] == constraint.holds({**row, "a": i + 1, "b": j + 1})


@given(constraints, assignments)
def test_only_the_named_variables_are_read(constraint: Constraint, row: dict[str, int]) -> None:
    needed = {name: row[name] for name in constraint.variables}
    assert constraint.holds(needed) == constraint.holds(row)
    value, limit = constraint.numbers(needed)
    assert isinstance(value, int)
    assert isinstance(limit, int)
    assert constraint.sentence(needed)
    for name in constraint.variables:
        assert name in str(constraint)


@given(constraints, assignments, st.sampled_from(NAMES))
def test_nearest_is_what_a_search_outwards_finds(
    constraint: Constraint, row: dict[str, int], name: str
) -> None:
    legal = [v for v in range(1, 41) if constraint.holds({**row, name: v})]
    expected = [
        *[v for v in legal if v < row[name]][-1:],
        *[v for v in legal if v > row[name]][:1],
    ]
    assert list(constraint.nearest(row, name, range(40, 0, -1))) == expected


def test_nearest_is_exact_where_products_leave_64_bits() -> None:
    rule = ProductIs(("a", "b"), ("c",))
    assert rule.nearest({"a": 2**40, "b": 5, "c": 2**43}, "b", range(1, 20)) == (8,)
    assert rule.nearest({"a": 2**62, "b": 4, "c": 2**65}, "b", range(1, 20)) == (8,)
    assert rule.nearest({"a": 2**62, "b": 4, "c": 2**63 + 2**62}, "b", range(1, 20)) == (3,)


def test_sentences_name_both_numbers() -> None:
    values = {"a": 6, "b": 4, "c": 7}
    assert Divides(("a", "b"), ("c",)).sentence(values) == "a*b=24 must divide c=7"
    assert AtMost(("a",), (3,)).sentence(values) == "a=6 must be at most 3"
    assert OneOf("a", (1, 8)).sentence(values) == "a=6 must be one of 1, 8"
    assert OneOf("a", (1, 8)).numbers(values) == (6, 8)
    assert Table(("a", "b"), ((6, 5), (1, 1))).numbers(values) == (4, 5)
    implied = Implies(AtLeast(("a",), (2,)), Divides(("b",), ("c",)))
    assert implied.sentence(values) == "b=4 must divide c=7 when a=6"
    assert implied.numbers(values) == (4, 7)
    assert str(implied) == "b divides c where a >= 2"


@given(constraints, assignments, st.sets(st.sampled_from(NAMES)))
def test_what_is_necessary_is_implied(
    constraint: Constraint, row: dict[str, int], bound: set[str]
) -> None:
    early = constraint.necessary(frozenset(bound))
    if early is not None:
        assert early.variables <= bound
        assert early.holds(row) or not constraint.holds(row)


def test_a_factor_of_a_divisor_is_pruned_early() -> None:
    fold = Divides(("a", "b"), ("c",))
    assert compile_order([fold], ("a", "b"), ("c",)) == ((Divides(("a",), ("c",)),), (fold,))
    product = ProductIs(("a", "b"), ("c",))
    assert compile_order([product], ("a", "b"), ("c",)) == ((Divides(("a",), ("c",)),), (product,))
    constant = OneOf("c", (1, 2))
    assert compile_order([constant], ("a", "b"), ("c",)) == ((constant,), ())
    assert compile_order([product], ("c", "b", "a")) == (
        (),
        (Divides(("b",), ("c",)),),
        (product,),
    )


def _leaves_of_pruned_loops(
    levels: Sequence[Sequence[Constraint]], row: Mapping[str, int], depth: int = 0
) -> list[tuple[int, ...]]:
    if depth == len(NAMES):
        return [tuple(row[name] for name in NAMES)]
    found = []
    for value in range(1, 5):
        longer = {**row, NAMES[depth]: value}
        if all(c.holds(longer) for c in levels[depth]):
            found += _leaves_of_pruned_loops(levels, longer, depth + 1)
    return found


@given(st.lists(constraints, max_size=3))
def test_pruned_loops_visit_exactly_the_legal_leaves(rules: list[Constraint]) -> None:
    every = itertools.product(range(1, 5), repeat=3)
    legal = [r for r in every if all(c.holds(dict(zip(NAMES, r, strict=True))) for c in rules)]
    assert _leaves_of_pruned_loops(compile_order(rules, NAMES), {}) == legal


@given(SMALL, SMALL, SMALL)
def test_a_quotient_undoes_a_product(a: int, b: int, c: int) -> None:
    quotient = Quotient(("c",), ("a", "b"))
    exact = quotient.defined.holds({"a": a, "b": b, "c": c})
    assert exact == (quotient.value({"a": a, "b": b, "c": c}) * a * b == c)
