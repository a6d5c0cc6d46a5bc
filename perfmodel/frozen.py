"""The base of every record of these packages, and what is said of one that is not valid."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Self

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


def _names_at(model: type[BaseModel], path: tuple[Any, ...]) -> list[str]:
    """Names of the fields of the model that ``path`` leads to, as far as it can be followed."""
    current: Any = model
    for part in path:
        field = getattr(current, "model_fields", {}).get(part)
        if field is None:
            continue
        options = [field.annotation, *getattr(field.annotation, "__args__", ())]
        current = next((option for option in options if hasattr(option, "model_fields")), None)
    return list(getattr(current, "model_fields", {}))


def explain(error: ValidationError, model: type[BaseModel] | None = None) -> str:
    """Return pydantic's first complaint as a clause: key, value, rule, nearest legal name."""
    # A misspelt name also makes the right one missing: say the misspelling.
    first, *more = sorted(
        error.errors(include_url=False), key=lambda item: item["type"] != "extra_forbidden"
    )
    *path, last = first["loc"] or ("",)
    where = ".".join(str(part) for part in (*path, last) if part != "")
    value = first["input"]
    message = first["msg"].removeprefix("Value error, ").rstrip(".")
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
        shown = repr(value) if isinstance(value, str | int | float | bool) else type(value).__name__
        rule = message[:1].lower() + message[1:]
        text = f"{where}={shown if len(shown) <= 60 else shown[:57] + '...'}: {rule}"
        bounds = first.get("ctx", {})
        nearest = bounds.get("ge", bounds.get("le"))
        if nearest is not None:
            text += f"; nearest: {nearest:g}"
    if more:
        text += f" (and {len(more)} more)"
    return text
