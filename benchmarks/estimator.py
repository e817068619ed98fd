"""The functions of Inductor's memory estimator, with the same meaning and without its assumptions.

Of ``torch._inductor.fx_passes.memory_estimator`` (torch 2.11 to 2.15). What differs: every device counts unless
``counts`` says otherwise (there the CPU never does), graphs end where they end (there ``get_peak_memory`` indexes a
node and raises ``TypeError``), and sizes without a hint are an error that asks for a bound. For numbers that equal a
real run use `splitkit.simulate_memory`: this estimate never frees a result that nobody reads, and frees inputs of the
backward that its caller still holds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import partial

import torch
from torch import fx
from torch.fx import Node

from splitkit._torch import plain_tensors
from splitkit.errors import GraphError
from splitkit.graph.storages import plain_size, storage_key, tensors, value_of

SizeOf = Callable[["int | torch.SymInt"], int]
Storages = dict[Hashable, torch.Tensor]


def build_memory_profile(
    graph: fx.Graph,
    is_releasable: Callable[[Node], bool],
    size_of: SizeOf | None = None,
    *,
    counts: Callable[[torch.device], bool] = lambda device: True,
) -> list[int]:
    """Bytes before the first op, then after the allocations and after the releases of each op.

    Args:
        graph: the graph, with ``meta["val"]``.
        is_releasable: whether what a node allocates is freed after its last reader.
        size_of: bytes, possibly symbolic -> a plain int; the size seen at capture by default.
        counts: devices whose bytes count.
    """
    size = partial(_counted, size_of or _plain, counts)
    allocator, last_reader = _lives(graph)
    owned = [n for n in graph.nodes if n.op in ("placeholder", "get_attr")]
    live = sum(size(t) for n in owned for key, t in _storages(n).items() if allocator[key] is n)
    profile = [live]
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        live += sum(size(t) for key, t in _storages(node).items() if allocator[key] is node)
        profile.append(live)
        ended = {key: t for key, t in _read(node).items() if last_reader[key] is node}
        live -= sum(size(t) for key, t in ended.items() if is_releasable(allocator[key]))
        profile.append(live)
    return profile


def get_fwd_bwd_interactions(
    fwd_graph: fx.Graph,
    bwd_graph: fx.Graph,
    size_of: SizeOf | None = None,
    *,
    counts: Callable[[torch.device], bool] = lambda device: True,
) -> tuple[int, set[str]]:
    """Bytes that stay from forward throughout backward, and the inputs of backward that cannot be released in it.

    The first are outputs of forward that backward does not take; the second share memory with a primal, or are no
    output of forward (tangents).
    """
    primals = {k for n in fwd_graph.find_nodes(op="placeholder") if _is_primal(n) for k in _storages(n)}
    given = _read(fwd_graph.output_node())
    taken: Storages = {}
    kept: set[str] = set()
    for node in bwd_graph.find_nodes(op="placeholder"):
        storages = _storages(node)
        taken |= storages
        if storages.keys() & primals or not storages.keys() & given.keys():
            kept.add(node.name)
    size = partial(_counted, size_of or _plain, counts)
    return sum(size(t) for key, t in given.items() if key not in taken), kept


def get_peak_memory(
    fwd_graph: fx.Graph,
    bwd_graph: fx.Graph,
    size_of: SizeOf | None = None,
    *,
    counts: Callable[[torch.device], bool] = lambda device: True,
) -> int:
    """The larger of the peaks of a forward and a backward graph."""
    forward = build_memory_profile(fwd_graph, lambda n: not _is_primal(n), size_of, counts=counts)
    baseline, kept = get_fwd_bwd_interactions(fwd_graph, bwd_graph, size_of, counts=counts)

    def released(node: Node) -> bool:
        return not _is_primal(node) and node.name not in kept

    return max(*forward, *(baseline + n for n in build_memory_profile(bwd_graph, released, size_of, counts=counts)))


def _lives(graph: fx.Graph) -> tuple[Mapping[Hashable, Node], Mapping[Hashable, Node]]:
    """Storage -> the first node that yields it, and the last that reads it."""
    allocator: dict[Hashable, Node] = {}
    last_reader: dict[Hashable, Node] = {}
    for node in graph.nodes:
        last_reader |= dict.fromkeys(_read(node), node)
        for key in _storages(node):
            allocator.setdefault(key, node)
    return allocator, last_reader


def _storages(node: Node) -> Storages:
    found = {storage_key(t): t for t in tensors(value_of(node))}
    if any(t.layout is not torch.strided for t in found.values()):
        raise GraphError("SK108", f"{node.name} is sparse: only the data decides how many bytes it has", "", [node])
    return found


def _read(node: Node) -> Storages:
    found: Storages = {}
    for read in node.all_input_nodes:
        found |= _storages(read)
    return found


def _is_primal(node: Node) -> bool:
    return node.name.startswith("primals")


def _counted(size_of: SizeOf, counts: Callable[[torch.device], bool], tensor: torch.Tensor) -> int:
    return sum(size_of(t.untyped_storage().nbytes()) for t in plain_tensors(tensor) if counts(t.device))


def _plain(nbytes: int | torch.SymInt) -> int:
    try:
        return plain_size(nbytes, {})
    except LookupError as error:
        reason = f"only the data decides {', '.join(error.args)}, so {nbytes} bytes are no number"
        raise GraphError("SK108", reason, "Give size_of, which knows an upper bound.") from error
