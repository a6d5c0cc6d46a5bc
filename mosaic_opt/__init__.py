"""The architecture, token budget and layout with the least predicted loss on a given cluster.

>>> from mosaic_opt import example, solve
>>> solution = solve(example("table3"))

Names are loaded when they are first used: importing the package loads no solver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perfmodel.lazy import lazy_names

if TYPE_CHECKING:
    from mosaic_opt.agreement import Agreement
    from mosaic_opt.allocation.figure import path_figure
    from mosaic_opt.allocation.inverse import Inverse, invert
    from mosaic_opt.allocation.phases import Phases, PhasesByNodes, phases, phases_by_nodes
    from mosaic_opt.allocation.regime import AllocationLaw, allocation_law
    from mosaic_opt.backends.base import Backend, Limits, Progress, Report
    from mosaic_opt.backends.branch import BranchAndBound
    from mosaic_opt.backends.cpsat.search import CpSat
    from mosaic_opt.backends.enumerate import Enumerate
    from mosaic_opt.backends.gp import GeometricProgram, relax
    from mosaic_opt.batch_choice import BatchChoice, solve_batches
    from mosaic_opt.certificate import Certificate, certify
    from mosaic_opt.comparison import Comparison, compare
    from mosaic_opt.envelope import Envelope, example, examples, json_schema, load_envelope
    from mosaic_opt.errors import EnvelopeError, MosaicError
    from mosaic_opt.figure_fit import fit_page
    from mosaic_opt.fit_report import FitReport
    from mosaic_opt.problem import Problem
    from mosaic_opt.relaxation_result import Relaxation
    from mosaic_opt.result import Solution, Status
    from mosaic_opt.solver import solve
    from mosaic_opt.stage_search import StageSearch, search_stages
    from mosaic_opt.studies.draws import Shares
    from mosaic_opt.studies.robust import robust
    from mosaic_opt.studies.robust_result import Robust
    from mosaic_opt.verification import Verification, verify
    from mosaic_opt.verification_batches import BatchVerification, verify_batches

_HOMES = {
    "Agreement": "agreement",
    "AllocationLaw": "allocation.regime",
    "Backend": "backends.base",
    "BatchChoice": "batch_choice",
    "BatchVerification": "verification_batches",
    "BranchAndBound": "backends.branch",
    "Certificate": "certificate",
    "Comparison": "comparison",
    "CpSat": "backends.cpsat.search",
    "Enumerate": "backends.enumerate",
    "Envelope": "envelope",
    "EnvelopeError": "errors",
    "FitReport": "fit_report",
    "Inverse": "allocation.inverse",
    "GeometricProgram": "backends.gp",
    "Limits": "backends.base",
    "MosaicError": "errors",
    "Phases": "allocation.phases",
    "PhasesByNodes": "allocation.phases",
    "Problem": "problem",
    "Progress": "backends.base",
    "Relaxation": "relaxation_result",
    "Report": "backends.base",
    "Robust": "studies.robust_result",
    "Shares": "studies.draws",
    "Solution": "result",
    "StageSearch": "stage_search",
    "Status": "result",
    "Verification": "verification",
    "allocation_law": "allocation.regime",
    "certify": "certificate",
    "compare": "comparison",
    "example": "envelope",
    "examples": "envelope",
    "fit_page": "figure_fit",
    "invert": "allocation.inverse",
    "json_schema": "envelope",
    "load_envelope": "envelope",
    "path_figure": "allocation.figure",
    "phases": "allocation.phases",
    "phases_by_nodes": "allocation.phases",
    "relax": "backends.gp",
    "robust": "studies.robust",
    "search_stages": "stage_search",
    "solve": "solver",
    "solve_batches": "batch_choice",
    "verify": "verification",
    "verify_batches": "verification_batches",
}

__all__ = [
    "Agreement",
    "AllocationLaw",
    "Backend",
    "BatchChoice",
    "BatchVerification",
    "BranchAndBound",
    "Certificate",
    "Comparison",
    "CpSat",
    "Enumerate",
    "Envelope",
    "EnvelopeError",
    "FitReport",
    "GeometricProgram",
    "Inverse",
    "Limits",
    "MosaicError",
    "Phases",
    "PhasesByNodes",
    "Problem",
    "Progress",
    "Relaxation",
    "Report",
    "Robust",
    "Shares",
    "Solution",
    "StageSearch",
    "Status",
    "Verification",
    "allocation_law",
    "certify",
    "compare",
    "example",
    "examples",
    "fit_page",
    "invert",
    "json_schema",
    "load_envelope",
    "path_figure",
    "phases",
    "phases_by_nodes",
    "relax",
    "robust",
    "search_stages",
    "solve",
    "solve_batches",
    "verify",
    "verify_batches",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES, __all__)
