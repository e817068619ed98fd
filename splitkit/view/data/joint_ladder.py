"""Turns plans of forward and backward into the data of their picture: saved values, recomputed ops, memory over time.

::

      forward            saved             backward
    [ h.0        ] ====== 12 MiB ====== [ ∇ h.0        ]      a row is a module, as in `LadderView`;
    [ h.1        ] -- 1 MiB ----------- [ ∇ h.1 ////// ]      hatched: what backward recomputes
    [ lm_head    ] ====== 48 MiB ====== [ ∇ lm_head    ]
"""

from __future__ import annotations

import re
import zlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING, Any

from torch.fx import Node

from splitkit import _torch
from splitkit.costs import unit_of
from splitkit.engine.pair import Pair, back_on_device, on_host
from splitkit.graph.dataflow import Dataflow, module_path, readers_of, waits_for
from splitkit.graph.joint_marks import backward_nodes, forward_outputs, forward_owners
from splitkit.graph.shards import collective_group
from splitkit.graph.storages import tensors, value_of
from splitkit.memory.profile import MemoryProfile, simulate_memory
from splitkit.memory.simulation import SimulatedStorage
from splitkit.plans.record import Plan
from splitkit.prices import Costs, checked
from splitkit.search.recompute.offload_planner import offload_run
from splitkit.search.recompute.plan_pool import Pool
from splitkit.training.choices import savings
from splitkit.training.offload_timeline import OffloadRun
from splitkit.training.peaks import Peaks

# Divides a graph into the rows of its picture; no row reads from a row below it.
#
# A row is a module: a numbered layer, or a sibling of numbered layers. Where a plan divides a module, each part of the
# plan has a row of its own::
#
#     transformer.wte            row 0   stage 0
#     transformer.h.0            row 1   stage 0
#     transformer.h.1            row 2   stage 0
#     transformer.h.1 (part 2)   row 3   stage 1
#
# A row of more than `MOST_OPS` ops that is not a numbered layer is divided further: into the modules inside it, and
# what lies directly in one module, as in a model written without modules, into runs of ops where few values are alive.


MOST_OPS = 100
"""A row of more ops is divided. Layers of transformers have 20 to 60."""
_RUN, _SPREAD = 40, 15
"""The ops of a run where modules do not divide a row, and by how many its end may move to where fewer are alive."""


@dataclass(frozen=True)
class LadderRows:
    """The rows of a graph.

    Attributes:
        names: the unique names of the rows, from the top.
        of: placeable node -> its row.
        backward: the backward nodes of a joint graph; each lies in the row of the forward node that it belongs to.
        parts: the part of each row.
    """

    names: tuple[str, ...]
    of: Mapping[Node, int]
    backward: frozenset[Node]
    parts: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.names)


def ladder_rows(flow: Dataflow, part: Mapping[Node, int]) -> LadderRows:
    """Divide a graph into rows under a plan.

    A node lies in the row of its module, or in the row of a node that it waits for if that is lower: so values only go
    down. The backward nodes of a joint graph do not decide where a row is.

    Args:
        flow: facts about the graph.
        part: placeable node -> the number of its part in the order in which parts run; backward nodes follow their
            forward nodes.
    """
    late = backward_nodes(flow.graph)
    forward = [node for node in flow.nodes if node not in late]
    row_paths = _row_paths(Counter(module_path(node) for node in forward))
    order = sorted(forward, key=lambda node: part.get(node, 0))  # stable: in graph order within a part
    runs = _runs(flow, forward, row_paths)
    row_of: dict[Node, int] = {}
    known: dict[Hashable, int] = {}
    names: list[str] = []
    parts: list[int] = []
    # a node opens its module's row at the first node of that module and part; then it sinks below what it waits for
    for node in order:
        own = part.get(node, 0)
        path, run = row_paths[module_path(node)], runs.get(node, "")
        key = path, run, own
        if key not in known:
            known[key] = len(names)
            names.append(f"{path} · {run}" if run else path)
            parts.append(own)
        row_of[node] = max([known[key], *(row_of[n] for n in waits_for(flow, node) if n in row_of)])
    names = _unique(names)
    kept = sorted(set(row_of.values()))  # sinking may have emptied rows
    place = {row: i for i, row in enumerate(kept)}
    of = {node: place[row] for node, row in row_of.items()}
    owner = forward_owners(flow.graph) if late else {}
    of |= {node: of.get(owner[node], len(kept) - 1) for node in flow.nodes if node in late and node in owner}
    # backward nodes without a forward node of their own, such as the loss's, go to the last row
    left = {node: len(kept) - 1 for node in flow.nodes if node not in of}
    return LadderRows(tuple(names[r] for r in kept), of | left, frozenset(late), tuple(parts[r] for r in kept))


