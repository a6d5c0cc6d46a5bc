"""Tables that grow row by row, so that what was measured is never lost."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from moe_ref.microbench.errors import CalibrationError
from moe_ref.microbench.files import refused
from perfmodel.calibration.tables import TableError, read_rows

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
        The file has another header or is no table, or cannot be read or written.
    """

    def __init__(self, path: Path, columns: Sequence[str], keys: Sequence[str]) -> None:
        self.path, self.columns, self.keys = path, tuple(columns), tuple(keys)
        self._done = {self._key(row) for row in self.rows()}

    def __contains__(self, row: Mapping[str, Cell]) -> bool:
        """Say whether what a row would say was measured."""
        return self._key(row) in self._done

    def add(self, row: Mapping[str, Cell]) -> None:
        """Write one row, and see to it that it is on the disk.

        Raises
        ------
        CalibrationError
            The file cannot be written.
        """
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        with refused(self.path, "written"):
            if not self.path.exists():
                writer.writerow(self.columns)
            writer.writerow([_cell(row[column]) for column in self.columns])
            with self.path.open("a", encoding="utf-8", newline="") as stream:
                stream.write(text.getvalue())
                stream.flush()
                os.fsync(stream.fileno())
        self._done.add(self._key(row))

    def _key(self, row: Mapping[str, Cell]) -> tuple[str, ...]:
        return tuple(_cell(row[key]) for key in self.keys)

    def rows(self) -> list[dict[str, str]]:
        """Return the rows of the file, and cut off a last line that was not written to its end.

        A file of something else is left as it is.
        """
        with refused(self.path, "read"):
            content = self.path.read_bytes() if self.path.exists() else None
        if content is None:
            return []
        if ",".join(self.columns).encode().startswith(content):  # not even the header is whole
            with refused(self.path, "written"):
                self.path.unlink()
            return []
        whole = content[: content.rfind(b"\n") + 1]
        try:
            header, rows = read_rows(whole, self.path)
        except TableError as error:
            words = str(error).removesuffix(".")
            raise CalibrationError(f"{words}; give another --out, or mend the file.") from None
        if header != self.columns:
            raise CalibrationError(
                f"{self.path.name} has other columns than {', '.join(self.columns)}: give "
                "another --out, or move the file."
            )
        if whole != content:
            with refused(self.path, "written"):
                self.path.write_bytes(whole)
        return rows


def _cell(value: Cell) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
