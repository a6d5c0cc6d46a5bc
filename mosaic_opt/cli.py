"""The command line. Exit codes: 0 an answer, 1 infeasible or illegal, 2 bad input."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from mosaic_opt import cli_allocation
from mosaic_opt.case_options import (
    Cap,
    CapacityFactor,
    ClusterText,
    Convention,
    Degrees,
    GlobalBatch,
    Imbalance,
    Json,
    Model,
    OptimizerName,
    PlanText,
    PrecisionName,
    Seq,
    StackName,
    read_batch,
    read_case,
    read_convention,
    read_model,
    read_plan,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mosaic_opt.envelope import Envelope

EXIT_ANSWER, EXIT_INFEASIBLE, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 0, 1, 2, 130

app = typer.Typer(
    name="mosaic",
    help="Choose the MoE architecture, token budget and layout that a cluster trains best.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _fail(message: str) -> NoReturn:
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(EXIT_BAD_INPUT)


def _emit(
    page: Callable[[], RenderableType], document: Callable[[], str], json_to: str | None
) -> None:
    """Show the page; write the JSON document to a file, or in place of the page to stdout."""
    from rich.console import Console

    if json_to == "-":
        typer.echo(document())
        return
    Console(highlight=False, width=None if sys.stdout.isatty() else 120).print(page())
    if json_to is not None:
        try:
            Path(json_to).write_text(document() + "\n", "utf-8")
        except OSError as error:
            _fail(f"{json_to} cannot be written: {error.strerror}.")


def _check_target(json_to: str | None) -> None:
    """Refuse a JSON target that cannot be written, before anything long is done for it."""
    if json_to not in (None, "-") and not Path(str(json_to)).absolute().parent.is_dir():
        _fail(f"{json_to} cannot be written: its folder does not exist.")


@app.command()
def solve(
    envelope: Annotated[Path | None, typer.Argument(help="YAML, TOML or JSON file.")] = None,
    example: Annotated[str | None, typer.Option(help="A shipped envelope, by name.")] = None,
    workers: Annotated[int | None, typer.Option(help="Threads; all cores unless given.")] = None,
    time_limit: Annotated[float | None, typer.Option(help="Seconds of search.")] = None,
    backend: Annotated[str, typer.Option(help="How to search: enumerate, gp.")] = "enumerate",
    json_to: Json = None,
) -> None:
    """Find the architecture, token budget and layout with the least predicted loss."""
    from mosaic_opt.backends.base import Capability, Limits
    from mosaic_opt.report import render_solution
    from mosaic_opt.result import Status
    from mosaic_opt.solver import solve as search

    _check_target(json_to)
    problem = _envelope(envelope, example)
    searcher = _backend(backend, workers)
    limits = Limits(time_s=time_limit)
    with _Bar() as bar:
        solution = search(problem, backend=searcher, limits=limits, progress=bar.update)
    _emit(lambda: render_solution(solution), solution.to_json, json_to)
    if Capability.INCUMBENT not in searcher.provides and solution.bounds.dual is not None:
        return  # a bound is all that was asked for
    if solution.status in (Status.INFEASIBLE, Status.UNKNOWN):
        raise typer.Exit(EXIT_INFEASIBLE)


def _envelope(file: Path | None, name: str | None) -> Envelope:
    from mosaic_opt.envelope import example, load_envelope
    from mosaic_opt.errors import MosaicError

    if (file is None) == (name is None):
        raise MosaicError("Give an envelope file or --example NAME, one of the two.")
    return load_envelope(file) if file is not None else example(str(name))


def _backend(name: str, workers: int | None) -> Any:
    """Return a backend by name, with the number of threads if one is given."""
    import dataclasses

    from mosaic_opt.backends.registry import resolve
    from mosaic_opt.errors import MosaicError

    found: Any = resolve(name)
    if workers is None:
        return found
    if not hasattr(found, "workers"):
        raise MosaicError(f"--workers is not for the backend {name}.")
    return dataclasses.replace(found, workers=workers)


@app.command()
def relax(
    envelope: Annotated[Path | None, typer.Argument(help="YAML, TOML or JSON file.")] = None,
    example: Annotated[str | None, typer.Option(help="A shipped envelope, by name.")] = None,
    solver: Annotated[str, typer.Option(help="A conic solver that cvxpy finds.")] = "clarabel",
    check: Annotated[str, typer.Option(help="A second one, or none.")] = "scs",
    mfu: Annotated[
        str, typer.Option(help="exact: of the best layouts; bound: the device's peak.")
    ] = "exact",
    pieces: Annotated[int, typer.Option(help="Monomials in the envelope of MFU.")] = 1,
    workers: Annotated[int | None, typer.Option(help="Threads; all cores unless given.")] = None,
    json_to: Json = None,
) -> None:
    """Bound the loss from below by the convex relaxation, and say what the budgets are worth."""
    from mosaic_opt.backends.gp import GeometricProgram
    from mosaic_opt.problem import Problem
    from mosaic_opt.relaxation_result import RelaxationStatus
    from mosaic_opt.report_relaxation import render_relaxation

    _check_target(json_to)
    problem = Problem(_envelope(envelope, example))
    backend = GeometricProgram(
        solver=solver,
        check=None if check == "none" else check,
        mfu=mfu,  # type: ignore[arg-type]  # any other word is refused there
        pieces=pieces,
        workers=workers,
    )
    with _Bar() as bar:
        found = backend.relax(problem, progress=bar.update)
    _emit(lambda: render_relaxation(found), found.to_json, json_to)
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
    from mosaic_opt.report import render_step, render_violations
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
            _emit(
                lambda: render_explanation(answer),
                lambda: answer.model_dump_json(indent=2),
                json_to,
            )
            return
        result = estimate(*case, stack=stack, mfu_convention=convention)
    except IllegalPlanError as error:
        broken = error.violations
        _emit(lambda: render_violations(broken), lambda: _check_json(broken), json_to)
        raise typer.Exit(EXIT_INFEASIBLE) from None
    _emit(lambda: render_step(result), lambda: result.model_dump_json(indent=2), json_to)


@app.command("plan")
def search_plans(
    model: Model,
    cluster: ClusterText,
    global_batch: GlobalBatch,
    seq: Seq,
    optimizer: OptimizerName = "adamw",
    precision: PrecisionName = "bf16",
    imbalance: Imbalance = 1.0,
    capacity_factor: CapacityFactor = None,
    stack: StackName = "megatron-eager",
    tp: Degrees = None,
    max_tp: Cap = None,
    ep: Degrees = None,
    max_ep: Cap = None,
    etp: Degrees = None,
    pp: Degrees = None,
    max_pp: Cap = None,
    vpp: Degrees = None,
    cp: Degrees = None,
    max_cp: Cap = None,
    micro_batch: Degrees = None,
    recompute: Annotated[
        str | None, typer.Option(help="Of none, selective, super-selective, full.")
    ] = None,
    layouts: Annotated[str | None, typer.Option(help="Stages: equal, balanced, or both.")] = None,
    zero: Annotated[
        int | None, typer.Option(help="ZeRO stage, 0 to 3: what is sharded over replicas.")
    ] = None,
    cp_comm: Annotated[
        str | None, typer.Option(help="Context parallelism: p2p, a ring, or a2a, heads.")
    ] = None,
    sequence_parallel: Annotated[
        bool | None,
        typer.Option(
            "--sequence-parallel/--no-sequence-parallel", help="Norms split over TP as well."
        ),
    ] = None,
    optimizer_offload: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Of the optimizer, on the host: 0 to 1.")
    ] = None,
    memory: Annotated[
        float | None, typer.Option(metavar="GB", help="Of a device; all that it has unless given.")
    ] = None,
    extrapolation: Annotated[
        str, typer.Option(help="Layouts beyond the measured all-to-all: refuse or flag.")
    ] = "refuse",
    top: Annotated[int, typer.Option(help="Layouts to list.")] = 10,
    workers: Annotated[int | None, typer.Option(help="Threads; all cores unless given.")] = None,
    mfu_convention: Convention = "megatron",
    json_to: Json = None,
) -> None:
    """Find the layouts of one model with the shortest steps that fit."""
    from mosaic_opt.errors import MosaicError
    from mosaic_opt.report_layouts import render_layouts
    from mosaic_opt.space_options import read_space
    from perfmodel.cluster import Cluster
    from perfmodel.layout_search import search_layouts

    _check_target(json_to)
    convention = read_convention(mfu_convention)
    if extrapolation not in ("refuse", "flag"):
        raise MosaicError(f"--extrapolation {extrapolation!r} must be refuse or flag.")
    architecture, machines = read_model(model), Cluster.parse(cluster)
    if memory is not None:
        if not 0.0 < memory < inf:
            raise MosaicError(f"--memory {memory:g} must be a number of GB above 0.")
        machines = machines.model_copy(update={"memory_bytes": 1e9 * memory})
    routing = {"imbalance": imbalance, "capacity_factor": capacity_factor}
    batch = read_batch(machines, global_batch, seq, optimizer, precision, routing)
    space = read_space(
        machines,
        batch,
        {
            **{"tp": tp, "max_tp": max_tp, "ep": ep, "max_ep": max_ep, "etp": etp},
            **{"pp": pp, "max_pp": max_pp, "vpp": vpp, "cp": cp, "max_cp": max_cp},
            **{"micro_batch": micro_batch, "recompute": recompute, "layouts": layouts},
            **{"zero": zero, "cp_comm": cp_comm, "sequence_parallel": sequence_parallel},
            "optimizer_offload": optimizer_offload,
        },
    )
    found = search_layouts(
        architecture,
        machines,
        batch,
        space,
        stack=stack,
        top=top,
        extrapolation="flag" if extrapolation == "flag" else "refuse",
        mfu_convention=convention,
        workers=workers,
    )
    _emit(lambda: render_layouts(found), lambda: found.model_dump_json(indent=2), json_to)
    if not found.layouts:
        raise typer.Exit(EXIT_INFEASIBLE)


@app.command()
def stages(
    model: Model,
    plan: PlanText,
    cluster: Annotated[
        str,
        typer.Option(
            "--cluster", help="Pack and nodes, p6-b200:32; several pools as in h100:16,b200:8."
        ),
    ],
    global_batch: GlobalBatch,
    seq: Seq,
    optimizer: OptimizerName = "adamw",
    precision: PrecisionName = "bf16",
    imbalance: Imbalance = 1.0,
    capacity_factor: CapacityFactor = None,
    stack: StackName = "megatron-eager",
    recompute: Annotated[
        str | None,
        typer.Option(help="Modes of a stage, of none, selective, super-selective, full."),
    ] = None,
    memory_fraction: Annotated[float, typer.Option(help="Share of a device's memory.")] = 1.0,
    max_chunk: Annotated[
        int | None, typer.Option(help="Layers of a virtual stage at most.")
    ] = None,
    time_limit: Annotated[float | None, typer.Option(help="Seconds of search.")] = None,
    workers: Annotated[int, typer.Option(help="Search threads.")] = 1,
    json_to: Json = None,
) -> None:
    """Find the stage layout of one plan whose slowest stage is the fastest, with a proof."""
    from mosaic_opt.backends.base import Limits
    from mosaic_opt.report import render_violations
    from mosaic_opt.report_stages import progress_line, render_stages
    from mosaic_opt.space_options import read_modes
    from mosaic_opt.stage_search import search_stages
    from perfmodel.cluster import Cluster
    from perfmodel.errors import IllegalPlanError

    _check_target(json_to)
    pools = [Cluster.parse(part.strip()) for part in cluster.split(",")]
    layout = read_plan(plan, sum(pool.n_devices for pool in pools))
    routing: dict[str, float | None] = {
        "imbalance": imbalance,
        "capacity_factor": capacity_factor,
    }
    batch, *_ = [
        read_batch(pool, global_batch, seq, optimizer, precision, routing) for pool in pools
    ]
    try:
        found = search_stages(
            read_model(model),
            layout,
            pools,
            batch,
            stack=stack,
            recompute=read_modes(recompute),
            memory_fraction=memory_fraction,
            max_chunk=max_chunk,
            limits=Limits(time_s=time_limit),
            workers=workers,
            progress=lambda state: typer.echo(progress_line(state), err=True),
        )
    except IllegalPlanError as error:
        broken = error.violations
        _emit(lambda: render_violations(broken), lambda: _check_json(broken), json_to)
        raise typer.Exit(EXIT_INFEASIBLE) from None
    _emit(lambda: render_stages(found), lambda: found.model_dump_json(indent=2), json_to)
    if found.slowest_s is None:
        raise typer.Exit(EXIT_INFEASIBLE)


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
    from mosaic_opt.report import render_violations
    from perfmodel.step import check as broken_rules

    architecture, layout, machines, batch = read_case(
        *(model, plan, cluster, global_batch, seq),
        *(optimizer, precision, imbalance, capacity_factor),
    )
    violations = broken_rules(architecture, layout, machines, batch)
    _emit(lambda: render_violations(violations), lambda: _check_json(violations), json_to)
    if violations:
        raise typer.Exit(EXIT_INFEASIBLE)


def _check_json(violations: Any) -> str:
    import json

    document = {
        "schema_version": 1,
        "legal": not violations,
        "violations": [v.model_dump(mode="json") for v in violations],
    }
    return json.dumps(document, indent=2)


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

    _check_target(json_to)
    if memory:
        from mosaic_opt.report_memory import render_memory_scores
        from perfmodel.validation.memory_scores import memory_scores

        scores = memory_scores(nanotron=runs)
        page = functools.partial(render_memory_scores, scores)
        _emit(page, lambda: scores.model_dump_json(indent=2), json_to)
        return
    if published:
        from mosaic_opt.report_published import render_published_scores
        from perfmodel.validation.published_scores import published_scores

        with _Bar() as bar:
            found = published_scores(bar.count)
        both = functools.partial(render_published_scores, found)
        _emit(both, lambda: found.model_dump_json(indent=2), json_to)
        return
    measured = layout_sweeps(runs, hardware) if runs is not None else None
    with _Bar() as bar:
        board = score(stack, measured, progress=bar.count)

    def page_of_both() -> RenderableType:
        if runs is not None or stack != "megatron-eager":
            return render_scoreboard(board)
        from mosaic_opt.report_published import render_published_scores
        from perfmodel.validation.published_scores import published_scores

        return Group(render_scoreboard(board), "", render_published_scores(published_scores()))

    _emit(page_of_both, lambda: board.model_dump_json(indent=2), json_to)


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

    _emit(page, document, json_to)


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

    _emit(page, document, json_to)


@app.command()
def schema() -> None:
    """Print the JSON Schema of an envelope."""
    import json

    from mosaic_opt.envelope import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))


cli_allocation.register(app)


class _Bar:
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

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, state: Any) -> None:
        """Show how many candidates are done and the best so far."""
        best = "" if state.incumbent is None else f", best {state.incumbent.loss:.4f}"
        self._show("search", f"candidates{best}", state.done, state.of)

    def count(self, what: str, done: int, of: int) -> None:
        """Show how far something countable is."""
        self._show(what, what, done, of)

    def _show(self, key: str, description: str, done: int, of: int) -> None:
        if key not in self._tasks:
            self._tasks[key] = self._progress.add_task(description, total=of)
        self._progress.update(self._tasks[key], completed=done, total=of, description=description)


# Every usage error derives from it; typer re-exports some of them and not the base.
_USAGE_ERROR: type[Any] = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)


def main() -> None:
    """Run the command line; every expected error is one sentence and exit code 2."""
    from pydantic import ValidationError

    from lawfit import LawError
    from mosaic_opt.errors import MosaicError
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
