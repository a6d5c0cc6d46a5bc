"""Laws from names, from mappings and from files, as a configuration names them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from lawfit._values import LawError
from lawfit.laws import AnyLaw, ChinchillaLaw, JointLaw, PerSplitLaw
from lawfit.published import PUBLISHED_LAWS

_ADAPTER: TypeAdapter[JointLaw | PerSplitLaw | ChinchillaLaw] = TypeAdapter(AnyLaw)
_KINDS = "'joint', 'per_split', 'chinchilla'"


_ENDINGS = (".json", ".yaml", ".yml", ".toml")


def load_law(
    law: str | Path | Mapping[str, Any] | AnyLaw, *, folder: str | Path | None = None
) -> AnyLaw:
    """Return a law from its name, from its mapping, from a file, or as it is.

    Parameters
    ----------
    law
        A name ("joint" or "mosaic-table2", "chinchilla-epoch",
        "chinchilla-hoffmann"), a mapping as for `law_from_mapping`, a law, or the
        path of a JSON, YAML or TOML file, told by its ending. The file holds such a
        mapping, or has one under the key ``law``, as what `mosaic fit` writes.
    folder
        Where a relative path starts; the working directory unless given.

    Returns
    -------
    JointLaw, PerSplitLaw or ChinchillaLaw
        The law.

    Raises
    ------
    LawError
        If the name is unknown, the file cannot be read, or the mapping holds no legal law.
    """
    if isinstance(law, JointLaw | PerSplitLaw | ChinchillaLaw):
        return law
    if isinstance(law, Mapping):
        return law_from_mapping(law)
    if published := PUBLISHED_LAWS.get(str(law)):
        return published
    if str(law).endswith(_ENDINGS):
        return _law_from_file(Path(folder or "", law))
    raise LawError(
        f"law is {law!r}, but the known names are {_names()}; a mapping works as well, or the "
        f"path of a file that ends in {', '.join(_ENDINGS)}."
    )


def _law_from_file(path: Path) -> AnyLaw:
    """Return the law that a file holds, by itself or under the key ``law``."""
    from lawfit.documents import read_document

    content = read_document(path)
    if not isinstance(content, Mapping):
        raise LawError(f"{path} holds a {type(content).__name__}, and not a law's mapping.")
    if "law" not in content and "kind" not in content:
        keys = ", ".join(repr(key) for key in list(content)[:8]) or "no key at all"
        raise LawError(
            f"{path} holds no law: it needs the key 'law', or a law's own keys with 'kind', but "
            f"has {keys}."
        )
    held = content.get("law", content)
    if not isinstance(held, Mapping):
        raise LawError(
            f"{path} has {held!r} under the key 'law', but a law's file needs a law's mapping "
            "there."
        )
    try:
        return law_from_mapping(held)
    except LawError as error:
        raise LawError(f"{path}: {error}") from None


def law_from_mapping(mapping: Mapping[str, Any]) -> AnyLaw:
    """Return the law that a mapping describes.

    Parameters
    ----------
    mapping
        ``kind`` ("joint", "per_split" or "chinchilla"), the coefficients of that
        law, ``source``, and ``valid_range`` where it is known.

    Returns
    -------
    JointLaw, PerSplitLaw or ChinchillaLaw
        The law.

    Raises
    ------
    LawError
        If a key is missing, unknown or illegal; the sentence names each.
    """
    try:
        return _ADAPTER.validate_python(dict(mapping))
    except ValidationError as error:
        problems = "; ".join(_problem(item) for item in error.errors(include_url=False))
        raise LawError(f"the mapping is no law, because {problems}.") from None


def _problem(item: Mapping[str, Any]) -> str:
    kind = item["type"]
    if kind == "union_tag_not_found":
        return f"the key 'kind' is missing, and it must be one of {_KINDS}"
    if kind == "union_tag_invalid":
        return f"kind is {item['ctx']['tag']!r}, and it must be one of {_KINDS}"
    key = ".".join(str(part) for part in item["loc"][1:])
    if kind == "missing":
        return f"the key {key!r} is missing"
    if kind == "extra_forbidden":
        return f"the key {key!r} is unknown"
    if kind == "value_error":
        return f"in {key!r} {item['ctx']['error']}"
    return f"{key!r} is {item['input']!r}, where {item['msg'][0].lower()}{item['msg'][1:]}"


def _names() -> str:
    *most, last = (repr(name) for name in PUBLISHED_LAWS)
    return f"{', '.join(most)} and {last}"
