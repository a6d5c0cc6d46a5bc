"""Sweeps of small training runs: each run one row of a table, and a table that can be resumed.

A run is trained from its start to its end by one process; the table is written anew, beside its
place and then moved there, whenever a run has ended. A sweep that was interrupted goes on with the
runs that have no row; what was lost is the runs that were under way.
"""

from __future__ import annotations

import csv
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from statistics import median
from typing import Final, Self

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from moe_ref.errors import MoeRefError
from moe_ref.held_out import byte_tokens, evaluate
from moe_ref.model import ReferenceModel
from moe_ref.parts import INITIAL_DEVIATION
from moe_ref.recipe import WarmupStableDecay
from moe_ref.training import Run, TokenWindows, train
from perfmodel import Architecture

__all__ = [
    "SweepRow",
    "SweepRun",
    "read_sweep",
    "sweep",
    "train_sweep_run",
]

_LAST_STEPS: Final = 20


class SweepRun(BaseModel):
    """What one run of a sweep is.

    Attributes
    ----------
    architecture : perfmodel.Architecture
        With ``vocab_size`` 256: a token is a byte.
    tokens : int
        Trained on, in whole steps of ``sequences * seq_len`` [token].
    sequences, seq_len : int
        Of a step.
    peak : float
        Learning rate of the plateau [-].
    warmup_share : float
        Part of the steps over which it rises [-].
    deviation : float
        Of the initial weights, see `ReferenceModel`.
    seed : int
        Of weights, order of the text and noise of the routers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    architecture: Architecture
    tokens: int = Field(ge=1)
    sequences: int = Field(default=8, ge=1)
    seq_len: int = Field(default=128, ge=1)
    peak: float = Field(gt=0)
    warmup_share: float = Field(default=0.1, ge=0, le=0.8)
    deviation: float = Field(default=INITIAL_DEVIATION, gt=0)
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _whole_steps(self) -> Self:
        step = self.sequences * self.seq_len
        if self.tokens % step:
            near = max(step, round(self.tokens / step) * step)
            raise ValueError(
                f"tokens={self.tokens} must be a multiple of the {step} tokens of a step; "
                f"nearest: {near}"
            )
        if self.architecture.vocab_size != 256:
            raise ValueError(
                f"vocab_size={self.architecture.vocab_size} must be 256, one token for each byte"
            )
        return self

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return self.tokens // (self.sequences * self.seq_len)

    @property
    def id(self) -> str:
        """Name of the run in its table: shape, tokens and seed."""
        a = self.architecture
        split = 0 if a.expert_split is None else a.expert_split
        return (
            f"d{a.d_model}-L{a.n_layers}-E{a.n_experts}-K{a.top_k}-G{split:g}"
            f"-D{self.tokens}-s{self.seed}"
        )

    @property
    def schedule(self) -> WarmupStableDecay:
        """Learning rate of each step."""
        return WarmupStableDecay(
            peak=self.peak, steps=self.steps, warmup_steps=round(self.warmup_share * self.steps)
        )


class SweepRow(BaseModel):
    """One run that has ended: what it was, what it lost and what it took.

    Attributes
    ----------
    id : str
        `SweepRun.id`.
    d_model, n_layers, n_experts, top_k : int
        Of the architecture.
    expert_split : float
        G, ``d_ff / d_expert`` [-]; 1 for a dense model.
    n_total, n_active : int
        Without embedding and head [parameter].
    tokens, sequences, seq_len, seed : int
        As in `SweepRun`.
    peak : float
        Learning rate of the plateau [-].
    loss : float
        Cross-entropy on the held-out text at the end [nat/byte].
    loss_training : float
        Mean of the last 20 training steps [nat/byte].
    starved, max_violation : float
        Balance over the last 20 steps, the mean over layers; see `RoutingStatistics`. 0 for a
        dense model.
    step_s : float
        Median of the steps [s], by the clock.
    step_low_s : float
        10th percentile of the steps [s]: what a step takes when the machine is left alone.
    cpu_s : float
        Processor time of all training steps [s].
    text : str
        First 12 digits of the SHA-256 of the text.
    torch : str
        Version.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    id: str
    d_model: int
    n_layers: int
    n_experts: int
    top_k: int
    expert_split: float
    n_total: int
    n_active: int
    tokens: int
    sequences: int
    seq_len: int
    seed: int
    peak: float
    deviation: float
    loss: float
    loss_training: float
    starved: float
    max_violation: float
    step_s: float
    step_low_s: float
    cpu_s: float
    text: str
    torch: str

    def is_of(self, run: SweepRun, text: str) -> bool:
        """Say whether the row is of this run on this text, by everything that the row keeps."""
        mine = _what(run)
        return self.text == text and all(getattr(self, name) == mine[name] for name in mine)


