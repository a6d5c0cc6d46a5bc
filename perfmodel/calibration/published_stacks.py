"""Which stacks are fitted to published runs: whose runs, which constants, what is assumed.

Every spec says which rows are the stack's, which of its switches a row has on, and which half of
the rows fits it. Rows of one layout of one model on one device are in the same half, so that a run
that was repeated under a later release does not score what its twin fitted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from perfmodel.validation.published import PublishedRun

MEANING = {
    "host_layer_s": ("s", "A: host time of one layer for one microbatch, both passes"),
    "host_microbatch_s": ("s", "H: host time of one microbatch on a stage beside its layers"),
    "device_scale": ("-", "k: time of device kernels over that of the pack's surfaces"),
    "attention_scale": ("-", "time of fused attention over that of the pack's surface, beside k"),
    "step_host_s": ("s", "host time once a step: optimizer launches, data loader, logging"),
    "tp_exposed": ("-", "TP's collectives that compute does not hide, over the pack's time"),
    "dp_hidden": ("-", "share of gradient and weight exchange behind compute"),
    "a2a_hidden": ("-", "share of the expert all-to-all behind compute"),
    "score_bytes": ("B", "moved for each attention score, forward; attention is not fused"),
    "launch_share": ("-", "share of the launches of grouped products that remain"),
}
"""Unit and meaning of the constants that published runs fit."""

START = {
    "host_layer_s": 2e-3,
    "host_microbatch_s": 2e-3,
    "device_scale": 1.1,
    "attention_scale": 1.2,
    "step_host_s": 0.05,
    "tp_exposed": 0.7,
    "dp_hidden": 0.3,
    "a2a_hidden": 0.5,
    "score_bytes": 12.0,
    "launch_share": 0.5,
}
"""Where the fit starts; shares stay in [0, 1], everything else above 0."""

ASSUMED: Mapping[str, tuple[float, str]] = {
    "host_layer_s": (
        0.0,
        "host time is not told apart on the fitted runs, which are bound by their devices",
    ),
    "host_microbatch_s": (0.0, "not told apart from the host time of layers"),
    "jitter_s": (0.0, "not told apart from the other times"),
    "pipeline_node_cost": (0.0, "a further node of pipeline depth costs its hand-offs alone"),
    "device_scale": (1.0, "kernels run as the pack's surfaces say"),
    "attention_scale": (1.0, "attention runs as the pack's surface says"),
    "elementwise_scale": (1.0, "kernels that move bytes are as few as the formulas count"),
    "router_scale": (1.0, "the router is one product and one selection"),
    "optimizer_scale": (1.0, "one kernel reads and writes each state once"),
    "step_host_s": (0.0, "not told apart from the other times"),
    "tp_exposed": (1.0, "TP's collectives are exposed, and as fast as the pack says"),
    "dp_hidden": (0.0, "the exchange of gradients and weights is exposed"),
    "pp_hidden": (1.0, "hand-offs are exposed while the pipeline fills and drains only"),
    "a2a_hidden": (0.0, "the expert all-to-all is exposed"),
    "copies_once": (0.0, "an all-to-all of all K copies of a token"),
    "score_bytes": (0.0, "attention is fused: no score is written"),
    "launch_share": (0.0, "launches of grouped products are part of the host time of a layer"),
    "forward_share": (
        0.3,
        "of the host time of a layer; backward passes launch about 2.3 times as many kernels",
    ),
    "backward_share": (0.7, "see forward_share"),
    "dense_layer_share": (0.5, "a dense layer launches about half as many kernels as a sparse one"),
    "selective_replay": (0.05, "attention is one call of about twenty in a forward pass"),
    "super_selective_replay": (
        0.15,
        "two norms, attention and the gated unit, of about twenty-five calls",
    ),
    "gradient_bytes": (4.0, "gradients are reduced in fp32"),
    "optimizer_matmul_eff": (0.5, "of dense peak, in Newton-Schulz iterations"),
}
"""Constants of a stack that neither fits nor states them otherwise, each with its note."""


@dataclass(frozen=True)
class Switch:
    """A variant of a stack: what turns it on in a run, and what it changes."""

    description: str
    on: Callable[[PublishedRun], bool]
    fitted: tuple[str, ...] = ()
    assumed: Mapping[str, tuple[float, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class StackSpec:
    """One stack that is fitted to published runs."""

    name: str
    description: str
    takes: Callable[[PublishedRun], bool]
    fitted: tuple[str, ...]
    assumed: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    switches: Mapping[str, Switch] = field(default_factory=dict)
    memory: str = "megatron-te"  # memory profile that goes with it
    published: bool = True  # rows that ship with the package; else a table given by path

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the fitted constants; those of a switch as ``switch.constant``."""
        own = [f"{name}.{key}" for name, s in self.switches.items() for key in s.fitted]
        return (*self.fitted, *own)

    def assumptions(self) -> dict[str, tuple[float, str]]:
        """Return every constant that the stack without switches does not fit, with its note."""
        every = {**ASSUMED, **self.assumed}
        return {name: value for name, value in every.items() if name not in self.fitted}

    def switches_of(self, run: PublishedRun) -> tuple[str, ...]:
        """Return the switches that a run has on."""
        return tuple(name for name, switch in self.switches.items() if switch.on(run))


