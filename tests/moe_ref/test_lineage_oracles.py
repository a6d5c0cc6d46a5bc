"""Each router of the lineage equals a public implementation, where one is installed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

from . import oracles  # noqa: F401 - it registers its comparisons
from .comparing import (
    COMPARISONS,
    LIBRARIES,
    Comparison,
    largest_difference,
    present,
)

PAGE = Path(__file__).parents[2] / "docs" / "theory" / "routers.md"


def name_of(comparison: Comparison) -> str:
    return f"{comparison.library}: {comparison.function}"


@pytest.mark.parametrize("comparison", COMPARISONS, ids=name_of)
def test_a_router_equals_the_library(
    comparison: Comparison, record_property: Callable[[str, object], None]
) -> None:
    if present(comparison.library) is None:
        pytest.skip(f"{comparison.library} is not installed (extra `oracles`)")
    apart = largest_difference(comparison)
    record_property("largest difference", apart)
    assert apart <= comparison.tolerance


def test_which_libraries_were_there(record_property: Callable[[str, object], None]) -> None:
    found = {library: present(library) for library in LIBRARIES}
    record_property("libraries", found)
    compared = Counter(c.library for c in COMPARISONS)
    assert set(compared) == set(LIBRARIES), "a library is listed and not compared, or not listed"
    if not any(found.values()):
        pytest.skip("no library is installed: `pip install -e '.[oracles]'` brings them")


def test_the_page_lists_every_comparison() -> None:
    text = PAGE.read_text()
    for comparison in COMPARISONS:
        row = f"| {comparison.library} | {comparison.function} | {comparison.ours} |"
        assert row in text, f"docs/theory/routers.md has no row {row}"
