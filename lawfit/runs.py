"""Tables of training runs: what a law is fitted to, checked, with its units and conventions stated.

A table holds finished runs, one row each: counts in parameters, tokens in tokens, losses in
nats/token. What counts as a parameter is for the user to say, because a law fitted with
embeddings in the counts is another law than one without.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from lawfit._values import FloatArray, LawError
from lawfit.published import CHINCHILLA_EPOCH, MOSAIC_TABLE2

__all__ = ["NOT_STATED", "Remark", "Runs", "held_out"]

NOT_STATED = "not stated"
"""The convention of runs whose source does not say what their parameters count."""

RUN_VARIABLES = ("n_total", "n_active", "tokens", "expert_split")
"""Variables of every `ScalingLaw`, in the order of `Monomial.exponents`."""

COLUMNS = (*RUN_VARIABLES, "loss", "weight")

_BITS_PER_TOKEN, _BITS_PER_BYTE = 1.3, 0.55
"""Median loss over that of a published law at the same counts, outside which units look wrong.

A bit per token is 1.44 times the nats; a bit per byte of English text about 0.33 times. Laws of
different data and sparsity lie between.
"""

_PERPLEXITY = 2.0
"""The same ratio, above which a perplexity is more likely than bits: exp(L) / L is over e."""

_CHECKPOINTS = 5
"""Rows of one model at evenly spaced tokens from which they look like one run's checkpoints."""

BoolArray = NDArray[np.bool_]


