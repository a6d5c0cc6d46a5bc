"""Results as pages of text: pure functions from values to rich renderables or strings."""

from __future__ import annotations

from io import StringIO
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from mosaic_opt.report_wider import dropped_points, efficiency_row, spend_row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mosaic_opt.result import Candidate, Rejected, Solution, Tally
    from perfmodel.rules import Violation
    from perfmodel.step import StepEstimate
    from perfmodel.validation.scoreboard import Scoreboard

PAGE_WIDTH = 100
_LONG_NAME = 30  # letters


def as_text(renderable: RenderableType, width: int = PAGE_WIDTH) -> str:
    """Return a renderable as plain text."""
    out = StringIO()
    Console(file=out, width=width, no_color=True, highlight=False).print(renderable)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def render_text(solution: Solution) -> str:
    """Return the page of a solution as plain text."""
    return as_text(render_solution(solution))


def number(value: float) -> str:
    """Write a large number with the suffix of its thousands: 14.52B, 1.42T."""
    for scale, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.4g}{suffix}"
    return f"{value:.4g}"


def grid(*columns: str) -> Table:
    """Return a table without lines, its first column to the left."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=bool(columns))
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=i == 0)
    return table


def _facts(rows: Sequence[tuple[str, str]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2), show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, escape(value))
    return table


def short_name(name: str) -> str:
    """Write a candidate's name without the word that says how it was made."""
    return name.removeprefix("ladder:").removeprefix("family:")


def short_plan(candidate: Candidate) -> str:
    """Write a plan without the degrees that are 1."""
    return _short(str(candidate.plan))


def _short(plan: str) -> str:
    kept = [p for p in plan.split(",") if not (p.endswith("=1") and not p.startswith("mbs"))]
    bare = (part.removeprefix("recompute=").removeprefix("layout=") for part in kept)
    # options, which are no degrees, stay as they are given
    return " ".join(part if "_" in part else part.replace("=", "") for part in bare)


def render_candidates(candidates: Sequence[Candidate]) -> Table:
    """Return candidates as a table, best first."""
    table = grid(
        "candidate", "N_act", "N_tot", "S", "tokens", "TPP", "MFU", "GB", "loss", "+", "layout"
    )
    for c in candidates:
        table.add_row(
            escape(f"{c.rank:>3} {short_name(c.name)}"),
            number(c.n_active),
            number(c.n_total),
            f"{c.sparsity:.3f}",
            number(c.tokens),
            f"{c.tokens_per_parameter:.0f}",
            f"{100 * c.mfu:.1f}%",
            f"{c.memory_bytes / 1e9:.0f}",
            f"{c.loss:.4f}",
            f"{c.delta_loss:.4f}",
            short_plan(c),
        )
    if any(len(short_name(c.name)) > _LONG_NAME for c in candidates):
        for column in table.columns[1:-1]:
            column.no_wrap = True
        table.columns[0].no_wrap = False  # what folds is the name, not the numbers
        table.columns[0].overflow = "fold"
    return table


def render_breakdown(step: StepEstimate) -> Table:
    """Return the parts of a step, largest first, with what each rests on."""
    table = grid("part of the step", "ms", "%", "rests on")
    parts = sorted(step.breakdown_s.items(), key=lambda item: -item[1])
    for name, seconds in parts:
        share = seconds / step.step_time_s
        if share < 0.0005:
            continue
        table.add_row(
            name.replace("_", " "),
            f"{1e3 * seconds:.1f}",
            f"{100 * share:.1f}",
            step.sources[name].value,
        )
    table.add_row(
        "total", f"{1e3 * step.step_time_s:.1f}", "100", step.sources["step_time_s"].value
    )
    return table


def _flag_lines(flags: Sequence[str], limit: int = 6) -> list[RenderableType]:
    if not flags:
        return []
    lines: list[RenderableType] = [
        Text(""),
        Text(f"Outside what was measured ({len(flags)}):", style="bold"),
    ]
    lines += [Text(f"  - {flag}") for flag in flags[:limit]]
    if len(flags) > limit:
        lines.append(Text(f"  - and {len(flags) - limit} more, in the JSON"))
    return lines


