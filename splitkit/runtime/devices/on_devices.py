"""Runs a split in one process, with each part on its own device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from splitkit._torch import attributes_of
from splitkit.engine.codegen.tied_parameters import Tied
from splitkit.engine.split import Split
from splitkit.errors import PipelineError
from splitkit.plans.parts import PartKey
from splitkit.runtime.devices.accelerators import same_device
from splitkit.runtime.devices.device_graphs import DeviceGraphs, Move
from splitkit.runtime.devices.device_map import Devices, devices_of, places_of
from splitkit.runtime.devices.move_tensors import move_tensors


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
            plan (`splitkit.Part`). An op that is in no part runs on the device of the first value that it reads.

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


class _Program(NamedTuple):
    parent: fx.GraphModule
    parts: Mapping[PartKey, fx.GraphModule]
    devices: Mapping[PartKey, torch.device]
    moves: tuple[Move, ...]


class OnDevices(Tied):
    """See `to_devices`. Parameters and buffers keep their names in the graph that was split."""

    _program: _Program

    def __init__(self, split: Split, devices: Devices = None) -> None:
        super().__init__()
        places = places_of(split, devices_of(split, devices))
        held = _take_over(self, split.flow.root)
        graphs = DeviceGraphs(split, places, held)
        # Not registered: what they hold is registered here, under its original name.
        self.__dict__["_program"] = _Program(graphs.parent(), graphs.parts, places.parts, tuple(graphs.moves))
        move_tensors(split.flow.root, held, places.tensors)
        self.training = split.module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; takes and returns what the graph that was split does."""
        return self._program.parent(*args, **kwargs)

    @property
    def part_devices(self) -> Mapping[PartKey, torch.device]:
        """Part -> its device, in the order of execution."""
        return dict(self._program.devices)

    @property
    def part_graphs(self) -> Mapping[PartKey, fx.GraphModule]:
        """Part -> the graph that runs on its device, in the order of execution."""
        return dict(self._program.parts)

    @property
    def parent(self) -> fx.GraphModule:
        """The graph that calls the parts and copies values between their devices."""
        return self._program.parent

    @property
    def moves(self) -> tuple[Move, ...]:
        """The copies of each call."""
        return self._program.moves

    @property
    def code(self) -> str:
        """The Python code of a call."""
        return str(self._program.parent.code)

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


def _take_over(module: nn.Module, root: nn.Module) -> nn.Module:
    """Register all that the root holds, and return a bare module with the same tables, for graphs to read from."""
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
    """Yield the constants of a module that its graph reads from plain attributes."""
    graph: Any = getattr(root, "graph", None)
    for node in graph.find_nodes(op="get_attr") if graph is not None else ():
        name = str(node.target).split(".")[0]
        if name in vars(root):
            yield name, vars(root)[name]
