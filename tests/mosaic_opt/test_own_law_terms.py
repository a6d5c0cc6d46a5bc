"""A posynomial law beyond the ones that an envelope names reaches the relaxation by its terms."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lawfit import KRAJEWSKI_MOE, Monomial, ScalingLaw
from mosaic_opt.relaxation import terms_of


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
