"""The page of a search over stage layouts, and the lines of its progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mosaic_opt.report import _facts, grid
from mosaic_opt.stage_result import SAME

if TYPE_CHECKING:
    from mosaic_opt.stage_result import PlacedStage, StageSearch
    from mosaic_opt.stage_search import StageProgress


MOVED = 0.01
"""A bound that rose by less than this share of itself is not worth a line [-]."""


def progress_line(state: StageProgress) -> str:
    """Write where a search is."""
    bound = f"bound {1e3 * state.bound_s:.3f} ms"
    if state.slowest_s is None:
        return f"{state.seconds:7.2f} s  no layout yet, {bound}"
    gap = 100.0 * (1.0 - state.bound_s / state.slowest_s)
    return (
        f"{state.seconds:7.2f} s  slowest stage {1e3 * state.slowest_s:.3f} ms, "
        f"{bound}, gap {max(0.0, gap):.2f}%"
    )


class ProgressLines:
    """Writes a line for each better layout, each rise of the bound by 1%, and the last state."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._told: StageProgress | None = None
        self._last: StageProgress | None = None

    def update(self, state: StageProgress) -> None:
        """Take the next state, and write it where it is news."""
        self._last, told = state, self._told
        if (
            told is None
            or _is_faster(state.slowest_s, told.slowest_s)
            or state.bound_s > (1.0 + MOVED) * told.bound_s
        ):
            self._tell(state)

    def finish(self) -> None:
        """Write the last state, where it is not the last line."""
        last, told = self._last, self._told
        if last is not None and told is not None and last.bound_s != told.bound_s:
            self._tell(last)

    def _tell(self, state: StageProgress) -> None:
        self._told = state
        self._write(progress_line(state))


def _is_faster(slowest_s: float | None, before_s: float | None) -> bool:
    """Say whether a layout is faster by more than the search's rounding."""
    if slowest_s is None or before_s is None:
        return slowest_s is not None
    return slowest_s < (1.0 - 1e-9) * before_s


def render_stages(search: StageSearch) -> RenderableType:
    """Return the page of a search over the stage layouts of one plan."""
    parts: list[RenderableType] = [
        Text(f"{search.model}: {search.status.upper()}", "bold"),
        _facts(_summary(search)),
    ]
    if search.recommended is None:
        return Group(*parts)
    parts += [Text(""), Text(_why(search))]
    parts += [Text(""), _table(search.recommended_stages)]
    parts += [Text(""), Text(f"layout  {search.recommended_layout}")]
    if search.recommended_plan is not None:
        parts.append(Text(f"plan    {search.recommended_plan}"))
    if search.recommended == "balanced":
        parts += [Text(""), Text(f"fastest slowest stage  {search.layout}")]
    return Group(*parts)


def _why(search: StageSearch) -> str:
    """Say which layout to take, and why."""
    if search.balanced_step_time_s is None:
        return "Recommended: the search's layout; the balanced one does not fit."
    step_s, balanced_s = search.step_time_s or 0.0, search.balanced_step_time_s
    if search.recommended == "balanced":
        return (
            f"Recommended: the balanced layout, whose step is {1e3 * (step_s - balanced_s):.1f} ms "
            "shorter: its slowest stage is slower, but uneven chunks and stages wait for each "
            "other. --max-chunk limits the layers of a chunk."
        )
    if search.layout == search.balanced_layout and search.stages == search.balanced_stages:
        return "Recommended: the balanced layout, which is the search's too."
    if balanced_s - step_s <= SAME * step_s:
        return "Recommended: the search's layout, whose step is as long as the balanced one's."
    return (
        f"Recommended: the search's layout, whose step is {1e3 * (balanced_s - step_s):.1f} ms "
        "shorter than the balanced one's."
    )


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
