"""Goodput: limits, the best interval, and the expectation against a run that is played out."""

from __future__ import annotations

from math import exp, inf, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from perfmodel.cluster import Optimizer
from perfmodel.goodput import (
    FailureFacts,
    best_interval,
    checkpoint_bytes,
    daly_interval,
    expected_goodput,
    young_interval,
)
from perfmodel.sources import Source

HOUR, MINUTE = 3600.0, 60.0
LLAMA3_MTBF_S = 54 * 24 * HOUR / 419  # 419 unexpected interruptions in 54 days

intervals = st.floats(1.0, 1e5)
checkpoints = st.floats(0.1, 1e3)
restarts = st.floats(0.0, 1e4)
mtbfs = st.floats(1e2, 1e7)


def played(
    interval: float, checkpoint: float, restart: float, mtbf: float, segments: int, seed: int
) -> float:
    """Play a run out, event by event: goodput of ``segments`` intervals of useful work [-]."""
    random = np.random.default_rng(seed)
    clock, done, restarting = 0.0, 0, False
    failure = random.exponential(mtbf)
    while done < segments:
        length = restart if restarting else interval + checkpoint
        if failure < clock + length:  # whatever was under way is lost
            clock, restarting = failure, True
            failure = clock + random.exponential(mtbf)
            continue
        clock += length
        done += not restarting
        restarting = False
    return segments * interval / clock


@pytest.mark.parametrize(
    ("interval", "checkpoint", "restart", "mtbf"),
    [
        (1000.0, 30.0, 300.0, 10_000.0),
        (5000.0, 100.0, 1000.0, 5000.0),  # a failure in most intervals
        (100.0, 50.0, 400.0, 300.0),  # restarts fail more often than not
        (600.0, 0.0, 0.0, 3600.0),
    ],
)
def test_the_expectation_is_that_of_a_run_played_out(
    interval: float, checkpoint: float, restart: float, mtbf: float
) -> None:
    expected = expected_goodput(interval, checkpoint, restart, mtbf)
    found = [played(interval, checkpoint, restart, mtbf, 5000, seed) for seed in range(8)]
    error = float(np.std(found, ddof=1)) / sqrt(len(found))
    assert abs(float(np.mean(found)) - expected) < 4 * error
    assert error < 0.02 * expected


# ---------------------------------------------------------------- limits


def test_without_failures_only_checkpoints_cost() -> None:
    assert expected_goodput(95.0, 5.0, 1e9, inf) == 0.95
    assert expected_goodput(95.0, 5.0, 10.0, 1e15) == pytest.approx(0.95)
    assert expected_goodput(inf, 5.0, 1.0, inf) == 1.0
    assert best_interval(5.0, inf) == inf


def test_free_checkpoints_leave_the_restarts() -> None:
    assert best_interval(0.0, 1000.0) == 0.0
    assert expected_goodput(0.0, 0.0, 50.0, 1000.0) == exp(-0.05)
    assert expected_goodput(1e-6, 0.0, 50.0, 1000.0) == pytest.approx(exp(-0.05))
    assert expected_goodput(0.0, 1.0, 50.0, 1000.0) == 0.0


def test_an_interval_that_no_failure_spares_does_no_work() -> None:
    assert expected_goodput(1e6, 1.0, 1.0, 10.0) == 0.0
    assert expected_goodput(10.0, 1.0, 1e6, 10.0) == 0.0


@given(intervals, checkpoints, restarts, mtbfs)
def test_goodput_is_a_share_and_falls_with_every_cost(
    interval: float, checkpoint: float, restart: float, mtbf: float
) -> None:
    value = expected_goodput(interval, checkpoint, restart, mtbf)
    assert 0.0 <= value <= interval / (interval + checkpoint)
    assert expected_goodput(interval, 2 * checkpoint, restart, mtbf) <= value
    assert expected_goodput(interval, checkpoint, 2 * restart + 1.0, mtbf) <= value
    assert expected_goodput(interval, checkpoint, restart, mtbf / 2) <= value


# ---------------------------------------------------------------- the best interval


@given(checkpoints, restarts, mtbfs, st.floats(0.05, 20.0))
def test_no_other_interval_is_better(
    checkpoint: float, restart: float, mtbf: float, factor: float
) -> None:
    best = best_interval(checkpoint, mtbf)
    assert 0.0 < best <= mtbf
    value = expected_goodput(best, checkpoint, restart, mtbf)
    assert expected_goodput(factor * best, checkpoint, restart, mtbf) <= value * (1 + 1e-12)


