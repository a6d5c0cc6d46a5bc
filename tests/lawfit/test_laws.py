"""The laws against printed values, finite differences and their own inverses."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lawfit import (
    CHINCHILLA_EPOCH,
    CHINCHILLA_HOFFMANN,
    MOSAIC_TABLE2,
    MOSAIC_TABLE2_PRINTED,
    ChinchillaLaw,
    JointLaw,
    PerSplitLaw,
    ScalingLaw,
)

PER_SPLIT = MOSAIC_TABLE2.at_split(4.0)
LAWS = [MOSAIC_TABLE2, PER_SPLIT, CHINCHILLA_EPOCH, CHINCHILLA_HOFFMANN]
VARIABLES = ("n_total", "n_active", "tokens", "expert_split")

points = st.builds(
    lambda total, density, tokens, split: {
        "n_total": total,
        "n_active": total * density,
        "tokens": tokens,
        "expert_split": split,
    },
    st.floats(1e8, 1e13),
    st.floats(0.01, 0.999),
    st.floats(1e9, 1e14),
    st.floats(1.0, 16.0),
)
prefactors = st.floats(0.0, 100.0)
signed = st.floats(-0.5, 0.5)
positive = st.floats(0.01, 0.5)
any_joint_law = st.builds(
    JointLaw,
    a=prefactors,
    b=st.floats(0.1, 1e4),
    c=prefactors,
    j=prefactors,
    e=prefactors,
    alpha=positive,
    beta=positive,
    lambda_=signed,
    delta=signed,
    gamma=signed,
    eta=signed,
    source=st.just("test"),
)


def legal_for(law: ScalingLaw, point: dict[str, float]) -> dict[str, float]:
    """Move a point to the one expert split of a per-split law."""
    return {**point, "expert_split": law.expert_split} if isinstance(law, PerSplitLaw) else point


def without_tokens(point: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in point.items() if name != "tokens"}


def ladder_counts(q: int, routed: int, top_k: int, split: float) -> tuple[float, float]:
    """Non-embedding (N_tot, N_act) of the paper's ladder, written out independently."""
    layers, heads, d = 4 * q, 4 * q, 512 * q
    d_ff = 2.5 * d
    attention = 2 * d**2 + 256 * d * math.gcd(8, heads) + 2 * d
    expert = 3 * d * d_ff / split

    def count(experts: int) -> float:
        moe = (layers - 1) * ((experts + 1) * expert + d * routed)
        return layers * attention + 3 * d * d_ff + moe + d

    return count(routed), count(top_k)


def test_loss_of_the_published_optimum() -> None:
    n_total, n_active = ladder_counts(q=12, routed=96, top_k=2, split=4)
    assert n_total == pytest.approx(327.22e9, rel=1e-4)
    assert n_active == pytest.approx(14.52e9, rel=1e-3)
    tokens = 9.95328e23 * 0.1238 / (6 * n_active)
    loss = MOSAIC_TABLE2.loss(n_total=n_total, n_active=n_active, tokens=tokens, expert_split=4)
    assert round(loss, 4) == 1.3899


def test_loss_at_the_printed_figures_of_the_optimum() -> None:
    n_active = 14.5e9
    loss = MOSAIC_TABLE2.loss(
        n_total=n_active / (1 - 0.956),
        n_active=n_active,
        tokens=1.23e23 / (6 * n_active),
        expert_split=4,
    )
    assert loss == pytest.approx(1.38982, abs=5e-6)


@given(points)
def test_joint_loss_is_equation_10(point: dict[str, float]) -> None:
    law = MOSAIC_TABLE2
    n, d, g = point["n_total"], point["tokens"], point["expert_split"]
    r = point["n_active"] / n
    by_hand = (
        8.462 / n**0.1048
        + 88.32 / d**0.2070
        + 0.1828 / r**0.1249
        + 0.7123 / (r**0.5567 * n**0.1702 * g**0.9513)
        + 0.3129
    )
    assert law.loss(**point) == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize(
    ("law", "by_hand"),
    [
        (CHINCHILLA_EPOCH, 1.8172 + 482.01 / 7e10**0.3478 + 2085.43 / 1.4e12**0.3658),
        (CHINCHILLA_HOFFMANN, 1.69 + 406.4 / 7e10**0.34 + 410.7 / 1.4e12**0.28),
    ],
)
def test_chinchilla_loss_takes_active_parameters(law: ChinchillaLaw, by_hand: float) -> None:
    for n_total, split in ((7e10, 1.0), (9e11, 8.0)):
        loss = law.loss(n_total=n_total, n_active=7e10, tokens=1.4e12, expert_split=split)
        assert loss == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.source)
@given(point=points)
def test_gradient_equals_finite_differences(law: ScalingLaw, point: dict[str, float]) -> None:
    point = legal_for(law, point)
    gradient = law.gradient(**point)
    h = 1e-4
    for name in VARIABLES:
        if name == "expert_split" and isinstance(law, PerSplitLaw):
            assert gradient.expert_split == 0.0
            continue
        up, down = ({**point, name: point[name] * math.exp(step)} for step in (h, -h))
        assume(up["n_active"] <= up["n_total"])
        assume(down["n_active"] <= down["n_total"])
        difference = (law.loss(**up) - law.loss(**down)) / (2 * h)
        assert getattr(gradient, name) == pytest.approx(difference, rel=1e-6, abs=1e-10)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.source)
