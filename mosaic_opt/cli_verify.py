"""The command verify."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mosaic_opt.case_options import Json, Workers
from mosaic_opt.console import EXIT_INFEASIBLE, Bar, check_target, emit
from mosaic_opt.errors import MosaicError


def verify(
    solution: Annotated[
        Path, typer.Argument(metavar="SOLUTION", help="JSON document of a solution.")
    ],
    sample: Annotated[
        int | None,
        typer.Option(help="Search so many candidates again, beside the near-ties, and not all."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the sample.")] = 0,
    workers: Workers = None,
    json_to: Json = None,
) -> None:
    """Hold a solution against the model again: its prices, bounds, counts and every field."""
    from mosaic_opt.batch_choice import BatchChoice
    from mosaic_opt.report_verification import render_batch_verification, render_verification
    from mosaic_opt.result import Solution
    from mosaic_opt.verification import verify as hold
    from mosaic_opt.verification_batches import verify_batches

    check_target(json_to)
    try:
        text = solution.read_text("utf-8")
    except OSError as error:
        raise MosaicError(f"{solution} cannot be read: {error.strerror}.") from None
    except ValueError:
        raise MosaicError(f"{str(solution)!r} cannot be read: it is not UTF-8 text.") from None
    with Bar() as bar:
        how: dict[str, Any] = {
            "sample": sample,
            "seed": seed,
            "workers": workers,
            "progress": bar.count,
        }
        if _has(text, "solutions"):
            choice = verify_batches(BatchChoice.from_json(text), **how)
            page, verified = render_batch_verification(choice), choice.verified
            document = choice.model_dump_json(indent=2)
        else:
            found = hold(Solution.from_json(text), **how)
            page, verified = render_verification(found), found.verified
            document = found.model_dump_json(indent=2)
    emit(lambda: page, lambda: document, json_to)
    if not verified:
        raise typer.Exit(EXIT_INFEASIBLE)


def _has(text: str, key: str) -> bool:
    """Say whether a JSON document is a mapping with a key."""
    import json

    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and key in content


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(verify)
