"""Backends by name, imported when they are asked for.

What another distribution registers may be anything: whatever is wrong with it is said in words, and
leaves the other backends as they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass

from mosaic_opt.backends.base import Availability, Backend, Capability
from mosaic_opt.backends.entries import BACKENDS, Entry, entries
from mosaic_opt.entry_points import loaded
from mosaic_opt.errors import MosaicError, said

__all__ = [
    "BACKENDS",
    "Listed",
    "availability",
    "backend_class",
    "described",
    "listing",
    "made",
    "resolve",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A registered backend, and whether it can run here.

    Attributes
    ----------
    name : str
    origin : str
        The distribution that registers it.
    provides : Capability or None
        None where it cannot be loaded.
    availability : Availability
    reason : str
        Why it cannot run; empty where it can.
    note : str
        One sentence on who else registers the name of a built-in backend; empty if nobody does.
    """

    name: str
    origin: str
    provides: Capability | None
    availability: Availability
    reason: str
    note: str


class _BrokenError(Exception):
    """What is wrong with a class that is registered as a backend, as a clause."""


def backend_class(name: str) -> type[Backend]:
    """Return the class of a backend.

    Raises
    ------
    MosaicError
        No backend has that name, and the sentence lists those that there are; or what another
        distribution registered under it is no backend.
    """
    entry = _entry(name)
    try:
        return _load(entry)
    except _BrokenError as error:
        raise MosaicError(
            f"Backend {name!r} of {entry.origin} cannot be loaded: {error}."
        ) from error.__cause__


def resolve(backend: Backend | str) -> Backend:
    """Return a backend, made with its default options where a name is given.

    Warns where another distribution registers the name of a built-in backend.

    Raises
    ------
    MosaicError
        Unknown name, or a backend that cannot run here.
    """
    if isinstance(backend, Backend):
        return backend
    entry = _entry(backend)
    if entry.note:
        warnings.warn(entry.note, stacklevel=2)
    return made(backend)


def made(name: str) -> Backend:
    """Return the backend of a name with its default options.

    Raises
    ------
    MosaicError
        Unknown name, or a backend that cannot run here.
    """
    found = backend_class(name)
    try:
        state = _state(found)
    except _BrokenError as error:
        raise MosaicError(f"Backend {name} cannot run here: {error}.") from error.__cause__
    if not state:
        raise MosaicError(f"Backend {name} cannot run here: {state.value}.")
    try:
        return found()
    except MosaicError:
        raise
    except Exception as error:  # a stranger's class may raise anything; one of ours is a bug
        if name in BACKENDS:
            raise
        raise MosaicError(
            f"Backend {name} cannot be made with its default options: {said(error)}."
        ) from error


def availability() -> dict[str, Availability]:
    """Return whether each registered backend can run here."""
    return {each.name: each.availability for each in listing()}


def listing(names: Iterable[str] | None = None) -> tuple[Listed, ...]:
    """Return what is known of registered backends: all of them, or those named. Each is loaded.

    Raises
    ------
    MosaicError
        No backend has one of the names.
    """
    chosen = entries().values() if names is None else [_entry(name) for name in names]
    return tuple(_listed(entry) for entry in chosen)


def described(backend: Backend) -> Listed:
    """Return the same of a backend that was made by hand, whether or not it is registered."""
    kind = type(backend)
    return _asked(kind, backend.name, f"{kind.__module__}:{kind.__qualname__}", "")


def _entry(name: str) -> Entry:
    known = entries()
    if name not in known:
        raise MosaicError(f"There is no backend {name!r}; there are {', '.join(known)}.")
    return known[name]


def _listed(entry: Entry) -> Listed:
    try:
        kind = _load(entry)
    except _BrokenError as error:
        return Listed(
            name=entry.name,
            origin=entry.origin,
            provides=None,
            availability=Availability.BROKEN,
            reason=str(error),
            note=entry.note,
        )
    return _asked(kind, entry.name, entry.origin, entry.note)


def _asked(kind: type[Backend], name: str, origin: str, note: str) -> Listed:
    try:
        state = _state(kind)
        reason = "" if state else state.value
    except _BrokenError as error:
        state, reason = Availability.BROKEN, str(error)
    return Listed(
        name=name,
        origin=origin,
        provides=kind.provides,
        availability=state,
        reason=reason,
        note=note,
    )


def _load(entry: Entry) -> type[Backend]:
    """Import the class of a backend; one of another distribution is looked at first."""
    if entry.clash:
        raise _BrokenError(entry.clash)
    if entry.built_in:
        own: type[Backend] = loaded(entry.value)
        return own
    try:
        found = loaded(entry.value)
    except (Exception, SystemExit) as error:  # a stranger's module may raise anything
        raise _BrokenError(f"{entry.value} fails with {said(error)}") from error
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise _BrokenError(f"{entry.value} is no subclass of mosaic_opt.Backend")
    if getattr(found, "name", None) != entry.name:
        named = getattr(found, "name", None)
        raise _BrokenError(f"its name is {named!r}, and it is registered as {entry.name!r}")
    if not (isinstance(getattr(found, "provides", None), Capability) and found.provides):
        raise _BrokenError("its `provides` is no Capability")
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise _BrokenError(f"it has no {' and no '.join(missing)}")
    return found


def _state(kind: type[Backend]) -> Availability:
    """Ask a backend whether it can run here."""
    try:
        state = kind.availability()
    except Exception as error:  # the same of what it says of itself
        raise _BrokenError(f"its availability fails with {said(error)}") from error
    if not isinstance(state, Availability):
        raise _BrokenError(f"its availability is {state!r}, which is no Availability")
    return state
