"""Pages of what follows from one survey: phases, the inverse, the allocation law."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from mosaic_opt.report import _short, grid, number, short_name

if TYPE_CHECKING:
    from mosaic_opt.allocation.inverse import Inverse, Reach
    from mosaic_opt.allocation.phases import Phases, PhasesByNodes
    from mosaic_opt.allocation.regime import AllocationLaw, PathPoint, PathRow, RegimeEnd, Triple


def _model(name: str) -> str:
    return escape(short_name(name))


# ---------------------------------------------------------------- phases


def render_phases(found: Phases) -> RenderableType:
    """Return the phases of one cluster as a table."""
    title = Text(
        f"{found.name} on {found.nodes} nodes ({found.n_devices} devices): "
        f"{len(found.phases)} phases in windows of {found.days_from:g} to {found.days_to:g} days",
        style="bold",
    )
    if not found.phases:
        reason = (
            "no candidate has a layout that is legal and fits"
            if not found.with_layout
            else "no candidate meets the token rule in these windows"
        )
        return Group(title, Text(f"None: {reason}."))
    table = grid("candidate", "until day", "N_act", "N_tot", "tokens", "loss", "MFU")
    table.add_column("layout", no_wrap=True)
    for p in found.phases:
        table.add_row(
            _model(p.architecture),
            f"{p.days_to:.5g}",
            number(p.n_active),
            number(p.n_total),
            number(p.tokens_to),
            f"{p.loss_to:.4f}",
            f"{100 * p.mfu:.1f}%",
            _short(str(p.plan)),
        )
    first = found.phases[0].days_from
    lines = [
        Text(
            "Tokens and loss at the end of each phase. "
            f"Loss [{found.loss_source}] in nats/token; steps [{_sources(found)}]."
        )
    ]
    lowest, highest = (f([p.goodput for p in found.phases]) for f in (min, max))
    if lowest != 1.0:
        shares = f"{lowest:.4f}" if lowest == highest else f"{lowest:.4f} to {highest:.4f}"
        lines.append(Text(f"Goodput {shares} [{found.phases[0].goodput_source.value}]."))
    lines += [
        Text(f"{p.architecture} is at its cap from day {p.capped_from_days:.5g} on.")
        for p in found.phases
        if p.capped_from_days is not None
    ]
    if first > found.days_from:
        lines.append(Text(f"Below {first:.5g} days no candidate meets the token rule."))
    return Group(title, table, *lines)


def _sources(found: Phases) -> str:
    return ", ".join(sorted({p.step_source.value for p in found.phases}))


def render_phases_by_nodes(found: PhasesByNodes) -> RenderableType:
    """Return the phases of several clusters, one table each."""
    pages: list[RenderableType] = []
    for cluster in found.clusters:
        pages += [render_phases(cluster), Text("")]
    return Group(*pages[:-1])


# ---------------------------------------------------------------- the inverse


def render_inverse(found: Inverse) -> RenderableType:
    """Return what a target loss takes, by node count, the best one marked."""
    goal = f"{found.name}: {found.target_loss:g} nats/token with the least {_word(found)}"
    limit = "" if found.within_days is None else f", within {found.within_days:g} days"
    parts: list[RenderableType] = [Text(goal + limit, style="bold")]
    if found.best is None:
        parts.append(Text("Nothing reaches it."))
    if found.by_nodes:
        names = ["nodes", "days", "GPU-hours"]
        names += ["cost"] if found.price_per_gpu_hour is not None else []
        names += ["MWh"] if found.watts_per_device is not None else []
        failing = any(reach.goodput != 1.0 for reach in found.by_nodes)
        names += ["goodput"] if failing else []
        table = grid(*names, "candidate", "tokens", "TPP", "loss", "MFU", "layout")
        for reach in found.by_nodes:
            mark = " *" if found.best is not None and reach.nodes == found.best.nodes else ""
            table.add_row(
                f"{reach.nodes}{mark}",
                f"{reach.days:.5g}",
                number(reach.gpu_hours),
                *_priced(reach),
                *([f"{reach.goodput:.4f}"] if failing else []),
                _model(reach.architecture),
                number(reach.tokens),
                f"{reach.tokens_per_parameter:.0f}",
                f"{reach.loss:.4f}",
                f"{100 * reach.mfu:.1f}%",
                _short(str(reach.plan)),
            )
        parts.append(table)
    parts += [Text(f"{m.nodes} nodes: {m.detail}.") for m in found.missed]
    rests = f"Loss [{found.loss_source}]"
    if any(reach.goodput != 1.0 for reach in found.by_nodes):
        rests += f"; goodput [{found.by_nodes[0].goodput_source.value}]"
    if found.price_per_gpu_hour is not None:
        rests += f"; {found.price_per_gpu_hour:g} for a GPU-hour [{found.price_source.value}]"
    if found.watts_per_device is not None:
        rests += f"; {found.watts_per_device:g} W for a device [{found.price_source.value}]"
    parts.append(Text(rests + "."))
    return Group(*parts)


def _word(found: Inverse) -> str:
    return {"gpu_hours": "GPU-hours"}.get(found.objective, found.objective)


def _priced(reach: Reach) -> list[str]:
    cells = [] if reach.cost is None else [number(reach.cost)]
    return cells if reach.energy_j is None else [*cells, f"{reach.energy_j / 3.6e9:.4g}"]


# ---------------------------------------------------------------- the allocation law


def render_allocation_law(law: AllocationLaw) -> RenderableType:
    """Return the law at the optimum, how far it holds, and the path beside the exact optima."""
    e = law.exponents
    parts: list[RenderableType] = [
        Text(f"{law.name}: allocation law at {law.architecture}, {law.days:g} days", style="bold"),
        Text(
            f"Regime: {_short(str(law.plan))}. "
            + ("The optimum is inside it." if law.inside else "The optimum is not inside one:")
        ),
        *(Text(f"  {reason}") for reason in law.violated),
        Text(f"Exponents: p {e.p:.4f}, rho {e.rho:.4f}, g {e.g:.4f}{_nu(e.nu)}"),
    ]
    if law.slopes is None:
        parts.append(Text("Slopes of MFU*: too few candidates with this layout near it."))
    else:
        f = law.slopes
        parts.append(
            Text(
                f"Slopes of log MFU*: w_N {f.w_n:.3f} +- {f.w_n_error:.3f}, "
                f"w_S {f.w_s:.3f} +- {f.w_s_error:.3f}, w_G {f.w_g:.3f} +- {f.w_g_error:.3f} "
                f"({f.points} candidates, rms {f.rms:.3f})"
            )
        )
    for name, triple in (("Signs, all above 0", law.conditions), ("Residuals", law.residuals)):
        if triple is not None:
            parts.append(Text(f"{name}: {_triple(triple)}"))
    if law.no_path is not None:
        parts.append(Text(f"No path: {law.no_path}."))
    for name, end in (("from", law.regime_from), ("to", law.regime_to)):
        if end is not None:
            parts.append(Text(f"Holds {name} {_end(end)}"))
    table = grid("days", "exact optimum", "N_tot", "1-S", "G", "D", "loss", "path: N_tot", "1-S")
    for column in ("G", "D"):
        table.add_column(column, justify="right")
    table.add_column("outside by")
    for row in law.path:
        table.add_row(
            f"{row.days:.4g}",
            _model(row.architecture),
            *_point(row.exact),
            f"{row.exact.loss:.4f}",
            *(_point(row.predicted) if row.predicted is not None else ["-"] * 4),
            escape(", ".join(_outside(row))),
        )
    parts += [Text(""), table, Text(f"Loss [{law.loss_source}]; no token rule.")]
    return Group(*parts)


def _nu(nu: float | None) -> str:
    return "" if nu is None else f", nu {nu:.4f}"


def _triple(t: Triple) -> str:
    return f"N {t.n_total:.3f}, 1-S {t.one_minus_s:.3f}, G {t.expert_split:.3f}"


def _end(end: RegimeEnd) -> str:
    return f"{end.days:.4g} days ({end.budget_flop:.3g} FLOP), by {end.cause}: {end.detail}"


def _point(p: PathPoint) -> list[str]:
    return [
        number(p.n_total),
        f"{p.one_minus_s:.3f}",
        f"{p.expert_split:.3g}",
        number(p.tokens),
    ]


def _outside(row: PathRow) -> list[str]:
    found = [] if row.same_layout else ["layout"]
    found += ["memory"] if row.memory_binds else []
    return [*found, *row.edges, *(f"no layout beyond {side}" for side in row.no_layout_beyond)]
