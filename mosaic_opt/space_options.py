"""Options of the command line that say where to search: a space of layouts, recompute modes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mosaic_opt.errors import MosaicError

if TYPE_CHECKING:
    from perfmodel.cluster import Batch, Cluster
    from perfmodel.plan import Recompute
    from perfmodel.plan_space import PlanSpace

_WORDS = ("recompute", "layouts")
_ONE_WORD = ("cp_comm",)


Option = str | int | float | None


def read_space(cluster: Cluster, batch: Batch, options: dict[str, Option]) -> PlanSpace:
    """Return the space that the options ask for; what is None keeps its default.

    Parameters
    ----------
    cluster, batch
        What the defaults depend on (:func:`perfmodel.layout_space`).
    options : dict
        By field of `PlanSpace`: one value, or a list with commas.

    Raises
    ------
    MosaicError
        An option that is no such list, or that the space refuses; one sentence.
    """
    from pydantic import ValidationError

    from perfmodel.frozen import explain
    from perfmodel.layout_search import layout_space
    from perfmodel.plan_space import PlanSpace

    given = {name: _value(name, text) for name, text in options.items() if text is not None}
    try:
        return layout_space(cluster, batch, **given)
    except ValidationError as error:
        raise MosaicError(f"{explain(error, PlanSpace)}.") from None


def read_modes(text: str | None) -> tuple[Recompute, ...]:
    """Return the recompute modes of a list with commas; all where there is none.

    Raises
    ------
    MosaicError
        A word that is no mode.
    """
    from perfmodel.plan import Recompute

    words = [*Recompute] if text is None else [part.strip() for part in text.split(",")]
    for word in words:
        if word not in [*Recompute]:
            raise MosaicError(f"--recompute {word!r} must be one of {', '.join(Recompute)}.")
    return tuple(map(Recompute, words))


def _value(name: str, text: str | float) -> object:
    if not isinstance(text, str) or name in _ONE_WORD:
        return text
    parts = tuple(part.strip() for part in text.split(","))
    if name in _WORDS:
        return parts
    if not all(re.fullmatch(r"[0-9]{1,18}", part) for part in parts):
        option = f"--{name.replace('_', '-')}"
        raise MosaicError(f"{option} {text!r} is not a list of whole numbers, as in 1,2,4.")
    return tuple(map(int, parts))
