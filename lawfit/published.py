"""Published coefficients, with the digits and the intervals that were printed.

The intervals are a record. Nothing here re-estimates them, and no code may use
them as if it had; ``docs/theory/laws.md`` says what they are worth.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from lawfit.laws import AnyLaw, ChinchillaLaw, JointLaw
from lawfit.shapes import ShapeRange
from lawfit.validity import ValidRange


class PrintedCoefficient(NamedTuple):
    """One row of a printed table of coefficients, digit by digit.

    Attributes
    ----------
    value
        Point estimate as printed.
    interval
        Lower and upper bound of the 95 % BCa interval as printed.
    identified
        True where the source marks the coefficient as identified, False where
        it marks it as a coordinate along a ridge.
    """

    value: str
    interval: tuple[str, str]
    identified: bool


MOSAIC_TABLE2_PRINTED: Mapping[str, PrintedCoefficient] = MappingProxyType(
    {
        "a": PrintedCoefficient("8.462", ("8.24", "8.85"), identified=False),
        "b": PrintedCoefficient("88.32", ("87.8", "89.9"), identified=False),
        "c": PrintedCoefficient("0.1828", ("0.181", "0.184"), identified=False),
        "j": PrintedCoefficient("0.7123", ("0.710", "0.713"), identified=False),
        "e": PrintedCoefficient("0.3129", ("0.307", "0.316"), identified=False),
        "alpha": PrintedCoefficient("0.1048", ("0.104", "0.106"), identified=False),
        "beta": PrintedCoefficient("0.2070", ("0.206", "0.208"), identified=True),
        "lambda_": PrintedCoefficient("0.1249", ("0.119", "0.138"), identified=False),
        "delta": PrintedCoefficient("0.5567", ("0.550", "0.577"), identified=False),
        "gamma": PrintedCoefficient("0.1702", ("0.167", "0.174"), identified=False),
        "eta": PrintedCoefficient("+0.9513", ("+0.911", "+0.954"), identified=True),
    }
)
"""Table 2 of arXiv 2608.10605, keyed by the field of `JointLaw`."""

MOSAIC_TABLE2 = JointLaw(
    **{name: float(row.value) for name, row in MOSAIC_TABLE2_PRINTED.items()},
    source="arXiv 2608.10605, Table 2 (150 runs, up to 8.1e20 FLOP)",
    valid_range=ValidRange(
        n_total=(0.22e9, 79.24e9),
        n_active=(0.104e9, 2.72e9),
        sparsity=(0.499, 0.981),
        expert_split=(1, 8),
        tokens=(2.88e9, 56.38e9),
        tokens_per_parameter=(10.8, 70),
    ),
    shape_range=ShapeRange(
        aspect_ratio=(128, 128),
        ff_ratio=(2.5, 2.5),
        head_dim=(128, 128),
        n_kv_heads=(4, 8),
        shared_experts=(1, 1),
        first_k_dense=(1, 1),
    ),
)
"""The joint law with Table 2 of arXiv 2608.10605, over the range of its Tables 6 and 7.

Its shapes are those of the ladder of Section 7.1, seeds 2, 3, 4 and 6.
"""

_CHINCHILLA_RUNS = ValidRange(n_active=(70e6, 16e9), sparsity=(0, 0), tokens=(5e9, 500e9))
"""Dense runs of arXiv 2203.15556, from its abstract."""

CHINCHILLA_EPOCH = ChinchillaLaw(
    a=482.01,
    b=2085.43,
    e=1.8172,
    alpha=0.3478,
    beta=0.3658,
    source="Besiroglu et al., arXiv 2404.10102 (refit of data read from a figure)",
    valid_range=_CHINCHILLA_RUNS,
)
"""The refit of the Chinchilla law by Besiroglu et al., arXiv 2404.10102."""

CHINCHILLA_HOFFMANN = ChinchillaLaw(
    a=406.4,
    b=410.7,
    e=1.69,
    alpha=0.34,
    beta=0.28,
    source="Hoffmann et al., arXiv 2203.15556, approach 3",
    valid_range=_CHINCHILLA_RUNS,
)
"""The Chinchilla law as Hoffmann et al. print it, arXiv 2203.15556."""

PUBLISHED_LAWS: Mapping[str, AnyLaw] = MappingProxyType(
    {
        "joint": MOSAIC_TABLE2,
        "mosaic-table2": MOSAIC_TABLE2,
        "chinchilla-epoch": CHINCHILLA_EPOCH,
        "chinchilla-hoffmann": CHINCHILLA_HOFFMANN,
    }
)
"""The names that `lawfit.load_law` knows."""
