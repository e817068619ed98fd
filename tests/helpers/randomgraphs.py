"""Draw random graphs and random plans from one function, so that hypothesis can shrink them and a loop can run them.

A graph grows op by op. Each graph uses a few random kinds of ops (swarm testing: Groce et al., ISSTA 2012), so that ops
of one kind meet more often than if every graph drew from all kinds.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from opaquecode import Hidden, Meter, Rebinding, meter_from, random_array, unsettle, wrap
from torch import fx, nn
from torch._functorch import vmap
from torch.fx import Node
from visiblestate import Divided, enter_level, exit_level, observe

from splitkit import _torch
from splitkit.graph import ambient as states
from splitkit.graph.dataflow import Dataflow
from splitkit.plans.parts import PARENT, PartKey
from splitkit.plans.record import Plan
from splitkit.plans.rewrite import prune, refine, rematerialize

Choose = Callable[[int], int]
"""``choose(n)`` returns a number from 0 to n - 1; small numbers stand for simple cases."""

SIZE = 8

HIDDEN = ("read", "write", "lend")

_SETTINGS: tuple[tuple[states.Setting, tuple[Any, Any]], ...] = (
    (states.FORWARD_GRAD, (False, True)),
    (states.HOOKS, ("no hooks", None)),
    (states.DETERMINISTIC, ((True, True), (False, False))),
)
"""Settings other than the grad mode, with two values each."""


class _Root(nn.Module):
    """The root of random graphs: a tied weight with two names, a buffer, and modules with state and randomness."""

    def __init__(self, exotic: bool) -> None:
        super().__init__()
        if exotic:
            self.leaf = Rebinding(SIZE)
            self.paths = nn.ModuleDict({"again": Rebinding(SIZE, self.leaf)})
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE) / 3)
        self.tied = nn.Module()
        self.tied.weight = self.weight
        self.register_buffer("state", torch.randn(SIZE, SIZE))
        for does in HIDDEN:
            self.add_module(does, Hidden([self.get_buffer("state")], does))
        self.linear = nn.Linear(SIZE, SIZE)
        self.norm = nn.BatchNorm1d(SIZE)
        self.drop = nn.Dropout(0.4)
        self.act = nn.ReLU(inplace=True)
        self.halved, self.thirds, self.same = Divided(2), Divided(3), nn.Identity()


class _Writer:
    """Appends one random op at a time; ``values`` are the square tensors so far."""

    def __init__(self, choose: Choose, opaque: bool, exotic: bool) -> None:
        self.choose = choose
        self.opaque, self.exotic = opaque, exotic
        self.graph = fx.Graph()
        self.values = [self.graph.placeholder(name) for name in ("x", "y")]
        if opaque:  # what opaque code returns may then be known to be an input
            for value in self.values:
                value.meta["val"] = torch.empty(SIZE, SIZE, device="meta")
        if exotic:
            self.meters = [self.graph.placeholder("meter", Meter if choose(4) else None)]
            self.array = self.graph.placeholder("array", np.ndarray if choose(2) else None)
        self.regions: list[tuple[Any, Node]] = []  # (op that closes it, handle) of each open region
        self.hooks = 0  # number of open pairs of saved-tensor hooks
        self.menu = self.swarm()
        # Overlapping regions leave the level changed; a region around the graph restores it for the next run.
        self.around = self.call(enter_level, 0) if self.region in self.menu else None

    def value(self) -> Node:
        """Choose one of the last six values; 0 is the most recent."""
        return self.values[-1 - self.choose(min(len(self.values), 6))]

    def op(self) -> None:
        """Append one op."""
        self.menu[self.choose(len(self.menu))]()

    def swarm(self) -> list[Callable[[], None]]:
        """Return the plain ops and a few kinds of special ops, which this graph is made of."""
        special = [
            self.attribute, self.view, self.chunk, self.inplace, self.inplace_method, self.write_part,
            self.write_state, self.random, self.module, self.autocast, self.grad_mode, self.inference,
            self.region, self.setting, self.saved_hooks, self.observe, self.number, self.size,
        ]  # fmt: skip
        if self.opaque:
            special += [self.hidden, self.fresh, self.vmapped]
        if self.exotic:
            special = [
                *(
                    self.leaf,
                    self.leaf,
                    self.unsettle,
                    self.meter,
                    self.meter,
                    self.new_meter,
                    self.arrays,
                    self.wrapped,
                ),
                *(
                    self.attribute,
                    self.view,
                    self.reference,
                    self.reference,
                    self.chunk,
                    self.inplace_method,
                ),
                *(self.write_part, self.observe, self.random),
            ]
        picked = [special[self.choose(len(special))] for _ in range(1 + self.choose(6))]
        return [self.unary, self.binary, self.product, *picked]

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return self.graph.call_function(target, args, kwargs)

    def add(self, target: Any, *args: Any, **kwargs: Any) -> None:
        self.values.append(self.call(target, *args, **kwargs))

    def unary(self) -> None:
        self.add((torch.sin, torch.tanh, torch.sigmoid, F.gelu)[self.choose(4)], self.value())

    def binary(self) -> None:
        targets = (torch.add, torch.mul, operator.sub, torch.ops.aten.maximum.default)
        self.add(targets[self.choose(4)], self.value(), self.value())

    def product(self) -> None:
        weight = self.graph.get_attr(("weight", "tied.weight")[self.choose(2)])
        self.add(torch.mm, self.graph.call_method("float", (self.value(),)), weight)

    def attribute(self) -> None:
        self.values.append(self.graph.get_attr("state"))

    def view(self) -> None:
        kind = self.choose(3)
        if kind == 0:
            self.values.append(self.graph.call_method("t", (self.value(),)))
        elif kind == 1:
            self.values.append(self.graph.call_method("view", (self.call(torch.clone, self.value()), SIZE, SIZE)))
        else:
            self.add(torch.ops.aten.detach.default, self.value())

    def chunk(self) -> None:
        parts = self.call(torch.chunk, self.value(), 2, 1)
        first, second = self.call(operator.getitem, parts, 0), self.call(operator.getitem, parts, 1)
        if self.choose(2):
            self.call(torch.ops.aten.mul_.Scalar, first, 0.5)
        self.add(torch.cat, [second, first], 1)

    def inplace(self) -> None:
        targets = (torch.ops.aten.add_.Tensor, operator.iadd, torch.ops.aten.copy_.default)
        self.add(targets[self.choose(3)], self.value(), self.value())

    def inplace_method(self) -> None:
        name = ("sin_", "tanh_", "neg_")[self.choose(3)]
        self.values.append(self.graph.call_method(name, (self.value(),)))

    def write_part(self) -> None:
        row = self.call(torch.select, self.value(), 0, self.choose(SIZE))
        if self.choose(2):
            self.graph.call_method("fill_", (row, 0.25))
        else:
            self.call(operator.setitem, self.value(), 0, row)

    def write_state(self) -> None:
        state = self.graph.get_attr("state")
        self.graph.call_method("add_", (state, self.call(torch.detach, self.call(torch.sin, self.value()))))

    def number(self) -> None:
        """Append a float read from memory that may be written to before or after."""
        row = self.call(torch.select, self.value(), 0, self.choose(SIZE))
        number = self.graph.call_method("item", (self.call(torch.select, row, 0, 0),))
        number.meta["val"] = 0.5
        self.add(torch.mul, self.value(), number)

    def size(self) -> None:
        size = self.graph.call_method("size", (self.value(),))
        self.values.append(self.graph.call_method("expand", (self.value(), size)))

    def hidden(self) -> None:
        """Append opaque code that reaches a buffer without its arguments."""
        name = HIDDEN[self.choose(len(HIDDEN))]
        self.values.append(self.graph.call_module(name, (self.graph.call_method("float", (self.value(),)),)))
        self.add(torch.mul, self.value(), self.graph.get_attr("state"))

    def vmapped(self) -> None:
        """Append ops on the rows of a tensor under ``vmap``, perhaps with a write to the tensor."""
        self.call(_torch.OPEN_VMAP[1], SIZE, "error")
        row = self.call(vmap._add_batch_dim, self.value(), 0, 1)
        if self.choose(2):
            self.graph.call_method("mul_", (row, 0.5))
        made = self.call(torch.cumsum, row, 0)
        self.add(vmap._remove_batch_dim, made, 1, SIZE, self.choose(2))
        self.call(_torch.CLOSE_VMAP[1])

    def leaf(self) -> None:
        """Append a leaf module that rebinds a buffer, perhaps with reads before and after."""
        value = self.graph.call_method("float", (self.value(),))
        if self.choose(2):
            self.values.append(self.graph.get_attr("leaf.state"))
        self.values.append(self.graph.call_module(("leaf", "paths.again")[self.choose(2)], (value,)))
        if self.choose(2):
            self.values.append(self.graph.get_attr("leaf.state"))

    def unsettle(self) -> None:
        self.add(unsettle, self.value())
        self.observe()

    def meter(self) -> None:
        """Append a method of an object that is named like a method of a tensor."""
        meter = self.meters[self.choose(len(self.meters))]
        self.values.append(self.graph.call_method(("add", "mul")[self.choose(2)], (meter, self.value())))

    def new_meter(self) -> None:
        self.meters.append(self.call(meter_from, self.value()))
        self.meter()

    def arrays(self) -> None:
        """Append NumPy methods that write in place, and a tensor that shares the memory of an array."""
        kind = self.choose(3)
        if kind == 0:
            self.graph.call_method("cumsum", (self.array, 0, None, self.array))
        elif kind == 1:
            self.graph.call_method("sort", (self.array,))
        self.add(torch.add, self.call(torch.from_numpy, self.array), self.value())

    def wrapped(self) -> None:
        """Append a write through a wrapper subclass to the memory of the tensor that it holds."""
        held = self.call(wrap, self.value())
        if self.choose(2):
            self.graph.call_method("neg_", (held,))
        self.add(torch.mul, self.value(), self.call(getattr, held, "held"))

    def reference(self) -> None:
        """Append a view of any kind, perhaps with writes before and after."""
        value, kind = self.value(), self.choose(5)
        if self.choose(2):
            self.graph.call_method("mul_", (value, 1.5))
        if kind == 0:
            made = self.graph.call_method("squeeze", (self.graph.call_method("unsqueeze", (value, 0)), 0))
        elif kind == 1:
            made = self.call(torch.transpose, value, 0, 1)
        elif kind == 2:
            made = self.call(operator.getitem, self.call(torch.sin, value), slice(None))
        elif kind == 3:
            made = self.call(torch.ops.aten.permute.default, value, [1, 0])
        else:
            made = self.graph.call_method("narrow", (value, 0, 0, SIZE))
        if self.choose(2):
            self.graph.call_method("neg_", (value,))
        self.add(torch.add, made, self.value())

    def fresh(self) -> None:
        """Append a tensor with the size of another, whose memory may be written to before or after."""
        made = self.call((torch.zeros_like, torch.rand_like)[self.choose(2)], self.value())
        self.graph.call_method("add_", (made, 1))
        self.values.append(made)

    def random(self) -> None:
        if self.choose(2):
            self.add(F.dropout, self.value(), 0.3, True)
        else:
            self.add(torch.rand_like, self.value())

    def module(self) -> None:
        name = ("linear", "norm", "drop", "act")[self.choose(4)]
        self.values.append(self.graph.call_module(name, (self.graph.call_method("float", (self.value(),)),)))

    def autocast(self) -> None:
        args = "cpu", torch.bfloat16, not self.choose(3), None
        self.open_or_close(_torch.ENTER_AUTOCAST, _torch.EXIT_AUTOCAST, *args)

    def region(self) -> None:
        """Open or close a registered region or a profiler region, which may overlap others."""
        if self.choose(2):
            self.open_or_close(enter_level, exit_level, 1 + self.choose(3))
        else:
            self.open_or_close(_torch.ENTER_RECORD, _torch.EXIT_RECORD, "region", None)
        self.observe()

    def open_or_close(self, enter: Any, exit: Any, *args: Any) -> None:
        if self.regions and self.choose(2):  # any open region, so that regions overlap
            exit, handle = self.regions.pop(self.choose(len(self.regions)))
            self.call(exit, handle)
        else:
            self.regions.append((exit, self.call(enter, *args)))

    def observe(self) -> None:
        """Append a value that depends on the ambient state."""
        self.add(observe, self.value())

    def setting(self) -> None:
        """Overwrite one of the other settings, for good or for one op only."""
        setting, values = _SETTINGS[self.choose(len(_SETTINGS))]
        if setting is states.HOOKS and self.hooks:
            return  # torch refuses to forbid hooks while some are set
        keep = self.choose(2)
        before = None if keep else self.call(setting.get)
        target, args, kwargs = setting.write(values[self.choose(2)])
        self.call(target, *args, **kwargs)
        self.observe()
        if before is not None:
            self.call(setting.set, before)
            self.observe()

    def saved_hooks(self) -> None:
        """Open or close hooks that divide saved tensors by two or three, so that gradients show them."""
        if self.hooks and self.choose(2):
            self.hooks -= 1
            self.call(_torch.POP_HOOKS)
        else:
            self.hooks += 1
            self.call(_torch.ALLOW_HOOKS)
            pack = self.graph.get_attr(("halved", "thirds")[self.choose(2)])
            self.call(_torch.PUSH_HOOKS, pack, self.graph.get_attr("same"))
        self.unary()

    def grad_mode(self) -> None:
        if self.choose(2):
            self.call(_torch.SET_GRAD, bool(self.choose(2)))
        else:
            before = self.call(torch.is_grad_enabled)
            self.call(_torch.SET_GRAD, False)
            self.unary()
            self.call(_torch.SET_GRAD, before)

    def inference(self) -> None:
        """Append an inference-mode region, which closes at once; its value is cloned, since other ops cannot use it."""
        enter = self.call(_torch.ENTER_INFERENCE, True)
        inner = self.call(torch.cos, self.value())
        if self.choose(2):
            self.call((_torch.SET_GRAD, _torch.SET_FWD_GRAD)[self.choose(2)], bool(self.choose(2)))
            inner = self.call(observe, inner)
        self.call(_torch.EXIT_INFERENCE, enter)
        self.add(torch.clone, inner)
        self.observe()

    def totals(self) -> list[Node]:
        """Return values that show the final state of objects, arrays and buffers."""
        x = self.graph.call_method("float", (self.values[-1],))
        told = [self.graph.call_method("mul", (meter, x)) for meter in self.meters[:2]]
        return [*told, self.call(torch.from_numpy, self.array), self.graph.get_attr("leaf.state")]

    def finish(self) -> fx.Graph:
        if self.exotic:
            self.values += [self.call(torch.mul, meter_total, 1) for meter_total in self.totals()]
        while self.regions:
            exit, handle = self.regions.pop()
            self.call(exit, handle)
        if self.around is not None:
            self.call(exit_level, self.around)
        for _ in range(self.hooks):
            self.call(_torch.POP_HOOKS)
        if self.choose(4):  # else the graph may end in another state than it began in
            self.call(_torch.SET_GRAD, True)
            self.call(_torch.ALLOW_HOOKS)
        if self.hidden in self.menu:  # else no part of a split would read the buffer that they hold
            self.add(torch.clone, self.graph.get_attr("state"))
        picked = dict.fromkeys(self.value() for _ in range(1 + self.choose(3)))
        last = self.values[-4:] if self.exotic else self.values[-1:]
        self.graph.output((*last, *picked))
        return self.graph


def random_graph(choose: Choose, length: int = 20, seed: int = 0) -> fx.GraphModule:
    """Return a random graph of about ``length`` ops over two square inputs.

    Graphs have views, writes through views, buffers, tied weights, random ops, tuples, modules with state, regions and
    settings of every kind, and ops whose values show the ambient state.

    Seeds 0, 4, 8 ... have opaque code and new tensors as well. Other seeds do not, since opaque code leaves little
    freedom of order in which a wrong one could show. Seeds 3, 7, 11 ... (`is_exotic`) have objects and arrays among
    their inputs, leaf modules that rebind buffers, code that changes the default dtype, wrapper subclasses, and more
    views. Autograd refuses some graphs in backward because a saved value was overwritten; these run without gradients
    (`fuzzing.usable_inputs`).
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        root = _Root(is_exotic(seed))
    writer = _Writer(choose, opaque=seed % 4 == 0, exotic=is_exotic(seed))
    for _ in range(length):
        writer.op()
    return fx.GraphModule(root, writer.finish())


