"""Which column of a table holds which variable of a run, by its name, and in which unit."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from lawfit._values import LawError
from lawfit.runs import COLUMNS, Remark

SCALES: Mapping[str, float] = MappingProxyType(
    {"k": 1e3, "m": 1e6, "b": 1e9, "bn": 1e9, "t": 1e12, "thousand": 1e3, "million": 1e6}
    | {"billion": 1e9, "trillion": 1e12, "thousands": 1e3, "millions": 1e6, "billions": 1e9}
    | {"trillions": 1e12}
)
"""What a letter or word behind a count multiplies it by."""

COUNTS = ("n_total", "n_active", "tokens")

FIELDS = (*COLUMNS, "id", "flops")
"""What a column may hold; ``flops`` is the compute of a run, for tokens that are not there."""

_MEANING: Mapping[str, str] = MappingProxyType(
    {
        "n_total": "total parameters",
        "n_active": "active parameters (of a dense model all)",
        "tokens": "training tokens",
        "expert_split": "expert split d_ff / d_expert",
        "loss": "final loss",
        "weight": "weight of a run",
    }
)

# Letters and digits of names in use, lower case. A bare size is that of a dense model.
_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "n_total": "ntotal ntot totalparams totalparameters paramstotal parameterstotal "
        "nparamstotal numtotalparams totalsize",
        "n_active": "nactive nact na activeparams activeparameters paramsactive parametersactive "
        "nparamsactive numactiveparams activatedparams activesize",
        "tokens": "tokens d ntokens numtokens trainingtokens traintokens totaltokens tokensseen",
        "expert_split": "expertsplit g granularity expertsplitfactor",
        "loss": "loss valloss validationloss evalloss testloss trainloss trainingloss finalloss "
        "lossfinal celoss crossentropy nll",
        "weight": "weight weights",
        "id": "id runid run runname name",
        "flops": "flops flop c compute budget trainingflops trainingflop trainflops trainflop "
        "totalflops totalflop computebudget budgetflops",
        "size": "n params parameters nparams numparams nparameters paramcount modelsize size",
    }
)

# K is left out: behind an underscore it is rather the number of active experts.
_WORDS = "|".join(sorted(set(SCALES) - {"k"}, key=len, reverse=True))
_SCALED = re.compile(
    rf"^(?P<stem>.*\w)(?:\s*[(\[]|[\s_.-]+)(?P<unit>{_WORDS})[)\]]?$", re.IGNORECASE
)
_BRACKET = re.compile(r"^(?P<stem>[^(\[]*\w)\s*[(\[](?P<unit>[^)\]]*)[)\]]$")

_SHOWN = 30
"""Columns of a table that a sentence lists."""


class Taken(NamedTuple):
    """A column that holds a variable.

    ``factor`` multiplies its numbers; None where nothing says the unit. ``named`` says that the
    factor is that of the column's own name. A column of None is a constant, the factor.
    """

    column: str | None
    factor: float | None = None
    named: bool = False


def match(
    names: Sequence[str], given: Mapping[str, str]
) -> tuple[dict[str, Taken], tuple[Remark, ...]]:
    """Find the column of each variable: those that are given, others by the names in use.

    Parameters
    ----------
    names : sequence of str
        Columns of the table.
    given : mapping
        Column by variable; a unit may stand behind a colon, as in ``"params:B"``, and the expert
        split may be a number, that of all runs.

    Returns
    -------
    tuple
        Columns by variable, and what was assumed.

    Raises
    ------
    LawError
        A variable is in no column, or in several by their names.
    """
    taken = {field: _given(field, text, names) for field, text in given.items()}
    used = {one.column for one in taken.values()}
    free = {field: _named(field, [n for n in names if n not in used]) for field in _NAMES}
    for field in (*COLUMNS, "id", "flops"):
        if field in taken or not free[field] or (field == "flops" and "tokens" in taken):
            continue
        if len(free[field]) > 1 and field != "id":
            raise _several(field, list(free[field]))
        column, found = next(iter(free[field].items()))
        taken[field] = found._replace(column=column)
    remarks = _sizes(taken, free["size"])
    lacking = [field for field in ("n_active", "loss") if field not in taken]
    lacking += ["tokens"] if "tokens" not in taken and "flops" not in taken else []
    if lacking:
        raise _lacking(lacking, names)
    for field, other in (("n_total", "expert_split"), ("expert_split", "n_total")):
        if field in taken and other not in taken:
            raise _lacking([other], names)
    return taken, remarks


def _given(field: str, text: str, names: Sequence[str]) -> Taken:
    if field not in FIELDS:
        raise LawError(f"columns names {field!r}, but may name only {', '.join(FIELDS)}.")
    if text in names:
        return Taken(text, _own(text).factor, named=_own(text).factor is not None)
    column, colon, unit = text.rpartition(":")
    if colon and column in names and field in COUNTS:
        if unit.lower() in SCALES or unit == "1":
            return Taken(column, SCALES.get(unit.lower(), 1.0))
        raise LawError(
            f"{field} is given in the unit {unit!r}, but a unit is K, M, B, T, or 1 for the "
            f"numbers as they stand, as in {field}={column}:B."
        )
    if field == "expert_split":
        try:
            return Taken(None, float(text))
        except ValueError:
            pass
    raise LawError(
        f"{field} is to come from the column {text!r}, but the table has only {_listed(names)}."
    )


class _Own(NamedTuple):
    stem: str
    factor: float | None = None
    bits: bool = False


def _own(name: str) -> _Own:
    """Return a column's name as letters and digits, without its unit, and what that says."""
    text, factor, bits = name.strip(), None, False
    if (found := _SCALED.match(text)) and not re.fullmatch(r"[a-zA-Z]_[tT]", text):  # N_t: total
        text, factor = found["stem"], SCALES[found["unit"].lower()]
    elif found := _BRACKET.match(text):
        text, bits = found["stem"], "bit" in found["unit"].lower()
    return _Own(re.sub(r"[^a-z0-9]", "", text.lower()), factor, bits)


