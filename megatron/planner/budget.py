"""Money, energy and failures of a training run."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Failures:
    """Failures of a run and what they cost. Times are in seconds.

    Attributes:
        between: mean time between failures of the run: that of one device over the number of devices.
        checkpoint: time for which a checkpoint stops training.
        restart: time from a failure until training goes on from the last checkpoint.
    """

    between: float
    checkpoint: float
    restart: float

    @property
    def best_interval(self) -> float:
        """Time between checkpoints that loses the least (Young 1974, doi 10.1145/361147.361115, equation 6)."""
        return math.sqrt(2 * self.checkpoint * self.between)

    def goodput(self, interval: float) -> float:
        """Share of the time in which training progresses, with so much time between checkpoints.

        A checkpoint costs its time; a failure costs half an interval, which is trained again, and the restart. Failures
        during these are left out, so the share is right where it is large.
        """
        checkpoints = self.checkpoint / (interval + self.checkpoint)
        failures = (interval / 2 + self.restart) / self.between
        return max(0.0, (1 - checkpoints) * (1 - failures))

    def advice(self, step: float) -> str:
        """The best interval between checkpoints and what it leaves for training, with steps of so many seconds."""
        steps = max(1, round(self.best_interval / step))
        between = f"a failure every {two_digits(self.between / 3600)} hours"
        if not (goodput := self.goodput(steps * step)):
            return f"{between}, too soon after a restart for training to make progress"
        number = many(steps, "step") if steps < 100 else f"{two_digits(steps)} steps"
        return (
            f"{between}; a checkpoint every {two_digits(steps * step / 60)} minutes ({number}) loses the least and "
            f"leaves {goodput:.0%} of the time for training"
        )


def two_digits(value: float) -> str:
    """A positive number with two significant digits: predictions are not known better."""
    return (
        f"{value:,.{max(0, 1 - math.floor(math.log10(value)))}f}"
        if value < 100
        else f"{float(f'{value:.2g}'):,.0f}"
    )


def many(count: int, one: str, more: str | None = None) -> str:
    """A number of things, in the singular or the plural."""
    return f"{count:,} {one if count == 1 else more or one + 's'}"


def percent(share: float) -> str:
    """A share of at least 0 in percent, with at most two significant digits."""
    return f"{100 * share:.0f}%" if share >= 0.0995 else f"{100 * share:.1f}%"


def expenses(device_hours: float, price: float | None, watts: float | None) -> str:
    """Money at a price for an hour of a device, and energy at a power of a device, with what is known of them."""
    parts = []
    if price is not None:
        parts.append(f"${two_digits(device_hours * price)} at ${price:g} for a GPU-hour")
    if watts is not None:
        parts.append(f"{two_digits(device_hours * watts / 1e6)} MWh at {watts:g} W a GPU")
    return ", ".join(parts)
