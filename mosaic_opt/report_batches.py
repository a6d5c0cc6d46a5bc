"""The page of a choice among global batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from mosaic_opt.report import _short, grid, number, render_solution, short_name

if TYPE_CHECKING:
    from mosaic_opt.batch_choice import BatchChoice, BatchRow


def render_batches(choice: BatchChoice) -> RenderableType:
    """Return the answers at each batch as a table, the best one marked, and its whole page."""
    title = f"{choice.name}: {len(choice.rows)} global batches, {choice.status.value.upper()}"
    table = grid(
        "batch", "tokens", "critical", "trained on", "count as", "worth", "MFU", "loss", "+"
    )
    table.add_column("candidate", no_wrap=True)
    table.add_column("layout")
    for row in choice.rows:
        table.add_row(*_cells(row, best=row.global_batch == choice.best_batch))
    parts: list[RenderableType] = [Text(title, style="bold"), table]
    if choice.not_reached:
        parts.append(Text(f"Not reached: {', '.join(map(str, choice.not_reached))}."))
    solution = choice.best
    if solution is None or solution.optimum is None:
        parts.append(Text("No batch has an answer."))
        return Group(*parts, *(render_solution(s) for s in choice.solutions[:1]))
    ties = [str(row.global_batch) for row in choice.rows if row.near_tie]
    parts.append(
        Text(
            "Batch and critical batch in tokens. Within the stated error of MFU: "
            f"{', '.join(ties)}. Loss [{solution.optimum.loss_source}] in nats/token."
        )
    )
    if choice.gain is not None:
        parts.append(
            Text(
                f"Against the stated batch of {choice.stated_batch} the best one gains "
                f"{choice.gain:.4f} nats."
            )
        )
    return Group(
        *parts,
        Text(""),
        Text(f"At a global batch of {choice.best_batch}:", style="bold"),
        render_solution(solution),
    )


def _cells(row: BatchRow, *, best: bool) -> list[str]:
    mark = " *" if best else ""
    worth = row.efficiency
    if worth is None or row.plan is None or row.architecture is None:
        return [f"{row.global_batch}", number(row.batch_tokens), *["-"] * 7, row.status.value, "-"]
    return [
        f"{row.global_batch}{mark}",
        number(row.batch_tokens),
        number(worth.critical_batch_tokens),
        number(worth.tokens),
        number(worth.tokens_effective),
        f"{100 * worth.tokens_effective / worth.tokens:.1f}%",
        f"{100 * (row.mfu or 0.0):.1f}%",
        f"{row.loss:.4f}",
        f"{row.delta_loss:.4f}",
        escape(short_name(row.architecture)),
        _short(str(row.plan)),
    ]