def says_bits(name: str) -> bool:
    """Return whether a column's name says that it is in bits, as "loss (bits)"."""
    return _own(name).bits


def _named(field: str, names: Sequence[str]) -> dict[str, Taken]:
    """Return the columns whose names are in use for a variable, in the order of those in use."""
    known = _NAMES[field].split()
    scaled = field in COUNTS or field == "size"
    found = {}
    for name in names:
        own = _own(name)
        if own.factor is not None and not scaled:
            own = _Own(re.sub(r"[^a-z0-9]", "", name.lower()))
        if own.stem in known:
            found[name] = (known.index(own.stem), Taken(name, own.factor, own.factor is not None))
    return {name: one for name, (_, one) in sorted(found.items(), key=lambda item: item[1][0])}


def _sizes(taken: dict[str, Taken], sizes: Mapping[str, Taken]) -> tuple[Remark, ...]:
    """Complete the counts of a dense table, whose models have one size."""
    sparse = "expert_split" in taken
    if "n_active" not in taken and "n_total" not in taken and not sparse:
        if len(sizes) > 1:
            raise _several("n_active", list(sizes))
        if sizes:
            taken["n_active"] = next(iter(sizes.values()))
    elif "n_active" not in taken and "n_total" in taken and not sparse:
        taken["n_active"] = taken.pop("n_total")
        return (_dense(f"{taken['n_active'].column!r} alone has parameters"),)
    elif "n_active" in taken and "n_total" not in taken and not sparse:
        others = [name for name in sizes if name != taken["n_active"].column]
        if others:
            return (_dense(f"{others[0]!r} is not known to be the total, nor any expert split"),)
    return ()


def _dense(why: str) -> Remark:
    return Remark(
        reason="taken_as_dense",
        sentence=f"The models were taken as dense, because {why}; name the columns of n_total, "
        "n_active and expert_split if they are sparse.",
    )


def _several(field: str, found: Sequence[str]) -> LawError:
    return LawError(
        f"{field} ({_MEANING[field]}) may be any of the columns {_listed(found)}; say which, with "
        f"columns={{{field!r}: {found[0]!r}}} or --column {field}={_quoted(found[0])}."
    )


def _lacking(fields: Sequence[str], names: Sequence[str]) -> LawError:
    what = " or ".join(f"{field} ({_MEANING[field]})" for field in fields)
    hint = ", or its value where all runs have one" if fields == ["expert_split"] else ""
    mapping = ", ".join(f"{field!r}: NAME" for field in fields)
    flags = " ".join(f"--column {field}=NAME" for field in fields)
    return LawError(
        f"no column is {what} by its name: the table has {_listed(names)}; "
        f"say which{hint}, with columns={{{mapping}}} or {flags}."
    )


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"[\w./-]+", name) else f"'{name}'"


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
