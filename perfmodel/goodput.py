r"""Share of wall time that is useful training, from failures, checkpoints and restarts.

A run computes for ``interval`` seconds, stands still for ``checkpoint`` seconds while the state is
written, and goes on. Failures of the whole system come as a Poisson process with a mean time
``mtbf`` between them; each one costs the work since the last whole checkpoint and a ``restart``,
which can fail too. The expected wall time of one interval is then

    E = mtbf exp(restart / mtbf) (exp((interval + checkpoint) / mtbf) - 1)

(the complete cost function of Daly 2006), exact for this renewal process, and goodput is
``interval / E``. All times are in seconds. What a checkpoint does beside training (an asynchronous
write) is not part of ``checkpoint``.

References
----------
Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974.
Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
Generation Computer Systems 22(3), 2006.
"""

from __future__ import annotations

from math import exp, expm1, inf, sqrt
from typing import Annotated, Self

from pydantic import Field, model_validator

from perfmodel.frozen import Frozen
from perfmodel.kernels import BF16_BYTES
from perfmodel.memory import OptimizerDims
from perfmodel.sources import Source

__all__ = [
    "FailureFacts",
    "Goodput",
    "best_interval",
    "checkpoint_bytes",
    "daly_interval",
    "expected_goodput",
    "young_interval",
]

SECONDS_PER_HOUR = 3600.0
_TOO_LONG = 700.0  # exp of more than this is beyond a float
_ROUNDS = 200

Positive = Annotated[float, Field(ge=1e-12, le=1e18, allow_inf_nan=False, strict=True)]
Seconds = Annotated[float, Field(ge=0.0, le=1e18, allow_inf_nan=False, strict=True)]


def checkpoint_bytes(parameters: float, optimizer: OptimizerDims) -> float:
    """Bytes of one checkpoint: bf16 weights and the optimizer's state [B]."""
    return parameters * (BF16_BYTES + optimizer.state_bytes)


def young_interval(checkpoint_s: float, mtbf_s: float) -> float:
    """Young's first-order interval of compute between checkpoints, ``sqrt(2 checkpoint mtbf)`` [s].

    Good where a checkpoint takes much less time than passes between failures.
    """
    return sqrt(2.0 * checkpoint_s * mtbf_s)


def daly_interval(checkpoint_s: float, mtbf_s: float) -> float:
    """Daly's higher-order interval of compute between checkpoints (2006) [s].

    ``sqrt(2 c M) (1 + sqrt(c / 2M) / 3 + (c / 2M) / 9) - c`` where ``c < 2M``, else ``M``.
    """
    if checkpoint_s >= 2.0 * mtbf_s:
        return mtbf_s
    ratio = checkpoint_s / (2.0 * mtbf_s)
    series = 1.0 + sqrt(ratio) / 3.0 + ratio / 9.0
    return young_interval(checkpoint_s, mtbf_s) * series - checkpoint_s


def best_interval(checkpoint_s: float, mtbf_s: float) -> float:
    """Interval with the greatest :func:`expected_goodput` [s]; the restart does not move it.

    With ``u = interval / mtbf`` the derivative vanishes where ``1 - u = exp(-u - checkpoint /
    mtbf)``, which has one root in [0, 1]; it is found by bisection.
    """
    if checkpoint_s == 0.0 or mtbf_s == inf:
        return 0.0 if checkpoint_s == 0.0 else inf
    cost = checkpoint_s / mtbf_s
    low, high = 0.0, 1.0
    for _ in range(_ROUNDS):
        u = 0.5 * (low + high)
        if u in (low, high):
            break
        # 1 - exp(-u - cost) - u, in a form that keeps its digits where both are small
        low, high = (u, high) if -expm1(-u - cost) > u else (low, u)
    return 0.5 * (low + high) * mtbf_s


def expected_goodput(
    interval_s: float, checkpoint_s: float, restart_s: float, mtbf_s: float
) -> float:
    """Return the expected share of wall time that trains [-]; see the module's docstring.

    Parameters
    ----------
    interval_s : float
        Compute between two checkpoints [s]. 0 is the limit of ever more checkpoints, which is 0
        unless they are free.
    checkpoint_s : float
        Time that training stands still for a checkpoint [s].
    restart_s : float
        Time from a failure until training goes on where the last checkpoint ended [s].
    mtbf_s : float
        Mean time between failures of the whole system [s]; inf for none.
    """
    if mtbf_s == inf:
        if interval_s == inf:
            return 1.0
        return interval_s / (interval_s + checkpoint_s) if interval_s + checkpoint_s > 0.0 else 1.0
    if interval_s + checkpoint_s == 0.0:
        return exp(-restart_s / mtbf_s)
    attempt = (interval_s + checkpoint_s) / mtbf_s
    if attempt > _TOO_LONG or restart_s / mtbf_s > _TOO_LONG:
        return 0.0
    return (interval_s / mtbf_s) * exp(-restart_s / mtbf_s) / expm1(attempt)


