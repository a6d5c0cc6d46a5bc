"""Documents of a user, read by safe parsers: JSON, YAML and TOML, by the ending of the file."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from lawfit._values import LawError

__all__ = ["READERS", "parse_json", "parse_yaml", "read_document", "read_text"]


class _Loader(yaml.SafeLoader):
    """The safe loader, with numbers as YAML 1.2 has them: ``1.5e12`` is one."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)$"),
    list("-+.0123456789"),
)


def parse_yaml(text: str) -> Any:
    """Parse YAML, numbers as version 1.2 has them.

    Raises
    ------
    ValueError
        The text is no YAML, or asks for more than plain values.
    """
    try:
        return yaml.load(text, Loader=_Loader)  # a subclass of the safe one
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def parse_json(text: str) -> Any:
    """Parse JSON; NaN and infinities, which are none of it, are refused.

    Raises
    ------
    ValueError
        The text is no JSON.
    """

    def finite(token: str) -> float:
        raise ValueError(f"{token} is not a number")

    return json.loads(text, parse_constant=finite)


READERS: Mapping[str, Callable[[str], Any]] = MappingProxyType(
    {".yaml": parse_yaml, ".yml": parse_yaml, ".toml": tomllib.loads, ".json": parse_json}
)
"""The parser of each ending."""


def read_document(path: str | Path) -> Any:
    """Read a YAML, TOML or JSON file with a safe parser.

    Parameters
    ----------
    path : str or Path
        The file; its ending says which parser.

    Returns
    -------
    Any
        Plain values: mappings, lists, texts, numbers, dates, None.

    Raises
    ------
    LawError
        The file cannot be read, is of another kind, or does not parse.
    """
    file = Path(path)
    if file.suffix not in READERS:
        raise LawError(f"{file} must end in {', '.join(READERS)}.")
    text = read_text(file)
    try:
        return READERS[file.suffix](text)
    except (ValueError, RecursionError) as error:
        detail = " ".join(str(error).split())[:200]
        raise LawError(f"{file} is not valid {file.suffix[1:].upper()}: {detail}.") from None


def read_text(file: Path) -> str:
    """Return the text of a file, without a byte order mark.

    Raises
    ------
    LawError
        It cannot be read.
    """
    try:
        return file.read_text("utf-8-sig")
    except OSError as error:
        raise LawError(f"{file} cannot be read: {error.strerror}.") from None
    except ValueError:  # bytes that are no text, or a name that is no path
        raise LawError(f"{str(file)!r} cannot be read: it is not UTF-8 text.") from None
