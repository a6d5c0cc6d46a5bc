"""Nested named tuples of floats as structured arrays, which compiled kernels take by reference."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["as_record", "as_records"]


_DTYPES: dict[type, np.dtype[Any]] = {}


def _numbers(value: Any) -> list[float]:
    """List the floats of a nested named tuple in order."""
    if not isinstance(value, tuple):
        return [value]
    return [number for part in value for number in _numbers(part)]


def _fields(value: Any) -> list[tuple[str, Any]]:
    """Describe a named tuple as numpy describes a structure."""
    return [
        (name, _fields(part) if isinstance(part, tuple) else np.float64)
        for name, part in zip(value._fields, value, strict=True)
    ]


@lru_cache(maxsize=64)
def as_record(value: tuple[Any, ...]) -> NDArray[np.void]:
    """Return a named tuple of floats, nested to any depth, as a structured array of shape (1,).

    Fields keep their names, so a formula reads ``hw.device.memory_bw`` of either. A compiled
    function is handed one pointer in place of every number, which makes it smaller, and quicker to
    compile and to call. The array cannot be written to.
    """
    return as_records((value,))


def as_records(values: Sequence[tuple[Any, ...]]) -> NDArray[np.void]:
    """Return named tuples of one type as a structured array of shape (n,); see :func:`as_record`.

    ``values`` holds one or more.
    """
    kind = type(values[0])
    if kind not in _DTYPES:
        _DTYPES[kind] = np.dtype(_fields(values[0]))
    flat = not any(isinstance(part, tuple) for part in values[0])
    rows = np.array(values if flat else [_numbers(value) for value in values], dtype=np.float64)
    records = rows.view(_DTYPES[kind]).reshape(-1)
    records.flags.writeable = False
    return records
