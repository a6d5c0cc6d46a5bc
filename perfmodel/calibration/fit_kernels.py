"""Fits of attention, of the head with its loss, and of top-k."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import inf

from perfmodel.calibration.fit_elementwise import ElementwiseFit
from perfmodel.calibration.machines import Device
from perfmodel.calibration.packs import Surface
from perfmodel.calibration.regression import (
    Bound,
    Fit,
    Parameters,
    Regression,
    evaluate,
    pooled,
)
from perfmodel.calibration.surface_fit import (
    CPU_CALL,
    JOIN,
    LAUNCH,
    Evidence,
    Range,
    efficiency_of,
    floor_of,
    held_line,
    isin,
    join,
    span,
)
from perfmodel.calibration.tables import FloatArray, Table, Tables
from perfmodel.kernels import (
    AttentionSurface,
    HeadSurface,
    TopKSurface,
    attention_time,
    head_time,
    topk_time,
)

ATTENTION = "sdpa.csv"
HEAD = "vocab_gemm_ce.csv"
TOPK = "topk.csv"

_KERNELS = {
    "te": "Transformer Engine's fused kernel",
    "sdpa": "PyTorch's scaled_dot_product_attention",
}

_ATTENTION_SIZES = {
    "sequences": "micro_bs",
    "heads": "n_q_heads",
    "seq_len": "seq_len",
    "head_dim": "head_dim",
}


def _dtype(table: Table, device: Device) -> dict[str, str]:
    """Ask for rows of the device's number format, where a table has several."""
    return {"dtype": device.dtype} if "dtype" in table.columns else {}


