"""The 27 nonlinear regression problems of NIST as laws of the user's own, with their data.

They are in `nist_strd.json`: starts, certified parameters, deviations and sums of squares.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import create_model

from lawfit import GeneralFit, GeneralLaw, fit_general

Model = Callable[..., Any]


def gauss(x: Any, b1: Any, b2: Any, b3: Any, b4: Any, b5: Any, b6: Any, b7: Any, b8: Any) -> Any:
    first = b3 * np.exp(-(((x - b4) / b5) ** 2))
    return b1 * np.exp(-b2 * x) + first + b6 * np.exp(-(((x - b7) / b8) ** 2))


def wave(x: Any, period: Any, cosine: Any, sine: Any) -> Any:
    angle = 2.0 * np.pi * x / period
    return cosine * np.cos(angle) + sine * np.sin(angle)


def cubic(x: Any, b1: Any, b2: Any, b3: Any, b4: Any, b5: Any, b6: Any, b7: Any) -> Any:
    return (b1 + x * (b2 + x * (b3 + x * b4))) / (1.0 + x * (b5 + x * (b6 + x * b7)))


def lanczos(x: Any, b1: Any, b2: Any, b3: Any, b4: Any, b5: Any, b6: Any) -> Any:
    return b1 * np.exp(-b2 * x) + b3 * np.exp(-b4 * x) + b5 * np.exp(-b6 * x)


def chwirut(x: Any, b1: Any, b2: Any, b3: Any) -> Any:
    return np.exp(-b1 * x) / (b2 + b3 * x)


MODELS: Mapping[str, Model] = {
    "Misra1a": lambda x, b1, b2: b1 * (1.0 - np.exp(-b2 * x)),
    "Chwirut2": chwirut,
    "Chwirut1": chwirut,
    "Lanczos3": lanczos,
    "Gauss1": gauss,
    "Gauss2": gauss,
    "DanWood": lambda x, b1, b2: b1 * x**b2,
    "Misra1b": lambda x, b1, b2: b1 * (1.0 - (1.0 + b2 * x / 2.0) ** -2.0),
    "Kirby2": lambda x, b1, b2, b3, b4, b5: cubic(x, b1, b2, b3, 0.0, b4, b5, 0.0),
    "Hahn1": cubic,
    "Nelson": lambda x1, x2, b1, b2, b3: np.exp(b1 - b2 * x1 * np.exp(-b3 * x2)),
    "MGH17": lambda x, b1, b2, b3, b4, b5: b1 + b2 * np.exp(-x * b4) + b3 * np.exp(-x * b5),
    "Lanczos1": lanczos,
    "Lanczos2": lanczos,
    "Gauss3": gauss,
    "Misra1c": lambda x, b1, b2: b1 * (1.0 - (1.0 + 2.0 * b2 * x) ** -0.5),
    "Misra1d": lambda x, b1, b2: b1 * b2 * x / (1.0 + b2 * x),
    "Roszman1": lambda x, b1, b2, b3, b4: b1 - b2 * x - np.arctan(b3 / (x - b4)) / np.pi,
    "ENSO": lambda x, b1, b2, b3, b4, b5, b6, b7, b8, b9: (
        b1 + wave(x, 12.0, b2, b3) + wave(x, b4, b5, b6) + wave(x, b7, b8, b9)
    ),
    "MGH09": lambda x, b1, b2, b3, b4: b1 * (x * x + x * b2) / (x * x + x * b3 + b4),
    "Thurber": cubic,
    "BoxBOD": lambda x, b1, b2: b1 * (1.0 - np.exp(-b2 * x)),
    "Rat42": lambda x, b1, b2, b3: b1 / (1.0 + np.exp(b2 - b3 * x)),
    "MGH10": lambda x, b1, b2, b3: b1 * np.exp(b2 / (x + b3)),
    "Eckerle4": lambda x, b1, b2, b3: b1 / b2 * np.exp(-0.5 * ((x - b3) / b2) ** 2),
    "Rat43": lambda x, b1, b2, b3, b4: b1 / (1.0 + np.exp(b2 - b3 * x)) ** (1.0 / b4),
    "Bennett5": lambda x, b1, b2, b3: b1 * (b2 + x) ** (-1.0 / b3),
}


@cache
def problems() -> dict[str, dict[str, Any]]:
    path = Path(__file__).with_name("nist_strd.json")
    found: dict[str, dict[str, Any]] = json.loads(path.read_text())["problems"]
    return found


@cache
def law_class(name: str) -> type[GeneralLaw]:
    """Return the model of a problem as a law whose coefficients are all free in sign."""
    problem = problems()[name]
    inputs = [key for key in ("x", "x1", "x2") if key in problem]

    class NistLaw(GeneralLaw):
        equation: ClassVar[str] = name
        variables: ClassVar[Mapping[str, str]] = dict.fromkeys(inputs, "a predictor")
        limits: ClassVar[Mapping[str, tuple[float, float]]] = dict.fromkeys(
            inputs, (-math.inf, math.inf)
        )

        def value_at(self, at: Mapping[str, Any]) -> Any:
            fields = {f"b{k + 1}": getattr(self, f"b{k + 1}") for k in range(len(self.names))}
            return MODELS[name](**at, **fields)

        def slopes_at(self, at: Mapping[str, Any]) -> Any:
            raise NotImplementedError

        @property
        def names(self) -> list[str]:
            return [f"b{k + 1}" for k in range(len(problem["certified"]))]

    fields: dict[str, Any] = {f"b{k + 1}": (float, ...) for k in range(len(problem["certified"]))}
    return create_model(name, __base__=NistLaw, **fields)


def start(name: str, which: str) -> GeneralLaw:
    values = problems()[name][which]
    fields = {f"b{k + 1}": float(value) for k, value in enumerate(values)}
    return law_class(name).model_validate({**fields, "source": which})


def fit_from(name: str, *starts: str) -> GeneralFit:
    """Fit a problem from its starts; that of a logarithm on the logarithm."""
    problem = problems()[name]
    return fit_general(
        law_class(name),
        {key: np.array(problem[key]) for key in law_class(name).variables},
        np.array(problem["y"]),
        objective="least_squares",
        on="log" if name == "Nelson" else "loss",
        starts=[start(name, each) for each in starts],
    )


def digits(found: float, certified: float) -> float:
    """Return the digits that agree, the log relative error of McCullough, at most 11."""
    return min(11.0, -math.log10(max(abs(found / certified - 1.0), 1e-11)))


def agreement(name: str, found: GeneralFit) -> tuple[float, float, float]:
    """Return the fewest digits of parameters, of deviations, and those of the sum of squares."""
    problem = problems()[name]
    values = [each.value for each in found.coefficients.values()]
    parameters = min(digits(a, b) for a, b in zip(values, problem["certified"], strict=True))
    squares = digits(2.0 * found.objective, problem["squares"])
    if found.covariance is None or len(found.covariance.names) < len(values):
        return parameters, 0.0, squares
    errors = [found.covariance.std_error(key) for key in found.coefficients]
    deviations = min(digits(a, b) for a, b in zip(errors, problem["deviation"], strict=True))
    return parameters, deviations, squares
