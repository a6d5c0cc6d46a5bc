"""What a token is worth at a batch: the laws of the model, and the one place where it enters."""

from __future__ import annotations

from math import inf, nextafter
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from lawfit import CHINCHILLA_EPOCH, MOSAIC_TABLE2
from mosaic_opt.allocation.inverse import invert
from mosaic_opt.allocation.phases import phases
from mosaic_opt.allocation.regime import allocation_law
from mosaic_opt.backends.base import Limits
from mosaic_opt.backends.enumerate import Enumerate
from mosaic_opt.envelope import Envelope, parse_envelope
from mosaic_opt.errors import EnvelopeError, MosaicError
from mosaic_opt.problem import Problem
from mosaic_opt.report import render_text
from mosaic_opt.result import Status
from mosaic_opt.solver import solve
from mosaic_opt.token_efficiency import CriticalBatch

from .strategies import small_envelopes, solved_tiny, tiny, tiny_envelope

ADAPTER: TypeAdapter[Any] = TypeAdapter(CriticalBatch)

CONSTANT = {"kind": "constant", "batch_tokens": 2e5, "reference_batch_tokens": 1e4}
TOKENS = CONSTANT | {"kind": "tokens", "at_tokens": 1e10, "exponent": 0.47}
LOSS = CONSTANT | {"kind": "loss", "at_loss": 2.5, "exponent": 4.7}
KINDS = [CONSTANT, TOKENS, LOSS]


def loss_of(tokens: float) -> float:
    """The law's loss of one model in its tokens [nats/token]."""
    return float(MOSAIC_TABLE2.loss(n_total=2e10, n_active=1e9, tokens=tokens, expert_split=4.0))


batches = st.floats(3.0, 8.0).map(lambda x: 10.0**x)
token_counts = st.floats(8.0, 13.0).map(lambda x: 10.0**x)


@st.composite
def rules(draw: st.DrawFn) -> dict[str, Any]:
    rule = dict(draw(st.sampled_from(KINDS)))
    rule["batch_tokens"] = draw(batches)
    rule["reference_batch_tokens"] = draw(st.one_of(st.just(0.0), batches))
    if rule["kind"] == "tokens":
        rule["exponent"] = draw(st.floats(0.0, 0.9))
        rule["at_tokens"] = draw(token_counts)
    if rule["kind"] == "loss":
        rule["exponent"] = draw(st.floats(0.0, 4.8))
        rule["at_loss"] = draw(st.floats(0.5, 5.0))
    return rule


# ---------------------------------------------------------------- the laws of the model


@given(rules(), token_counts)
def test_at_the_batch_of_the_laws_runs_a_token_is_a_token(rule: dict[str, Any], d: float) -> None:
    assume(rule["reference_batch_tokens"] > 0.0)
    found = ADAPTER.validate_python(rule).effective(d, rule["reference_batch_tokens"], loss_of)
    assert found == pytest.approx(d, rel=1e-12)


@given(rules(), token_counts, batches)
def test_tokens_for_undoes_effective(rule: dict[str, Any], d: float, batch: float) -> None:
    one = ADAPTER.validate_python(rule)
    effective = one.effective(d, batch, loss_of)
    assume(effective > 1e-50)
    assert one.tokens_for(effective, batch, loss_of) == pytest.approx(d, rel=1e-10)


@given(rules(), token_counts, st.floats(1.0, 10.0), batches)
def test_more_tokens_never_count_as_fewer(
    rule: dict[str, Any], d: float, factor: float, batch: float
) -> None:
    one = ADAPTER.validate_python(rule)
    at = one.effective(d, batch, loss_of)
    assert one.effective(nextafter(d, inf), batch, loss_of) >= at  # not even by a rounding
    assert one.effective(factor * d, batch, loss_of) >= at


@given(rules(), token_counts, batches, st.floats(1.0, 100.0))
def test_a_token_of_a_larger_batch_is_never_worth_more(
    rule: dict[str, Any], d: float, batch: float, factor: float
) -> None:
    one = ADAPTER.validate_python(rule)
    larger = one.effective(d, factor * batch, loss_of)
    assert larger <= one.effective(d, batch, loss_of) * (1.0 + 1e-12)


