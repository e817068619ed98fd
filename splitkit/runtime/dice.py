"""Random numbers that do not depend on how many stages there are.

Each microbatch begins with a seed of its own; where several stages draw, the state of the generator goes with it from
the first of them to the last::

    seed ─▶ stage 0 (dropout) ──state──▶ stage 1 ──state──▶ stage 2 (dropout)

so that a microbatch sees the numbers that the unsplit model draws after ``torch.manual_seed(seed)``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from splitkit.runtime.chain import Chain


class Dice:
    """The generator of one stage.

    Attributes:
        draws: whether the stage draws random numbers.
        takes: whether its state comes from the stage before.
        gives: whether it goes to the stage behind.
        like: what a state looks like, on ``meta``.
    """

    def __init__(self, rolls: bool, takes: bool, gives: bool, device: torch.device) -> None:
        self.draws, self.takes, self.gives, self._device = rolls, takes, gives, device
        self._before: torch.Tensor | None = None
        self._passed: torch.Tensor | None = None
        self.like = torch.empty_like(self._get(), device="meta")

    @classmethod
    def of(cls, chain: Chain, stage: int, device: torch.device) -> Dice:
        """That of a stage of a chain."""
        who = [s for s, draws in enumerate(chain.facts.draws) if draws]
        first, last = (min(who), max(who)) if who else (0, 0)
        return cls(stage in who, first < stage <= last, first <= stage < last, device)

    def begin(self, received: Sequence[torch.Tensor], seed: int) -> Sequence[torch.Tensor]:
        """Set the generator for a microbatch; what was received besides its state."""
        state, rest = (received[0], received[1:]) if self.takes else (None, received)
        self._passed = state
        if self.draws:
            self._before = self._get()
            if state is None:
                self._seed(seed)
            else:
                self._set(state)
        return rest

    def end(self) -> tuple[torch.Tensor, ...]:
        """Give the generator back to the caller; the state for the stage behind."""
        if self._before is not None:
            self._passed = self._get()
            self._set(self._before)
            self._before = None
        passed, self._passed = self._passed, None
        return (passed.to(self._device),) if self.gives and passed is not None else ()

    def _get(self) -> torch.Tensor:
        return torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else torch.get_rng_state()

    def _set(self, state: torch.Tensor) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(state.cpu(), self._device)
        else:
            torch.set_rng_state(state.cpu())

    def _seed(self, seed: int) -> None:
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                torch.cuda.manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)
