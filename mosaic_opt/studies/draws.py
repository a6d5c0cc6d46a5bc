"""One envelope under draws of what it rests on: law, stack constants, error of the step time.

A draw is one law, one set of stack constants and one set of residuals. All candidates share it
(common random numbers), so differences between candidates are those of one world. In each draw the
lower level is solved exactly: every legal layout of every candidate is priced under the draw's
constants (:mod:`perfmodel.batch_draws`), tokens follow from the best one by the envelope's token
rule, and the loss from the draw's law.

The residual is what the performance model misses. It multiplies a candidate's throughput by

    exp(sigma (sqrt(r_common) z + sqrt(r_layout) z_l + sqrt(r_own) z_c))

with ``sigma = MAPE sqrt(pi / 2)``, MAPE the left-out error of the stack profile that applies to the
candidate's layout (:func:`perfmodel.uncertainty.residual_error`) and standard normal numbers: ``z``
common to the candidates of a draw, ``z_l`` common to those whose best layout has the same degrees
and micro-batch, and ``z_c`` a candidate's own. Errors of two models on one machine under one stack
are neither the same nor independent: the shares ``r`` are `Shares`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from math import sqrt
from typing import Annotated, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from lawfit import MOSAIC_TABLE2, LawEnsemble, published_ensemble
from lawfit.laws import kind_of
from mosaic_opt.errors import MosaicError
from mosaic_opt.outcome import Priced
from mosaic_opt.problem import Problem
from perfmodel.batch_draws import least_steps
from perfmodel.frozen import Frozen
from perfmodel.stack import MEMORY_CONSTANTS, Stack
from perfmodel.step import StepModel
from perfmodel.threads import in_order
from perfmodel.uncertainty import draw_stacks, residual_error, residual_factor

Part = Literal["law", "stack", "residual"]
PARTS: tuple[Part, ...] = get_args(Part)


class Shares(Frozen):
    """Shares of the residual's variance that candidates have in common; they add up to 1 [-].

    Of the squared log errors of MFU of the 24 runs of the B200 layout sweeps, each sweep left out
    of the fit, 45 % are the mean errors of the three sweeps, which the runs of one machine, stack
    and model have in common; 15 % is what errs when the run alone is left out, its own; the rest
    goes with the layout, which is what differs between the runs of a sweep. That it carries over
    to the candidates of one envelope is ASSUMED.

    Attributes
    ----------
    common : float
        By all candidates of a draw.
    layout : float
        By those with the same layout.
    own : float
        By none.
    """

    common: Annotated[float, Field(ge=0.0, le=1.0)] = 0.45
    layout: Annotated[float, Field(ge=0.0, le=1.0)] = 0.40
    own: Annotated[float, Field(ge=0.0, le=1.0)] = 0.15

    @model_validator(mode="after")
    def _whole(self) -> Shares:
        total = self.common + self.layout + self.own
        if abs(total - 1.0) > 1e-9:
            raise ValueError(f"common, layout and own add up to {total:g}, and must to 1")
        return self


LAYOUT = ("tp", "etp", "ep", "pp", "vpp", "cp", "micro_batch")
"""What makes two layouts err alike."""

BLOCK = 100
"""Draws that are solved before the next: an interrupt loses at most one block."""

Floats = NDArray[np.float64]
Best = tuple[Floats, NDArray[np.int64]]
Count = Callable[[str, int, int], None]


class Draws(NamedTuple):
    """What is drawn."""

    laws: LawEnsemble
    stacks: tuple[Stack, ...]  # one a draw
    factors: Floats  # of throughput, shape (draws, candidates) [-]


class Worlds(NamedTuple):
    """The lower level solved in each draw; arrays of shape (draws, candidates)."""

    step_s: Floats  # the residual included; inf without a layout [s]
    rows: NDArray[np.int64]  # of the problem's table, or -1
    tokens: Floats  # NaN where the candidate is infeasible
    losses: Floats  # inf there [nats/token]


class LowerLevel:
    """The best layout of a candidate under other stack constants than the envelope's."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._fitting: dict[int, NDArray[np.int64]] = {}

    def least(
        self, index: int, stacks: Sequence[Stack], likely: NDArray[np.int64] | None = None
    ) -> Best:
        """Return a candidate's shortest step under each stack [s], and its row; inf and -1 if none.

        ``likely`` are rows that may well be the best; they save time and move nothing.
        """
        unique = tuple(dict.fromkeys(stacks))
        where = {stack: i for i, stack in enumerate(unique)}
        point = self.problem.profile.stack()
        memory_as_stated = all(
            getattr(stack, name) == getattr(point, name)
            for stack in unique
            for name in MEMORY_CONSTANTS
        )
        found = (
            self._within_memory(index, unique, likely)
            if memory_as_stated
            else self._one_by_one(index, unique)
        )
        order = [where[stack] for stack in stacks]
        return found[0][order], found[1][order]

    def under(
        self, stacks: Sequence[Stack], likely: Sequence[NDArray[np.int64]]
    ) -> Callable[[int], Best]:
        """Return `least` under these stacks, as a function of the candidate alone."""
        return lambda index: self.least(index, stacks, likely[index])

    def _within_memory(
        self, index: int, stacks: Sequence[Stack], likely: NDArray[np.int64] | None
    ) -> Best:
        if index not in self._fitting:
            priced = self.problem.priced(index)
            self._fitting[index] = priced.rows[self.problem.allowed(priced)]
        return least_steps(
            self.problem.architectures[index],
            self.problem.matrix,
            self._fitting[index],
            stacks,
            likely=likely,
            loads=self.problem.loads,
            **self.problem.run,
        )

    def _one_by_one(self, index: int, stacks: Sequence[Stack]) -> Best:
        """Price every legal layout under each stack: memory differs from draw to draw."""
        rows = self.problem.legal_rows(index)
        best_s = np.full(len(stacks), np.inf)
        best_row = np.full(len(stacks), -1, dtype=np.int64)
        for d, stack in enumerate(stacks):
            priced = Priced(rows, *self.problem.price(index, rows, stack))
            at = self.problem.best_of(priced)
            if at is not None:
                best_s[d], best_row[d] = priced.step_s[at], rows[at]
        return best_s, best_row


