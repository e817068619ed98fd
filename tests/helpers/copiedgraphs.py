"""Small graphs whose first nodes may be copied, every plan of a few stages, and the loads by the definition."""

from __future__ import annotations

from itertools import combinations, product

import torch
from hypothesis import strategies as st
from placedgraphs import Prices
from torch import fx, nn

import splitkit as sk
from splitkit.costs import Link, Links


def joined(reads, outputs):
    """A graph of sums: ``reads`` says what each reads of x (0), a parameter (1) and the sums before it (2 and more)."""
    root, graph = nn.Module(), fx.Graph()
    root.w = nn.Parameter(torch.ones(2))
    values = [graph.placeholder("x"), graph.get_attr("w")]
    for a, b in reads:
        values.append(graph.call_function(torch.add, (values[a], values[b])))
    graph.output(tuple(values[place] for place in outputs))
    gm = fx.GraphModule(root, graph)
    sk.extend.propagate(gm, torch.ones(2))
    return gm, values[2:]


@st.composite
def cases(draw, least=2, most=4):
    """A graph whose first sums need no gradient, and may be copied; some of its pieces hang together by these alone."""
    free, units = draw(st.integers(0, 2)), draw(st.integers(least, most))
    reads = [(draw(st.sampled_from([0, *range(2, 2 + i)])), 0) for i in range(free)]
    for i in range(free, free + units):
        made = [1, *range(2 + free, 2 + i)]
        reads.append((draw(st.sampled_from(made)), draw(st.sampled_from([*range(2, 2 + free)] * 2 + made))))
    read = {place for pair in reads for place in pair}
    loose = [place for place in range(2, 2 + len(reads)) if place not in read]
    gm, nodes = joined(reads, draw(st.lists(st.sampled_from(loose), min_size=1, unique=True)))
    return gm, Prices({n.name: draw(st.sampled_from([0.0, 0.1, 0.7, 1.0, 2.0])) for n in nodes}, 4)


def one_link():
    """Between any two places."""
    return st.builds(Links, st.builds(Link, st.sampled_from([1e9, 4.0, 16.0]), st.sampled_from([0.0, 0.1, 0.5, 3.0])))


def plans_of(flow, copied, stages):
    """Where each node is, and who sends its value: all plans of so many stages that are not empty and send only on."""
    outputs = {n for node in flow.graph.nodes if node.op == "output" for n in node.all_input_nodes}
    single = [((stage,), stage) for stage in range(stages)]
    several = [(held, held[0]) for size in range(2, stages + 1) for held in combinations(range(stages), size)]
    for choice in product(*(single + several if n in copied else single for n in flow.nodes)):
        places = {n: held for n, (held, _) in zip(flow.nodes, choice, strict=True)}
        home = {n: first for n, (_, first) in zip(flow.nodes, choice, strict=True)}
        if len({*sum(places.values(), ())}) == stages and _useful(flow, places, home, outputs):
            yield places, home


def _useful(flow, places, home, outputs):
    """Whether nothing is sent back, and each copy is read where it is, or is the one that is sent."""
    for n in flow.nodes:
        readers = {part for user in n.users if user in places for part in places[user]}
        if any(part < home[n] for part in readers if part not in places[n]):
            return False
        sent = n in outputs or readers - {*places[n]} or not readers
        if not all(part in readers or (part == home[n] and sent) for part in places[n]):
            return False
    return True


def loads(flow, costs, links, places, home, stages):
    """By the definition: work, copies included, and each value that a stage sends or receives."""
    load = [sum(costs.seconds(n) for n in flow.nodes if part in places[n]) for part in range(stages)]
    for n in flow.nodes:
        readers = {part for user in n.users if user in places for part in places[user]} - {*places[n]}
        price = links.seconds(0, 1, costs.nbytes(n)) if readers else 0.0
        for part in {*readers, home[n]}:
            load[part] += price
    return load
