"""Runs that could be trained next, with what each would cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from lawfit._values import FloatArray, LawError
from lawfit.runs import RUN_VARIABLES, Runs

__all__ = ["Candidates"]

_SIZES, _DENSITIES, _SPLITS, _RATIOS = 8, 4, 5, 5
"""Levels of a grid, where the runs have more."""

_DENSE_LEVELS = 12
"""Levels of sizes and of ratios where sparsity and split have one each."""

_SAME = 0.02
"""Relative difference within which two values are one level."""


class Candidates(BaseModel):
    """Possible training runs, column by column; all columns have one length.

    Attributes
    ----------
    n_total, n_active : tuple of float
        Total and active parameters [parameter].
    tokens : tuple of float
        Training tokens [token].
    expert_split : tuple of float
        ``d_ff / d_expert`` [-]; 1 for a dense model.
    cost : tuple of float
        Of one run, above 0 [FLOP], or in the unit that the budget is in.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    n_total: tuple[float, ...] = Field(min_length=1)
    n_active: tuple[float, ...]
    tokens: tuple[float, ...]
    expert_split: tuple[float, ...]
    cost: tuple[float, ...]

    @model_validator(mode="after")
    def _check(self) -> Candidates:
        for name in (*RUN_VARIABLES, "cost"):
            values = getattr(self, name)
            if len(values) != len(self.n_total):
                raise ValueError(
                    f"{name} has {len(values)} rows and n_total {len(self.n_total)}, but all "
                    "columns must have one length"
                )
            for row, value in enumerate(values):
                if not (math.isfinite(value) and value > 0):
                    raise ValueError(
                        f"{name} of candidate {row} is {value:g}, but must be a finite number "
                        "above 0; leave the candidate out"
                    )
        for row, (total, active) in enumerate(zip(self.n_total, self.n_active, strict=True)):
            if active > total:
                raise ValueError(
                    f"n_active of candidate {row} is {active:.6g} and n_total {total:.6g}, but a "
                    "model cannot activate more than it has; the nearest legal value is "
                    f"{total:.6g}"
                )
        return self

    @classmethod
    def of(
        cls,
        *,
        n_active: Sequence[float] | FloatArray,
        tokens: Sequence[float] | FloatArray,
        n_total: Sequence[float] | FloatArray | None = None,
        expert_split: Sequence[float] | FloatArray | None = None,
        cost: Sequence[float] | FloatArray | None = None,
    ) -> Candidates:
        """Return candidates from columns; what is left out is that of a dense model.

        Parameters
        ----------
        n_active, tokens, n_total, expert_split : sequence of float
            As the attributes.
        cost : sequence of float, optional
            Of each run; ``6 n_active tokens`` [FLOP] where none is given.

        Raises
        ------
        LawError
            The columns differ in length, a value is not a finite number above 0, or more
            parameters are active than there are.
        """
        active = np.asarray(n_active, dtype=np.float64)
        columns = {
            "n_total": active if n_total is None else n_total,
            "n_active": active,
            "tokens": tokens,
            "expert_split": np.ones_like(active) if expert_split is None else expert_split,
        }
        if cost is None and len(active) == len(tokens):
            cost = 6.0 * active * np.asarray(tokens, dtype=np.float64)
        columns["cost"] = tokens if cost is None else cost
        rows = {name: tuple(float(x) for x in column) for name, column in columns.items()}
        try:
            return cls(**rows)
        except ValueError as error:
            raise LawError(_sentence(error)) from None

    @classmethod
    def grid(
        cls,
        runs: Runs,
        *,
        n_active: Sequence[float] | None = None,
        sparsity: Sequence[float] | None = None,
        expert_split: Sequence[float] | None = None,
        tokens_per_parameter: Sequence[float] | None = None,
    ) -> Candidates:
        """Return every combination of sizes, sparsities, splits and tokens per parameter.

        Levels that are not given span those of the runs, evenly in the logarithm (of
        ``1 - sparsity``): 8 sizes, 4 sparsities, 5 splits and 5 tokens per parameter (12 sizes
        and 12 tokens per parameter of one sparsity and split), or the runs' own where they have
        no more. Where none are given, combinations whose total
        parameters or tokens lie outside the runs' are left out, and no candidate extrapolates.

        Parameters
        ----------
        runs : Runs
            Those of the fit.
        n_active : sequence of float, optional
            Active parameters [parameter].
        sparsity : sequence of float, optional
            ``1 - n_active / n_total`` [-], at least 0 and below 1.
        expert_split : sequence of float, optional
            ``d_ff / d_expert`` [-].
        tokens_per_parameter : sequence of float, optional
            ``tokens / n_active`` [token/parameter].

        Raises
        ------
        LawError
            A level is illegal.
        """
        active, total = runs.column("n_active"), runs.column("n_total")
        for value in () if sparsity is None else sparsity:
            if not 0.0 <= value < 1.0:
                raise LawError(
                    f"sparsity holds {value:g}, but must be at least 0 and below 1; the nearest "
                    f"legal value is {0.0 if value < 0 else 0.999:g}."
                )
        shares = None if sparsity is None else [1.0 - value for value in sparsity]
        density = _levels("sparsity", shares, active / total, _DENSITIES)
        splits = _levels("expert_split", expert_split, runs.column("expert_split"), _SPLITS)
        dense = len(density) == len(splits) == 1
        most = (_DENSE_LEVELS, _DENSE_LEVELS) if dense else (_SIZES, _RATIOS)
        sizes = _levels("n_active", n_active, active, most[0])
        ratio = _levels(
            "tokens_per_parameter", tokens_per_parameter, runs.column("tokens") / active, most[1]
        )
        every = np.array(list(product(sizes, density, splits, ratio)), dtype=np.float64)
        given = (n_active, sparsity, expert_split, tokens_per_parameter)
        return cls._products(every, runs if all(x is None for x in given) else None)

    @classmethod
    def _products(cls, every: FloatArray, within: Runs | None) -> Candidates:
        """Return candidates of rows of size, density, split and ratio, inside the runs' range."""
        sizes, density, splits, ratio = every.T
        total, tokens = sizes / density, sizes * ratio
        inside = np.ones(len(sizes), dtype=bool)
        for name, values in (("n_total", total), ("tokens", tokens)):
            if within is not None:
                ends = within.column(name)
                inside &= (values >= ends.min() * (1 - 1e-9)) & (values <= ends.max() * (1 + 1e-9))
        return cls.of(
            n_total=total[inside],
            n_active=sizes[inside],
            tokens=tokens[inside],
            expert_split=splits[inside],
        )

    def __len__(self) -> int:
        """Return the number of candidates."""
        return len(self.cost)

    def column(self, name: str) -> FloatArray:
        """Return one column, shape (candidates,)."""
        return np.array(getattr(self, name), dtype=np.float64)

    def take(self, rows: Sequence[int]) -> Candidates:
        """Return the candidates at some rows, each as often as it is named.

        Raises
        ------
        LawError
            No row is named, or one that is not there.
        """
        if not len(rows) or not all(0 <= row < len(self) for row in rows):
            raise LawError(f"rows must name at least one of 0 to {len(self) - 1}, and no other.")
        names = (*RUN_VARIABLES, "cost")
        return Candidates(**{name: tuple(getattr(self, name)[k] for k in rows) for name in names})

    def random(self, budget: float, seed: int, *, most_runs: int | None = None) -> Candidates:
        """Return a random design, a baseline.

        Candidates are drawn one after the other, each of those that still fit the budget as
        likely as another, until none does.

        Parameters
        ----------
        budget : float
            In the unit of the costs.
        seed : int
            Of the generator.
        most_runs : int, optional
            How many runs at most.

        Raises
        ------
        LawError
            The budget buys no candidate.
        """
        generator, cost, left = np.random.default_rng(seed), self.column("cost"), budget
        rows: list[int] = []
        while (fits := np.flatnonzero(cost <= left)).size and len(rows) != most_runs:
            rows.append(int(generator.choice(fits)))
            left -= cost[rows[-1]]
        if not rows:
            raise LawError(
                f"budget is {budget:g}, but the cheapest of {len(cost)} candidates costs more; the "
                f"nearest legal value is {rounded_up(cost.min())}."
            )
        return self.take(rows)


def _levels(name: str, given: Sequence[float] | None, values: FloatArray, most: int) -> list[float]:
    """Return the levels given, or those of the runs."""
    if given is not None:
        if not len(given):
            raise LawError(f"{name} is empty, but a grid needs at least 1 level of it.")
        return [float(x) for x in given]
    ordered = np.sort(values)
    first = np.concatenate([[True], np.diff(np.log(ordered)) > _SAME])
    if first.sum() <= most:
        return [float(x) for x in ordered[first]]
    return [float(x) for x in np.geomspace(ordered[0], ordered[-1], most)]


def rounded_up(value: float) -> str:
    """Return a number in words that is not below it."""
    return f"{value * (1.0 + 5e-6):.6g}"


def _sentence(error: ValueError) -> str:
    """Return the first rule broken, as a sentence."""
    from pydantic import ValidationError

    text = str(error.errors()[0]["msg"]) if isinstance(error, ValidationError) else str(error)
    return f"{text.removeprefix('Value error, ')}."
