"""A law of the user's own class: its terms in the relaxation, its value in an envelope."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lawfit import KRAJEWSKI_MOE, LawEnsemble, Monomial, ScalingLaw
from lawfit.laws import kind_of
from mosaic_opt.envelope import Envelope, json_schema
from mosaic_opt.relaxation import terms_of
from mosaic_opt.result import Solution, Status
from mosaic_opt.solver import solve
from mosaic_opt.studies.robust import robust

from .strategies import tiny_envelope


class LevelLaw(ScalingLaw):
    """A law of a user, as a test writes it."""

    a: float

    @property
    def floor_terms(self) -> tuple[Monomial, ...]:
        return (
            Monomial("capacity", self.a, n_total=-0.1, n_active=-0.2, expert_split=0.05),
            Monomial("constant", self.e),
        )


LAWS = [KRAJEWSKI_MOE, LevelLaw(a=40.0, b=300.0, beta=0.3, e=1.2, source="test")]


@pytest.mark.parametrize("law", LAWS, ids=["krajewski", "own"])
@given(
    n_total=st.floats(1e9, 1e13),
    density=st.floats(0.01, 1.0),
    tokens=st.floats(1e9, 1e14),
    split=st.floats(1.0, 16.0),
)
def test_terms_add_up_to_the_loss(
    law: ScalingLaw, n_total: float, density: float, tokens: float, split: float
) -> None:
    log_k, powers = terms_of(law)
    logs = np.log([n_total, density, tokens, split])
    loss = law.loss(n_total=n_total, n_active=n_total * density, tokens=tokens, expert_split=split)
    assert float(np.exp(log_k + powers @ logs).sum()) == pytest.approx(loss, rel=1e-9)


@pytest.mark.parametrize("law", LAWS, ids=["krajewski", "own"])
def test_an_envelope_takes_it_as_a_value(law: ScalingLaw) -> None:
    envelope = tiny_envelope(law=law)
    assert envelope.law is law
    found = solve(envelope)
    assert found.status is Status.OPTIMAL
    assert found.optimum is not None
    best = found.optimum.architecture
    point = {name: float(str(best[name])) for name in ("n_total", "n_active", "expert_split")}
    value = law.loss(**point, tokens=found.optimum.tokens)
    assert found.optimum.loss == pytest.approx(value, rel=1e-12)
    assert found.provenance["law"]["kind"] == kind_of(law)  # type: ignore[index]
    assert found.provenance["envelope"]["law"]["a"] == law.model_dump()["a"]  # type: ignore[index]
    assert Solution.from_json(found.to_json()) == found
    laws = tuple(law.model_copy(update={"e": 1.2 + 0.01 * k}) for k in range(4))
    draws = LawEnsemble(laws=laws, source="test", method="by hand", basis="ASSUMED", seed=None)
    held = robust(envelope, draws=4, ensemble=draws, uncertain=("law",))
    assert held.candidate(str(found.optimum.architecture["name"])).probability == 1.0


@pytest.mark.parametrize("law", LAWS, ids=["krajewski", "own"])
def test_the_geometric_program_bounds_it(law: ScalingLaw) -> None:
    pytest.importorskip("cvxpy")
    envelope = tiny_envelope(law=law)
    best = solve(envelope).optimum
    bound = solve(envelope, backend="gp").bounds.dual
    assert best is not None
    assert bound is not None
    assert 0.9 * best.loss < bound <= best.loss


def test_no_document_is_read_into_it() -> None:
    assert "LevelLaw" not in str(json_schema())
    assert "ScalingLaw" not in json_schema()["$defs"]
    document = tiny_envelope(law=LAWS[1]).model_dump(mode="json")
    with pytest.raises(ValueError, match="the key 'kind' is missing"):
        Envelope.model_validate(document)
