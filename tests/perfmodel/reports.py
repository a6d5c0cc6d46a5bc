"""The reports of users of other tools that have a known answer, and the tests that hold them.

A test is about report ``n`` if its name begins with ``test_report_n_``. The page of the
documents is printed from here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parents[1]


class Report(NamedTuple):
    """A question with a known answer; ``left`` is what of it has no test, and where it belongs."""

    number: int
    threads: str
    answer: str
    left: str = ""
    others: tuple[str, ...] = ()  # tests whose names do not have the number


LAWS = "`lawfit`: fits of laws"
BACKENDS = "backends of `mosaic_opt` that are not here yet"

REPORTS = (
    Report(1, "Megatron-Bridge #5077", "the most loaded stage counts, not the mean over PP"),
    Report(2, "Megatron-Bridge #5077", "dense and routed parameters of uneven stages, by pattern"),
    Report(4, "Megatron-LM #4687, #4050", "three classes of parameters, each with its own shards"),
    Report(5, "SimuMax (B200 summary)", "the last stage is heaviest where layer 0 is dense"),
    Report(7, "Megatron-Bridge #4330", "throughput times FLOPs of a token is the stated rate"),
    Report(8, "Megatron-Bridge #3029", "a gated unit by its flag; a window by its width"),
    Report(9, "maxtext #678", "K active experts work, not all E"),
    Report(11, "Megatron-LM #1304", "stages hold all layers, or the plan is refused"),
    Report(13, "Megatron-LM #1778", "layers of the first or last stage need PP of at least 2"),
    Report(14, "Megatron-Bridge #546", "ETP is given, not TP: ETP·EP·PP divides the devices"),
    Report(15, "Megatron-Bridge #4007", "the default of ETP is 1, and is shown"),
    Report(
        18, "Megatron-LM #5958, Megatron-Bridge #4980", "EP may exceed DP: it folds over TP·CP·DP"
    ),
    Report(21, "NeMo-RL #3563", "CP·lcm(2, TP) divides the sequence"),
    Report(22, "transformers #48307", "key-value heads are split over TP, or replicated evenly"),
    Report(
        24, "Megatron-LM #4342", "instances of the optimizer divide the replicas of the experts"
    ),
    Report(
        25,
        "NeMo #14288",
        "interleaving needs whole groups of microbatches",
        "groups larger than PP (7 microbatches in groups of 7): the schedule has groups of PP only",
    ),
    Report(26, "Megatron-LM #169, #675", "warm-up of the interleaved schedule: 2(p-r-1)+(v-1)p"),
    Report(27, "Megatron-LM (pipeline layouts)", "DeepSeek-V3 over 16 devices and 2 chunks"),
    Report(
        29, "Megatron-LM (memory estimate)", "interleaving holds 1+(p-1)/(p v) of the activations"
    ),
    Report(30, "verl_megatron_practice #9", "a larger microbatch makes a larger bubble"),
    Report(31, "Megatron-LM #6782", "activations of experts are not divided by EP"),
    Report(32, "llmfit #230", "every expert is stored, active or not"),
    Report(33, "DeepSpeed #3535", "top-2 doubles the rows that experts hold"),
    Report(34, "Megatron-LM (FLOPs test)", "scores of packed sequences"),
    Report(
        36,
        "trl #5698, #7069",
        "a look-up has no FLOPs, the head has; which layers are sparse",
        "names of the keys in configuration files: import of configurations",
        ("perfmodel/test_flops.py::test_a_look_up_is_no_product_and_a_head_is_tied_or_not",),
    ),
    Report(37, "maxtext #4017", "counts are anchored on published ones"),
    Report(38, "tt-metal #50114", "an untied embedding is no product"),
    Report(39, "transformers #43688, #28255, #31464", "scale of the balance loss"),
    Report(
        40,
        "DeepSeek-V3 #741, transformers #45440",
        "masked groups are minus infinity",
    ),
    Report(42, "Moonlight, figure 6", "scaling factor of the gates"),
    Report(43, "marin #7706", "bytes of expert parallelism for each token"),
    Report(
        44, "marin #749, arXiv 2404.10102", "a fit does not stop at a mean-reduced gradient", LAWS
    ),
    Report(
        46,
        "arXiv 2608.10605",
        "the loss at the published optimum",
        "",
        ("lawfit/test_laws.py::test_loss_at_the_printed_figures_of_the_optimum",),
    ),
    Report(47, "transformers (Switch tests)", "router losses of given tensors"),
    Report(48, "Megatron-LM (forced balance)", "balance losses are 1 at balance"),
    Report(49, "torchtitan #341, Megatron-LM #831, maxtext #1972", "causal scores count half"),
    Report(50, "torchtitan #280, #274, #452", "the head counts, the embedding does not"),
    Report(51, "Pai-Megatron-Patch #485, Megatron-DeepSpeed #398", "experts have their own width"),
    Report(
        52,
        "Megatron-LM #2198, Megatron-Bridge #2120",
        "FLOPs of hybrid models and of latent experts",
        "`Architecture` has no state-space layers and no experts behind a projection",
    ),
    Report(53, "Megatron-LM #756", "Mixtral: TP 1 and EP 8 is faster than TP 2 and EP 8"),
    Report(54, "Megatron-LM #1784, #2439, Megatron-Bridge #3744", "three buckets of parameters"),
    Report(55, "Megatron-LM and Megatron-Bridge estimates", "the optimizer is sharded over DP·CP"),
    Report(
        56,
        "Megatron-LM (memory estimate)",
        "prediction layers are in no active count",
        "",
        ("perfmodel/test_catalogue.py::test_multi_token_prediction_is_apart",),
    ),
    Report(57, "Megatron-LM #5034", "a prediction layer has a copy of the embedding"),
    Report(
        58,
        "DeepSpeed #2079",
        "32-bit copies of gradients in groups",
        "memory: the optimizer's step has no buffers of its own",
    ),
    Report(59, "megablocks #166", "many small experts hold more activations"),
    Report(60, "inference-sim #624, aiconfigurator #437, #509", "what does not fit has no answer"),
    Report(61, "aiconfigurator #1396", "the share of memory that may be used is explicit"),
    Report(62, "pith-train #18", "ranks of an expert group work on different microbatches"),
    Report(63, "megablocks #160, DeepSpeed #1838, #7551", "EP divides the experts; E/EP are local"),
    Report(65, "verl #1811, bionemo #286", "DP and microbatch alone bind the global batch"),
    Report(66, "Megatron-Bridge #1982, Megatron-LM #708", "2·CP divides the sequence"),
    Report(68, "Megatron-LM #6059", "the pattern of sparse layers is as long as the model"),
    Report(70, "DeepSeek-V3 #19", "61 layers and one prediction layer"),
    Report(71, "Megatron-LM #750", "interleaving over two stages is allowed"),
    Report(72, "Megatron-LM #5318", "logits of prediction layers are where the loss is"),
    Report(
        73,
        "Megatron-LM #1456",
        "a fused dispatcher is slower on 4 ranks of a node",
        "kernels of a dispatcher: a stack profile fitted to runs with it",
    ),
    Report(74, "DeepEP #493, #590", "more nodes than were measured are flagged or refused"),
    Report(
        75,
        "marin #7279, #7780",
        "MFU of one run at EP 64",
        "validation: the run's machine and shape are not all stated",
    ),
    Report(77, "torchtitan #1593", "full recomputation counts tokens twice"),
    Report(78, "torchtitan #4394, maxtext #2494", "the router's bias is updated"),
    Report(79, "transformers #48690", "the balance loss does not scale with replicas"),
    Report(80, "flashinfer #3875", "gates are gathered from scores without bias"),
    Report(81, "or-tools #4031, #3438, #2133, #1905, #4485", "products of variables", BACKENDS),
    Report(82, "or-tools #3193", "products with a large domain", BACKENDS),
    Report(83, "cvxpy #881, #782, #1591, #2766", "a geometric program has its closed form"),
    Report(
        84,
        "numba #4032, #5566, LMCache #4597",
        "a kernel without a place for its cache is compiled all the same",
        "",
        (
            "perfmodel/test_jit.py::"
            "test_without_any_place_to_cache_a_kernel_is_compiled_all_the_same",
        ),
    ),
    Report(85, "scipy #23161", "several starts, and objectives compared", LAWS),
    Report(86, "OLMo-core #554", "grid of starts, asymmetric penalty, bootstrap", LAWS),
    Report(87, "SimAI #298", "experts are spread without tensor parallelism"),
)
"""Every report, by number; numbers that are missing had no answer to test."""

_TEST = re.compile(r"^def (test_report_([0-9]+)_\w+)\(", re.MULTILINE)


def held_by() -> dict[int, list[str]]:
    """Find the tests with a report's number in their name, as ``folder/file.py::name``."""
    found: dict[int, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for name, number in _TEST.findall(path.read_text("utf-8")):
            found.setdefault(int(number), []).append(
                f"{path.relative_to(TESTS).as_posix()}::{name}"
            )
    return found


def defines(test: str) -> bool:
    """Say whether there is a test of that name in that file."""
    file, _, name = test.partition("::")
    path = TESTS / file
    return path.is_file() and f"\ndef {name}(" in path.read_text("utf-8")


def reports_table() -> str:
    """Write the reports as a Markdown table."""
    tests = held_by()
    lines = ["| no. | thread | answer | tests, and what is left |", "|---|---|---|---|"]
    for report in REPORTS:
        held = [*tests.get(report.number, []), *report.others]
        where = [f"`{test}`" for test in held]
        if report.left:
            where.append(f"not covered: {report.left}")
        lines.append(
            f"| {report.number} | {report.threads} | {report.answer} | {'; '.join(where)} |"
        )
    return "\n".join(lines) + "\n"
