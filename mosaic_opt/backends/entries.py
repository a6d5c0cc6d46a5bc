"""Names of backends: those of this package, and those that other distributions register.

A distribution registers a backend by an entry point of the group :data:`GROUP`. Reading the names
imports none of their code, nor anything heavy of this package.
"""

from __future__ import annotations

from dataclasses import dataclass

from mosaic_opt.entry_points import registered

GROUP = "mosaic_opt.backends"

OWN = "mosaic-opt"

BACKENDS = {
    "enumerate": "mosaic_opt.backends.enumerate:Enumerate",
    "branch": "mosaic_opt.backends.branch:BranchAndBound",
    "gp": "mosaic_opt.backends.gp:GeometricProgram",
    "cpsat": "mosaic_opt.backends.cpsat.search:CpSat",
}
"""Name of a built-in backend -> ``module:Class``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A registered name.

    Attributes
    ----------
    name : str
    value : str
        ``module:Class``.
    origin : str
        Name and version of the distribution that registers it; "mosaic-opt" for a built-in one.
    rivals : tuple of str
        Distributions that register the same name. A built-in backend is used in spite of them; of
        two others neither is.
    """

    name: str
    value: str
    origin: str
    rivals: tuple[str, ...]

    @property
    def built_in(self) -> bool:
        """Whether this package has it."""
        return self.name in BACKENDS

    @property
    def note(self) -> str:
        """One sentence on who registers the name of a built-in backend; empty if nobody does."""
        if not self.built_in or not self.rivals:
            return ""
        return (
            f"{_listed(self.rivals)} registers a backend under the name {self.name!r}, which is "
            "built in: the built-in one is used."
        )

    @property
    def clash(self) -> str:
        """Why the name leads nowhere; empty if it leads to one class."""
        if self.built_in or not self.rivals:
            return ""
        return f"registered by each of {_listed((self.origin, *self.rivals))}: keep one of them"


def entries() -> dict[str, Entry]:
    """Return every registered backend by name: the built-in ones, then the others by name."""
    found = {name: [(value, OWN)] for name, value in BACKENDS.items()}
    for point in registered(GROUP):
        found.setdefault(point.name, []).append((point.value, point.origin))
    return {
        name: Entry(
            name=name,
            value=claims[0][0],
            origin=claims[0][1],
            rivals=tuple(origin for _, origin in claims[1:]),
        )
        for name, claims in found.items()
    }


def names() -> tuple[str, ...]:
    """Return the names of all registered backends, the built-in ones first."""
    return tuple(entries())


def _listed(words: tuple[str, ...]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