@given(point=points)
def test_tokens_for_inverts_loss(law: ScalingLaw, point: dict[str, float]) -> None:
    point = legal_for(law, point)
    tokens = law.tokens_for(law.loss(**point), **without_tokens(point))
    # Rounding of the loss to 1e-16 is magnified by loss / (beta * data term).
    data_term = law.b * point["tokens"] ** -law.beta
    rel = 1e-14 * law.loss(**point) / (law.beta * data_term)
    assert rel < 1e-5
    assert tokens == pytest.approx(point["tokens"], rel=rel)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.source)
@given(point=points, factor=st.floats(1.001, 1e3))
def test_more_tokens_lower_the_loss(
    law: ScalingLaw, point: dict[str, float], factor: float
) -> None:
    point = legal_for(law, point)
    more = {**point, "tokens": point["tokens"] * factor}
    assert law.floor(**without_tokens(point)) < law.loss(**more) < law.loss(**point)


@given(law=any_joint_law, point=points)
def test_loss_is_floor_plus_token_term(law: JointLaw, point: dict[str, float]) -> None:
    b, beta = law.token_term
    floor = law.floor(**without_tokens(point))
    assert law.loss(**point) == pytest.approx(floor + b * point["tokens"] ** -beta, rel=1e-12)
    assert floor == pytest.approx(
        sum(
            term.coefficient
            * math.prod(point[v] ** p for v, p in zip(VARIABLES, term.exponents, strict=True))
            for term in law.floor_terms
        ),
        rel=1e-9,
    )


@given(law=any_joint_law, point=points)
def test_law_at_one_split_equals_the_joint_law(law: JointLaw, point: dict[str, float]) -> None:
    folded = law.at_split(point["expert_split"])
    assert folded.expert_split == point["expert_split"]
    assert folded.loss(**point) == pytest.approx(law.loss(**point), rel=1e-12)


@given(law=any_joint_law, start=points, end=points, share=st.floats(0.0, 1.0))
def test_loss_is_convex_along_log_segments(
    law: JointLaw, start: dict[str, float], end: dict[str, float], share: float
) -> None:
    between = {v: start[v] ** (1 - share) * end[v] ** share for v in VARIABLES}
    between["n_active"] = min(between["n_active"], between["n_total"])
    chord = (1 - share) * law.loss(**start) + share * law.loss(**end)
    assert law.loss(**between) <= chord * (1 + 1e-10)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.source)
def test_arrays_give_what_scalars_give(law: ScalingLaw) -> None:
    n_total = np.array([1e9, 1e10, 1e11])
    tokens = np.array([[1e10], [1e12]])
    rest = {"n_active": 5e8, "expert_split": 4.0}
    loss = law.loss(n_total=n_total, tokens=tokens, **rest)
    floor = law.floor(n_total=n_total, **rest)
    gradient = law.gradient(n_total=n_total, tokens=tokens, **rest)
    back = law.tokens_for(loss, n_total=n_total, **rest)
    assert loss.shape == back.shape == (2, 3)
    assert floor.shape == (3,)
    for i, k in np.ndindex(2, 3):
        point = {"n_total": float(n_total[k]), "tokens": float(tokens[i, 0]), **rest}
        assert loss[i, k] == pytest.approx(law.loss(**point), rel=1e-14)
        assert back[i, k] == pytest.approx(tokens[i, 0], rel=1e-10)
        for name in VARIABLES:
            component = getattr(gradient, name)
            assert component.shape == (2, 3)
            assert component[i, k] == pytest.approx(getattr(law.gradient(**point), name), rel=1e-12)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.source)
def test_scalars_of_every_kind_give_floats(law: ScalingLaw) -> None:
    casts: tuple[Any, ...] = (float, int, np.float64, np.int64, np.asarray)
    for cast in casts:
        point: dict[str, Any] = {
            "n_total": cast(10**10),
            "n_active": cast(10**9),
            "tokens": cast(10**11),
            "expert_split": cast(4),
        }
        assert type(law.loss(**point)) is float
        assert type(law.gradient(**point).tokens) is float
        assert type(law.tokens_for(law.loss(**point), **without_tokens(point))) is float


def test_table_2_keeps_its_printed_digits() -> None:
    assert len(MOSAIC_TABLE2_PRINTED) == 11
    for name, row in MOSAIC_TABLE2_PRINTED.items():
        low, high = map(float, row.interval)
        assert low <= float(row.value) <= high
        assert getattr(MOSAIC_TABLE2, name) == float(row.value)
    assert MOSAIC_TABLE2_PRINTED["beta"].value == "0.2070"
    identified = {name for name, row in MOSAIC_TABLE2_PRINTED.items() if row.identified}
    assert identified == {"beta", "eta"}


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.source)
def test_every_law_says_what_it_is(law: ScalingLaw) -> None:
    assert law.basis == "FITTED"
    assert law.equation.startswith("L = ")
    assert "arXiv" in law.source
    assert law.variables["D"].startswith("tokens")
    assert hash(law) == hash(law.model_copy())
