"""The answer whether a model fits: a row for each device, the most tokens, and what would fit instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from splitkit.short_repr import brief
from splitkit.solvers.most_fitting import MOST_TOKENS
from splitkit.studies.fit.cards import Card
from splitkit.studies.fit.layout import HeldBytes
from splitkit.units import size
from splitkit.view.console.tables import table
from splitkit.view.data.short_paths import joined_layers

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class FittedDevice:
    """One device and what it holds.

    Attributes:
        card: the device.
        names: the paths of the modules that it runs.
        held: the bytes.
        in_flight: in training, the most microbatches whose saved values it holds.
        saved: in training, the bytes that each of them saves for backward.
        budget: in training, the bytes that each of them could save within the limit, beside all else.
    """

    card: Card
    names: tuple[str, ...]
    held: HeldBytes
    in_flight: int = 0
    saved: int = 0
    budget: int = 0

    @property
    def fits(self) -> bool:
        """Whether all of it is within the limit."""
        return self.held.total <= self.card.limit

    def to_dict(self) -> dict[str, Any]:
        """Return the device as plain data, in bytes."""
        training = {"in_flight": self.in_flight, "saved": self.saved, "budget": self.budget} if self.in_flight else {}
        return {
            "name": self.card.name,
            "memory": self.card.memory,
            "limit": self.card.limit,
            **asdict(self.held),
            "total": self.held.total,
            "fits": self.fits,
            "modules": ", ".join(joined_layers(self.names)),
            **training,
        }


@dataclass(frozen=True)
class Alternative:
    """A change with which the model fits, planned again with it.

    Attributes:
        change: what changes: ``"devices"``, ``"tokens"``, ``"dtype"``, ``"recompute"`` ...
        value: the new value, such as a number of devices or tokens, or bytes.
        text: the change in words, with its number.
        fullest: the bytes on the device that is the fullest relative to its limit.
    """

    change: str
    value: int | str
    text: str
    fullest: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


@dataclass(frozen=True, eq=False)
class Fit:
    """Whether a model fits devices, and how.

    Attributes:
        model: the model as the user named it.
        purpose: ``"inference"``, or ``"training with adamw"``.
        fits: whether it fits with the tokens and requests that were asked for.
        wanted: the tokens of each request, or of each sequence of a microbatch; ``None`` for a model with inputs of
            its own.
        tokens: the most that fit, with the best cuts between blocks; ``None`` for a model with inputs of its own.
        context: the most tokens that the model is made for, if its configuration says so.
        requests: the requests at once, or the sequences of a microbatch.
        devices: what each device runs and holds.
        alternatives: changes with which it fits, if it does not.
        next: the next command; empty if nothing fits, or the model was given as an object.
    """

    model: str
    purpose: str
    fits: bool
    wanted: int | None
    tokens: int | None
    context: int | None
    requests: int
    devices: Sequence[FittedDevice]
    alternatives: Sequence[Alternative]
    next: str

    __repr__ = brief

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; all sizes are bytes."""
        return {
            "model": self.model,
            "purpose": self.purpose,
            "fits": self.fits,
            "wanted": self.wanted,
            "tokens": self.tokens,
            "context": self.context,
            "requests": self.requests,
            "devices": [device.to_dict() for device in self.devices],
            "alternatives": [alternative.to_dict() for alternative in self.alternatives],
            "next": self.next or None,
        }

    def table(self) -> Table:
        """Return a row for each device, for `rich`."""
        training = any(device.held.gradients for device in self.devices)
        kinds = (
            ("weights", "gradients", "optimizer", "activations") if training else ("weights", "cache", "activations")
        )
        titles = ("", "device", *kinds, "total", "limit", "fits", "modules")
        rows = [self._cells(number, kinds) for number in range(len(self.devices))]
        return table(titles, rows, (*kinds, "total", "limit"))

    def _cells(self, number: int, kinds: Sequence[str]) -> tuple[str, ...]:
        device = self.devices[number]
        sizes = [size(getattr(device.held, kind)) for kind in kinds]
        fits = "yes" if device.fits else f"{size(device.held.total - device.card.limit)} too much"
        names = ", ".join(joined_layers(device.names)) or "nothing"
        return str(number), device.card.name, *sizes, size(device.held.total), size(device.card.limit), fits, names

    def lines(self) -> list[str]:
        """Return the verdict, and what would fit, as lines of text."""
        verdict = f"{self.model} {'fits' if self.fits else 'does not fit'}: {self.purpose}{self._amount()}"
        instead = ["it would fit with", *(f"  {one.text}" for one in self.alternatives)] if self.alternatives else []
        return [verdict, *self._most(), *([] if self.fits else instead)]

    def _amount(self) -> str:
        if self.wanted is None:
            return ", with the inputs of its factory"
        return f" of {self.requests} x {self.wanted:,} tokens"

    def _most(self) -> list[str]:
        """Say how many tokens fit at most."""
        if not self.tokens:
            return [] if self.tokens is None else ["not even 1 token fits"]
        least = "at least " if self.tokens == MOST_TOKENS else ""
        context = "" if self.context is None else f"; the model is made for {self.context:,}"
        return [f"the most that fit: {least}{self.requests} x {self.tokens:,} tokens{context}"]

    def __str__(self) -> str:
        from splitkit.view.console.console import to_text

        return "\n".join(
            [self.lines()[0], to_text(self.table()), *self.lines()[1:], *([self.next] if self.next else [])]
        )