def _row_paths(paths: Counter[str]) -> dict[str, str]:
    """Return module path -> the path of the row that the module lies in.

    A row's path ends at the first number. A module that contains numbered layers is not a row of its children: they are
    rows themselves, and so is what the module computes itself. The same holds for a module of too many ops.

    Args:
        paths: module path -> the number of its ops.
    """
    through = {""}
    for path in paths:
        atoms = path.split(".")
        first = next((i for i, atom in enumerate(atoms) if atom.isdigit()), None)
        if first is not None:
            through.update(".".join(atoms[:i]) for i in range(1, first))
    while True:
        found = _rows_below(paths, through)
        ops: Counter[str] = Counter()
        for path, count in paths.items():
            ops[found[path]] += count
        inside = {row for path, row in found.items() if path != row and row not in through}
        large = {row for row in inside if _is_divided(row, ops[row])}
        if not large:
            return found
        through |= large


def _is_divided(path: str, ops: int) -> bool:
    """Whether a row is divided: it has too many ops, and is not a numbered layer."""
    return ops > MOST_OPS and not path.rpartition(".")[2].isdigit()


def _rows_below(paths: Mapping[str, int], through: set[str]) -> dict[str, str]:
    """Return module path -> its row, where the children of the modules ``through`` are rows."""
    found = {}
    for path in paths:
        atoms = path.split(".") if path else []
        end = 0
        while end < len(atoms) and (end == 0 or ".".join(atoms[:end]) in through):
            end += 1
            if end < len(atoms) and atoms[end].isdigit():
                end += 1
                break
        found[path] = ".".join(atoms[:end]) or "(top level)"
    return found


def _runs(flow: Dataflow, forward: Sequence[Node], row_paths: Mapping[str, str]) -> dict[Node, str]:
    """Return node -> the name of its run of ops, for the nodes of rows that modules do not divide enough."""
    rows: dict[str, list[Node]] = {}
    for node in forward:
        rows.setdefault(row_paths[module_path(node)], []).append(node)
    large = [nodes for path, nodes in rows.items() if _is_divided(path, len(nodes))]
    if not large:
        return {}
    last = {node: max((flow.index[r] for r in readers), default=-1) for node, readers in readers_of(flow).items()}
    return {node: name for nodes in large for name, run in _narrow_runs(flow, nodes, last) for node in run}


def _narrow_runs(
    flow: Dataflow, nodes: Sequence[Node], last: Mapping[Node, int]
) -> Iterator[tuple[str, Sequence[Node]]]:
    """Yield the name and the nodes of each run; runs end where the fewest values of these nodes are alive."""
    ends = [0] * (len(nodes) + 1)  # by position among the nodes: how many values are read for the last time there
    place = [flow.index[node] for node in nodes]
    for node in nodes:
        ends[bisect_left(place, last.get(node, -1))] += 1
    alive = [i + 1 - read for i, read in enumerate(accumulate(ends[:-1]))]
    start = 0
    while start < len(nodes):
        middle = start + _RUN
        if middle + _RUN // 2 >= len(nodes):
            end = len(nodes)
        else:
            end = 1 + min(range(middle - _SPREAD, middle + _SPREAD), key=lambda i: (alive[i], abs(i - middle)))
        run = nodes[start:end]
        yield f"{run[0].name} … {run[-1].name}", run
        start = end


def _unique(names: Sequence[str]) -> list[str]:
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        found.append(name if seen[name] == 1 else f"{name} (part {seen[name]})")
    return found


# What the pictures of stages, and of forward and backward, have in common: rows, and the values between them.