def ensemble_of(
    problem: Problem,
    draws: int,
    seed: int,
    given: LawEnsemble | None,
    progress: Count | None = None,
) -> LawEnsemble:
    """Return the draws of the envelope's law.

    Raises
    ------
    MosaicError
        Too few are given, or none are and none are known of this law.
    """
    law = problem.envelope.law
    if given is not None:
        if len(given) < draws:
            raise MosaicError(
                f"The ensemble holds {len(given)} laws and draws={draws}; nearest: {len(given)}."
            )
        kind, wanted = kind_of(given.laws[0]), kind_of(law)
        if kind != wanted:
            raise MosaicError(
                f"The ensemble is of a {kind} law, and the envelope has a {wanted} law."
            )
        return given.first(draws)
    if law != MOSAIC_TABLE2:
        raise MosaicError(
            f"How sure the law ({law.source}) is, nobody said: give an ensemble of it (--ensemble "
            "takes a file of mosaic fit), or leave 'law' out of what is uncertain."
        )
    if progress is None:
        return published_ensemble(draws, seed)
    return published_ensemble(draws, seed, progress=lambda done, of: progress("laws", done, of))


def errors_of(problem: Problem, rows: NDArray[np.int64]) -> tuple[Floats, tuple[str, ...]]:
    """Return the error that applies to each candidate's layout, and the names of those in use.

    A candidate without a layout (row -1) has the larger of the two.
    """
    envelope, errors = problem.envelope, problem.profile.errors
    found, names = np.empty(len(rows)), set()
    for i, row in enumerate(rows.tolist()):
        if row < 0:
            found[i] = max(errors.mape_leave_one_out, errors.mape_leave_one_sweep_out)
            continue
        plan, architecture = problem.table.plan(row), problem.architectures[i]
        model = StepModel(architecture, plan, envelope.cluster, envelope.batch, problem.profile)
        name, found[i] = residual_error(model)
        names.add(name)
    return found, tuple(sorted(names))


def _layouts(problem: Problem, rows: NDArray[np.int64]) -> Floats:
    """Return the degrees and micro-batch of each candidate's layout; zeros where it has none."""
    columns = problem.table.columns
    table = np.stack([np.asarray(columns[name], dtype=np.float64) for name in LAYOUT], axis=1)
    found = np.zeros((len(rows), len(LAYOUT)))
    found[rows >= 0] = table[rows[rows >= 0]]
    return found


def draw(
    problem: Problem,
    draws: int,
    seed: int,
    *,
    uncertain: Sequence[Part],
    errors: Floats,
    rows: NDArray[np.int64],
    ensemble: LawEnsemble | None,
    shares: Shares,
    progress: Count | None = None,
) -> Draws:
    """Draw laws, stacks and residuals; the same seed gives the same ones.

    Parameters
    ----------
    errors : array of shape (candidates,)
        Mean absolute error of throughput that applies to each [-].
    rows : array of int64, shape (candidates,)
        Best layout of each under the stated constants; -1 for none.
    """
    law = problem.envelope.law
    if "law" in uncertain:
        laws = ensemble_of(problem, draws, seed, ensemble, progress)
    else:
        fixed = LawEnsemble.of(law)
        laws = fixed.model_copy(update={"laws": (law,) * draws})
    # independent draws: the first half, which the second mirrors
    drawn = draw_stacks(problem.profile, draws, seed)
    point = problem.profile.stack()
    stacks = drawn.stacks[:draws] if "stack" in uncertain else (point,) * draws
    shape = (draws, len(problem.architectures))
    factors = np.ones(shape)
    if "residual" in uncertain:
        known: dict[tuple[float, ...], int] = {}
        of = [known.setdefault(tuple(key), len(known)) for key in _layouts(problem, rows).tolist()]
        own = np.random.default_rng([seed, 1]).standard_normal(shape)
        by_layout = np.random.default_rng([seed, 2]).standard_normal((draws, len(known)))
        z = sqrt(shares.common) * drawn.residual[:draws, None]
        z = (
            z
            + sqrt(shares.layout) * by_layout[:, np.array(of, dtype=np.int64)]
            + sqrt(shares.own) * own
        )
        factors = residual_factor(z, errors[None, :])
    return Draws(laws, tuple(stacks), factors)