@given(checkpoints, st.floats(3.0, 1e4))
def test_young_and_daly_approach_the_best_as_checkpoints_get_short(
    checkpoint: float, ratio: float
) -> None:
    mtbf = ratio * checkpoint
    best = best_interval(checkpoint, mtbf)
    off = [abs(f(checkpoint, mtbf) / best - 1.0) for f in (young_interval, daly_interval)]
    assert off[1] <= 0.01 * ratio**-0.5  # of third order
    assert off[1] <= off[0] <= 1.2 * ratio**-0.5  # of first order


@pytest.mark.parametrize(
    ("mtbf", "minutes"), [(24 * HOUR, 117.0), (6 * HOUR, 57.0), (15 * MINUTE, 9.1)]
)
def test_daly_2006_figures_3_to_5(mtbf: float, minutes: float) -> None:
    """Dumps of 5 minutes; the captions state the predicted optimum."""
    digits = 1 if minutes < 10 else 0
    for interval in (daly_interval(5 * MINUTE, mtbf), best_interval(5 * MINUTE, mtbf)):
        assert round(interval / MINUTE, digits) == pytest.approx(minutes, abs=0.11)


def test_daly_beyond_its_series() -> None:
    assert daly_interval(200.0, 100.0) == daly_interval(900.0, 100.0) == 100.0
    assert 0.8 * 100.0 < best_interval(200.0, 100.0) < 100.0


# ---------------------------------------------------------------- facts


def facts(**changes: object) -> FailureFacts:
    given_facts: dict[str, object] = {"mtbf_device_hours": 50_000.0, "checkpoint_s": 10.0}
    return FailureFacts.model_validate(given_facts | {"restart_s": 600.0} | changes)


def test_without_a_failure_rate_goodput_is_unknown() -> None:
    found = facts(mtbf_device_hours=None).goodput(16, 2)
    assert found.value is None
    assert found.mtbf_s is None


def test_rates_of_devices_and_nodes_add() -> None:
    assert facts().mtbf_s(16, 2) == 50_000 * HOUR / 16
    assert facts(mtbf_device_hours=None, mtbf_node_hours=1024.0).mtbf_s(16, 2) == 512 * HOUR
    both = facts(mtbf_node_hours=1000.0).mtbf_s(16, 2)
    assert both == pytest.approx(HOUR / (16 / 50_000 + 2 / 1000))


def test_a_checkpoint_by_its_size() -> None:
    adamw, muon = Optimizer.ADAMW.dims, Optimizer.MUON.dims
    assert checkpoint_bytes(1e9, adamw) == 14e9
    by_size = facts(checkpoint_s=None, storage_bytes_per_s=2e9)
    assert by_size.goodput(16, 2, 1e9, adamw).checkpoint_s == 7.0
    assert by_size.goodput(16, 2, 1e9, muon).checkpoint_s == 5.0
    with pytest.raises(ValueError, match="needs the optimizer"):
        by_size.goodput(16, 2)


def test_a_given_interval_is_used_and_is_not_better() -> None:
    best, hourly = facts().goodput(16384, 2048), facts(interval_s=3600.0).goodput(16384, 2048)
    assert hourly.interval_s == 3600.0
    assert hourly.value is not None
    assert best.value is not None
    assert hourly.value < best.value


def test_the_source_is_that_of_the_facts() -> None:
    assert facts().goodput(1, 1).source is Source.ASSUMED
    assert facts(source="MEASURED").goodput(1, 1).source is Source.MEASURED


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"checkpoint_s": None}, "one of them and not neither"),
        ({"storage_bytes_per_s": 1e9}, "one of them and not both"),
        ({"mtbf_device_hours": 0.0}, "greater than or equal to 0.000000000001"),
        ({"restart_s": float("nan")}, "greater than or equal to 0|finite"),
    ],
)
def test_impossible_facts_are_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        facts(**changes)


def test_llama_3_stays_above_90_percent_if_a_failure_costs_less_than_20_minutes() -> None:
    """arXiv 2407.21783, section 3.3.4: 419 failures in 54 days, more than 90% effective."""
    assert round(LLAMA3_MTBF_S / HOUR, 2) == 3.09
    assert round(16384 * LLAMA3_MTBF_S / HOUR) == 50_677
    assert expected_goodput(0.0, 0.0, 1173.0, LLAMA3_MTBF_S) > 0.9
    assert expected_goodput(0.0, 0.0, 1174.0, LLAMA3_MTBF_S) < 0.9
    found = facts(mtbf_device_hours=50_677.0).goodput(16384, 2048)
    assert found.value == pytest.approx(0.908, abs=0.0005)
