"""The command of a choice under uncertainty: robust."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mosaic_opt.case_options import EnvelopeFile, Example, Json, Workers, read_envelope
from mosaic_opt.console import EXIT_INFEASIBLE, EXIT_INTERRUPTED, Bar, check_target, emit
from mosaic_opt.errors import MosaicError

if TYPE_CHECKING:
    from lawfit import LawEnsemble
    from mosaic_opt.envelope import Envelope
    from mosaic_opt.studies.draws import Part

DRAWS = 500
"""Draws where neither a number is given nor draws of the law."""


def _parts(text: str) -> tuple[Part, ...]:
    from mosaic_opt.studies.draws import PARTS

    asked = [word.strip() for word in text.split(",")]
    if unknown := [word for word in asked if word not in PARTS]:
        known = ", ".join(PARTS)
        raise MosaicError(f"--uncertain {unknown[0]!r} must be one or more of {known}.")
    return tuple(part for part in PARTS if part in asked)


def _draws_of(file: Path, envelope: Envelope, parts: tuple[Part, ...]) -> LawEnsemble:
    """Return the draws of the envelope's law that a file of mosaic fit holds."""
    from mosaic_opt.fit_report import FitReport

    if "law" not in parts:
        raise MosaicError(f"--ensemble {file} is of no use without law in --uncertain.")
    report = FitReport.from_file(file)
    if report.law != envelope.law:
        raise MosaicError(
            f"--ensemble {file} holds draws of the law ({report.law.source}), and the envelope's "
            f"law is another ({envelope.law.source}); give the envelope the same file as its law."
        )
    return report.ensemble()


def robust(
    envelope: EnvelopeFile = None,
    example: Example = None,
    draws: Annotated[
        int | None,
        typer.Option(
            help=f"Worlds to solve the envelope in; {DRAWS}, or all of --ensemble, unless given."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the generators.")] = 0,
    uncertain: Annotated[
        str, typer.Option(metavar="A,B", help="What is drawn: law, stack, residual.")
    ] = "law,stack,residual",
    ensemble: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="Draws of the law: the law's file or the report that mosaic fit wrote.",
        ),
    ] = None,
    workers: Workers = None,
    json_to: Json = None,
) -> None:
    """Find how sure the choice is: probabilities, regrets and intervals over draws."""
    from mosaic_opt.report_robust import render_robust
    from mosaic_opt.studies.robust import robust as under_draws

    check_target(json_to)
    given, parts = read_envelope(envelope, example), _parts(uncertain)
    laws = None if ensemble is None else _draws_of(ensemble, given, parts)
    if draws is None:
        draws = DRAWS if laws is None else len(laws)
    with Bar() as bar:
        found = under_draws(
            given,
            draws=draws,
            seed=seed,
            ensemble=laws,
            uncertain=parts,
            workers=workers,
            progress=bar.count,
        )
    emit(lambda: render_robust(found), found.to_json, json_to)
    if found.draws < found.draws_asked:
        raise typer.Exit(EXIT_INTERRUPTED)
    if found.draws_without_optimum == found.draws:
        raise typer.Exit(EXIT_INFEASIBLE)


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(robust)