@given(batches, batches, token_counts)
def test_steps_and_tokens_trade_as_mccandlish_has_it(
    critical: float, batch: float, d: float
) -> None:
    """With B_ref = 0 the law's tokens are E_min, and (S/S_min - 1)(E/E_min - 1) = 1."""
    rule = {"kind": "constant", "batch_tokens": critical, "reference_batch_tokens": 0.0}
    least = ADAPTER.validate_python(rule).effective(d, batch, loss_of)
    steps, fewest = d / batch, least / critical
    product = (steps / fewest - 1.0) * (d / least - 1.0)
    assert product == pytest.approx(1.0, rel=1e-5 * max(1.0, critical / batch, batch / critical))


@given(token_counts, batches)
def test_a_power_of_zero_is_the_constant(d: float, batch: float) -> None:
    flat = ADAPTER.validate_python(TOKENS | {"exponent": 0.0})
    constant = ADAPTER.validate_python(CONSTANT)
    found = flat.effective(d, batch, loss_of)
    assert found == pytest.approx(constant.effective(d, batch, loss_of), rel=1e-12)


def test_a_run_at_the_critical_batch_needs_twice_the_least_tokens() -> None:
    rule = ADAPTER.validate_python(CONSTANT | {"reference_batch_tokens": 0.0})
    assert rule.effective(3e10, rule.batch_tokens, loss_of) == 1.5e10


def test_the_critical_batch_follows_its_power() -> None:
    tokens, loss = ADAPTER.validate_python(TOKENS), ADAPTER.validate_python(LOSS)
    assert tokens.at(1e10, loss_of) == pytest.approx(2e5)
    assert tokens.at(1e12, loss_of) == pytest.approx(2e5 * 100.0**0.47)
    ratio = loss_of(1e10) / loss_of(1e12)
    assert loss.at(1e12, loss_of) / loss.at(1e10, loss_of) == pytest.approx(ratio**4.7)


# ---------------------------------------------------------------- where it enters


def test_without_it_nothing_is_said_and_the_law_sees_the_tokens() -> None:
    problem, best = Problem(tiny_envelope()), solved_tiny().optimum
    assert problem.efficiency(0, 1e10) is None
    assert best is not None
    assert best.token_efficiency is None
    assert best.loss_source == "FITTED"
    assert "worth" not in render_text(solved_tiny())


@settings(max_examples=25)
@given(small_envelopes(), rules())
def test_answers_are_certified_and_bounds_are_below_them(
    spec: dict[str, Any], rule: dict[str, Any]
) -> None:
    problem = Problem(parse_envelope(spec | {"critical_batch": rule}))
    law, batch = problem.envelope.law, float(problem.envelope.batch.tokens)
    plain = Problem(parse_envelope(spec))
    report = Enumerate(workers=1).search(problem, Limits())
    for outcome in report.outcomes:
        if not outcome.feasible:
            continue
        i = outcome.index
        size = {"n_total": float(problem.n_total(i)), "n_active": float(problem.n_active(i))}

        def of(tokens: float, size: dict[str, float] = size, i: int = i) -> float:
            return float(law.loss(**size, tokens=tokens, expert_split=problem.expert_split(i)))

        counted = problem.envelope.critical_batch.effective(outcome.tokens, batch, of)
        assert outcome.loss == pytest.approx(of(counted), rel=1e-12)
        assert outcome.tokens == plain.tokens(i, outcome.step_s).tokens  # D itself is what it was
        assert problem.optimistic_loss(i) <= outcome.loss
    solution = solve(problem.envelope)
    assert solution.status in (Status.OPTIMAL, Status.INFEASIBLE)
    if solution.optimum is not None:
        worth = solution.optimum.token_efficiency
        assert worth is not None
        assert worth.tokens == solution.optimum.tokens
        assert worth.batch_tokens == batch


@pytest.mark.parametrize("rule", KINDS)
def test_backends_agree_on_it(rule: dict[str, Any]) -> None:
    pytest.importorskip("ortools")
    envelope = tiny_envelope(critical_batch=rule)
    one, other = solve(envelope), solve(envelope, backend="cpsat")
    assert one.optimum is not None
    assert other.optimum is not None
    assert one.optimum.loss == other.optimum.loss
    assert one.optimum.plan == other.optimum.plan


