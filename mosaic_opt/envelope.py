"""The envelope: all that is fixed before the search, validated once and then frozen."""

from __future__ import annotations

from functools import cached_property
from importlib import resources
from math import isclose
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticKnownError

from lawfit import LawError, ScalingLaw, load_law
from lawfit.documents import parse_yaml, read_document
from lawfit.laws import LawValue
from mosaic_opt.errors import EnvelopeError
from mosaic_opt.spaces import (
    MAX_CANDIDATES,
    ExplicitSpace,
    FamilySpace,
    LadderSpace,
    UnionSpace,
)
from mosaic_opt.spending import SECONDS_PER_DAY, Budget
from mosaic_opt.token_efficiency import CriticalBatch, LossCriticalBatch
from mosaic_opt.token_rule import TokenRule
from perfmodel.architecture import Architecture, MfuConvention, ParameterConvention
from perfmodel.cluster import Batch, Cluster, Count
from perfmodel.errors import PerfmodelError
from perfmodel.frozen import Frozen, explain
from perfmodel.goodput import FailureFacts, Goodput
from perfmodel.plan_space import PlanSpace
from perfmodel.sources import Source, weakest

MAX_WINDOW_DAYS = 36500.0


def _law(value: Any, info: ValidationInfo) -> Any:
    """Take a law, its mapping, its name, or its file, relative to that of the envelope."""
    if isinstance(value, ScalingLaw):
        return value
    try:
        return load_law(value, folder=(info.context or {}).get("folder"))
    except LawError as error:
        text = str(error)
        raise ValueError(text if len(text) <= 400 else f"{text[:397]}...") from None


Share = Annotated[float, Field(gt=0.0, le=1.0, strict=True)]
_SHARE: TypeAdapter[float] = TypeAdapter(Share)


def _goodput(value: Any) -> Any:
    """Read a number or failure facts, and complain of the one that was meant."""
    if isinstance(value, FailureFacts):
        return value
    try:
        return FailureFacts.model_validate(value) if isinstance(value, dict) else _number(value)
    except ValidationError as error:
        raise ValueError(explain(error, FailureFacts)) from None


def _number(value: Any) -> float:
    try:
        return _SHARE.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise PydanticKnownError(first["type"], first.get("ctx")) from None  # type: ignore[arg-type]


def _cluster(value: Any) -> Any:
    return Cluster.parse(value) if isinstance(value, str) else value


_BOUGHT = object()  # no window is given


def _window(value: Any, info: ValidationInfo) -> Any:
    """Take the window as it is given, or the days that the budget buys."""
    bought = value is _BOUGHT
    if not {"budget", "cluster"} <= info.data.keys():  # refused themselves, which is all to say
        return 1.0 if bought else value
    budget, cluster = info.data["budget"], info.data["cluster"]
    if budget is None:
        if bought:
            raise PydanticKnownError("missing")
        return value
    days = budget.days(cluster.n_devices)
    if not bought and not (isinstance(value, float | int) and isclose(value, days)):
        raise ValueError(
            f"window_days={value} and a budget that buys {days:.6g} days on {cluster.n_devices} "
            "devices are two windows; give one of them"
        )
    if not 0.0 < days <= MAX_WINDOW_DAYS:
        raise ValueError(
            f"the budget buys {days:.6g} days on {cluster.n_devices} devices, which must be above "
            f"0 and at most {MAX_WINDOW_DAYS:g}"
        )
    return days


def _spaces(value: Any) -> Any:
    return {"kind": "union", "spaces": value} if isinstance(value, list | tuple) else value


