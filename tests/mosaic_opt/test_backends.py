"""Every registered backend keeps the contract; the interface makes no claim by default."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from math import inf
from pathlib import Path

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
from mosaic_opt.backends.branch import BranchAndBound
from mosaic_opt.backends.cpsat.search import CpSat
from mosaic_opt.backends.enumerate import Enumerate
from mosaic_opt.backends.gp import GeometricProgram
from mosaic_opt.backends.registry import BACKENDS, availability, backend_class, resolve
from mosaic_opt.console import standing
from mosaic_opt.errors import MosaicError
from mosaic_opt.outcome import Outcome
from mosaic_opt.problem import Problem
from mosaic_opt.solver import solve
from mosaic_opt.testing import BackendContract

from .strategies import tiny_envelope

ROOT = Path(__file__).resolve().parent.parent.parent


class TestEnumerate(BackendContract):
    name = "enumerate"


class TestEnumerateOnOneWorker(BackendContract):
    name = "enumerate"

    def make(self) -> Backend:
        return Enumerate(workers=1)


class TestBranchAndBound(BackendContract):
    name = "branch"


class TestBranchAndBoundOnOneWorker(BackendContract):
    name = "branch"

    def make(self) -> Backend:
        return BranchAndBound(workers=1)


class TestGeometricProgram(BackendContract):
    name = "gp"


class TestGeometricProgramFromBounds(BackendContract):
    name = "gp"

    def make(self) -> Backend:
        return GeometricProgram(mfu="bound")


class TestCpSat(BackendContract):
    name = "cpsat"


class TestCpSatOnTwoWorkers(BackendContract):
    name = "cpsat"

    def make(self) -> Backend:
        return CpSat(workers=2, seed=7)


def test_every_registered_backend_has_a_contract_test() -> None:
    tested = {kind.name for kind in BackendContract.__subclasses__()}
    assert tested == set(BACKENDS), "derive a test class from BackendContract for each backend"


@pytest.mark.parametrize("name", BACKENDS)
def test_registry_leads_to_the_backend(name: str) -> None:
    kind = backend_class(name)
    assert kind.__module__ + ":" + kind.__name__ == BACKENDS[name]
    assert not kind.__abstractmethods__
    assert availability()[name] is kind.availability()


def test_listing_backends_imports_no_native_code() -> None:
    code = (
        "import sys\n"
        "from mosaic_opt.backends.registry import BACKENDS\n"
        "bad = {'ortools', 'cvxpy', 'torch'} & set(sys.modules)\n"
        "bad |= {m for m in BACKENDS.values() if m.partition(':')[0] in sys.modules}\n"
        "sys.stdout.write(' '.join(bad))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_resolve_takes_names_and_backends() -> None:
    assert resolve("enumerate") == Enumerate()
    mine = Enumerate(workers=2)
    assert resolve(mine) is mine


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(MosaicError, match="no backend 'simplex'; there are enumerate"):
        resolve("simplex")


def test_unavailable_backend_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Enumerate, "availability", classmethod(lambda cls: Availability.NOT_INSTALLED)
    )
    with pytest.raises(MosaicError, match=r"enumerate cannot run here: not installed\.$"):
        resolve("enumerate")


# ---------------------------------------------------------------- the interface


def test_backend_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Backend()  # type: ignore[abstract]


@pytest.mark.parametrize("missing", ["availability", "search"])
def test_half_a_backend_is_abstract(missing: str) -> None:
    methods = {"availability": classmethod(lambda cls: Availability.AVAILABLE), "search": print}
    del methods[missing]
    half = type("Half", (Backend,), methods)
    with pytest.raises(TypeError, match=missing):
        half()


CLAIMS = {
    "incumbent": None,
    "dual_bound": float("inf"),
    "termination": Termination.EXHAUSTED,
    "outcomes": (),
    "unexamined": (),
    "discarded": (),
}


def test_report_has_exactly_these_claims() -> None:
    assert {field.name for field in dataclasses.fields(Report)} == set(CLAIMS)
    Report(**CLAIMS)


@pytest.mark.parametrize("missing", CLAIMS)
def test_no_claim_has_a_default(missing: str) -> None:
    with pytest.raises(TypeError, match=missing):
        Report(**{name: value for name, value in CLAIMS.items() if name != missing})


def test_report_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Report(**CLAIMS).dual_bound = 0.0  # type: ignore[misc]


def test_exact_is_incumbent_and_bound() -> None:
    assert Capability.EXACT == Capability.INCUMBENT | Capability.BOUND
    assert Capability.INCUMBENT not in Capability.BOUND


@pytest.mark.parametrize("state", Availability)
def test_only_available_is_true(state: Availability) -> None:
    assert bool(state) == (state is Availability.AVAILABLE)


@pytest.mark.parametrize("workers", [0, -1])
def test_impossible_workers_are_refused(workers: int) -> None:
    with pytest.raises(MosaicError, match=rf"workers={workers} must be at least 1"):
        Enumerate(workers=workers)


# ---------------------------------------------------------------- what a bar shows


def test_a_bar_shows_the_best_the_bound_and_the_gap() -> None:
    problem = Problem(tiny_envelope())
    best = Enumerate(workers=1).search(problem, Limits()).incumbent
    assert best is not None

    def words(incumbent: Outcome | None, bound: float) -> str:
        return standing(Progress(done=1, of=2, incumbent=incumbent, bound=bound))

    loss, below = f"best {best.loss:.4f}", best.loss - 0.25
    assert words(None, -inf) == ""
    assert words(None, inf) == ""
    assert words(best, -inf) == f", {loss}"
    assert words(None, below) == f", bound {below:.4f}"
    assert words(best, below) == f", {loss}, bound {below:.4f}, gap 0.2500"


# ---------------------------------------------------------------- solve trusts no backend


@dataclasses.dataclass(frozen=True)
class _Liar(Backend):
    """Claims that the worst feasible candidate is optimal."""

    name = "liar"
    provides = Capability.EXACT

    @classmethod
    def availability(cls) -> Availability:
        return Availability.AVAILABLE

    def search(self, problem: Problem, limits: Limits, *, progress: object = None) -> Report:
        honest = Enumerate(workers=1).search(problem, limits)
        worst = max((o for o in honest.outcomes if o.feasible), key=lambda o: o.loss)
        return dataclasses.replace(honest, incumbent=worst, dual_bound=worst.loss)


def test_solve_grants_optimal_only_after_the_checks() -> None:
    solution = solve(tiny_envelope(), backend=_Liar())
    assert solution.status == "feasible"
    assert not solution.certificate.certified
    assert [c.name for c in solution.certificate.checks if not c.passed] == ["incumbent_is_best"]
