"""``mosaic calibrate``; importing this does not load torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moe_ref.microbench.errors import CalibrationError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from moe_ref.microbench.calibration import Calibration
    from moe_ref.validation.loop import Validation

__all__ = ["calibrate"]

EXIT_NO_PACK, EXIT_INTERRUPTED = 1, 130


def calibrate(
    out: Annotated[Path, typer.Option(help="Folder of the tables, the sidecar and the pack.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer and smaller calls: under a minute.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[
        str | None, typer.Option(help="fp32, bf16 or fp16; fp32 on a CPU, else bf16.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads that are one device of a CPU; all unless given.")
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(help="Families to measure, with commas between, as in gemm,attention."),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(help="Seconds after which no further row is begun; 45 with --quick."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the order of the rows.")] = 0,
    validate: Annotated[
        bool,
        typer.Option(
            "--validate",
            help="Then time training steps of moe_ref: some fit a stack profile, others are "
            "predicted first. One thread is a device unless --threads is given.",
        ),
    ] = False,
) -> None:
    """Measure this machine's kernels, and fit a hardware pack to them.

    A run that was interrupted goes on where it stopped.
    """
    if validate and only is not None:
        raise CalibrationError("--validate takes every family of kernels: leave --only out.")
    if find_spec("torch") is None:
        raise CalibrationError("`mosaic calibrate` needs torch: pip install 'mosaic-opt[torch]'.")
    from rich.console import Console

    from moe_ref.microbench.calibration import calibrate as measured

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    with _interrupt_said(out), _bar() as progress:
        settings: Any = {
            "device": device,
            "dtype": dtype,
            "threads": threads,
            "quick": quick,
            "budget_s": budget,
            "seed": seed,
            "progress": progress,
        }
        if validate:
            from moe_ref.validation.loop import validate as validated

            checked = validated(out, **settings)
            found = checked.calibration
        else:
            names = None if only is None else [name.strip() for name in only.split(",")]
            found = measured(out, only=names, **settings)
    _print_calibration(console, found)
    if validate:
        _print_validation(console, checked)
    if found.pack is None:
        raise typer.Exit(EXIT_NO_PACK)


@contextmanager
def _interrupt_said(out: Path) -> Iterator[None]:
    """Say what an interrupt leaves, and exit as interrupted."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"interrupted: what was measured is in {out}; run it again to go on", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _print_calibration(console: Console, found: Calibration) -> None:
    """Say what was measured and fitted, and what the pack cannot price."""
    console.print(_rows_table(found))
    if found.pack is not None:
        console.print(_fit_table(found))
        console.print(f"pack: {found.path} ({found.pack.name}, digest {found.pack.digest[:12]})")
        console.print(f"from {found.pack.origin}")
    left = sum(of - there for there, of in found.rows.values())
    if left:
        console.print(f"{left} rows of the grid were not measured: run it again to go on")
    for sentence in found.unpriced:
        console.print(f"not priced: {sentence}" if found.pack is not None else sentence)


def _print_validation(console: Console, found: Validation) -> None:
    """Say how well predictions agree with what was then measured."""
    from rich.table import Table

    from moe_ref.validation.report import scores_table

    head, *rows = scores_table(found.scores)
    table = Table(*head, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for name, each in found.profile.constants.items():
        console.print(f"{name} = {each.value:.4g} {each.unit}  ({each.low:.4g} to {each.high:.4g})")
    for remark in found.remarks:
        console.print(remark)
    console.print(f"stack: {found.stack_path}; report: {found.report_path}")


def _rows_table(found: Calibration) -> Table:
    """Return what was measured, family by family."""
    from rich.table import Table

    table = Table("measured", "rows", "of the grid", box=None, pad_edge=False)
    for name, (there, of) in found.rows.items():
        table.add_row(name, str(there), str(of))
    return table


def _fit_table(found: Calibration) -> Table:
    """Return the errors of the fits."""
    from rich.table import Table

    table = Table(
        *("fitted", "rows", "median, p90 error", "on rows held out", "which"),
        box=None,
        pad_edge=False,
    )
    assert found.pack is not None
    for name, surface in found.pack.surfaces.items():
        e = surface.errors
        if e is None:
            continue
        outside = "-" if e.median_out is None else f"{e.median_out:.1f}%, {e.p90_out:.1f}%"
        table.add_row(name, str(e.n), f"{e.median_in:.1f}%, {e.p90_in:.1f}%", outside, e.held_out)
    return table


@contextmanager
def _bar() -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar on stderr where it is a terminal; yield what moves it."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns,
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as shown:
        task = shown.add_task("calibrate", total=None)

        def update(family: str, done: int, of: int) -> None:
            shown.update(task, description=f"calibrate: {family}", completed=done, total=of)

        yield update
