"""The architecture, token budget and layout with the least predicted loss on a given cluster.

>>> from mosaic_opt import example, solve
>>> solution = solve(example("table3"))

Names are loaded when they are first used: importing the package loads no solver.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mosaic_opt.backends.base import Backend, Limits, Progress, Report
    from mosaic_opt.backends.cpsat.search import CpSat
    from mosaic_opt.backends.enumerate import Enumerate
    from mosaic_opt.certificate import Certificate, certify
    from mosaic_opt.envelope import Envelope, example, examples, json_schema, load_envelope
    from mosaic_opt.errors import EnvelopeError, MosaicError
    from mosaic_opt.problem import Problem
    from mosaic_opt.result import Solution, Status
    from mosaic_opt.solver import solve
    from mosaic_opt.stage_search import StageSearch, search_stages

_HOMES = {
    "Backend": "backends.base",
    "Certificate": "certificate",
    "CpSat": "backends.cpsat.search",
    "Enumerate": "backends.enumerate",
    "Envelope": "envelope",
    "EnvelopeError": "errors",
    "Limits": "backends.base",
    "MosaicError": "errors",
    "Problem": "problem",
    "Progress": "backends.base",
    "Report": "backends.base",
    "Solution": "result",
    "StageSearch": "stage_search",
    "Status": "result",
    "certify": "certificate",
    "example": "envelope",
    "examples": "envelope",
    "json_schema": "envelope",
    "load_envelope": "envelope",
    "search_stages": "stage_search",
    "solve": "solver",
}

__all__ = [
    "Backend",
    "Certificate",
    "CpSat",
    "Enumerate",
    "Envelope",
    "EnvelopeError",
    "Limits",
    "MosaicError",
    "Problem",
    "Progress",
    "Report",
    "Solution",
    "StageSearch",
    "Status",
    "certify",
    "example",
    "examples",
    "json_schema",
    "load_envelope",
    "search_stages",
    "solve",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
