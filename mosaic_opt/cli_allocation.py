"""Commands that answer for many budgets at once: phases, invert, allocation-law."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from mosaic_opt.allocation.inverse import Objective
    from mosaic_opt.envelope import Envelope

Json = Annotated[str | None, typer.Option("--json", metavar="FILE|-", help="Write JSON too.")]
File = Annotated[Path | None, typer.Argument(help="YAML, TOML or JSON file.")]
Example = Annotated[str | None, typer.Option(help="A shipped envelope, by name.")]
Nodes = Annotated[
    str | None, typer.Option(metavar="N,N", help="Node counts to try, as in 16,32,64.")
]
Workers = Annotated[int | None, typer.Option(help="Threads; all cores unless given.")]


def _read(envelope: Path | None, example: str | None) -> Envelope:
    from mosaic_opt.envelope import example as shipped
    from mosaic_opt.envelope import load_envelope
    from mosaic_opt.errors import MosaicError

    if (envelope is None) == (example is None):
        raise MosaicError("Give an envelope file or --example NAME, one of the two.")
    return load_envelope(envelope) if envelope is not None else shipped(str(example))


def _counts(nodes: str) -> list[int]:
    from mosaic_opt.errors import MosaicError

    try:
        return [int(text) for text in nodes.split(",")]
    except ValueError:
        raise MosaicError(f"--nodes {nodes!r} must be whole numbers, as in 16,32,64.") from None


def _range(days: str | None) -> tuple[float, float]:
    from mosaic_opt.envelope import MAX_WINDOW_DAYS
    from mosaic_opt.errors import MosaicError

    if days is None:
        return 0.0, MAX_WINDOW_DAYS
    try:
        low, high = (float(text) for text in days.split(","))
    except ValueError:
        raise MosaicError(f"--days {days!r} must be two numbers, as in 1,90.") from None
    return low, high


def phases(
    envelope: File = None,
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
    from mosaic_opt.cli import EXIT_INFEASIBLE, _Bar, _check_target, _emit
    from mosaic_opt.report_allocation import render_phases, render_phases_by_nodes

    _check_target(json_to)
    given, (low, high) = _read(envelope, example), _range(days)
    with _Bar() as bar:
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
    _emit(page, lambda: document(indent=2), json_to)
    if not any(answer.phases for answer in answers):
        raise typer.Exit(EXIT_INFEASIBLE)


def invert(
    envelope: File = None,
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
    from mosaic_opt.cli import EXIT_INFEASIBLE, _Bar, _check_target, _emit
    from mosaic_opt.errors import MosaicError
    from mosaic_opt.report_allocation import render_inverse

    _check_target(json_to)
    if loss != loss:
        raise MosaicError("--loss is missing: give the target in nats/token, as in --loss 1.39.")
    with _Bar() as bar:
        found = inverse_of(
            _read(envelope, example),
            loss,
            _objective(least),
            nodes=None if nodes is None else _counts(nodes),
            within_days=within_days,
            price_per_gpu_hour=price,
            watts_per_device=watts,
            workers=workers,
            progress=bar.update,
        )
    _emit(lambda: render_inverse(found), lambda: found.model_dump_json(indent=2), json_to)
    if found.best is None:
        raise typer.Exit(EXIT_INFEASIBLE)


def _objective(text: str) -> Objective:
    from typing import get_args

    from mosaic_opt.allocation.inverse import Objective
    from mosaic_opt.errors import MosaicError

    known: tuple[Objective, ...] = get_args(Objective)
    for name in known:
        if name == text.replace("-", "_"):
            return name
    raise MosaicError(f"--least {text!r} must be one of {', '.join(known)}.")


def allocation_law(
    envelope: File = None,
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
    from mosaic_opt.cli import _Bar, _check_target, _emit
    from mosaic_opt.report_allocation import render_allocation_law

    _check_target(json_to)
    _check_target(figure)
    with _Bar() as bar:
        given = _read(envelope, example)
        found = law_at(given, bandwidth=bandwidth, workers=workers, progress=bar.update)
    if figure is not None:
        _write(path_figure(found).to_html(include_plotlyjs="cdn"), figure)
    _emit(lambda: render_allocation_law(found), lambda: found.model_dump_json(indent=2), json_to)


def _write(text: str, target: str) -> None:
    from mosaic_opt.errors import MosaicError

    try:
        Path(target).write_text(text, "utf-8")
    except OSError as error:
        raise MosaicError(f"{target} cannot be written: {error.strerror}.") from None


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(phases)
    app.command()(invert)
    app.command("allocation-law")(allocation_law)
