"""Calibration: hardware packs and stack profiles, and the fits that make them."""

from perfmodel.calibration.packs import HardwarePack, RangeFlag, load_pack, shipped_packs
from perfmodel.calibration.records import PackError

__all__ = ["HardwarePack", "PackError", "RangeFlag", "load_pack", "shipped_packs"]
