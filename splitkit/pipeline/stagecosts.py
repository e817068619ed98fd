"""What the stages of a pipeline cost: seconds and bytes, for one microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from splitkit.checks import MOST, is_number, is_whole, shown
from splitkit.errors import ScheduleError

MOST_SECONDS, MOST_BYTES = 1e100, 2**60
"""The highest figures of one stage: sums of many of them are still finite, and whole in 64 bits."""


@dataclass(frozen=True)
class StageCosts:
    """What one microbatch costs in one stage of a pipeline, and what the stage holds.

    Times are seconds and may be of any unit that the links use too; ``unit`` says what to print then. Bytes are whole
    numbers.

    Attributes:
        forward: seconds of forward.
        backward_input: seconds of the part of backward that gives the gradient of the input; recompute belongs here.
        backward_weight: seconds of the part that gives the gradients of the parameters. Schedules that do not tell the
            parts apart take the sum. Where they do, torch runs all of the first stage's backward in this part.
        saved_bytes: held from the start of forward to the end of backward: the input, the output, and what autograd
            saved, parameters left out.
        deferred_bytes: held after the input part, up to the end of the weight part: what is left of those, and the
            gradients that the input part captured, which are there from its start; ``None``: ``saved_bytes``. Torch's
            way takes 1.5 to 1.7 times as much as was saved (`splitkit.pipeline.weightpart`).
        activation_bytes: how large the message to the next stage is.
        input_gradient_bytes: of the message to the stage before; ``None``: as many as the activation that came.
        temporary_bytes: held besides while the stage computes, at most.
        parameter_bytes: what the parameters and buffers take.
        gradient_bytes: what the gradients of the parameters take.
        optimizer_bytes: what the state of the optimizer takes.
        unit: what the times count: ``"s"``, or that of nominal prices.
        replicas: devices that run the stage, each an equal share of every microbatch. All else is what one of them does
            and holds (`splitkit.pipeline.replication`), but messages, which are those of all together.

    Raises:
        ScheduleError: SK332 if one is negative or no number; names the field.
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

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            if field.name == "unit":
                if not isinstance(value, str):
                    raise ScheduleError("SK332", f"unit is {shown(value)}", 'Give a text: "s", "nodes".')
                continue
            if field.name == "replicas":
                if not is_whole(value, 1) or int(value) > MOST:
                    raise ScheduleError("SK332", f"replicas is {shown(value)}", "Give a whole number, 1 or more.")
                continue
            whole = field.name.endswith("_bytes")
            fits, most = (is_whole, MOST_BYTES) if whole else (is_number, MOST_SECONDS)
            if not fits(value) or (int(value) if whole else float(value)) > most:
                what = "a whole number of bytes" if whole else "seconds"
                remedy = f"Give {what}, 0 or more, {most:.0e} at most."
                raise ScheduleError("SK332", f"{field.name} is {shown(value)}", remedy)

    @property
    def fixed_bytes(self) -> int:
        """What is there throughout the step: parameters, their gradients and the state of the optimizer."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def backward(self) -> float:
        """Seconds of both parts of backward."""
        return self.backward_input + self.backward_weight


def bytes_on(stages: Sequence[StageCosts], stage: int) -> int:
    """How many bytes stage ``stage`` sends to the next one for a microbatch."""
    return stages[stage].activation_bytes


def bytes_back(stages: Sequence[StageCosts], stage: int) -> int:
    """How many bytes of gradients stage ``stage`` sends to the one before it; the first stage sends none."""
    own = stages[stage].input_gradient_bytes
    return own if own is not None else stages[stage - 1].activation_bytes if stage else 0
