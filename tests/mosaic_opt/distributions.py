"""Installed distributions that register backends: a module and its metadata in a folder."""

from __future__ import annotations

import textwrap
from pathlib import Path

BACKEND = """
from dataclasses import dataclass
from typing import ClassVar, final

from mosaic_opt.backends.base import Availability, Backend, Capability


@final
@dataclass(frozen=True, kw_only=True)
class Mine(Backend):
    name: ClassVar[str] = "mine"
    provides: ClassVar[Capability] = Capability.EXACT

    @classmethod
    def availability(cls):
        return Availability.AVAILABLE

    def search(self, problem, limits, *, progress=None):
        from mosaic_opt.backends.enumerate import Enumerate

        return Enumerate(workers=1).search(problem, limits, progress=progress)
"""
"""A backend that keeps the contract."""


def install(
    folder: Path,
    module: str,
    source: str = BACKEND,
    *,
    name: str = "mine",
    value: str | None = None,
    version: str = "1.0",
) -> None:
    """Write a distribution called ``module`` that registers ``module:Mine`` under a name."""
    (folder / f"{module}.py").write_text(textwrap.dedent(source), "utf-8")
    meta = folder / f"{module}-{version}.dist-info"
    meta.mkdir()
    head = f"Metadata-Version: 2.1\nName: {module}\nVersion: {version}\n"
    (meta / "METADATA").write_text(head, "utf-8")
    points = f"[mosaic_opt.backends]\n{name} = {value or module + ':Mine'}\n"
    (meta / "entry_points.txt").write_text(points, "utf-8")
