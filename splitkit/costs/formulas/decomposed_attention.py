"""Find attention that capture decomposed, and what a fused kernel would read, write and compute instead.

AOTAutograd traces the kernels of the machine that captures: a CPU has no fused attention with dropout, and then a joint
graph has products, softmax and copies of the scores where a GPU runs one kernel forward and one backward::

    q, k, v ── mul, bmm, add, softmax, dropout, bmm ── out        forward reads q, k, v and writes out
               └────────── saved scores ─────────┐
    dq, dk, dv ── bmm, softmax backward, ... ── d_out             backward reads q, k, v, out, d_out; writes dq, dk, dv
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import fx
from torch.fx import Node

from splitkit.costs.formulas.traffic import distinct_bytes
from splitkit.graph.fake_calls import op_name
from splitkit.graph.joint_marks import backward_nodes, forward_owners
from splitkit.graph.storages import tensors
from splitkit.graph.symbols import value_of

_RECOMPUTED = 5 / 4
"""Products of a fused backward, which computes the scores again, per product of the decomposed one."""


@dataclass(frozen=True)
class AttentionKernel:
    """One fused kernel instead of some nodes.

    Attributes:
        nodes: the nodes.
        work: FLOPs of the kernel per FLOP of its nodes.
        moved: bytes that it reads and writes.
    """

    nodes: tuple[Node, ...]
    work: float
    moved: int


def decomposed_attention(graph: fx.Graph) -> Iterator[AttentionKernel]:
    """Yield the kernels of each decomposed attention of a joint graph: of its forward, and of its backward if any."""
    late, calls = backward_nodes(graph), dict[object, list[Node]]()
    for node in graph.nodes:
        # Dynamo's note of the call that a node comes from: ("scaled_dot_product_attention_1", the function)
        called = None if node in late else next(reversed(node.meta.get("source_fn_stack") or ()), None)
        if called is not None and op_name(called[1]) == "scaled_dot_product_attention":
            calls.setdefault(called[0], []).append(node)
    owner = forward_owners(graph) if calls else {}
    owned = dict[Node, list[Node]]()
    for node, forward in owner.items():
        if node.meta.get("seq_nr") == forward.meta.get("seq_nr"):  # no sum of gradients, which is a kernel of its own
            owned.setdefault(forward, []).append(node)
    for nodes in calls.values():
        if not any("softmax" in op_name(node.target) for node in nodes):
            continue
        moved = _crossing(nodes, lambda node: node not in late)
        yield AttentionKernel(tuple(nodes), 1.0, moved)
        if back := [node for forward in nodes for node in owned.get(forward, ())]:
            yield AttentionKernel(tuple(back), _RECOMPUTED, moved + _crossing(back, late.__contains__))


def _crossing(nodes: list[Node], counts: Callable[[Node], bool]) -> int:
    """Return the bytes that nodes exchange with the other nodes of their half, for which ``counts`` holds."""
    inside = set(nodes)
    read = [n for n in dict.fromkeys(r for node in nodes for r in node.all_input_nodes) if n not in inside]
    made = [node for node in nodes if any(user not in inside and counts(user) for user in node.users)]
    return _bytes(n for n in read if counts(n)) + _bytes(made)


def _bytes(nodes: Iterable[Node]) -> int:
    return distinct_bytes(t for node in nodes for t in tensors(value_of(node)))