def render_solution(solution: Solution) -> RenderableType:
    """Return the page of a solution."""
    counts = solution.counts
    parts: list[RenderableType] = [
        Text(f"{solution.name}: {solution.status.value.upper()}", style="bold"),
    ]
    best = solution.optimum
    if best is None:
        parts.append(Text(_without_optimum(solution)))
    else:
        a = best.architecture
        parts.append(
            _facts(
                [
                    (
                        "architecture",
                        f"{a['name']}  ({a['n_layers']} layers, width {a['d_model']}, "
                        f"{a['n_experts']} experts, top {a['top_k']}, "
                        f"split {a['expert_split']:g})"
                        if a["expert_split"]
                        else f"{a['name']}  ({a['n_layers']} layers, width {a['d_model']})",
                    ),
                    (
                        "parameters",
                        f"{number(float(str(a['n_active'])))} active, "
                        f"{number(float(str(a['n_total'])))} total, sparsity "
                        f"{float(str(a['sparsity'])):.3f}  ({a['parameter_convention']})",
                    ),
                    (
                        "tokens",
                        f"{number(best.tokens)}  ({best.tokens_per_parameter:.1f} a parameter; "
                        f"set by the {best.binding.replace('_', ' ')})",
                    ),
                    *efficiency_row(best.token_efficiency),
                    ("loss", f"{best.loss:.4f} nats/token  [{best.loss_source}]"),
                    *spend_row(best.spend),
                    ("layout", str(best.plan)),
                    (
                        "step",
                        f"{best.step_time_s:.3f} s, MFU {100 * best.mfu:.2f}% "
                        f"({best.mfu_convention})  [{best.step.sources['mfu'].value}]",
                    ),
                    (
                        "memory",
                        f"{best.memory_bytes / 1e9:.1f} GB of "
                        f"{best.step.device_memory_bytes / 1e9:.0f} GB on the fullest device "
                        f"(stage {best.step.heaviest_stage})  "
                        f"[{best.step.sources['memory_bytes'].value}]",
                    ),
                    ("learning rate", f"{best.learning_rate:.2e}  (peak, rule (17))"),
                ]
            )
        )
        parts += [Text(""), render_breakdown(best.step)]
        tolerance = solution.near_tie_rule.loss_tolerance or 0.0
        parts += [
            Text(""),
            Text(
                "Not distinguishable from the optimum: "
                f"{len(solution.near_ties)} candidates within "
                f"{tolerance:.4f} nats, which is what an error of "
                f"{100 * solution.near_tie_rule.mfu_error:g}% in MFU moves.",
                style="bold",
            ),
            render_candidates(solution.near_ties),
        ]
        if solution.near_feasible:
            parts += [
                Text(""),
                Text(
                    "Short of tokens by less than that error: "
                    f"{len(solution.near_feasible)} candidates that an MFU higher by "
                    f"{100 * solution.near_tie_rule.mfu_error:g}% would admit, shown at that MFU.",
                    style="bold",
                ),
                render_candidates(solution.near_feasible),
            ]
    parts.append(Text(""))
    parts.append(
        Text(
            f"Searched {counts.architectures:,} architectures x {counts.layouts:,} layouts = "
            f"{counts.plans:,} pairs: {counts.priced:,} priced ({_share(counts)}; of which "
            f"{counts.over_memory:,} do not fit and {counts.refused:,} lie beyond a measured "
            f"range), {counts.infeasible:,} break a rule, {counts.discarded:,} discarded by a "
            f"bound, {counts.unexamined:,} not reached. {_feasible(counts)}"
        )
    )
    parts += dropped_points(solution)
    parts += _rejections(solution)
    parts.append(Text(_certificate_line(solution)))
    if best is not None:
        parts += _flag_lines(best.flags)
    provenance = solution.provenance
    parts += [
        Text(""),
        Text(
            f"Rests on hardware pack {provenance['hardware']['name']} "
            f"({provenance['hardware']['sha256'][:12]}), stack {provenance['stack']['name']} "
            f"({provenance['stack']['sha256'][:12]}), law: {provenance['law']['source']}"
        ),
    ]
    return Group(*parts)