def train_sweep_run(run: SweepRun, train_N: Tensor, held_N: Tensor, text: str) -> SweepRow:
    """Train one run from its start and return its row.

    Raises
    ------
    MoeRefError
        A text with fewer tokens than the run reads.
    """
    batches = TokenWindows(train_N, run.sequences, run.seq_len, seed=run.seed)
    if batches.steps < run.steps:
        raise MoeRefError(
            f"tokens={run.tokens} must be at most {batches.steps * run.sequences * run.seq_len}, "
            "because a run reads no part of the text twice."
        )
    model = ReferenceModel(run.architecture, deviation=run.deviation, seed=run.seed)
    state = Run(model, run.schedule, seed=run.seed)
    marks = [time.perf_counter()]
    begun = time.process_time()
    reports = train(state, batches, on_step=lambda _: marks.append(time.perf_counter()))
    cpu_s = time.process_time() - begun
    taken_S = np.diff(marks)
    last = reports[-_LAST_STEPS:]
    balance = [report.balance for report in last if report.balance is not None]
    return SweepRow(
        **_what(run),
        loss=round(evaluate(model, held_N, run.seq_len, run.sequences), 6),
        loss_training=round(sum(report.loss for report in last) / len(last), 6),
        starved=round(sum(b.starved for b in balance) / max(1, len(balance)), 4),
        max_violation=round(sum(b.max_violation for b in balance) / max(1, len(balance)), 4),
        step_s=round(median(taken_S.tolist()), 6),
        step_low_s=round(float(np.quantile(taken_S, 0.1)), 6),
        cpu_s=round(cpu_s, 3),
        text=text,
        torch=torch.__version__.partition("+")[0],
    )


def read_sweep(path: str | Path) -> list[SweepRow]:
    """Return the rows of a table; none where there is no table yet.

    Raises
    ------
    MoeRefError
        A table with other columns, or a value that cannot be.
    """
    path = Path(path)
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    try:
        return [SweepRow.model_validate(row) for row in rows]
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise MoeRefError(
            f"{path} is no table of a sweep: {'.'.join(map(str, first['loc']))}: {first['msg']}."
        ) from error


def sweep(
    runs: Sequence[SweepRun],
    text: str | Path,
    table: str | Path,
    *,
    workers: int = 1,
    on_row: Callable[[SweepRow, int, int], None] | None = None,
) -> list[SweepRow]:
    """Train the runs that have no row in a table yet, and return all of its rows.

    Parameters
    ----------
    runs : sequence of SweepRun
        In the order in which they begin; their ids differ.
    text : path
        What they read, as bytes.
    table : path
        CSV of `SweepRow`; written anew, whole, whenever a run has ended.
    workers : int
        Processes, each with one thread; 0 trains here, with the threads that torch has. The losses
        do not depend on their number.
    on_row : callable, optional
        Called with each new row, the rows that there are, and how many there will be.

    Raises
    ------
    MoeRefError
        A row of the table that has the id of a run and is of another one or of another text.
    """
    if workers < 0:
        raise MoeRefError(f"workers={workers} must be at least 0; nearest: 0.")
    rows = read_sweep(table)
    left = _left(runs, rows, byte_tokens(text)[2], table)
    known = len(rows) + len(left)
    for row in _trained(left, text, workers):
        rows.append(row)
        _write(rows, Path(table))
        if on_row is not None:
            on_row(row, len(rows), known)
    return rows


def _trained(runs: Sequence[SweepRun], text: str | Path, workers: int) -> Iterator[SweepRow]:
    """Yield the row of each run when it has ended."""
    if not workers:
        content = byte_tokens(text)
        yield from (train_sweep_run(run, *content) for run in runs)
        return
    if not runs:
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _begin, (str(text),)) as pool:
        try:
            for future in as_completed([pool.submit(_train_here, run) for run in runs]):
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_TEXT: list[tuple[Tensor, Tensor, str]] = []
"""The text of a worker process."""


def _begin(text: str) -> None:
    """Prepare a worker: one thread, the text read once."""
    torch.set_num_threads(1)
    _TEXT[:] = [byte_tokens(text)]


def _train_here(run: SweepRun) -> SweepRow:
    return train_sweep_run(run, *_TEXT[0])


def _left(
    runs: Sequence[SweepRun], rows: Iterable[SweepRow], text: str, table: str | Path
) -> list[SweepRun]:
    """Return the runs without a row, and refuse rows that are of another run."""
    by_id = {row.id: row for row in rows}
    ids = [run.id for run in runs]
    if len(set(ids)) != len(ids):
        twice = next(name for name in ids if ids.count(name) > 1)
        raise MoeRefError(f"the run {twice} stands twice, but each needs an id of its own.")
    for run in runs:
        row = by_id.get(run.id)
        if row is not None and not row.is_of(run, text):
            raise MoeRefError(
                f"{table} has a row {run.id} of another run or text: name another table."
            )
    return [run for run in runs if run.id not in by_id]


def _what(run: SweepRun) -> dict[str, str | int | float]:
    """Return the columns that say what a run is."""
    a = run.architecture
    return {
        "id": run.id,
        "d_model": a.d_model,
        "n_layers": a.n_layers,
        "n_experts": a.n_experts,
        "top_k": a.top_k,
        "expert_split": a.expert_split or 1.0,
        "n_total": a.n_total(),
        "n_active": a.n_active(),
        "tokens": run.tokens,
        "sequences": run.sequences,
        "seq_len": run.seq_len,
        "seed": run.seed,
        "peak": run.peak,
        "deviation": run.deviation,
    }


def _write(rows: Sequence[SweepRow], table: Path) -> None:
    """Write the table beside its place, and move it there."""
    table.parent.mkdir(parents=True, exist_ok=True)
    partial = table.with_name(table.name + ".partial")
    with partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(SweepRow.model_fields), lineterminator="\n")
        writer.writeheader()
        writer.writerows(row.model_dump() for row in rows)
    os.replace(partial, table)
