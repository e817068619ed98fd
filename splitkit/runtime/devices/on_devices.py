"""Runs a split in one process, with each part on its own device."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.fx import Node

from splitkit import _torch
from splitkit._torch import attributes_of
from splitkit.engine.codegen.part_modules import Tied, carry_hooks
from splitkit.engine.overlap_checks import rename_checked_attributes
from splitkit.engine.split import Split
from splitkit.errors import PipelineError
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.scope import is_state_op
from splitkit.graph.shared_memory import GIVEN, Classes
from splitkit.graph.storages import attribute
from splitkit.plans.parts import PARENT, PartKey
from splitkit.runtime.devices.accelerators import (
    CopyStreams,
    Receive,
    Release,
    RequireDevice,
    Send,
    current,
    move_tensors,
    same_device,
)
from splitkit.runtime.devices.device_map import (
    DevicePlaces,
    Devices,
    captured_types,
    devices_of,
    graph_on_device,
    names_devices,
    places_of,
    rewrite_devices,
    stays,
)
from splitkit.runtime.parent import values_of


def to_devices(split: Split, devices: Devices = None) -> OnDevices:
    """Put each part of a split on its device. The result runs and trains like the graph that was split.

    Parameters and buffers are moved, as by ``nn.Module.to``: the split, its graph and the model share them, and nothing
    is held twice. Therefore only the result can be called afterwards (or the split, after everything is moved back).
    Existing optimizers keep working. A parameter that parts on several devices read (a tied weight) stays a single
    parameter, on the device that reads it first; each call copies it to the others, so that autograd sums its
    gradients.

    A value is copied once to each other device that reads it, on CUDA concurrently with computation. Outputs stay on
    the devices of the parts that compute them. Inputs may be on any device, except that an input which the graph writes
    must be on the device that writes it. Hard-coded ``device=`` arguments in the captured graph, and autocast regions
    for the captured device, follow the part. Each device has its own RNG state, which ``torch.manual_seed`` seeds.

    Args:
        split: from `splitkit.split`.
        devices: part -> device, or devices in the order of the parts, or one for all; by default the devices in the
            plan (`Part`). An op that is in no part runs on the device of the first value that it reads.

    Raises:
        PipelineError: SK807 for a part without a device, or a module that is called on several; SK808 for memory that
            is written and would be on several devices. Nothing is moved then.

    Copies use streams as torchgpipe does (Kim et al., "torchgpipe: On-the-fly pipeline parallelism for training giant
    models", 2020).
    """
    if not isinstance(split, Split):
        raise PipelineError(
            "SK807",
            f"to_devices was given a {type(split).__name__}, which is not a split",
            "Split the graph in this process; splitkit.load(split, folder, devices) reads the weights from files.",
        )
    return OnDevices(split, devices)


class OnDevices(Tied):
    """See `to_devices`. Parameters and buffers keep their names in the graph that was split.

    Attributes:
        parent: the graph that calls the parts and copies values between their devices.
        part_devices: part -> its device, in the order of execution.
        moves: the copies of each call.
    """

    parent: fx.GraphModule

    def __init__(self, split: Split, devices: Devices = None) -> None:
        super().__init__()
        places = places_of(split, devices_of(split, devices))
        held = _take_over(self, split.flow.root)
        graphs = DeviceGraphs(split, places, held)
        # Not registered: what it holds is registered here, under its original name.
        self.__dict__["parent"] = graphs.parent()
        self.part_devices, self.moves = places.parts, tuple(graphs.moves)
        move_tensors(split.flow.root, held, places.tensors)
        self.training = split.module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; takes and returns what the graph that was split does."""
        return self.parent(*args, **kwargs)

    @property
    def code(self) -> str:
        """The Python code of a call."""
        return str(self.parent.code)

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Any:  # 2.11, 2.13, 2.15
        """Allow changes of dtype, but not of device.

        Raises:
            PipelineError: SK807 for ``to(device)``, ``cuda()`` and ``cpu()``.
        """

        def stay(tensor: torch.Tensor) -> Any:
            made = fn(tensor)
            if isinstance(made, torch.Tensor) and not same_device(made.device, tensor.device):
                raise PipelineError(
                    "SK807",
                    f"a tensor on {tensor.device} would go to {made.device}, away from the part that reads it",
                    "Call to_devices(split, ...) with other devices.",
                )
            return made

        return super()._apply(stay, recurse)


def _take_over(module: nn.Module, root: fx.GraphModule) -> nn.Module:
    """Register all that the root holds, and return a bare module with the same tables, for graphs to read from."""
    mine, its = attributes_of(module), attributes_of(root)
    mine.parameters.update(its.parameters)
    mine.buffers.update(its.buffers)
    mine.modules.update(its.modules)
    mine.unsaved.update(its.unsaved)
    held = nn.Module()
    held.__dict__.update(_parameters=mine.parameters, _buffers=mine.buffers, _modules=mine.modules)
    # constants that the graph reads from plain attributes
    read = {str(node.target).split(".")[0] for node in root.graph.find_nodes(op="get_attr")}
    held.__dict__.update({name: value for name, value in vars(root).items() if name in read})
    return held


# Builds the graphs of a split with copies between its devices.


_HELD = "whole"  # the name, in each part, of the module that holds all parameters


class Move(NamedTuple):
    """A value that is copied to another device in each call.

    Attributes:
        name: the name of the node that computes it, or of the parameter.
        source: the device of the value; ``None`` for an input, which is copied unless it is on the target already.
        target: the device to copy to.
    """

    name: str
    source: torch.device | None
    target: torch.device


def _copied(graph: fx.Graph) -> fx.Graph:
    with warnings.catch_warnings():
        # torch warns of its own LeafSpec, which it copies with the form of the inputs and outputs
        warnings.simplefilter("ignore", FutureWarning)
        return copy.deepcopy(graph)


class PartOnDevice(nn.Module):
    """A part on its device. The device is the current one while the part runs, since custom kernels launch on that."""

    def __init__(self, part: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.part, self.device = part, device

    def forward(self, *args: Any) -> Any:
        """Run the part."""
        with current(self.device):
            return self.part(*args)


class DeviceGraphs:
    """Builds the parts and their parent for given devices.

    Attributes:
        split: the split.
        places: the devices of its parts, nodes and tensors.
        captured: the device types on which the graph was captured.
        callers: the values whose memory the caller may write after a call.
        copy_streams: the streams of the copies.
        moves: the copies of each call.
    """

    def __init__(self, split: Split, places: DevicePlaces, held: nn.Module) -> None:
        self.split, self.places, self._held = split, places, held
        self.captured = captured_types(split.flow.graph, split.flow.root)
        self.copy_streams, self.callers = CopyStreams(), callers_memory(split.flow)
        self.moves: list[Move] = []
        self._foreign: dict[PartKey, list[Node]] = {}
        self.parts = {key: self._part(key) for key in split.parts}

    def parent(self) -> fx.GraphModule:
        """Return the graph that calls the parts, with the hooks of the split."""
        split = self.split
        before = split.module.graph
        graph = _copied(before)
        new = dict(zip(before.nodes, graph.nodes, strict=True))
        rename_checked_attributes(graph, lambda name: f"{_HELD}.{split.qualified_names[name]}")
        module = fx.GraphModule({}, fx.Graph())
        module.add_module(_HELD, self._held)
        originals = {copied: node for node, copied in split.copies[PARENT].items()}
        names = {name: key for key, name in split.names.items()}
        for old, node in new.items():
            device = self.places.nodes.get(old)
            if old.op in ("get_attr", "call_module") and old.target not in names:
                self._read_held(module, node, str((originals.get(old) or old).target), device)
            if old in originals and device is not None:
                rewrite_devices(node, device, self.captured)
        for name, key in names.items():
            module.add_module(name, PartOnDevice(self.parts[key], self.places.parts[key]))
        homes = {new[old]: device for old, device in self.places.nodes.items()}
        known = {new[old]: node for old, node in originals.items()}
        self._give_foreign(graph, names, homes, known)
        _MoveWriter(self, module, graph, homes, known).write()
        module.graph = graph
        module.meta = dict(_torch.meta_of(split.module))
        carry_hooks(split.module, module)
        return module

    def _part(self, key: PartKey) -> fx.GraphModule:
        """Build a part: it reads tensors on its device from the shared module, and gets others as arguments."""
        split, device = self.split, self.places.parts[key]
        before = split.parts[key].graph
        graph = _copied(before)
        new = dict(zip(before.nodes, graph.nodes, strict=True))
        originals = {copied: node for node, copied in split.copies[key].items()}
        module = fx.GraphModule({}, fx.Graph())
        module.add_module(_HELD, self._held)
        foreign: dict[str, tuple[Node, Node]] = {}
        last = next(iter(reversed(graph.find_nodes(op="placeholder"))), None)
        for old, node in new.items():
            original = originals.get(old)
            if original is not None and old.op in ("get_attr", "call_module"):
                value = attribute(split.flow.root, str(original.target))
                home = self.places.tensors.get(id(value), device)
                if old.op == "get_attr" and isinstance(value, torch.Tensor) and home != device:
                    given = foreign.get(str(original.target))
                    if given is None:
                        with graph.inserting_after(last) if last is not None else graph.inserting_before():
                            last = graph.placeholder(f"given_{node.name}")
                        last.meta = dict(node.meta)
                        foreign[str(original.target)] = given = (original, last)
                    node.replace_all_uses_with(given[1])
                    graph.erase_node(node)
                    continue
                self._read_held(module, node, str(original.target), device)
            elif old.op == "get_attr":
                self._read_held(module, node, str(old.target), device)
            rewrite_devices(node, device, self.captured)
        self._foreign[key] = [original for original, _ in foreign.values()]
        module.graph = graph
        module.training = split.parts[key].training
        return module

    def _read_held(self, module: fx.GraphModule, node: Node, target: str, device: torch.device | None) -> None:
        """Make a node read an attribute of the shared module; copy graphs with hard-coded devices."""
        value = attribute(self.split.flow.root, target)
        node.target = f"{_HELD}.{target}"
        if not isinstance(value, fx.GraphModule) or device is None or not names_devices(value, device, self.captured):
            return
        if any(True for _ in (*value.parameters(), *value.buffers())):
            raise PipelineError(
                "SK807",
                f"the graph {target} names a device and holds tensors of its own",
                "Capture by export, which gives such graphs all that they read.",
                [node],
            )
        name = target.replace(".", "_")
        module.add_module(name, graph_on_device(value, device, self.captured))
        node.target = name

    def _give_foreign(
        self, graph: fx.Graph, names: Mapping[str, PartKey], homes: dict[Node, torch.device], known: dict[Node, Node]
    ) -> None:
        """Make the parent pass tensors to the parts that read them, if other devices hold them."""
        read: dict[str, Node] = {}
        given = graph.find_nodes(op="placeholder")
        first = given[-1].next if given else next(iter(graph.nodes))
        for node in list(graph.nodes):
            call = node.op == "call_module" and node.target in names
            body = node.op == "get_attr" and node.target in names
            if not (call or body):
                continue
            for original in self._foreign[names[str(node.target)]]:
                target = str(original.target)
                if target not in read:
                    with graph.inserting_before(first):
                        made = read[target] = graph.get_attr(f"{_HELD}.{target}")
                    made.meta, known[made] = dict(original.meta), original
                    homes[made] = self.places.tensors[id(attribute(self.split.flow.root, target))]
                for caller in [node] if call else list(node.users):
                    caller.args = (*caller.args, read[target])


@dataclass
class _MoveWriter:
    """Inserts the copies into the parent's graph.

    A copy starts as soon as the value is computed, under the grad mode of that place, and is awaited before the first
    read. A value that is written is copied when it is read. At the end, the caller's streams wait for the copies of
    what the caller may write.

    Attributes:
        callers: the copies of what the caller may write.
    """

    graphs: DeviceGraphs
    module: fx.GraphModule
    graph: fx.Graph
    homes: Mapping[Node, torch.device]
    originals: Mapping[Node, Node]
    callers: list[Node] = field(default_factory=list)

    def write(self) -> None:
        order = {node: i for i, node in enumerate(self.graph.nodes)}
        made = {node: list(node.users) for node in order if node.op != "output" and not is_state_op(node)}
        originals, graphs = {**self.originals, **values_of(self.graph, self.graphs.split)}, self.graphs
        for node, users in made.items():
            source = self.homes.get(node)
            if (source is None and node.op != "placeholder") or stays(node, graphs.captured):
                continue
            readers: dict[torch.device, list[Node]] = {}
            for user in sorted(users, key=order.__getitem__):
                if user in self.homes and self.homes[user] != source:
                    readers.setdefault(self.homes[user], []).append(user)
            for target, those in readers.items():
                sent = self._move(node, source, target, those, original := originals.get(node))
                if original is None or original in graphs.callers:
                    self.callers.append(sent)
        if self.callers:
            self.module.add_module("release", Release())
            with self.graph.inserting_before(self.graph.output_node()):
                self.graph.call_module("release", tuple(self.callers))

    def _move(
        self, node: Node, source: torch.device | None, target: torch.device, readers: list[Node], original: Node | None
    ) -> Node:
        graphs, written = self.graphs, original in self.graphs.places.written.values
        home = None if original is None else graphs.places.written.homes.get(original)
        if source is None and home == target:
            module: nn.Module = RequireDevice(node.name, target)
        else:
            module = Send(source, target, graphs.copy_streams, written)
        first = readers[0]
        if written:
            place = self.graph.inserting_before(first)
            self._require_plain(first)
        else:
            after = node
            while node.op in ("placeholder", "get_attr") and after.next.op in ("placeholder", "get_attr"):
                after = after.next
            place = self.graph.inserting_after(after)
        with place:
            verb = "to_written" if written else "to"
            sent = self.graph.call_module(self._named(verb, source, target, module), (node,))
        with self.graph.inserting_before(first):
            taken = self.graph.call_module(self._named("at", None, target, Receive()), (sent,))
        taken.meta = dict(node.meta)
        for reader in readers:
            reader.replace_input_with(node, taken)
        self.graphs.moves.append(Move(original.name if original is not None else node.name, source, target))
        return sent

    def _named(self, verb: str, source: torch.device | None, target: torch.device, module: nn.Module) -> str:
        if isinstance(module, RequireDevice):
            name = f"there_{module.name}"
        else:
            ends = [target] if verb == "at" or source is None else [source, target]
            name = "_".join([verb, *(str(end).replace(":", "_") for end in ends)])
        if not hasattr(self.module, name):
            self.module.add_module(name, module)
        return name

    def _require_plain(self, reader: Node) -> None:
        """Refuse to copy a written value inside a region of the parent, which may switch gradients off."""
        original = self.originals.get(reader)
        if original is not None and self.graphs.split.flow.scope[original].grad is not None:
            raise PipelineError(
                "SK808",
                f"{reader.name} reads what is written from another device, in a region that sets the grad mode",
                "Give it a part: the parent runs it now.",
                [reader],
            )


# Finds the values whose memory the caller of a graph can write after a call.


def callers_memory(flow: Dataflow) -> frozenset[Node]:
    """Return the inputs, attributes and outputs of a graph, and all values that may share memory with one of them.

    Opaque code may keep what it was given: then these are all values.
    """
    effects = flow.effects
    if not all(effect.known for effect in effects.values()):
        return frozenset(flow.graph.nodes)
    classes = Classes()
    for node, effect in effects.items():
        for other in effect.aliases:
            classes.join(node, other)
    rest = [n for n in flow.graph.nodes if n.op in GIVEN] + flow.graph.output_node().all_input_nodes
    found = set(map(classes.find, rest))
    return frozenset(node for node in flow.graph.nodes if classes.find(node) in found)