class Envelope(Frozen):
    """A cluster, a window, and what may be chosen within them.

    Attributes
    ----------
    name : str
        For reports.
    cluster : Cluster
        Hardware pack and nodes; also as text, ``"p6-b200:32"``.
    budget : Budget, optional
        Money or energy in place of days; then ``window_days`` is what it buys.
    window_days : float
        Wall-clock window, T_train [day].
    batch : Batch
        Global batch, sequence length, optimizer, precision.
    global_batches : tuple of int, optional
        Global batches to choose from, ``batch.global_batch`` among them; `solve_batches` takes each
        in turn. One unless given.
    critical_batch : CriticalBatch, optional
        What a token is worth at a batch size; every token is worth the same unless given.
    candidates : LadderSpace, FamilySpace, ExplicitSpace or UnionSpace
        Architectures to choose from; a list of spaces is their union.
    law : JointLaw, PerSplitLaw, ChinchillaLaw or another ScalingLaw
        Scaling law, also by name, ``"mosaic-table2"``, or by the path of a file that
        `mosaic fit` wrote; a relative one starts at the envelope's file. A law of a class of your
        own is for Python alone: a document that holds it is not read back.
    goodput : float or FailureFacts
        Share of the window that trains, eta_good, in (0, 1] [-]; or how often devices fail and what
        a checkpoint and a restart cost, from which it follows (:mod:`perfmodel.goodput`). A number
        is ASSUMED, the default of 1 too.
    tokens : TokenRule
        Token budget of a candidate.
    plans : PlanSpace
        Layouts to choose from.
    memory_fraction : float
        Share of a device's memory that a plan may use, in (0, 1] [-]. Allocators fragment; 0.92
        unless given.
    stack : str
        Stack profile, by name or path.
    parameter_convention : ParameterConvention
        Which parameters the law's N (and a tokens-per-parameter ratio) counts.
    mfu_convention : MfuConvention
        What the numerator of a reported MFU counts. It moves no decision.
    mfu_error : float
        Relative error of predicted MFU that near-ties are judged by [-]; 0.06 is the in-sample
        error of the shipped stack profile.
    extrapolation : {"refuse", "flag"}
        What to do with a plan whose price needs a surface beyond a range where its pack says
        "refuse" (an all-to-all over more ranks than were measured). Refused plans are priced
        and counted, and never chosen.
    """

    model_config = ConfigDict(
        json_schema_extra={"anyOf": [{"required": ["window_days"]}, {"required": ["budget"]}]}
    )

    name: Annotated[str, Field(min_length=1, max_length=200)] = "envelope"
    cluster: Annotated[Cluster, BeforeValidator(_cluster)]
    budget: Budget | None = None
    window_days: Annotated[
        float,
        Field(gt=0.0, le=MAX_WINDOW_DAYS, strict=True),
        BeforeValidator(_window),
    ] = Field(default_factory=lambda: _BOUGHT, validate_default=True)
    batch: Batch
    global_batches: Annotated[tuple[Count, ...], Field(min_length=1)] | None = None
    critical_batch: CriticalBatch | None = None
    candidates: Annotated[
        LadderSpace | ExplicitSpace | FamilySpace | UnionSpace,
        Field(discriminator="kind"),
        BeforeValidator(_spaces),
    ]
    law: Annotated[LawValue, BeforeValidator(_law)] = Field(
        default_factory=lambda: load_law("mosaic-table2")
    )
    goodput: Annotated[Share | FailureFacts, BeforeValidator(_goodput)] = 1.0
    tokens: TokenRule = TokenRule()
    plans: PlanSpace = PlanSpace()
    memory_fraction: Annotated[float, Field(gt=0.0, le=1.0, strict=True)] = 0.92
    stack: Annotated[str, Field(min_length=1)] = "megatron-eager"
    parameter_convention: ParameterConvention = ParameterConvention.WITHOUT_EMBEDDING_AND_HEAD
    mfu_convention: MfuConvention = MfuConvention.SIX_N_NONEMBEDDING
    mfu_error: Annotated[float, Field(ge=0.0, lt=1.0, strict=True)] = 0.06
    extrapolation: Literal["refuse", "flag"] = "refuse"

    @model_validator(mode="after")
    def _bounded(self) -> Envelope:
        if self.candidates.grid_size > MAX_CANDIDATES:
            raise ValueError(
                f"the candidate grid has {self.candidates.grid_size} points, which must be at most "
                f"{MAX_CANDIDATES}"
            )
        if isinstance(self.goodput, FailureFacts) and self.goodput.mtbf_s(1, 1) is None:
            raise ValueError(
                "goodput: mtbf_device_hours or mtbf_node_hours is missing, and goodput is unknown "
                "without a failure rate; give one of them, or a number in (0, 1]"
            )
        self._batches_have_a_price()
        counts = self.batch.routing.tokens_per_expert
        others = {a.n_experts for a in self.candidates.architectures()} if counts else set()
        if counts and others - {len(counts)}:
            raise ValueError(
                f"batch.routing.tokens_per_expert has {len(counts)} numbers, and some candidates "
                f"have {max(others - {len(counts)})} experts; give an imbalance in its place"
            )
        return self

    def _batches_have_a_price(self) -> None:
        rule, beta = self.critical_batch, self.law.beta
        if isinstance(rule, LossCriticalBatch) and rule.exponent * beta >= 1.0:
            raise ValueError(
                f"critical_batch: exponent={rule.exponent:g} times the law's beta={beta:g} must be "
                f"below 1, or more tokens could count as fewer; nearest: {0.999 / beta:.4g}"
            )
        if self.global_batches is None:
            return
        if rule is None:
            raise ValueError(
                "global_batches needs critical_batch, without which a larger batch costs no tokens"
            )
        if self.batch.global_batch not in self.global_batches:
            near = min(self.global_batches, key=lambda b: abs(b - self.batch.global_batch))
            raise ValueError(
                f"batch.global_batch={self.batch.global_batch} must be one of global_batches; "
                f"nearest: {near}"
            )

    @property
    def loss_source(self) -> str:
        """What a loss rests on: the law, and the critical batch where there is one."""
        sources = [Source(self.law.basis)]
        sources += [] if self.critical_batch is None else [self.critical_batch.source]
        return weakest(sources).value

    @property
    def window_s(self) -> float:
        """Wall-clock window [s]."""
        return self.window_days * SECONDS_PER_DAY

    def goodput_of(self, architecture: Architecture) -> Goodput:
        """Return the share of the window that trains a candidate, and what it rests on.

        It depends on the candidate only where its checkpoint's time follows from its size.
        """
        if not isinstance(self.goodput, FailureFacts):
            return Goodput(value=self.goodput, source=Source.ASSUMED)
        stored = 0
        if self.goodput.by_size:
            stored = architecture.n_total(ParameterConvention.WITH_EMBEDDING)
            stored += architecture.mtp_parameters
        return self.goodput.goodput(
            self.cluster.n_devices, self.cluster.nodes, float(stored), self.batch.optimizer.dims
        )

    @property
    def memory_cap_bytes(self) -> float:
        """Memory that a plan may use on a device [B]."""
        return self.memory_fraction * self.cluster.device_memory_bytes

    @cached_property
    def peak_compute_flop(self) -> float:
        """C_peak = F_peak N_dev T_train [FLOP]."""
        return self.cluster.peak_flops * self.cluster.n_devices * self.window_s


