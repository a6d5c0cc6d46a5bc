"""The base of every record of these packages, and what is said of one that is not valid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError


class Frozen(BaseModel):
    """A frozen record that refuses unknown fields.

    Cached properties live in the instance's ``__dict__``; a changed copy leaves them behind.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with some fields changed (not validated), and nothing derived kept."""
        copy = super().model_copy(update=update, deep=deep)
        for name in set(copy.__dict__) - set(type(self).model_fields):
            del copy.__dict__[name]
        return copy


_SHOWN_LETTERS = 60


def shown(value: object) -> str:
    """Write a value in one short line: itself if it is a plain one, else its type."""
    if not isinstance(value, str | int | float):
        return type(value).__name__
    text = repr(value)
    return text if len(text) <= _SHOWN_LETTERS else text[: _SHOWN_LETTERS - 3] + "..."


def _names_at(model: type[BaseModel], path: tuple[Any, ...]) -> list[str]:
    """Names of the fields of the model that ``path`` leads to, as far as it can be followed.

    Behind a discriminated union the path has the tag, which chooses among its members.
    """
    options: list[Any] = [model]
    for part in path:
        tagged = [o for o in options if _tag(o) == part]
        if tagged:
            options = tagged
            continue
        field = next((o.model_fields[part] for o in options if part in o.model_fields), None)
        if field is None:
            continue
        options = [o for o in _members(field.annotation) if hasattr(o, "model_fields")]
    return [name for option in options[:1] for name in option.model_fields]


def _members(annotation: Any) -> Iterator[Any]:
    yield annotation
    for argument in get_args(annotation):
        yield from _members(argument)


def _tag(model: Any) -> Any:
    """Return the value of a model's ``kind`` field, if it has one that is a single literal."""
    field = model.model_fields.get("kind")
    if field is None:
        return None
    values = get_args(field.annotation)
    return values[0] if len(values) == 1 else None


def explain(error: ValidationError, model: type[BaseModel] | None = None) -> str:
    """Return pydantic's first complaint as a clause: key, value, rule, nearest legal value."""
    # A misspelt name also makes the right one missing: say the misspelling.
    first, *more = sorted(
        error.errors(include_url=False), key=lambda item: item["type"] != "extra_forbidden"
    )
    *path, last = first["loc"] or ("",)
    where = " ".join(".".join(str(part) for part in (*path, last) if part != "").split())
    where = where[: 2 * _SHOWN_LETTERS]
    message = " ".join(first["msg"].removeprefix("Value error, ").split()).rstrip(".")
    if first["type"] == "extra_forbidden":
        known = _names_at(model, tuple(path)) if model is not None else []
        close = get_close_matches(str(last), known, n=1)
        hint = f"; did you mean {close[0]}?" if close else f"; it takes {', '.join(known)}"
        text = f"{where} is not a field{hint if known else ''}"
    elif first["type"] == "missing":
        text = f"{where} is missing"
    elif first["type"] == "value_error":
        text = f"{where}: {message}" if where else message
    else:
        text = f"{where}={shown(first['input'])}: {message[:1].lower()}{message[1:]}"
        bounds = first.get("ctx", {})
        nearest = bounds.get("ge", bounds.get("le"))
        if nearest is not None:
            text += f"; nearest: {nearest}"
    if more:
        text += f" (and {len(more)} more)"
    return text
