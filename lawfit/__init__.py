"""Scaling laws: the loss of a pretraining run from its size, shape and tokens.

Laws are frozen values with one interface, `ScalingLaw`. This package evaluates
published laws and the user's own, draws laws, and fits them to runs: `fit` takes
a table of `Runs` and says itself whether it found the optimum.

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
from lawfit.ensemble import LawEnsemble
from lawfit.fitting import fit
from lawfit.laws import AnyLaw, ChinchillaLaw, JointLaw, PerSplitLaw
from lawfit.learning_rate import peak_learning_rate
from lawfit.loading import law_from_mapping, load_law
from lawfit.published import (
    CHINCHILLA_EPOCH,
    CHINCHILLA_HOFFMANN,
    MOSAIC_TABLE2,
    MOSAIC_TABLE2_PRINTED,
    PUBLISHED_LAWS,
    PrintedCoefficient,
)
from lawfit.reconstruction import published_ensemble
from lawfit.result import Coefficient, Covariance, FitResult
from lawfit.runs import Remark, Runs, held_out
from lawfit.shapes import ShapeRange
from lawfit.validity import Interval, ValidRange

__all__ = [
    "CHINCHILLA_EPOCH",
    "CHINCHILLA_HOFFMANN",
    "MOSAIC_TABLE2",
    "MOSAIC_TABLE2_PRINTED",
    "PUBLISHED_LAWS",
    "AnyLaw",
    "ChinchillaLaw",
    "Coefficient",
    "Covariance",
    "FitResult",
    "FloatArray",
    "Gradient",
    "Interval",
    "JointLaw",
    "LawEnsemble",
    "LawError",
    "Monomial",
    "PerSplitLaw",
    "PrintedCoefficient",
    "Quantity",
    "Remark",
    "Runs",
    "ScalingLaw",
    "ShapeRange",
    "TokenTerm",
    "ValidRange",
    "fit",
    "held_out",
    "law_from_mapping",
    "load_law",
    "peak_learning_rate",
    "published_ensemble",
]
