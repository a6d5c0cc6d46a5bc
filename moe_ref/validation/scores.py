"""Predicted against measured step times: rows, and how well they agree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moe_ref.validation.cases import StepCase
from moe_ref.validation.stack import CONVENTION
from moe_ref.validation.steps import StepTime
from perfmodel.calibration.stacks import StackProfile
from perfmodel.frozen import Frozen
from perfmodel.ranges import range_flags
from perfmodel.step import StepModel, legal_model

__all__ = ["GROUPS", "Prediction", "ScoredStep", "StepScores", "predicted_step", "score", "scored"]

TOP = 5

GROUPS = {"one": "one process", "dp": "data parallelism", "ep": "expert parallelism"}
"""Kinds of steps, and their names."""


class Prediction(Frozen):
    """What is said of a step without its time.

    Attributes
    ----------
    case : StepCase
    step_s : float
        By pack and stack [s].
    kernels_s : float
        By the pack alone: no time of the host, and no more kernels than the formulas count [s].
    mfu : float
        Of the fastest product, with ``6 N_act`` without embedding [-].
    outside : int
        Sizes outside what the pack's surfaces or the stack were fitted on.
    """

    case: StepCase
    step_s: float
    kernels_s: float
    mfu: float
    outside: int

    @property
    def group(self) -> str:
        """Key of `GROUPS`."""
        if self.case.ranks == 1:
            return "one"
        return "ep" if self.case.expert_parallel else "dp"


class ScoredStep(Frozen):
    """A prediction and what was measured.

    Attributes
    ----------
    prediction : Prediction
    measured_s, low_s, high_s : float
        Middle, least and largest of the visits [s].
    """

    prediction: Prediction
    measured_s: float
    low_s: float
    high_s: float

    @property
    def error(self) -> float:
        """Predicted over measured, less 1 [-]."""
        return self.prediction.step_s / self.measured_s - 1.0

    @property
    def measured_mfu(self) -> float:
        """MFU as measured [-]."""
        return self.prediction.mfu * self.prediction.step_s / self.measured_s


class StepScores(Frozen):
    """How well predictions agree with measurements.

    Attributes
    ----------
    rows : int
    mape, bias, p90 : float
        Mean of the absolute error, mean of the error, 90th percentile of the absolute error [-].
    kernels_mape, kernels_bias : float
        The same of the pack without the stack [-].
    spearman_time, spearman_mfu : float
        Rank correlation of step times, and of MFU, which size alone does not order [-].
    top_time, top_mfu : int
        Of the five shortest steps, and of the five of highest MFU, how many are predicted so.
    spread : float
        Median over rows of the largest visit over the least, less 1: what the machine does [-].
    """

    rows: int
    mape: float
    bias: float
    p90: float
    kernels_mape: float
    kernels_bias: float
    spearman_time: float
    spearman_mfu: float
    top_time: int
    top_mfu: int
    spread: float


def predicted_step(
    case: StepCase, pack: str, profile: StackProfile, unfitted: StackProfile
) -> Prediction:
    """Predict a step by a pack, a name or a path, and a stack, and by the pack alone."""
    cluster = case.cluster(pack)

    def by(stack: StackProfile) -> StepModel:
        return legal_model(case.architecture, case.plan, cluster, case.batch, stack)

    found = by(profile)
    flop = case.architecture.flops_per_token(CONVENTION, case.seq_len) * case.batch.tokens
    return Prediction(
        case=case,
        step_s=found.step_s,
        kernels_s=by(unfitted).step_s,
        mfu=flop / (found.step_s * cluster.n_devices * cluster.peak_flops),
        outside=len(range_flags(found)),
    )


def scored(prediction: Prediction, time: StepTime) -> ScoredStep:
    """Put a measurement beside its prediction."""
    return ScoredStep(
        prediction=prediction, measured_s=time.median_s, low_s=time.low_s, high_s=time.high_s
    )


def score(rows: Sequence[ScoredStep]) -> StepScores:
    """Score rows; at least two."""
    from scipy.stats import spearmanr

    measured = np.array([row.measured_s for row in rows])
    predicted = np.array([row.prediction.step_s for row in rows])
    kernels = np.array([row.prediction.kernels_s for row in rows]) / measured - 1.0
    mfu = np.array([row.measured_mfu for row in rows])
    said = np.array([row.prediction.mfu for row in rows])
    error = predicted / measured - 1.0
    return StepScores(
        rows=len(rows),
        mape=float(np.abs(error).mean()),
        bias=float(error.mean()),
        p90=float(np.quantile(np.abs(error), 0.9)),
        kernels_mape=float(np.abs(kernels).mean()),
        kernels_bias=float(kernels.mean()),
        spearman_time=float(spearmanr(measured, predicted).statistic),
        spearman_mfu=float(spearmanr(mfu, said).statistic),
        top_time=_both(-measured, -predicted),
        top_mfu=_both(mfu, said),
        spread=float(np.median([row.high_s / row.low_s - 1.0 for row in rows])),
    )


def _both(first: np.ndarray, second: np.ndarray) -> int:
    """Return how many of the largest of one are among the largest of the other."""
    tops = [set(np.argsort(-values, kind="stable")[:TOP].tolist()) for values in (first, second)]
    return len(tops[0] & tops[1])
