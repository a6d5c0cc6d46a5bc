"""The loss of each candidate as a function of the window, in pieces, and their lower envelope.

At a fixed cluster the best step of a candidate does not depend on the window T, so its tokens are
``k T`` and, under a law ``L = A(Z) + B(Z) D^-beta``, its loss is a straight line in
``x = T^-beta`` (equation (27) of arXiv 2608.10605). A cap or a listed ratio of tokens makes the
line constant from some window on; a least ratio makes the candidate begin at some window.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf, isclose, log
from typing import NamedTuple

from lawfit import Monomial, ScalingLaw
from mosaic_opt.backends.base import Limits, ProgressCallback
from mosaic_opt.backends.enumerate import Enumerate
from mosaic_opt.envelope import MAX_WINDOW_DAYS, SECONDS_PER_DAY
from mosaic_opt.errors import MosaicError
from mosaic_opt.problem import Problem
from mosaic_opt.token_efficiency import ConstantCriticalBatch


class TokenForm(NamedTuple):
    """A law as ``A(Z) + B(Z) D^-beta``: the exponent, and the terms of A and of B."""

    beta: float
    floor: tuple[Monomial, ...]
    data: tuple[Monomial, ...]


class Curve(NamedTuple):
    """A candidate on the cluster: its best layout, its speed, and its loss in tokens."""

    candidate: int
    row: int
    step_s: float
    memory_bytes: float
    tokens_per_day: float  # k; goodput included
    n_active: float
    floor: float  # A(Z) [nats/token]
    data: float  # B(Z), at the worth of the batch's tokens: loss is floor + data * tokens^-beta


class Piece(NamedTuple):
    """A candidate over some windows: ``loss = floor + slope * days^-beta``."""

    days_from: float
    days_to: float
    candidate: int
    floor: float
    slope: float
    binding: str  # what sets the tokens, as in `Tokens`
    tokens: float | None  # where they are the same all over the piece


Pieces = tuple[Piece, ...]


def token_form(law: ScalingLaw) -> TokenForm:
    """Split a law into what tokens move and what they do not.

    Raises
    ------
    MosaicError
        The loss is not ``A(Z) + B(Z) D^-beta`` with one beta above 0.
    """
    data = tuple(term for term in law.terms if term.tokens and term.coefficient)
    floor = tuple(term for term in law.terms if not term.tokens)
    powers = sorted({term.tokens for term in data})
    if len(powers) != 1 or powers[0] >= 0.0:
        found = ", ".join(f"{power:g}" for power in powers) or "none"
        raise MosaicError(
            f"The law has these powers of the tokens: {found}; a line in T^-beta needs "
            "L = A(Z) + B(Z) D^-beta, with one power, below 0."
        )
    return TokenForm(-powers[0], floor, data)


def value(terms: Sequence[Monomial], n_total: float, n_active: float, expert_split: float) -> float:
    """Evaluate terms of a law at one token [nats/token]."""
    logs = (log(n_total), log(n_active), 0.0, log(expert_split))
    return sum(
        t.coefficient * exp(sum(p * x for p, x in zip(t.exponents, logs, strict=True)))
        for t in terms
    )


def survey(
    problem: Problem, *, workers: int | None = None, progress: ProgressCallback | None = None
) -> tuple[Curve, ...]:
    """Find the best layout of every candidate; those without one are left out.

    Parameters
    ----------
    problem : Problem
    workers : int, optional
        Threads; all cores unless given.
    progress : callable, optional
        Called after each candidate.

    Raises
    ------
    MosaicError
        The law is not of the form ``A(Z) + B(Z) D^-beta``, or the critical batch is not constant.
    """
    form = token_form(problem.envelope.law)
    _ = _worth(problem)  # before anything long
    report = Enumerate(workers=workers).search(problem, Limits(), progress=progress)
    if report.unexamined:
        raise KeyboardInterrupt
    curves = []
    for outcome in report.outcomes:
        row = outcome.row if outcome.feasible else outcome.nearest_row
        if row >= 0:
            curve = _curve(problem, form, outcome.index, row, outcome.step_s, outcome.memory_bytes)
            if curve.tokens_per_day > 0.0:
                curves.append(curve)
    return tuple(curves)


def _worth(problem: Problem) -> float:
    """Return D_eff / D, one number for every run [-]."""
    rule = problem.envelope.critical_batch
    if rule is None:
        return 1.0
    if not isinstance(rule, ConstantCriticalBatch):
        raise MosaicError(
            f"critical_batch of kind {rule.kind!r} bends the loss as a function of the window; "
            "this answer needs kind 'constant', or no critical batch."
        )
    return rule.share(float(problem.envelope.batch.tokens))


def _curve(
    problem: Problem, form: TokenForm, index: int, row: int, step_s: float, memory_bytes: float
) -> Curve:
    envelope = problem.envelope
    goodput = envelope.goodput_of(problem.architectures[index]).value or 0.0
    n_active, split = float(problem.n_active(index)), problem.expert_split(index)
    size = (float(problem.n_total(index)), n_active, split)
    curve = Curve(
        candidate=index,
        row=row,
        step_s=step_s,
        memory_bytes=memory_bytes,
        tokens_per_day=SECONDS_PER_DAY * goodput * envelope.batch.tokens / step_s,
        n_active=n_active,
        floor=value(form.floor, *size),
        data=value(form.data, *size) * _worth(problem) ** -form.beta,
    )
    for tokens in (1e9, 1e12):  # a law may compute its loss in another way than its terms say
        said = problem.loss(index, tokens)
        if not isclose(curve.floor + curve.data * tokens**-form.beta, said, rel_tol=1e-9):
            raise MosaicError(
                f"The law's loss of {problem.architectures[index].name} after {tokens:g} tokens is "
                f"{said:.6g}, which is not the sum of its terms A(Z) + B(Z) D^-beta."
            )
    return curve


class Levels(NamedTuple):
    """The tokens that a rule lets a candidate train on.

    Any number from ``least`` to ``most`` under a rule that saturates; under a grid one of
    ``listed``, ascending. ``binding`` says what ends it.
    """

    least: float
    most: float
    listed: tuple[float, ...] | None
    binding: str

    @property
    def empty(self) -> bool:
        """Whether the rule's cap lies below what it asks for at least."""
        return self.least > self.most if self.listed is None else not self.listed

    def at_least(self, tokens: float) -> float:
        """Return the fewest tokens that the rule allows, of those not below ``tokens``; or inf."""
        if self.listed is None:
            needed = max(tokens, self.least)
            return needed if needed <= self.most else inf
        return next((level for level in self.listed if level >= tokens), inf)

    def at_most(self, tokens: float) -> float:
        """Return what a candidate trains on if the window delivers ``tokens``; 0 if too few."""
        if self.listed is None:
            return min(tokens, self.most) if tokens >= self.least <= self.most else 0.0
        return max((level for level in self.listed if level <= tokens), default=0.0)

    @property
    def largest(self) -> float:
        """The most tokens that the rule allows; inf where nothing ends it."""
        return self.most if self.listed is None else self.listed[-1]


