"""One source for every formula: plain Python for one plan, compiled for millions.

A function marked :func:`formula` stays an ordinary Python function when it is called from Python,
and is compiled by numba when a compiled kernel calls it. The scalar estimate and the batch kernel
therefore evaluate the same lines of source.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from numba import njit
from numba.extending import register_jitable

F = TypeVar("F", bound=Callable[..., Any])


def formula(function: F) -> F:
    """Mark a function of the numba subset as callable from Python and from compiled kernels."""
    # it returns the function itself; inlining is LLVM's choice, whatever the caller asks for
    register_jitable(no_cfunc_wrapper=True, forceinline=False)(function)
    return function


def inner_formula(function: F) -> F:
    """Mark a :func:`formula` of the inner loops, which compiled code inlines wherever it is called.

    For formulas that run once a plan or once a pipeline; elsewhere it costs time to compile.
    """
    register_jitable(no_cfunc_wrapper=True, forceinline=True)(function)
    return function


@cache
def formulas_digest() -> str:
    """SHA-256 over the package's Python sources; part of the key of every cached kernel.

    numba decides whether a cached kernel is stale from the file of that kernel alone; the
    digest makes it depend on the formulas that the kernel calls as well.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def compile_kernel(function: F) -> F:
    """Compile with numba (no GIL, IEEE arithmetic), cached on disk where some place is writable.

    ``NUMBA_CACHE_DIR`` is honoured. With no writable place at all (a read-only install and no
    home directory) the kernel is compiled for this process only.
    """
    try:
        compiled = njit(function, cache=True, nogil=True, error_model="numpy")
    except RuntimeError:  # numba: "cannot cache function: no locator available"
        compiled = njit(function, nogil=True, error_model="numpy")
    return cast("F", compiled)
