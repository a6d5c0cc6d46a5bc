"""The degrees and the stage layout of a published run, with what its row leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from perfmodel.architecture import Architecture
from perfmodel.errors import PerfmodelError
from perfmodel.stages import BALANCED, stages_of
from perfmodel.validation.published_notes import number

__all__ = ["Cells", "Degrees", "degrees_of", "layout_of"]

# Micro-batch and chunks of each device, from Megatron-LM's examples/sc21/run_table_1.sh (which
# gives layers per chunk).
_SC21 = {
    "GPT-1.7B": (16, 1),
    "GPT-3.6B": (16, 1),
    "GPT-7.5B": (16, 1),
    "GPT-18.4B": (8, 1),
    "GPT-39.1B": (4, 1),
    "GPT-76.1B": (2, 3),
    "GPT-145.6B": (2, 2),
    "GPT-310.1B": (1, 2),
    "GPT-529.6B": (1, 3),
    "GPT-1008B": (1, 1),
}

# Sources that state no micro-batch; their replicas work on few sequences a step, or long ones.
_ONE_SEQUENCE = (
    "MegaScale",
    "MoE Parallel Folding",
    "Llama 3 Herd",
    "NeMo docs long-sequence",
    "Megatron-MoE-ModelZoo",
)

# Sources that print every degree they use, so that an empty cell of these degrees means 1.
_COMPLETE = ("TorchTitan",)


class Cells(NamedTuple):
    """A row's numbers; None where a cell is empty."""

    source: str
    label: str
    n_gpus: int | None
    seq_len: int | None
    global_batch: int | None
    tp: int | None
    pp: int | None
    vpp: int | None
    cp: int | None
    ep: int | None
    etp: int | None
    dp: int | None
    micro_batch: int | None
    facts: Mapping[str, str]


class Degrees(NamedTuple):
    """All degrees of a run, its batch, and what was assumed."""

    n_gpus: int
    seq_len: int
    global_batch: int
    tp: int
    pp: int
    vpp: int
    cp: int
    ep: int
    etp: int
    dp: int
    micro_batch: int
    assumptions: tuple[str, ...]


def _whole(facts: Mapping[str, str], key: str) -> int | None:
    found = number(facts, key)
    return None if found is None else int(found)


def _tensor_and_pipeline(c: Cells, assumed: list[str]) -> tuple[int, int]:
    tp, pp = c.tp, c.pp
    if c.source.startswith(_COMPLETE):
        tp, pp = tp or 1, pp or 1
    if c.facts.get("remark", "").startswith("model-parallel size 96") and tp is None:
        assumed.append("tp=8 and pp=12 taken for the stated model-parallel size of 96")
        tp, pp = 8, 12
    missing = [name for name, value in (("tp", tp), ("pp", pp)) if value is None]
    if tp is None or pp is None:
        raise PerfmodelError(f"The row does not state {' and '.join(missing)}.")
    return tp, pp


