"""What a run costs and draws, and the days that a budget of money or energy buys.

On a given cluster device-hours, cost and energy are all proportional to the days; the formulas
stand here once, and a budget is turned into days by dividing by what one day takes.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from perfmodel.frozen import Frozen
from perfmodel.sources import Source

SECONDS_PER_DAY = 86400.0
JOULES_PER_KWH = 3.6e6

Amount = Annotated[float, Field(gt=0.0, le=1e30, allow_inf_nan=False, strict=True)]


def gpu_hours(n_devices: int, days: float) -> float:
    """Return devices times hours [h]."""
    return 24.0 * days * n_devices


def cost(price_per_gpu_hour: float, n_devices: int, days: float) -> float:
    """Return what a run costs, in the currency of the price."""
    return price_per_gpu_hour * gpu_hours(n_devices, days)


def energy_j(watts_per_device: float, n_devices: int, days: float) -> float:
    """Return the energy of devices with a mean draw [J]."""
    return watts_per_device * n_devices * (SECONDS_PER_DAY * days)


class Budget(Frozen):
    """Money or energy in place of days.

    Attributes
    ----------
    cost : float, optional
        In any currency; or
    energy_kwh : float, optional
        energy [kWh]; one of the two.
    price_per_gpu_hour : float, optional
        In the currency of ``cost``, which needs it.
    watts_per_device : float, optional
        Mean draw of a device with its share of its machine [W], which ``energy_kwh`` needs; there
        is no default.
    pue : float
        Energy of the site over that of its machines, at least 1 [-]; 1, where the watts hold all,
        unless given.

    A price beside an energy, or watts beside a cost, are for the report. All rest on what the user
    says (ASSUMED).
    """

    cost: Amount | None = None
    price_per_gpu_hour: Amount | None = None
    energy_kwh: Amount | None = None
    watts_per_device: Amount | None = None
    pue: Annotated[float, Field(ge=1.0, le=100.0, allow_inf_nan=False, strict=True)] = 1.0

    @model_validator(mode="after")
    def _one_of_two(self) -> Budget:
        if (self.cost is None) == (self.energy_kwh is None):
            given = "neither" if self.cost is None else "both"
            raise ValueError(f"cost or energy_kwh must be given, one of them and not {given}")
        if self.cost is not None and self.price_per_gpu_hour is None:
            raise ValueError("cost needs price_per_gpu_hour, which has no default")
        if self.energy_kwh is not None and self.watts_per_device is None:
            raise ValueError(
                "energy_kwh needs watts_per_device, the mean draw of a device with its share of "
                "its machine, which has no default"
            )
        return self

    @property
    def set_by(self) -> Literal["cost", "energy"]:
        """Which of the two sets the days."""
        return "energy" if self.cost is None else "cost"

    @property
    def site_watts_per_device(self) -> float | None:
        """Mean draw of the site for each device [W]; None where it is not known."""
        return None if self.watts_per_device is None else self.watts_per_device * self.pue

    def days(self, n_devices: int) -> float:
        """Return the days that the budget buys on so many devices [day]."""
        if self.cost is not None and self.price_per_gpu_hour is not None:
            return self.cost / cost(self.price_per_gpu_hour, n_devices, 1.0)
        watts, energy = self.site_watts_per_device, self.energy_kwh
        assert watts is not None
        assert energy is not None
        return energy * JOULES_PER_KWH / energy_j(watts, n_devices, 1.0)

    def spend(self, n_devices: int, window_days: float, share: float) -> Spend:
        """Return what a run takes that trains for a share of the window."""
        days, watts = share * window_days, self.site_watts_per_device
        price = self.price_per_gpu_hour
        return Spend(
            set_by=self.set_by,
            window_days=window_days,
            days=days,
            gpu_hours=gpu_hours(n_devices, days),
            cost=None if price is None else cost(price, n_devices, days),
            energy_j=None if watts is None else energy_j(watts, n_devices, days),
            source=Source.ASSUMED,
        )


class Spend(Frozen):
    """What a run takes of a budget.

    Attributes
    ----------
    set_by : str
        What the budget is of: "cost" or "energy".
    window_days : float
        Days that the budget buys [day].
    days : float
        Days that the run takes of them [day]; fewer where a cap on tokens ends it.
    gpu_hours : float
        [h]
    cost, energy_j : float or None
        In the currency of the price; [J]. None where no price, or no draw, is known.
    source : Source
        What price and draw rest on.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    set_by: Literal["cost", "energy"]
    window_days: float
    days: float
    gpu_hours: float
    cost: float | None
    energy_j: float | None
    source: Source
