"""Commands that answer for many budgets at once: phases, invert, allocation-law."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Annotated

import typer

from mosaic_opt.case_options import EnvelopeFile, Example, Json, Workers, read_envelope
from mosaic_opt.console import EXIT_INFEASIBLE, Bar, check_target, emit, write
from mosaic_opt.errors import MosaicError

if TYPE_CHECKING:
    from mosaic_opt.allocation.inverse import Objective

Nodes = Annotated[
    str | None, typer.Option(metavar="N,N", help="Node counts to try, as in 16,32,64.")
]


def _counts(nodes: str) -> list[int]:
    try:
        return [int(text) for text in nodes.split(",")]
    except ValueError:
        raise MosaicError(f"--nodes {nodes!r} must be whole numbers, as in 16,32,64.") from None


def _range(days: str | None) -> tuple[float, float]:
    from mosaic_opt.envelope import MAX_WINDOW_DAYS

    if days is None:
        return 0.0, MAX_WINDOW_DAYS
    try:
        low, high = (float(text) for text in days.split(","))
    except ValueError:
        raise MosaicError(f"--days {days!r} must be two numbers, as in 1,90.") from None
    return low, high


def phases(
    envelope: EnvelopeFile = None,
    example: Example = None,
    nodes: Nodes = None,
    days: Annotated[
        str | None, typer.Option(metavar="FROM,TO", help="Windows to report on, as in 1,90.")
    ] = None,
    workers: Workers = None,
    json_to: Json = None,
) -> None:
    """Find the optimum of every training window at once."""
    from mosaic_opt.allocation.phases import phases as every_window
    from mosaic_opt.allocation.phases import phases_by_nodes
    from mosaic_opt.report_allocation import render_phases, render_phases_by_nodes

    check_target(json_to)
    given, (low, high) = read_envelope(envelope, example), _range(days)
    with Bar() as bar:
        ask = {"days_from": low, "days_to": high}
        if nodes is None:
            one = every_window(given, **ask, workers=workers, progress=bar.update)
        else:
            counts = _counts(nodes)
            many = phases_by_nodes(given, counts, **ask, workers=workers, progress=bar.update)
    if nodes is None:
        page, document = functools.partial(render_phases, one), one.model_dump_json
        answers = [one]
    else:
        page, document = functools.partial(render_phases_by_nodes, many), many.model_dump_json
        answers = list(many.clusters)
    emit(page, lambda: document(indent=2), json_to)
    if not any(answer.phases for answer in answers):
        raise typer.Exit(EXIT_INFEASIBLE)


def invert(
    envelope: EnvelopeFile = None,
    loss: Annotated[float, typer.Option(help="Target [nats/token].")] = float("nan"),
    least: Annotated[
        str, typer.Option(help="What to make least: days, gpu_hours, nodes, cost or energy.")
    ] = "days",
    example: Example = None,
    nodes: Nodes = None,
    within_days: Annotated[
        float | None, typer.Option(help="Days that it may take; for nodes the window.")
    ] = None,
    price: Annotated[
        float | None, typer.Option(help="Of a GPU-hour, in any currency; no default.")
    ] = None,
    watts: Annotated[
        float | None, typer.Option(help="Mean draw of a device, all included; no default.")
    ] = None,
    workers: Workers = None,
    json_to: Json = None,
) -> None:
    """Find what a target loss takes: days, GPU-hours, nodes, cost or energy."""
    from mosaic_opt.allocation.inverse import invert as inverse_of
    from mosaic_opt.report_allocation import render_inverse

    check_target(json_to)
    if loss != loss:
        raise MosaicError("--loss is missing: give the target in nats/token, as in --loss 1.39.")
    with Bar() as bar:
        found = inverse_of(
            read_envelope(envelope, example),
            loss,
            _objective(least),
            nodes=None if nodes is None else _counts(nodes),
            within_days=within_days,
            price_per_gpu_hour=price,
            watts_per_device=watts,
            workers=workers,
            progress=bar.update,
        )
    emit(lambda: render_inverse(found), lambda: found.model_dump_json(indent=2), json_to)
    if found.best is None:
        raise typer.Exit(EXIT_INFEASIBLE)


def _objective(text: str) -> Objective:
    from typing import get_args

    from mosaic_opt.allocation.inverse import Objective

    known: tuple[Objective, ...] = get_args(Objective)
    for name in known:
        if name == text.replace("-", "_"):
            return name
    raise MosaicError(f"--least {text!r} must be one of {', '.join(known)}.")


def allocation_law(
    envelope: EnvelopeFile = None,
    example: Example = None,
    figure: Annotated[
        str | None, typer.Option(metavar="FILE.html", help="Draw the path; needs plotly.")
    ] = None,
    bandwidth: Annotated[
        float, typer.Option(help="Width of the fit of slopes, in natural logarithms.")
    ] = 0.6931471805599453,
    workers: Workers = None,
    json_to: Json = None,
) -> None:
    """Derive the allocation law (Appendix D) at an optimum, beside the exact optima."""
    from mosaic_opt.allocation.figure import path_figure
    from mosaic_opt.allocation.regime import allocation_law as law_at
    from mosaic_opt.report_allocation import render_allocation_law

    check_target(json_to)
    check_target(figure)
    with Bar() as bar:
        given = read_envelope(envelope, example)
        found = law_at(given, bandwidth=bandwidth, workers=workers, progress=bar.update)
    if figure is not None:
        write(path_figure(found).to_html(include_plotlyjs="cdn"), figure)
    emit(lambda: render_allocation_law(found), lambda: found.model_dump_json(indent=2), json_to)


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(phases)
    app.command()(invert)
    app.command("allocation-law")(allocation_law)
