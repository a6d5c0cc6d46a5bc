"""Scaling laws: the loss of a pretraining run from its size, shape and tokens.

Laws are frozen values with one interface, `ScalingLaw`; those of papers with other
variables are a `GeneralLaw`. This package evaluates published laws and the user's
own, draws laws, and fits them to runs: `fit` takes a table of `Runs` and says
itself whether it found the optimum, `next_runs` which runs to add.

Examples
--------
>>> from lawfit import load_law
>>> law = load_law("mosaic-table2")
>>> loss = law.loss(n_total=327.2e9, n_active=14.5e9, tokens=1.42e12, expert_split=4)
>>> round(loss, 2)
1.39
"""

from lawfit._values import FloatArray, LawError, Quantity
from lawfit.base import Gradient, Monomial, ScalingLaw, TokenTerm
from lawfit.candidates import Candidates
from lawfit.coverage import Coverage, CoverageRow, interval_coverage, simulated_runs
from lawfit.dense_laws import DataConstrainedLaw, GadreLaw, KaplanLaw
from lawfit.design import next_runs
from lawfit.design_check import SimulatedError, SimulatedRuns, simulate_next_runs
from lawfit.ensemble import LawEnsemble
from lawfit.expert_count_laws import ClarkLaw, LudziejewskiLaw
from lawfit.fitting import fit
from lawfit.general import GeneralLaw, PosynomialLaw, PowerTerm
from lawfit.general_fit import fit_general
from lawfit.general_result import GeneralFit
from lawfit.goals import (
    ChoiceGoal,
    ChosenRun,
    CoefficientGoal,
    ExpectedError,
    NextRuns,
    PredictionGoal,
)
from lawfit.identify import RidgeRow, RidgeScan, ridge_scan
from lawfit.laws import AnyLaw, ChinchillaLaw, JointLaw, PerSplitLaw
from lawfit.learning_rate import peak_learning_rate
from lawfit.literature import (
    ABNAR,
    CLARK_HASH,
    CLARK_RLR,
    CLARK_SBASE,
    KAPLAN,
    KRAJEWSKI_DENSE,
    KRAJEWSKI_MOE,
    LITERATURE_LAWS,
    LITERATURE_PRINTED,
    LUDZIEJEWSKI,
    MUENNIGHOFF,
    TIAN,
    ZHAO,
    AnyGeneralLaw,
)
from lawfit.loading import law_from_mapping, load_law
from lawfit.profiling import ProfileCurve, profile, profile_statistic
from lawfit.published import (
    CHINCHILLA_EPOCH,
    CHINCHILLA_HOFFMANN,
    MOSAIC_TABLE2,
    MOSAIC_TABLE2_PRINTED,
    PUBLISHED_LAWS,
    PrintedCoefficient,
)
from lawfit.published_runs import sample_runs
from lawfit.reading import read_runs
from lawfit.reconstruction import published_ensemble
from lawfit.refits import Bootstrap, CoefficientInterval
from lawfit.resampling import bootstrap
from lawfit.result import Coefficient, Covariance, FitResult
from lawfit.runs import Remark, Runs, held_out
from lawfit.shapes import ShapeRange
from lawfit.shared_laws import EfficiencyLeverage, ZhaoLaw
from lawfit.sparse_laws import AbnarLaw, KrajewskiLaw
from lawfit.validity import Interval, ValidRange

__all__ = [
    "ABNAR",
    "CHINCHILLA_EPOCH",
    "CHINCHILLA_HOFFMANN",
    "CLARK_HASH",
    "CLARK_RLR",
    "CLARK_SBASE",
    "KAPLAN",
    "KRAJEWSKI_DENSE",
    "KRAJEWSKI_MOE",
    "LITERATURE_LAWS",
    "LITERATURE_PRINTED",
    "LUDZIEJEWSKI",
    "MOSAIC_TABLE2",
    "MOSAIC_TABLE2_PRINTED",
    "MUENNIGHOFF",
    "PUBLISHED_LAWS",
    "TIAN",
    "ZHAO",
    "AbnarLaw",
    "AnyGeneralLaw",
    "AnyLaw",
    "Bootstrap",
    "Candidates",
    "ChinchillaLaw",
    "ChoiceGoal",
    "ChosenRun",
    "ClarkLaw",
    "Coefficient",
    "CoefficientGoal",
    "CoefficientInterval",
    "Covariance",
    "Coverage",
    "CoverageRow",
    "DataConstrainedLaw",
    "EfficiencyLeverage",
    "ExpectedError",
    "FitResult",
    "FloatArray",
    "GadreLaw",
    "GeneralFit",
    "GeneralLaw",
    "Gradient",
    "Interval",
    "JointLaw",
    "KaplanLaw",
    "KrajewskiLaw",
    "LawEnsemble",
    "LawError",
    "LudziejewskiLaw",
    "Monomial",
    "NextRuns",
    "PerSplitLaw",
    "PosynomialLaw",
    "PowerTerm",
    "PredictionGoal",
    "PrintedCoefficient",
    "ProfileCurve",
    "Quantity",
    "Remark",
    "RidgeRow",
    "RidgeScan",
    "Runs",
    "ScalingLaw",
    "ShapeRange",
    "SimulatedError",
    "SimulatedRuns",
    "TokenTerm",
    "ValidRange",
    "ZhaoLaw",
    "bootstrap",
    "fit",
    "fit_general",
    "held_out",
    "interval_coverage",
    "law_from_mapping",
    "load_law",
    "next_runs",
    "peak_learning_rate",
    "profile",
    "profile_statistic",
    "published_ensemble",
    "read_runs",
    "ridge_scan",
    "sample_runs",
    "simulate_next_runs",
    "simulated_runs",
]
