"""Rules, random graphs and comparisons that the tests beside torch's CapabilityBasedPartitioner share."""

from __future__ import annotations

import copy
import inspect
import operator
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.fx import Node
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner as TorchPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

import splitkit as sk

AS_IN_2_13 = "skip_horizontal_fusion" in inspect.signature(TorchPartitioner).parameters and not hasattr(
    TorchPartitioner, "_finalize_partitions"
)
"""Whether torch divides as in 2.13; 2.11 may make cycles, and later versions number and divide otherwise."""

PARTITIONERS = {"torch": TorchPartitioner, "splitkit": sk.CapabilityBasedPartitioner}


class Rule(OperatorSupportBase):
    """Supports the calls that a function of a node says; ``every`` asks it of inputs, attributes and the output too."""

    def __init__(self, supports: Callable[[Node], Any], every: bool = False) -> None:
        self.supports, self.every = supports, every

    def is_node_supported(self, submodules, node):
        return (self.every or node.op.startswith("call_")) and bool(self.supports(node))


def some(seed: int, share: float) -> Callable[[Node], bool]:
    """A rule that supports a share of the nodes, by their names."""
    return lambda node: node.op not in ("placeholder", "output") and random.Random(f"{seed} {node}").random() < share


def listed(partitions) -> list[tuple[int, list[tuple[str, int | None]]]]:
    """Ids, and nodes with their places, in their order."""
    return [(p.id, [(node.name, place) for node, place in p.nodes.items()]) for p in partitions]


def names(partitions) -> list[list[str]]:
    return [[node.name for node in p.nodes] for p in partitions]


class Parts:
    """What both partitioners make of copies of one graph: their partitions, and the graph that each fused."""

    def __init__(self, gm: fx.GraphModule, rule: OperatorSupportBase, **options: Any) -> None:
        options = {"allows_single_node_partition": True, **options}
        self.proposed, self.fused = {}, {}
        for name, kind in PARTITIONERS.items():
            copied = copy.deepcopy(gm)
            partitioner = kind(copied, rule, **options)
            partitions = partitioner.propose_partitions()
            self.proposed[name] = names(partitions)
            self.fused[name] = partitioner.fuse_partitions(partitions)


def state_of(gm: nn.Module, name: str) -> torch.Tensor | None:
    """A parameter or buffer, also if only a fused module still reads it."""
    held = [*gm.named_parameters(remove_duplicate=False), *gm.named_buffers(remove_duplicate=False)]
    return next((t for key, t in held if key == name or key.endswith(f".{name}")), None)


def run(gm: fx.GraphModule, inputs, state: tuple[str, ...] = ("state",)):
    """Outputs, inputs and state after a call from one seed; which outputs require grad; gradients; the grad mode."""
    gm, inputs = copy.deepcopy(gm), copy.deepcopy(inputs)
    torch.manual_seed(0)
    try:
        outputs = gm(*inputs)
        mode = torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    values = [*outputs, *inputs, *(state_of(gm, name) for name in state)]
    return values, [o.requires_grad for o in outputs], _gradients(gm, outputs), mode


def _gradients(gm, outputs):
    if not (roots := [o for o in outputs if o.requires_grad]):
        return []
    try:
        sum(o.float().sum() for o in roots).backward()
    except RuntimeError:  # what backward needs has been written
        return ["no backward"]
    parameters = (state_of(gm, name) for name in ("w", "linear.weight"))
    return [p.grad for p in parameters if p is not None]


def same(one: fx.GraphModule, other: fx.GraphModule, inputs) -> bool:
    """Whether two graphs do the same; gradients may be summed in another order."""
    (values, needs, gradients, mode), (values2, needs2, gradients2, mode2) = run(one, inputs), run(other, inputs)
    return (
        (needs, mode) == (needs2, mode2)
        and all(_equal(a, b) for a, b in zip(values, values2, strict=True))
        and all(_equal(a, b, 1e-4) for a, b in zip(gradients, gradients2, strict=True))
    )


def _equal(a, b, tolerance: float = 0.0) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and a == b
    return a.dtype == b.dtype and torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


class RandomGraph:
    """A graph of 4 x 4 tensors: pure calls, and with ``effects`` also writes, views, random numbers and regions."""

    def __init__(self, seed: int, effects: bool) -> None:
        self.dice, self.graph = random.Random(seed), fx.Graph()
        self.values = [self.graph.placeholder(f"x{i}") for i in range(3)]
        self.opened: list[Node] = []
        self.root = nn.Module()
        self.root.w, self.root.linear = nn.Parameter(torch.ones(4, 4)), nn.Linear(4, 4)
        self.root.register_buffer("state", torch.ones(4, 4))
        kinds = [self.one, self.one, self.two, self.attribute, self.module, self.method, self.members]
        kinds += [
            self.write,
            self.write_state,
            self.read_state,
            self.view,
            self.random,
            self.region,
            self.grad,
        ] * effects
        for _ in range(self.dice.randint(5, 30)):
            self.dice.choice(kinds)()
        while self.opened:
            self.graph.call_function(torch.amp._exit_autocast, (self.opened.pop(),))
        self.graph.output(tuple(self.dice.sample(self.values, min(4, len(self.values)))))
        self.module_ = fx.GraphModule(self.root, self.graph)

    def value(self) -> Node:
        return self.dice.choice(self.values[-8:])

    def call(self, target, *args, **kwargs) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        self.values.append(node)
        return node

    def one(self):
        self.call(self.dice.choice((torch.sin, torch.cos, torch.tanh)), self.value())

    def two(self):
        self.call(self.dice.choice((torch.add, torch.mm)), self.value(), self.value())

    def attribute(self):
        self.call(torch.add, self.value(), self.graph.get_attr("w"))

    def module(self):
        self.values.append(self.graph.call_module("linear", (self.value(),)))

    def method(self):
        self.values.append(self.graph.call_method("sin", (self.value(),)))

    def members(self):
        both = self.graph.call_function(torch.cat, ([self.value(), self.value()],))
        made = self.graph.call_function(torch.chunk, (both, 2))
        self.values += [self.graph.call_function(operator.getitem, (made, i)) for i in (0, 1)]

    def write(self):
        self.graph.call_method("add_", (self.value(), 1.0))

    def write_state(self):
        self.graph.call_method("add_", (self.graph.get_attr("state"), self.value()))

    def read_state(self):
        self.call(torch.add, self.graph.get_attr("state"), self.value())

    def view(self):
        self.values.append(self.graph.call_method("t", (self.value(),)))

    def random(self):
        self.call(torch.rand_like, self.value())

    def region(self):
        if self.opened and self.dice.random() < 0.6:
            self.graph.call_function(torch.amp._exit_autocast, (self.opened.pop(),))
        else:
            arguments = ("cpu", torch.bfloat16, True, None)
            self.opened.append(self.graph.call_function(torch.amp._enter_autocast, arguments))

    def grad(self):
        self.graph.call_function(torch._C._set_grad_enabled, (self.dice.random() < 0.6,))


def random_graph(seed: int, effects: bool = False) -> fx.GraphModule:
    return RandomGraph(seed, effects).module_


def inputs_for(gm: fx.GraphModule) -> list[torch.Tensor]:
    count = sum(n.op == "placeholder" for n in gm.graph.nodes)
    return [torch.rand(4, 4) for _ in range(count)]


def runs(gm: fx.GraphModule, inputs) -> bool:
    """Whether torch runs the graph: some random writes are not allowed, such as into one view of several."""
    try:
        run(gm, inputs)
    except RuntimeError:
        return False
    return True
