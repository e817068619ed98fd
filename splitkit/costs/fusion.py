"""Which nodes a fusing compiler runs in one kernel, as Inductor would: a greedy estimate, in graph order.

Pointwise ops, and reductions of the same rows, join the kernel of what they read; views belong to no kernel; products,
convolutions, attention, sorts and what is unknown run alone::

    mm ──> add ──> gelu ──> mm          kernels: mm | add gelu | mm
    x ──> sum ──> sub (x - sum)         one kernel: the row is at hand
    add ──> mm ──> add_1 (add + mm)     two kernels for the sums: the second waits for the product
    mm ──> add ──> mm and sum(0)        two kernels: the second reads columns of what the first writes

Pointwise ops that only generated kernels read need none of their own: each of these computes them itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.fx import Node

from splitkit.costs.loops import Loop, is_random, loop_of, second_loop
from splitkit.graph.storages import storage_key, tensors
from splitkit.graph.symbols import value_of

# Up to these, Inductor computes again what several kernels read: config.realize_reads_threshold and
# realize_opcount_threshold (2.11, 2.13, 2.15).
_FEW_READS = 4
_FEW_OPS = 30


@dataclass(eq=False)
class Kernel:
    """Nodes that run together.

    Attributes:
        depth: how many kernels run before it, one for the other.
        loop: what it runs over; ``None`` if it runs alone.
        nodes: its members, in graph order; no views.
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
        kernels: in the order of their first nodes; nodes that run alone have one of their own.
        kernel: node -> its kernel. Views, members of tuples and inputs have none, nor what is computed of nothing
            (``arange``, ``full``) or `repeated`: every reader computes that itself.
        second: node -> another kernel that it needs, and nobody else runs in: sums over columns, zeros to add to.
        repeated: groups of pointwise nodes that those who read them compute, each for itself.
        reads: node with a kernel, or repeated -> the inputs, nodes with kernels, and members of their tuples that it
            reads, views looked through.
    """

    def __init__(self, graph: fx.Graph, is_view: Callable[[Node], bool]) -> None:
        self._is_view = is_view
        self._behind: dict[Node, tuple[Node, ...]] = {}  # what a view is a view of
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
        """The kernels that a compiler would generate, second ones last; all others are calls of a library."""
        return [*(kernel for kernel in self.kernels if kernel.loop is not None), *self.second.values()]

    def maker(self, read: Node) -> Node:
        """The node that makes what is read: itself, or that whose result it is a member of."""
        while read in self._behind and read.target is operator.getitem:
            read = read.all_input_nodes[0]
        return read

    def kernel_of(self, read: Node) -> Kernel | None:
        """The kernel that makes what is read; ``None`` for inputs."""
        return self.kernel.get(self.maker(read))

    def readers(self, node: Node) -> Iterator[tuple[Node, Node]]:
        """Who reads ``node``, views and `repeated` looked through, and as what: itself, or the member of its tuple."""
        stack = [(user, node) for user in node.users]
        while stack:
            user, read = stack.pop()
            if user in self._behind or user in self._repeats:
                stack += [(later, user if user.target is operator.getitem else read) for later in user.users]
            else:
                yield user, read

    def _place(self, node: Node) -> None:
        """Find the kernel of a node, given those of what it reads."""
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
        """Where in memory a value lies, or what it is computed of on the way, if it is made at this depth."""
        if read in self._behind and read in self.reads:
            for node in read.all_input_nodes:
                yield from self._places(node, depth)
        elif all(self._depth(r) == depth for r in self._behind.get(read, (read,))):
            for tensor in tensors(value_of(read)):
                yield storage_key(tensor), tensor.storage_offset() if tensor.layout == torch.strided else 0

    def _before(self, latest: Iterable[Node], loop: Loop | None) -> Kernel | None:
        """The kernel, all of them joined, of what a node reads last, if it may run there as well."""
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
        """A kernel that runs at the same time over the same elements and reads the same, or a new one."""
        for place in places if loop else ():
            for kernel in map(self._current, self._beside.get((depth, place), ())):
                both = loop and kernel.loop and kernel.loop.joined(loop)
                if both and kernel.loop and loop and kernel.loop.size == loop.size:
                    kernel.loop = both
                    return kernel
        return Kernel(depth, loop)

    def _sink(self) -> dict[Kernel, None]:
        """Join each kernel that a single one reads to that one; the kernels that several repeat."""
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
        """The elementwise nodes that only reductions of columns read, perhaps through each other."""
        found: set[Node] = set()
        for node in reversed(list(nodes)):
            loop = self._loops[node]
            is_plain = loop is not None and loop.row is None and not is_random(node) and not self._is_view(node)
            across = [(own := self._loops.get(user)) is not None and own.across for user in node.users]
            if is_plain and across and all(a or user in found for a, user in zip(across, node.users, strict=True)):
                found.add(node)
        return found

    def _join(self, kernel: Kernel, only: Kernel, is_kept: bool) -> None:
        """Let a kernel run in the only one that reads it; elementwise ones even if that one reads parts of it.

        Those parts would not do where the results of the kernel are kept.
        """
        if only.loop and kernel.loop:
            both = only.loop.joined(kernel.loop) or (only.loop if kernel.loop.row is None and not is_kept else None)
            if both:
                only.loop = both
                self._joined[kernel] = only

    def _is_cheap(self, kernel: Kernel, nodes: Collection[Node]) -> bool:
        """Whether Inductor computes a kernel again in each that reads it: elementwise, of little."""
        if kernel.loop is None or kernel.loop.row is not None or len(nodes) > _FEW_OPS:
            return False
        outside = {r for n in nodes for r in self.reads[n] if self._made_in(r) is not kernel}
        return len(outside) <= _FEW_READS and not any(n in self.second or is_random(n) for n in nodes)

    def _look_through(self) -> None:
        """Let the readers of repeated nodes read what these read."""
        behind: dict[Node, tuple[Node, ...]] = {}
        for node, reads in self.reads.items():
            through = tuple(dict.fromkeys(b for r in reads for b in behind.get(r, (r,))))
            if node in self.kernel:
                self.reads[node] = through
            else:
                behind[node] = through

    def _made_in(self, read: Node) -> Kernel | None:
        """As `kernel_of`, so far."""
        maker = self.maker(read)
        return self._current(self._of[maker]) if maker in self._of else None

    def _depth(self, read: Node) -> int:
        kernel = self._of.get(self.maker(read))
        return kernel.depth if kernel else 0

    def _current(self, kernel: Kernel) -> Kernel:
        while kernel in self._joined:
            kernel = self._joined[kernel]
        return kernel
