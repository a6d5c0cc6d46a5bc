"""Tables that grow row by row, so that what was measured is never lost."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from moe_ref.microbench.errors import CalibrationError

__all__ = ["Cell", "RowFile"]

Cell = str | int | float


class RowFile:
    """A CSV file that rows are only ever added to.

    Parameters
    ----------
    path : Path
        The file; it is made with the first row.
    columns : sequence of str
        Its header.
    keys : sequence of str
        Columns that say what was measured: a row whose keys are there is not measured again.

    Raises
    ------
    CalibrationError
        The file has another header, or cannot be read or written.
    """

    def __init__(self, path: Path, columns: Sequence[str], keys: Sequence[str]) -> None:
        self.path, self.columns, self.keys = path, tuple(columns), tuple(keys)
        self._mend()
        self._done = {self._key(row) for row in self.rows()}

    def __contains__(self, row: Mapping[str, Cell]) -> bool:
        """Say whether what a row would say was measured."""
        return self._key(row) in self._done

    def rows(self) -> Iterator[dict[str, str]]:
        """Yield the rows of the file."""
        if not self.path.exists():
            return
        with self.path.open(encoding="utf-8", newline="") as stream:
            reader = csv.DictReader(stream)
            if tuple(reader.fieldnames or ()) != self.columns:
                raise CalibrationError(
                    f"{self.path.name} has other columns than {', '.join(self.columns)}: give "
                    "another --out, or move the file."
                )
            yield from reader

    def add(self, row: Mapping[str, Cell]) -> None:
        """Write one row, and see to it that it is on the disk."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        try:
            new = not self.path.exists()
            if new:
                writer.writerow(self.columns)
            writer.writerow([_cell(row[column]) for column in self.columns])
            with self.path.open("a", encoding="utf-8", newline="") as stream:
                stream.write(text.getvalue())
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            raise CalibrationError(f"{self.path} cannot be written: {error.strerror}.") from None
        self._done.add(self._key(row))

    def _key(self, row: Mapping[str, Cell]) -> tuple[str, ...]:
        return tuple(_cell(row[key]) for key in self.keys)

    def _mend(self) -> None:
        """Cut off a last line that was not written to its end."""
        if not self.path.exists():
            return
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole == content:
            return
        if whole:
            self.path.write_bytes(whole)
        else:
            self.path.unlink()


def _cell(value: Cell) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