def _share(counts: Tally) -> str:
    return f"{counts.priced / counts.plans:.2%}" if counts.plans else "of none"


def _feasible(counts: Tally) -> str:
    if not counts.ruled_out_architectures:
        return f"{counts.feasible_architectures:,} architectures are feasible."
    return (
        f"{counts.ruled_out_architectures:,} architectures are ruled out by bounds, each worse "
        f"than every candidate above; {counts.feasible_architectures:,} others are feasible."
    )


def _without_optimum(solution: Solution) -> str:
    dual = solution.bounds.dual
    if dual is not None:
        return f"Bound only: no candidate has a loss below {dual:.6f} nats/token, of the model."
    return "No candidate is feasible." if solution.rejected else "No candidate."


def _certificate_line(solution: Solution) -> str:
    bounds = solution.bounds
    if solution.certificate.certified and bounds.primal is not None:
        return (
            f"Certified, of the model: loss {bounds.primal:.6f}, bound {bounds.dual:.6f}, gap 0; "
            f"{len(solution.certificate.checks)} checks passed."
        )
    if solution.certificate.certified:
        return f"Certified, of the model: {len(solution.certificate.checks)} checks passed."
    failed = ", ".join(c.name for c in solution.certificate.checks if not c.passed)
    gap = "" if bounds.gap is None else f" Bound {bounds.dual:.6f}, gap {bounds.gap:.6f} nats."
    return f"Not certified ({solution.termination}): {failed}.{gap}"


def _rejections(solution: Solution) -> list[RenderableType]:
    """Return a line for each reason: how many candidates, and the one that misses by least."""
    groups: dict[str, list[Rejected]] = {}
    for item in solution.rejected:
        groups.setdefault(item.reason, []).append(item)
    lines: list[RenderableType] = []
    for reason, items in groups.items():
        nearest = min(items, key=lambda r: (r.shortfall is None, r.shortfall or 0.0))
        lines.append(
            Text(
                f"Rejected for {reason.replace('_', ' ')}: {len(items)}; nearest to fit: "
                f"{nearest.name}, {nearest.detail.rstrip('.')}."
            )
        )
    return lines


def _interval(step: StepEstimate) -> str:
    """Write the interval of a step time, and whether the stack's runs were like this one."""
    low, high = step.step_time_interval_s
    whose = "by runs left out of the stack's fit"
    if not step.interval_applies:
        whose += "; this one lies outside of what they cover"
    return f"{low:.4f} to {high:.4f} s, {whose}"


def _dropped(step: StepEstimate) -> list[tuple[str, str]]:
    """Return a row where a capacity drops tokens, or may."""
    if step.dropped_tokens_share == 0.0:
        return []
    share = step.dropped_tokens_share
    known = "some, of unknown number" if share is None else f"{100 * share:.2f}%"
    return [("dropped", f"{known} of the routed tokens")]


def render_step(step: StepEstimate) -> RenderableType:
    """Return the page of one plan's step."""
    fits = "fits" if step.fits else "DOES NOT FIT"
    stages = ", ".join(f"{b / 1e9:.1f}" for b in step.memory_by_stage_bytes[:16])
    more = " ..." if len(step.memory_by_stage_bytes) > 16 else ""
    buckets = step.memory_buckets_bytes[step.heaviest_stage]
    return Group(
        _facts(
            [
                ("architecture", str(step.architecture["name"])),
                ("layout", str(step.plan)),
                ("on", f"{step.hardware}, stack {step.stack}"),
                ("step", f"{step.step_time_s:.4f} s  [{step.sources['step_time_s'].value}]"),
                ("90% interval", _interval(step)),
                (
                    "MFU",
                    f"{100 * step.mfu:.2f}%  ({step.mfu_convention.value}), "
                    f"{step.tflops_per_device:.1f} TFLOP/s a device",
                ),
                (
                    "tokens/s",
                    f"{step.tokens_per_s:,.0f} ({step.tokens_per_s_per_device:,.0f} each)",
                ),
                (
                    "memory",
                    f"{step.memory_bytes / 1e9:.1f} GB of {step.device_memory_bytes / 1e9:.0f} GB: "
                    f"{fits}  [{step.sources['memory_bytes'].value}]",
                ),
                *_dropped(step),
                ("by stage", f"{stages}{more} GB"),
                (
                    f"stage {step.heaviest_stage}",
                    ", ".join(f"{name} {b / 1e9:.1f}" for name, b in buckets.items() if b > 0.0)
                    + " GB",
                ),
            ]
        ),
        Text(""),
        render_breakdown(step),
        *_flag_lines(step.flags, limit=12),
    )


