"""The memory of a part of a decoder in one step, at any number of tokens: what everybody counts who asks for room.

Most of it grows with the tokens, not only the caches: the mask, copies of keys and values for several query heads, and
the caches of a layer before and after they have grown. Attention takes what its kernel takes on the device that the
step is planned for. A graph on ``meta`` would show the unfused kernel, which makes scores and copies of all keys.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.fx import Node

from splitkit.graph.caches import caches_of
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.node_values import hint
from splitkit.graph.storages import plain_size, symbols_of, value_of
from splitkit.hardware.device_specs import Device
from splitkit.memory.kernels.target_kernels import TargetKernels
from splitkit.memory.profile import simulate_memory
from splitkit.prices import kernels_of
from splitkit.solvers.most_fitting import MOST_TOKENS, most_fitting

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


def step_kernels(costs: object) -> str:
    """Return the kernels that a step runs: of the device that costs are for, else of the usual one.

    The device on which the graph was captured does not matter.
    """
    return kernels_of(costs) or Device.kernels


def step_peak(
    part: fx.GraphModule, caches: Collection[str], sizes: Mapping[str, int], kernels: str | None = None
) -> int:
    """Return the most bytes alive while a part runs a step: weights, caches, and what it receives and computes.

    All that it receives is counted to the end of the step.

    Args:
        part: the graph of the part.
        caches: the names of the inputs that are caches, of which the part gives up the old ones.
        sizes: symbol -> size.
        kernels: as `step_kernels` says.
    """
    known = {str(symbol) for node in part.graph.nodes for symbol in symbols_of(node.meta.get("val"))}
    with TargetKernels(kernels):
        run = simulate_memory(part, keep_inputs=False, sizes={name: n for name, n in sizes.items() if name in known})
    given = [node for node in part.graph.find_nodes(op="placeholder") if node.name not in caches]
    return run.peak + sum(_bytes(node, sizes) for node in given)


def _bytes(node: Node, sizes: Mapping[str, int]) -> int:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0
    return math.prod(plain_size(n, sizes) for n in value.shape) * value.dtype.itemsize


def weights_of(part: fx.GraphModule) -> int:
    """Return the bytes of the weights of a part, tied ones once."""
    return sum({id(tensor): tensor.nbytes for tensor in (*part.parameters(), *part.buffers())}.values())


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
    """Steps of a captured decoder, with any number of tokens in the caches.

    Attributes:
        flow: facts about the graph.
        sequences: the sequences, as many as in the capture.
        caches: the names of the inputs that are caches.
        chunk: the most new tokens of a step, of all sequences together, but at least one of each.
        kernels: the kernels that run.
    """

    flow: Dataflow
    sequences: int
    caches: frozenset[str]
    chunk: int
    kernels: str | None
    _peaks: dict[tuple[fx.GraphModule, int], int] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, flow: Dataflow, costs: object, chunk: int) -> DecoderSteps | None:
        """Return the steps of a graph; ``None`` if it takes no cache that may have any length."""
        given = [cache.given for cache in caches_of(flow.root)]
        values = [value for node in given if isinstance(value := value_of(node), torch.Tensor)]
        grow = [value for value in values if any(map(symbols_of, value.shape[1:]))]
        if not grow:
            return None
        names, kernels = frozenset(node.name for node in given), step_kernels(costs)
        return cls(flow, hint(grow[0].shape[0]), names, chunk, kernels)

    def peak(self, part: fx.GraphModule, tokens: int) -> int:
        """Return the most bytes alive in a part with so many tokens of all sequences together in its caches."""
        each = -(-tokens // self.sequences)
        if (part, each) not in self._peaks:
            query = min(each, max(1, self.chunk // self.sequences))
            sizes = step_sizes(self.flow.root, self.sequences, each, query)
            self._peaks[part, each] = step_peak(part, self.caches, sizes, self.kernels)
        return self._peaks[part, each]

    def peaks(self, parts: Iterable[Collection[Node]], tokens: int) -> list[int]:
        """Return `peak` of the graph of each of some sets of nodes."""
        return [self.peak(graph_of_nodes(self.flow, nodes), tokens) for nodes in parts]

    def room(self, part: fx.GraphModule, limit: int, most: int) -> int:
        """Return for how many tokens, the same of each sequence, a part has room, at most ``most``; -1 if for none.

        With one token more of each sequence, its peak is above the limit.
        """

        def peak(each: int) -> int:
            return self.peak(part, each * self.sequences)

        def between(low: int, high: int) -> int:
            return low + (high - low) * (limit - peak(low)) // (peak(high) - peak(low))

        longest = min(most // self.sequences, MOST_TOKENS)
        if longest and peak(longest) <= limit:
            return longest * self.sequences
        found = most_fitting(lambda each: peak(each) <= limit, between, longest) if longest else 0
        return found * self.sequences or -1
