"""Records as TOML text; the standard library reads TOML and does not write it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel


def record_toml(record: BaseModel, header: str = "") -> str:
    """Return the record as TOML, with ``header`` as a comment on top."""
    comment = "".join(f"# {line}".rstrip() + "\n" for line in header.splitlines())
    content = record.model_dump(mode="json", exclude_none=True)
    return comment + "\n".join(_table((), content)).lstrip("\n") + "\n"


def _table(path: tuple[str, ...], table: Mapping[str, Any]) -> Iterator[str]:
    plain = {key: value for key, value in table.items() if not isinstance(value, dict)}
    if path and plain:
        yield f"\n[{'.'.join(map(_key, path))}]"
    for key, value in plain.items():
        yield f"{_key(key)} = {_value(value)}"
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _table((*path, key), value)


def _key(key: str) -> str:
    bare = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if bare else _value(key)


def _value(value: Any) -> str:
    match value:
        case str():
            escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
            return f'"{escaped}"'
        case bool():
            return str(value).lower()
        case int():
            return str(value)
        case float():
            return repr(value)
        case list():
            return f"[{', '.join(map(_value, value))}]"
        case _:
            raise TypeError(f"TOML has no form for {type(value).__name__}")
