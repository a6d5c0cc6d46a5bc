"""What the system refuses to do with a file or a folder, in one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moe_ref.microbench.errors import CalibrationError

__all__ = ["refused"]


@contextmanager
def refused(path: Path, what: str) -> Iterator[None]:
    """Turn what the system raises into "``path`` cannot be ``what``".

    Raises
    ------
    CalibrationError
        An `OSError` was raised within.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise CalibrationError(f"{path} cannot be {what}: {reason}; give another --out.") from None
