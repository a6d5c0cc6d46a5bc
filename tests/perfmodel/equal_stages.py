"""Prices of plans with equal stages, to be kept as they are.

``python -m tests.perfmodel.equal_stages`` writes the document `golden/equal_stages.json`: step time
and memory of each stage, as hexadecimal floats. It was made before stages could be uneven, and
again when selective recompute was to keep attention's output, hand-offs to follow the chunks and
expert rows to be gathered over ETP: only plans with one of these moved.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from perfmodel import catalogue
from perfmodel.cluster import Batch
from perfmodel.memory import stage_total
from perfmodel.plan import Plan

from .strategies import Run, cluster, dense, latent, legal_rows, moe, profile, skeleton

HERE = Path(__file__).parent / "golden" / "equal_stages.json"


def cases() -> dict[str, Any]:
    """Return models of every kind by name."""
    return {
        "sparse": moe(n_layers=12),
        "dense": dense(n_layers=8, tied_embeddings=True),
        "latent": moe(n_layers=12, first_k_dense=3, mtp_layers=1, **latent()),
        "every third": moe(n_layers=12, moe_every=3, mtp_layers=2, tied_embeddings=True),
        "Qwen3-30B-A3B": catalogue["Qwen3-30B-A3B"],
    }


def priced(name: str, text: str) -> tuple[float, ...]:
    """Return the step time [s] and the memory of each stage [B]."""
    batch = Batch(global_batch=96, seq_len=2048)
    plan = Plan.parse(text)
    model = Run(cases()[name], plan, cluster(2), batch).under(profile())
    memory = (float(stage_total(model.stage(i))) for i in range(plan.pp))
    return (float(model.step_s), *memory)


def rows(name: str) -> list[str]:
    """Return some legal plans of a model, as text."""
    table = skeleton(2, 2048, 96)
    legal = legal_rows(cases()[name], table)
    return [str(table.plan(int(i))) for i in legal[:: max(1, len(legal) // 24)]]


if __name__ == "__main__":
    found = [
        [name, text, [value.hex() for value in priced(name, text)]]
        for name in cases()
        for text in rows(name)
    ]
    text = "[\n" + ",\n".join(json.dumps(entry) for entry in found) + "\n]\n"
    HERE.write_text(text, encoding="utf-8")
