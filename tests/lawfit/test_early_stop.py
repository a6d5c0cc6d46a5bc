"""Refits that stop early: no optima, the widths of Table 2, one thread of BLAS."""

from __future__ import annotations

import math

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from lawfit import MOSAIC_TABLE2_PRINTED, Bootstrap, FitResult, bootstrap, fit, sample_runs
from lawfit import _descent as descent

from .fit_tables import fitted


@pytest.fixture(scope="module")
def early_and_late() -> list[tuple[FitResult, Bootstrap, Bootstrap]]:
    """As the paper fits: Huber's function at 0.1, a tenth held out."""
    found = [
        fit("joint", sample_runs(seed=seed), delta=0.1, holdout="nact:0.1", starts=40)
        for seed in range(2)
    ]
    return [
        (each, bootstrap(each, draws=60, mode="paper"), bootstrap(each, draws=60)) for each in found
    ]


def width_of(refits: Bootstrap, name: str) -> float:
    interval = refits.interval(name)
    log = name in ("a", "b", "c", "j", "e")
    return math.log(interval.high / interval.low) if log else interval.high - interval.low


def test_refits_that_stop_early_are_no_optima(
    early_and_late: list[tuple[FitResult, Bootstrap, Bootstrap]],
) -> None:
    for found, early, late in early_and_late:
        assert early.not_converged == early.draws == len(early) == 60
        assert late.not_converged == 0
        assert early.gradient_median > 1e4 * descent.GRADIENT
        assert early.objective > 1.001 * found.objective
        assert late.objective == pytest.approx(found.objective, rel=1e-9)
        reasons = [remark.reason for remark in early.interval("eta").remarks]
        assert reasons == ["not_converged"]


def test_refits_that_stop_early_have_widths_like_table_2_and_those_that_converge_do_not(
    early_and_late: list[tuple[FitResult, Bootstrap, Bootstrap]],
) -> None:
    near, wider = [], []
    for name, printed in MOSAIC_TABLE2_PRINTED.items():
        low, high = (float(end) for end in printed.interval)
        width = math.log(high / low) if name in ("a", "b", "c", "j", "e") else high - low
        early = float(np.median([width_of(each, name) for _, each, _ in early_and_late]))
        late = float(np.median([width_of(each, name) for _, _, each in early_and_late]))
        near.append(early / width)
        wider.append(late / early)
    assert len(near) == 11
    assert min(wider) > 2.0
    assert sum(ratio > 5.0 for ratio in wider) >= 9
    assert sum(0.2 <= ratio <= 5.0 for ratio in near) >= 9
    assert 0.3 < float(np.exp(np.mean(np.log(near)))) < 3.0


def test_early_stops_keep_blas_to_one_thread() -> None:
    def blas() -> list[int]:
        return [info["num_threads"] for info in threadpool_info() if info["user_api"] == "blas"]

    seen: list[int] = []
    with threadpool_limits(2, "blas"):
        if max(blas()) < 2:
            pytest.skip("a BLAS with one thread only")
        bootstrap(
            fitted("chinchilla"),
            draws=2,
            mode="paper",
            progress=lambda done, of: seen.extend(blas()),
        )
        assert max(blas()) == 2
    assert set(seen) == {1}
