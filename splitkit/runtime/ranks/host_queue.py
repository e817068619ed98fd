"""Moves the offloaded values of a rank's stages to the host and back between the actions of a schedule.

`splitkit.pipeline.host_windows` says at the end of which action a value is released, and at the start of which it is
asked for, so the device holds what the simulation says.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from splitkit.engine.joint_stages.host_values import HostValue
from splitkit.pipeline.action import Action
from splitkit.pipeline.host_windows import host_windows

_Key = tuple[int, int]
"""A stage and a microbatch."""


@dataclass
class HostQueue:
    """The values of one rank.

    Attributes:
        row: the actions of the rank in a step.
        moving: the stages that offload.
        host_most: the most bytes that were on the host at once in this step.
        device_most: the most bytes of offloaded values that were on the device at once: made, leaving, or coming back.
    """

    row: Sequence[Action]
    moving: Collection[int]
    host_most: int = 0
    device_most: int = 0
    _values: dict[_Key, list[HostValue]] = field(default_factory=dict)
    _number: dict[Action, int] = field(default_factory=dict)
    _released: dict[int, list[_Key]] = field(default_factory=dict)
    _asked: dict[int, list[_Key]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.moving:
            return
        self._number = {action: number for number, action in enumerate(self.row)}
        for key, window in host_windows(self.row).items():
            if key[0] in self.moving:
                self._released.setdefault(window.released, []).append(key)
                self._asked.setdefault(window.asked, []).append(key)

    def clear(self) -> None:
        """Forget what a step has left behind."""
        self._values.clear()
        self.host_most = self.device_most = 0

    def begin(self, stage: int, kinds: str, microbatch: int) -> None:
        """Ask for what comes back while an action runs.

        Args:
            stage: the stage of the action.
            kinds: its kind; for a backward ``"BI"``, whichever the schedule has.
            microbatch: its microbatch.
        """
        number = self._of(stage, kinds, microbatch)
        for key in self._asked.get(number, ()) if number is not None else ():
            for value in self._values.get(key, ()):
                value.ask()
        self._note()

    def end(self, stage: int, kinds: str, microbatch: int) -> None:
        """Wait for what left until the end of an action, and free its memory; arguments as in `begin`."""
        self._note()
        number = self._of(stage, kinds, microbatch)
        for key in self._released.get(number, ()) if number is not None else ():
            for value in self._values.get(key, ()):
                value.release()

    def add(self, stage: int, microbatch: int, values: list[HostValue]) -> None:
        """Take the values of a microbatch whose forward has run."""
        if values:
            self._values[stage, microbatch] = values

    def back(self, stage: int, microbatch: int) -> None:
        """Make sure that the values of a microbatch are on their way back: backward is about to run."""
        for value in self._values.get((stage, microbatch), ()):
            if value.copy is None:
                value.release()
                value.ask()

    def done(self, stage: int, microbatch: int) -> None:
        """Forget the values of a microbatch whose backward, or input part, has run."""
        for value in self._values.pop((stage, microbatch), ()):
            value.wait()  # what only the weight graph reads

    def _of(self, stage: int, kinds: str, microbatch: int) -> int | None:
        found = (self._number.get(Action(stage, kind, microbatch)) for kind in kinds)
        return next((number for number in found if number is not None), None)

    def _note(self) -> None:
        values = [value for each in self._values.values() for value in each]
        self.host_most = max(self.host_most, sum(value.host.nbytes for value in values))
        here = sum(value.host.nbytes for value in values if value.source is not None or value.copy is not None)
        self.device_most = max(self.device_most, here)
