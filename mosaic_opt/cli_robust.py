"""The command of a choice under uncertainty: robust."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mosaic_opt.case_options import EnvelopeFile, Example, Json, Workers, read_envelope
from mosaic_opt.console import EXIT_INFEASIBLE, EXIT_INTERRUPTED, Bar, check_target, emit
from mosaic_opt.errors import MosaicError

if TYPE_CHECKING:
    from mosaic_opt.studies.draws import Part


def _parts(text: str) -> tuple[Part, ...]:
    from mosaic_opt.studies.draws import PARTS

    asked = [word.strip() for word in text.split(",")]
    if unknown := [word for word in asked if word not in PARTS]:
        known = ", ".join(PARTS)
        raise MosaicError(f"--uncertain {unknown[0]!r} must be one or more of {known}.")
    return tuple(part for part in PARTS if part in asked)


def robust(
    envelope: EnvelopeFile = None,
    example: Example = None,
    draws: Annotated[int, typer.Option(help="Worlds to solve the envelope in.")] = 500,
    seed: Annotated[int, typer.Option(help="Of the generators.")] = 0,
    uncertain: Annotated[
        str, typer.Option(metavar="A,B", help="What is drawn: law, stack, residual.")
    ] = "law,stack,residual",
    workers: Workers = None,
    json_to: Json = None,
) -> None:
    """Find how sure the choice is: probabilities, regrets and intervals over draws."""
    from mosaic_opt.report_robust import render_robust
    from mosaic_opt.studies.robust import robust as under_draws

    check_target(json_to)
    given, parts = read_envelope(envelope, example), _parts(uncertain)
    with Bar() as bar:
        found = under_draws(
            given, draws=draws, seed=seed, uncertain=parts, workers=workers, progress=bar.count
        )
    emit(lambda: render_robust(found), found.to_json, json_to)
    if found.draws < found.draws_asked:
        raise typer.Exit(EXIT_INTERRUPTED)
    if found.draws_without_optimum == found.draws:
        raise typer.Exit(EXIT_INFEASIBLE)


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(robust)
