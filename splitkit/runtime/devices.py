"""A split in one process, each part on a device of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from splitkit._torch import attributes_of
from splitkit.engine.split import Split
from splitkit.engine.ties import Tied
from splitkit.errors import PipelineError
from splitkit.plans.parts import PartKey
from splitkit.runtime.holding import move_tensors
from splitkit.runtime.movedgraphs import Move, MovedGraphs
from splitkit.runtime.moves import same_device
from splitkit.runtime.places import Devices, devices_of, places_of


def to_devices(split: Split, devices: Devices = None) -> OnDevices:
    """Put each part of a split on its device; the result runs and trains like the graph that was split.

    Parameters and buffers are moved, as by ``nn.Module.to``: the split, its graph and the model share them, and no
    memory is held twice. So only the result can be called afterwards (or the split, once all is moved back). Optimizers
    made before go on working. A parameter that parts of several devices read (a tied weight) stays one: where it is
    read first, and is copied to the others in each call, so that autograd adds up its gradients.

    A value that crosses is copied once for each device that reads it, on CUDA beside the computation. Outputs stay on
    the devices of the parts that make them; inputs may be anywhere, but one that the graph writes must be where it is
    written. ``device=`` arguments that capture burnt in, and regions of autocast for the device of the capture, follow
    the part. Each device has random numbers of its own, as ``torch.manual_seed`` seeds them.

    Args:
        split: from `splitkit.split`.
        devices: part -> device, or devices in the order of the parts, or one for all; where it says nothing, that of
            the plan (`splitkit.Part`). An op that is in no part runs where the first value that it reads is made.

    Raises:
        PipelineError: SK807 for a part without a device, or a module that is called on several; SK808 for memory that
            is written and would lie on several devices. Nothing is moved then.

    The streams are those of torchgpipe (Kim et al., "torchgpipe: On-the-fly pipeline parallelism for training giant
    models", 2020).
    """
    return OnDevices(split, devices)


class _Program(NamedTuple):
    parent: fx.GraphModule
    parts: Mapping[PartKey, fx.GraphModule]
    devices: Mapping[PartKey, torch.device]
    moves: tuple[Move, ...]


class OnDevices(Tied):
    """See `to_devices`. Parameters and buffers have the names that they have in the graph that was split."""

    _program: _Program

    def __init__(self, split: Split, devices: Devices = None) -> None:
        super().__init__()
        places = places_of(split, devices_of(split, devices))
        held = _take_over(self, split.flow.root)
        graphs = MovedGraphs(split, places, held)
        # Not registered: what they hold is registered here, under its original name.
        self.__dict__["_program"] = _Program(graphs.parent(), graphs.parts, places.parts, tuple(graphs.moves))
        move_tensors(split.flow.root, held, places.tensors)
        self.training = split.module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the graph that was split takes and returns."""
        return self._program.parent(*args, **kwargs)

    @property
    def part_devices(self) -> Mapping[PartKey, torch.device]:
        """Part -> its device, in the order of execution."""
        return dict(self._program.devices)

    @property
    def part_graphs(self) -> Mapping[PartKey, fx.GraphModule]:
        """Part -> what runs on its device, in the order of execution."""
        return dict(self._program.parts)

    @property
    def moves(self) -> tuple[Move, ...]:
        """What is copied in each call."""
        return self._program.moves

    @property
    def code(self) -> str:
        """What a call does, as Python."""
        return str(self._program.parent.code)

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Any:  # 2.11, 2.13, 2.15
        """Other dtypes are fine, other devices are not.

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


def _take_over(module: nn.Module, root: nn.Module) -> nn.Module:
    """Register all that the root holds; gives a bare module of the same tables, for graphs to read by any name."""
    mine, its = attributes_of(module), attributes_of(root)
    mine.parameters.update(its.parameters)
    mine.buffers.update(its.buffers)
    mine.modules.update(its.modules)
    mine.unsaved.update(its.unsaved)
    held = nn.Module()
    held.__dict__.update(_parameters=mine.parameters, _buffers=mine.buffers, _modules=mine.modules)
    for name, value in _plain_attributes(root):
        held.__dict__[name] = value
    return held


def _plain_attributes(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """What graphs may read of a module besides its tables: constants."""
    graph: Any = getattr(root, "graph", None)
    for node in graph.find_nodes(op="get_attr") if graph is not None else ():
        name = str(node.target).split(".")[0]
        if name in vars(root):
            yield name, vars(root)[name]
