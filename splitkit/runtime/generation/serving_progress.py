"""Says what a rank that generates is doing, for the messages about ranks that fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class ServingProgress:
    """What a rank is doing.

    Attributes:
        rank: this rank, which runs the stage of the same number.
        size: the number of ranks.
        ranks: rank -> its rank in the default process group.
        request: the request that it runs, or ran last; ``None`` before the first.
        running: whether it runs a request, and does not wait for one.
    """

    rank: int
    size: int
    ranks: Sequence[int]
    request: int | None = None
    running: bool = False

    def begin(self) -> None:
        """Forget what was done before."""
        self.request, self.running = None, False

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
