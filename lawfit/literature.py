"""Coefficients of other papers for the laws in variables of their own, with the printed digits.

Coefficients read in the paper itself and those read at second hand say so in their `source`.
Of the law of over-training no coefficients ship: those of Table 6 of arXiv 2403.08540, as the text
at hand has it, give a loss that hardly leaves ``E``.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, TypeAlias

from pydantic import Field

from lawfit.dense_laws import DataConstrainedLaw, GadreLaw, KaplanLaw
from lawfit.expert_count_laws import ClarkLaw, LudziejewskiLaw
from lawfit.general import GeneralLaw
from lawfit.laws import ChinchillaLaw
from lawfit.shared_laws import EfficiencyLeverage, ZhaoLaw
from lawfit.sparse_laws import AbnarLaw, KrajewskiLaw

AnyGeneralLaw: TypeAlias = Annotated[
    KaplanLaw
    | GadreLaw
    | DataConstrainedLaw
    | AbnarLaw
    | ClarkLaw
    | LudziejewskiLaw
    | ZhaoLaw
    | EfficiencyLeverage,
    Field(discriminator="kind"),
]
"""Any law of this package in variables of its own, told apart by ``kind``."""

_AT_SECOND_HAND = "coefficients read at second hand, not in the paper"

LITERATURE_PRINTED: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "kaplan": MappingProxyType(
            {"alpha_n": "0.076", "alpha_d": "0.103", "n_c": "6.4e13", "d_c": "1.8e13"}
        ),
        "muennighoff": MappingProxyType(
            {
                "a": "520.824952",
                "b": "1487.71609",
                "e": "1.86914368",
                "alpha": "0.3526596",
                "beta": "0.3526596",
                "r_d": "15.387756",
                "r_n": "5.309743",
            }
        ),
        "abnar": MappingProxyType(
            {
                "a": "16612.50",
                "b": "5455.67",
                "c": "0.4598",
                "d": "17.26",
                "e": "0.94",
                "alpha": "0.5962",
                "beta": "0.3954",
                "lambda_": "-0.1666",
                "delta": "0.1603",
                "gamma": "0.1595",
            }
        ),
        "krajewski-moe": MappingProxyType(
            {
                "a": "18.1",
                "alpha": "0.115",
                "b": "30.8",
                "beta": "0.147",
                "g": "2.1",
                "gamma": "0.58",
                "e": "0.47",
            }
        ),
        "krajewski-dense": MappingProxyType(
            {"a": "16.3", "alpha": "0.126", "b": "26.7", "beta": "0.127", "e": "0.47"}
        ),
        "clark-sbase": MappingProxyType(
            {
                "a": "-0.082",
                "b": "-0.108",
                "c": "0.009",
                "d": "1.104",
                "start": "1.847",
                "most": "314.478",
            }
        ),
        "clark-rlr": MappingProxyType(
            {
                "a": "-0.083",
                "b": "-0.126",
                "c": "0.012",
                "d": "1.111",
                "start": "1.880",
                "most": "469.982",
            }
        ),
        "clark-hash": MappingProxyType(
            {
                "a": "-0.087",
                "b": "-0.136",
                "c": "0.012",
                "d": "1.157",
                "start": "4.175",
                "most": "477.741",
            }
        ),
        "ludziejewski": MappingProxyType(
            {
                "a": "35.91",
                "alpha": "-0.1889",
                "delta": "-0.2285",
                "gamma": "0.0098",
                "b": "35.98",
                "beta": "-0.1775",
                "omega": "0.5529",
                "zeta": "-0.0259",
                "start": "2.0732",
                "most": "290.4521",
                "c": "1.3637",
            }
        ),
        "tian": MappingProxyType(
            {
                "alpha": "1.23",
                "delta": "-7.61e-2",
                "gamma": "1.67e-2",
                "beta": "-1.17e-1",
                "start": "1.63e-2",
                "most": "5.28e16",
            }
        ),
        "zhao": MappingProxyType(
            {
                "e": "0.1577",
                "f": "7.2446",
                "m": "5.1395",
                "n": "-3.2363",
                "k": "0.0013",
                "h": "0.0450",
                "a": "38.051",
                "alpha": "0.2383",
                "b": "27129.05",
                "beta": "0.4694",
                "c": "31.096",
                "eps": "1.8182",
            }
        ),
    }
)
"""The coefficients of `LITERATURE_LAWS`, digit by digit, keyed by the field of the law."""


def _printed(name: str) -> dict[str, float]:
    return {field: float(digits) for field, digits in LITERATURE_PRINTED[name].items()}


KAPLAN = KaplanLaw.model_validate(
    {**_printed("kaplan"), "source": "Kaplan et al., arXiv 2001.08361, Table 2"}
)
"""Kaplan et al., arXiv 2001.08361, the fit in parameters and tokens together."""

MUENNIGHOFF = DataConstrainedLaw.model_validate(
    {
        **_printed("muennighoff"),
        "source": "Muennighoff et al., arXiv 2305.16264, appendix A, with the digits of its code "
        f"({_AT_SECOND_HAND})",
    }
)
"""Repeated tokens, Muennighoff et al., arXiv 2305.16264.

