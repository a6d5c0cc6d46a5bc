"""What every command shares: pages and JSON documents, a progress bar, exit codes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mosaic_opt.errors import MosaicError

if TYPE_CHECKING:
    from rich.console import RenderableType

EXIT_ANSWER, EXIT_INFEASIBLE, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 0, 1, 2, 130


def emit(
    page: Callable[[], RenderableType], document: Callable[[], str], json_to: str | None
) -> None:
    """Show the page; write the JSON document to a file, or in place of the page to stdout."""
    from rich.console import Console

    if json_to == "-":
        typer.echo(document())
        return
    Console(highlight=False, width=None if sys.stdout.isatty() else 120).print(page())
    if json_to is not None:
        write(document() + "\n", json_to)


def write(text: str, target: str) -> None:
    """Write a file.

    Raises
    ------
    MosaicError
        It cannot be written.
    """
    try:
        Path(target).write_text(text, "utf-8")
    except OSError as error:
        raise MosaicError(f"{target} cannot be written: {error.strerror}.") from None


def check_target(target: str | None) -> None:
    """Refuse a file that cannot be written, before anything long is done for it.

    Raises
    ------
    MosaicError
        Its folder does not exist.
    """
    if target not in (None, "-") and not Path(str(target)).absolute().parent.is_dir():
        raise MosaicError(f"{target} cannot be written: its folder does not exist.")


def standing(state: Any) -> str:
    """Write the best so far of a search and, where a bound is known, the bound and the gap."""
    best = None if state.incumbent is None else state.incumbent.loss
    parts = [] if best is None else [f"best {best:.4f}"]
    if isfinite(state.bound):
        parts.append(f"bound {state.bound:.4f}")
        if best is not None:
            parts.append(f"gap {max(0.0, best - state.bound):.4f}")
    return "".join(f", {part}" for part in parts)


class Bar:
    """A progress bar on stderr; nothing where stderr is not a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> Bar:
        """Show the bar."""
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Take the bar away."""
        self._progress.stop()

    def update(self, state: Any) -> None:
        """Show how many candidates are done, the best so far and how far a better one can be."""
        self._show("search", f"candidates{standing(state)}", state.done, state.of)

    def of(self, name: str, state: Any) -> None:
        """Show the same of one search among several, on a line of its own."""
        self._show(name, f"{name}{standing(state)}", state.done, state.of)

    def count(self, what: str, done: int, of: int) -> None:
        """Show how far something countable is."""
        self._show(what, what, done, of)

    def _show(self, key: str, description: str, done: int, of: int) -> None:
        if key not in self._tasks:
            self._tasks[key] = self._progress.add_task(description, total=of)
        self._progress.update(self._tasks[key], completed=done, total=of, description=description)
