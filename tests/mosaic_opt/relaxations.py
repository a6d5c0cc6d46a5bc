"""The relaxation of the small envelope, and exact searches to hold it against."""

from __future__ import annotations

from functools import cache
from math import inf
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings

from mosaic_opt.backends.base import Limits
from mosaic_opt.backends.enumerate import Enumerate
from mosaic_opt.backends.gp import GeometricProgram
from mosaic_opt.problem import Problem
from mosaic_opt.relaxation_result import Relaxation
from mosaic_opt.relaxation_steps import GB

from .strategies import tiny_envelope, tiny_problem

FEW = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
MANY = settings(max_examples=200, deadline=None)


MEMORY_GB = tiny_envelope().cluster.device_memory_bytes / GB


def exact_optimum(problem: Problem) -> float:
    best = Enumerate(workers=1).search(problem, Limits()).incumbent
    return inf if best is None else best.loss


def best_steps(problem: Problem) -> np.ndarray:
    cap = problem.envelope.memory_cap_bytes
    n = len(problem.architectures)
    return np.array([problem.least_steps(i, (cap,))[0] for i in range(n)])


@cache
def relaxed_tiny() -> Relaxation:
    return GeometricProgram(workers=1).relax(tiny_problem())


def elasticity(found: Relaxation, budget: str) -> Any:
    return next(e for e in found.elasticities if e.budget == budget)


@cache
def small_problem() -> Problem:
    return tiny_problem()


@cache
def small_steps() -> np.ndarray:
    return best_steps(small_problem())
