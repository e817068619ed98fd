"""Divides the bytes of a stage or a rank into weights, gradients, optimizer, cache and activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from splitkit.pipeline.memory import RankMemory
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.units import in_words, size


@dataclass(frozen=True)
class ByteBreakdown:
    """The bytes that something holds at its peak, by kind.

    Attributes:
        weights: bytes of parameters and buffers.
        gradients: bytes of the gradients of parameters.
        optimizer: bytes of the optimizer's state.
        cache: bytes of keys and values of earlier tokens, which generation keeps.
        activations: bytes of everything else: what autograd saved, messages, and temporaries.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    cache: int = 0
    activations: int = 0

    @classmethod
    def of_stage(cls, stage: StageCosts, *, in_flight: int = 1, cache: int = 0) -> ByteBreakdown:
        """Return the bytes of a stage.

        Args:
            stage: its costs.
            in_flight: the microbatches whose saved values it holds.
            cache: the bytes of its cache, which `StageCosts` does not know.
        """
        activations = in_flight * stage.saved_bytes + stage.temporary_bytes
        return cls(stage.parameter_bytes, stage.gradient_bytes, stage.optimizer_bytes, cache, activations)

    @classmethod
    def of_rank(cls, rank: RankMemory) -> ByteBreakdown:
        """Return the bytes of a rank at the peak of a simulated step."""
        activations = rank.saved + rank.messages + rank.temporaries
        return cls(rank.parameters, rank.gradients, rank.optimizer, 0, activations)

    @classmethod
    def of_visits(cls, stages: Sequence[StageCosts], cache: int = 0) -> ByteBreakdown:
        """Return the bytes of a device that runs these stages and keeps a cache: all that they hold, and the most that
        one of them takes at a time.
        """
        each = [cls.of_stage(stage) for stage in stages]
        held = {kind: sum(dict(one.kinds)[kind] for one in each) for kind in ("weights", "gradients", "optimizer")}
        activations = sum(stage.saved_bytes for stage in stages)
        temporary = max((stage.temporary_bytes for stage in stages), default=0)
        return cls(**held, cache=cache, activations=activations + temporary)

    @property
    def total(self) -> int:
        """The sum of all kinds."""
        return sum(nbytes for _, nbytes in self.kinds)

    @property
    def kinds(self) -> Sequence[tuple[str, int]]:
        """The name and the bytes of every kind, also of those that are 0."""
        return [(field.name, getattr(self, field.name)) for field in fields(self)]

    def to_dict(self) -> dict[str, int]:
        """Return the bytes as plain data, with the sum as ``total``."""
        return {**asdict(self), "total": self.total}

    @property
    def told(self) -> str:
        """Return the total and its kinds: ``13.50 GiB (12.00 GiB of weights and 1.50 GiB of activations)``."""
        return f"{size(self.total)} ({self})"

    def __str__(self) -> str:
        """Return ``12.00 GiB of weights and 1.50 GiB of activations``: the kinds that are not 0."""
        told = [f"{size(nbytes)} of {name}" for name, nbytes in self.kinds if nbytes]
        return in_words(told) or "nothing"
