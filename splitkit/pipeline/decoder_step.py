"""The memory of a part of a decoder in one step, at any number of tokens: what everybody counts who asks for room.

Most of it grows with the tokens, not only the caches: the mask, copies of keys and values for several query heads, and
the caches of a layer before and after they have grown.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx import Node

from splitkit.graph.caches import caches_of
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.fake_calls import hint
from splitkit.graph.symbols import plain_size, symbols_of, value_of
from splitkit.memory.profile import simulate_memory

_PROMPT = ("input_ids", "position_ids", "inputs_embeds", "decoder_input_ids", "decoder_position_ids")


def step_sizes(root: fx.GraphModule, sequences: int, tokens: int, query: int = 1) -> Mapping[str, int]:
    """Return symbol -> size in a step of a captured decoder.

    Args:
        root: the graph of `splitkit.capture_decoder`.
        sequences: the number of sequences.
        tokens: positions of each sequence in the caches after the step; an encoder has as many.
        query: tokens of each sequence in the step.
    """
    positions = {cache.given: tokens if cache.given is cache.updated else tokens - query for cache in caches_of(root)}
    sizes: dict[str, int] = {}
    for node in root.graph.find_nodes(op="placeholder"):
        value = value_of(node)
        if not isinstance(value, torch.Tensor):
            continue
        if node in positions:
            rest = [positions[node] if symbols_of(size) else int(size) for size in value.shape[1:]]
        else:
            rest = [query if node.name in _PROMPT else tokens, *map(int, value.shape[2:])]
        given = zip(value.shape, [sequences, *rest], strict=True)
        sizes |= {str(symbols_of(size)[0]): n for size, n in given if symbols_of(size)}
    return sizes


def step_peak(part: fx.GraphModule, caches: Collection[str], sizes: Mapping[str, int]) -> int:
    """Return the most bytes alive while a part runs a step: weights, caches, and what it receives and computes.

    All that it receives is counted to the end of the step.

    Args:
        part: the graph of the part.
        caches: the names of the inputs that are caches, of which the part gives up the old ones.
        sizes: symbol -> size.
    """
    known = {str(symbol) for node in part.graph.nodes for symbol in symbols_of(node.meta.get("val"))}
    run = simulate_memory(part, keep_inputs=False, sizes={name: n for name, n in sizes.items() if name in known})
    given = [node for node in part.graph.find_nodes(op="placeholder") if node.name not in caches]
    return run.peak + sum(_bytes(node, sizes) for node in given)


def _bytes(node: Node, sizes: Mapping[str, int]) -> int:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0
    return math.prod(plain_size(n, sizes) for n in value.shape) * value.dtype.itemsize


def graph_of_nodes(flow: Dataflow, nodes: Collection[Node]) -> fx.GraphModule:
    """Return the graph of some nodes, for `step_peak` only: it takes what others make, and returns what others read."""
    inside = {*nodes, *(node for node, maker in flow.followers.items() if maker in nodes)}
    graph, env = fx.Graph(), dict[Node, Node]()

    def copied(node: Node) -> Node:
        if node not in env:
            env[node] = graph.node_copy(node) if node.op == "get_attr" else graph.placeholder(node.name)
            env[node].meta = dict(node.meta)
        return env[node]

    for node in flow.graph.nodes:
        if node in inside:
            for read in node.all_input_nodes:
                copied(read)
            env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[node] for node in flow.graph.nodes if node in inside and not inside.issuperset(node.users)))
    return fx.GraphModule(flow.root, graph)


@dataclass(frozen=True)
class DecoderSteps:
    """Steps of a captured decoder that compute one token of each sequence, with any number of tokens in the caches.

    Attributes:
        flow: facts about the graph.
        sequences: the sequences, as many as in the capture.
        caches: the names of the inputs that are caches.
    """

    flow: Dataflow
    sequences: int
    caches: frozenset[str]

    @classmethod
    def of(cls, flow: Dataflow) -> DecoderSteps | None:
        """Return the steps of a graph; ``None`` if it takes no cache that may have any length."""
        given = [cache.given for cache in caches_of(flow.root)]
        values = [value for node in given if isinstance(value := value_of(node), torch.Tensor)]
        grow = [value for value in values if any(map(symbols_of, value.shape[1:]))]
        return cls(flow, hint(grow[0].shape[0]), frozenset(node.name for node in given)) if grow else None

    def peak(self, part: fx.GraphModule, tokens: int) -> int:
        """Return the most bytes alive in a part with so many tokens of all sequences together in its caches."""
        return step_peak(part, self.caches, step_sizes(self.flow.root, self.sequences, -(-tokens // self.sequences)))

    def room(self, part: fx.GraphModule, limit: int, most: int) -> int:
        """Return for how many tokens a part has room, within 0.1 % and at most ``most``; -1 if for none.

        The peak is the greatest of functions that are linear in the tokens. So it lies below the line between two
        points, and where that line meets the limit there is room.
        """
        low, high = self.sequences, most
        held = {tokens: self.peak(part, tokens) for tokens in (low, high)}
        if held[high] <= limit:
            return high
        while held[low] <= limit:
            step = max(self.sequences, low // 1000)
            if low + step >= high:
                return low
            share = (limit - held[low]) / (held[high] - held[low])
            for tokens in (low + int((high - low) * share) // self.sequences * self.sequences, low + step):
                held[tokens] = self.peak(part, tokens)
                low, high = (max(low, tokens), high) if held[tokens] <= limit else (low, min(high, tokens))
        return -1
