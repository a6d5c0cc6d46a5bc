"""Tables of measurements, as columns; their format is documented in ``docs/howto/calibrate.md``."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import PerfmodelError

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]


class TableError(PerfmodelError):
    """A table that cannot be read or lacks what a fit needs; the message is one sentence."""


class UnreadableTableError(TableError):
    """A file that is no table, or cannot be opened."""


@dataclass(frozen=True)
class Table:
    """Columns of one table: numbers as float64 (empty cells NaN), words as strings."""

    name: str
    columns: Mapping[str, FloatArray | NDArray[np.str_]]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(next(iter(self.columns.values())))

    def __getitem__(self, column: str) -> FloatArray:
        """Return a column of numbers."""
        values = self._column(column)
        if values.dtype.kind != "f":
            raise TableError(f"Column {column} of {self.name} must hold numbers.")
        return values.astype(np.float64)

    def words(self, column: str) -> frozenset[str]:
        """Return the words that a column has."""
        return frozenset(self._column(column).astype(np.str_).tolist())

    def where(self, **wanted: str) -> Table:
        """Return the rows whose words are as wanted, whatever their case."""
        keep = np.ones(len(self), dtype=np.bool_)
        for column, word in wanted.items():
            words = self._column(column).astype(np.str_)
            keep &= np.char.lower(words) == word.lower()
        chosen = self.take(keep)
        if len(chosen) == 0:
            asked = ", ".join(f"{column}={word}" for column, word in wanted.items())
            raise TableError(f"Table {self.name} has no row with {asked}.")
        return chosen

    def without(self, **unwanted: Sequence[str]) -> Table:
        """Return the rows that have none of the words."""
        keep = np.ones(len(self), dtype=np.bool_)
        for column, words in unwanted.items():
            keep &= ~np.isin(self._column(column).astype(np.str_), words)
        return self.take(keep)

    def take(self, keep: BoolArray) -> Table:
        """Return the rows that are marked."""
        return Table(self.name, {name: column[keep] for name, column in self.columns.items()})

    def _column(self, column: str) -> NDArray[np.float64] | NDArray[np.str_]:
        if column not in self.columns:
            raise TableError(f"Table {self.name} has no column {column}.")
        return self.columns[column]


@dataclass(frozen=True)
class Tables:
    """A folder of CSV tables of measurements of one device."""

    folder: Path
    device: str

    def load(self, name: str) -> Table:
        """Read ``name`` and keep the rows of the device (column ``device`` or ``GPU_MODEL``).

        Raises
        ------
        UnreadableTableError
            It is there and cannot be read: see `read_rows`.
        TableError
            It is not there, or has no row of the device.
        """
        path = self.folder / name
        try:
            content = path.read_bytes()
        except OSError as error:
            kind = TableError if isinstance(error, FileNotFoundError) else UnreadableTableError
            raise kind(f"Table {path} cannot be read: {error.strerror}.") from None
        _, rows = read_rows(content, path)
        if not rows:
            raise TableError(f"Table {path} has no rows.")
        table = Table(name, {key: _column([row[key] for row in rows]) for key in rows[0]})
        column = "GPU_MODEL" if "GPU_MODEL" in table.columns else "device"
        return table.where(**{column: self.device})

    def has(self, name: str) -> bool:
        """Whether there is such a table, with rows of the device.

        Raises
        ------
        UnreadableTableError
            It is there and cannot be read.
        """
        try:
            self.load(name)
        except UnreadableTableError:
            raise
        except TableError:
            return False
        return True

    def sha256(self, name: str) -> str:
        """Return the digest of a table's file."""
        return hashlib.sha256((self.folder / name).read_bytes()).hexdigest()


def read_rows(content: bytes, path: Path) -> tuple[tuple[str, ...], list[dict[str, str]]]:
    """Return the header and the rows of a table, from what its file at ``path`` holds.

    Raises
    ------
    UnreadableTableError
        It is not UTF-8 or not CSV, or a row has more or fewer cells than the header.
    """
    rows: list[dict[str, str]] = []
    try:
        lines = csv.reader(io.StringIO(content.decode("utf-8"), newline=""))
        header = tuple(next(lines, ()))
        for cells in filter(None, lines):
            if len(cells) != len(header):
                raise UnreadableTableError(
                    f"Table {path} cannot be read: line {lines.line_num} has {len(cells)} cells, "
                    f"but must have the {len(header)} of the header."
                )
            rows.append(dict(zip(header, cells, strict=True)))
    except UnicodeDecodeError:
        raise UnreadableTableError(f"Table {path} cannot be read: it is not UTF-8.") from None
    except csv.Error as error:
        raise UnreadableTableError(f"Table {path} cannot be read: {error}.") from None
    return header, rows


def _column(cells: list[str]) -> FloatArray | NDArray[np.str_]:
    try:
        return np.array([float(cell) if cell else np.nan for cell in cells])
    except ValueError:
        return np.array(cells)