def test_flags_of_the_law_are_those_of_the_tokens_that_it_sees() -> None:
    """16 times fewer of the law's tokens lie below its runs, whatever the run trains on."""
    envelope = tiny_envelope(critical_batch=CONSTANT | {"batch_tokens": 1.0, "source": "FITTED"})
    best = solve(envelope).optimum
    assert best is not None
    assert best.token_efficiency is not None
    assert best.loss_source == "FITTED"
    seen = f"law: tokens is {best.token_efficiency.tokens_effective:.4g} [token]"
    assert any(flag.startswith(seen) for flag in best.flags)


def test_the_page_says_what_the_tokens_are_worth_and_on_whose_word() -> None:
    solution = solve(tiny_envelope(critical_batch=CONSTANT | {"origin": "a pilot of ours"}))
    page = " ".join(render_text(solution).split())
    share = (2e5 + 1e4) / (2e5 + 32 * 1024)
    assert f"tokens of the law's, {100 * share:.1f}%: batch 3.277e+04, critical batch" in page
    assert "[ASSUMED; a pilot of ours]" in page
    assert "nats/token [ASSUMED]" in page


# ---------------------------------------------------------------- other readers of a loss


def test_phases_and_invert_take_a_constant_one_as_solve_does() -> None:
    envelope = tiny_envelope(critical_batch=CONSTANT)
    best = solve(envelope).optimum
    assert best is not None
    (phase,) = phases(envelope, days_from=0.999999, days_to=1.0).phases
    assert phase.architecture == best.step.architecture["name"]
    assert phase.loss_to == pytest.approx(best.loss, rel=1e-12)
    found = invert(envelope, best.loss).best
    assert found is not None
    assert found.days == pytest.approx(1.0, rel=1e-9)
    assert phases(envelope).loss_source == "ASSUMED"


@pytest.mark.parametrize("rule", [TOKENS, LOSS])
def test_phases_and_invert_refuse_one_that_moves(rule: dict[str, Any]) -> None:
    envelope = tiny_envelope(critical_batch=rule)
    for ask in (lambda: phases(envelope), lambda: invert(envelope, 2.0)):
        with pytest.raises(MosaicError, match=r"bends the loss .* needs kind 'constant'"):
            ask()


def test_what_cannot_honour_it_refuses_it() -> None:
    envelope = tiny_envelope(critical_batch=CONSTANT)
    with pytest.raises(MosaicError, match="critical_batch is not part of Appendix D"):
        allocation_law(envelope)
    pytest.importorskip("cvxpy")
    from mosaic_opt.backends.gp import relax

    for ask in (lambda: relax(envelope), lambda: solve(envelope, backend="gp")):
        with pytest.raises(MosaicError, match="no convex relaxation; leave it out"):
            ask()


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"critical_batch": CONSTANT | {"kind": "power"}}, "critical_batch=.*'constant'"),
        ({"critical_batch": CONSTANT | {"batch_tokens": 0.0}}, "batch_tokens=0.0"),
        (
            {"critical_batch": {"kind": "constant", "batch_tokens": 1e6}},
            "reference_batch_tokens is",
        ),
        ({"critical_batch": TOKENS | {"exponent": 1.0}}, "exponent=1.0: .* nearest: 0.9"),
        ({"critical_batch": LOSS | {"exponent": 5.0}}, "exponent=5 times .* nearest: 4.826"),
        ({"global_batches": [32, 64]}, "global_batches needs critical_batch"),
        (
            {"global_batches": [64, 128], "critical_batch": CONSTANT},
            "batch.global_batch=32 must be one of global_batches; nearest: 64",
        ),
    ],
)
def test_one_sentence(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(EnvelopeError, match=says) as caught:
        parse_envelope(tiny(**changes))
    assert "\n" not in str(caught.value)


def test_the_bound_of_the_exponent_is_that_of_the_law() -> None:
    chinchilla = {"law": "chinchilla-epoch", "critical_batch": LOSS | {"exponent": 2.7}}
    assert isinstance(tiny_envelope(**chinchilla), Envelope)
    assert 2.8 * CHINCHILLA_EPOCH.beta > 1.0
    with pytest.raises(EnvelopeError, match="must be below 1"):
        tiny_envelope(law="chinchilla-epoch", critical_batch=LOSS | {"exponent": 2.8})
