"""What every search backend keeps to; each one has a test class that derives from this.

Needs pytest, which nothing else of the package imports. A backend of another distribution is
tested the same way (docs/howto/backends.md).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from mosaic_opt.backends.base import (
    Availability,
    Backend,
    Capability,
    Limits,
    Progress,
    Report,
    Termination,
)
from mosaic_opt.backends.registry import backend_class
from mosaic_opt.certificate import certify
from mosaic_opt.envelope import parse_envelope
from mosaic_opt.problem import Problem
from perfmodel.ladders import ladder

SMALL: dict[str, Any] = {
    "cluster": {"hardware": "p6-b200", "nodes": 1},
    "window_days": 2.0,
    "batch": {"global_batch": 16, "seq_len": 1024},
    "candidates": {
        "kind": "ladder",
        "q": [1, 2],
        "n_experts": [4, 8],
        "top_k": [1, 2],
        "expert_split": [1],
    },
    "plans": {"max_tp": 2, "max_cp": 1, "micro_batch": [1], "recompute": ["none", "full"]},
}


def problem(**changes: Any) -> Problem:
    """Return a problem of 8 candidates on one node, with other values at the top level."""
    return Problem(parse_envelope(SMALL | changes))


def scalar_optimum(p: Problem) -> tuple[float, int]:
    """Least loss and its candidate, every plan priced by the scalar model."""
    best = (math.inf, -1)
    for index in range(len(p.architectures)):
        for row in p.legal_rows(index):
            priced = p.reprice(index, p.table.plan(int(row)))
            if priced.memory_bytes <= p.envelope.memory_cap_bytes:
                tokens = p.tokens(index, priced.step_time_s).tokens
                if not math.isnan(tokens):
                    best = min(best, (p.loss(index, tokens), index))
    return best


class BackendContract:
    """Derive, and set ``name`` to the backend's name in the registry."""

    name: ClassVar[str]

    def make(self) -> Backend:
        """Return the backend with its default options."""
        return backend_class(self.name)()

    @pytest.fixture(autouse=True)
    def _available(self) -> None:
        if not backend_class(self.name).availability():
            pytest.skip(f"{self.name} cannot run here")

    def search(self, p: Problem, progress: Callable[[Progress], None] | None = None) -> Report:
        return self.make().search(p, Limits(), progress=progress)

    @property
    def exact(self) -> bool:
        return backend_class(self.name).provides == Capability.EXACT

    @property
    def finds(self) -> bool:
        """Whether it looks for an incumbent; one that does not examines no candidate."""
        return Capability.INCUMBENT in backend_class(self.name).provides

    # ------------------------------------------------------------ what it is

    def test_is_registered_under_its_name(self) -> None:
        assert backend_class(self.name).name == self.name

    def test_is_a_final_frozen_dataclass(self) -> None:
        kind = backend_class(self.name)
        assert issubclass(kind, Backend)
        assert dataclasses.is_dataclass(kind)
        assert kind.__dataclass_params__.frozen
        assert getattr(kind, "__final__", False)
        assert all(field.kw_only for field in dataclasses.fields(kind))

    def test_two_with_the_same_options_are_equal(self) -> None:
        assert self.make() == self.make()
        assert hash(self.make()) == hash(self.make())

    def test_says_what_it_provides_and_whether_it_can_run(self) -> None:
        kind = backend_class(self.name)
        assert isinstance(kind.provides, Capability)
        assert kind.provides
        assert isinstance(kind.availability(), Availability)

    # ------------------------------------------------------------ what it answers

    def test_incumbent_is_the_scalar_optimum(self) -> None:
        p = problem()
        report = self.search(p)
        loss, index = scalar_optimum(p)
        if not self.finds:
            assert report.incumbent is None
            assert not report.outcomes
            return
        assert report.incumbent is not None
        assert report.incumbent.loss >= loss * (1.0 - 1e-9)
        if self.exact:
            assert report.incumbent.loss == pytest.approx(loss, rel=1e-9)
            assert report.incumbent.index == index

    def test_bound_is_below_the_scalar_optimum(self) -> None:
        p = problem()
        assert self.search(p).dual_bound <= scalar_optimum(p)[0] * (1.0 + 1e-9)

    def test_exact_search_is_certified(self) -> None:
        for changes in ({}, {"memory_fraction": 0.02}, {"extrapolation": "flag"}):
            p = problem(**changes)
            report = self.search(p)
            certificate = certify(p, report)
            if self.exact:
                assert certificate.certified, certificate
                assert report.termination is Termination.EXHAUSTED
            elif report.unexamined:
                assert not certificate.certified, certificate

    def test_every_pair_is_accounted_for(self) -> None:
        p = problem()
        report = self.search(p)
        counts = [o.counts for o in report.outcomes] + [d.counts for d in report.discarded]
        pairs = sum(c.priced + c.infeasible + c.discarded for c in counts)
        assert pairs + len(report.unexamined) * len(p.table) == p.size
        assert all(c.plans == len(p.table) for c in counts)

    def test_outcomes_are_in_the_order_of_the_problem(self) -> None:
        p = problem()
        report = self.search(p)
        examined = [o.index for o in report.outcomes]
        discarded = [d.index for d in report.discarded]
        assert examined == sorted(examined)
        assert discarded == sorted(discarded)
        everyone = sorted([*examined, *discarded, *report.unexamined])
        assert everyone == list(range(len(p.architectures)))

    def test_discarded_candidates_are_worse_than_every_tie(self) -> None:
        p = problem()
        report = self.search(p)
        if not report.discarded:
            return
        assert report.incumbent is not None
        bar = report.incumbent.loss + p.loss_tolerance(report.incumbent)
        for discarded in report.discarded:
            outcome = p.solve_candidate(discarded.index)
            assert not outcome.loss <= bar
            assert not outcome.step_s < discarded.bound_s

    def test_same_report_twice(self) -> None:
        p = problem()
        assert repr(self.search(p)) == repr(self.search(p))

    def test_equal_candidates_tie_by_position(self) -> None:
        one = json.loads(ladder(1, 4, 1, 1).model_dump_json())
        models = [one | {"name": n} for n in ("c", "b", "a")]
        report = self.search(problem(candidates={"kind": "explicit", "models": models}))
        if not self.finds:
            assert report.incumbent is None
            return
        assert report.incumbent is not None
        assert report.incumbent.index == min(o.index for o in report.outcomes)
        assert report.incumbent.index == 0 or not self.exact

    # ------------------------------------------------------------ where nothing fits

    @pytest.mark.parametrize(
        "changes",
        [
            {"memory_fraction": 1e-6},
            {"window_days": 1e-9, "tokens": {"min_tokens_per_parameter": 20.0}},
            {"plans": {"pp": [3]}},
            {"candidates": SMALL["candidates"] | {"min_sparsity": 0.999}},
        ],
        ids=["memory", "tokens", "layouts", "candidates"],
    )
    def test_nothing_feasible(self, changes: dict[str, Any]) -> None:
        p = problem(**changes)
        report = self.search(p)
        assert report.incumbent is None
        assert not any(o.feasible for o in report.outcomes)
        if self.exact:
            assert report.dual_bound == math.inf
            assert certify(p, report).certified

    # ------------------------------------------------------------ where it is stopped

    def test_interrupt_keeps_what_was_done(self) -> None:
        def interrupt(state: Progress) -> None:
            if state.done >= 3:
                raise KeyboardInterrupt

        p = problem()
        report = self.search(p, interrupt)
        done = len(report.outcomes) + len(report.discarded)
        left = bool(report.unexamined)  # bounds may have settled the rest before it came
        assert report.termination is (Termination.INTERRUPTED if left else Termination.EXHAUSTED)
        assert left or report.discarded
        assert len(report.unexamined) == len(p.architectures) - done
        assert done >= 3 or not self.finds
        if self.finds:
            losses = [o.loss for o in report.outcomes if o.feasible]
            assert report.incumbent is not None
            assert report.incumbent.loss == min(losses)
        assert report.dual_bound <= scalar_optimum(p)[0] * (1.0 + 1e-9)
        assert certify(p, report).certified == (not left)

    def test_time_limit_is_kept(self) -> None:
        p = problem()
        report = self.make().search(p, Limits(time_s=1e-9))
        assert report.termination is Termination.TIME_LIMIT
        assert report.unexamined
        assert report.dual_bound <= scalar_optimum(p)[0]
        assert not certify(p, report).certified

    def test_other_errors_are_not_swallowed(self) -> None:
        def fail(state: Progress) -> None:
            raise LookupError(state.done)

        with pytest.raises(LookupError):
            self.search(problem(), fail)

    def test_progress_is_monotone(self) -> None:
        seen: list[Progress] = []
        p = problem()
        report = self.search(p, seen.append)
        assert [s.done for s in seen] == sorted(s.done for s in seen)
        assert {s.of for s in seen} == {len(p.architectures)}
        bounds = [s.bound for s in seen]
        assert bounds == sorted(bounds)
        assert all(s.bound <= report.dual_bound for s in seen)
        incumbents = [s.incumbent.loss for s in seen if s.incumbent is not None]
        assert incumbents == sorted(incumbents, reverse=True)