def layout_key(run: PublishedRun) -> str:
    """Return the text that is alike in repeated measurements of one layout."""
    degrees = (run.tp, run.pp, run.vpp, run.cp, run.ep, run.etp, run.dp, run.micro_batch)
    size = (run.architecture.name, run.architecture.n_layers, run.architecture.d_model)
    return repr((*size, run.hardware, run.seq_len, degrees))


def fits(run: PublishedRun) -> bool:
    """Say whether a run fits its stack (or scores it): a fixed half of the layouts."""
    digest = hashlib.sha256(layout_key(run).encode()).digest()
    return digest[0] % 2 == 0


def _from(*prefixes: str) -> Callable[[PublishedRun], bool]:
    return lambda run: run.source.startswith(prefixes)


BF16_GRADIENTS = (2.0, "gradients are reduced in 16 bits")
HIDDEN_EXCHANGE = (0.9, "overlap of gradient and weight exchange is on")

ONCE = (1.0, "DeepEP or HybridEP: a token goes once to each node that has experts of it")
SOME_TP_HIDDEN = (0.5, "overlap of TP is on where the recipes have TP")
WRITTEN_SCORES = (12.0, "as fitted on megatron-core-2021: attention is not fused")
EVERY_DENSE = (1.0, "every layer is dense")


def _graphs(run: PublishedRun) -> bool:
    scopes = ("attn", "partial", "full_iteration")
    return any(scope in (run.cuda_graph_scope or "") for scope in scopes)


_EAGER = Switch(
    "No CUDA graphs, or over the router alone.",
    lambda run: run.recipe is not None and not _graphs(run) and run.container != "26.08",
    ("host_layer_s",),
)
_COPIES = Switch(
    "An all-to-all of all K copies of a token.",
    lambda run: (run.dispatcher or "").lower() in ("alltoall", "a2a"),
    (),
    {"copies_once": (0.0, "see the description")},
)
_OVERLAP = Switch(
    "The expert all-to-all of one microbatch behind the compute of another.",
    lambda run: run.a2a_overlap is True,
    ("a2a_hidden",),
)
_SINKS = Switch(
    "Attention with sinks before its kernels were fused: scores are written.",
    lambda run: run.architecture.attention_sinks and run.container != "26.08",
    (),
    {"score_bytes": (8.0, "product, mask and softmax, product; no dropout; not measured apart")},
)


