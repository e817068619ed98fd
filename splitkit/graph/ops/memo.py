"""What questions about the nodes of a graph have found out, so that no answer is looked for twice."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn
from torch.fx import Node

from splitkit.graph.ops.foreign import Origins
from splitkit.graph.ops.modules import ModuleEffects
from splitkit.graph.ops.tuples import Known


@dataclass(frozen=True)
class Memo:
    """Answers about graphs that do not change in the meantime.

    Attributes:
        modules: module -> what calling it does, ``None`` if that is not known.
        tuples: node -> whether it yields a tuple.
        origins: where values come from.
        single: node -> whether it is sure to yield a tensor or a number: no container, iterator, array or object.
    """

    modules: dict[nn.Module, ModuleEffects | None] = field(default_factory=dict)
    tuples: Known = field(default_factory=dict)
    origins: Origins = field(default_factory=Origins)
    single: dict[Node, bool] = field(default_factory=dict)