class LadderModel:
    """A graph in rows; forward runs down and backward up."""

    if TYPE_CHECKING:
        flow: Dataflow
        costs: Costs
        title: str
        memory: int | None

        @cached_property
        def rows(self) -> LadderRows:
            """The rows from top to bottom."""

    @cached_property
    def nodes(self) -> list[Node]:
        """The nodes that the picture counts: forward's by row, which is a topological order."""
        late, row = self.rows.backward, self.rows.of
        return sorted((node for node in self.flow.nodes if node not in late), key=row.__getitem__)

    @cached_property
    def nodes_of_rows(self) -> list[list[Node]]:
        """The counted nodes of each row."""
        found: list[list[Node]] = [[] for _ in range(len(self.rows))]
        for node in self.nodes:
            found[self.rows.of[node]].append(node)
        return found

    def common(self) -> dict[str, Any]:
        """Return the data that all pages and still pictures of ladders have."""
        return {
            "title": self.title,
            "unit": unit_of(self.costs),
            "memory": self.memory,
            "rows": [
                {"name": name, "part": self.part_of_row(row), "ops": len(nodes), "kind": row_kind(nodes)}
                for row, (name, nodes) in enumerate(zip(self.rows.names, self.nodes_of_rows, strict=True))
            ],
            "borders": self.borders,
            "edges": as_triples(self._edges()),
        }

    def ops(self) -> dict[str, Any]:
        """Return columns of equal length, with one entry for each counted node.

        ``module``, ``sort`` and ``source`` are indices into ``modules``, ``sorts`` and ``sources``; a sort is ``[op,
        value, bytes, seconds]``, which equal layers share; a source is the line of Python that made the op. ``reads``
        has, for each value that a node reads, how many entries further up the value is.
        """
        flow, nodes, costs = self.flow, self.nodes, self.costs
        place = {node: i for i, node in enumerate(nodes)}
        modules, module = _numbered(module_path(node) for node in nodes)
        sorts, sort = _numbered(
            (_op_text(node), type_text(node), costs.nbytes(node), rounded(costs.seconds(node))) for node in nodes
        )
        sources, source = _numbered(source_line(node) for node in nodes)
        return {
            "name": [node.name for node in nodes],
            "row": [self.rows.of[node] for node in nodes],
            "modules": modules,
            "module": module,
            "sorts": sorts,
            "sort": sort,
            "sources": sources,
            "source": source,
            "reads": [[place[node] - place[n] for n in flow.inputs(node) if n in place] for node in nodes],
        }

    def part_of_row(self, row: int) -> int:
        """Return the number of the part that a row lies in."""
        return self.rows.parts[row]

    @cached_property
    def borders(self) -> list[int]:
        """The first row of each part, and the number of rows."""
        parts = [self.part_of_row(row) for row in range(len(self.rows))]
        return [0, *(row for row in range(1, len(parts)) if parts[row] != parts[row - 1]), len(parts)]

    def _edges(self) -> dict[tuple[int, int], int]:
        """Return (row, lower row that reads from it) -> bytes of the values read; each value counts once."""
        found: dict[tuple[int, int], int] = {}
        of, late = self.rows.of, self.rows.backward
        for node, readers in readers_of(self.flow).items():
            if node in late:
                continue
            for row in sorted({of[reader] for reader in readers if reader not in late} - {of[node]}):
                found[of[node], row] = found.get((of[node], row), 0) + self.costs.nbytes(node)
        return found


def sums_of_makers(saved: Mapping[tuple[int, int], Mapping[Any, int]]) -> list[tuple[int, int, int]]:
    """Return (row, row) -> maker -> bytes as `as_triples`, with the bytes of all makers together."""
    return as_triples({rows: sum(makers.values()) for rows, makers in saved.items()})


def as_triples(found: Mapping[tuple[int, int], int]) -> list[tuple[int, int, int]]:
    """Return (row, row) -> bytes as a sorted list."""
    return [(a, b, nbytes) for (a, b), nbytes in sorted(found.items())]


SCHEMA = "splitkit.halves/1"
TINY = 1000
"""A storage below this part of the peak is not listed: together they are the remark "and smaller ones"."""


