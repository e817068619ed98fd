"""Says what a rank that generates is doing, for the messages about ranks that fail."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass
class ServingProgress:
    """What a rank is doing.

    Attributes:
        rank: this rank, which runs the stage of the same number.
        size: the number of ranks.
        ranks: rank -> its rank in the default process group.
        device: the device of this rank.
        limit: the seconds after which the process group gives up a message.
        request: the request that it runs, or ran last; ``None`` before the first.
        running: whether it runs a request, and does not wait for one.
        failed: whether this rank has failed.
        watch: ends the watch of the last call, which goes on until the device has done what was queued.
    """

    rank: int
    size: int
    ranks: Sequence[int]
    device: torch.device
    limit: float
    request: int | None = None
    running: bool = False
    failed: bool = False
    watch: threading.Event = field(default_factory=threading.Event)

    def begin(self) -> None:
        """Forget what was done before."""
        self.request, self.running = None, False

    def state(self) -> object:
        """Return the request that it runs or ran last, and whether it runs."""
        return self.request, self.running

    def where(self) -> str:
        """Say what is or was done last."""
        return "generation" if self.request is None else f"request {self.request}, in stage {self.rank}"

    def waits(self) -> str:
        """Say what this rank waits for."""
        before, last = (self.rank - 1) % self.size, "" if self.request is None else f", after request {self.request}"
        if self.running:
            return f"ran {self.where()}"
        what = "a request from" if self.rank else "the next token from"
        return f"waited for {what} stage {before} (rank {before}){last}"

    def waited_for(self) -> int | None:
        """Return the rank that this one waits for."""
        return None if self.running or self.size == 1 else (self.rank - 1) % self.size