def levels(problem: Problem, curve: Curve) -> Levels:
    """Read the envelope's token rule for one candidate (the rule of `Problem.tokens`)."""
    rule = problem.envelope.tokens
    most, binding = inf, "window"
    if rule.max_tokens is not None:
        most, binding = rule.max_tokens, "max_tokens"
    ratio = rule.max_tokens_per_parameter
    if ratio is not None and ratio * curve.n_active < most:
        most, binding = ratio * curve.n_active, "max_tokens_per_parameter"
    least = (rule.min_tokens_per_parameter or 0.0) * curve.n_active
    if rule.kind == "saturate":
        return Levels(least, most, None, binding)
    listed = sorted({r * curve.n_active for r in rule.tokens_per_parameter})
    return Levels(least, most, tuple(d for d in listed if least <= d <= most), "grid")


def pieces(problem: Problem, curve: Curve, beta: float) -> Pieces:
    """Return the loss of a candidate over the windows up to the longest, without gaps."""
    rule = levels(problem, curve)
    if rule.empty:
        return ()
    k, index = curve.tokens_per_day, curve.candidate
    if rule.listed is not None:
        ends = [*(d / k for d in rule.listed[1:]), inf]
        found = [
            Piece(d / k, end, index, problem.loss(index, d), 0.0, rule.binding, d)
            for d, end in zip(rule.listed, ends, strict=True)
        ]
    else:
        start, full = rule.least / k, rule.most / k
        line = Piece(start, full, index, curve.floor, curve.data * k**-beta, "window", None)
        found = [line] if start < full else []
        if rule.most < inf:
            capped = problem.loss(index, rule.most)
            full = max(start, full)
            found.append(Piece(full, inf, index, capped, 0.0, rule.binding, rule.most))
    return tuple(
        p._replace(days_to=min(p.days_to, MAX_WINDOW_DAYS))
        for p in found
        if p.days_from < MAX_WINDOW_DAYS
    )


