"""Estimate which nodes a fusing compiler runs in one kernel, greedily in graph order, by the rules of Inductor.

They approximate torch/_inductor/scheduler.py: pointwise ops and reductions of the same rows join the kernel of
the values that they read. Views belong to no kernel. Products, convolutions, attention, sorts and unknown ops run
alone::

    mm ──> add ──> gelu ──> mm          kernels: mm | add gelu | mm
    x ──> sum ──> sub (x - sum)         one kernel: both loop over the same rows
    add ──> mm ──> add_1 (add + mm)     two kernels for the sums: the second waits for the product
    mm ──> add ──> mm and sum(0)        two kernels: the second reads columns of the result of the first

Cheap pointwise ops that only generated kernels read have no kernel of their own: each reader recomputes them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.fx import Node

from splitkit.costs.formulas.kernel_loops import Loop, is_random, loop_of, second_loop
from splitkit.graph.storages import storage_key, tensors
from splitkit.graph.symbols import value_of

# Up to these limits, Inductor recomputes a value in each kernel that reads it: config.realize_reads_threshold and
# realize_opcount_threshold (2.11, 2.13, 2.15).
_FEW_READS = 4
_FEW_OPS = 30


@dataclass(eq=False)
class Kernel:
    """Nodes that run in one kernel.

    Attributes:
        depth: length of the longest chain of kernels that must run before it.
        loop: the loop of the kernel; ``None`` for a node that runs alone.
        nodes: its nodes in graph order, without views.
    """

    depth: int
    loop: Loop | None
    nodes: list[Node] = field(default_factory=list)


class Fusion:
    """The kernels of a graph.

    Args:
        graph: the graph, with ``meta["val"]``.
        is_view: whether a node starts no kernel, even if it runs alone.

    Attributes:
        kernels: the kernels in the order of their first nodes; a node that runs alone has its own.
        kernel: node -> its kernel. Views, items of tuples and inputs have none. Neither have nodes without inputs
            (``arange``, ``full``) and `repeated` nodes, which each reader computes itself.
        second: node -> a second kernel that only this node needs: sums over columns, or zeros to add to.
        repeated: groups of pointwise nodes that each kernel that reads them recomputes.
        reads: node with a kernel, or repeated node -> the inputs, nodes with kernels and items of their tuples that it
            reads, through views.
    """

    def __init__(self, graph: fx.Graph, is_view: Callable[[Node], bool]) -> None:
        self._is_view = is_view
        self._behind: dict[Node, tuple[Node, ...]] = {}  # view -> the nodes that it is a view of
        self._beside: dict[tuple[int, Hashable], list[Kernel]] = {}
        self._joined: dict[Kernel, Kernel] = {}
        self._of: dict[Node, Kernel] = {}
        self._repeats: set[Node] = set()
        self.second: dict[Node, Kernel] = {}
        self.reads: dict[Node, tuple[Node, ...]] = {}
        nodes = [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
        self._loops = {node: loop_of(node) for node in nodes}
        self._for_columns = self._read_by_columns(nodes)
        for node in nodes:
            self._place(node)
        repeated = self._sink()
        for node in self._of:
            self._current(self._of[node]).nodes.append(node)
        inlined = [Kernel(0, self._loops[node], [node]) for node in self.reads if node in self._behind]
        self.repeated = [*inlined, *reversed(repeated)]
        self._repeats = {node for kernel in repeated for node in kernel.nodes}
        self.kernel = {n: self._current(self._of[n]) for n in self._of if n not in self._repeats}
        self.kernels = list(dict.fromkeys(self.kernel.values()))
        self._look_through()

    @property
    def generated(self) -> list[Kernel]:
        """The kernels that a compiler would generate, second ones last; all others are library calls."""
        return [*(kernel for kernel in self.kernels if kernel.loop is not None), *self.second.values()]

    def maker(self, read: Node) -> Node:
        """Return the node that makes a value: the maker of its tuple, or the node itself."""
        while read in self._behind and read.target is operator.getitem:
            read = read.all_input_nodes[0]
        return read

    def readers(self, node: Node) -> Iterator[tuple[Node, Node]]:
        """Yield (reader, value) for readers of ``node`` or of an item of its tuple, through views and `repeated`."""
        stack = [(user, node) for user in node.users]
        while stack:
            user, read = stack.pop()
            if user in self._behind or user in self._repeats:
                stack += [(later, user if user.target is operator.getitem else read) for later in user.users]
            else:
                yield user, read

    def _place(self, node: Node) -> None:
        """Find the kernel of a node, given the kernels of its inputs."""
        if node.target is operator.getitem and node.all_input_nodes[0] not in self._behind:
            self._behind[node] = (node,)
            return
        reads = tuple(dict.fromkeys(r for n in node.all_input_nodes for r in self._behind.get(n, (n,))))
        if node.target is operator.getitem or self._is_view(node):
            self._behind[node] = reads
            return
        loop = self._loops[node]
        if loop is not None and loop.row is None and not reads and not is_random(node):
            self._behind[node] = ()
            return
        self.reads[node] = reads
        if node in self._for_columns:
            self._behind[node] = reads
            return
        depth = max((self._depth(read) for read in reads), default=0)
        latest = [read for read in reads if self._depth(read) == depth]
        places = [place for n in node.all_input_nodes if loop is not None for place in self._places(n, depth)]
        self._of[node] = kernel = self._before(latest, loop) or self._next_to(places, depth + 1, loop)
        for place in places:
            self._beside.setdefault((kernel.depth, place), []).append(kernel)
        if (second := second_loop(node)) is not None and loop is not None:
            self.second[node] = Kernel(depth, second, [node])

    def _places(self, read: Node, depth: int) -> Iterator[Hashable]:
        """Yield the memory places of a value (of its inputs if it is recomputed) if it is made at this depth."""
        if read in self._behind and read in self.reads:
            for node in read.all_input_nodes:
                yield from self._places(node, depth)
        elif all(self._depth(r) == depth for r in self._behind.get(read, (read,))):
            for tensor in tensors(value_of(read)):
                yield storage_key(tensor), tensor.storage_offset() if tensor.layout == torch.strided else 0

    def _before(self, latest: Iterable[Node], loop: Loop | None) -> Kernel | None:
        """Join the kernels of a node's latest inputs and return the result, if the node may run there as well."""
        kernels = dict.fromkeys(self._made_in(read) for read in latest)
        for kernel in kernels:
            loop = loop and kernel.loop.joined(loop) if kernel and kernel.loop else None
            if loop is None:
                return None
        found = [kernel for kernel in kernels if kernel]
        if not found:
            return None
        found[0].loop = loop
        self._joined |= dict.fromkeys(found[1:], found[0])
        return found[0]

    def _next_to(self, places: Iterable[Hashable], depth: int, loop: Loop | None) -> Kernel:
        """Return a kernel of the same depth over the same elements that reads the same memory, or a new one."""
        for place in places if loop else ():
            for kernel in map(self._current, self._beside.get((depth, place), ())):
                both = loop and kernel.loop and kernel.loop.joined(loop)
                if both and kernel.loop and loop and kernel.loop.size == loop.size:
                    kernel.loop = both
                    return kernel
        return Kernel(depth, loop)

    def _sink(self) -> dict[Kernel, None]:
        """Join each kernel that has a single reader to that reader; return the kernels that their readers repeat."""
        members: dict[Kernel, list[Node]] = {}
        for node in self._of:
            members.setdefault(self._current(self._of[node]), []).append(node)
        repeated: dict[Kernel, dict[Kernel, None]] = {}  # and their readers
        for kernel in sorted(members, key=lambda k: k.depth, reverse=True):
            users = {user: None for n in members[kernel] for user, _ in self.readers(n)}
            is_kept = any(user.op == "output" for user in users)
            found = dict.fromkeys(self._current(self._of[user]) for user in users if user in self._of)
            others = {r: None for k in found for r in repeated.get(k, (k,)) if r is not kernel}
            if len(others) == 1:
                self._join(kernel, next(iter(others)), is_kept)
            elif others and not is_kept and all(k.loop for k in others) and self._is_cheap(kernel, members[kernel]):
                repeated[kernel] = others
        return dict.fromkeys(repeated)

    def _read_by_columns(self, nodes: Iterable[Node]) -> set[Node]:
        """Return the elementwise nodes that only reductions of columns read, directly or through such nodes."""
        found: set[Node] = set()
        for node in reversed(list(nodes)):
            loop = self._loops[node]
            is_plain = loop is not None and loop.row is None and not is_random(node) and not self._is_view(node)
            across = [(own := self._loops.get(user)) is not None and own.across for user in node.users]
            if is_plain and across and all(a or user in found for a, user in zip(across, node.users, strict=True)):
                found.add(node)
        return found

    def _join(self, kernel: Kernel, only: Kernel, is_kept: bool) -> None:
        """Join a kernel to the only kernel that reads it.

        An elementwise kernel joins even a reader that needs only a part of its elements, unless its results are graph
        outputs, which must be complete.
        """
        if only.loop and kernel.loop:
            both = only.loop.joined(kernel.loop) or (only.loop if kernel.loop.row is None and not is_kept else None)
            if both:
                only.loop = both
                self._joined[kernel] = only

    def _is_cheap(self, kernel: Kernel, nodes: Collection[Node]) -> bool:
        """Whether Inductor recomputes a kernel in each reader: it is elementwise, with few ops and few inputs."""
        if kernel.loop is None or kernel.loop.row is not None or len(nodes) > _FEW_OPS:
            return False
        outside = {r for n in nodes for r in self.reads[n] if self._made_in(r) is not kernel}
        return len(outside) <= _FEW_READS and not any(n in self.second or is_random(n) for n in nodes)

    def _look_through(self) -> None:
        """Replace repeated nodes in `reads` by their own inputs."""
        behind: dict[Node, tuple[Node, ...]] = {}
        for node, reads in self.reads.items():
            through = tuple(dict.fromkeys(b for r in reads for b in behind.get(r, (r,))))
            if node in self.kernel:
                self.reads[node] = through
            else:
                behind[node] = through

    def _made_in(self, read: Node) -> Kernel | None:
        """Return the kernel that makes a value as far as kernels are known; ``None`` for inputs."""
        maker = self.maker(read)
        return self._current(self._of[maker]) if maker in self._of else None

    def _depth(self, read: Node) -> int:
        kernel = self._of.get(self.maker(read))
        return kernel.depth if kernel else 0

    def _current(self, kernel: Kernel) -> Kernel:
        while kernel in self._joined:
            kernel = self._joined[kernel]
        return kernel
