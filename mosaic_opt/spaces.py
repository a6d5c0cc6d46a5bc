"""Spaces of candidates: the ladder's grid, families of other shapes, lists, and unions of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from itertools import chain, product
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from perfmodel.architecture import Architecture
from perfmodel.families import family_model, rounded
from perfmodel.frozen import Frozen
from perfmodel.ladders import GPT2_VOCABULARY, HEAD_DIM, ladder

MAX_CANDIDATES = 1_000_000

Rung = Annotated[int, Field(ge=1, le=4096, strict=True)]
Experts = Annotated[int, Field(ge=1, le=65536, strict=True)]
Vocabulary = Annotated[int, Field(ge=1, le=2**30, strict=True)]
LeastSparsity = Annotated[float, Field(ge=0.0, lt=1.0, strict=True)]
MostSparsity = Annotated[float, Field(gt=0.0, le=1.0, strict=True)]


class LadderSpace(Frozen):
    """A grid over the ladder of arXiv 2608.10605: every (q, E, K, G) with K at most E.

    ``min_sparsity`` and ``max_sparsity`` bound S = 1 - N_act / N_tot, the guard that keeps the
    search inside the range that the law was fitted on.
    """

    kind: Literal["ladder"] = "ladder"
    q: tuple[Rung, ...] = Field(min_length=1)
    n_experts: tuple[Experts, ...] = Field(min_length=1)
    top_k: tuple[Experts, ...] = Field(min_length=1)
    expert_split: tuple[Experts, ...] = Field(min_length=1)
    vocab_size: Vocabulary = GPT2_VOCABULARY
    min_sparsity: LeastSparsity = 0.0
    max_sparsity: MostSparsity = 1.0

    @property
    def grid_size(self) -> int:
        """Points of the grid, before any is dropped."""
        return len(self.q) * len(self.n_experts) * len(self.top_k) * len(self.expert_split)

    def architectures(self) -> tuple[Architecture, ...]:
        """Return the models of the grid, in the order of (q, E, K, G)."""
        axes = (sorted(set(a)) for a in (self.q, self.n_experts, self.top_k, self.expert_split))
        models = (ladder(q, e, k, g, self.vocab_size) for q, e, k, g in product(*axes) if k <= e)
        return tuple(m for m in models if self.min_sparsity <= m.sparsity <= self.max_sparsity)


class ExplicitSpace(Frozen):
    """Architectures listed one by one."""

    kind: Literal["explicit"]
    models: tuple[Architecture, ...] = Field(min_length=1)

    @property
    def grid_size(self) -> int:
        """Number of models listed."""
        return len(self.models)

    def architectures(self) -> tuple[Architecture, ...]:
        """Return the models as listed."""
        return self.models


Width = Annotated[int, Field(ge=1, le=2**20, strict=True)]
HeadDim = Annotated[int, Field(ge=1, le=65536, strict=True)]
Aspect = Annotated[float, Field(ge=1.0, le=2.0**20, strict=True)]
Ratio = Annotated[float, Field(ge=1e-3, le=64.0, strict=True)]
Shared = Annotated[int, Field(ge=0, le=16, strict=True)]
Leading = Annotated[int, Field(ge=0, le=2**20, strict=True)]
Multiple = Annotated[int, Field(ge=1, le=65536, strict=True)]

_LADDER_ASPECT, _LADDER_FF_RATIO = 128.0, 2.5


class _Point(NamedTuple):
    """One point of a family's grid: ratios, from which the sizes follow."""

    d_model: int
    aspect_ratio: float
    ff_ratio: float
    head_dim: int
    n_kv_heads: int | None
    first_k_dense: int
    n_experts: int
    top_k: int
    expert_split: int
    shared_experts: int


