"""A surface that nobody measured, from the fitted surface of another device.

Every rate is taken over as a fraction of what the datasheet states, every time as it is:

- products and attention: the fraction of the bf16 peak, for the product in fp8 of the fp8 peak,
  times the ratio of the fractions that the fastest published bf16 product reaches on the two
  devices, where both are known;
- traffic: the fraction of the memory bandwidth;
- links and NICs: the fraction of one device's bandwidth in one direction; what a rank of an
  all-to-all keeps is copied at least as fast as it would be sent;
- a ring over full nodes: the fraction of what the NICs of a node carry together, and never more
  than the ring inside a node;
- latencies of a ring: per rank, so that a node of more devices adds more;
- the kernels of top-k: as they are, since the devices that were measured are within a factor of
  two of each other and follow no rate of the datasheet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from perfmodel.calibration.machines import Datum, Device, Node
from perfmodel.calibration.packs import Surface
from perfmodel.calibration.records import PackError
from perfmodel.calibration.regression import DIGITS
from perfmodel.calibration.surfaces import GEMM_FP8
from perfmodel.sources import Source

RINGS = ("all_reduce", "reduce_scatter", "all_gather")

_SHARES_OF_PEAK = {
    "gemm": ("flop_eff",),
    GEMM_FP8: ("flop_eff",),
    "grouped_forward": ("flop_eff",),
    "grouped_backward": ("flop_eff",),
    "attention_forward": ("eff_d128", "eff_d64"),
    "attention_backward": ("eff_d128", "eff_d64"),
    "head": ("forward_eff", "backward_eff"),
}


class Machine(NamedTuple):
    """A device in a node, by the name of its pack."""

    name: str
    device: Device
    node: Node


@dataclass(frozen=True)
class Transfer:
    """The machine that surfaces are taken over from, and the one that they are taken over to."""

    reference: Machine
    to: Machine

    def surface(self, name: str, record: Surface) -> Surface:
        """Return a surface of the reference as one of the other machine, ``ASSUMED``.

        Raises
        ------
        PackError
            The reference was not measured either, or a datasheet lacks a rate that this needs.
        """
        if not record.measured:
            raise PackError(f"{name} of {self.reference.name} was not measured itself.")
        params = dict(record.params)
        if name in _SHARES_OF_PEAK:
            factor, how = self._share("fp8" if name == GEMM_FP8 else "bf16")
            for efficiency in _SHARES_OF_PEAK[name]:
                params[efficiency] *= factor
        elif name == "all_to_all":
            how = self._all_to_all(params)
        elif name in RINGS:
            how = self._ring(params)
        elif name == "topk":
            how = "its rates are those of that device"
        else:
            how = "the fraction of the memory bandwidth is that of that device"
        return Surface(
            source=Source.ASSUMED,
            provenance=f"Not measured: taken over from {self.reference.name}; {how}.",
            params={key: float(f"{value:.{DIGITS}g}") for key, value in params.items()},
        )

    def _share(self, peak: str) -> tuple[float, str]:
        here, there = _fastest_product(self.to.device), _fastest_product(self.reference.device)
        if here is None or there is None:
            return 1.0, f"the fraction of the {peak} peak is that of that device"
        if here == there:
            return 1.0, f"the fractions of the {peak} peak are those of that device"
        text = (
            f"the fractions of the {peak} peak are those of that device times "
            f"{here / there:.3f}, "
            f"since the fastest published bf16 product reaches {here:.3f} of the peak here and "
            f"{there:.3f} there"
        )
        return here / there, text

    def _all_to_all(self, params: dict[str, float]) -> str:
        link = self._ratio("link_bw")
        nic = self._ratio("nic_bw")
        params["link_bw"] *= link
        params["intra_ramp_bytes"] *= link
        copied = self.to.device.memory_bw.value / self.reference.device.memory_bw.value
        params["self_bw"] = max(params["self_bw"] * copied, params["link_bw"])
        params["nic_bw"] *= nic
        params["inter_ramp_bytes"] *= nic
        return "fractions of link, NIC and memory bandwidth and latencies are those of that machine"

    def _ring(self, params: dict[str, float]) -> str:
        link, nic = self._ratio("link_bw"), self._ratio("nic_bw")
        devices = self.to.node.devices_per_node / self.reference.node.devices_per_node
        params["intra_bw"] *= link
        params["intra_ramp_bytes"] *= link
        nics = params["inter_bw"] * nic * devices
        inter = min(nics, params["intra_bw"])
        params["inter_ramp_bytes"] *= inter / params["inter_bw"]
        params["inter_bw"] = inter
        params["inter_latency_s"] *= devices
        params["strided_bw"] *= nic
        params["strided_ramp_bytes"] *= nic
        limit = "the links inside it" if inter < nics else "its NICs"
        return (
            "fractions of link and NIC bandwidth and latencies per rank are those of that "
            f"machine; a ring over full nodes is bound by {limit}"
        )

    def _ratio(self, rate: str) -> float:
        values = []
        for node in (self.to.node, self.reference.node):
            datum: Datum | None = getattr(node, rate)
            if datum is None:
                raise PackError(f"The datasheet of {node.name} lacks node.{rate}.")
            values.append(datum.value)
        return values[0] / values[1]


def _fastest_product(device: Device) -> float | None:
    if device.matmul_flops is None:
        return None
    return device.matmul_flops.value / device.peak_flops.value
