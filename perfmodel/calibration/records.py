"""Records on disk: TOML files with a strict schema, shipped by name or given by path."""

from __future__ import annotations

import hashlib
import json
import tomllib
from functools import cached_property
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field, ValidationError

from perfmodel.errors import PerfmodelError
from perfmodel.frozen import Frozen, explain

Text = Annotated[str, Field(min_length=1)]
Record = TypeVar("Record", bound="FrozenRecord")


class PackError(PerfmodelError):
    """A pack that cannot be found, read or trusted; the message is one sentence."""


class FrozenRecord(Frozen):
    """A frozen record that refuses unknown keys."""

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the content; two files that say the same have the same digest."""
        content = self.model_dump(mode="json", exclude_none=True)
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def shipped(folder: str) -> tuple[str, ...]:
    """Return the names of the records that come with the library."""
    names = (entry.name for entry in _shipped_folder(folder).iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def read_record(name_or_path: str | Path, folder: str, what: str, kind: type[Record]) -> Record:
    """Read a record: the name of a shipped one, or the path of a TOML file.

    Raises
    ------
    PackError
        In one sentence: no such record, not TOML, or a key whose value breaks a rule.
    """
    text, origin = _read(name_or_path, folder, what)
    label = what[:1].upper() + what[1:]
    try:
        return kind.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise PackError(f"{label} {origin} is not valid TOML: {error}.") from None
    except ValidationError as error:
        raise PackError(f"{label} {origin} is invalid: {explain(error, kind)}.") from None


def _shipped_folder(folder: str) -> Traversable:
    return resources.files("perfmodel.calibration") / "data" / folder


def _read(name_or_path: str | Path, folder: str, what: str) -> tuple[str, str]:
    names = shipped(folder)
    if isinstance(name_or_path, str) and name_or_path in names:
        return (_shipped_folder(folder) / f"{name_or_path}.toml").read_text("utf-8"), name_or_path
    path = Path(name_or_path)
    if path.suffix != ".toml" or "\0" in str(path):
        raise PackError(
            f"There is no {what} {str(name_or_path)!r}: give the path of a .toml file or one of "
            f"the shipped ones ({', '.join(names)})."
        )
    try:
        return path.read_text("utf-8"), str(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise PackError(f"{what[:1].upper()}{what[1:]} {path} cannot be read: {reason}.") from None