The paper prints 521, 1488, 1.87 and 0.35. Its code has the logarithms 6.255414, 7.3049974 and
0.6254804 and the exponent 0.3526596; those are here, since 0.35 would move the loss by 0.03.
"""

ABNAR = AbnarLaw.model_validate(
    {**_printed("abnar"), "source": f"Abnar et al., arXiv 2501.12370 ({_AT_SECOND_HAND})"}
)
"""Abnar et al., arXiv 2501.12370; lambda is below 0."""

KRAJEWSKI_MOE = KrajewskiLaw.model_validate(
    {
        **_printed("krajewski-moe"),
        "source": f"Krajewski et al., arXiv 2402.07871, mixtures ({_AT_SECOND_HAND})",
    }
)
"""Mixtures of Krajewski et al., arXiv 2402.07871."""

KRAJEWSKI_DENSE = ChinchillaLaw.model_validate(
    {
        **_printed("krajewski-dense"),
        "source": f"Krajewski et al., arXiv 2402.07871, dense models ({_AT_SECOND_HAND})",
    }
)
"""Dense models of Krajewski et al., arXiv 2402.07871, a law of the form of Chinchilla's."""

CLARK_SBASE = ClarkLaw.model_validate(
    {**_printed("clark-sbase"), "source": "Clark et al., arXiv 2202.01169, Table 3, S-Base"}
)
"""Routing by S-Base, Clark et al., arXiv 2202.01169."""

CLARK_RLR = ClarkLaw.model_validate(
    {**_printed("clark-rlr"), "source": "Clark et al., arXiv 2202.01169, Table 3, RL-R"}
)
"""Routing by reinforcement learning, Clark et al., arXiv 2202.01169."""

CLARK_HASH = ClarkLaw.model_validate(
    {**_printed("clark-hash"), "source": "Clark et al., arXiv 2202.01169, Table 3, Hash"}
)
"""Routing by hash, Clark et al., arXiv 2202.01169."""

LUDZIEJEWSKI = LudziejewskiLaw.model_validate(
    {**_printed("ludziejewski"), "source": "Ludziejewski et al., arXiv 2502.05172, Table 3"}
)
"""Ludziejewski et al., arXiv 2502.05172."""

TIAN = EfficiencyLeverage.model_validate(
    {**_printed("tian"), "source": "Tian et al., arXiv 2507.17702"}
)
"""Leverage of Tian et al., arXiv 2507.17702."""

ZHAO = ZhaoLaw.model_validate(
    {**_printed("zhao"), "source": f"Zhao et al., arXiv 2509.23678 ({_AT_SECOND_HAND})"}
)
"""Zhao et al., arXiv 2509.23678."""

LITERATURE_LAWS: Mapping[str, GeneralLaw | KrajewskiLaw | ChinchillaLaw] = MappingProxyType(
    {
        "kaplan": KAPLAN,
        "abnar": ABNAR,
        "krajewski-moe": KRAJEWSKI_MOE,
        "krajewski-dense": KRAJEWSKI_DENSE,
        "clark-sbase": CLARK_SBASE,
        "clark-rlr": CLARK_RLR,
        "clark-hash": CLARK_HASH,
        "ludziejewski": LUDZIEJEWSKI,
        "tian": TIAN,
        "zhao": ZHAO,
        "muennighoff": MUENNIGHOFF,
    }
)
"""Published laws by name, besides those of `PUBLISHED_LAWS`, which an envelope takes."""