class FamilySpace(Frozen):
    """A grid over the shapes of a mixture of experts; with one value each, the ladder's shape.

    Attributes
    ----------
    d_model : tuple of int
        Widths; ``d_model / head_dim`` heads.
    aspect_ratio : tuple of float
        ``d_model / n_layers`` [-]; 128 on the ladder.
    ff_ratio : tuple of float
        ``d_ff / d_model`` [-]; 2.5 on the ladder.
    head_dim : tuple of int
        Width of a head; 128 on the ladder.
    n_kv_heads : tuple of int, optional
        Key and value heads; ``gcd(8, n_heads)``, as on the ladder, unless given.
    first_k_dense : tuple of int
        Leading dense layers; 1 on the ladder.
    n_experts, top_k, expert_split : tuple of int
        E, K and G; ``d_expert`` is ``d_ff / G``, and the law reads G from the widths as they are.
    shared_experts : tuple of int
        Width of the shared expert over that of one expert; 1 on the ladder.
    vocab_size : int
    tile : int, optional
        ``d_ff`` and ``d_expert`` are rounded to the nearest multiple. Without it a point whose
        widths are no whole numbers is dropped.
    layers_multiple : int, optional
        The same for the number of layers.
    min_sparsity, max_sparsity : float
        Bounds of S.
    """

    kind: Literal["family"]
    d_model: tuple[Width, ...] = Field(min_length=1)
    aspect_ratio: tuple[Aspect, ...] = Field(default=(_LADDER_ASPECT,), min_length=1)
    ff_ratio: tuple[Ratio, ...] = Field(default=(_LADDER_FF_RATIO,), min_length=1)
    head_dim: tuple[HeadDim, ...] = Field(default=(HEAD_DIM,), min_length=1)
    n_kv_heads: Annotated[tuple[HeadDim, ...], Field(min_length=1)] | None = None
    first_k_dense: tuple[Leading, ...] = Field(default=(1,), min_length=1)
    n_experts: tuple[Experts, ...] = Field(min_length=1)
    top_k: tuple[Experts, ...] = Field(min_length=1)
    expert_split: tuple[Experts, ...] = Field(min_length=1)
    shared_experts: tuple[Shared, ...] = Field(default=(1,), min_length=1)
    vocab_size: Vocabulary = GPT2_VOCABULARY
    tile: Multiple | None = None
    layers_multiple: Multiple | None = None
    min_sparsity: LeastSparsity = 0.0
    max_sparsity: MostSparsity = 1.0

    @property
    def _axes(self) -> tuple[list[float] | list[None], ...]:
        kept = {**self.__dict__, "n_kv_heads": self.n_kv_heads or (None,)}
        return tuple(
            values if None in values else sorted(values)
            for values in (list(set(kept[name])) for name in _Point._fields)
        )

    @property
    def grid_size(self) -> int:
        """Points of the grid, before any is dropped."""
        size = 1
        for axis in self._axes:
            size *= len(axis)
        return size

    def _model(self, point: _Point) -> Architecture | str:
        """Return the model of a point, or the reason why it has none or is out of bounds."""
        width = point.ff_ratio * point.d_model
        depth = point.d_model / point.aspect_ratio
        exact = (width, width / point.expert_split)
        d_ff, d_expert = (rounded(value, self.tile) for value in exact)
        n_layers = rounded(depth, self.layers_multiple)
        if d_ff is None or d_expert is None:
            return "d_ff or d_expert is no whole number"
        if n_layers is None:
            return "n_layers is no whole number"
        if point.d_model % point.head_dim:
            return "head_dim does not divide d_model"
        if point.n_kv_heads and (point.d_model // point.head_dim) % point.n_kv_heads:
            return "n_kv_heads does not divide the heads"
        if point.top_k > point.n_experts:
            return "top_k is above n_experts"
        if point.first_k_dense >= n_layers:
            return "no layer has experts"
        moved = (d_ff, d_expert) != (
            rounded(width, None),
            rounded(width / point.expert_split, None),
        )
        model = family_model(
            d_model=point.d_model,
            n_layers=n_layers,
            d_ff=d_ff,
            n_experts=point.n_experts,
            top_k=point.top_k,
            d_expert=d_expert,
            d_shared=point.shared_experts * d_expert,
            n_kv_heads=point.n_kv_heads,
            head_dim=point.head_dim,
            first_k_dense=point.first_k_dense,
            vocab_size=self.vocab_size,
            tile=self.tile if moved else None,
            layers_multiple=self.layers_multiple if n_layers != rounded(depth, None) else None,
        )
        if not self.min_sparsity <= model.sparsity <= self.max_sparsity:
            return "sparsity is out of bounds"
        return model

    def _models(self) -> Iterator[Architecture | str]:
        return (self._model(_Point(*values)) for values in product(*self._axes))  # type: ignore[arg-type]

    @cached_property
    def _kept(self) -> tuple[tuple[Architecture, ...], dict[str, int]]:
        return _without_repeats(self._models())

    @property
    def dropped(self) -> dict[str, int]:
        """How many points of the grid are no candidate, by reason; with them they add up to it."""
        return dict(self._kept[1])

    def architectures(self) -> tuple[Architecture, ...]:
        """Return the models of the grid in the order of its axes, each shape once."""
        return self._kept[0]

    @model_validator(mode="after")
    def _some_model(self) -> FamilySpace:
        if self.grid_size <= MAX_CANDIDATES and all(isinstance(m, str) for m in self._models()):
            reasons = ", ".join(f"{n} because {why}" for why, n in self.dropped.items())
            raise ValueError(f"no point of the grid is a candidate: {reasons}")
        return self


_REPEATED = "the same shape came before"


def shape_of(architecture: Architecture) -> dict[str, float]:
    """Return the ratios of sizes that `lawfit.ShapeRange` speaks of, those that there are [-]."""
    a = architecture
    shape = {
        "aspect_ratio": a.d_model / a.n_layers,
        "head_dim": float(a.head_dim),
        "n_kv_heads": float(a.n_kv_heads),
    }
    if a.d_ff:
        shape["ff_ratio"] = a.d_ff / a.d_model
    if a.n_experts:
        shape["shared_experts"] = a.d_shared / a.d_expert
        shape["first_k_dense"] = float(a.first_k_dense)
    return shape


def shape_key(architecture: Architecture) -> tuple[object, ...]:
    """Return all that an architecture is beside its name."""
    fields = (name for name in Architecture.model_fields if name != "name")
    return tuple(getattr(architecture, name) for name in fields)


def _without_repeats(
    models: Iterator[Architecture | str],
) -> tuple[tuple[Architecture, ...], dict[str, int]]:
    """Keep the first model of each shape, and count what is not kept by its reason."""
    kept: dict[tuple[object, ...], Architecture] = {}
    dropped: Counter[str] = Counter()
    for model in models:
        if isinstance(model, str):
            dropped[model] += 1
        elif (key := shape_key(model)) in kept:
            dropped[_REPEATED] += 1
        else:
            kept[key] = model
    return tuple(kept.values()), dict(dropped)


OneSpace = Annotated[LadderSpace | ExplicitSpace | FamilySpace, Field(discriminator="kind")]


class UnionSpace(Frozen):
    """Several spaces as one; of models of one shape the first is kept."""

    kind: Literal["union"]
    spaces: tuple[OneSpace, ...] = Field(min_length=1)

    @property
    def grid_size(self) -> int:
        """Points of all grids, before any is dropped."""
        return sum(space.grid_size for space in self.spaces)

    @cached_property
    def _kept(self) -> tuple[tuple[Architecture, ...], dict[str, int]]:
        return _without_repeats(chain.from_iterable(s.architectures() for s in self.spaces))

    @property
    def dropped(self) -> dict[str, int]:
        """How many points of the grids are no candidate, by reason; with them they add up."""
        total = Counter(self._kept[1])
        for space in self.spaces:
            if isinstance(space, FamilySpace):
                total.update(space.dropped)
            elif left := space.grid_size - len(space.architectures()):
                total["top_k, sparsity or a repetition in a grid of the ladder"] += left
        return dict(total)

    def architectures(self) -> tuple[Architecture, ...]:
        """Return the models of the spaces in order, each shape once."""
        return self._kept[0]

    @model_validator(mode="after")
    def _one_shape_a_name(self) -> UnionSpace:
        listed = (m for s in self.spaces if isinstance(s, ExplicitSpace) for m in s.models)
        shapes: dict[str, tuple[object, ...]] = {}
        for model in listed:
            if shapes.setdefault(model.name, shape_key(model)) != shape_key(model):
                raise ValueError(
                    f"two models of different shape have the name {model.name!r}; give each its own"
                )
        return self
