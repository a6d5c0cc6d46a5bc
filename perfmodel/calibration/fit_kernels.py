"""Fits of the other kernels of a layer: attention, head and loss, top-k, elementwise."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import inf

import numpy as np

from perfmodel.calibration.packs import Device, Surface
from perfmodel.calibration.regression import (
    Bound,
    Fit,
    Parameters,
    Regression,
    evaluate,
    pooled,
)
from perfmodel.calibration.surface_fit import (
    BUSY,
    CACHED,
    DISPATCH,
    EFFICIENCY,
    LAUNCH,
    Evidence,
    floor_of,
    isin,
    span,
)
from perfmodel.calibration.tables import FloatArray, Table, Tables
from perfmodel.kernels import (
    BF16_BYTES,
    AttentionSurface,
    ElementwiseSurface,
    HeadSurface,
    TopKSurface,
    attention_time,
    elementwise_time,
    head_time,
    topk_time,
)

ATTENTION = "sdpa.csv"
HEAD = "vocab_gemm_ce.csv"
TOPK = "topk.csv"

JOIN = 4.0  # exponent that joins the host's and the device's share of one timed call [-]


def join(host_s: float, device: FloatArray) -> FloatArray:
    """Return the time of a call that ends when the slower of host and device does, smoothly."""
    return np.asarray((host_s**JOIN + device**JOIN) ** (1.0 / JOIN))


@dataclass(frozen=True)
class AttentionFit:
    """Causal fused attention of one pass, timed alone.

    ``floor_s`` is given where no chains of kernels were timed.
    """

    surface: str
    column: str
    backward: float
    floor_s: float | None = None

    def fit(self, tables: Tables, device: Device) -> Surface:
        """Fit wall = p-norm(launch, wait + device), with the floor of any kernel as fixed_s."""
        table = tables.load(ATTENTION).where(backend="te")
        sequences, heads = table["micro_bs"], table["n_q_heads"]
        seq_len, head_dim = table["seq_len"], table["head_dim"]
        floor_s, floor_tables, borrowed = floor_of(self.floor_s, tables)
        rates = device.rates

        def wall(p: Parameters) -> FloatArray:
            free = dict(p)
            wait_s = free.pop("wait_s")
            s = AttentionSurface(fixed_s=floor_s, **free)
            busy = evaluate(
                partial(attention_time, rates, s),
                sequences,
                heads,
                seq_len,
                head_dim,
                self.backward,
            )
            return join(s.launch_s, wait_s + busy)

        fit = Regression(
            {
                "launch_s": Bound(2e-4, 1e-6, 1e-2),
                "eff_d128": EFFICIENCY,
                "eff_d64": EFFICIENCY,
                "seq_half": Bound(500.0, 1.0, 1e5),
                "wait_s": Bound(1e-4, 1e-7, 1e-2),
            },
            wall,
            table[self.column] * 1e-3,
            isin(seq_len, 8192) | isin(heads, 32),
            "all rows with sequences of 8192 or 32 heads",
        ).solve()
        params = {**fit.params, "fixed_s": floor_s}
        wait_s = params.pop("wait_s")
        return Evidence(
            self.surface,
            (ATTENTION, *floor_tables),
            f"{len(table)} rows of Transformer Engine's fused kernel; wall time of one call = "
            f"{JOIN:g}-norm of launch_s and wait_s + device. wait_s, the host's share before "
            "the kernel starts, belongs to timing one call alone and not to the device; fixed_s "
            f"{borrowed or 'is the shortest busy time of any kernel'}.",
        ).surface_of(
            tables,
            params,
            {
                "sequences": span(sequences),
                "heads": span(heads),
                "seq_len": span(seq_len),
                "head_dim": span(head_dim),
            },
            fit.errors,
            nuisance={"wait_s": wait_s},
        )


@dataclass(frozen=True)
class HeadFit:
    """Language-model head and cross-entropy: four efficiencies, each with its own rows."""

    surface: str = "head"

    def fit(self, tables: Tables, device: Device) -> Surface:
        """Fit each of the four terms of the formula to the operation that it prices."""
        table = tables.load(HEAD)
        head = table.where(op="lm_head_gemm", dtype="bf16")
        entropy = table.where(op="cross_entropy", dtype="fp32")
        passes = Bound(8.0, 0.5, 200.0)
        parts = {
            "head forward": self._part(head, device, "forward_eff", "fwd_ms_p50", EFFICIENCY),
            "head backward": self._part(head, device, "backward_eff", "bwd_ms_p50", EFFICIENCY),
            "loss forward": self._part(entropy, device, "ce_forward_passes", "fwd_ms_p50", passes),
            "loss backward": self._part(
                entropy, device, "ce_backward_passes", "bwd_ms_p50", passes
            ),
        }
        return Evidence(
            self.surface,
            (HEAD,),
            f"{len(head)} rows of the head in bf16 and {len(entropy)} of unfused cross-entropy in "
            "fp32, forward and backward apart.",
        ).surface_of(
            tables,
            {name: value for part in parts.values() for name, value in part.params.items()},
            {
                "tokens": span(table["m_tokens"]),
                "d_model": span(table["hidden"]),
                "vocab": span(table["vocab_padded"]),
            },
            pooled(parts.values()),
            regimes={name: part.errors for name, part in parts.items()},
        )

    @staticmethod
    def _part(table: Table, device: Device, name: str, column: str, bound: Bound) -> Fit:
        absent = HeadSurface(inf, inf, 0.0, 0.0)
        tokens, d_model, vocab = table["m_tokens"], table["hidden"], table["vocab_padded"]
        rates = device.rates

        def wall(p: Parameters) -> FloatArray:
            s = absent._replace(**p)
            return evaluate(partial(head_time, rates, s), tokens, d_model, vocab)

        observed = table[column] * 1e-3
        held_out = isin(tokens, 8192)
        return Regression(
            {name: bound}, wall, observed, held_out, "all rows with 8192 tokens"
        ).solve()


@dataclass(frozen=True)
class TopKFit:
    """Top-k over fp32 scores; from k = 2 on, other kernels sort and gather the winners."""

    surface: str = "topk"

    def fit(self, tables: Tables, device: Device) -> Surface:
        """Fit wall = p-norm(launch, device) to the rows with k >= 2; k = 1 is reported."""
        table = tables.load(TOPK).where(dtype="fp32")
        several = table["k"] >= 2
        fit = self._regression(table.take(several)).solve()
        regimes = {}
        if not several.all():
            device_only = {**fit.params, "launch_s": 0.0}
            single = self._regression(table.take(~several)).relative_errors(device_only)
            test = Fit({}, single, single, "every row, against the device's share")
            regimes["k = 1 (not fitted)"] = test.errors
        return Evidence(
            self.surface,
            (TOPK,),
            f"{several.sum()} fp32 rows with k of at least 2; wall time of one call = "
            f"{JOIN:g}-norm of launch_s and device. With k = 1 a single kernel runs and the "
            "surface is too slow by the errors stated.",
        ).surface_of(
            tables,
            fit.params,
            {"tokens": span(table["num_tokens"]), "n_experts": span(table["num_experts"])},
            fit.errors,
            regimes=regimes,
        )

    @staticmethod
    def _regression(table: Table) -> Regression:
        tokens, experts = table["num_tokens"], table["num_experts"]

        def wall(p: Parameters) -> FloatArray:
            s = TopKSurface(**p)
            return join(s.launch_s, evaluate(partial(topk_time, s), tokens, experts))

        return Regression(
            {
                "launch_s": LAUNCH,
                "fixed_s": Bound(5e-6, 1e-8, 1e-3),
                "tokens_per_s": Bound(2e9, 1e7, 1e13),
                "elements_per_s": Bound(2e10, 1e8, 1e13),
            },
            wall,
            table["event_time_ms"] * 1e-3,
            isin(tokens, 8192),
            "all rows with 8192 tokens",
        )


@dataclass(frozen=True)
class ElementwiseFit:
    """A kernel that reads and writes one bf16 matrix: what a ReLU adds to a chain of GEMMs."""

    surface: str = "elementwise"

    def fit(self, tables: Tables, device: Device) -> Surface:
        """Fit the difference of busy time between chains with and without the activation."""
        table = tables.load(DISPATCH)
        shape = ("M", "N", "K")
        plain, both = table.where(mode="gemm"), table.where(mode="gemm_relu")
        busy = {
            row[:3]: row[3]
            for row in zip(*(plain[c].tolist() for c in (*shape, BUSY)), strict=True)
        }
        paired = np.array([row in busy for row in zip(*(both[c] for c in shape), strict=True)])
        both = both.take(paired)
        without = np.array(
            [busy[row] for row in zip(*(both[c].tolist() for c in shape), strict=True)]
        )
        added_s = (both[BUSY] - without) * 1e-6
        traffic = 2.0 * BF16_BYTES * both["M"] * both["N"]
        rates = device.rates

        def time(p: Parameters) -> FloatArray:
            s = ElementwiseSurface(**p)
            return evaluate(partial(elementwise_time, rates, s), traffic, 1.0)

        fit = Regression(
            {"fixed_s": Bound(2e-6, 1e-8, 1e-3), "bw_eff": CACHED},
            time,
            added_s,
            isin(both["M"], 8192),
            "the row with m = 8192",
        ).solve()
        return Evidence(
            self.surface,
            (DISPATCH,),
            f"{len(added_s)} pairs of chains: the busy time that a ReLU over (m, n) in bf16 adds "
            "to a GEMM. bw_eff may exceed 1: the small matrices stay in the cache.",
        ).surface_of(tables, fit.params, {"traffic_bytes": span(traffic)}, fit.errors)


def kernel_fits(
    floor_s: float | None = None,
) -> tuple[AttentionFit | HeadFit | TopKFit | ElementwiseFit, ...]:
    """Return the fits of these kernels; ``floor_s`` where no chains of kernels were timed."""
    return (
        AttentionFit("attention_forward", "fwd_time_ms_med", 0.0, floor_s),
        AttentionFit("attention_backward", "bwd_time_ms_med", 1.0, floor_s),
        HeadFit(),
        TopKFit(),
        ElementwiseFit(),
    )
