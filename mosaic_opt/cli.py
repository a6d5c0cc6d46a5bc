"""The command line.

Exit codes: 0 an answer, 1 infeasible, illegal, contradicted or not converged, 2 bad input.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mosaic_opt import cli_allocation, cli_compare, cli_fit, cli_layouts, cli_robust, cli_verify
from mosaic_opt.backends.entries import names
from mosaic_opt.case_options import (
    CapacityFactor,
    ClusterText,
    Convention,
    EnvelopeFile,
    Example,
    GlobalBatch,
    Imbalance,
    Json,
    Model,
    OptimizerName,
    PlanText,
    PrecisionName,
    Seq,
    StackName,
    Workers,
    read_case,
    read_convention,
    read_envelope,
)
from mosaic_opt.cli_registered import CommandGroup
from mosaic_opt.console import (
    EXIT_BAD_INPUT,
    EXIT_INFEASIBLE,
    EXIT_INTERRUPTED,
    Bar,
    check_target,
    emit,
)
from mosaic_opt.errors import MosaicError

if TYPE_CHECKING:
    from rich.console import RenderableType


app = typer.Typer(
    name="mosaic",
    cls=CommandGroup,
    help="Choose the MoE architecture, token budget and layout that a cluster trains best.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.command()
def solve(
    envelope: EnvelopeFile = None,
    example: Example = None,
    workers: Workers = None,
    time_limit: Annotated[float | None, typer.Option(help="Seconds of search.")] = None,
    backend: Annotated[
        str, typer.Option(help=f"How to search: {', '.join(names())}.")
    ] = "enumerate",
    json_to: Json = None,
) -> None:
    """Find the architecture, token budget and layout with the least predicted loss."""
    from mosaic_opt.backends.base import Capability, Limits
    from mosaic_opt.report import render_solution
    from mosaic_opt.result import Status
    from mosaic_opt.solver import solve as search

    check_target(json_to)
    problem = read_envelope(envelope, example)
    searcher = _backend(backend, workers)
    limits = Limits(time_s=time_limit)
    if problem.global_batches is not None:
        _solve_batches(problem, searcher, limits, json_to)
        return
    with Bar() as bar:
        solution = search(problem, backend=searcher, limits=limits, progress=bar.update)
    emit(lambda: render_solution(solution), solution.to_json, json_to)
    if Capability.INCUMBENT not in searcher.provides and solution.bounds.dual is not None:
        return  # a bound is all that was asked for
    if solution.status in (Status.INFEASIBLE, Status.UNKNOWN):
        raise typer.Exit(EXIT_INFEASIBLE)


def _solve_batches(envelope: Any, searcher: Any, limits: Any, json_to: str | None) -> None:
    """Answer an envelope that lists global batches."""
    from mosaic_opt.batch_choice import solve_batches
    from mosaic_opt.report_batches import render_batches

    order = sorted(set(envelope.global_batches))
    with Bar() as bar:
        choice = solve_batches(
            envelope,
            backend=searcher,
            limits=limits,
            progress=bar.update,
            started=lambda batch: bar.count("global batches", order.index(batch), len(order)),
        )
    emit(lambda: render_batches(choice), choice.to_json, json_to)
    if choice.best_batch is None:
        raise typer.Exit(EXIT_INFEASIBLE)


def _backend(name: str, workers: int | None) -> Any:
    """Return a backend by name, with the number of threads if one is given."""
    import dataclasses
    import warnings

    from mosaic_opt.backends.entries import entries
    from mosaic_opt.backends.registry import resolve

    with warnings.catch_warnings():
        note = entries()[name].note if name in entries() else ""
        if note:  # said as every other sentence, and not as a warning of Python
            typer.echo(f"note: {note}", err=True)
            warnings.simplefilter("ignore", UserWarning)
        found: Any = resolve(name)
    if workers is None:
        return found
    if not hasattr(found, "workers"):
        raise MosaicError(f"--workers is not for the backend {name}.")
    return dataclasses.replace(found, workers=workers)


@app.command()
def relax(
    envelope: EnvelopeFile = None,
    example: Example = None,
    solver: Annotated[str, typer.Option(help="A conic solver that cvxpy finds.")] = "clarabel",
    check: Annotated[str, typer.Option(help="A second one, or none.")] = "scs",
    mfu: Annotated[
        str, typer.Option(help="exact: of the best layouts; bound: bounds of blocks.")
    ] = "exact",
    pieces: Annotated[int, typer.Option(help="Monomials in the envelope of MFU.")] = 1,
    workers: Workers = None,
    json_to: Json = None,
) -> None:
    """Bound the loss from below by the convex relaxation, and say what the budgets are worth."""
    from mosaic_opt.backends.gp import GeometricProgram
    from mosaic_opt.problem import Problem
    from mosaic_opt.relaxation_result import RelaxationStatus
    from mosaic_opt.report_relaxation import render_relaxation

    check_target(json_to)
    problem = Problem(read_envelope(envelope, example))
    backend = GeometricProgram(
        solver=solver,
        check=None if check == "none" else check,
        mfu=mfu,  # type: ignore[arg-type]  # any other word is refused there
        pieces=pieces,
        workers=workers,
    )
    with Bar() as bar:
        found = backend.relax(problem, progress=bar.update)
    emit(lambda: render_relaxation(found), found.to_json, json_to)
    if found.status is not RelaxationStatus.BOUND:
        raise typer.Exit(EXIT_INFEASIBLE)


@app.command()
def step(
    model: Model,
    plan: PlanText,
    cluster: ClusterText,
    global_batch: GlobalBatch,
    seq: Seq,
    optimizer: OptimizerName = "adamw",
    precision: PrecisionName = "bf16",
    imbalance: Imbalance = 1.0,
    capacity_factor: CapacityFactor = None,
    stack: StackName = "megatron-eager",
    mfu_convention: Convention = "6n-nonembedding",
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Say what binds, what is lost, what a change would do."),
    ] = False,
    json_to: Json = None,
) -> None:
    """Price one optimizer step of one plan."""
    from mosaic_opt.report import render_step, render_violations, violations_json
    from mosaic_opt.report_layouts import render_explanation
    from perfmodel.errors import IllegalPlanError
    from perfmodel.explanation import explain as explained
    from perfmodel.step import estimate

    convention = read_convention(mfu_convention)
    case = read_case(
        *(model, plan, cluster, global_batch, seq),
        *(optimizer, precision, imbalance, capacity_factor),
    )
    try:
        if explain:
            answer = explained(*case, stack=stack, mfu_convention=convention)
            emit(
                lambda: render_explanation(answer),
                lambda: answer.model_dump_json(indent=2),
                json_to,
            )
            return
        result = estimate(*case, stack=stack, mfu_convention=convention)
    except IllegalPlanError as error:
        broken = error.violations
        emit(lambda: render_violations(broken), lambda: violations_json(broken), json_to)
        raise typer.Exit(EXIT_INFEASIBLE) from None
    emit(lambda: render_step(result), lambda: result.model_dump_json(indent=2), json_to)


@app.command()
def check(
    model: Model,
    plan: PlanText,
    cluster: ClusterText,
    global_batch: GlobalBatch,
    seq: Seq,
    optimizer: OptimizerName = "adamw",
    precision: PrecisionName = "bf16",
    imbalance: Imbalance = 1.0,
    capacity_factor: CapacityFactor = None,
    json_to: Json = None,
) -> None:
    """Say whether a plan is legal, or name every rule that it breaks."""
    from mosaic_opt.report import render_violations, violations_json
    from perfmodel.step import check as broken_rules

    architecture, layout, machines, batch = read_case(
        *(model, plan, cluster, global_batch, seq),
        *(optimizer, precision, imbalance, capacity_factor),
    )
    violations = broken_rules(architecture, layout, machines, batch)
    emit(lambda: render_violations(violations), lambda: violations_json(violations), json_to)
    if violations:
        raise typer.Exit(EXIT_INFEASIBLE)


@app.command()
def validate(
    stack: StackName = "megatron-eager",
    runs: Annotated[
        Path | None,
        typer.Option(help="CSV of measured runs of your own; with --memory, the nanotron sweep."),
    ] = None,
    hardware: Annotated[str, typer.Option(help="Hardware pack of those runs.")] = "p6-b200",
    memory: Annotated[
        bool, typer.Option("--memory", help="Score peaks of memory, not step times.")
    ] = False,
    published: Annotated[
        bool, typer.Option("--published", help="Score published runs alone.")
    ] = False,
    json_to: Json = None,
) -> None:
    """Score the performance model on measured runs: fitted, left out, and in no fit.

    Without options: the layout sweeps of the stack, then every published run under its own stack.
    """
    from rich.console import Group

    from mosaic_opt.report import render_scoreboard
    from perfmodel.validation.runs import layout_sweeps
    from perfmodel.validation.scoreboard import validate as score

    check_target(json_to)
    if memory:
        from mosaic_opt.report_memory import render_memory_scores
        from perfmodel.validation.memory_scores import memory_scores

        scores = memory_scores(nanotron=runs)
        page = functools.partial(render_memory_scores, scores)
        emit(page, lambda: scores.model_dump_json(indent=2), json_to)
        return
    if published:
        from mosaic_opt.report_published import render_published_scores
        from perfmodel.validation.published_scores import published_scores

        with Bar() as bar:
            found = published_scores(bar.count)
        both = functools.partial(render_published_scores, found)
        emit(both, lambda: found.model_dump_json(indent=2), json_to)
        return
    measured = layout_sweeps(runs, hardware) if runs is not None else None
    with Bar() as bar:
        board = score(stack, measured, progress=bar.count)

    def page_of_both() -> RenderableType:
        if runs is not None or stack != "megatron-eager":
            return render_scoreboard(board)
        from mosaic_opt.report_published import render_published_scores
        from perfmodel.validation.published_scores import published_scores

        return Group(render_scoreboard(board), "", render_published_scores(published_scores()))

    emit(page_of_both, lambda: board.model_dump_json(indent=2), json_to)


@app.command()
def examples(json_to: Json = None) -> None:
    """List the example envelopes."""
    import json

    from rich.table import Table

    from mosaic_opt.envelope import example as shipped
    from mosaic_opt.envelope import examples as names

    found = {name: shipped(name) for name in names()}

    def page() -> RenderableType:
        table = Table("name", "cluster", "days", "batch", "candidates", box=None, pad_edge=False)
        for name, e in found.items():
            table.add_row(
                name,
                f"{e.cluster.hardware}:{e.cluster.nodes}",
                f"{e.window_days:g}",
                f"{e.batch.global_batch} x {e.batch.seq_len}",
                str(len(e.candidates.architectures())),
            )
        return table

    def document() -> str:
        listing = {name: e.model_dump(mode="json") for name, e in found.items()}
        return json.dumps({"schema_version": 1, "examples": listing}, indent=2)

    emit(page, document, json_to)


@app.command()
def models(json_to: Json = None) -> None:
    """List the models of the catalogue: parameters by convention, and FLOPs of a token."""
    import json

    from rich.table import Table

    from perfmodel.architecture import MfuConvention, ParameterConvention
    from perfmodel.models import catalogue

    seq_len = 4096
    conventions = list(ParameterConvention)

    def page() -> RenderableType:
        table = Table(
            "name",
            "attention",
            "total (B)",
            "active (B)",
            "without embedding",
            "and head",
            f"GFLOP/token, megatron, seq {seq_len}",
            box=None,
            pad_edge=False,
        )
        for name, a in catalogue.items():
            table.add_row(
                name,
                a.attention_kind,
                f"{a.n_total(conventions[0]) / 1e9:.3f}",
                *(f"{a.n_active(c) / 1e9:.3f}" for c in conventions),
                f"{a.flops_per_token(MfuConvention.MEGATRON, seq_len) / 1e9:.3f}",
            )
        return table

    def document() -> str:
        listing = [
            {
                "name": name,
                **catalogue.entry(name).model_dump(mode="json", exclude={"architecture"}),
                "n_total": {c.value: a.n_total(c) for c in conventions},
                "n_active": {c.value: a.n_active(c) for c in conventions},
                "mtp_parameters": a.mtp_parameters,
                "megatron_flop_per_token": a.flops_per_token(MfuConvention.MEGATRON, seq_len),
                "seq_len": seq_len,
                "architecture": a.model_dump(mode="json"),
            }
            for name, a in catalogue.items()
        ]
        return json.dumps({"schema_version": 1, "models": listing}, indent=2)

    emit(page, document, json_to)


@app.command()
def schema() -> None:
    """Print the JSON Schema of an envelope."""
    import json

    from mosaic_opt.envelope import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))


cli_layouts.register(app)
cli_allocation.register(app)
cli_compare.register(app)
cli_robust.register(app)
cli_fit.register(app)
cli_verify.register(app)


# Every usage error derives from it; typer re-exports some of them and not the base.
_USAGE_ERROR: type[Any] = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)


def main() -> None:
    """Run the command line; every expected error is one sentence and exit code 2."""
    from pydantic import ValidationError

    from lawfit import LawError
    from perfmodel.errors import PerfmodelError
    from perfmodel.frozen import explain

    try:
        sys.exit(app(standalone_mode=False))
    except (typer.Abort, KeyboardInterrupt):
        typer.echo("interrupted", err=True)
        sys.exit(EXIT_INTERRUPTED)
    except ValidationError as error:
        message = f"{explain(error)}."
    except (MosaicError, PerfmodelError, LawError) as error:
        message = str(error)
    except _USAGE_ERROR as error:
        message = error.format_message()
    if message.strip():  # none behind the help that a bare command shows
        typer.echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(EXIT_BAD_INPUT)


if __name__ == "__main__":
    main()
