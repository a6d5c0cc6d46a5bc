"""Commands that search layouts of one model: plan, stages."""

from __future__ import annotations

from math import inf
from typing import Annotated

import typer

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
    Workers,
    read_batch,
    read_convention,
    read_model,
    read_plan,
)
from mosaic_opt.console import EXIT_INFEASIBLE, check_target, emit
from mosaic_opt.errors import MosaicError


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
    workers: Workers = None,
    mfu_convention: Convention = "megatron",
    json_to: Json = None,
) -> None:
    """Find the layouts of one model with the shortest steps that fit."""
    from mosaic_opt.report_layouts import render_layouts
    from mosaic_opt.space_options import read_space
    from perfmodel.cluster import Cluster
    from perfmodel.layout_search import search_layouts

    check_target(json_to)
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
    emit(lambda: render_layouts(found), lambda: found.model_dump_json(indent=2), json_to)
    if not found.layouts:
        raise typer.Exit(EXIT_INFEASIBLE)


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
    from mosaic_opt.report import render_violations, violations_json
    from mosaic_opt.report_stages import ProgressLines, render_stages
    from mosaic_opt.space_options import read_modes
    from mosaic_opt.stage_search import search_stages
    from perfmodel.cluster import Cluster
    from perfmodel.errors import IllegalPlanError

    check_target(json_to)
    pools = [Cluster.parse(part.strip()) for part in cluster.split(",")]
    layout = read_plan(plan, sum(pool.n_devices for pool in pools))
    routing: dict[str, float | None] = {
        "imbalance": imbalance,
        "capacity_factor": capacity_factor,
    }
    batch, *_ = [
        read_batch(pool, global_batch, seq, optimizer, precision, routing) for pool in pools
    ]
    lines = ProgressLines(lambda line: typer.echo(line, err=True))
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
            progress=lines.update,
        )
    except IllegalPlanError as error:
        broken = error.violations
        emit(lambda: render_violations(broken), lambda: violations_json(broken), json_to)
        raise typer.Exit(EXIT_INFEASIBLE) from None
    lines.finish()
    emit(lambda: render_stages(found), lambda: found.model_dump_json(indent=2), json_to)
    if found.slowest_s is None:
        raise typer.Exit(EXIT_INFEASIBLE)


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("plan")(search_plans)
    app.command()(stages)
