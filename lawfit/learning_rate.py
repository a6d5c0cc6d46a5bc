"""The peak learning rate of a run, from its compute."""

import math
from typing import Final

from lawfit._values import positive

LEARNING_RATE_PREFACTOR: Final = 3.30
"""Prefactor of rule (17) of arXiv 2608.10605."""

LEARNING_RATE_EXPONENT: Final = -0.199
"""Exponent of rule (17) of arXiv 2608.10605 [-]."""


def peak_learning_rate(*, n_active: float, tokens: float) -> float:
    """Return the peak learning rate that the joint law was fitted with.

    Rule (17) of arXiv 2608.10605::

        lr*(C) = 3.30 C^-0.199,   C = 6 N_act D

    It comes from a pilot sweep of mixture-of-experts models under AdamW (weight
    decay 0.1) and a warm-up, stable, decay schedule. The paper prints no bounds
    for that sweep. The runs of the law, all set by this rule, span 1.9e18 to
    8.1e20 FLOP; beyond that the rule is an extrapolation. Compute is its only
    variable: it knows nothing of batch size, sparsity or another optimiser.

    Parameters
    ----------
    n_active
        Active non-embedding parameters [parameter].
    tokens
        Training tokens [token].

    Returns
    -------
    float
        Peak learning rate [-].

    Raises
    ------
    LawError
        If a value is not finite and above 0.
    """
    compute = 6.0 * float(positive("n_active", n_active)) * float(positive("tokens", tokens))
    return LEARNING_RATE_PREFACTOR * math.pow(compute, LEARNING_RATE_EXPONENT)
