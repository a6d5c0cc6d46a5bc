"""What a pack or a datasheet says of a machine itself: rates, memory, the size of a node."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, FiniteFloat, model_validator

from perfmodel.calibration.records import FrozenRecord, PackError, Text
from perfmodel.hardware import ASSUMED_HOST, Host
from perfmodel.kernels import BF16_BYTES, FP32_BYTES, DeviceRates
from perfmodel.precision import RECIPES, Precision
from perfmodel.sources import Source

Positive = Annotated[FiniteFloat, Field(gt=0)]

NumberFormat = Literal["bf16", "fp16", "fp32"]
"""What kernels can be timed in."""


class Datum(FrozenRecord):
    """One number of a machine, with what it rests on."""

    value: Positive
    source: Source
    note: Text


class Device(FrozenRecord):
    """One accelerator: rates and memory, each with its source."""

    name: Text
    peak_flops: Datum  # dense, of `number_format` [FLOP/s]
    peak_flops_fp8: Datum | None = None  # dense, where there is hardware for it [FLOP/s]
    peak_flops_fp4: Datum | None = None  # the same, nvfp4 or mxfp4 [FLOP/s]
    matmul_flops: Datum | None = None  # fastest bf16 product that is published [FLOP/s]
    fp32_flops: Datum  # dense fp32, no tensor cores [FLOP/s]
    memory_bytes: Datum  # usable by the program [B]
    memory_bw: Datum  # [B/s]
    precisions: tuple[Precision, ...] = ()  # that there is hardware for, beside bf16
    number_format: NumberFormat | None = None  # that was timed; bf16 where it is not stated
    blocking: bool | None = None  # the caller computes (a CPU): its time and the device's add

    @model_validator(mode="after")
    def _precisions_have_a_peak(self) -> Self:
        for precision in self.precisions:
            if precision in RECIPES and self._peak(precision) is None:
                kind = "peak_flops_fp4" if RECIPES[precision].four_bit else "peak_flops_fp8"
                raise ValueError(f"precisions names {precision} and {kind} is missing")
        return self

    @property
    def dtype(self) -> str:
        """Number format of the kernels that were timed."""
        return self.number_format or "bf16"

    @property
    def element_bytes(self) -> float:
        """Bytes of one element in that format [B]."""
        return FP32_BYTES if self.dtype == "fp32" else BF16_BYTES

    @property
    def rates(self) -> DeviceRates:
        """The device's rates, in the form that the formulas take."""
        return DeviceRates(self.peak_flops.value, self.fp32_flops.value, self.memory_bw.value)

    def peak_ratio(self, precision: Precision) -> float:
        """Return the dense peak of a precision over that of bf16 [-].

        Raises
        ------
        PackError
            The device has no hardware for the precision.
        """
        if precision not in RECIPES:
            return 1.0
        peak = self._peak(precision)
        if precision not in self.precisions or peak is None:
            known = ", ".join((Precision.BF16, *self.precisions))
            raise PackError(f"precision={precision} has no rate on {self.name}; it has {known}.")
        return float(peak.value / self.peak_flops.value)

    def _peak(self, precision: Precision) -> Datum | None:
        return self.peak_flops_fp4 if RECIPES[precision].four_bit else self.peak_flops_fp8


class Node(FrozenRecord):
    """One domain of fast links, as a rule one machine, and how fast its devices are connected."""

    name: Text
    devices_per_node: Annotated[int, Field(ge=1)]
    link_bw: Datum | None = None  # of one device to the others of the node, one direction [B/s]
    nic_bw: Datum | None = None  # of one device to other nodes, one direction [B/s]
    host_link_bw: Datum | None = None  # of one device to its host, one direction [B/s]
    host_memory_bw: Datum | None = None  # of the host's memory, for each device [B/s]

    @property
    def host(self) -> Host:
        """What the host offers each device; what is not stated is assumed."""
        link, memory = self.host_link_bw, self.host_memory_bw
        return Host(
            link_bw=ASSUMED_HOST.link_bw if link is None else link.value,
            memory_bw=ASSUMED_HOST.memory_bw if memory is None else memory.value,
        )
