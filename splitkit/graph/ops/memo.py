"""Cache the answers about the nodes of a graph."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn
from torch.fx import Node

from splitkit.graph.ops.module_effects import ModuleEffects
from splitkit.graph.ops.non_tensors import Origins
from splitkit.graph.ops.tuples import Known


@dataclass(frozen=True)
class Memo:
    """Cached answers, valid while the graphs do not change.

    Attributes:
        modules: module -> the effects of calling it, ``None`` if unknown.
        tuples: node -> whether it yields a tuple.
        origins: cached answers about the origins of values.
        single: node -> whether it surely yields a tensor or number: no container, iterator, array or object.
    """

    modules: dict[nn.Module, ModuleEffects | None] = field(default_factory=dict)
    tuples: Known = field(default_factory=dict)
    origins: Origins = field(default_factory=Origins)
    single: dict[Node, bool] = field(default_factory=dict)
