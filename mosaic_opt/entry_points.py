"""What distributions register under a group of entry points, by their metadata alone.

Reading it imports none of their code, nor anything heavy of this package; `loaded` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import Any

__all__ = ["Registered", "loaded", "registered"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """One entry point.

    Attributes
    ----------
    name : str
    value : str
        ``module:attribute``.
    origin : str
        Name and version of the distribution that registers it.
    """

    name: str
    value: str
    origin: str


def registered(group: str) -> list[Registered]:
    """Return the entry points of a group, by name and distribution."""
    found = [
        Registered(
            name=point.name,
            value=point.value.partition("[")[0].strip(),  # extras are for installers
            origin=origin,
        )
        for point, origin in _points(group)
    ]
    return sorted(found, key=lambda each: (each.name, each.origin))


def loaded(value: str) -> Any:
    """Return what ``module:attribute`` names; whatever its module raises is raised."""
    module, _, attribute = value.partition(":")
    found: Any = import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found


def _points(group: str) -> Iterator[tuple[EntryPoint, str]]:
    """Yield the entry points of the group, and which distribution has them.

    As in an import, the first of two distributions of one name on the path counts.
    """
    seen = set()
    for distribution in distributions():
        try:
            points = [p for p in distribution.entry_points if p.group == group]
        except Exception:  # whatever is wrong with its files: it registers nothing
            continue
        if not points:
            continue
        name, version = _title(distribution)
        if name is not None and name in seen:
            continue
        seen.add(name)
        for point in points:
            yield point, " ".join(part for part in (name, version) if part) or point.value


def _title(distribution: Distribution) -> tuple[str | None, str | None]:
    try:
        return distribution.name, distribution.version
    except Exception:  # without metadata of its own
        return None, None
