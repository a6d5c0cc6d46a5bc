"""The catalogue: public models by name, each with the source of its shape.

>>> from perfmodel import catalogue
>>> catalogue["DeepSeek-V3"].n_total()
669173061120

One TOML file a family. A name is found whatever its case and punctuation; ``entry`` has the
source, the published counts, and what the model's description leaves out.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cached_property
from importlib import resources

from pydantic import ConfigDict, ValidationError

from perfmodel.architecture import Architecture
from perfmodel.errors import PerfmodelError
from perfmodel.frozen import Frozen, explain


class Published(Frozen):
    """Parameter counts as their authors round them; None where none was read."""

    model_config = ConfigDict(strict=True)

    total: int | None = None
    active: int | None = None
    source: str


class CatalogueEntry(Frozen):
    """One public model.

    Attributes
    ----------
    architecture : Architecture
    aliases : tuple of str
        Other names that find it.
    source : str
        Where its shape was read, and what of it was assumed.
    published : Published or None
        Counts that its authors state.
    notes : tuple of str
        What differs from the model's own description.
    """

    architecture: Architecture
    aliases: tuple[str, ...] = ()
    source: str
    published: Published | None = None
    notes: tuple[str, ...] = ()


def _key(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter.isalnum())


def _entry(fields: dict[str, object], family: str) -> CatalogueEntry:
    beside = {k: fields[k] for k in ("aliases", "source", "published", "notes") if k in fields}
    shape = {k: v for k, v in fields.items() if k not in beside}
    try:
        return CatalogueEntry.model_validate({"architecture": shape, **beside})
    except ValidationError as error:
        raise PerfmodelError(
            f"Model {fields.get('name')} of {family}: {explain(error, CatalogueEntry)}."
        ) from None


class Catalogue(Mapping[str, Architecture]):
    """Architectures by name; iteration gives the names, by family."""

    @cached_property
    def _entries(self) -> dict[str, CatalogueEntry]:
        found: dict[str, CatalogueEntry] = {}
        for file in sorted(resources.files(__name__).iterdir(), key=lambda file: file.name):
            if file.name.endswith(".toml"):
                for fields in tomllib.loads(file.read_text("utf-8"))["model"]:
                    entry = _entry(fields, file.name)
                    found[entry.architecture.name] = entry
        return found

    @cached_property
    def _keys(self) -> dict[str, str]:
        keys = {_key(a): name for name, entry in self._entries.items() for a in entry.aliases}
        return keys | {_key(name): name for name in self._entries}

    def entry(self, name: str) -> CatalogueEntry:
        """Return a model with its sources.

        Raises
        ------
        PerfmodelError
            No model of that name; the message has the nearest names.
        """
        found = self._keys.get(_key(name))
        if found is None:
            near = self.near(name)
            hint = f"did you mean {' or '.join(near)}?" if near else "`mosaic models` lists them."
            raise PerfmodelError(f"The catalogue has no model {name[:60]!r}; {hint}")
        return self._entries[found]

    def near(self, name: str) -> tuple[str, ...]:
        """Return up to three names like one that is not there."""
        close = get_close_matches(_key(name), self._keys, n=3, cutoff=0.5)
        return tuple(dict.fromkeys(self._keys[key] for key in close))

    def __getitem__(self, name: str) -> Architecture:
        """Return a model of any spelling of its name."""
        return self.entry(name).architecture

    def __contains__(self, name: object) -> bool:
        """Say whether a name, or an alias, is there."""
        return isinstance(name, str) and _key(name) in self._keys

    def __iter__(self) -> Iterator[str]:
        """Go through the names."""
        return iter(self._entries)

    def __len__(self) -> int:
        """Return the number of models."""
        return len(self._entries)


catalogue = Catalogue()
