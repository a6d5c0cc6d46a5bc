"""Work on threads: order, what raises, and what stops."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from perfmodel.threads import in_order


def slow_if_even(item: int) -> int:
    time.sleep(0.002 if item % 2 == 0 else 0.0)
    return item * item


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_results_come_in_the_order_of_the_items(workers: int) -> None:
    assert list(in_order(slow_if_even, range(40), workers)) == [i * i for i in range(40)]
    assert list(in_order(slow_if_even, [], workers)) == []


def test_threads_are_a_few_items_ahead_and_no_more() -> None:
    taken = []

    def items() -> Iterator[int]:
        for item in range(1000):
            taken.append(item)
            yield item

    results = in_order(slow_if_even, items(), 2)
    assert next(results) == 0
    results.close()
    assert len(taken) <= 10


def test_what_an_item_raises_is_raised_in_its_place() -> None:
    results = in_order(lambda item: 1 // item, [1, 0, 1], 2)
    assert next(results) == 1
    with pytest.raises(ZeroDivisionError):
        next(results)
