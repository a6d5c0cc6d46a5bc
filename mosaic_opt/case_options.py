"""The options that commands share, and what they are read into."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from mosaic_opt.envelope import Envelope
    from perfmodel.architecture import Architecture, MfuConvention
    from perfmodel.cluster import Batch, Cluster
    from perfmodel.plan import Plan

Json = Annotated[str | None, typer.Option("--json", metavar="FILE|-", help="Write JSON too.")]
EnvelopeFile = Annotated[Path | None, typer.Argument(help="YAML, TOML or JSON file.")]
Example = Annotated[str | None, typer.Option(help="A shipped envelope, by name.")]
Workers = Annotated[int | None, typer.Option(help="Threads; all cores unless given.")]
Model = Annotated[
    str,
    typer.Option(
        metavar="M",
        help="A name of `mosaic models`, ladder:q=12,E=96,K=2,G=4, a name of a family's model, or "
        "a YAML, TOML or JSON file.",
    ),
]
PlanText = Annotated[
    str, typer.Option("--plan", help="For example tp=1,ep=8,pp=8,mbs=4,layout=balanced.")
]
ClusterText = Annotated[str, typer.Option("--cluster", help="Pack and nodes: p6-b200:32.")]
GlobalBatch = Annotated[int, typer.Option(help="Sequences in a step.")]
Seq = Annotated[int, typer.Option("--seq", help="Tokens in a sequence.")]
OptimizerName = Annotated[str, typer.Option("--optimizer", help="adamw, muon or scion.")]
PrecisionName = Annotated[
    str, typer.Option("--precision", help="bf16, fp8, fp8-block, mxfp8 or nvfp4.")
]
StackName = Annotated[str, typer.Option("--stack", help="Stack profile: name or TOML file.")]
Convention = Annotated[
    str,
    typer.Option("--mfu-convention", help="6n-nonembedding, 6n-head, 6n-embedding or megatron."),
]


Imbalance = Annotated[
    float,
    typer.Option(help="Rows on the fullest rank of expert parallelism over the mean; 1 is even."),
]
CapacityFactor = Annotated[
    float | None,
    typer.Option(help="Rows that an expert takes at most, over its mean; the rest is dropped."),
]
Degrees = Annotated[str | None, typer.Option(metavar="N,N", help="Values to try, as in 1,2,4.")]
Cap = Annotated[int | None, typer.Option(help="The largest value to try.")]


def read_envelope(file: Path | None, name: str | None) -> Envelope:
    """Read an envelope from a file, or a shipped one by name.

    Raises
    ------
    MosaicError
        Both are given or none, or it cannot be read; one sentence.
    """
    from mosaic_opt.envelope import example, load_envelope
    from mosaic_opt.errors import MosaicError

    if (file is None) == (name is None):
        raise MosaicError("Give an envelope file or --example NAME, one of the two.")
    return load_envelope(file) if file is not None else example(str(name))


def read_case(
    model: str,
    plan: str,
    cluster: str,
    global_batch: int,
    seq: int,
    optimizer: str,
    precision: str,
    imbalance: float,
    capacity_factor: float | None,
) -> tuple[Architecture, Plan, Cluster, Batch]:
    """Read the arguments that `step` and `check` share.

    Raises
    ------
    MosaicError, PerfmodelError
        One of them cannot be read; one sentence.
    """
    from perfmodel.cluster import Cluster

    machines = Cluster.parse(cluster)
    routing = {"imbalance": imbalance, "capacity_factor": capacity_factor}
    batch = read_batch(machines, global_batch, seq, optimizer, precision, routing)
    return read_model(model), read_plan(plan, machines.n_devices), machines, batch


def read_batch(
    machines: Cluster,
    global_batch: int,
    seq: int,
    optimizer: str,
    precision: str,
    routing: dict[str, float | None],
) -> Batch:
    """Read what a step works on, and refuse a precision that the device lacks."""
    from perfmodel.cluster import Batch

    fields = {"global_batch": global_batch, "seq_len": seq, "routing": routing}
    batch: Batch = validated(Batch, {**fields, "optimizer": optimizer, "precision": precision})
    machines.constants_for(batch.precision)  # a rate that the device lacks is said here
    return batch


def read_convention(name: str) -> MfuConvention:
    """Read what the numerator of MFU counts."""
    from mosaic_opt.errors import MosaicError
    from perfmodel.architecture import MfuConvention

    conventions = [c.value for c in MfuConvention]
    if name not in conventions:
        raise MosaicError(f"--mfu-convention {name!r} must be one of {', '.join(conventions)}.")
    return MfuConvention(name)


def read_plan(text: str, world: int) -> Plan:
    """Read a plan; where no dp fills the devices take the one below, which a rule then names."""
    from perfmodel.errors import PerfmodelError
    from perfmodel.plan import Plan

    try:
        return Plan.parse(text, world=world)
    except PerfmodelError:
        if "dp" in (part.partition("=")[0].strip() for part in text.split(",")):
            raise
        plan = Plan.parse(f"{text},dp=1")
        return plan.model_copy(update={"dp": max(1, world // (plan.tp * plan.cp * plan.pp))})


def validated(kind: type[Any], content: Any) -> Any:
    """Return content as a value of a kind; a refusal is one sentence."""
    from pydantic import ValidationError

    from mosaic_opt.errors import MosaicError
    from perfmodel.frozen import explain

    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise MosaicError(f"{explain(error, kind)}.") from None


def read_model(text: str) -> Architecture:
    """Read a model: a name of the catalogue, a model of the ladder or a family, or a file."""
    from mosaic_opt.envelope import read_mapping
    from mosaic_opt.errors import MosaicError
    from perfmodel.architecture import Architecture
    from perfmodel.families import parse_family
    from perfmodel.ladders import parse_ladder
    from perfmodel.models import catalogue

    if text.startswith("ladder:"):
        return parse_ladder(text)
    if text.startswith("family:"):
        return parse_family(text)
    if Path(text).suffix not in (".yaml", ".yml", ".toml", ".json"):
        if text in catalogue:
            return catalogue[text]
        near = catalogue.near(text)
        hint = f"; did you mean {' or '.join(near)}?" if near else "."
        raise MosaicError(
            f"--model {text!r} is neither a name that `mosaic models` lists, nor a ladder model, "
            f"as in ladder:q=12,E=96,K=2,G=4, nor a .yaml, .toml or .json file{hint}"
        )
    content = read_mapping(text)
    if not isinstance(content, dict):
        raise MosaicError(f"{text} holds a {type(content).__name__}, not an architecture's fields.")
    architecture: Architecture = validated(Architecture, content)
    return architecture
