"""Holds the costs of a pipeline stage for one microbatch, in seconds and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from dataclasses import field as dataclass_field
from typing import TYPE_CHECKING, NamedTuple

from splitkit.checks import MOST, is_number, is_whole, shown
from splitkit.errors import ScheduleError

if TYPE_CHECKING:
    from splitkit.pipeline.order import StageCopies

MOST_SECONDS, MOST_BYTES = 1e100, 2**60
"""The largest figures of one stage: sums of many are still finite, and fit into 64-bit integers."""


class Exchange(NamedTuple):
    """A collective of a stage.

    Attributes:
        part: ``"F"`` for forward, ``"I"`` for the part of backward that gives the gradient of the input, else ``"W"``.
        start: seconds after the start of the part.
        seconds: how long it takes.
    """

    part: str
    start: float
    seconds: float


@dataclass(frozen=True)
class StageCosts:
    """The time and memory that one microbatch takes in one stage of a pipeline.

    Times are seconds, or any other measure that the links use too; ``unit`` says what to print then. Bytes are whole
    numbers.

    Attributes:
        forward: seconds of forward.
        backward_input: seconds of the part of backward that gives the gradient of the input; recompute belongs here.
        backward_weight: seconds of the part that gives the gradients of the parameters. Schedules that do not divide
            backward take the sum. If they do, torch runs all of the first stage's backward in this part.
        saved_bytes: held from the start of forward to the end of backward: the input, the output, and what autograd
            saved, parameters left out.
        deferred_bytes: held from the end of the input part to the end of the weight part: the rest of the saved bytes,
            and the gradients that the input part captures, which are held from its start; ``None``: ``saved_bytes``.
            With torch's division, 1.1 to 1.7 times the saved bytes; with separate graphs it is at most about
            those (`splitkit.pipeline.stage_prices`).
        activation_bytes: bytes of the message to the next stage.
        input_gradient_bytes: bytes of the message to the previous stage; ``None``: as many as the received activation.
        temporary_bytes: upper bound on additional bytes while the stage computes, but for what kernels take besides
            their results. The gradient that comes counts here, as a part alone needs it, and in a simulated step among
            the messages, too: 0.4 to 3.5 % of the peak of a rank that receives one, for six models.
        parameter_bytes: bytes of the parameters and buffers.
        gradient_bytes: bytes of the gradients of the parameters.
        optimizer_bytes: bytes of the optimizer's state.
        unit: the measure of the times: ``"s"``, or that of nominal prices.
        replicas: the number of devices that run the stage, each on an equal share of every microbatch. The other fields
            are those of one replica (`splitkit.pipeline.memory`), except messages, which are of all
            together.
        copies: what of ``saved_bytes`` waits on the host, and how long its copies take; ``None`` for nothing.
        collectives: when the ranks that share the stage exchange tensors, to be drawn; its times include them.

    Raises:
        ScheduleError: SK332 if one is negative or not a number; names the field.
    """

    forward: float
    backward_input: float
    backward_weight: float = 0.0
    saved_bytes: int = 0
    deferred_bytes: int | None = None
    activation_bytes: int = 0
    input_gradient_bytes: int | None = None
    temporary_bytes: int = 0
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    unit: str = "s"
    replicas: int = 1
    copies: StageCopies | None = None
    collectives: tuple[Exchange, ...] = dataclass_field(default=(), compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.unit, str):
            raise ScheduleError("SK332", f"unit is {shown(self.unit)}", 'Give a text: "s", "nodes".')
        if not is_whole(self.replicas, 1) or int(self.replicas) > MOST:
            raise ScheduleError("SK332", f"replicas is {shown(self.replicas)}", "Give a whole number, 1 or more.")
        for field in fields(self):
            value, whole = getattr(self, field.name), field.name.endswith("_bytes")
            is_figure = whole or field.name in ("forward", "backward_input", "backward_weight")
            if not is_figure or (value is None and field.default is None):
                continue
            fits, most = (is_whole, MOST_BYTES) if whole else (is_number, MOST_SECONDS)
            if not fits(value) or (int(value) if whole else float(value)) > most:
                what = "a whole number of bytes" if whole else "seconds"
                remedy = f"Give {what}, 0 or more, {most:.0e} at most."
                raise ScheduleError("SK332", f"{field.name} is {shown(value)}", remedy)
        if self.copies is not None:
            _require_copies(self.copies, self.saved_bytes)

    @property
    def fixed_bytes(self) -> int:
        """Bytes held throughout the step: parameters, their gradients and the optimizer's state."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def backward(self) -> float:
        """Seconds of both parts of backward."""
        return self.backward_input + self.backward_weight

    def exchanges(self, kind: str) -> list[tuple[float, float]]:
        """Return the seconds from the start of an action at which each collective of it starts and ends.

        Args:
            kind: the action: ``"F"``, ``"B"`` for both parts of backward, ``"I"`` or ``"W"``.
        """
        begins = {"I": 0.0, "W": self.backward_input} if kind == "B" else {kind: 0.0}
        found = ((begins[e.part] + e.start, e.seconds) for e in self.collectives if e.part in begins)
        return [(start, start + seconds) for start, seconds in found]


def _require_copies(value: object, saved: int) -> None:
    from splitkit.pipeline.order import StageCopies

    if not isinstance(value, StageCopies):
        raise ScheduleError("SK332", f"copies is {shown(value)}", "Give StageCopies or None.")
    if value.nbytes > saved:
        raise ScheduleError(
            "SK332", f"{value.nbytes} bytes go to the host, but only {saved} are saved", "Give at most that many."
        )


def require_stages(stages: object) -> None:
    """Refuse what is no list of the costs of at least one stage (SK330)."""
    if not isinstance(stages, Sequence) or not stages or not all(isinstance(stage, StageCosts) for stage in stages):
        remedy = "Give a StageCosts for each stage, and at least one."
        raise ScheduleError("SK330", f"stages are {shown(stages)}", remedy)


def bytes_back(stages: Sequence[StageCosts], stage: int) -> int:
    """Return the bytes of gradients that a stage sends to the previous one; 0 for the first stage."""
    own = stages[stage].input_gradient_bytes
    return own if own is not None else stages[stage - 1].activation_bytes if stage else 0