def is_exotic(seed: int) -> bool:
    """Return whether `random_graph` of this seed takes an object and an array besides two tensors."""
    return seed % 4 == 3


def random_inputs(requires_grad: bool = True, seed: int = 0) -> tuple[Any, ...]:
    """Return inputs for `random_graph` of the same seed."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(SIZE, SIZE, generator=generator) for _ in range(2))
    others = (Meter(), random_array(SIZE, seed)) if is_exotic(seed) else ()
    return x.requires_grad_(requires_grad), y, *others


def random_plan(flow: Dataflow, choose: Choose) -> Plan:
    """Return a random plan with raw, refined or consecutive labels, perhaps with copies and nodes in the parent.

    Raw labels and copies may be illegal: the engine must refuse such plans and never run them wrongly.
    """
    kind, labels = choose(4), 1 + choose(4)
    if kind == 0:
        cuts = sorted(choose(len(flow.nodes) + 1) for _ in range(labels - 1))
        label: dict[Node, PartKey] = {n: sum(i >= c for c in cuts) for i, n in enumerate(flow.nodes)}
    else:
        label = {n: choose(labels) for n in flow.nodes}
    if choose(3) == 2:
        label = {n: PARENT if choose(5) == 4 else key for n, key in label.items()}
    plan = Plan.of(label)
    if kind == 2:
        plan = refine(flow, _copied(flow, plan, choose))
    elif kind == 1:
        plan = refine(flow, plan)
    if choose(2):
        plan = _copied(flow, plan, choose)
    if flow.nodes and choose(8) == 7:  # any node, also one that may run only once
        node, keys = flow.nodes[choose(len(flow.nodes))], [*plan.parts, 99]
        plan = plan.place({node: tuple(dict.fromkeys([*plan[node], keys[choose(len(keys))]]))})
    return prune(flow, plan) if choose(4) == 3 else plan


def _copied(flow: Dataflow, plan: Plan, choose: Choose) -> Plan:
    parts = list(plan.parts)
    for _ in range(min(len(parts), 1 + choose(2))):
        keep = [n for n in flow.nodes if choose(2)]
        plan = rematerialize(flow, plan, parts[choose(len(parts))], keep)
    return plan