def _chunks(c: Cells, pp: int, assumed: list[str]) -> int:
    """Return the chunks of each device; a pipeline of one stage has one."""
    layout = c.facts.get("pp_layout", "")
    if c.vpp is not None:
        vpp = c.vpp
    elif "|" in layout:
        vpp = max(1, len(stages_of(layout)) // pp)
    elif c.source.startswith("Narayanan") and c.label in _SC21:
        vpp = _SC21[c.label][1]
    else:
        vpp = _whole(c.facts, "vpp") or 1
        if pp > 1 and c.source.startswith(("MoE Parallel", "Llama 3", "Narayanan")):
            assumed.append("chunks of the pipeline not stated: vpp=1 taken")
    return vpp if pp > 1 else 1


def _experts(c: Cells, a: Architecture, tp: int, assumed: list[str]) -> tuple[int, int]:
    if not a.n_experts:
        return 1, 1
    method = c.facts.get("method", "")
    ep = c.ep
    if ep is None:
        if c.source.startswith("MoE Parallel") and method == "FSDP":
            ep = 1
        else:
            raise PerfmodelError("The row does not state ep, the degree of expert parallelism.")
    etp = c.etp
    if etp is None and c.source.startswith("MoE Parallel") and "Folding" not in method:
        assumed.append(f"etp=tp={tp} taken, the only choice without folding")
        etp = tp
    return ep, etp or 1


def _micro_batch(c: Cells, pp: int, assumed: list[str]) -> int:
    local = _whole(c.facts, "local_batch")
    if c.micro_batch is not None:
        return c.micro_batch
    if c.source.startswith("Narayanan") and c.label in _SC21:
        return _SC21[c.label][0]
    if c.source.startswith("TorchTitan") and local and local % pp == 0:
        # torchtitan of that time cuts the local batch into as many microbatches as stages.
        assumed.append(f"{pp} microbatches taken, TorchTitan's default for pp={pp}")
        return local // pp
    if c.source.startswith(_ONE_SEQUENCE):
        assumed.append("micro-batch not stated: 1 taken")
        return 1
    raise PerfmodelError("The row does not state its micro-batch.")


def _global_batch(c: Cells, seq_len: int, pp: int, dp: int, mbs: int, assumed: list[str]) -> int:
    counted = _whole(c.facts, "micro_batches")
    if c.global_batch is not None:
        batch = c.global_batch
        if c.source.startswith("HF nanotron") and batch % seq_len == 0:
            return batch // seq_len  # rows without a rate print tokens
        return batch
    if counted is not None:
        return counted * mbs * dp
    if c.source.startswith("TorchTitan"):
        assumed.append("no gradient accumulation taken, TorchTitan's default")
        return mbs * dp * (pp if pp > 1 else 1)
    if c.source.startswith("Korthikanti"):
        assumed.append("global batch taken in proportion to dp: 280 sequences a replica")
        return 280 * dp
    if "16M tokens per global batch" in c.facts.get("remark", ""):
        return 2**24 // seq_len
    raise PerfmodelError("The row does not state its global batch.")


def degrees_of(c: Cells, a: Architecture) -> Degrees:
    """Complete a row's degrees.

    Raises
    ------
    PerfmodelError
        A degree is not stated, or the printed ones do not multiply out to the devices.
    """
    if c.n_gpus is None:
        raise PerfmodelError("The row does not state its number of devices.")
    if c.seq_len is None:
        raise PerfmodelError("The row does not state its sequence length.")
    assumed: list[str] = []
    tp, pp = _tensor_and_pipeline(c, assumed)
    cp = c.cp or 1
    vpp = _chunks(c, pp, assumed)
    if c.n_gpus % (tp * pp * cp):
        raise PerfmodelError(f"tp*pp*cp={tp * pp * cp} does not divide {c.n_gpus} devices.")
    dp = c.n_gpus // (tp * pp * cp)
    if c.dp is not None and c.dp != dp:
        raise PerfmodelError(
            f"The printed dp={c.dp} does not multiply out: tp*pp*cp*dp={tp * pp * cp * c.dp} "
            f"on {c.n_gpus} devices, where {dp} would."
        )
    ep, etp = _experts(c, a, tp, assumed)
    mbs = _micro_batch(c, pp, assumed)
    batch = _global_batch(c, c.seq_len, pp, dp, mbs, assumed)
    return Degrees(
        n_gpus=c.n_gpus,
        seq_len=c.seq_len,
        global_batch=batch,
        tp=tp,
        pp=pp,
        vpp=vpp,
        cp=cp,
        ep=ep,
        etp=etp,
        dp=dp,
        micro_batch=mbs,
        assumptions=tuple(assumed),
    )


# Rows whose source says that embedding and loss count as layers of the pipeline:
# Megatron-Bridge's and NeMo's recipes (account_for_embedding_in_pipeline_split), BigScience's
# partition "type:transformer|embedding", arXiv 2407.21783 section 3.3.2.
_ENDS_COUNT = ("Megatron", "NeMo docs", "BigScience", "Llama 3 Herd")

# Rows whose source fills stages from the front: Megatron-Bridge's layouts of DeepSeek-V3, and
# DeepSpeed's even partition (78 layers on 12 stages are eleven of 7 and one of 1).
_FROM_THE_FRONT = ("Megatron", "BigScience")


def layout_of(
    source: str, facts: Mapping[str, str], a: Architecture, pp: int, vpp: int
) -> tuple[str | None, str | None]:
    """Return the layout of a run as :class:`perfmodel.plan.Plan` takes it, and what was assumed.

    None asks for equal stages. Without a printed layout, layers that the stages do not divide are
    laid out so that embedding and loss count as one layer each, where that divides; else from the
    front, where the source does so; else balanced.
    """
    printed = facts.get("pp_layout", "")
    if "|" in printed:
        return printed, None
    stages = pp * vpp
    if a.n_layers % stages == 0:
        return None, None
    if (a.n_layers + 2) % stages == 0:
        each = (a.n_layers + 2) // stages
        counts = [each - 1, *[each] * (stages - 2), each - 1]
        known = source.startswith(_ENDS_COUNT)
        note = None if known else "embedding and loss taken to count as layers of the pipeline"
        return "/".join(map(str, counts)), note
    each = -(-a.n_layers // stages)
    if source.startswith(_FROM_THE_FRONT) and each * (stages - 1) < a.n_layers:
        counts = [*[each] * (stages - 1), a.n_layers - each * (stages - 1)]
        return "/".join(map(str, counts)), None
    return BALANCED, "stage layout not stated: balanced taken"
