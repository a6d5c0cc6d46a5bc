"""Backends by name, imported when they are asked for."""

from __future__ import annotations

from importlib import import_module

from mosaic_opt.backends.base import Availability, Backend
from mosaic_opt.errors import MosaicError

BACKENDS = {
    "enumerate": "mosaic_opt.backends.enumerate:Enumerate",
    "branch": "mosaic_opt.backends.branch:BranchAndBound",
    "gp": "mosaic_opt.backends.gp:GeometricProgram",
    "cpsat": "mosaic_opt.backends.cpsat.search:CpSat",
}
"""Name of a backend -> ``module:Class``."""


def backend_class(name: str) -> type[Backend]:
    """Return the class of a backend.

    Raises
    ------
    MosaicError
        No backend has that name; the sentence lists those that there are.
    """
    if name not in BACKENDS:
        raise MosaicError(f"There is no backend {name!r}; there are {', '.join(BACKENDS)}.")
    module, _, attribute = BACKENDS[name].partition(":")
    found: type[Backend] = getattr(import_module(module), attribute)
    return found


def resolve(backend: Backend | str) -> Backend:
    """Return a backend, made with its default options where a name is given.

    Raises
    ------
    MosaicError
        Unknown name, or a backend that cannot run here.
    """
    if isinstance(backend, Backend):
        return backend
    found = backend_class(backend)
    state = found.availability()
    if not state:
        raise MosaicError(f"Backend {backend} cannot run here: {state.value}.")
    return found()


def availability() -> dict[str, Availability]:
    """Return whether each backend can run here."""
    return {name: backend_class(name).availability() for name in BACKENDS}
