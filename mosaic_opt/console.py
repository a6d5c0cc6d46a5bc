"""What every command shares: pages and JSON documents, a progress bar, exit codes."""

from __future__ import annotations

import sys
from collections.abc import Callable
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
        """Show how many candidates are done and the best so far."""
        best = "" if state.incumbent is None else f", best {state.incumbent.loss:.4f}"
        self._show("search", f"candidates{best}", state.done, state.of)

    def of(self, name: str, state: Any) -> None:
        """Show the same of one search among several, on a line of its own."""
        best = "" if state.incumbent is None else f", best {state.incumbent.loss:.4f}"
        self._show(name, f"{name}{best}", state.done, state.of)

    def count(self, what: str, done: int, of: int) -> None:
        """Show how far something countable is."""
        self._show(what, what, done, of)

    def _show(self, key: str, description: str, done: int, of: int) -> None:
        if key not in self._tasks:
            self._tasks[key] = self._progress.add_task(description, total=of)
        self._progress.update(self._tasks[key], completed=done, total=of, description=description)