def worlds(
    lower: LowerLevel,
    draws: Draws,
    *,
    likely: NDArray[np.int64],
    workers: int | None,
    progress: Count | None = None,
) -> Worlds:
    """Solve the lower level of every candidate in every draw.

    An interrupt keeps the blocks of `BLOCK` draws that are done; before the first one is, it goes
    on to the caller.

    Parameters
    ----------
    likely : array of int64, shape (candidates,)
        A row to begin each candidate with, or -1.
    """
    problem = lower.problem
    n, of = len(problem.architectures), len(draws.stacks)
    step_s, rows = np.full((of, n), np.inf), np.full((of, n), -1, dtype=np.int64)
    start = [likely[i : i + 1][likely[i : i + 1] >= 0] for i in range(n)]
    done = 0
    try:
        for begin in range(0, of, BLOCK):
            stacks = draws.stacks[begin : begin + BLOCK]
            end = begin + len(stacks)
            results = in_order(lower.under(stacks, start), range(n), workers)
            try:
                for i, (least, best) in enumerate(results):
                    step_s[begin:end, i], rows[begin:end, i] = least, best
                    start[i] = np.unique(best[best >= 0])
                    if progress is not None and (i + 1) % 10 == 0:
                        progress("draws", begin + len(stacks) * (i + 1) // n, of)
            finally:
                results.close()
            done = end
            if progress is not None:
                progress("draws", done, of)
    except KeyboardInterrupt:
        if not done:
            raise
    slower = step_s[:done] / draws.factors[:done]
    sizes = problem.sizes
    tokens = problem.envelope.tokens.budget(sizes.tokens / slower, sizes.n_active)
    tokens = np.where(tokens > 0.0, tokens, np.nan)
    losses = losses_of(problem, draws.laws.first(done), tokens)
    return Worlds(slower, rows[:done], tokens, losses)


def losses_of(problem: Problem, laws: LawEnsemble, tokens: Floats) -> Floats:
    """Return the loss of every candidate in every draw; inf where the tokens are NaN."""
    feasible = np.isfinite(tokens)
    losses = np.full(tokens.shape, np.inf)
    if problem.envelope.critical_batch is not None:  # what a token is worth may depend on the law
        for d, law in enumerate(laws.laws):
            one = copy(problem)
            one.envelope = problem.envelope.model_copy(update={"law": law})
            for i in np.flatnonzero(feasible[d]):
                losses[d, i] = one.loss(int(i), float(tokens[d, i]))
        return losses
    some = np.flatnonzero(feasible.any(axis=0))
    if len(some):
        seen = np.where(feasible[:, some], tokens[:, some], 1.0)
        found = laws.loss(tokens=seen, **sizes_of(problem, some))
        losses[:, some] = np.where(feasible[:, some], found, np.inf)
    return losses


def days_for(
    problem: Problem, laws: LawEnsemble, step_s: Floats, target: float, some: NDArray[np.int64]
) -> Floats:
    """Return the days until candidates have a loss, in each draw; inf if never [day].

    Parameters
    ----------
    step_s : array of shape (draws, candidates)
        Of all candidates [s].
    target : float
        [nats/token]
    some : array of int64, shape (n,)
        The candidates in question.
    """
    needed = laws.tokens_for(target, **sizes_of(problem, some))
    rule, batch = problem.envelope.critical_batch, float(problem.envelope.batch.tokens)
    if rule is not None:
        for at in zip(*np.nonzero(np.isfinite(needed)), strict=True):
            needed[at] = rule.tokens_for(float(needed[at]), batch, lambda _: target)
    per_day = problem.sizes.tokens[some] / problem.envelope.window_days / step_s[:, some]
    days = np.full(needed.shape, np.inf)
    np.divide(needed, per_day, out=days, where=per_day > 0.0)
    return days


def sizes_of(problem: Problem, some: NDArray[np.int64]) -> dict[str, Floats]:
    """Return what a law takes of candidates beside tokens, arrays of shape (len(some),)."""
    sizes = problem.sizes
    return {
        "n_total": sizes.n_total[some],
        "n_active": sizes.n_active[some],
        "expert_split": sizes.expert_split[some],
    }
