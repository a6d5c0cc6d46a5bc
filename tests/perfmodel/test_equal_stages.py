"""Plans with equal stages cost what they did before stages could be uneven."""

from __future__ import annotations

import json

import pytest

from .equal_stages import HERE, priced


def test_equal_stages_cost_what_they_did() -> None:
    """Bit for bit where they were recorded; elsewhere a library's logarithm may round otherwise."""
    for name, text, values in json.loads(HERE.read_text(encoding="utf-8")):
        expected = [float.fromhex(value) for value in values]
        assert priced(name, text) == pytest.approx(expected, rel=1e-14, abs=0), (name, text)
