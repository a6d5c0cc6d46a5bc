"""Models of any depth, widths and heads, by ratios of sizes or by their text form.

The ladder (:mod:`perfmodel.ladders`) has one seed and fixed ratios. Here every ratio is free:
layers follow from the width and an aspect ratio, the widths of feed-forward blocks from the width
and a ratio, and both can be rounded to a multiple that the kernels like. A name has every size
that is not the ladder's choice, so it is the text that makes the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import floor, gcd, isclose

from perfmodel._integers import nearest_divisor
from perfmodel.architecture import Architecture
from perfmodel.errors import PerfmodelError
from perfmodel.ladders import GPT2_VOCABULARY, HEAD_DIM
from perfmodel.parts import MAX_SIZE

PREFIX = "family:"
_NEEDED = ("d", "L", "ff", "E", "K", "de")
_OPTIONAL = ("ds", "kv", "hd", "dense", "V", "tile", "layers")
_FROM_ZERO = ("ds", "dense")


def rounded(value: float, multiple: int | None) -> int | None:
    """Return the multiple nearest to a value above 0, the upper of equals, at least one of it.

    Parameters
    ----------
    value : float
        A size [-].
    multiple : int, optional
        What the size must be a multiple of; None asks for the value itself.

    Returns
    -------
    int or None
        None where no multiple is given and the value is no whole number of at least 1.
    """
    if multiple is not None:
        return multiple * max(1, floor(value / multiple + 0.5))
    whole = round(value)
    return whole if whole >= 1 and isclose(value, whole, rel_tol=1e-12) else None


def family_model(
    *,
    d_model: int,
    n_layers: int,
    d_ff: int,
    n_experts: int,
    top_k: int,
    d_expert: int,
    d_shared: int | None = None,
    n_kv_heads: int | None = None,
    head_dim: int = HEAD_DIM,
    first_k_dense: int = 1,
    vocab_size: int = GPT2_VOCABULARY,
    tile: int | None = None,
    layers_multiple: int | None = None,
) -> Architecture:
    """Return a mixture of experts of the given sizes, with ``d_model / head_dim`` heads.

    Parameters
    ----------
    d_model, n_layers, d_ff, n_experts, top_k, d_expert
        As in `Architecture`.
    d_shared : int, optional
        Width of the shared expert; that of one expert unless given, 0 for none.
    n_kv_heads : int, optional
        The ladder's, ``gcd(8, n_heads)``, unless given.
    head_dim, first_k_dense, vocab_size : int
        The ladder's unless given.
    tile, layers_multiple : int, optional
        What ``d_ff`` and ``d_expert``, and the layers, were rounded to a multiple of; the name
        says so, and nothing else does.

    Raises
    ------
    PerfmodelError
        Sizes that contradict each other; one sentence.
    """
    if d_model % head_dim:
        near = nearest_divisor(d_model, head_dim)
        raise PerfmodelError(f"hd={head_dim} must divide d={d_model}; nearest: {near}.")
    n_heads = d_model // head_dim
    n_kv = gcd(8, n_heads) if n_kv_heads is None else n_kv_heads
    shared = d_expert if d_shared is None else d_shared
    if n_heads % n_kv:
        near = nearest_divisor(n_heads, n_kv)
        raise PerfmodelError(f"kv={n_kv} must divide the {n_heads} heads; nearest: {near}.")
    if not 1 <= top_k <= n_experts:
        near = min(max(top_k, 1), n_experts)
        raise PerfmodelError(f"K={top_k} must be from 1 to E={n_experts}; nearest: {near}.")
    if first_k_dense >= n_layers:
        raise PerfmodelError(
            f"dense={first_k_dense} must be below L={n_layers}, or no layer has experts; "
            f"nearest: {n_layers - 1}."
        )
    written = {"d": d_model, "L": n_layers, "ff": d_ff, "E": n_experts, "K": top_k, "de": d_expert}
    own: dict[str, tuple[int | None, int | None]] = {  # where a size is not the ladder's choice
        "ds": (shared, d_expert),
        "kv": (n_kv, gcd(8, n_heads)),
        "hd": (head_dim, HEAD_DIM),
        "dense": (first_k_dense, 1),
        "V": (vocab_size, GPT2_VOCABULARY),
        "tile": (tile, None),
        "layers": (layers_multiple, None),
    }
    for key, (size, usual) in own.items():
        if size is not None and size != usual:
            written[key] = size
    return Architecture(
        name=PREFIX + ",".join(f"{key}={value}" for key, value in written.items()),
        n_layers=n_layers,
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_kv,
        head_dim=head_dim,
        d_ff=d_ff,
        vocab_size=vocab_size,
        n_experts=n_experts,
        top_k=top_k,
        d_expert=d_expert,
        d_shared=shared,
        first_k_dense=first_k_dense,
    )


def parse_family(text: str) -> Architecture:
    """Read ``"family:d=5120,L=48,ff=13696,E=96,K=2,de=3456"``, the name of a model of a family.

    Also ``ds`` (shared expert), ``kv`` (key-value heads), ``hd`` (width of a head), ``dense``
    (leading dense layers), ``V`` (vocabulary), and what sizes were rounded to, ``tile`` and
    ``layers``.

    Raises
    ------
    PerfmodelError
        Not of that form, or sizes that contradict each other; one sentence.
    """
    values = _read(text)
    return family_model(
        d_model=values["d"],
        n_layers=values["L"],
        d_ff=values["ff"],
        n_experts=values["E"],
        top_k=values["K"],
        d_expert=values["de"],
        d_shared=values.get("ds"),
        n_kv_heads=values.get("kv"),
        head_dim=values.get("hd", HEAD_DIM),
        first_k_dense=values.get("dense", 1),
        vocab_size=values.get("V", GPT2_VOCABULARY),
        tile=values.get("tile"),
        layers_multiple=values.get("layers"),
    )


def _read(text: str) -> Mapping[str, int]:
    values: dict[str, int] = {}
    example = "as in family:d=5120,L=48,ff=13696,E=96,K=2,de=3456."
    for item in text.removeprefix(PREFIX).split(","):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or key not in (*_NEEDED, *_OPTIONAL) or key in values:
            raise PerfmodelError(
                f"{item.strip()!r} is not a size of a model of a family, which takes each of "
                f"{', '.join(_NEEDED)} once (and {', '.join(_OPTIONAL)}), {example}"
            )
        least = 0 if key in _FROM_ZERO else 1
        if not re.fullmatch(r"[0-9]{1,10}", value) or not least <= int(value) <= MAX_SIZE:
            raise PerfmodelError(
                f"{key}={value!r} must be a whole number from {least} to {MAX_SIZE}."
            )
        values[key] = int(value)
    missing = [key for key in _NEEDED if key not in values]
    if missing:
        raise PerfmodelError(f"{text!r} lacks {', '.join(missing)}, {example}")
    return values
