"""Check the arguments of `simulate_memory`."""

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
from splitkit.graph.symbols import plain_size, symbols_of, value_of
from splitkit.units import read_size


@runtime_checkable
class SplitLike(Protocol):
    """The attributes of a `splitkit.Split` that `simulate_memory` reads."""

    @property
    def module(self) -> fx.GraphModule:
        """The parent graph."""

    @property
    def parts(self) -> Mapping[Hashable, fx.GraphModule]:
        """Key -> part."""


def check_options(graph: object, backward: object, user_outputs: object, sizes: Mapping[str, object]) -> None:
    """Refuse what is not a graph, and options that contradict the graph or each other."""
    is_split = not isinstance(graph, fx.GraphModule) and isinstance(graph, SplitLike)
    if graph is None:
        require_graph(graph, "a torch.fx.GraphModule or a Split")
    for given in (graph.module if isinstance(graph, SplitLike) and is_split else graph, backward):
        if given is not None:
            require_graph(given, "a torch.fx.GraphModule or a Split")
    if is_split and backward is not None:
        raise bad_option(
            "a Split is not the forward graph of a pair", "Take the graphs of splitkit.capture_joint(...).split."
        )
    gm = graph.module if is_split and isinstance(graph, SplitLike) else graph
    known_symbols = _symbols(gm, backward) if sizes else set()
    for name, bound in sizes.items():
        if name not in known_symbols:
            raise bad_option(
                f"sizes names {name!r}, which is not in the graph",
                f"Its symbols are {', '.join(sorted(known_symbols))}."
                if known_symbols
                else "Leave sizes out: its sizes are all known.",
            )
        if not is_whole(bound):
            raise bad_option(f"sizes[{name!r}] is {bound!r}", "Give a whole number, 0 or more.")
    if user_outputs is not None and backward is None:
        raise bad_option("user_outputs is given without a backward graph", "Leave it out, or give backward.")
    if isinstance(graph, fx.GraphModule) and user_outputs is not None:
        known = len(leaves_returned(graph))
        if not is_whole(user_outputs) or user_outputs > known:
            raise bad_option(f"user_outputs is {user_outputs!r}", f"forward has {known} outputs.")


def bytes_of_block(block: object) -> int:
    """Return the bytes of an allocator's block, given as a whole number or as text such as ``"2MiB"``."""
    known = read_size(block) if isinstance(block, str) else block
    if not is_whole(known, 1):
        remedy = 'Give bytes, 1 or more: a whole number such as splitkit.CUDA_BLOCK, or "2MiB".'
        raise bad_option(f"block is {block!r:.200}", remedy)
    return int(known)


def _symbols(*graphs: object) -> set[str]:
    nodes = (node for gm in graphs if isinstance(gm, fx.GraphModule) for node in gm.graph.nodes)
    values = (leaf for node in nodes for leaf in pytree.tree_leaves(value_of(node)))
    return {str(symbol) for value in values for symbol in symbols_of(value)}


def leaves_returned(gm: fx.GraphModule) -> list[object]:
    """Return the leaves of a graph's output in order: nodes, ``None`` and other constants."""
    leaves: list[object] = pytree.tree_leaves(gm.graph.output_node().args)
    return leaves


def bad_option(reason: str, remedy: str) -> GraphError:
    """Return an SK110 error."""
    return GraphError("SK110", reason, remedy)


def checked_workspace(workspace: Callable[[Node], int] | None) -> Callable[[Node], int]:
    """Wrap ``workspace`` so that it refuses results that are not a number of bytes."""
    if workspace is None:
        return lambda node: 0
    if not callable(workspace):
        raise bad_option(f"workspace is {workspace!r}", "Give a function from a node to bytes.")

    def known(node: Node) -> int:
        nbytes = workspace(node)
        if not is_whole(nbytes):
            raise bad_option(f"workspace gives {nbytes!r} for {node.name}", "Give bytes, 0 or more.")
        return nbytes

    return known


def known_bytes(name: str, nbytes: int | torch.SymInt, sizes: Mapping[str, int]) -> int:
    """Return ``nbytes`` as a plain number.

    Raises:
        GraphError: SK108 if it depends on the data and has no upper bound.
    """
    try:
        return plain_size(nbytes, sizes)
    except LookupError as error:
        symbol = error.args[0]
        raise GraphError(
            "SK108",
            f"{name} has {nbytes} bytes, and {', '.join(error.args)} depends on the data",
            f"State an upper bound in the model, torch._check(n <= 1024) for the n that is {symbol}, and capture "
            f"again; simulate_memory also takes sizes={{{symbol!r}: 1024}}.",
            [name],
        ) from error


def refuse_sparse(node: Node, tensor: torch.Tensor) -> None:
    """Refuse a sparse tensor, whose number of stored elements is unknown.

    Raises:
        GraphError: SK108.
    """
    if tensor.layout not in (torch.strided, MKLDNN):
        raise GraphError(
            "SK108",
            f"{node.name} is sparse ({tensor.layout}): its bytes depend on the data",
            "Make it dense, or measure a run with splitkit.measure_memory.",
            [node],
        )
