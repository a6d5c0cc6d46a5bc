"""Tables of runs from files: columns by the names in use, counts in units, losses in nats."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from lawfit._columns import COUNTS, SCALES, Taken, match, says_bits
from lawfit._values import LawError
from lawfit.documents import parse_json, read_text
from lawfit.runs import NOT_STATED, Remark, Runs

__all__ = ["read_runs"]

_LEAST: Mapping[str, tuple[float, str]] = {
    "n_total": (1e6, "parameters"),
    "n_active": (1e6, "parameters"),
    "tokens": (1e7, "tokens"),
}
"""What the largest count of a table passes; below it, a unit that nobody stated looks wrong."""

_NUMBER = re.compile(
    r"^(?P<number>[+-]?(?:\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"
    r"\s*(?P<unit>[A-Za-z]*)$"
)

_COMMA = re.compile(r"^([+-]?\d+),(\d+(?:[eE][+-]?\d+)?\s*[A-Za-z]*)$")
"""A number with one comma, between digits."""

_DECIMAL = re.compile(
    r"^[+-]?(?:0\d*|\d{4,}|\d+(?=,(?!\d{3}(?!\d)))),\d+(?:[eE][+-]?\d+)?\s*[A-Za-z]*$"
)
"""One in which the comma separates no thousands."""


def read_runs(
    path: str | Path,
    *,
    columns: Mapping[str, str] | None = None,
    convention: str | None = None,
    source: str | None = None,
    loss_unit: Literal["nats", "bits"] = "nats",
) -> Runs:
    """Read a table of runs from a file.

    Columns are found by the names in use (``n_total``, ``active_params``, ``N``, ``tokens``,
    ``D``, ``G``, ``val_loss``, ...), unless `columns` says which. Where there are no tokens but
    compute, ``D = C / (6 N_act)`` [token]. What was assumed or converted is in ``Runs.notes``, and
    with all that looks wrong in ``Runs.remarks``.

    Counts may have a unit: in a value ("1.3B", "70M", "5T"), at the end of the column's name
    ("tokens_B", "params (M)"), or in `columns`.

    Parameters
    ----------
    path : str or Path
        CSV (of commas or semicolons), TSV, JSON lines or JSON (a list of objects), by its ending.
        Between semicolons a comma is a decimal mark, if a number shows that it is not one of
        thousands.
    columns : mapping, optional
        Name in the table of ``n_total``, ``n_active``, ``tokens``, ``expert_split``, ``loss``,
        ``weight``, ``id`` or ``flops`` (compute of a run [FLOP]). A unit may stand behind a colon:
        ``{"n_active": "params:B"}``, or ``":1"`` for counts as they stand. ``expert_split`` may
        be a number, that of all runs.
    convention : str, optional
        What the parameters count, such as "without_embedding_and_head"; "not stated" unless
        given, which is remarked.
    source : str, optional
        Where the runs come from; the file's name unless given.
    loss_unit : {"nats", "bits"}
        Of the losses, for each token; bits are multiplied by ``ln 2``.

    Returns
    -------
    Runs
        Those rows that have a number in every column.

    Raises
    ------
    LawError
        The file cannot be read, a variable is in no column or in several, or counts look like
        billions that nothing says are billions.
    """
    if loss_unit not in ("nats", "bits"):
        raise LawError(f"loss_unit is {loss_unit!r}, but must be 'nats' or 'bits'.")
    file = Path(path)
    table, remarks = _table(file)
    taken, notes = match(list(table), columns or {})
    remarks += notes
    rows = len(next(iter(table.values())))
    found: dict[str, Sequence[Any]] = {}
    for field, one in taken.items():
        cells = [one.factor] * rows if one.column is None else table[one.column]
        if field in COUNTS:
            cells, remark = _counts(field, one, cells)
            remarks += [] if remark is None else [remark]
        found[field] = cells
    if "tokens" not in found:
        found["tokens"] = _tokens(found.pop("flops"), found["n_active"])
        remarks.append(_from_compute(taken["flops"]))
    found.pop("flops", None)
    found["loss"], remark = _losses(str(taken["loss"].column), found["loss"], loss_unit)
    remarks += [] if remark is None else [remark]
    if "id" in found:
        found["id"], remark = _ids(str(taken["id"].column), found["id"])
        remarks += [] if remark is None else [remark]
    remarks += _definitions(taken, convention)
    # what Runs says of a column names that of the table too
    named = {
        field: f"{field} ({taken[field].column})"
        if field in taken and taken[field].column
        else field
        for field in found
    }
    try:
        runs = Runs.from_columns(
            {named[field]: cells for field, cells in found.items()},
            named,
            convention=convention or NOT_STATED,
            source=source or file.name,
        )
    except ValidationError as error:
        message = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise LawError(f"{file.name}: {message}.") from None
    except LawError as error:
        raise LawError(f"{file.name}: {error}") from None
    return runs.model_copy(update={"notes": tuple(remarks)})


# ---------------------------------------------------------------- files


def _table(file: Path) -> tuple[dict[str, list[Any]], list[Remark]]:
    """Return the columns of a file, all of one length, at least one row; and what was assumed."""
    readers = {
        ".csv": _separated,
        ".tsv": _separated,
        ".jsonl": _lines,
        ".ndjson": _lines,
        ".json": _objects,
    }
    if file.suffix.lower() not in readers:
        raise LawError(
            f"{file} must end in {', '.join(readers)}; a notebook or a database exports CSV."
        )
    table, remarks = readers[file.suffix.lower()](file, read_text(file))
    if not table or not next(iter(table.values())):
        raise LawError(f"{file} has no row of a run, but a fit needs some.")
    return table, remarks


def _separated(file: Path, text: str) -> tuple[dict[str, list[Any]], list[Remark]]:
    head = text.partition("\n")[0]
    mark = "\t" if file.suffix.lower() == ".tsv" else ","
    if mark == "," and "," not in head:
        mark = next((other for other in (";", "\t") if other in head), ",")
    try:
        rows = list(csv.reader(io.StringIO(text), delimiter=mark, strict=True))
    except csv.Error as error:
        raise LawError(f"{file} is no table of separated values: {error}.") from None
    rows = [[cell.strip() for cell in row] for row in rows if any(cell.strip() for cell in row)]
    if not rows:
        return {}, []
    names, *body = rows
    twice = next((name for name in names if name and names.count(name) > 1), None)
    if twice is not None:
        raise LawError(f"{file} has two columns {twice!r}, but each needs a name of its own.")
    for number, row in enumerate(body, start=1):
        if len(row) > len(names):
            raise LawError(
                f"{file} has {len(row)} values in row {number} and {len(names)} columns; the first "
                "line must be the names of all columns, and a number with a comma in it needs "
                "quotes."
            )
    padded = [row + [""] * (len(names) - len(row)) for row in body]
    remarks = []
    if mark == ";" and any(_DECIMAL.match(cell) for row in padded for cell in row):
        padded = [[_COMMA.sub(r"\1.\2", cell) for cell in row] for row in padded]
        sentence = "Commas in numbers were taken as decimal marks, as in 2,345 for 2.345."
        remarks.append(Remark(reason="decimal_comma", sentence=sentence))
    table = {name: [row[at] for row in padded] for at, name in enumerate(names) if name}
    return table, remarks


def _lines(file: Path, text: str) -> tuple[dict[str, list[Any]], list[Remark]]:
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))  # NaN is a missing value here, and dropped later
            except (ValueError, RecursionError):
                raise LawError(f"{file} has no JSON in line {number}.") from None
    return _of_objects(file, rows)


def _objects(file: Path, text: str) -> tuple[dict[str, list[Any]], list[Remark]]:
    try:
        content = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise LawError(f"{file} is not valid JSON: {str(error)[:200]}.") from None
    if not isinstance(content, list):
        raise LawError(
            f"{file} holds a {type(content).__name__}, but a table in JSON is a list of objects."
        )
    return _of_objects(file, content)


def _of_objects(file: Path, rows: Sequence[Any]) -> tuple[dict[str, list[Any]], list[Remark]]:
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise LawError(
                f"{file} has a {type(row).__name__} as run {number}, but a run is an object, "
                '{"tokens": 1e9, ...}.'
            )
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [_plain(row.get(name)) for row in rows] for name in names}, []


def _plain(value: Any) -> Any:
    """Return a text or a number as it is, None for anything else (true is no number)."""
    return value if isinstance(value, str | int | float) and not isinstance(value, bool) else None


# ---------------------------------------------------------------- values


def _counts(field: str, taken: Taken, cells: Sequence[Any]) -> tuple[list[float], Remark | None]:
    """Return counts in parameters or tokens, NaN for what is no count."""
    pairs = [_count(cell) for cell in cells]
    own = any(unit is not None for _, unit in pairs)
    factor = 1.0 if taken.factor is None else taken.factor
    counts = [value * (factor if unit is None else unit) for value, unit in pairs]
    if taken.factor is None and not own:
        _check_unit(field, taken, counts)
    if not taken.named:
        return counts, None
    sentence = f"{field} is {factor:g} times the column {taken.column!r}, as its name says."
    return counts, Remark(reason="scaled_column", sentence=sentence)


def _count(cell: Any) -> tuple[float, float | None]:
    """Return a number and what its unit multiplies it by, None for one without a unit."""
    if not isinstance(cell, str):
        return _float(cell), None
    found = _NUMBER.match(cell.strip())
    if found is None or (found["unit"] and found["unit"].lower() not in SCALES):
        return math.nan, None
    value = _float(found["number"].replace(",", ""))
    return value, SCALES[found["unit"].lower()] if found["unit"] else None


def _float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _check_unit(field: str, taken: Taken, counts: Sequence[float]) -> None:
    least, what = _LEAST[field]
    seen = [value for value in counts if math.isfinite(value) and value > 0]
    if not seen or (max(seen) >= least and min(seen) >= 1.0):
        return
    odd = max(seen) if max(seen) < least else min(seen)
    raise LawError(
        f"{field} comes from the column {taken.column!r}, which has values such as {odd:g}, too "
        f"few {what} for a run; say their unit, as in --column {field}={taken.column}:B (columns="
        f"{{{field!r}: '{taken.column}:B'}}) for billions, M for millions, 1 if they are right."
    )


def _tokens(flops: Sequence[Any], n_active: Sequence[float]) -> list[float]:
    """Return ``D = C / (6 N_act)`` [token]."""
    return [
        _float(compute) / (6.0 * active) if active > 0 else math.nan
        for compute, active in zip(flops, n_active, strict=True)
    ]


def _from_compute(taken: Taken) -> Remark:
    sentence = f"No column is the tokens: D = C / (6 N_act), with C from {taken.column!r} [FLOP]."
    return Remark(reason="tokens_from_compute", sentence=sentence)


def _losses(
    column: str, cells: Sequence[Any], unit: Literal["nats", "bits"]
) -> tuple[Sequence[Any], Remark | None]:
    if unit == "bits":
        sentence = f"The losses of {column!r} were taken as bits per token, times ln 2 = 0.6931."
        remark = Remark(reason="loss_in_bits", sentence=sentence)
        return [math.log(2.0) * _float(cell) for cell in cells], remark
    if says_bits(column):
        raise LawError(
            f"the loss comes from the column {column!r}, which says bits, but must be in nats per "
            "token; say loss_unit='bits' (--loss-unit bits) to convert bits per token."
        )
    return cells, None


def _ids(column: str, cells: Sequence[Any]) -> tuple[list[str], Remark | None]:
    """Return an id for each row; those that stand again get a number."""
    names = [
        f"row {row}" if cell is None or cell == "" else str(cell)
        for row, cell in enumerate(cells, start=1)
    ]
    seen: set[str] = set()
    again = 0
    for at, name in enumerate(names):
        unique, number = name, 1
        while unique in seen:
            number += 1
            unique = f"{name} #{number}"
        again += unique != name
        names[at] = unique
        seen.add(unique)
    if not again:
        return names, None
    sentence = (
        f"{again} rows have an id of the column {column!r} that stands before, as checkpoints of "
        "one run do; they are numbered, as in 'run #2'."
    )
    return names, Remark(reason="repeated_id", sentence=sentence)


def _definitions(taken: Mapping[str, Taken], convention: str | None) -> list[Remark]:
    """Return remarks on what the table does not define."""
    remarks = []
    split = taken.get("expert_split")
    if split is not None and split.column is not None and "granul" in split.column.lower():
        sentence = (
            f"The column {split.column!r} was taken as d_ff / d_expert, d_ff of the dense FFN that "
            "the experts replace; other papers have 4 d_model or 2 d_model over d_expert."
        )
        remarks.append(Remark(reason="granularity", sentence=sentence))
    if not convention:
        sentence = (
            "What the parameters count is not stated; say it, as in --convention "
            "without_embedding_and_head (convention=...), because the law is of those counts."
        )
        remarks.append(Remark(reason="convention_not_stated", sentence=sentence))
    return remarks
