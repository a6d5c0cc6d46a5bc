"""The geometry ladder of arXiv 2608.10605, Section 7.1: one seed scales a whole backbone."""

from __future__ import annotations

import re
from math import gcd

from perfmodel._integers import nearest_divisor
from perfmodel.architecture import Architecture
from perfmodel.errors import PerfmodelError
from perfmodel.parts import MAX_SIZE

GPT2_VOCABULARY = 50257
"""Vocabulary of the paper's runs (GPT-2 byte-pair encoding) [-]."""

HEAD_DIM = 128

MAX_SEED = 2**12
"""Largest seed: 16,384 layers of width 2,097,152 [-]."""


def ladder(
    q: int, n_experts: int, top_k: int, expert_split: int, vocab_size: int = GPT2_VOCABULARY
) -> Architecture:
    """Return the model at seed ``q`` with ``n_experts`` experts of split ``expert_split``.

    ``n_layers = n_heads = 4q``, heads of 128, so ``d_model = 512 q``; ``d_ff = 2.5 d_model``;
    ``d_expert = d_ff / G``. The first block is dense; each other one has a router, E experts of
    which K work on a token, and a shared expert of the width of one. Up to 8 key-value heads.

    Parameters
    ----------
    q : int
        Seed of the rung, at least 1.
    n_experts, top_k, expert_split : int
        E, K and G.

    Raises
    ------
    PerfmodelError
        A size below 1, ``top_k`` above ``n_experts``, or a split that does not divide ``d_ff``.
    """
    sizes = {"q": q, "E": n_experts, "K": top_k, "G": expert_split, "V": vocab_size}
    for name, value in sizes.items():
        largest = MAX_SEED if name == "q" else MAX_SIZE
        if not 1 <= value <= largest:
            near = min(max(value, 1), largest)
            raise PerfmodelError(f"{name}={value} must be from 1 to {largest}; nearest: {near}.")
    if top_k > n_experts:
        raise PerfmodelError(f"K={top_k} must be at most E={n_experts}; nearest: {n_experts}.")
    n_heads = 4 * q
    d_model = n_heads * HEAD_DIM
    d_ff = 5 * d_model // 2
    if d_ff % expert_split:
        near = nearest_divisor(d_ff, expert_split)
        raise PerfmodelError(f"G={expert_split} must divide d_ff={d_ff}; nearest: {near}.")
    width = d_ff // expert_split
    vocabulary = "" if vocab_size == GPT2_VOCABULARY else f",V={vocab_size}"
    return Architecture(
        name=f"ladder:q={q},E={n_experts},K={top_k},G={expert_split}{vocabulary}",
        n_layers=4 * q,
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=gcd(8, n_heads),
        head_dim=HEAD_DIM,
        d_ff=d_ff,
        vocab_size=vocab_size,
        n_experts=n_experts,
        top_k=top_k,
        d_expert=width,
        d_shared=width,
        first_k_dense=1,
    )


def parse_ladder(text: str) -> Architecture:
    """Read ``"ladder:q=12,E=96,K=2,G=4"``, with ``V=`` for another vocabulary than GPT-2's."""
    body = text.removeprefix("ladder:")
    values: dict[str, int] = {}
    for item in body.split(","):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or key not in ("q", "E", "K", "G", "V") or key in values:
            raise PerfmodelError(
                f"{item.strip()!r} is not a size of a ladder model, which takes each of q, E, K "
                "and G once (and V), as in ladder:q=12,E=96,K=2,G=4."
            )
        if not re.fullmatch(r"[0-9]{1,9}", value):
            raise PerfmodelError(f"{key}={value!r} must be a whole number of at least 1.")
        values[key] = int(value)
    missing = [key for key in ("q", "E", "K", "G") if key not in values]
    if missing:
        raise PerfmodelError(
            f"{text!r} lacks {', '.join(missing)}, as in ladder:q=12,E=96,K=2,G=4."
        )
    return ladder(
        values["q"],
        values["E"],
        values["K"],
        values["G"],
        values.get("V", GPT2_VOCABULARY),
    )
