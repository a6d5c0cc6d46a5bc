"""Named tuples as structures, and the stages that stand for a whole pipeline."""

from __future__ import annotations

import numpy as np
import pytest

from perfmodel.activations import layer_bytes
from perfmodel.cluster import Optimizer
from perfmodel.memory import bytes_of, end_stages, heavy_stages, peak_on, stage_total
from perfmodel.mesh import stage_content
from perfmodel.records import as_record

from .strategies import cluster, dense, dims, moe, profile

ADAMW = Optimizer.ADAMW.dims


def test_a_record_has_every_number_under_its_name() -> None:
    hardware = cluster(2).constants
    record = as_record(hardware)[0]
    assert record["device"]["memory_bw"] == hardware.device.memory_bw
    assert record["fabric"]["all_gather"]["inter_bw"] == hardware.fabric.all_gather.inter_bw
    assert record["cast"]["kernels"] == hardware.cast.kernels
    with pytest.raises(ValueError, match="read-only"):
        as_record(hardware)["cast"] = record["cast"]
    other = hardware._replace(cast=hardware.cast._replace(kernels=3.0))
    assert as_record(other)[0]["cast"]["kernels"] == 3.0
    assert as_record(hardware)[0]["cast"]["kernels"] == hardware.cast.kernels


@pytest.mark.parametrize("first_k_dense", [0, 1, 2, 3, 5, 6, 8, 11, 23, 24])
def test_the_heaviest_of_a_few_stages_is_the_heaviest_of_all(first_k_dense: int) -> None:
    stack = profile().stack()
    for a in (moe(n_layers=24, first_k_dense=first_k_dense), dense(n_layers=24)):
        for pp, vpp in ((1, 1), (2, 1), (4, 1), (4, 2), (4, 3), (8, 3), (12, 1), (24, 1)):
            for mode in range(4):
                p = dims(pp=pp, vpp=vpp, recompute=mode)
                t = layer_bytes(a.dims, p, stack, 2048.0, p.recompute)
                few = heavy_stages(a.dims, p, ADAMW, stack, 48.0, end_stages(a.dims, p))
                every = [
                    stage_total(
                        bytes_of(a.dims, p, ADAMW, stack, 48.0, s, stage_content(a.dims, p, s), t)
                    )
                    for s in np.arange(float(pp))
                ]
                assert peak_on(stack, few, t) == max(every), (pp, vpp, mode)
