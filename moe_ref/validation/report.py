"""The loop's report: a table of rows, a page in Markdown, and a figure."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence

from moe_ref.microbench.machine import Facts
from moe_ref.validation.scores import GROUPS, ScoredStep, StepScores
from perfmodel.calibration.packs import HardwarePack
from perfmodel.calibration.stacks import StackProfile

__all__ = ["figure_html", "rows_csv", "scores_table", "validation_markdown"]

_SIZES = ("d_model", "n_layers", "n_experts", "top_k", "expert_split", "micro_batch")
_BATCH = ("microbatches", "seq_len", "recompute", "ranks", "expert_parallel")


def rows_csv(rows: Sequence[ScoredStep]) -> str:
    """Return the rows as CSV; times in milliseconds, errors and MFU as fractions."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    times = ("predicted_ms", "kernels_ms", "measured_ms", "least_ms", "largest_ms")
    ratios = ("error", "predicted_mfu", "measured_mfu")
    writer.writerow(("case", *_SIZES, *_BATCH, *times, *ratios, "outside"))
    for row in rows:
        said = row.prediction
        seconds = (said.step_s, said.kernels_s, row.measured_s, row.low_s, row.high_s)
        parts = (row.error, said.mfu, row.measured_mfu)
        writer.writerow(
            (
                said.case.id,
                *(int(getattr(said.case, name)) for name in (*_SIZES, *_BATCH)),
                *(f"{1e3 * each:.4g}" for each in seconds),
                *(f"{each:.4f}" for each in parts),
                said.outside,
            )
        )
    return text.getvalue()


def scores_table(scores: Mapping[str, StepScores]) -> list[tuple[str, ...]]:
    """Return the scores as rows of text, the first of them the header."""
    head = ("steps", "rows", "MAPE", "bias", "90 % below", "Spearman of time, of MFU")
    found: list[tuple[str, ...]] = [
        (*head, "top 5 of time, of MFU", "kernels alone", "visits differ by")
    ]
    for group, s in scores.items():
        found.append(
            (
                GROUPS.get(group, "all of them"),
                str(s.rows),
                f"{s.mape:.1%}",
                f"{s.bias:+.1%}",
                f"{s.p90:.1%}",
                f"{s.spearman_time:.3f}, {s.spearman_mfu:.3f}",
                f"{s.top_time}, {s.top_mfu}",
                f"{s.kernels_mape:.1%}, bias {s.kernels_bias:+.1%}",
                f"{s.spread:.1%}",
            )
        )
    return found


def validation_markdown(
    facts: Facts,
    pack: HardwarePack,
    profile: StackProfile,
    rows: Sequence[ScoredStep],
    scores: Mapping[str, StepScores],
    remarks: Sequence[str],
) -> str:
    """Return the report: the machine, the scores, the stack, and every row."""
    e = profile.errors
    machine = (
        f"{facts.name}, {facts.cores} cores ({facts.capability}), {facts.devices_per_node} devices "
        f"of {facts.threads} {'thread' if facts.threads == 1 else 'threads'} and "
        f"{facts.memory_bytes / 1e9:.1f} GB each"
        if facts.device == "cpu"
        else f"{facts.name} ({facts.capability}), CUDA {facts.cuda_version}"
    )
    every = dict(profile.constants)
    for variant, changed in profile.variants.items():
        every |= {f"{variant}: {name}": c for name, c in changed.constants.items()}
    constants = [
        (f"`{name}`", f"{c.value:.4g}", f"{c.low:.4g}", f"{c.high:.4g}", c.unit, c.meaning)
        for name, c in every.items()
    ]
    lines = [
        f"Machine: {machine}; torch {facts.torch_version}, Python {facts.python_version}, "
        f"{facts.dtype}. Pack `{pack.name}`, {pack.origin}.",
        _table(scores_table(scores)),
        *remarks,
        f"Stack `{profile.name}`: {profile.provenance}. On the steps that fitted it: MAPE "
        f"{e.mape_in_sample:.1%}, each without its own step {e.mape_leave_one_out:.1%}, without "
        f"those of its width {e.mape_leave_one_sweep_out:.1%}.",
        _table([("constant", "value", "5 %", "95 %", "unit", "meaning"), *constants]),
        _table(
            [
                ("step", "predicted [ms]", "measured [ms]", "error", "MFU", "predicted", "outside"),
                *(
                    (
                        row.prediction.case.id,
                        f"{1e3 * row.prediction.step_s:.0f}",
                        f"{1e3 * row.measured_s:.0f}",
                        f"{row.error:+.1%}",
                        f"{row.measured_mfu:.1%}",
                        f"{row.prediction.mfu:.1%}",
                        str(row.prediction.outside),
                    )
                    for row in rows
                ),
            ]
        ),
    ]
    return "\n\n".join(lines) + "\n"


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *body))


def figure_html(rows: Sequence[ScoredStep], title: str) -> str | None:
    """Return a page with measured over predicted times; None where plotly is not installed."""
    try:
        import plotly.graph_objects as go
    except ImportError:
        return None
    figure = go.Figure()
    times = [t for row in rows for t in (row.measured_s, row.prediction.step_s)]
    low, high = 0.8e3 * min(times), 1.25e3 * max(times)
    for factor, dash in ((1.0, "solid"), (1.1, "dot"), (1.0 / 1.1, "dot")):
        figure.add_scatter(
            x=[low, high],
            y=[factor * low, factor * high],
            mode="lines",
            line={"color": "grey", "dash": dash, "width": 1},
            showlegend=factor == 1.0,
            name="equal; dotted: 10 % apart",
        )
    for group, name in GROUPS.items():
        mine = [row for row in rows if row.prediction.group == group]
        if not mine:
            continue
        middle = [1e3 * row.measured_s for row in mine]
        figure.add_scatter(
            x=[1e3 * row.prediction.step_s for row in mine],
            y=middle,
            error_y={
                "symmetric": False,
                "array": [1e3 * row.high_s - m for row, m in zip(mine, middle, strict=True)],
                "arrayminus": [m - 1e3 * row.low_s for row, m in zip(mine, middle, strict=True)],
                "thickness": 1,
            },
            mode="markers",
            name=name,
            text=[row.prediction.case.id for row in mine],
        )
    figure.update_xaxes(type="log", title="predicted step [ms]")
    figure.update_yaxes(type="log", title="measured step [ms], least to largest visit")
    figure.update_layout(title=title, template="simple_white", width=800, height=640)
    return str(figure.to_html(include_plotlyjs="cdn", div_id="step-validation"))
