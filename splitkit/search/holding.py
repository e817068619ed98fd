"""What each unit adds to the memory of its device, as a sum that is never above the truth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from splitkit.graph.sizes import storage_bytes, tensor_bytes
from splitkit.graph.storages import start_of, storage_key
from splitkit.memory.autograd import Activations
from splitkit.pipeline.stageprices import STATE_OF, Optimizer
from splitkit.solvers.placement.problem import Ints

if TYPE_CHECKING:
    from splitkit.search.placing import Placing


@dataclass(frozen=True, eq=False)
class Holding:
    """Bytes by unit. What several units share counts for the first of them, so that no part holds less than the sum
    of its units, wherever they are: a placement that these sums exclude does not fit.

    Attributes:
        fixed: (n,) parameters and buffers, with gradients and the optimizer's state.
        saved: (n,) kept for backward of each microbatch in flight.
    """

    fixed: Ints
    saved: Ints

    @classmethod
    def of(cls, placing: Placing, kept: Activations | None, optimizer: Optimizer) -> Holding:
        """Of the units of a placement problem; ``kept`` and ``optimizer`` are None where nothing is trained."""
        fixed, saved = np.zeros(len(placing.units), np.int64), np.zeros(len(placing.units), np.int64)
        seen: set[object] = set()
        for node, unit in placing.index.items():
            for tensor in placing.flow.owned(node):
                if (key := storage_key(tensor)) not in seen:
                    fixed[unit] += storage_bytes(tensor)
                if optimizer is not None and tensor.requires_grad and (start := start_of(tensor)) not in seen:
                    fixed[unit] += tensor_bytes(tensor) * (1 + STATE_OF[optimizer])
                    seen.add(start)
                seen.add(key)
        if kept is None or optimizer is None:
            return cls(fixed, saved)
        counted: set[int] = set()
        for node, storages in kept.saved.items():
            if (saver := placing.index.get(placing.flow.producer(node))) is not None:
                saved[saver] += sum(kept.nbytes[s] for s in storages if s not in counted)
                counted.update(storages)
        return cls(fixed, saved)

    def in_stages(self, in_flight: tuple[int, ...]) -> Ints:
        """(stages, n) bytes of the units in each stage, from first to last, with so many microbatches in flight."""
        held: Ints = self.fixed + np.array(in_flight, np.int64)[:, None] * self.saved
        return held