class Goodput(Frozen):
    """What follows from `FailureFacts` for one system and one size of checkpoint.

    Attributes
    ----------
    value : float, optional
        Expected share of wall time that trains [-]. None: unknown, because no failure rate is
        given; it is neither 1 nor any other number.
    source : Source
        What the value rests on; that of the failure facts.
    mtbf_s : float, optional
        Mean time between failures of the system [s].
    checkpoint_s, interval_s, restart_s : float, optional
        A checkpoint, the compute between two, and a restart [s].
    """

    value: float | None
    source: Source
    mtbf_s: float | None = None
    checkpoint_s: float | None = None
    interval_s: float | None = None
    restart_s: float | None = None


class FailureFacts(Frozen):
    """How often devices or nodes fail, and what a checkpoint and a restart cost.

    Attributes
    ----------
    mtbf_device_hours : float, optional
        Device-hours of running between two failures that stop the run [h].
    mtbf_node_hours : float, optional
        Node-hours between two failures that no device is the cause of [h]. Where both are given,
        their rates add.
    checkpoint_s : float, optional
        Time that training stands still for a checkpoint [s]; or
    storage_bytes_per_s : float, optional
        bandwidth to storage of the whole cluster [B/s], from which it follows with
        :func:`checkpoint_bytes`.
    restart_s : float
        Time from a failure until training goes on [s].
    interval_s : float, optional
        Compute between two checkpoints [s]; the best one (:func:`best_interval`) unless given.
    source : Source
        What these facts rest on.
    origin : str
        Where they come from, in words.
    """

    mtbf_device_hours: Positive | None = None
    mtbf_node_hours: Positive | None = None
    checkpoint_s: Seconds | None = None
    storage_bytes_per_s: Positive | None = None
    restart_s: Seconds
    interval_s: Positive | None = None
    source: Source = Source.ASSUMED
    origin: Annotated[str, Field(max_length=400)] = ""

    @model_validator(mode="after")
    def _one_way_to_a_checkpoint(self) -> Self:
        if (self.checkpoint_s is None) == (self.storage_bytes_per_s is None):
            given = "both" if self.checkpoint_s is not None else "neither"
            raise ValueError(
                f"checkpoint_s or storage_bytes_per_s must be given, one of them and not {given}"
            )
        return self

    @property
    def by_size(self) -> bool:
        """Whether the time of a checkpoint follows from its size."""
        return self.checkpoint_s is None

    def mtbf_s(self, n_devices: int, nodes: int) -> float | None:
        """Mean time between failures of the system [s]; None where no rate is given."""
        rates = [
            count / (hours * SECONDS_PER_HOUR)
            for count, hours in ((n_devices, self.mtbf_device_hours), (nodes, self.mtbf_node_hours))
            if hours is not None
        ]
        return 1.0 / sum(rates) if rates else None

    def goodput(
        self,
        n_devices: int,
        nodes: int,
        parameters: float = 0.0,
        optimizer: OptimizerDims | None = None,
    ) -> Goodput:
        """Return the expected goodput of a system.

        Parameters
        ----------
        n_devices, nodes : int
            The size of the system.
        parameters : float
            All stored parameters [-]; read only where the checkpoint follows from its size.
        optimizer : OptimizerDims, optional
            Whose state a checkpoint holds beside the weights.

        Raises
        ------
        ValueError
            The checkpoint follows from its size and no optimizer is given.
        """
        mtbf = self.mtbf_s(n_devices, nodes)
        if mtbf is None:
            return Goodput(value=None, source=self.source)
        if self.checkpoint_s is not None:
            checkpoint = self.checkpoint_s
        elif self.storage_bytes_per_s is not None and optimizer is not None:
            checkpoint = checkpoint_bytes(parameters, optimizer) / self.storage_bytes_per_s
        else:
            raise ValueError("storage_bytes_per_s needs the optimizer to give a checkpoint's size")
        interval = best_interval(checkpoint, mtbf) if self.interval_s is None else self.interval_s
        return Goodput(
            value=expected_goodput(interval, checkpoint, self.restart_s, mtbf),
            source=self.source,
            mtbf_s=mtbf,
            checkpoint_s=checkpoint,
            interval_s=interval,
            restart_s=self.restart_s,
        )
