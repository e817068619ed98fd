"""What `simulate_memory` is given: is it a graph, and do the options make sense?"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import fx
from torch.fx import Node

from splitkit._torch import MKLDNN, pytree
from splitkit.checks import is_whole
from splitkit.errors import GraphError
from splitkit.graph.dataflow import require_graph
from splitkit.graph.symbols import concrete, symbols_of, value_of
from splitkit.units import read_size


@runtime_checkable
class SplitLike(Protocol):
    """What `simulate_memory` reads of a `splitkit.Split`."""

    @property
    def module(self) -> fx.GraphModule:
        """The parent."""

    @property
    def parts(self) -> Mapping[Hashable, fx.GraphModule]:
        """Its parts."""


def check(graph: object, backward: object, user_outputs: object, sizes: Mapping[str, object]) -> None:
    """Refuse what is no graph, and options that make no sense."""
    is_split = not isinstance(graph, fx.GraphModule) and isinstance(graph, SplitLike)
    if graph is None:
        require_graph(graph, "a torch.fx.GraphModule or a Split")
    for given in (graph.module if isinstance(graph, SplitLike) and is_split else graph, backward):
        if given is not None:
            require_graph(given, "a torch.fx.GraphModule or a Split")
    if is_split and backward is not None:
        raise unfit("a Split is no forward graph of a pair", "Take the graphs of splitkit.capture_joint(...).split.")
    gm = graph.module if is_split and isinstance(graph, SplitLike) else graph
    known_symbols = _symbols(gm, backward) if sizes else set()
    for name, bound in sizes.items():
        if name not in known_symbols:
            raise unfit(f"sizes names {name!r}, which the graph has not", f"It has {', '.join(sorted(known_symbols))}.")
        if not is_whole(bound):
            raise unfit(f"sizes[{name!r}] is {bound!r}", "Give a whole number, 0 or more.")
    if user_outputs is not None and backward is None:
        raise unfit("user_outputs goes with a backward graph", "Leave it out.")
    if isinstance(graph, fx.GraphModule) and user_outputs is not None:
        known = len(leaves_returned(graph))
        if not is_whole(user_outputs) or user_outputs > known:
            raise unfit(f"user_outputs is {user_outputs!r}", f"forward has {known} outputs.")


def bytes_of_block(block: object) -> int:
    """The bytes of an allocator's block: a whole number, or a text such as ``"2MiB"``."""
    known = read_size(block) if isinstance(block, str) else block
    if not is_whole(known, 1):
        raise unfit(f"block is {block!r:.200}", 'Give bytes, 1 or more: a whole number such as CUDA_BLOCK, or "2MiB".')
    return int(known)


def _symbols(*graphs: object) -> set[str]:
    nodes = (node for gm in graphs if isinstance(gm, fx.GraphModule) for node in gm.graph.nodes)
    values = (leaf for node in nodes for leaf in pytree.tree_leaves(value_of(node)))
    return {str(symbol) for value in values for symbol in symbols_of(value)}


def leaves_returned(gm: fx.GraphModule) -> list[object]:
    """What a graph returns, in order: nodes, and ``None`` and other constants."""
    leaves: list[object] = pytree.tree_leaves(gm.graph.output_node().args)
    return leaves


def unfit(reason: str, remedy: str) -> GraphError:
    """SK110."""
    return GraphError("SK110", reason, remedy)


def checked(workspace: Callable[[Node], int] | None) -> Callable[[Node], int]:
    """The same function, which refuses what is no number of bytes."""
    if workspace is None:
        return lambda node: 0
    if not callable(workspace):
        raise unfit(f"workspace is {workspace!r}", "Give a function from a node to bytes.")

    def known(node: Node) -> int:
        nbytes = workspace(node)
        if not is_whole(nbytes):
            raise unfit(f"workspace gives {nbytes!r} for {node.name}", "Give bytes, 0 or more.")
        return nbytes

    return known


def known_bytes(name: str, nbytes: int | torch.SymInt, sizes: Mapping[str, int]) -> int:
    """A plain number of bytes.

    Raises:
        GraphError: SK108 if only the data decides it, and nobody has said how many there are at most.
    """
    try:
        return concrete(nbytes, sizes)
    except LookupError as error:
        symbol = error.args[0]
        raise GraphError(
            "SK108",
            f"{name} has {nbytes} bytes, and only the data decides {', '.join(error.args)}",
            f"State an upper bound in the model, torch._check(n <= 1024) for the n that is {symbol}, and capture "
            f"again; simulate_memory also takes sizes={{{symbol!r}: 1024}}.",
            [name],
        ) from error


def refuse_sparse(node: Node, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose elements that are there are not known.

    Raises:
        GraphError: SK108.
    """
    if tensor.layout not in (torch.strided, MKLDNN):
        raise GraphError(
            "SK108",
            f"{node.name} is sparse ({tensor.layout}): only the data decides how many bytes it has",
            "Make it dense, or measure a run with splitkit.measure_memory.",
            [node],
        )