@dataclass(frozen=True, eq=False)
class HalvesView(LadderModel):
    """One or several divisions of a joint graph into forward and backward, drawn as a ladder.

    Attributes:
        flow: facts about the joint graph.
        pairs: forward and backward of each division, by rising memory; the page's slider selects one.
        costs: the prices of the joint graph's nodes.
        title: the title above the picture.
        chosen: the index of the pair that is shown first.
        memory: the memory limit of the device in bytes, if there is one.
    """

    flow: Dataflow
    pairs: Sequence[Pair]
    costs: Costs
    title: str = ""
    chosen: int = 0
    memory: int | None = None

    @cached_property
    def rows(self) -> LadderRows:
        """The rows from top to bottom."""
        return ladder_rows(self.flow, {})

    @cached_property
    def nodes(self) -> list[Node]:
        """The nodes of forward by row, then of backward."""
        return [*super().nodes, *(node for node in self.flow.nodes if node in self.rows.backward)]

    @cached_property
    def _place(self) -> dict[str, int]:
        return {node.name: i for i, node in enumerate(self.nodes)}

    def still(self) -> dict[str, Any]:
        """Return what a still picture of the chosen pair shows, as plain data; takes time linear in the graph."""
        pair = self.pairs[self.chosen]
        figures = self._figures(pair, simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs))
        again = figures["again"]
        rows = [self.rows.of[self.nodes[op]] for op in again]
        return self.common() | {
            "schema": SCHEMA,
            "trains": True,
            "bytes": figures["bytes"],
            "again": [self.nodes[op].name for op in again],
            "counts": {"again": [rows.count(row) for row in range(len(self.rows))]},
            "times": {"forward": figures["forward"], "backward": figures["backward"], "again": self._seconds(again)},
            "saved": figures["saved"],
        }

    def to_dict(self) -> dict[str, Any]:
        """Return all that the page shows, as plain data."""
        return self.common() | {
            "schema": SCHEMA,
            "ops": self.ops(),
            "late": sum(node not in self.rows.backward for node in self.nodes),
            "choices": [self._choice(pair) for pair in self.pairs],
            "chosen": self.chosen,
        }

    def _figures(self, pair: Pair, profile: MemoryProfile) -> dict[str, Any]:
        """Return what both the page and the still picture show of a pair; ``profile`` is its memory."""
        first, second = (
            [self._place[n.name] for n in half.graph.nodes if n.op != "placeholder" and n.name in self._place]
            for half in (pair.forward, pair.backward)
        )
        saved = self._saved(pair)
        return {
            "bytes": profile.saved + pair.host_bytes,
            "again": sorted({*first}.intersection(second)),
            "forward": self._seconds(first),
            "backward": self._seconds(second),
            "saved": sums_of_makers(saved),
            "kept": [sorted(of.items(), key=lambda each: -each[1]) for _, of in sorted(saved.items())],
        }

    def _choice(self, pair: Pair) -> dict[str, Any]:
        profile = simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs)
        figures = self._figures(pair, profile)
        return figures | {
            "note": pair.plan.note if pair.plan else "",
            "peak": profile.peak,
            "seconds": rounded(sum(self.costs.seconds(self.nodes[op]) for op in figures["again"])),
            "waits": 0 if pair.plan is None or (moved := self._moved(pair.plan)) is None else rounded(moved.exposed),
            "memory": self._memory(profile),
        }

    def _moved(self, plan: Plan) -> OffloadRun | None:
        return offload_run(self._pool, plan, self.costs) if plan.offloaded else None

    @cached_property
    def _pool(self) -> Pool:
        from splitkit.frontends.aot import joint_flow

        flow = joint_flow(self.flow.root, forward_outputs(self.flow.graph))
        return Pool(savings(flow, checked(self.costs)), Peaks(flow))

    def _seconds(self, ops: Iterable[int]) -> list[float]:
        """Return the seconds of some ops in each row."""
        found = [0.0] * len(self.rows)
        for op in ops:
            node = self.nodes[op]
            found[self.rows.of[node]] += self.costs.seconds(node)
        return [rounded(seconds) for seconds in found]

    def _saved(self, pair: Pair) -> dict[tuple[int, int], dict[int, int]]:
        """Return (row that makes saved values, row whose backward reads them first) -> op by its place -> bytes.

        A value that no op makes, such as an input, has the place -1. Values on the host count as well.
        """
        readers = {node.name: list(node.users) for node in pair.backward.graph.nodes}
        known = {node.name: node for node in self.flow.index}
        moved = {on_host(name): name for name in pair.offloaded}
        found: dict[tuple[int, int], dict[int, int]] = {}
        for value in pair.saved_values:
            name = moved.get(value.name, value.name)
            maker = self.flow.producer(known[name])
            row = self.rows.of.get(maker)
            arrived = back_on_device(name) if value.name in moved else name
            read = next((r.name for r in readers.get(arrived, ()) if r.name in self._place), None)
            last = row if read is None else self.rows.of[self.nodes[self._place[read]]]
            if value.nbytes and row is not None and last is not None:
                of, place = found.setdefault((row, last), {}), self._place.get(maker.name, -1)
                of[place] = of.get(place, 0) + value.nbytes
        return found

    def _memory(self, profile: MemoryProfile) -> dict[str, Any]:
        """Return the bytes alive at each step, compressed.

        ``bytes`` has the change at each step, with a string for a run of steps without one: ``[512, "3", -512]``.
        ``steps`` has the op of each step, as ``first, count`` of runs of consecutive ops; -1 for a step without an op.
        """
        live, ops = profile.timeline, [self._place.get(step.name, -1) for step in profile.steps]
        steps: list[int] = []
        for _, run in groupby(enumerate(ops), key=lambda at: at[1] - at[0] if at[1] >= 0 else None):
            (_, first), *others = run
            steps += [first, 1 + len(others)]
        # many steps change nothing, such as getitems and views
        changes: list[int | str] = []
        for still, group in groupby([*live[:1], *(b - a for a, b in pairwise(live))], key=lambda change: not change):
            found = list(group)
            changes += [str(len(found))] if still else found
        return {
            "at": profile.index,
            "steps": steps,
            "bytes": changes,
            "calls": [(name, steps.start, steps.stop) for name, steps in profile.calls.items()],
            "alive": self._alive(profile),
        }

    def _alive(self, profile: MemoryProfile) -> list[tuple[int | str, str, int, int, int]]:
        """Return ``(maker, kind, first step, last step, bytes)`` of each storage that is not tiny, the largest first.

        The maker is the place of its op, or a name for what no op makes: parameters, inputs, constants.
        """
        last = len(profile.steps) - 1
        names = _given_names(profile.buffers)
        large = [b for b in profile.buffers if b.nbytes >= max(1, profile.peak // TINY)]
        return [
            (self._place.get(b.name, names.get(b.name, b.name)), b.kind, b.born, min(b.dies, last), b.nbytes)
            for b in sorted(large, key=lambda b: -b.nbytes)
        ]


def _given_names(buffers: Iterable[SimulatedStorage]) -> dict[str, str]:
    """Return placeholder -> the name of its parameter or buffer in the model, which AOTAutograd's descriptors keep."""
    from splitkit.frontends.aot import buffer_name, parameter_name

    inputs = [b.node for b in buffers if b.node is not None and "desc" in b.node.meta]
    found = {node.name: name for node in inputs if (name := parameter_name(node) or buffer_name(node))}
    # `capture_joint` wraps the model in a module that calls it `model`
    wrapped = all(name.startswith("model.") for name in found.values())
    return {node: name.removeprefix("model.") if wrapped else name for node, name in found.items()}


# Describes nodes in texts, of which columns of plain data store equal ones once.


# A frame of a formatted traceback, as fx, Dynamo and torch.export write it (2.11, 2.13, 2.15).
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in .*\n(.*)')


def _op_text(node: Node) -> str:
    """Return the name of an op, and of a collective between which ranks it is: ``... over tp=2``."""
    group, name = collective_group(node), _torch.target_name(node)
    return name if group is None else f"{name} over {group}"


def source_line(node: Node) -> str:
    """Return the innermost line of the model's code that made a node: ``net/model.py:12: x = self.act(x)``, or ``""``.

    Lines of torch itself, which every call of a layer passes, say nothing about the model. Of a path only the folder
    and the file are shown.
    """
    found = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [frame for frame in found if "/site-packages/torch/" not in frame[0].replace("\\", "/")] or found
    if not own:
        return ""
    file, number, code = own[-1]
    return f"{'/'.join(file.replace(chr(92), '/').split('/')[-2:])}:{number}: {code.strip()}"


def row_kind(nodes: Iterable[Node]) -> int:
    """Return a hash of the ops and types in a row; rows of equal layers have the same, and pictures fold them."""
    shape = "|".join(f"{_torch.target_name(node)} {type_text(node)}" for node in nodes)
    return zlib.crc32(shape.encode())


def type_text(node: Node) -> str:
    """Return the type of a node's value: ``float32[2, 16, 64]``."""
    texts = (
        f"{str(t.dtype).removeprefix('torch.')}{[*map(str, t.shape)]}".replace("'", "") for t in tensors(value_of(node))
    )
    return ", ".join(texts)


def rounded(number: float) -> float | int:
    """Return a number with seven digits; pictures show fewer."""
    return number if isinstance(number, int) else float(f"{number:.7g}")


def _numbered(words: Iterable[Any]) -> tuple[list[Any], list[int]]:
    numbers: dict[Any, int] = {}
    which = [numbers.setdefault(word, len(numbers)) for word in words]
    return list(numbers), which
