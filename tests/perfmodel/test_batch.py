"""The compiled kernel against the scalar estimate, plan by plan."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.architecture import Architecture
from perfmodel.batch import PRICED_COLUMNS, plan_matrix, price
from perfmodel.calibration.stacks import StackProfile
from perfmodel.cluster import Batch, Optimizer
from perfmodel.hardware import Hardware
from perfmodel.memory import peak_bytes
from perfmodel.plan import Recompute
from perfmodel.plan_table import PlanTable

from .strategies import (
    Run,
    architectures,
    batches,
    cluster,
    dense,
    fast_profile,
    latent,
    legal_rows,
    moe,
    profile,
    skeleton,
)

NODES = 2
Priced = tuple[np.ndarray, np.ndarray]


class Machine(NamedTuple):
    """What prices a step: the device or the host may be the slower one."""

    hardware: Hardware
    stack: StackProfile


def device_bound() -> Machine:
    """Launch kernels in no time, so that no cost of the device is hidden behind the host."""
    hardware = cluster(NODES).constants
    free = {"launch_s": 0.0, "launch_per_gemm_s": 0.0}
    return Machine(
        hardware._replace(
            grouped_forward=hardware.grouped_forward._replace(**free),
            grouped_backward=hardware.grouped_backward._replace(**free),
        ),
        fast_profile(),
    )


def host_bound() -> Machine:
    return Machine(cluster(NODES).constants, profile())


machines = st.sampled_from((device_bound, host_bound)).map(lambda build: build())


def compiled(
    machine: Machine, a: Architecture, batch: Batch, table: PlanTable, rows: np.ndarray
) -> Priced:
    return price(
        a,
        plan_matrix(table),
        rows,
        hardware=machine.hardware,
        stack=machine.stack.stack(),
        optimizer=batch.optimizer.dims,
        seq_len=batch.seq_len,
        global_batch=batch.global_batch,
    )


def scalar(
    machine: Machine, a: Architecture, batch: Batch, table: PlanTable, rows: np.ndarray
) -> Priced:
    here = cluster(NODES).model_copy()
    here.__dict__["constants"] = machine.hardware  # in place of the cached property
    step_s, memory = np.empty(len(rows)), np.empty(len(rows))
    for i, row in enumerate(rows):
        run = Run(a, table.plan(int(row)), here, batch)
        model = run.under(machine.stack)
        step_s[i] = model.step_s
        memory[i] = peak_bytes(
            a.dims,
            run.dims,
            batch.optimizer.dims,
            machine.stack.stack(),
            float(batch.seq_len),
            float(model.n_microbatches),
        )
    return step_s, memory


def assert_alike(found: Priced, expected: Priced) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=0)


@given(machines, architectures(), batches, st.randoms(use_true_random=False))
def test_the_kernel_prices_what_the_scalar_estimate_does(
    machine: Machine, a: Architecture, batch: Batch, random: Random
) -> None:
    """In any order of the rows, so that what it keeps from row to row is never stale."""
    table = skeleton(NODES, batch.seq_len, batch.global_batch)
    legal = legal_rows(a, table).tolist()
    rows = np.array(random.sample(legal, min(8, len(legal))), dtype=np.int64)
    here = machine, a, batch, table, rows
    assert_alike(compiled(*here), scalar(*here))


@given(machines, architectures(), batches, st.sampled_from(PRICED_COLUMNS), st.data())
def test_a_row_that_differs_from_the_last_one_in_one_degree_is_priced_anew(
    machine: Machine, a: Architecture, batch: Batch, degree: str, data: st.DataObject
) -> None:
    table = skeleton(NODES, batch.seq_len, batch.global_batch)
    legal = legal_rows(a, table)
    rest = plan_matrix(table)[legal]
    # dp follows from the other degrees of the world, so it may differ as well.
    others = [i for i, name in enumerate(PRICED_COLUMNS) if name not in (degree, "dp")]
    first = data.draw(st.integers(0, len(legal) - 1))
    alike = (rest[:, others] == rest[first, others]).all(axis=1)
    rows = np.concatenate([legal[[first]], legal[alike]])
    here = machine, a, batch, table, rows
    assert_alike(compiled(*here), scalar(*here))


@pytest.mark.parametrize("optimizer", list(Optimizer))
@pytest.mark.parametrize(
    "a",
    [
        moe(n_layers=12, first_k_dense=1),
        moe(n_layers=12, first_k_dense=5),
        moe(n_layers=12, first_k_dense=12),
        moe(n_layers=12, first_k_dense=0, moe_every=2, mtp_layers=1, **latent()),
        moe(n_layers=12, first_k_dense=0, gated=False, tied_embeddings=True),
        dense(n_layers=12),
    ],
    ids=["one dense layer", "five", "no layer with experts", "latent", "ungated and tied", "dense"],
)
def test_every_degree_takes_part(a: Architecture, optimizer: Optimizer) -> None:
    batch = Batch(global_batch=96, seq_len=2048, optimizer=optimizer)
    table = skeleton(NODES, 2048, 96)
    legal = legal_rows(a, table)
    rows = legal[:: len(legal) // 60 | 1]  # an odd step meets every mode
    chosen = table.select(rows)
    more = ("tp", "pp", "vpp", "cp", "dp") + (("etp", "ep") if a.n_experts else ())
    for degree in more:
        assert (chosen.columns[degree] > 1).any(), degree
    assert set(chosen.recompute.tolist()) == {mode.code for mode in Recompute}
    for machine in (device_bound(), host_bound()):
        here = machine, a, batch, table, rows
        assert_alike(compiled(*here), scalar(*here))


@given(st.permutations(range(12)))
def test_the_order_of_the_rows_does_not_matter(order: list[int]) -> None:
    a, batch = moe(), Batch(global_batch=16, seq_len=256)
    table = skeleton(NODES, 256, 16)
    legal = legal_rows(a, table)
    rows = legal[:: len(legal) // 12][:12]
    in_order = compiled(device_bound(), a, batch, table, rows)
    shuffled = compiled(device_bound(), a, batch, table, rows[list(order)])
    for one, other in zip(shuffled, in_order, strict=True):
        np.testing.assert_array_equal(one, other[list(order)])


def test_no_rows_no_prices() -> None:
    table = skeleton(NODES, 256, 16)
    nothing = np.empty(0, dtype=np.int64)
    step_s, memory = compiled(
        host_bound(), moe(), Batch(global_batch=16, seq_len=256), table, nothing
    )
    assert step_s.shape == memory.shape == (0,)


def test_the_matrix_of_a_table_holds_its_columns() -> None:
    table = skeleton(NODES, 256, 16)
    matrix = plan_matrix(table)
    assert matrix.shape == (len(table), len(PRICED_COLUMNS))
    assert matrix.dtype == np.float64
    assert matrix.flags.c_contiguous
    plan = table.plan(len(table) // 2)
    row = dict(zip(PRICED_COLUMNS, matrix[len(table) // 2].tolist(), strict=True))
    assert row.pop("recompute") == plan.recompute.code
    assert row == {name: getattr(plan, name) for name in row}


def test_every_legal_plan_has_a_finite_price() -> None:
    for a in (moe(n_layers=12), dense(n_layers=12)):
        table = skeleton(NODES, 2048, 96)
        rows = legal_rows(a, table)
        step_s, memory = compiled(
            host_bound(), a, Batch(global_batch=96, seq_len=2048), table, rows
        )
        assert len(rows) > 500
        assert np.isfinite(step_s).all()
        assert np.isfinite(memory).all()
        assert (step_s > 0).all()
        assert (memory > profile().stack().framework_bytes).all()
