"""Runs the steps of a split decoder in one process, with each part and its caches on a device.

A cache is handed to its part in a box, from which the part takes it at the first use. So nobody else holds the old
tensor while the part makes the new one, and it is freed at once::

    parent:  part(hidden, box)        part:  keys = take(box); cat = cat([keys, new]); keys = None
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx

from splitkit.engine.split import Split
from splitkit.graph.storages import attribute
from splitkit.plans.parts import PartKey
from splitkit.runtime.devices.device_copies import Receive, Send
from splitkit.runtime.devices.device_graphs import Move, PartOnDevice
from splitkit.runtime.devices.device_map import Devices
from splitkit.runtime.devices.on_devices import OnDevices
from splitkit.runtime.generation.kept_caches import KeptCache, kept_caches

Box = list[torch.Tensor]
"""One tensor of a cache, until its part has taken it."""


def take(box: Box) -> torch.Tensor:
    """Take the tensor out of a box."""
    return box.pop()


class DecoderOnDevices:
    """A step of a decoder, part after part.

    Attributes:
        caches: the tensors of the caches, in the order in which a step takes and returns them.
        inputs: the names of all inputs of the graph, in their order.
        devices: part -> its device.
        tensors: the module that holds the parameters.
        moves: the copies of each step; no cache is among them.
    """

    def __init__(self, split: Split, devices: Devices = None) -> None:
        self.caches: Sequence[KeptCache] = kept_caches(split)
        self.tensors = OnDevices(split, devices)
        self.devices: Mapping[PartKey, torch.device] = self.tensors.part_devices
        self._parent = self.tensors.parent
        given, weights = (self._parent.graph.find_nodes(op=op) for op in ("placeholder", "get_attr"))
        known, constants = {cache.given for cache in self.caches}, {c.given for c in self.caches if c.constant}
        self.inputs = tuple(node.name for node in given)
        for node in given:
            if node.name in known:
                readers = _readers(self._parent, node)
                if node.name not in constants:
                    _take(self._parent, node, readers)
        for node in weights:
            _copy_once(self._parent, node)
        still = {node.name for node in split.flow.graph.find_nodes(op="get_attr")} | known
        self.moves: Sequence[Move] = tuple(move for move in self.tensors.moves if move.name not in still)
        # plain arguments and results, not the model's
        self._parent.graph.set_codegen(fx.graph.CodeGen())
        self._parent.recompile()

    def home(self, cache: KeptCache) -> torch.device:
        """Return the device on which a cache stays."""
        return self.devices[cache.part]

    @torch.no_grad()
    def step(self, inputs: Mapping[str, Any], caches: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the logits and the updated caches.

        Args:
            inputs: name of an input -> its value; inputs that are not named are ``None``.
            caches: the caches, on the devices of their parts; the list is emptied, so that old caches can be freed.
        """
        given = dict[str, Any](inputs)
        for cache in self.caches:
            tensor = caches.pop(0)
            given[cache.given] = tensor if cache.constant else [tensor]
            del tensor
        outputs = self._parent.forward(*map(given.get, self.inputs))
        return outputs[0], list(outputs[1 : len(self.caches) + 1])


def _take(parent: fx.GraphModule, given: fx.Node, readers: Sequence[fx.Node]) -> None:
    """Let the part that reads an input take it from its box."""
    for reader in readers:
        part = parent.get_submodule(str(reader.target))
        assert isinstance(part, PartOnDevice)
        _take_at_first_use(cast(fx.GraphModule, part.part), reader.args.index(given))


def _copy_once(parent: fx.GraphModule, weight: fx.Node) -> None:
    """Hold copies of a tied weight on the other devices that read it: here it does not change between the steps."""
    value = attribute(parent, str(weight.target))
    for sent in list(weight.users):
        move = parent.get_submodule(str(sent.target))
        if not isinstance(move, Send) or not isinstance(value, torch.Tensor):
            continue
        name = f"{sent.target}_{sent.name}"
        parent.register_buffer(name, value.detach().to(move.target), persistent=False)
        with parent.graph.inserting_before(sent):
            held = parent.graph.get_attr(name)
        _bypass(parent, sent, held)


def _readers(parent: fx.GraphModule, given: fx.Node) -> list[fx.Node]:
    """Return the calls of parts that read an input, after removing the copies to their devices."""
    for sent in list(given.users):
        if sent.op == "call_module" and isinstance(parent.get_submodule(str(sent.target)), Send):
            _bypass(parent, sent, given)
    return [user for user in given.users if user.op == "call_module"]


def _bypass(parent: fx.GraphModule, sent: fx.Node, value: fx.Node) -> None:
    """Remove a copy between devices; its receivers read ``value`` instead."""
    for user in list(sent.users):
        if isinstance(parent.get_submodule(str(user.target)), Receive):
            user.replace_all_uses_with(value)
            parent.graph.erase_node(user)
        else:
            # the end of the call, where the caller's streams wait for copies
            user.args = tuple(arg for arg in user.args if arg is not sent)
    parent.graph.erase_node(sent)


def _take_at_first_use(part: fx.GraphModule, place: int) -> None:
    given = part.graph.find_nodes(op="placeholder")[place]
    users = set(given.users)
    with part.graph.inserting_before(next(node for node in part.graph.nodes if node in users)):
        taken = part.graph.call_function(take, (given,))
    taken.meta = dict(given.meta)
    given.replace_all_uses_with(taken, delete_user_cb=lambda user: user is not taken)
    part.recompile()
