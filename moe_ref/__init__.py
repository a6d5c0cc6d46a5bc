"""A PyTorch mixture-of-experts model to calibrate and validate predictions with.

The only package that may import torch (extra ``torch``). Names are loaded when they are first used:
importing ``moe_ref`` itself does not load torch, and so works where it is not installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_ref.microbench.calibration import Calibration, calibrate
    from moe_ref.microbench.errors import CalibrationError

_HOMES = {
    "Calibration": "microbench.calibration",
    "CalibrationError": "microbench.errors",
    "calibrate": "microbench.calibration",
}

__all__ = ["Calibration", "CalibrationError", "calibrate"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