def lower_envelope(curves: Sequence[Pieces], beta: float) -> Pieces:
    """Return the least of several curves over every window.

    Divide and conquer: halves are merged from left to right, and two lines cross once at most, so
    n pieces take O(n log n) steps. Between equals the lower index wins, as in `solve`.

    Parameters
    ----------
    curves : sequence of tuple of Piece
        Each without gaps, up to the longest window.
    beta : float
        Exponent of the windows [-].

    Returns
    -------
    tuple of Piece
        Without gaps; empty if there is no curve.
    """
    layers = [curve for curve in curves if curve]
    while len(layers) > 1:
        pairs = [_merged(a, b, beta) for a, b in zip(layers[::2], layers[1::2], strict=False)]
        layers = pairs + ([layers[-1]] if len(layers) % 2 else [])
    return layers[0] if layers else ()


def _merged(left: Pieces, right: Pieces, beta: float) -> Pieces:
    out: list[Piece] = []
    i = j = 0
    at = min(left[0].days_from, right[0].days_from)
    while i < len(left) and j < len(right):
        a, b = left[i], right[j]
        if a.days_from > at or b.days_from > at:  # one of them has not begun
            first, other = (b, a) if a.days_from > at else (a, b)
            to = min(first.days_to, other.days_from)
            _append(out, first, at, to)
        else:
            to = min(a.days_to, b.days_to)
            _append_lower(out, a, b, at, to, beta)
        i += a.days_to <= to
        j += b.days_to <= to
        at = to
    for piece in (*left[i:], *right[j:]):
        _append(out, piece, max(at, piece.days_from), piece.days_to)
    return tuple(out)


def _append(out: list[Piece], piece: Piece, start: float, end: float) -> None:
    if end <= start:
        return
    same = out and out[-1][2:] == piece[2:]
    if same:
        out[-1] = out[-1]._replace(days_to=end)
    else:
        out.append(piece._replace(days_from=start, days_to=end))


def _append_lower(
    out: list[Piece], a: Piece, b: Piece, start: float, end: float, beta: float
) -> None:
    if b.candidate < a.candidate:
        a, b = b, a
    rise, ahead = a.slope - b.slope, a.floor - b.floor
    if rise == 0.0:
        _append(out, a if ahead <= 0.0 else b, start, end)
        return
    short, long = (b, a) if rise > 0.0 else (a, b)  # the lower before and after they cross
    x = -ahead / rise
    if x <= end**-beta:
        _append(out, short, start, end)
    elif start > 0.0 and x >= start**-beta:
        _append(out, long, start, end)
    else:
        crossing = min(max(x ** (-1.0 / beta), start), end)
        _append(out, short, start, crossing)
        _append(out, long, crossing, end)


def best_at(envelope: Pieces, days: float) -> Piece | None:
    """Return the piece of a lower envelope at a window; None before the first, after the last.

    Where two meet it is the later one, which may begin there with a lower loss.
    """
    begun = (p for p in reversed(envelope) if p.days_from <= days <= p.days_to)
    return next(begun, None)
