"""An envelope with one thing changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from mosaic_opt.envelope import Envelope
from mosaic_opt.errors import EnvelopeError, MosaicError
from perfmodel.cluster import MAX_NODES, Cluster
from perfmodel.errors import PerfmodelError
from perfmodel.frozen import explain


def changed(envelope: Envelope, **fields: Any) -> Envelope:
    """Return the envelope with other values, validated, and with nothing cached from the old.

    A budget buys other days on another cluster; other days take the place of a budget.
    """
    kept = {name: getattr(envelope, name) for name in Envelope.model_fields}
    if envelope.budget is not None:
        del kept["budget" if "window_days" in fields else "window_days"]
    return Envelope(**(kept | fields))


def node_counts(nodes: Sequence[int]) -> tuple[int, ...]:
    """Check node counts, drop repetitions, and sort them.

    Raises
    ------
    MosaicError
        None, or one out of range.
    """
    if not nodes:
        raise MosaicError("nodes is empty: give at least one node count, as in 16,32,64.")
    for n in nodes:
        if not 1 <= n <= MAX_NODES:
            raise MosaicError(f"nodes={n} must be from 1 to {MAX_NODES}.")
    return tuple(sorted(set(nodes)))


def with_nodes(envelope: Envelope, nodes: int) -> Envelope:
    """Return the envelope on another number of the same nodes.

    Raises
    ------
    EnvelopeError
        The cluster cannot have so many; one sentence.
    """
    old = envelope.cluster
    devices = None if old.devices is None else nodes * old.devices_per_node
    try:
        cluster = Cluster(
            hardware=old.hardware,
            nodes=nodes,
            memory_bytes=old.memory_bytes,
            devices=devices,
            levels=old.levels,
        )
        _ = cluster.constants
        return changed(envelope, cluster=cluster)
    except ValidationError as error:
        raise EnvelopeError(f"nodes={nodes}: {explain(error, Envelope)}.") from None
    except PerfmodelError as error:
        raise EnvelopeError(f"nodes={nodes}: {str(error).rstrip('.')}.") from None