def parse_envelope(content: Any, origin: str = "envelope", folder: Path | None = None) -> Envelope:
    """Validate the content of an envelope.

    Parameters
    ----------
    content : Any
        A mapping of the fields.
    origin : str
        What a refusal calls it.
    folder : Path, optional
        Where the relative path of a law's file starts; the working directory unless given.

    Raises
    ------
    EnvelopeError
        In one sentence: which field, which value, which rule.
    """
    if not isinstance(content, dict):
        raise EnvelopeError(f"{origin} holds a {type(content).__name__}, not a table of fields.")
    try:
        envelope = Envelope.model_validate(content, context={"folder": folder})
        # a missing pack, or a rate that it lacks, is the envelope's fault
        envelope.cluster.constants_for(envelope.batch.precision)
        _require_progress(envelope)
    except ValidationError as error:
        raise EnvelopeError(f"{origin}: {explain(error, Envelope)}.") from None
    except PerfmodelError as error:
        raise EnvelopeError(f"{origin}: {str(error).rstrip('.')}.") from None
    return envelope


def _require_progress(envelope: Envelope) -> None:
    """Refuse failure facts under which, whatever the candidate, no checkpoint is ever reached."""
    facts = envelope.goodput
    if isinstance(facts, FailureFacts) and not facts.by_size:
        found = facts.goodput(envelope.cluster.n_devices, envelope.cluster.nodes)
        if not found.value:
            raise PerfmodelError(
                f"goodput: with {found.mtbf_s:.3g} s between failures, checkpoints of "
                f"{found.checkpoint_s:g} s every {found.interval_s:.3g} s and restarts of "
                f"{found.restart_s:g} s, next to none of the window trains."
            )


def read_mapping(path: str | Path) -> Any:
    """Read a YAML, TOML or JSON file with a safe parser.

    Raises
    ------
    EnvelopeError
        The file cannot be read, is of another kind, or does not parse.
    """
    try:
        return read_document(path)
    except LawError as error:
        raise EnvelopeError(str(error)) from None


def load_envelope(path: str | Path) -> Envelope:
    """Read an envelope from a YAML, TOML or JSON file.

    Raises
    ------
    EnvelopeError
        One sentence.
    """
    return parse_envelope(read_mapping(path), str(path), Path(path).parent)


def examples() -> tuple[str, ...]:
    """Return the names of the example envelopes that ship with the package."""
    folder = resources.files("mosaic_opt") / "examples"
    return tuple(
        sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml"))
    )


def example(name: str) -> Envelope:
    """Return an example envelope by name.

    Raises
    ------
    EnvelopeError
        No such example; the sentence lists them.
    """
    if name not in examples():
        raise EnvelopeError(f"There is no example {name!r}; there are {', '.join(examples())}.")
    text = (resources.files("mosaic_opt") / "examples" / f"{name}.yaml").read_text("utf-8")
    return parse_envelope(parse_yaml(text), name)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of an envelope."""
    return Envelope.model_json_schema()


__all__ = [
    "MAX_CANDIDATES",
    "SECONDS_PER_DAY",
    "Envelope",
    "ExplicitSpace",
    "FamilySpace",
    "LadderSpace",
    "TokenRule",
    "UnionSpace",
    "example",
    "examples",
    "json_schema",
    "load_envelope",
    "parse_envelope",
]
