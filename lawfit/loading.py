"""Laws from names and from mappings, as they stand in a configuration file."""

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from lawfit._values import LawError
from lawfit.laws import AnyLaw, ChinchillaLaw, JointLaw, PerSplitLaw
from lawfit.published import PUBLISHED_LAWS

_ADAPTER: TypeAdapter[JointLaw | PerSplitLaw | ChinchillaLaw] = TypeAdapter(AnyLaw)
_KINDS = "'joint', 'per_split', 'chinchilla'"


def load_law(law: str | Mapping[str, Any] | AnyLaw) -> AnyLaw:
    """Return a law from its name, from its mapping, or as it is.

    Parameters
    ----------
    law
        A name ("joint" or "mosaic-table2", "chinchilla-epoch",
        "chinchilla-hoffmann"), a mapping as for `law_from_mapping`, or a law.

    Returns
    -------
    JointLaw, PerSplitLaw or ChinchillaLaw
        The law.

    Raises
    ------
    LawError
        If the name is unknown or the mapping holds no legal law.
    """
    if isinstance(law, JointLaw | PerSplitLaw | ChinchillaLaw):
        return law
    if isinstance(law, Mapping):
        return law_from_mapping(law)
    if published := PUBLISHED_LAWS.get(str(law)):
        return published
    raise LawError(f"law is {law!r}, but the known names are {_names()}; a mapping works as well.")


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
