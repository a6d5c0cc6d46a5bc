"""Memory profiles: what a software stack keeps on a device, as the constants of the formulas.

They are apart from the stack profiles, which measured step times identify: a profile of memory is
fitted to measured peaks, and goes onto any stack (:meth:`MemoryProfile.on`).
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from perfmodel.calibration.records import FrozenRecord, Text, read_record, shipped
from perfmodel.calibration.stacks import Assumption, StackProfile
from perfmodel.sources import Source
from perfmodel.stack import MEMORY_CONSTANTS, Stack

FOLDER = "memory"


class MemoryProfile(FrozenRecord):
    """The memory constants of a software stack, each with its source."""

    schema_version: Literal[1]
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
    description: Text
    provenance: Text
    constants: dict[str, Assumption]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        given, wanted = set(self.constants), set(MEMORY_CONSTANTS)
        if missing := sorted(wanted - given):
            raise ValueError(f"constants lack {', '.join(missing)}")
        if unknown := sorted(given - wanted):
            raise ValueError(f"constants has unknown {', '.join(unknown)}")
        return self

    @property
    def fitted(self) -> tuple[str, ...]:
        """Names of the constants that measured peaks identify."""
        return tuple(
            name for name in MEMORY_CONSTANTS if self.constants[name].source is Source.FITTED
        )

    def on(self, stack: Stack) -> Stack:
        """Return a stack with these constants in place of its own."""
        values = {name: float(constant.value) for name, constant in self.constants.items()}
        return stack._replace(**values)

    def onto(self, profile: StackProfile) -> StackProfile:
        """Return a stack profile with these constants in place of its own."""
        times = {n: c for n, c in profile.constants.items() if n not in MEMORY_CONSTANTS}
        return profile.model_copy(
            update={
                "constants": times,
                "assumptions": {**profile.assumptions, **self.constants},
                "provenance": f"{profile.provenance}; memory: {self.name}, {self.provenance}",
            }
        )


def shipped_memory_profiles() -> tuple[str, ...]:
    """Return the names of the profiles that ship with the package."""
    return shipped(FOLDER)


def load_memory_profile(name_or_path: str) -> MemoryProfile:
    """Read a shipped memory profile by name, or a user's by path.

    Raises
    ------
    PackError
        No such profile, or a file that is not a valid one; one sentence.
    """
    return read_record(name_or_path, FOLDER, "memory profile", MemoryProfile)
