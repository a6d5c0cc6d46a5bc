"""The page of a search over stage layouts, and a line of its progress."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mosaic_opt.report import _facts, grid

if TYPE_CHECKING:
    from mosaic_opt.stage_search import PlacedStage, StageProgress, StageSearch


def progress_line(state: StageProgress) -> str:
    """Write one better layout on the way."""
    gap = 100.0 * (1.0 - state.bound_s / state.slowest_s)
    return (
        f"{state.seconds:7.2f} s  slowest stage {1e3 * state.slowest_s:.3f} ms, "
        f"bound {1e3 * state.bound_s:.3f} ms, gap {max(0.0, gap):.2f}%"
    )


def render_stages(search: StageSearch) -> RenderableType:
    """Return the page of a search over the stage layouts of one plan."""
    parts: list[RenderableType] = [
        Text(f"{search.model}: {search.status.upper()}", "bold"),
        _facts(_summary(search)),
    ]
    if search.stages:
        parts += [Text(""), _table(search.stages)]
    if _waits(search):
        parts += [
            Text(""),
            Text(
                "The balanced layout has the shorter step: its slowest stage is slower, but uneven "
                "chunks and stages wait for each other. --max-chunk limits the layers of a chunk."
            ),
        ]
    if search.layout is not None:
        parts += [Text(""), Text(f"layout  {search.layout}")]
    if search.plan is not None:
        parts.append(Text(f"plan    {search.plan}"))
    return Group(*parts)


def _summary(search: StageSearch) -> list[tuple[str, str]]:
    pools = ", ".join(
        f"{use.pool} ({use.stages} stages"
        + (f", {use.idle_devices} devices idle)" if use.idle_devices else ")")
        for use in search.pools
    )
    rows = [("on", f"{pools}, stack {search.stack}")]
    if search.slowest_s is not None:
        text = f"{1e3 * search.slowest_s:.3f} ms for one microbatch ({search.source.value})"
        rows.append(("slowest stage", text))
    if search.bound_s is not None and search.gap is not None:
        rows.append(("bound", f"{1e3 * search.bound_s:.3f} ms, gap {100.0 * search.gap:.2g}%"))
    rows.append(("balanced", _against(search)))
    if search.step_time_s is not None:
        step = f"{search.step_time_s:.4f} s"
        if search.balanced_step_time_s is not None:
            step += f"; balanced {search.balanced_step_time_s:.4f} s"
        rows.append(("step", step))
    rows.append(("search", f"{search.seconds:.1f} s, {search.termination.replace('_', ' ')}"))
    return rows


def _waits(search: StageSearch) -> bool:
    step_s, balanced_s = search.step_time_s, search.balanced_step_time_s
    return step_s is not None and balanced_s is not None and balanced_s < step_s


def _against(search: StageSearch) -> str:
    balanced = search.balanced_slowest_s
    if balanced is None:
        return "does not fit, under any recompute mode"
    text = f"{1e3 * balanced:.3f} ms, with the best recompute mode of each stage"
    if search.slowest_s is None:
        return text
    return f"{text}: {100.0 * (balanced / search.slowest_s - 1.0):.1f}% more"


def _table(stages: tuple[PlacedStage, ...]) -> Table:
    page = grid("stage", "pool", "layers", "dense", "moe", "mtp", "recompute", "ms", "GB", "of GB")
    for stage in stages:
        ends = "E" * stage.embedding, "L" * stage.loss
        page.add_row(
            f"{stage.stage} {''.join(ends)}".strip(),
            stage.pool,
            "+".join(map(str, stage.layers)),
            str(stage.dense),
            str(stage.moe),
            str(stage.mtp),
            stage.recompute.value,
            f"{1e3 * stage.time_s:.3f}",
            f"{stage.memory_bytes / 1e9:.1f}",
            f"{stage.memory_cap_bytes / 1e9:.1f}",
        )
    return page