def _nanotron(run: PublishedRun) -> bool:
    repaired = run.pp == 1 or run.facts.get("after_pp_fix") == "True"
    healthy = float(run.facts.get("reducescatter_gbps", "0")) >= 40.0
    return run.source.startswith("HF nanotron") and run.tp <= 8 and repaired and healthy


def _blackwell(run: PublishedRun) -> bool:
    return run.hardware in ("b200", "gb200", "b300", "gb300")


SPECS: tuple[StackSpec, ...] = (
    StackSpec(
        "megatron-core-2021",
        "Megatron-LM of 2021 to 2023 on A100, dense: attention that writes its scores, no overlap "
        "of TP; arXiv 2104.04473, 2205.05198 and the baseline of arXiv 2402.15627.",
        lambda run: (
            run.source.startswith(("Narayanan", "Korthikanti", "MegaScale ("))
            and run.zero_stage != 3
        ),
        ("device_scale", "score_bytes"),
        {"gradient_bytes": BF16_GRADIENTS},
        memory="megatron-deepspeed",
    ),
    StackSpec(
        "megatron-deepspeed-2022",
        "Megatron-DeepSpeed of 2022 on A100 (BigScience): ZeRO-1 with a pipeline, attention that "
        "writes its scores; four NVLinks a device.",
        _from("BigScience"),
        ("device_scale", "tp_exposed", "host_layer_s"),
        {
            "gradient_bytes": BF16_GRADIENTS,
            "dense_layer_share": EVERY_DENSE,
            "score_bytes": WRITTEN_SCORES,
        },
        memory="megatron-deepspeed",
    ),
    StackSpec(
        "megatron-deepspeed-2023",
        "Megatron-DeepSpeed of 2023 on A100 (vTrain, arXiv 2312.12391), full recompute: attention "
        "that writes its scores.",
        _from("vTrain ground truth (multi"),
        ("device_scale", "tp_exposed", "host_layer_s", "step_host_s"),
        {
            "gradient_bytes": BF16_GRADIENTS,
            "dense_layer_share": EVERY_DENSE,
            "score_bytes": WRITTEN_SCORES,
        },
        memory="megatron-deepspeed",
    ),
    StackSpec(
        "internevo-2023",
        "InternEvo of 2023 on A100: ZeRO-1, fused attention.",
        _from("InternEvo"),
        ("device_scale", "step_host_s", "tp_exposed"),
        {"gradient_bytes": BF16_GRADIENTS},
        memory="megatron-deepspeed",
    ),
    StackSpec(
        "llm-foundry-a100",
        "llm-foundry of 2023 on A100: FSDP, Triton attention.",
        lambda run: run.source.startswith("llm-foundry") and run.hardware.startswith("a100"),
        ("device_scale", "attention_scale", "dp_hidden"),
        {"gradient_bytes": BF16_GRADIENTS},
        memory="torchtitan",
    ),
    StackSpec(
        "llm-foundry-h100",
        "llm-foundry of 2023 on H100: FSDP, Triton attention.",
        lambda run: run.source.startswith("llm-foundry") and run.hardware == "h100",
        ("device_scale", "attention_scale", "dp_hidden", "step_host_s"),
        {"gradient_bytes": BF16_GRADIENTS},
        memory="torchtitan",
    ),
    StackSpec(
        "torchtitan",
        "TorchTitan and NeMo Automodel of 2024 to 2026 on H100 and H200: FSDP.",
        _from("TorchTitan", "NeMo Automodel"),
        ("device_scale", "attention_scale", "tp_exposed", "host_layer_s"),
        {"dp_hidden": HIDDEN_EXCHANGE, "gradient_bytes": BF16_GRADIENTS, "copies_once": ONCE},
        memory="torchtitan",
    ),
    StackSpec(
        "megatron-core-2024",
        "Megatron-Core of 2024 and 2025 on H100 (NeMo 2.0 to 2.1, Parallel Folding, the MoE model "
        "zoo, Llama 3): fused attention, overlapped gradient exchange.",
        lambda run: (
            run.hardware == "h100"
            and run.source.startswith(
                ("NeMo docs", "MoE Parallel", "Llama 3", "Megatron-MoE-ModelZoo", "Megatron-LM dev")
            )
        ),
        ("device_scale", "attention_scale", "tp_exposed", "host_layer_s"),
        {"dp_hidden": HIDDEN_EXCHANGE},
        {
            "once": Switch(
                "DeepEP or HybridEP: a token goes once to each node that has experts of it.",
                lambda run: (run.dispatcher or "").lower() in ("deepep", "hybridep"),
                (),
                {"copies_once": ONCE},
            )
        },
    ),
    StackSpec(
        "megatron-bridge-h100",
        "Megatron-Bridge of 2025 and 2026 (containers 25.09 to 26.04.01) on H100: DeepEP and "
        "HybridEP, overlapped gradient exchange.",
        lambda run: run.hardware == "h100" and run.source.startswith("Megatron-Bridge"),
        ("device_scale", "host_layer_s", "step_host_s"),
        {"dp_hidden": HIDDEN_EXCHANGE, "copies_once": ONCE, "tp_exposed": SOME_TP_HIDDEN},
        {"overlap": _OVERLAP, "sinks": _SINKS, "copies": _COPIES},
        memory="megatron-bridge",
    ),
    StackSpec(
        "megatron-bridge",
        "Megatron-Bridge and Megatron-Core of 2025 and 2026 (containers 25.09 to 26.08) on "
        "Blackwell: DeepEP and HybridEP, overlapped gradient exchange, CUDA graphs.",
        lambda run: (
            _blackwell(run)
            and run.source.startswith(
                ("Megatron-Bridge", "Megatron-LM dev", "Megatron-MoE-ModelZoo")
            )
        ),
        ("device_scale",),
        {
            "dp_hidden": HIDDEN_EXCHANGE,
            "copies_once": ONCE,
            "tp_exposed": SOME_TP_HIDDEN,
            "host_layer_s": (0.0, "captured in CUDA graphs"),
        },
        {
            "eager": _EAGER,
            "overlap": _OVERLAP,
            "ultra": Switch(
                "Blackwell Ultra (B300, GB300), whose pack has the efficiencies of B200.",
                lambda run: run.hardware in ("b300", "gb300"),
                ("device_scale",),
            ),
            "26.08": Switch(
                "Container 26.08, and CUDA graphs over the whole iteration before it.",
                lambda run: run.container == "26.08" or run.cuda_graph_scope == "full_iteration",
                ("device_scale",),
            ),
            "sinks": _SINKS,
        },
        memory="megatron-bridge",
    ),
    StackSpec(
        "simumax-b200",
        "Megatron-Core of 2026 on one B200 node (SimuMax v1.2 validation): models with few layers.",
        _from("SimuMax"),
        ("device_scale", "attention_scale", "step_host_s", "tp_exposed"),
    ),
    StackSpec(
        "nanotron",
        "nanotron of 2025 on H100 (the sweep of the Ultrascale playbook), dense, TP inside a node; "
        "pipelines after their hand-offs were repaired (after_pp_fix), which took up to seconds; "
        "jobs whose own test of reduce-scatter reached 40 GB/s.",
        _nanotron,
        ("device_scale", "host_layer_s", "step_host_s", "tp_exposed"),
        {
            "dense_layer_share": EVERY_DENSE,
            "pp_hidden": (0.0, "hand-offs are exposed"),
        },
        {
            "piped": Switch(
                "A pipeline of stages with TP of 4 or 8, whose hosts take longer for a layer.",
                lambda run: run.pp > 1 and run.tp >= 4,
                ("host_layer_s",),
            )
        },
        memory="nanotron",
        published=False,
    ),
)
"""Every stack that is fitted to published runs."""


def spec(name: str) -> StackSpec:
    """Return the spec of a stack by name."""
    return next(s for s in SPECS if s.name == name)
