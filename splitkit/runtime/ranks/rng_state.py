"""Hands the RNG state from stage to stage, so that random numbers do not depend on the number of stages.

Each microbatch begins with a seed of its own. If several stages draw random numbers, the RNG state travels with the
microbatch from the first of them to the last::

    seed ─▶ stage 0 (dropout) ──state──▶ stage 1 ──state──▶ stage 2 (dropout)

so that a microbatch sees the numbers that the unsplit model draws after ``torch.manual_seed(seed)``. On accelerators a
pipeline hands it over between the hosts (`splitkit.runtime.ranks.rng_channel`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from splitkit.runtime.devices.accelerators import DeviceRng
from splitkit.runtime.ranks.rng_channel import RngChannel
from splitkit.runtime.ranks.stage_chain import Chain


def microbatch_seed(seed: int, step: int, microbatches: int, microbatch: int) -> int:
    """Return the seed of a microbatch of a step. It does not depend on the number of stages."""
    return (seed * 1_000_003 + step * microbatches + microbatch) % 2**63


class RngHandover:
    """The RNG hand-over of one stage.

    Attributes:
        draws: whether the stage draws random numbers.
        receives: whether the RNG state comes from the previous stage, among the values that cross the border.
        sends: whether the RNG state goes to the next stage, among the values that cross the border.
        like: a tensor on ``meta`` like an RNG state.
    """

    def __init__(
        self,
        stage: int,
        draws: bool,
        receives: bool,
        sends: bool,
        device: torch.device,
        channel: RngChannel | None = None,
    ) -> None:
        self.draws, self._device, self._stage, self._channel = draws, device, stage, channel
        self.receives, self.sends = receives and channel is None, sends and channel is None
        self._rng = DeviceRng(device)
        self._before: torch.Tensor | None = None
        self._passed: torch.Tensor | None = None
        self.like = torch.empty_like(self._rng.state(), device="meta")

    @classmethod
    def of(cls, chain: Chain, stage: int, device: torch.device, channel: RngChannel | None) -> RngHandover:
        """Return the RNG hand-over of one stage.

        Args:
            chain: all stages.
            stage: the stage.
            device: its device.
            channel: hands the state over between hosts; ``None`` to send it with the values of the border.
        """
        who = [s for s, draws in enumerate(chain.facts.draws) if draws]
        first, last = (min(who), max(who)) if who else (0, 0)
        return cls(stage, stage in who, first < stage <= last, first <= stage < last, device, channel)

    def begin(self, received: Sequence[torch.Tensor], seed: int, microbatch: int) -> Sequence[torch.Tensor]:
        """Set the RNG state for a microbatch, and return the received values without the state.

        Args:
            received: the values that crossed the border.
            seed: the seed of the microbatch.
            microbatch: its number in the step.
        """
        state, rest = (received[0], received[1:]) if self.receives else (None, received)
        if self._channel is not None and self._channel.receives(self._stage):
            state = self._channel.receive(self._stage, microbatch, self.like)
        self._passed = state
        if self.draws:
            self._before = self._rng.state()
            if state is None:
                self._rng.seed(seed)
            else:
                self._rng.set_state(state)
        return rest

    def end(self, microbatch: int) -> tuple[torch.Tensor, ...]:
        """Restore the caller's RNG state, and return the state to send to the next stage with other values, if any."""
        if self._before is not None:
            self._passed = self._rng.state()
            self._rng.set_state(self._before)
            self._before = None
            if self._channel is not None:
                self._channel.send(self._stage, microbatch, self._passed)
        passed, self._passed = self._passed, None
        return (passed.to(self._device),) if self.sends and passed is not None else ()
