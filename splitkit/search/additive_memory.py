"""An additive lower bound on the memory of a device: bytes per unit whose sum never exceeds the true peak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
from torch.fx import Node

from splitkit.graph.node_values import storage_bytes, tensor_bytes
from splitkit.graph.storages import start_of, storage_key
from splitkit.memory.saved_storages import Activations
from splitkit.pipeline.stage_prices import STATE_OF
from splitkit.prices import Optimizer
from splitkit.solvers.placement.problem import Ints

if TYPE_CHECKING:
    from splitkit.search.placement_model import PlacementModel


@dataclass(frozen=True, eq=False)
class AdditiveMemory:
    """Bytes of each unit. What several units share is counted for the first of them only, so that no part holds less
    than the sum of its units: a placement that these sums exclude cannot fit.

    Attributes:
        fixed: (n,) parameters and buffers, with their gradients and optimizer state, and the cache.
        saved: (n,) bytes kept for backward, per microbatch in flight.
    """

    fixed: Ints
    saved: Ints

    @classmethod
    def of(
        cls,
        placing: PlacementModel,
        kept: Activations | None,
        optimizer: Optimizer,
        cache: Mapping[Node, int] = MappingProxyType({}),
    ) -> AdditiveMemory:
        """Compute the bytes of the units of a placement problem; ``kept`` and ``optimizer`` are None for inference.

        ``cache`` says how many bytes of keys and values nodes keep.
        """
        fixed, saved = placing.sums(cache), np.zeros(len(placing.units), np.int64)
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
        """Return (stages, n) bytes of each unit in each stage, given the microbatches in flight from first to last."""
        held: Ints = self.fixed + np.array(in_flight, np.int64)[:, None] * self.saved
        return held
