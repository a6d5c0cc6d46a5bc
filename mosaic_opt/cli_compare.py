"""Commands about backends: compare, backends."""

from __future__ import annotations

from typing import Annotated

import typer

from mosaic_opt.backends.entries import names
from mosaic_opt.case_options import EnvelopeFile, Example, Json, read_envelope
from mosaic_opt.console import EXIT_INFEASIBLE, EXIT_INTERRUPTED, Bar, check_target, emit


def compare(
    envelope: EnvelopeFile = None,
    example: Example = None,
    backends: Annotated[
        str | None,
        typer.Option(metavar="NAME,NAME", help=f"Of {', '.join(names())}; all unless given."),
    ] = None,
    time_limit: Annotated[
        float | None, typer.Option(help="Seconds of search for each backend.")
    ] = None,
    json_to: Json = None,
) -> None:
    """Search with every backend, side by side, and say whether their claims can all be true."""
    from mosaic_opt.backends.base import Limits
    from mosaic_opt.comparison import State
    from mosaic_opt.comparison import compare as side_by_side
    from mosaic_opt.report_compare import render_comparison

    check_target(json_to)
    given = read_envelope(envelope, example)
    chosen = None
    if backends is not None:
        chosen = [name.strip() for name in backends.split(",") if name.strip()]
    with Bar() as bar:
        found = side_by_side(
            given, backends=chosen, limits=Limits(time_s=time_limit), progress=bar.of
        )
    emit(lambda: render_comparison(found), lambda: found.model_dump_json(indent=2), json_to)
    if not found.agreement.agree:
        raise typer.Exit(EXIT_INFEASIBLE)
    if found.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if not any(row.state is State.RAN for row in found.rows):
        raise typer.Exit(EXIT_INFEASIBLE)


def list_backends(json_to: Json = None) -> None:
    """List the backends that are registered, and whether they can run here."""
    import json

    from mosaic_opt.backends.registry import listing
    from mosaic_opt.report_compare import render_backends

    found = listing()

    def document() -> str:
        rows = [
            {
                "name": each.name,
                "origin": each.origin,
                "provides": None if each.provides is None else str(each.provides.name).lower(),
                "available": bool(each.availability),
                "reason": each.reason,
                "note": each.note,
            }
            for each in found
        ]
        return json.dumps({"schema_version": 1, "backends": rows}, indent=2)

    emit(lambda: render_backends(found), document, json_to)


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(compare)
    app.command("backends")(list_backends)
