"""The choice under draws, held against `solve` and brute force in every single draw."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from lawfit import MOSAIC_TABLE2, LawEnsemble, load_law, published_ensemble
from mosaic_opt.backends.base import Limits
from mosaic_opt.backends.enumerate import Enumerate
from mosaic_opt.envelope import SECONDS_PER_DAY, Envelope, parse_envelope
from mosaic_opt.errors import MosaicError
from mosaic_opt.problem import Outcome, Problem
from mosaic_opt.result import Status
from mosaic_opt.solver import solve
from mosaic_opt.studies import draws as draws_module
from mosaic_opt.studies.draws import (
    Draws,
    LowerLevel,
    Shares,
    Worlds,
    days_for,
    draw,
    errors_of,
    worlds,
)
from mosaic_opt.studies.robust import choice_of, robust
from mosaic_opt.studies.robust_result import HELD_SHARE, NEAR_SHARE, Robust
from perfmodel.calibration.stacks import StackProfile, load_stack
from perfmodel.sources import Source
from perfmodel.stack import Stack

from .strategies import scoreboard, small_envelopes, tiny, tiny_envelope, tiny_ladder

ENSEMBLE = published_ensemble(40, seed=5)


def stack_file(
    folder: Path, width: float, errors: float | None = None, memory: tuple[float, ...] = ()
) -> str:
    """Write the shipped profile with intervals of another width, as a file of the user's.

    ``memory`` are value, low and high of `framework_bytes`, which then counts as fitted.
    """
    shipped = resources.files("perfmodel") / "calibration/data/stacks/megatron-eager.toml"
    text = shipped.read_text("utf-8")

    def narrowed(match: re.Match[str]) -> str:
        value, low, high = (float(match[k]) for k in (1, 2, 3))
        ends = (max(0.0, value + width * (end - value)) for end in (low, high))
        return "value = {!r}\nlow = {!r}\nhigh = {!r}".format(value, *ends)

    text = re.sub(r"value = (\S+)\nlow = (\S+)\nhigh = (\S+)", narrowed, text)
    if errors is not None:
        text = re.sub(r"(mape_\w+) = \S+", rf"\1 = {errors}", text)
    if memory:
        value, low, high = memory
        text = re.sub(r"\[assumptions\.framework_bytes\]\n(.*\n){3}", "", text)
        text += (
            f"\n[constants.framework_bytes]\nvalue = {value!r}\nlow = {low!r}\nhigh = {high!r}\n"
        )
        text += 'identified = 1.0\nunit = "B"\nsource = "FITTED"\nmeaning = "a test"\n'
    file = folder / "mine.toml"
    file.write_text(text, "utf-8")
    return str(file)


def solved(
    problem: Problem, n: int, seed: int, workers: int = 1, **options: Any
) -> tuple[Draws, Worlds]:
    """Draw, and solve the lower level in each draw."""
    lower, point = LowerLevel(problem), (problem.profile.stack(),)
    rows = np.array([lower.least(i, point)[1][0] for i in range(len(problem.architectures))])
    errors, _ = errors_of(problem, rows)
    given_: dict[str, Any] = {
        "uncertain": ("law", "stack", "residual"),
        "ensemble": ENSEMBLE,
        "shares": Shares(),
    }
    drawn = draw(problem, n, seed, errors=errors, rows=rows, **(given_ | options))
    return drawn, worlds(lower, drawn, likely=rows, workers=workers)


class UnderDraw(Problem):
    """The problem of one draw: its law, its stack."""

    def __init__(self, envelope: Envelope, law: Any, profile: StackProfile, stack: Stack) -> None:
        super().__init__(envelope.model_copy(update={"law": law}))
        sure = {
            name: c.model_copy(update=dict.fromkeys(("value", "low", "high"), getattr(stack, name)))
            for name, c in profile.constants.items()
        }
        self.profile = profile.model_copy(update={"constants": sure})


def outcomes(problem: Problem) -> tuple[tuple[Outcome, ...], Outcome | None]:
    report = Enumerate(workers=1).search(problem, Limits())
    return report.outcomes, report.incumbent


# ---------------------------------------------------------------- each draw is a world of its own


@settings(max_examples=30)
@given(small_envelopes(), st.integers(0, 2**31))
def test_every_draw_is_what_solve_finds_in_it(spec: dict[str, Any], seed: int) -> None:
    problem = Problem(parse_envelope(spec))
    assume(problem.architectures)
    drawn, found = solved(problem, 3, seed, uncertain=("law", "stack"))
    assert (drawn.factors == 1.0).all()
    choice = choice_of(found.losses, 0.0)
    for d, (law, stack) in enumerate(zip(drawn.laws.laws, drawn.stacks, strict=True)):
        one = UnderDraw(problem.envelope, law, problem.profile, stack)
        assert one.profile.stack() == stack
        each, best = outcomes(one)
        assert choice.winners[d] == (-1 if best is None else best.index)
        for o in each:
            assert np.isfinite(found.losses[d, o.index]) == o.feasible
            if o.feasible:
                row = found.step_s[d, o.index], found.rows[d, o.index]
                assert row == (o.step_s, o.row)
                assert found.tokens[d, o.index] == pytest.approx(o.tokens, rel=1e-14)
                assert found.losses[d, o.index] == pytest.approx(o.loss, rel=1e-14)


@settings(max_examples=20)
@given(small_envelopes(), st.integers(0, 2**31))
def test_the_residual_divides_the_step_of_the_best_layout(spec: dict[str, Any], seed: int) -> None:
    problem = Problem(parse_envelope(spec))
    assume(problem.architectures)
    drawn, found = solved(problem, 2, seed)
    _, without = solved(problem, 2, seed, uncertain=("law", "stack"))
    np.testing.assert_array_equal(found.rows, without.rows)
    np.testing.assert_array_equal(found.step_s, without.step_s / drawn.factors)
    for d in range(2):
        for i in range(len(problem.architectures)):
            if not np.isfinite(found.step_s[d, i]):
                assert found.losses[d, i] == np.inf
                continue
            tokens = problem.tokens(i, float(found.step_s[d, i])).tokens
            np.testing.assert_allclose(found.tokens[d, i], tokens, rtol=1e-14)
            law = drawn.laws.laws[d]
            if np.isnan(tokens):
                assert found.losses[d, i] == np.inf
                continue
            loss = law.loss(
                n_total=float(problem.n_total(i)),
                n_active=float(problem.n_active(i)),
                tokens=tokens,
                expert_split=problem.expert_split(i),
            )
            assert found.losses[d, i] == pytest.approx(loss, rel=1e-14)


def test_a_stack_whose_memory_is_drawn_fits_in_some_draws(tmp_path: Path) -> None:
    stack = stack_file(tmp_path, 1.0, memory=(2e9, 1e9, 20e9))
    spec = tiny(stack=stack, memory_fraction=0.045, candidates=tiny_ladder(q=[2, 3]))
    problem = Problem(parse_envelope(spec))
    drawn, found = solved(problem, 12, 0, uncertain=("stack",))
    fits = np.isfinite(found.losses)
    assert fits.any()
    assert not fits.all()  # or the case says little
    for d, stack_ in enumerate(drawn.stacks):
        each, _ = outcomes(UnderDraw(problem.envelope, MOSAIC_TABLE2, problem.profile, stack_))
        for o in each:
            assert fits[d, o.index] == o.feasible
            if o.feasible:
                assert found.rows[d, o.index] == o.row
                assert found.losses[d, o.index] == pytest.approx(o.loss, rel=1e-14)


CRITICAL: list[dict[str, Any]] = [
    {"kind": "constant"},
    {"kind": "tokens", "at_tokens": 1e9, "exponent": 0.4},
    {"kind": "loss", "at_loss": 3.0, "exponent": 2.0},
]


@pytest.mark.parametrize("rule", CRITICAL, ids=lambda rule: str(rule["kind"]))
def test_under_a_critical_batch_tokens_are_worth_what_the_draw_says(rule: dict[str, Any]) -> None:
    worth = rule | {"batch_tokens": 3e4, "reference_batch_tokens": 1e4}
    envelope = tiny_envelope(critical_batch=worth)
    problem = Problem(envelope)
    drawn, found = solved(problem, 3, 1, uncertain=("law", "stack"))
    plain = solved(Problem(tiny_envelope()), 3, 1, uncertain=("law", "stack"))[1]
    assert (found.losses > plain.losses).all()
    for d, (law, stack) in enumerate(zip(drawn.laws.laws, drawn.stacks, strict=True)):
        one = UnderDraw(envelope, law, problem.profile, stack)
        for o in outcomes(one)[0]:
            assert found.losses[d, o.index] == pytest.approx(o.loss, rel=1e-13)
            # a window of the days until a loss gives that loss
            target = o.loss + 0.1
            some = np.array([o.index])
            (days,) = days_for(problem, drawn.laws, found.step_s, target, some)[d]
            tokens = one.sizes.tokens[o.index] / envelope.window_days * days / o.step_s
            assert one.loss(o.index, float(tokens)) == pytest.approx(target, rel=1e-9)


# ---------------------------------------------------------------- the residual


def test_shares_say_what_candidates_have_in_common() -> None:
    problem = Problem(tiny_envelope(candidates=tiny_ladder(q=[1, 2, 3, 4])))
    n = len(problem.architectures)
    rows = np.arange(n) % 3  # three layouts
    errors = np.full(n, 0.2)
    layout = draws_module._layouts(problem, rows)
    same = (layout[:, None] == layout[None, :]).all(axis=2)
    assert same[0].any()
    assert not same.all()

    def factors(common: float, by_layout: float, own: float) -> np.ndarray:
        shares = Shares(common=common, layout=by_layout, own=own)
        some = {"uncertain": ("residual",), "ensemble": None, "shares": shares}
        return draw(problem, 3000, 0, errors=errors, rows=rows, **some).factors

    assert (np.ptp(factors(1.0, 0.0, 0.0), axis=1) == 0.0).all()
    found = factors(0.0, 1.0, 0.0)
    for i in range(n):
        np.testing.assert_array_equal((found[:, [i]] == found).all(axis=0), same[i])
    correlation = np.corrcoef(np.log(factors(0.5, 0.3, 0.2)).T)
    expected = np.where(same, 0.8, 0.5)
    np.fill_diagonal(expected, 1.0)
    assert np.abs(correlation - expected).max() < 0.1
    # normal, with the mean absolute error that was stated
    assert np.abs(np.log(factors(0.5, 0.3, 0.2))).mean() == pytest.approx(0.2, rel=0.05)


def test_shares_are_those_of_the_measured_sweeps() -> None:
    """Of the squared log errors, each sweep left out: means of sweeps, and what one run adds."""
    rows = scoreboard().rows
    left_out = np.log1p([row.error_leave_one_sweep_out for row in rows])
    alone = np.log1p([row.error_leave_one_out for row in rows])
    sweeps = np.array([row.sweep for row in rows])
    means = np.array([left_out[sweeps == sweep].mean() for sweep in sweeps])
    total = (left_out**2).sum()
    shares = Shares()
    assert (means**2).sum() / total == pytest.approx(shares.common, abs=0.01)
    assert (alone**2).sum() / total == pytest.approx(shares.own, abs=0.01)


def test_shares_add_up_to_one() -> None:
    assert sum(Shares().model_dump().values()) == pytest.approx(1.0)
    with pytest.raises(ValueError, match=r"add up to 1\.25, and must to 1"):
        Shares(common=0.7)


# ---------------------------------------------------------------- what is said of the draws

losses = arrays(
    np.float64,
    st.tuples(st.integers(1, 8), st.integers(1, 5)),
    elements=st.sampled_from((1.0, 1.1, 1.25, 2.0, np.inf)),
)


@given(losses, st.sampled_from((0.0, 0.2)))
def test_the_summary_is_what_its_definitions_say(table: np.ndarray, tolerance: float) -> None:
    n, m = table.shape
    found = choice_of(table, tolerance)
    best = [row.min() for row in table]
    answered = [d for d in range(n) if np.isfinite(best[d])]
    assert found.probability.sum() == pytest.approx(len(answered) / n)
    for c in range(m):
        regrets = [table[d, c] - best[d] for d in answered]
        finite = [r for r in regrets if np.isfinite(r)]
        assert all(r >= 0.0 for r in regrets)
        wins = [d for d in answered if list(table[d]).index(best[d]) == c]
        assert found.probability[c] == pytest.approx(len(wins) / n)
        assert all(table[d, c] == best[d] for d in wins)
        assert found.near[c] == pytest.approx(sum(r <= tolerance for r in regrets) / n)
        assert found.near[c] >= found.probability[c]
        assert found.feasible[c] == pytest.approx(np.isfinite(table[:, c]).mean())
        assert found.largest[c] == max(regrets, default=0.0)
        if finite:
            assert found.expected[c] == pytest.approx(np.mean(finite))
        else:
            assert np.isnan(found.expected[c])


def check_consistent(found: Robust) -> None:
    """What holds of any answer."""
    by_name = {c.name: c for c in found.candidates}
    unanswered = found.draws_without_optimum / found.draws
    assert sum(c.probability for c in found.candidates) == pytest.approx(1.0 - unanswered)
    assert sum(c.probability > 0.0 for c in found.candidates) == found.counts["optimum"]
    probabilities = [c.probability for c in found.candidates]
    assert probabilities == sorted(probabilities, reverse=True)
    for c in found.candidates:
        assert c.probability <= c.probability_near <= c.feasible <= 1.0
        error = (c.probability * (1.0 - c.probability) / found.draws) ** 0.5
        assert c.probability_error == pytest.approx(error)
        if c.expected_regret is not None:
            assert c.expected_regret >= 0.0
        if c.max_regret is not None:
            assert c.feasible == pytest.approx(1.0 - unanswered)
            assert c.expected_regret is not None
            assert c.max_regret >= c.expected_regret - 1e-12
        assert (c.name in found.near_ties) == c.near_tie
        assert (c.name in found.indistinguishable) == (c.probability_near >= NEAR_SHARE)
        quantiles = [q for q in (c.loss.low, c.loss.median, c.loss.high) if q is not None]
        assert quantiles == sorted(quantiles)
    for name in (found.least_expected_regret, found.minimax_regret):
        if name is not None:
            assert by_name[name].max_regret is not None
    always = [c for c in found.candidates if c.max_regret is not None]
    if found.minimax_regret is not None:
        least = by_name[found.minimax_regret].max_regret
        assert least == min(c.max_regret for c in always if c.max_regret is not None)
    held = sum(by_name[name].probability for name in found.likely_optima)
    assert held >= min(HELD_SHARE, 1.0 - unanswered) - 1e-12
    if held >= HELD_SHARE:
        assert held - by_name[found.likely_optima[-1]].probability < HELD_SHARE
    ties = sum(by_name[name].probability for name in found.near_ties)
    assert found.near_ties_hold == pytest.approx(ties)
    assert Robust.from_json(found.to_json()) == found


@settings(max_examples=15)
@given(small_envelopes(), st.integers(0, 1000), st.integers(1, 12))
def test_any_answer_is_consistent(spec: dict[str, Any], seed: int, n: int) -> None:
    envelope = parse_envelope(spec)
    assume(envelope.candidates.architectures())
    found = robust(envelope, draws=n, seed=seed, ensemble=ENSEMBLE, workers=1)
    check_consistent(found)
    assert (found.draws, found.draws_asked) == (n, n)


def test_the_same_seed_gives_the_same_answer_whatever_the_workers() -> None:
    one, two = (robust(tiny_envelope(), draws=30, seed=4, workers=w) for w in (1, 2))
    assert one.to_json() == two.to_json()
    other = robust(tiny_envelope(), draws=30, seed=5)
    assert other.candidates != one.candidates
    check_consistent(one)


def test_without_any_width_it_is_solve(tmp_path: Path) -> None:
    """The near-ties are then those within the tolerance in every draw: a set of the draws."""
    envelope = tiny_envelope(stack=stack_file(tmp_path, 0.0, errors=0.0))
    for n, ensemble in ((1, LawEnsemble.of(MOSAIC_TABLE2)), (7, None)):
        parts = ("law", "stack", "residual") if ensemble else ("stack", "residual")
        found = robust(envelope, draws=n, ensemble=ensemble, uncertain=parts)
        solution = solve(envelope)
        best = solution.optimum
        assert best is not None
        name = solution.near_ties[0].name
        for chosen in (
            found.point_optimum,
            found.most_probable,
            found.least_expected_regret,
            found.minimax_regret,
        ):
            assert chosen == name
        assert found.likely_optima == (name,)
        assert set(found.indistinguishable) == {c.name for c in solution.near_ties}
        assert found.near_ties_hold == 1.0
        first = found.candidate(name)
        assert (first.probability, first.expected_regret, first.max_regret) == (1.0, 0.0, 0.0)
        assert first.plan == best.plan
        assert first.same_layout == 1.0
        assert {first.loss.low, first.loss.high, first.point_loss} == {best.loss}
        assert first.days.median == pytest.approx(envelope.window_days)
        for tie in solution.near_ties:
            c = found.candidate(tie.name)
            assert c.point_loss == tie.loss
            assert c.expected_regret == pytest.approx(tie.delta_loss, abs=1e-12)


def test_a_larger_error_makes_the_choice_less_sure(tmp_path: Path) -> None:
    sure = []
    for error in (0.0, 0.2, 1.0):
        folder = tmp_path / f"{error}"
        folder.mkdir()
        spec = tiny(stack=stack_file(folder, 1.0, errors=error))
        found = robust(parse_envelope(spec), draws=100, uncertain=("residual",))
        sure.append(max(c.probability for c in found.candidates))
    assert sure[0] == 1.0
    assert sure[0] > sure[1] > sure[2]


def test_days_are_those_of_the_promised_loss() -> None:
    """With the days of a draw as the window, and no cap, its loss is the one that was promised."""
    envelope = tiny_envelope()
    problem = Problem(envelope)
    drawn, found = solved(problem, 9, 0)
    answer = robust(envelope, draws=9, seed=0, ensemble=ENSEMBLE)
    promised = answer.promised_loss
    assert promised is not None
    names = [a.name for a in problem.architectures]
    for c in answer.candidates:
        i = names.index(c.name)
        days = []
        for d, law in enumerate(drawn.laws.laws):
            size = {
                "n_total": float(problem.n_total(i)),
                "n_active": float(problem.n_active(i)),
                "expert_split": problem.expert_split(i),
            }
            if law.floor(**size) >= promised:
                days.append(np.inf)
                continue
            steps = law.tokens_for(promised, **size) / envelope.batch.tokens
            days.append(steps * found.step_s[d, i] / SECONDS_PER_DAY)
        assert c.days.median == pytest.approx(sorted(days)[4])
        assert c.days.low == pytest.approx(min(days))
        assert c.days.high == (None if max(days) == np.inf else pytest.approx(max(days)))


def test_what_it_rests_on_is_said() -> None:
    every = robust(tiny_envelope(), draws=3).rests_on
    assert (every.law, every.stack, every.residual) == (
        Source.ASSUMED,
        Source.FITTED,
        Source.ASSUMED,
    )
    assert "Metropolis" in every.law_method
    assert set(every.constants) == set(load_stack("megatron-eager").constants)
    assert every.residual_errors == ("mape_leave_one_sweep_out",)
    assert every.residual_shares == Shares().model_dump()
    stack = robust(tiny_envelope(), draws=3, uncertain=("stack",)).rests_on
    assert (stack.law, stack.residual, stack.residual_errors) == (None, None, ())
    assert stack.law_method == "the law as it is"


def test_where_nothing_fits_nothing_is_chosen() -> None:
    found = robust(tiny_envelope(memory_fraction=0.001), draws=4)
    check_consistent(found)
    assert found.draws_without_optimum == 4
    assert found.candidates == ()
    assert (found.point_optimum, found.most_probable, found.minimax_regret) == (None, None, None)
    assert solve(tiny_envelope(memory_fraction=0.001)).status is Status.INFEASIBLE
    assert "No candidate is feasible in any draw." in str(found)


def test_a_candidate_that_is_infeasible_in_a_draw_has_no_largest_regret() -> None:
    """A least ratio that the optimum barely meets: slower draws miss it."""
    best = solve(tiny_envelope()).optimum
    assert best is not None
    ratio = 0.95 * best.tokens_per_parameter
    found = robust(tiny_envelope(tokens={"min_tokens_per_parameter": ratio}), draws=60)
    check_consistent(found)
    assert found.point_optimum is not None
    first = found.candidate(found.point_optimum)
    assert 0.0 < first.feasible < 1.0
    assert first.max_regret is None
    assert first.expected_regret is not None
    assert found.minimax_regret != first.name
    assert "inf" in str(found)


# ---------------------------------------------------------------- interruption


@pytest.mark.parametrize("after", [2, 4])
def test_an_interrupt_keeps_the_blocks_that_are_done(
    after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draws_module, "BLOCK", 2)

    def stop(what: str, done: int, of: int) -> None:
        assert (what, of) == ("draws", 6)
        if done >= after:
            raise KeyboardInterrupt

    options: dict[str, Any] = {"seed": 2, "ensemble": ENSEMBLE, "workers": 1}
    found = robust(tiny_envelope(), draws=6, progress=stop, **options)
    assert (found.draws, found.draws_asked) == (after, 6)
    assert f"the choice in {after} draws of the 6 asked for" in str(found)
    whole = robust(tiny_envelope(), draws=after, **options)
    assert found.model_copy(update={"draws_asked": after}) == whole


def test_an_interrupt_before_the_first_block_goes_on() -> None:
    def stop(what: str, done: int, of: int) -> None:
        if what == "draws":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        robust(tiny_envelope(), draws=4, progress=stop, workers=1)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"draws": 0}, r"draws=0 must be from 1 to 100000; nearest: 1\."),
        ({"seed": -1}, r"seed=-1 must be at least 0; nearest: 0\."),
        ({"workers": 0}, "workers=0 must be at least 1"),
        ({"uncertain": ("law", "law", "luck")}, "must list some of"),
        ({"uncertain": ("luck",)}, r"uncertain=\('luck',\) must list some of law, stack, residual"),
        ({"uncertain": "law"}, "uncertain='law' must list some of"),
        ({"uncertain": ()}, r"uncertain=\(\) must list some of"),
        ({"draws": 41, "ensemble": ENSEMBLE}, "holds 40 laws and draws=41; nearest: 40"),
        (
            {"draws": 1, "ensemble": LawEnsemble.of(load_law("chinchilla-epoch"))},
            "of a chinchilla law, and the envelope has a joint law",
        ),
    ],
)
def test_bad_input_is_one_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(MosaicError, match=words) as error:
        robust(tiny_envelope(), **options)
    assert len(str(error.value).splitlines()) == 1


def test_a_law_of_which_nobody_said_how_sure_it_is() -> None:
    envelope = tiny_envelope(law="chinchilla-epoch")
    with pytest.raises(MosaicError, match=r"give an ensemble of it .*, or leave 'law' out"):
        robust(envelope, draws=2)
    check_consistent(robust(envelope, draws=2, uncertain=("stack", "residual")))
    laws = (load_law("chinchilla-epoch"), load_law("chinchilla-hoffmann"))
    ensemble = LawEnsemble(laws=laws, source="both", method="by hand", basis="ASSUMED", seed=None)
    check_consistent(robust(envelope, draws=2, ensemble=ensemble))


def test_a_document_that_is_no_answer() -> None:
    with pytest.raises(MosaicError, match="Not an answer of robust"):
        Robust.from_json("{}")
    found = robust(tiny_envelope(), draws=2)
    with pytest.raises(MosaicError, match="'nothing' is none of the"):
        found.candidate("nothing")


def test_several_batches_are_refused() -> None:
    worth = {"kind": "constant", "batch_tokens": 3e4, "reference_batch_tokens": 1e4}
    envelope = tiny_envelope(critical_batch=worth, global_batches=[32, 64])
    with pytest.raises(MosaicError, match="global_batches lists several batches"):
        robust(envelope, draws=2)


def test_more_draws_than_memory_would_hold() -> None:
    many = tiny_ladder(
        q=list(range(1, 9)),
        n_experts=list(range(1, 17)),
        top_k=[1, 2],
        expert_split=[1, 2, 4],
    )
    n = len(Problem(tiny_envelope(candidates=many)).architectures)
    with pytest.raises(MosaicError, match=rf"nearest: {30_000_000 // n}\.$"):
        robust(tiny_envelope(candidates=many), draws=100_000)


def test_progress_counts_the_moves_of_the_laws_and_the_draws() -> None:
    seen: dict[str, list[tuple[int, int]]] = {}
    robust(
        tiny_envelope(),
        draws=7,
        workers=1,
        progress=lambda what, done, of: seen.setdefault(what, []).append((done, of)),
    )
    assert set(seen) == {"laws", "draws"}
    for counts in seen.values():
        done = [d for d, _ in counts]
        assert done == sorted(done)
        assert counts[-1][0] == counts[-1][1]
    assert seen["draws"][-1] == (7, 7)