class Remark(BaseModel):
    """A reason to doubt a table or a fit.

    Attributes
    ----------
    reason : str
        A short name, the same for every remark of its kind.
    sentence : str
        What was seen, with its figures, and the rule it breaks.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    reason: str
    sentence: str


class _Logs(NamedTuple):
    """Natural logarithms of the variables and of the loss, arrays of shape (runs,)."""

    n_total: FloatArray
    n_active: FloatArray
    tokens: FloatArray
    expert_split: FloatArray
    loss: FloatArray

    @property
    def variables(self) -> FloatArray:
        """The four variables in the order of a law, shape (4, runs)."""
        return np.array([self.n_total, self.n_active, self.tokens, self.expert_split])


class Runs(BaseModel):
    """Finished training runs, column by column; all columns have one length.

    Attributes
    ----------
    n_total, n_active : tuple of float
        Total and active parameters [parameter].
    tokens : tuple of float
        Training tokens of the whole run [token].
    expert_split : tuple of float
        ``d_ff / d_expert`` [-]; 1 for a dense model.
    loss : tuple of float
        At the end of the run [nats/token].
    weight : tuple of float
        How much a run counts in the objective [-], above 0; 1 each where nothing is known.
    id : tuple of str
        Name of a run, each only once.
    convention : str
        What the counts count, such as "without embeddings".
    source : str
        Where the runs come from.
    left_out : tuple of Remark
        Rows that were in the source and are not here.
    notes : tuple of Remark
        What was assumed or converted when the source was read.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    n_total: tuple[float, ...] = Field(min_length=1)
    n_active: tuple[float, ...]
    tokens: tuple[float, ...]
    expert_split: tuple[float, ...]
    loss: tuple[float, ...]
    weight: tuple[float, ...]
    id: tuple[str, ...]
    convention: str
    source: str
    left_out: tuple[Remark, ...] = ()
    notes: tuple[Remark, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Runs:
        for name in (*COLUMNS, "id"):
            if len(getattr(self, name)) != len(self.n_total):
                raise ValueError(
                    f"{name} has {len(getattr(self, name))} rows and n_total {len(self.n_total)}, "
                    "but all columns must have one length"
                )
        for name in COLUMNS:
            for row, value in enumerate(getattr(self, name)):
                if not (math.isfinite(value) and value > 0):
                    raise ValueError(
                        f"{name} of run {self.id[row]!r} is {value:g}, but must be a finite number "
                        "above 0; leave the run out, as Runs.from_columns does"
                    )
        for name, total, active in zip(self.id, self.n_total, self.n_active, strict=True):
            if active > total:
                raise ValueError(
                    f"n_active of run {name!r} is {active:.6g} and n_total {total:.6g}, but a "
                    "model cannot activate more than it has; the nearest legal value is "
                    f"{total:.6g}"
                )
        if len(set(self.id)) != len(self.id):
            twice = next(name for name in self.id if self.id.count(name) > 1)
            raise ValueError(f"id {twice!r} stands twice, but each run needs an id of its own")
        return self

    @classmethod
    def from_columns(
        cls,
        columns: Mapping[str, Sequence[Any]],
        mapping: Mapping[str, str],
        *,
        convention: str,
        source: str,
    ) -> Runs:
        """Return the runs of a table whose columns have names of its own.

        Rows with a value that is missing (None, NaN, an empty text) or not a finite number above
        0 are left out, and `left_out` names them.

        Parameters
        ----------
        columns : mapping
            Columns by the name that the table gives them, all of one length.
        mapping : mapping
            Name in the table of each of ``n_active``, ``tokens`` and ``loss``; of ``n_total``
            and ``expert_split`` unless the models are dense (then ``n_active`` and 1); and, where
            there are any, of ``weight`` and ``id``.
        convention, source : str
            As in `Runs`.

        Raises
        ------
        LawError
            The mapping names no such column, lacks one, or no row is left.
        """
        known = (*COLUMNS, "id")
        for name, column in mapping.items():
            if name not in known:
                raise LawError(f"the mapping has {name!r}, but may name only {', '.join(known)}.")
            if column not in columns:
                raise LawError(
                    f"the mapping takes {name!r} from the column {column!r}, but the table has "
                    f"only {', '.join(repr(key) for key in columns)}."
                )
        for name in ("n_active", "tokens", "loss"):
            if name not in mapping:
                raise LawError(
                    f"the mapping lacks {name!r}: name the column of the table that holds it, one "
                    f"of {', '.join(repr(key) for key in columns)}."
                )
        if ("n_total" in mapping) != ("expert_split" in mapping):
            lacking = "expert_split" if "n_total" in mapping else "n_total"
            raise LawError(
                f"the mapping lacks {lacking!r}: sparse models need n_total and expert_split, and "
                "dense ones neither."
            )
        rows = len(columns[mapping["loss"]])
        found = {
            name: _numbers(columns[column]) for name, column in mapping.items() if name != "id"
        }
        for name, values in found.items():
            if len(values) != rows:
                raise LawError(
                    f"the column {mapping[name]!r} has {len(values)} rows and that of the loss "
                    f"{rows}, but all must have one length."
                )
        found.setdefault("n_total", found["n_active"])
        found.setdefault("expert_split", np.ones(rows))
        found.setdefault("weight", np.ones(rows))
        names = [str(x) for x in columns[mapping["id"]]] if "id" in mapping else None
        ids = np.array(names if names is not None else [f"row {row + 1}" for row in range(rows)])
        remarks = []
        legal = np.ones(rows, dtype=bool)
        for name, values in found.items():
            bad = ~(np.isfinite(values) & (values > 0))
            if bad.any() and name in mapping:
                remarks.append(
                    Remark(
                        reason="missing_value",
                        sentence=f"{int(bad.sum())} of {rows} rows have no finite number above 0 "
                        f"in the column {mapping[name]!r} and were left out: {_some(ids[bad])}.",
                    )
                )
            legal &= ~bad
        if not legal.any():
            raise LawError(_no_row_left(found, columns, mapping))
        return cls(
            **{name: tuple(values[legal].tolist()) for name, values in found.items()},
            id=tuple(ids[legal].tolist()),
            convention=convention,
            source=source,
            left_out=tuple(remarks),
        )

    def __len__(self) -> int:
        """Return the number of runs."""
        return len(self.loss)

    def column(self, name: str) -> FloatArray:
        """Return one column of numbers, shape (runs,)."""
        return np.array(getattr(self, name), dtype=np.float64)

    def point(self) -> dict[str, FloatArray]:
        """Return the variables by name, as `ScalingLaw.loss` takes them, each of shape (runs,)."""
        return {name: self.column(name) for name in RUN_VARIABLES}

    def logs(self) -> _Logs:
        """Return the logarithms of the variables and of the loss."""
        return _Logs(*(np.log(self.column(name)) for name in COLUMNS[:5]))

    def where(self, keep: Sequence[bool] | BoolArray) -> Runs:
        """Return the runs at which `keep`, of shape (runs,), is true.

        Raises
        ------
        LawError
            None is left, or there are not as many flags as runs.
        """
        kept = np.flatnonzero(keep)
        if len(keep) != len(self) or not kept.size:
            raise LawError(
                f"keep has {len(keep)} flags, {kept.size} of them true, but {len(self)} runs need "
                "one each, and at least one run must stay."
            )
        update = {name: tuple(getattr(self, name)[i] for i in kept) for name in (*COLUMNS, "id")}
        return self.model_copy(update=update)

    @property
    def remarks(self) -> tuple[Remark, ...]:
        """What looks wrong in the table, after rows that were left out and what was assumed.

        ``duplicate``: runs equal in all columns but the id. ``loss_unit``: the median loss is
        above 1.3 or below 0.55 of that of a published law at the same counts and tokens (dense
        runs: Besiroglu et al., arXiv 2404.10102; others: arXiv 2608.10605, Table 2), as bits per
        token or per byte, or above 2, as perplexities would be.
        ``mid_schedule``: one model at five or more evenly spaced numbers of tokens, as
        checkpoints of one run have them; a loss before the end of the learning rate's schedule is
        not that of a run of so many tokens.
        """
        read = (*self.left_out, *self.notes)
        return (*read, *self._duplicates(), *self._unit(), *self._checkpoints())

    def _duplicates(self) -> list[Remark]:
        seen: dict[tuple[float, ...], str] = {}
        pairs = []
        rows = zip(*(getattr(self, name) for name in COLUMNS[:5]), strict=True)
        for name, row in zip(self.id, rows, strict=True):
            if row in seen:
                pairs.append(f"{name} of {seen[row]}")
            seen.setdefault(row, name)
        if not pairs:
            return []
        sentence = f"{len(pairs)} runs repeat another in all columns: {_some(pairs)}."
        return [Remark(reason="duplicate", sentence=sentence)]

    def _unit(self) -> list[Remark]:
        point = self.point()
        dense = point["n_active"] == point["n_total"]
        usual = np.where(dense, CHINCHILLA_EPOCH.loss(**point), MOSAIC_TABLE2.loss(**point))
        ratio = float(np.median(self.column("loss") / usual))
        if _BITS_PER_BYTE <= ratio <= _BITS_PER_TOKEN:
            return []
        unit = "a loss in bits per token" if ratio > _BITS_PER_TOKEN else "a loss in bits per byte"
        into = "bits per token times 0.6931"
        if ratio > _PERPLEXITY:
            unit, into = "a perplexity", "its logarithm"
        sentence = (
            f"The median loss is {ratio:.2f} times that of a published law at the same parameters "
            f"and tokens, as {unit} would be; this table needs nats per token, which is {into}."
        )
        return [Remark(reason="loss_unit", sentence=sentence)]

    def _checkpoints(self) -> list[Remark]:
        models: dict[tuple[float, ...], list[int]] = {}
        for row, model in enumerate(
            zip(self.n_total, self.n_active, self.expert_split, strict=True)
        ):
            models.setdefault(model, []).append(row)
        suspects = []
        for rows in models.values():
            steps = np.diff(np.unique(self.column("tokens")[rows]))
            if len(steps) >= _CHECKPOINTS - 1 and np.ptp(steps) <= 0.01 * steps.mean():
                suspects.append(self.id[rows[0]])
        if not suspects:
            return []
        sentence = (
            f"{len(suspects)} models have {_CHECKPOINTS} or more rows at evenly spaced tokens, "
            "like checkpoints of one run and not runs of their own; the first rows are "
            f"{_some(suspects)}."
        )
        return [Remark(reason="mid_schedule", sentence=sentence)]


def held_out(runs: Runs, rule: str | Sequence[str] | None) -> BoolArray:
    """Say which runs a rule keeps out of a fit.

    Parameters
    ----------
    runs : Runs
        The table.
    rule : str or sequence of str or None
        ``"nact:0.1"``: the tenth with most active parameters within each expert split, rounded to
        the nearest number of runs (arXiv 2608.10605 holds out so);
        ``"future:0.1"``: the tenth of all runs with most compute ``6 N_act D``; the ids of the
        runs themselves; or None, no run.

    Returns
    -------
    ndarray of bool, shape (runs,)
        True where a run is held out.

    Raises
    ------
    LawError
        The rule is none of these, its share is not between 0 and 1, or an id is unknown.
    """
    out = np.zeros(len(runs), dtype=bool)
    if rule is None:
        return out
    if not isinstance(rule, str):
        unknown = sorted(set(rule) - set(runs.id))
        if unknown:
            raise LawError(f"holdout names {unknown[0]!r}, which is the id of no run.")
        return np.isin(np.array(runs.id), list(rule))
    kind, _, text = rule.partition(":")
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if kind not in ("nact", "future") or not 0 < share < 1:
        raise LawError(
            f"holdout is {rule!r}, but must be 'nact:' or 'future:' with a share between 0 and 1, "
            "such as 'nact:0.1', or the ids of runs."
        )
    active, split = runs.column("n_active"), runs.column("expert_split")
    size = active if kind == "nact" else active * runs.column("tokens")
    groups = np.unique(split) if kind == "nact" else [None]
    for group in groups:
        at = np.flatnonzero(split == group) if group is not None else np.arange(len(runs))
        most = at[np.argsort(-size[at], kind="stable")]
        out[most[: round(share * len(at))]] = True
    return out


def _numbers(values: Sequence[Any]) -> FloatArray:
    """Return values as floats, NaN for what is no number."""

    def number(value: Any) -> float:
        try:
            return float(value)
        except (TypeError, ValueError):
            return math.nan

    return np.array([number(value) for value in values], dtype=np.float64)


def _no_row_left(
    found: Mapping[str, FloatArray],
    columns: Mapping[str, Sequence[Any]],
    mapping: Mapping[str, str],
) -> str:
    """Say why no row of a table is a run: the column with the fewest numbers, and what is in it."""
    good = {name: np.isfinite(found[name]) & (found[name] > 0) for name in mapping if name != "id"}
    worst = min(good, key=lambda name: int(good[name].sum()))
    rows = len(good[worst])
    if not rows:
        return "the table has no row, but a fit needs some."
    value = columns[mapping[worst]][int(np.argmin(good[worst]))]
    return (
        f"no row of {rows} has a finite number above 0 in every column; that of "
        f"{mapping[worst]!r} has {int(good[worst].sum())}, and values such as {value!r}."
    )


def _some(names: Sequence[str] | NDArray[Any], most: int = 5) -> str:
    shown = ", ".join(str(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