def render_violations(violations: Sequence[Violation]) -> RenderableType:
    """Return the answer of a check."""
    if not violations:
        return Text("legal")
    lines = [Text(f"illegal: {len(violations)} broken", style="bold")]
    lines += [Text(f"  {v.rule}: {v.message}") for v in violations]
    return Group(*lines)


def violations_json(violations: Sequence[Violation]) -> str:
    """Return the JSON document of the rules that a plan breaks; none if it is legal."""
    import json

    document = {
        "schema_version": 1,
        "legal": not violations,
        "violations": [v.model_dump(mode="json") for v in violations],
    }
    return json.dumps(document, indent=2)


def render_scoreboard(board: Scoreboard) -> RenderableType:
    """Return the scoreboard."""

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.2f}"

    overall = board.overall
    sweeps = grid("sweep", "rows", "MAPE %", "bias %", "Spearman", "ScalePlan MAPE %")
    for sweep in board.sweeps:
        sweeps.add_row(
            escape(sweep.name),
            str(sweep.rows),
            percent(sweep.mape),
            percent(sweep.bias),
            f"{sweep.spearman:.3f}",
            percent(sweep.peer_mape),
        )
    constants = grid("constant", "value", "5%", "95%", "unit")
    for name, constant in board.constants.items():
        constants.add_row(
            name,
            f"{constant.value:.4g}",
            f"{constant.low:.4g}",
            f"{constant.high:.4g}",
            constant.unit,
        )
    rows = grid("row", "measured %", "predicted %", "error %", "row out", "sweep out")
    for row in board.rows:
        rows.add_row(
            escape(f"{row.sweep} {_short(row.plan)}"),
            percent(row.measured_mfu),
            percent(row.predicted_mfu),
            percent(row.error),
            percent(row.error_leave_one_out),
            percent(row.error_leave_one_sweep_out),
        )
    table5 = grid("Table 5, in no fit", *(f"ID {i}" for i in range(1, 5)), "mean abs. error")
    table5.add_row("measured ratio", *(f"{x:.2f}" for x in board.table5.measured), "")
    for mode, ratios in board.table5.predicted.items():
        table5.add_row(
            f"predicted, recompute {mode}",
            *(f"{x:.3f}" for x in ratios),
            f"{board.table5.mean_absolute_error[mode]:.4f}",
        )
    table5.add_row(
        "the paper's prediction", *[""] * 4, f"{board.table5.paper_mean_absolute_error:.4f}"
    )
    peer = "" if overall.peer_mape is None else f"; ScalePlan {percent(overall.peer_mape)}%"
    return Group(
        Text(f"{board.stack} on {board.hardware}: {overall.rows} measured runs", style="bold"),
        Text(
            f"MAPE on MFU: {percent(overall.mape_in_sample)}% in sample, "
            f"{percent(overall.mape_leave_one_out)}% leaving one row out, "
            f"{percent(overall.mape_leave_one_sweep_out)}% leaving one sweep out{peer}"
        ),
        Text(""),
        sweeps,
        Text(""),
        constants,
        Text(""),
        rows,
        Text(""),
        table5,
        Text(""),
        Text(f"Constants: {board.source}."),
    )