@dataclass(frozen=True)
class AttentionFit:
    """Causal fused attention of one pass, timed alone.

    On a CPU what a call costs besides its work is in ``fixed_s``, and ``launch_s`` is 0.

    ``floor_s`` is given where no chains of kernels were timed.
    """

    surface: str
    column: str
    backward: float
    floor_s: float | None = None

    def fit(self, tables: Tables, device: Device) -> Surface:
        """Fit wall = p-norm(launch, wait + device), with the floor of any kernel as fixed_s."""
        table = tables.load(ATTENTION)
        backend = "te" if "te" in table.words("backend") else "sdpa"
        table = table.where(backend=backend, **_dtype(table, device))
        if device.blocking:
            return self._blocking(tables, device, table)
        heads, seq_len = table["n_q_heads"], table["seq_len"]
        floor_s, floor_tables, borrowed = floor_of(self.floor_s, tables)

        def wall(p: Parameters) -> FloatArray:
            free = dict(p)
            wait_s = free.pop("wait_s")
            s = AttentionSurface(fixed_s=floor_s, **free)
            return join(s.launch_s, wait_s + self._busy(device, s, table))

        fit = Regression(
            {
                "launch_s": Bound(2e-4, 1e-6, 1e-2),
                "eff_d128": efficiency_of(device),
                "eff_d64": efficiency_of(device),
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
            f"{len(table)} rows of {_KERNELS[backend]}; wall time of one call = "
            f"{JOIN:g}-norm of launch_s and wait_s + device. wait_s, the host's share before "
            "the kernel starts, belongs to timing one call alone and not to the device; fixed_s "
            f"{borrowed or 'is the shortest busy time of any kernel'}.",
        ).surface_of(
            tables,
            params,
            self._ranges(table),
            fit.errors,
            nuisance={"wait_s": wait_s},
        )

    def _busy(self, device: Device, s: AttentionSurface, table: Table) -> FloatArray:
        time = partial(attention_time, device.rates, s)
        sizes = (table[column] for column in _ATTENTION_SIZES.values())
        return evaluate(time, *sizes, self.backward)

    @staticmethod
    def _ranges(table: Table) -> dict[str, Range]:
        return {name: span(table[column]) for name, column in _ATTENTION_SIZES.items()}

    def _blocking(self, tables: Tables, device: Device, table: Table) -> Surface:
        """Fit wall = fixed_s + the rest."""
        heads, seq_len = table["n_q_heads"], table["seq_len"]
        lines = isin(seq_len, 8192) | isin(heads, 32)
        rows, text = held_line(
            lines, "all rows with sequences of 8192 or 32 heads", seq_len, "sequences"
        )
        fit = Regression(
            {
                "fixed_s": CPU_CALL,
                "eff_d128": efficiency_of(device),
                "eff_d64": efficiency_of(device),
                "seq_half": Bound(100.0, 0.1, 1e5),
            },
            lambda p: self._busy(device, AttentionSurface(launch_s=0.0, **p), table),
            table[self.column] * 1e-3,
            rows,
            text,
        ).solve()
        return Evidence(
            self.surface,
            (ATTENTION,),
            f"{len(table)} {device.dtype} rows of {_KERNELS['sdpa']}; wall time of one call = "
            "fixed_s + the rest: the caller computes, and launch_s is 0.",
        ).surface_of(tables, {**fit.params, "launch_s": 0.0}, self._ranges(table), fit.errors)


@dataclass(frozen=True)
class HeadFit:
    """Language-model head and cross-entropy: four efficiencies, each with its own rows."""

    surface: str = "head"

    def fit(self, tables: Tables, device: Device) -> Surface:
        """Fit each of the four terms of the formula to the operation that it prices."""
        table = tables.load(HEAD)
        head = table.where(op="lm_head_gemm", dtype=device.dtype)
        entropy = table.where(op="cross_entropy", dtype="fp32")
        passes, share = Bound(8.0, 0.5, 200.0), efficiency_of(device)
        parts = {
            "head forward": self._part(head, device, "forward_eff", "fwd_ms_p50", share),
            "head backward": self._part(head, device, "backward_eff", "bwd_ms_p50", share),
            "loss forward": self._part(entropy, device, "ce_forward_passes", "fwd_ms_p50", passes),
            "loss backward": self._part(
                entropy, device, "ce_backward_passes", "bwd_ms_p50", passes
            ),
        }
        return Evidence(
            self.surface,
            (HEAD,),
            f"{len(head)} rows of the head in {device.dtype} and {len(entropy)} of unfused "
            "cross-entropy in fp32, forward and backward apart.",
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
        rows, text = held_line(isin(tokens, 8192), "all rows with 8192 tokens", tokens, "tokens")
        return Regression({name: bound}, wall, observed, rows, text).solve()


_TOPK = {
    "launch_s": LAUNCH,
    "fixed_s": Bound(5e-6, 1e-8, 1e-3),
    "tokens_per_s": Bound(2e9, 1e7, 1e13),
    "elements_per_s": Bound(2e10, 1e8, 1e13),
}

_TOPK_CPU = {
    "fixed_s": CPU_CALL,
    "tokens_per_s": Bound(2e7, 1e4, 1e12),
    "elements_per_s": Bound(2e8, 1e5, 1e12),
}


@dataclass(frozen=True)
class TopKFit:
    """Top-k over fp32 scores; from k = 2 on, other kernels sort and gather the winners.

    On a CPU what a call costs besides its work is in ``fixed_s``, and ``launch_s`` is 0.
    """

    surface: str = "topk"

    def fit(self, tables: Tables, device: Device) -> Surface:
        """Fit wall = p-norm(launch, device) to the rows with k >= 2; k = 1 is reported.

        On a CPU wall = device.
        """
        table = tables.load(TOPK).where(dtype="fp32")
        several = table["k"] >= 2
        blocking = bool(device.blocking)
        fit = self._regression(table.take(several), blocking).solve()
        device_only = {**fit.params, "launch_s": 0.0}
        regimes = {}
        if not several.all():
            single = self._regression(table.take(~several), blocking).relative_errors(device_only)
            test = Fit({}, single, single, "every row, against the device's share")
            regimes["k = 1 (not fitted)"] = test.errors
        return Evidence(
            self.surface,
            (TOPK,),
            f"{several.sum()} fp32 rows with k of at least 2; wall time of one call = "
            + (
                "device: the caller computes, and launch_s is 0."
                if blocking
                else f"{JOIN:g}-norm of launch_s and device. With k = 1 a single kernel runs and "
                "the surface is too slow by the errors stated."
            ),
        ).surface_of(
            tables,
            device_only if blocking else fit.params,
            {"tokens": span(table["num_tokens"]), "n_experts": span(table["num_experts"])},
            fit.errors,
            regimes=regimes,
        )

    @staticmethod
    def _regression(table: Table, blocking: bool) -> Regression:
        tokens, experts = table["num_tokens"], table["num_experts"]

        def wall(p: Parameters) -> FloatArray:
            s = TopKSurface(**{"launch_s": 0.0, **p})
            return join(s.launch_s, evaluate(partial(topk_time, s), tokens, experts))

        rows, text = held_line(isin(tokens, 8192), "all rows with 8192 tokens", tokens, "tokens")
        bounds = _TOPK_CPU if blocking else _TOPK
        return Regression(bounds, wall, table["event_time_ms"] * 1e-3, rows, text)


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
