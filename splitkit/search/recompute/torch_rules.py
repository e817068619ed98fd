"""The recompute rules of torch's own partitioner, and its weights of saved values, for comparison."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch.fx import Node

from splitkit._torch import OpOverload
from splitkit.graph.byte_sizes import value_bytes
from splitkit.training.choices import Savings, required_by_forward

Floats = NDArray[np.float64]
Bans = dict[Node, str]

_CHEAP = """
add sub div atan2 mul max min pow remainder fmod __and__ __or__ __xor__ __lshift__ __rshift__ eq ne ge gt le lt abs
bitwise_not ceil floor frac neg relu round silu trunc log log10 log1p log2 lgamma exp expm1 erf erfc cos acos cosh
sin asin sinh tan atan tanh atanh sqrt rsqrt reciprocal sigmoid softplus threshold threshold_backward clamp where
lerp addcmul gelu gelu_backward sum mean _grad_sum_to_size sum_to_size amax to type_as squeeze unsqueeze rsub
_to_copy alias view slice t broadcast_in_dim expand as_strided permute select split convert_element_type
prepare_softmax_online clone full_like var std _unsafe_view reshape broadcast_tensors scalar_tensor ones new_zeros
lift_fresh lift_fresh_copy arange triu var_mean isinf any full zeros empty empty_like argmax maximum iota
_low_memory_max_pool_offsets_to_indices index gather zeros_like
"""
_OF_VIEWS = "squeeze unsqueeze alias view slice t broadcast_in_dim expand as_strided permute select split"
_LISTED, _VIEWS = frozenset(_CHEAP.split()), frozenset(_OF_VIEWS.split())
_RANDOM = frozenset(("native_dropout", "rand_like", "randn_like"))
_FAR = 100  # distances from backward count up to here
_SMALLER = 4  # a result that many times smaller than what was read is a reduction


def functorch_rules(problem: Savings) -> tuple[Bans, Floats]:
    """Mark the ops of a list as free to recompute and ban all others; a storage weighs its bytes.

    These are the rules of functorch 0.2 (2022), except that inputs are free to save and views are what `Savings` says.
    """
    bans = {op: "it is not in the list of ops that may be computed again" for op in problem.ops if not _is_listed(op)}
    return bans, problem.nbytes.astype(np.float64)


def torch_rules(problem: Savings) -> tuple[Bans, Floats]:
    """Apply the heuristics of torch 2.13's default partitioner, as far as they concern ordinary graphs.

    It bans ops that are not in its list; results that a kernel of backward has to read from memory anyway;
    reductions; and ops that fuse with one far up, above an op that fuses with nothing. A storage weighs its bytes,
    times 1.1 for each step between its value and backward, times 2 if forward would not otherwise write it to memory.
    Its bounds of a hundred and a thousand nodes on the length of chains are left out.
    """
    forward = _Forward(problem)
    bans, _ = functorch_rules(problem)
    for op, late in zip(problem.ops, problem.late, strict=True):
        if late or op in bans or _is_view(op):
            continue
        if forward.is_read_in_backward(op):
            bans[op] = "a kernel of backward reads it from memory"
        elif value_bytes(op) * _SMALLER < sum(map(value_bytes, op.all_input_nodes)):
            bans[op] = "it reduces what it reads"
    for op in forward.used_far_apart():
        bans.setdefault(op, "it fuses only with what is far from it")
    return bans, forward.weights()


class _Forward:
    """What torch asks about the nodes that forward needs for its own outputs."""

    def __init__(self, problem: Savings) -> None:
        self.problem, flow = problem, problem.flow
        needed = required_by_forward(flow)
        self.nodes = [n for n in flow.index if n.op == "placeholder" or flow.producer(n) in needed]
        self.order = {n: i for i, n in enumerate(self.nodes)}

    def is_read_in_backward(self, node: Node) -> bool:
        """Return whether a node of backward reads ``node``, or a view of it, without fusing with it."""
        stack = [node]
        while stack:
            read = stack.pop()
            for user in read.users:
                if user not in self.order and user.op != "output" and not _fuses(read, user):
                    return True
                stack += [user] if _is_view(user) else []
        return False

    def used_far_apart(self) -> Iterator[Node]:
        """Return the readers of a value that are farther down than the first unfusible node below it."""
        for node in self.nodes:
            users = [user for user in node.users if user in self.order]
            if len(users) > 1:
                limit = self._first_unfused(users, max(self.order[user] for user in users))
                yield from (u for u in users if self.order[u] > limit and _fuses(node, u) and not _is_view(u))

    def _first_unfused(self, starts: list[Node], limit: int) -> int:
        queue = [(self.order[n], True) for n in starts]
        heapq.heapify(queue)
        seen = set(queue)
        while queue:
            position, fuses = heapq.heappop(queue)
            if not fuses:
                return position
            node = self.nodes[position]
            for user in node.users:
                item = (self.order.get(user, limit + 1), _fuses(node, user))
                if item[0] <= limit and item not in seen:
                    seen.add(item)
                    heapq.heappush(queue, item)
        return limit

    def weights(self) -> Floats:
        """Return (k,) the weight of saving each storage."""
        problem, far = self.problem, self._distances()
        weights = problem.nbytes.astype(np.float64)
        for value, storage, savable in zip(problem.values, problem.storage, problem.savable, strict=True):
            if savable:
                weights[storage] = problem.nbytes[storage] * 1.1 ** max(min(far.get(value, 0), _FAR), 1)
                weights[storage] *= 1 if any(not _fuses(value, user) for user in value.users) else 2
        return weights

    def _distances(self) -> dict[Node, int]:
        """Return forward's nodes with the fewest steps from each to a node of backward."""
        found: dict[Node, int] = {}
        for node in reversed(self.nodes):
            steps = (found.get(user, 0) + 1 for user in node.users if user.op != "output")
            found[node] = min(steps, default=_FAR)
        return found


def _name(node: Node) -> str:
    """Return ``"add"`` for every overload of ``aten.add``, and for ``+`` of sizes."""
    target = node.target.overloadpacket if isinstance(node.target, OpOverload) else node.target
    return str(getattr(target, "__name__", target))


def _is_listed(node: Node) -> bool:
    pointwise = isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags
    return pointwise or node.target is operator.getitem or _name(node) in _LISTED


def _fuses(read: Node, reader: Node) -> bool:
    return _name(reader) == "cat" or all(_is_listed(n) or _name(n) in _RANDOM for n in (read, reader))


def _is_view(node: Node) -> bool:
    return node.target is operator.getitem or _name(node) in _VIEWS
