"""Turns plans of forward and backward into the data of their picture: saved values, recomputed ops, memory over time.

::

      forward            saved             backward
    [ h.0        ] ====== 12 MiB ====== [ ∇ h.0        ]      a row is a module, as in `splitkit.view.data.rows`;
    [ h.1        ] -- 1 MiB ----------- [ ∇ h.1 ////// ]      hatched: what backward recomputes
    [ lm_head    ] ====== 48 MiB ====== [ ∇ lm_head    ]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any

from torch import fx
from torch.fx import Node

from splitkit.engine.offload_copies import back_on_device, on_host
from splitkit.engine.pair import Pair
from splitkit.graph.dataflow import Dataflow
from splitkit.memory.profile import MemoryProfile, simulate_memory
from splitkit.memory.simulation import SimulatedStorage
from splitkit.prices import Costs
from splitkit.view.data.ladder_model import LadderModel, sums_of_makers
from splitkit.view.data.op_columns import ops_data, rounded
from splitkit.view.data.rows import LadderRows, ladder_rows

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
        """The nodes of forward by row, which is a topological order as values only go down; then those of backward."""
        late = self.rows.backward
        forward = sorted((n for n in self.flow.nodes if n not in late), key=self.rows.of.__getitem__)
        return [*forward, *(n for n in self.flow.nodes if n in late)]

    @cached_property
    def _place(self) -> dict[str, int]:
        return {node.name: i for i, node in enumerate(self.nodes)}

    def still(self) -> dict[str, Any]:
        """Return what a still picture of the chosen pair shows, as plain data; takes time linear in the graph."""
        pair = self.pairs[self.chosen]
        first, second = (self._computed(half) for half in (pair.forward, pair.backward))
        again = sorted({*first}.intersection(second), key=self._place.__getitem__)
        rows = [self.rows.of[self.nodes[self._place[name]]] for name in again]
        return self.common() | {
            "schema": SCHEMA,
            "trains": True,
            "bytes": simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs).saved,
            "again": again,
            "recomputed": [row in rows for row in range(len(self.rows))],
            "times": {
                "forward": self._seconds(first),
                "backward": self._seconds(second),
                "again": self._seconds(again),
            },
            "saved": sums_of_makers(self._saved(pair)),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return all that the page shows, as plain data."""
        return self.common() | {
            "schema": SCHEMA,
            "ops": ops_data(self.flow, self.nodes, self.rows.of.__getitem__, self.costs),
            "late": sum(node not in self.rows.backward for node in self.nodes),
            "choices": [self._choice(pair) for pair in self.pairs],
            "chosen": self.chosen,
        }

    def _choice(self, pair: Pair) -> dict[str, Any]:
        first, second = (self._computed(half) for half in (pair.forward, pair.backward))
        again = sorted(self._place[name] for name in {*first}.intersection(second))
        profile, saved = simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs), self._saved(pair)
        return {
            "note": pair.plan.note if pair.plan else "",
            "peak": profile.peak,
            "bytes": profile.saved,
            "seconds": rounded(sum(self.costs.seconds(self.nodes[op]) for op in again)),
            "again": again,
            "forward": self._seconds(first),
            "backward": self._seconds(second),
            "saved": sums_of_makers(saved),
            "kept": [sorted(of.items(), key=lambda each: -each[1]) for _, of in sorted(saved.items())],
            "memory": self._memory(profile),
        }

    def _computed(self, half: fx.GraphModule) -> list[str]:
        return [n.name for n in half.graph.nodes if n.op != "placeholder" and n.name in self._place]

    def _seconds(self, names: Iterable[str]) -> list[float]:
        """Return the seconds of the named nodes in each row."""
        found = [0.0] * len(self.rows)
        for name in names:
            node = self.nodes[self._place[name]]
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
        runs: list[list[int]] = []
        for op in ops:
            if runs and (op == runs[-1][0] + runs[-1][1] if op >= 0 else runs[-1][0] < 0):
                runs[-1][1] += 1
            else:
                runs.append([op, 1])
        # many steps change nothing, such as getitems and views
        changes: list[int | str] = []
        for still, group in groupby([*live[:1], *(b - a for a, b in pairwise(live))], key=lambda change: not change):
            found = list(group)
            changes += [str(len(found))] if still else found
        return {
            "at": profile.index,
            "steps": [number for run in runs for number in run],
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
