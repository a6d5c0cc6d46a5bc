"""What is known of the machine and of the software beside the times, kept next to the tables."""

from __future__ import annotations

import json
import os
import platform
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field, ValidationError

from moe_ref.microbench.errors import CalibrationError
from moe_ref.microbench.files import refused
from moe_ref.microbench.grids import Scale
from perfmodel.calibration.machines import NumberFormat
from perfmodel.calibration.measured import Machine
from perfmodel.frozen import Frozen, explain

__all__ = [
    "DTYPES",
    "Facts",
    "Run",
    "Sidecar",
    "facts_of",
    "load_average",
    "read_sidecar",
    "require_cuda",
]

FILE = "machine.json"

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Number formats that products can be timed in."""


class Facts(Frozen):
    """What a run is valid for; a folder holds measurements under one set of facts a device.

    ``clock_mhz`` and ``governor`` are None where the machine does not tell them.
    """

    key: str  # the word in the column ``device`` of the tables
    device: Literal["cpu", "cuda"]
    name: str
    dtype: NumberFormat
    threads: int = Field(ge=1)
    cores: int = Field(ge=1)
    devices_per_node: int = Field(ge=1)
    memory_bytes: float = Field(gt=0)
    torch_version: str
    python_version: str
    blas: str
    capability: str  # vector instructions, or compute capability
    supported: tuple[str, ...]  # number formats with which a product works
    cuda_version: str | None = None

    @property
    def machine(self) -> Machine:
        """The facts that a datasheet is made of."""
        return Machine(
            name=self.name if self.device == "cuda" else f"{self.name}, {_threads(self.threads)}",
            dtype=self.dtype,
            blocking=self.device == "cpu",
            memory_bytes=self.memory_bytes,
            devices_per_node=self.devices_per_node,
        )


class Run(Frozen):
    """One call of the program: when, how busy the machine was, how many rows it added."""

    started: str
    seconds: float
    seed: int
    rows: int
    left: int
    interrupted: bool
    load_before: float | None
    load_after: float | None
    clock_mhz: float | None
    governor: str | None


class Campaign(Frozen):
    """All runs of one device and number format, on one grid."""

    facts: Facts
    scale: Scale
    runs: tuple[Run, ...] = ()


class Sidecar(Frozen):
    """Content of ``machine.json``; campaigns by device and number format."""

    schema_version: Literal[1] = 1
    campaigns: dict[str, Campaign] = Field(default_factory=dict)

    def campaign(self, facts: Facts) -> Campaign | None:
        """Return the campaign of a device, if there is one.

        Raises
        ------
        CalibrationError
            It was measured with other software or settings.
        """
        found = self.campaigns.get(_campaign_key(facts))
        if found is None:
            return None
        now, then = facts.model_dump(), found.facts.model_dump()
        changed = [name for name in now if now[name] != then[name]]
        if changed:
            name = changed[0]
            raise CalibrationError(
                f"The tables were measured with {name} = {then[name]!r} and it is now "
                f"{now[name]!r}: give another --out."
            )
        return found

    def with_campaign(self, campaign: Campaign) -> Sidecar:
        """Return the record with a campaign put in or replaced."""
        key = _campaign_key(campaign.facts)
        return Sidecar(campaigns={**self.campaigns, key: campaign})

    def write(self, folder: Path) -> None:
        """Write the file, whole or not at all.

        Raises
        ------
        CalibrationError
            It cannot be written.
        """
        part = folder / f"{FILE}.part"
        with refused(folder / FILE, "written"):
            part.write_text(self.model_dump_json(indent=2) + "\n", "utf-8")
            part.replace(folder / FILE)


def read_sidecar(folder: Path) -> Sidecar:
    """Read what lies next to the tables; empty where there is nothing.

    Raises
    ------
    CalibrationError
        The file cannot be read, or is not what this program writes.
    """
    path = folder / FILE
    with refused(path, "read"):
        if not path.exists():
            return Sidecar()
        content = path.read_bytes()
    try:
        return Sidecar.model_validate(json.loads(content.decode("utf-8")))
    except (ValueError, RecursionError) as error:
        what = explain(error) if isinstance(error, ValidationError) else "it is not JSON"
        raise CalibrationError(f"{path} cannot be read: {what}; give another --out.") from None


def facts_of(device: str, dtype: str, threads: int | None = None) -> Facts:
    """Return the facts of the machine.

    Parameters
    ----------
    device : {"cpu", "cuda"}
    dtype : {"bf16", "fp16", "fp32"}
    threads : int, optional
        Threads of one process on a CPU; what torch uses unless given. They are one device.

    Raises
    ------
    CalibrationError
        There is no such device, or it does not compute in the number format.
    """
    if device not in ("cpu", "cuda"):
        raise CalibrationError(f"device {device!r} is not cpu or cuda.")
    if dtype not in DTYPES:
        raise CalibrationError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}.")
    if device == "cuda":
        require_cuda()
    supported = tuple(name for name in DTYPES if _multiplies(device, name))
    if dtype not in supported:
        raise CalibrationError(
            f"dtype {dtype} has no product on this device; it has {', '.join(supported)}."
        )
    cores = _cores()
    if threads is not None and not 1 <= threads <= cores:
        near = min(max(threads, 1), cores)
        raise CalibrationError(f"threads is {threads}, but must be from 1 to {cores}: use {near}.")
    used = (threads or torch.get_num_threads()) if device == "cpu" else torch.get_num_threads()
    name = _cpu_name() if device == "cpu" else torch.cuda.get_device_name()
    devices = max(1, cores // used) if device == "cpu" else torch.cuda.device_count()
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return Facts(
        key=f"{slug}-{used}t" if device == "cpu" else slug,
        device=device,
        name=name,
        dtype=dtype,
        threads=used,
        cores=cores,
        devices_per_node=devices,
        memory_bytes=_memory_bytes(device) / (devices if device == "cpu" else 1),
        torch_version=torch.__version__,
        python_version=platform.python_version(),
        blas=_blas(device),
        capability=_capability(device),
        supported=supported,
        cuda_version=torch.version.cuda if device == "cuda" else None,
    )


def require_cuda() -> None:
    """Say in one sentence that there is no CUDA device, where there is none.

    Raises
    ------
    CalibrationError
        Torch finds none.
    """
    if not torch.cuda.is_available():
        raise CalibrationError("There is no CUDA device here that torch can use; nearest: cpu.")


def run_record(
    started: datetime, seed: int, rows: int, left: int, interrupted: bool, load: float | None
) -> Run:
    """Return the record of a run that began at ``started`` under a load average, and ends now."""
    return Run(
        started=started.isoformat(timespec="seconds"),
        seconds=round((datetime.now(UTC) - started).total_seconds(), 1),
        seed=seed,
        rows=rows,
        left=left,
        interrupted=interrupted,
        load_before=load,
        load_after=load_average(),
        clock_mhz=_clock_mhz(),
        governor=_read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
    )


def load_average() -> float | None:
    """Return how many processes wanted to run in the last minute; None where nobody counts [-]."""
    try:
        return round(os.getloadavg()[0], 2)
    except (OSError, AttributeError):
        return None


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _campaign_key(facts: Facts) -> str:
    return f"{facts.key} {facts.dtype}"


def _multiplies(device: str, dtype: str) -> bool:
    try:
        one = torch.ones(2, 2, device=device, dtype=DTYPES[dtype])
        return bool((one @ one).isfinite().all())
    except RuntimeError:
        return False


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def _cpu_name() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo") or "", re.MULTILINE)
    name = found[1] if found else platform.processor() or platform.machine() or "cpu"
    return re.sub(r"\((R|TM)\)|\s+(CPU|Processor)\b|\s*@.*$", "", name).strip()


def _clock_mhz() -> float | None:
    found = re.findall(r"^cpu MHz\s*:\s*([0-9.]+)$", _read("/proc/cpuinfo") or "", re.MULTILINE)
    return max(map(float, found)) if found else None


def _memory_bytes(device: str) -> float:
    if device == "cuda":
        return float(torch.cuda.get_device_properties(0).total_memory)
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _blas(device: str) -> str:
    if device == "cuda":
        return f"cuBLAS of CUDA {torch.version.cuda}"
    found = re.search(r"BLAS_INFO=([^,\s]+)", torch.__config__.show())
    return found[1] if found else "unknown"


def _capability(device: str) -> str:
    if device == "cuda":
        return ".".join(map(str, torch.cuda.get_device_capability()))
    return str(torch.backends.cpu.get_cpu_capability())


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text("utf-8").strip()
    except OSError:
        return None
