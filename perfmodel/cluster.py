"""The machines at hand: a hardware pack and a number of nodes; the batch that runs on them."""

from __future__ import annotations

import re
from enum import StrEnum
from functools import cached_property
from typing import Annotated

from pydantic import Field

from perfmodel.calibration.packs import HardwarePack, load_pack
from perfmodel.errors import PerfmodelError
from perfmodel.frozen import Frozen
from perfmodel.hardware import Hardware
from perfmodel.memory import OptimizerDims

MAX_NODES = 2**17
Nodes = Annotated[int, Field(ge=1, le=MAX_NODES, strict=True)]
Count = Annotated[int, Field(ge=1, le=2**30, strict=True)]


class Cluster(Frozen):
    """A number of nodes of one kind.

    Attributes
    ----------
    hardware : str
        Name of a shipped hardware pack, or path of one.
    nodes : int
        Nodes of the kind that the pack describes.
    memory_bytes : float, optional
        Memory of one device [B], in place of the pack's (GB = 1e9 B).
    """

    hardware: str
    nodes: Nodes
    memory_bytes: Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)] | None = None

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Read ``"p6-b200:32"``: a hardware pack and a number of nodes."""
        name, _, count = text.rpartition(":")
        if not name or not re.fullmatch(r"[0-9]{1,6}", count):
            raise PerfmodelError(f"cluster {text!r} is not PACK:NODES, as in p6-b200:32.")
        if not 1 <= int(count) <= MAX_NODES:
            raise PerfmodelError(f"nodes={int(count)} must be from 1 to {MAX_NODES}.")
        cluster = cls(hardware=name, nodes=int(count))
        _ = cluster.pack  # an unknown name is said here
        return cluster

    @cached_property
    def pack(self) -> HardwarePack:
        """The hardware pack."""
        return load_pack(self.hardware)

    @cached_property
    def constants(self) -> Hardware:
        """The pack's constants as the formulas take them."""
        return self.pack.constants()

    @property
    def n_devices(self) -> int:
        """Devices in the cluster, N_dev [-]."""
        return self.nodes * self.pack.node.devices_per_node

    @property
    def peak_flops(self) -> float:
        """Dense bf16 peak of one device, F_peak [FLOP/s]."""
        return self.constants.device.peak_flops

    @property
    def device_memory_bytes(self) -> float:
        """Memory of one device, M_dev [B]."""
        return self.memory_bytes or float(self.pack.device.memory_bytes.value)


class Optimizer(StrEnum):
    """The optimizer whose state and step are priced."""

    ADAMW = "adamw"
    MUON = "muon"
    SCION = "scion"

    @property
    def dims(self) -> OptimizerDims:
        """Bytes stored and moved for one parameter, and matrix iterations.

        AdamW: fp32 master weight and two moments. Muon and Scion: master weight and one
        momentum, and 5 Newton-Schulz steps (arXiv 2502.16982). Traffic: the gradient and the
        state read, the state and the bf16 weight written.
        """
        if self is Optimizer.ADAMW:
            return OptimizerDims(state_bytes=12.0, traffic_bytes=30.0, matrix_iterations=0.0)
        return OptimizerDims(state_bytes=8.0, traffic_bytes=22.0, matrix_iterations=5.0)


class Batch(Frozen):
    """What one optimizer step works on.

    Attributes
    ----------
    global_batch : int
        Sequences in a step, B_global.
    seq_len : int
        Tokens in a sequence, T_seq.
    optimizer : Optimizer
        AdamW unless given.
    """

    global_batch: Count
    seq_len: Count
    optimizer: Optimizer = Optimizer.ADAMW

    @property
    def tokens(self) -> int:
        """Tokens in a step [-]."""
        return self.global_batch * self.seq_len
