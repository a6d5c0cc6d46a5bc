"""Published coefficients of other papers: printed digits, and values that they must give."""

import csv
import gzip
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lawfit import (
    CLARK_HASH,
    CLARK_RLR,
    CLARK_SBASE,
    KAPLAN,
    KRAJEWSKI_DENSE,
    KRAJEWSKI_MOE,
    LITERATURE_LAWS,
    LITERATURE_PRINTED,
    LUDZIEJEWSKI,
    MUENNIGHOFF,
    PUBLISHED_LAWS,
    ClarkLaw,
    KrajewskiLaw,
)

points = st.builds(
    lambda total, density, tokens, split: {
        "n_total": total,
        "n_active": total * density,
        "tokens": tokens,
        "expert_split": split,
    },
    st.floats(1e8, 1e13),
    st.floats(0.01, 0.99),
    st.floats(1e9, 1e14),
    st.floats(1.0, 16.0),
)


@pytest.mark.parametrize("name", LITERATURE_LAWS)
def test_coefficients_are_the_printed_digits(name: str) -> None:
    law, printed = LITERATURE_LAWS[name], LITERATURE_PRINTED[name]
    numbers = {k: v for k, v in law.model_dump().items() if isinstance(v, float)}
    assert numbers == {field: float(digits) for field, digits in printed.items()}
    assert "arXiv" in law.source


def test_names_are_no_names_of_laws_that_an_envelope_takes() -> None:
    assert set(LITERATURE_PRINTED) == set(LITERATURE_LAWS)
    assert not set(LITERATURE_LAWS) & set(PUBLISHED_LAWS)


@given(points)
def test_krajewski_is_its_equation(point: dict[str, float]) -> None:
    n, d, g = point["n_total"], point["tokens"], point["expert_split"]
    by_hand = 0.47 + (2.1 / g**0.58 + 18.1) / n**0.115 + 30.8 / d**0.147
    assert KRAJEWSKI_MOE.loss(**point) == pytest.approx(by_hand, rel=1e-12)
    gradient, h = KRAJEWSKI_MOE.gradient(**point), 1e-5
    for name in ("n_total", "tokens", "expert_split"):
        up, down = ({**point, name: point[name] * math.exp(s)} for s in (h, -h))
        up["n_active"] = down["n_active"] = point["n_active"] * (1 - 2 * h)
        difference = (KRAJEWSKI_MOE.loss(**up) - KRAJEWSKI_MOE.loss(**down)) / (2 * h)
        assert getattr(gradient, name) == pytest.approx(difference, rel=1e-6, abs=1e-9)
    rest = {name: value for name, value in point.items() if name != "tokens"}
    assert KRAJEWSKI_MOE.tokens_for(by_hand, **rest) == pytest.approx(d, rel=1e-9)


@given(points)
def test_krajewski_of_dense_models_takes_active_parameters(point: dict[str, float]) -> None:
    by_hand = 0.47 + 16.3 / point["n_active"] ** 0.126 + 26.7 / point["tokens"] ** 0.127
    assert KRAJEWSKI_DENSE.loss(**point) == pytest.approx(by_hand, rel=1e-12)


def test_krajewski_survives_json() -> None:
    text = KRAJEWSKI_MOE.model_dump_json()
    assert KrajewskiLaw.model_validate_json(text) == KRAJEWSKI_MOE
    assert [term.name for term in KRAJEWSKI_MOE.terms][-1] == "data"


@pytest.mark.parametrize(
    ("router", "law", "runs", "rmse"),
    [
        ("S-Base", CLARK_SBASE, 58, 0.00369),
        ("RL-R", CLARK_RLR, 59, None),
        ("Hash", CLARK_HASH, 56, None),
    ],
)
def test_clark_fits_its_own_runs(
    router: str, law: ClarkLaw, runs: int, rmse: float | None, shared_data: Path
) -> None:
    """RMSE of ``log10 L`` at the final step of the runs with k = 1 and routing frequency 0.5.

    The third digit of ``c`` alone is worth 0.0005 log N log E_hat, about 0.01 at 1e9 parameters
    and 300 experts, so that the printed coefficients cannot be held to less.
    """
    last: dict[str, dict[str, str]] = {}
    path = shared_data / "laws" / "clark_routing" / "curves.csv.gz"
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            mine = row["router_type"] in (router, "Dense") and row["seed"] == "42"
            if mine and float(row["routing_frequency"]) == 0.5 and float(row["k"]) == 1:
                seen = last.get(row["hyper_id"])
                if seen is None or int(row["step"]) > int(seen["step"]):
                    last[row["hyper_id"]] = row
    assert len(last) == runs
    size, experts, loss = (
        np.array([float(row[column]) for row in last.values()])
        for column in ("dense_parameter_count", "num_experts", "loss_validation")
    )
    misfit = np.log10(loss) - np.log10(law.loss(n=size, experts=experts))
    found = float(np.sqrt(np.mean(misfit**2)))
    assert found < 0.01
    if rmse is not None:
        assert round(found, 5) == rmse


TABLE_4 = {  # of arXiv 2502.05172: E, then m, mu, n, nu
    1: (30.3640, -0.1817, 53.9838, -0.1965),
    2: (27.7982, -0.1780, 66.8401, -0.2065),
    4: (24.8462, -0.1731, 87.7022, -0.2192),
    8: (21.8330, -0.1676, 119.9126, -0.2338),
    16: (19.0159, -0.1617, 167.5073, -0.2494),
    32: (16.5424, -0.1557, 234.6726, -0.2652),
}


@pytest.mark.parametrize("experts", TABLE_4)
def test_ludziejewski_gives_the_table_of_its_paper(experts: int) -> None:
    """Its Table 4 from its Table 3: as near as four digits of an exponent allow.

    Half a unit of the last digit of ``omega`` and ``delta`` and of the transformed number of
    experts moves ``n`` by 0.3 %.
    """
    m, mu, n, nu = TABLE_4[experts]
    law = LUDZIEJEWSKI.at_experts(experts)
    assert law.a == pytest.approx(m, rel=1.2e-3)
    assert law.b == pytest.approx(n, rel=2.7e-3)
    assert (-law.alpha, -law.beta) == pytest.approx((mu, nu), abs=1.5e-4)
    assert law.e == 1.3637
    if experts == 32:
        assert law.a == pytest.approx(m, rel=2e-4)
        assert law.b == pytest.approx(n, rel=2e-4)


def test_repeated_tokens_have_the_rounded_figures_of_the_paper() -> None:
    law = MUENNIGHOFF
    assert (round(law.a), round(law.b), round(law.e, 2), round(law.alpha, 2)) == (
        521, 1488, 1.87, 0.35,
    )  # fmt: skip
    # U_N = 0.051 U_D, equation (17)
    assert (law.a / law.b) ** (1.0 / law.alpha) == pytest.approx(0.051, abs=5e-4)
    once = law.loss(n=1e8, tokens=1e10, unique_tokens=1e10)
    assert law.loss(n=1e8, tokens=4e10, unique_tokens=1e10) < once


def test_kaplan_tends_to_its_powers() -> None:
    """``(N_c / N)^alpha_N`` without a limit of data, ``(D_c / D)^alpha_D`` without one of size."""
    assert KAPLAN.loss(n=1e9, tokens=1e25) == pytest.approx((6.4e13 / 1e9) ** 0.076, rel=1e-6)
    assert KAPLAN.loss(n=1e25, tokens=1e9) == pytest.approx((1.8e13 / 1e9) ** 0.103, rel=1e-5)
