"""What lies on each stage of a pipeline: embedding, decoder layers, prediction layers, loss.

A layout is a sequence over the virtual stages in the order of the model: virtual stage ``s`` is
chunk ``s // pp`` of device ``s % pp``. Its text is Megatron-Core's
``pipeline_model_parallel_layout``: ``E`` embedding, ``t`` decoder layer, ``m`` prediction (MTP)
layer, ``L`` loss, ``|`` between stages; ``x*n`` and ``(xy|)*n`` repeat a letter or a group without
groups in it, and commas mean nothing. Source:
``megatron/core/transformer/pipeline_parallel_layer_layout.py``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from heapq import heapify, heapreplace
from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple

from perfmodel.errors import PerfmodelError

if TYPE_CHECKING:
    from perfmodel.architecture import Architecture

__all__ = [
    "BALANCED",
    "Stage",
    "StageLayout",
    "balanced_counts",
    "counts_of",
    "layout_numbers",
    "stages_of",
]

BALANCED = "balanced"
"""The layout that follows from the numbers of layers and stages, see `StageLayout.balanced`."""

MAX_LETTERS = 2**16
"""The longest layout, written out, that makes sense to this package."""

_GROUP = re.compile(r"\(([^()]+)\)\*([0-9]{1,9})")
_LETTER = re.compile(r"([EtmL|])\*([0-9]{1,9})")
_COUNTS = re.compile(r"[0-9]{1,6}(/[0-9]{1,6})*")


class Stage(NamedTuple):
    """What one virtual stage holds, in the order of the model [-]."""

    embedding: int
    layers: int
    mtp: int
    loss: int

    def __str__(self) -> str:
        """Write the letters."""
        letters = zip("EtmL", self, strict=True)
        return "".join(x * n if n < 3 else f"{x}*{n}" for x, n in letters)


def _unrolled(pattern: re.Pattern[str], text: str) -> str:
    """Write out the repetitions of one kind."""
    written = [len(m[1]) * int(m[2]) for m in pattern.finditer(text)]
    if sum(written) > MAX_LETTERS:
        raise PerfmodelError(
            f"A layout of {sum(written)} letters is longer than {MAX_LETTERS}: check its '*n'."
        )
    return pattern.sub(lambda m: m[1] * int(m[2]), text)


def stages_of(text: str) -> tuple[Stage, ...]:
    """Read the virtual stages of a layout string, whatever the number of devices."""
    shown = repr(text if len(text) <= 60 else text[:57] + "...")
    letters = _unrolled(_LETTER, _unrolled(_GROUP, text.replace(",", "")))
    odd = next((x for x in letters if x not in "EtmL|"), None)
    if odd is not None:
        raise PerfmodelError(
            f"layout={shown} has {odd!r} where only E, t, m, L, '|', and '*n' behind one of them "
            "or behind a group in parentheses, can be."
        )
    found = []
    for number, stage in enumerate(letters.split("|")):
        if list(stage) != sorted(stage, key="EtmL".index):
            raise PerfmodelError(
                f"Stage {number} of layout={shown} must have its parts in the order E, t, m, L."
            )
        found.append(Stage(*(stage.count(letter) for letter in "EtmL")))
    _require_ends(found)
    return tuple(found)


def _require_ends(stages: Sequence[Stage]) -> None:
    """Refuse stages without exactly one embedding and one loss."""
    for letter, what in ((0, "embedding (E)"), (3, "loss (L)")):
        count = sum(stage[letter] for stage in stages)
        if count != 1:
            raise PerfmodelError(f"A layout must have the {what} exactly once, not {count} times.")


def counts_of(text: str) -> tuple[int, ...] | None:
    """Read ``16/16/16/13``, decoder layers of each virtual stage; None for any other text."""
    return tuple(map(int, text.split("/"))) if _COUNTS.fullmatch(text) else None


def balanced_counts(
    n_layers: int, stages: int, ahead: float = 0.0, behind: float = 0.0
) -> list[int]:
    """Share out layers over stages, the heaviest as light as can be.

    ``ahead`` is what the first stage has besides, ``behind`` the last, in layers. Layers go one by
    one to the lightest stage; :meth:`StageLayout.balanced` says which of equals.
    """
    order = [*range(1, stages - 1), 0, stages - 1] if stages > 1 else [0]
    counts = [int(n_layers >= stages)] * stages
    besides = dict.fromkeys(range(stages), 0.0)
    besides[0] += ahead
    besides[stages - 1] += behind
    heap = [(besides[s] + counts[s], turn, s) for turn, s in enumerate(order)]
    heapify(heap)
    for _ in range(n_layers - sum(counts)):
        _, turn, s = heap[0]
        counts[s] += 1
        heapreplace(heap, (besides[s] + counts[s], turn, s))
    return counts


def layout_numbers(stages: Sequence[Stage], pp: int) -> dict[str, int]:
    """Return the numbers that the rules on layouts read; virtual stages are counted from 1."""
    numbered = list(enumerate(stages, 1))
    with_mtp = [s for s, stage in numbered if stage.mtp]
    return {
        "layout_stages": len(stages),
        "layout_layers": sum(stage.layers for stage in stages),
        "layout_mtp": sum(stage.mtp for stage in stages),
        "embedding_stage": next(s for s, stage in numbered if stage.embedding),
        "loss_stage": next(s for s, stage in numbered if stage.loss),
        "mtp_stages": len(with_mtp),
        "mtp_stage": min(with_mtp, default=0),
        "mtp_chunk": (min(with_mtp) - 1) // pp + 1 if with_mtp else 0,
        "last_layer_stage": max((s for s, stage in numbered if stage.layers), default=0),
    }


@dataclass(frozen=True, slots=True)
class StageLayout:
    """The virtual stages of a model, in its order, over ``pp`` devices.

    Whether a layout suits a model and a plan is for the rules to say (:mod:`perfmodel.rules`).
    """

    pp: int
    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        """Refuse stages that do not go round the devices a whole number of times."""
        if self.pp < 1 or not self.stages or len(self.stages) % self.pp:
            raise PerfmodelError(
                f"A layout of {len(self.stages)} stages does not go round pp={self.pp} devices a "
                "whole number of times."
            )
        _require_ends(self.stages)

    @classmethod
    def parse(cls, text: str, pp: int) -> StageLayout:
        """Read a layout string such as ``"Et*3|(tt|)*29,m|L"``."""
        return cls(pp, stages_of(text))

    @classmethod
    def from_counts(
        cls, counts: Sequence[int], pp: int | None = None, *, mtp: int = 0
    ) -> StageLayout:
        """Lay out decoder layers by stage; embedding first, prediction layers and loss last.

        Parameters
        ----------
        counts : sequence of int
            Decoder layers of each virtual stage, in the order of the model.
        pp : int, optional
            Devices; one for each stage unless given.
        mtp : int
            Prediction layers, all on the last stage.
        """
        if not counts or min(counts) < 0:
            raise PerfmodelError(
                f"A layout needs stages with 0 layers or more, not {list(counts)}."
            )
        last = len(counts) - 1
        stages = (
            Stage(int(s == 0), n, mtp * (s == last), int(s == last)) for s, n in enumerate(counts)
        )
        return cls(len(counts) if pp is None else pp, tuple(stages))

    @classmethod
    def equal(cls, n_layers: int, pp: int, vpp: int = 1, *, mtp: int = 0) -> StageLayout:
        """Give every virtual stage the same number of layers."""
        if n_layers % (pp * vpp):
            raise PerfmodelError(
                f"pp*vpp={pp * vpp} must divide n_layers={n_layers} for equal stages; "
                "layout=balanced takes any number."
            )
        return cls.from_counts([n_layers // (pp * vpp)] * (pp * vpp), pp, mtp=mtp)

    @classmethod
    def first_last(
        cls,
        n_layers: int,
        pp: int,
        first: int | None = None,
        last: int | None = None,
        *,
        mtp: int = 0,
    ) -> StageLayout:
        """Give the end stages their own numbers of layers and share out the rest equally.

        Megatron-Core's ``num_layers_in_first_pipeline_stage`` and ``..._last_...`` without
        interleaving. With one stage there is neither (Megatron-LM #1778).
        """
        ends = [n for n in (first, last) if n is not None]
        if pp < 2 and ends:
            raise PerfmodelError(
                f"Layers of the first or last stage can be given with pp >= 2 only, not pp={pp}."
            )
        rest, between = n_layers - sum(ends), pp - len(ends)
        if rest < 0 or (rest % between if between else rest):
            raise PerfmodelError(
                f"{rest} layers are left for {between} stages between the first and last given, "
                "which must share them equally."
            )
        counts = [rest // between] * between if between else []
        head = [] if first is None else [first]
        return cls.from_counts([*head, *counts, *([] if last is None else [last])], mtp=mtp)

    @classmethod
    def balanced(
        cls,
        architecture: Architecture,
        pp: int,
        vpp: int = 1,
        *,
        embedding: float = 0.0,
        head: float = 0.0,
        mtp: float = 0.0,
    ) -> StageLayout:
        """Make the heaviest virtual stage as light as can be, for any number of layers.

        The result is optimal for the given weights: layers weigh 1, and go one by one to the
        lightest stage. Of equals, inner stages come first in their order, then the first stage,
        then the last. With no weights the counts differ by at most 1 and follow the rule of
        :func:`perfmodel.mesh.layers_before`, which is what ``layout=balanced`` means in a plan.
        No stage is empty unless there are more stages than layers.

        Parameters
        ----------
        architecture : Architecture
            Whose layers to lay out; prediction layers go on the last stage.
        pp, vpp : int
            Devices, and chunks on each.
        embedding, head, mtp : float
            What the embedding, the head and each prediction layer weigh, in decoder layers.
        """
        if min(pp, vpp) < 1 or min(embedding, head, mtp) < 0.0:
            raise PerfmodelError("A balanced layout needs pp, vpp >= 1 and weights >= 0.")
        behind = head + mtp * architecture.mtp_layers
        counts = balanced_counts(architecture.n_layers, pp * vpp, embedding, behind)
        return cls.from_counts(counts, pp, mtp=architecture.mtp_layers)

    @property
    def vpp(self) -> int:
        """Chunks on each device."""
        return len(self.stages) // self.pp

    @property
    def counts(self) -> tuple[int, ...]:
        """Decoder layers of each virtual stage."""
        return tuple(stage.layers for stage in self.stages)

    @property
    def n_layers(self) -> int:
        """All decoder layers."""
        return sum(self.counts)

    @property
    def n_mtp(self) -> int:
        """All prediction layers."""
        return sum(stage.mtp for stage in self.stages)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """First decoder layer of each virtual stage, and the first behind it."""
        return tuple(pairwise((0, *accumulate(self.counts))))

    def device(self, rank: int) -> Stage:
        """Sum up the chunks of one device."""
        chunks = self.stages[rank :: self.pp]
        return reduce(lambda a, b: Stage(*(x + y for x, y in zip(a, b, strict=True))), chunks)

    def __str__(self) -> str:
        """Write the layout string, runs of three or more equal stages as a group."""
        written = [str(stage) for stage in self.stages]
        text, final = "", written.pop()
        for stage, run in groupby(written):
            n = len(list(run))
            one = f"{stage}|"
            text += f"({one})*{n}" if n > 2 and stage else one * n
        return text + final
