"""Goodput that falls with the number of devices: in every answer over node counts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic_opt.allocation.inverse import invert
from mosaic_opt.allocation.phases import phases_by_nodes
from mosaic_opt.allocation.variants import with_nodes
from mosaic_opt.envelope import Envelope
from mosaic_opt.report import as_text
from mosaic_opt.report_allocation import render_inverse, render_phases
from mosaic_opt.solver import solve
from perfmodel.goodput import FailureFacts, expected_goodput

from .strategies import tiny_envelope, tiny_ladder

COUNTS = (1, 2, 4, 8)
FACTS = {"mtbf_device_hours": 3.0, "checkpoint_s": 20.0, "restart_s": 300.0}
"""Devices so poor that failures tell on 8 nodes."""


def wide(**changes: Any) -> Envelope:
    """Return an envelope whose batch keeps 8 nodes busy."""
    batch = {"global_batch": 512, "seq_len": 1024}
    return tiny_envelope(batch=batch, candidates=tiny_ladder(q=[2, 4]), **changes)


TARGET = 2.6


@given(
    st.floats(1.0, 1e6),
    st.floats(1.0, 1e6),
    st.floats(1.0, 600.0),
    st.floats(0.0, 3600.0),
    st.integers(1, 12),
)
@settings(max_examples=50)
def test_more_nodes_never_have_a_higher_goodput(
    device_hours: float, node_hours: float, checkpoint_s: float, restart_s: float, doublings: int
) -> None:
    facts = {
        "mtbf_device_hours": device_hours,
        "mtbf_node_hours": node_hours,
        "checkpoint_s": checkpoint_s,
        "restart_s": restart_s,
    }
    envelope = tiny_envelope()
    (model, *_) = envelope.candidates.architectures()
    parsed = envelope.model_copy(update={"goodput": FailureFacts.model_validate(facts)})
    shares = [with_nodes(parsed, 2**i).goodput_of(model).value or 0.0 for i in range(doublings + 1)]
    assert all(after <= before for before, after in pairwise(shares))
    assert shares[0] <= 1.0


def test_every_node_count_of_invert_has_its_own_goodput() -> None:
    envelope = wide(goodput=FACTS)
    found = invert(envelope, TARGET, "days", nodes=COUNTS)
    assert [reach.nodes for reach in found.by_nodes] == list(COUNTS)
    for reach in found.by_nodes:
        mtbf_s = 3.0 * 3600.0 / reach.n_devices
        share = with_nodes(envelope, reach.nodes).goodput_of(envelope.candidates.architectures()[0])
        assert reach.goodput == share.value
        assert share.interval_s is not None
        assert reach.goodput == expected_goodput(share.interval_s, 20.0, 300.0, mtbf_s)
    assert all(b.goodput < a.goodput for a, b in pairwise(found.by_nodes))


def test_failures_lengthen_the_days_by_the_goodput_and_move_the_best_node_count() -> None:
    whole = invert(wide(), TARGET, "days", nodes=COUNTS)
    failing = invert(wide(goodput=FACTS), TARGET, "days", nodes=COUNTS)
    for ideal, real in zip(whole.by_nodes, failing.by_nodes, strict=True):
        assert ideal.goodput == 1.0
        assert real.days == pytest.approx(ideal.days / real.goodput, rel=1e-9)
    assert whole.best is not None
    assert failing.best is not None
    assert whole.best.nodes == 8
    assert failing.best.nodes < whole.best.nodes


def test_phases_of_each_node_count_have_its_goodput() -> None:
    envelope = wide(goodput=FACTS)
    clusters = phases_by_nodes(envelope, COUNTS, days_to=30.0).clusters
    shares = [{phase.goodput for phase in cluster.phases} for cluster in clusters]
    assert all(len(share) == 1 for share in shares)
    falling = [share.pop() for share in shares]
    assert falling == sorted(falling, reverse=True)
    assert len(set(falling)) == len(COUNTS)
    for cluster, share in zip(clusters, falling, strict=True):
        phase = cluster.phases[-1]
        per_day = share * 86400.0 * envelope.batch.tokens / phase.step_time_s
        assert phase.tokens_to == pytest.approx(per_day * phase.days_to)


def test_solve_on_more_nodes_reports_the_lower_goodput() -> None:
    one, four = (solve(with_nodes(wide(goodput=FACTS), n)).optimum for n in (1, 4))
    assert one is not None
    assert four is not None
    assert four.goodput < one.goodput < 1.0


def test_the_pages_show_goodput_where_it_is_not_whole() -> None:
    failing = invert(wide(goodput=FACTS), TARGET, "days", nodes=COUNTS)
    page = as_text(render_inverse(failing), 160)
    assert "goodput" in page.splitlines()[1]
    assert all(f"{reach.goodput:.4f}" in page for reach in failing.by_nodes)
    assert "goodput [ASSUMED]" in page
    assert "goodput" not in as_text(render_inverse(invert(wide(), TARGET, "days")))
    (cluster,) = phases_by_nodes(wide(goodput=FACTS), [2], days_to=5.0).clusters
    assert f"Goodput {cluster.phases[0].goodput:.4f} [ASSUMED]." in as_text(render_phases(cluster))
