"""Small joint graphs and every legal plan of each, with what it saves and repeats: the oracle of recompute policies."""

from __future__ import annotations

from itertools import product

import torch
from hypothesis import strategies as st
from jointgraphs import Hand
from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy

from splitkit.engine.pair import divide
from splitkit.errors import SplitError
from splitkit.memory.profile import simulate_memory
from splitkit.training.flow import BACKWARD, FORWARD, save_all_plan, unrepeatable

aten = torch.ops.aten


class Prices:
    """Costs by the names of nodes; nodes that are not named take no time."""

    def __init__(self, **seconds):
        self.by_name = seconds

    def seconds(self, node):
        return self.by_name.get(node.name, 0.0)

    def flops(self, node):
        return self.seconds(node)

    def nbytes(self, node):
        return 0

    def param_bytes(self, node):
        return 0


def for_forward(flow):
    """The nodes that forward needs for its outputs and effects."""
    stack = [n for n in flow.outputs if isinstance(n, Node)]
    stack += [n for n in flow.once if save_all_plan(flow).home(flow.producer(n)) == FORWARD]
    found = set()
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return found


def spent(flow, pair, costs):
    """Seconds of what runs in both halves and forward needs anyway; what a checkpoint prefers to repeat is free."""
    names = [{n.name for n in half.graph.nodes if n.op == "call_function"} for half in (pair.forward, pair.backward)]
    needed = {flow.producer(n) for n in for_forward(flow)}
    paid = (n for n in flow.nodes if n in needed and n.meta.get("recompute") != CheckpointPolicy.PREFER_RECOMPUTE)
    return sum(costs.seconds(n) for n in paid if n.name in names[0] & names[1])


def saved(pair):
    return simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs).saved


def every_plan(flow, costs):
    """(saved bytes, seconds) of every plan that the engine accepts."""
    fixed, home = unrepeatable(flow), save_all_plan(flow)
    tainted = set(flow.backward_inputs)
    for node in flow.index:
        if any(read in tainted for read in node.all_input_nodes):
            tainted.add(node)
    free = [n for n in flow.nodes if n not in fixed and n not in flow.once and n not in tainted]
    ways = [
        ((FORWARD,), (FORWARD, BACKWARD)) if home[n] == (FORWARD,) else ((BACKWARD,), (FORWARD,), (FORWARD, BACKWARD))
        for n in free
    ]
    for places in product(*ways):
        try:
            pair = divide(flow, home.place(dict(zip(free, places, strict=True))), costs)
        except SplitError:
            continue
        yield saved(pair), spent(flow, pair, costs)


@st.composite
def steps(draw):
    """A small training step: chains, views, tuples, random ops, nodes of backward without gradients, tags."""
    h = Hand().inputs(x=1).gradients(g=1)
    names, prices, size = ["x"], {}, st.integers(1, 6)
    for i in range(draw(st.integers(2, 6))):
        reads = draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True))
        kind = draw(st.sampled_from(["op"] * 5 + ["view", "pair", "random"]))
        if kind == "view":
            h.view(f"v{i}", reads[0])
        elif kind == "pair":
            h.pair(f"v{i}", draw(size), draw(size), reads[0])
        elif kind == "random":
            h.op(f"v{i}", draw(size), reads[0], target=aten.rand_like.default)
        else:
            h.op(f"v{i}", draw(size), *reads)
        names += [f"v{i}_0", f"v{i}_1"] if kind == "pair" else [f"v{i}"]
        prices[f"v{i}"] = 0.0 if kind == "view" else float(draw(st.integers(1, 6)))
        if draw(st.integers(0, 5)) == 0:
            h[f"v{i}"].meta["recompute"] = draw(st.sampled_from(list(CheckpointPolicy)))
    h.op("loss", 1, names[-1])
    late = []
    for i in range(draw(st.integers(0, 1))):
        late.append(f"l{i}")
        h.back(f"l{i}", draw(size), *draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True)))
    wanted = draw(st.lists(st.sampled_from(names), max_size=3, unique=True))
    h.back("gx", 1, "g", *wanted, *late)
    return h.flow("loss", "gx"), Prices(**prices)
