"""The machines at hand: a hardware pack and a number of nodes; the batch that runs on them."""

from __future__ import annotations

import re
from enum import StrEnum
from functools import cached_property
from itertools import count as count_from
from typing import Annotated, Self

from pydantic import Field, model_validator

from perfmodel.calibration.packs import HardwarePack, load_pack, pack_name
from perfmodel.collectives import with_devices_per_node
from perfmodel.errors import PerfmodelError
from perfmodel.frozen import Frozen
from perfmodel.hardware import Hardware
from perfmodel.levels import MAX_LEVELS, NetworkLevel, with_levels
from perfmodel.memory import OptimizerDims
from perfmodel.precision import Precision
from perfmodel.routing import Routing

MAX_NODES = 2**17
Nodes = Annotated[int, Field(ge=1, le=MAX_NODES, strict=True)]
Count = Annotated[int, Field(ge=1, le=2**30, strict=True)]


class Cluster(Frozen):
    """A number of nodes of one kind; a node is what shares fast links (72 devices on NVL72).

    Attributes
    ----------
    hardware : str
        Name of a shipped hardware pack, or path of one.
    nodes : int
        Nodes of the kind that the pack describes.
    memory_bytes : float, optional
        Memory of one device [B], in place of the pack's (GB = 1e9 B).
    devices : int, optional
        Devices in use, where they are not all that the nodes have: as many on each node.
    levels : tuple of NetworkLevel
        Levels of the network above the nodes, smallest units first; none unless given.
    """

    hardware: str
    nodes: Nodes
    memory_bytes: Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)] | None = None
    devices: Count | None = None
    levels: Annotated[tuple[NetworkLevel, ...], Field(max_length=MAX_LEVELS)] = ()

    @model_validator(mode="after")
    def _as_many_on_each_node(self) -> Self:
        if self.devices is not None and self.devices % self.nodes:
            raise ValueError(
                f"devices={self.devices} cannot be as many on each of {self.nodes} nodes"
            )
        return self

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Read a hardware pack and a number of nodes or of devices.

        ``"p6-b200:32"`` is 32 nodes. ``"gb200:256gpus"`` is 256 devices, on the fewest nodes that
        hold as many each: 4 NVLink domains with 64 of their 72 devices in use.
        """
        name, _, rest = text.rpartition(":")
        match = re.fullmatch(r"([0-9]{1,8})(gpus)?", rest)
        if not name or not match or not (match[2] or len(rest) <= 6):
            raise PerfmodelError(
                f"cluster {text!r} is not PACK:NODES or PACK:DEVICESgpus, as in p6-b200:32 or "
                "gb200:64gpus."
            )
        hardware, count = str(pack_name(name)), int(match[1])
        if match[2]:
            return cls._of_devices(hardware, count)
        if not 1 <= count <= MAX_NODES:
            raise PerfmodelError(f"nodes={count} must be from 1 to {MAX_NODES}.")
        cluster = cls(hardware=hardware, nodes=count)
        _ = cluster.constants  # an unknown name, or devices without a price, are said here
        return cluster

    @classmethod
    def _of_devices(cls, hardware: str, devices: int) -> Cluster:
        full = load_pack(hardware).node.devices_per_node
        if not 1 <= devices <= MAX_NODES * full:
            raise PerfmodelError(f"devices={devices} must be from 1 to {MAX_NODES * full}.")
        nodes = _fewest_nodes(devices, full)
        if nodes is None:
            below, above = (
                next(d for d in numbers if _fewest_nodes(d, full))
                for numbers in (range(devices, 0, -1), count_from(devices))
            )
            raise PerfmodelError(
                f"devices={devices} cannot be as many on each node of {full} with at least half "
                f"of it in use; nearest: {below} or {above}."
            )
        if devices == nodes * full:
            return cls(hardware=hardware, nodes=nodes)
        return cls(hardware=hardware, nodes=nodes, devices=devices)

    @cached_property
    def pack(self) -> HardwarePack:
        """The hardware pack."""
        return load_pack(self.hardware)

    @cached_property
    def constants(self) -> Hardware:
        """The pack's constants as the formulas take them, for the devices in use.

        Raises
        ------
        PackError
            The pack lacks the collectives of so many devices.
        """
        self.pack.check_devices(self.n_devices)
        constants = self.pack.constants()
        fabric = with_devices_per_node(constants.fabric, float(self.devices_per_node))
        if self.levels:
            nic = self.pack.node.nic_bw
            fabric = with_levels(
                fabric,
                self.levels,
                self.devices_per_node,
                self.n_devices,
                None if nic is None else float(nic.value),
            )
        return constants._replace(fabric=fabric)

    def constants_for(self, precision: Precision) -> Hardware:
        """Return `constants` with linear layers and experts in a precision.

        Raises
        ------
        PackError
            The device has no such rate.
        """
        if precision is Precision.BF16:
            return self.constants
        return self.pack.constants(precision)._replace(fabric=self.constants.fabric)

    @property
    def devices_per_node(self) -> int:
        """Devices in use on each node [-]."""
        full = self.pack.node.devices_per_node
        used = full if self.devices is None else self.devices // self.nodes
        if used > full:
            raise PerfmodelError(
                f"devices={self.devices} do not fit on nodes={self.nodes} of {full}; "
                f"nearest: {self.nodes * full}."
            )
        return used

    @property
    def n_devices(self) -> int:
        """Devices in the cluster, N_dev [-]."""
        return self.nodes * self.devices_per_node

    @property
    def peak_flops(self) -> float:
        """Dense bf16 peak of one device, F_peak [FLOP/s]."""
        return self.constants.device.peak_flops

    @property
    def device_memory_bytes(self) -> float:
        """Memory of one device, M_dev [B]."""
        return self.memory_bytes or float(self.pack.device.memory_bytes.value)


def _fewest_nodes(devices: int, full: int) -> int | None:
    """Return the fewest nodes with as many devices on each, none of them less than half full."""
    fewest = -(-devices // full)
    if fewest == 1:
        return 1
    return next((n for n in range(fewest, 2 * devices // full + 1) if devices % n == 0), None)


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
    routing : Routing
        How tokens fall on experts; evenly and without a capacity unless given.
    precision : Precision
        Number format of the products of linear layers and experts: bf16 unless given.
    """

    global_batch: Count
    seq_len: Count
    optimizer: Optimizer = Optimizer.ADAMW
    routing: Routing = Routing()
    precision: Precision = Precision.BF16

    @property
    def tokens(self) -> int:
        """Tokens in a step [-]."""
        return self.global_batch * self.seq_len
