"""Private inputs, attributes and modules for a measuring run, on its device and free to be written.

Tensors that the graph does not write share memory with the graph's own.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.fx import Node

from splitkit._torch import pytree
from splitkit.errors import CostError
from splitkit.graph.call_signature import bind_inputs
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.storages import attribute


def copy_tensors(tree: Any) -> Any:
    """Copy the tensors of a pytree; copies have the same strides and share memory with each other as the originals."""
    memo: dict[int, Any] = {}
    return pytree.tree_map_only(torch.Tensor, lambda t: copy.deepcopy(t.detach(), memo), tree)


class Private:
    """Private inputs, attributes and modules of one graph.

    Attributes:
        device: the device that they are on.
        trained: whether they require grad where the graph's own do; gradients go to the private ones.
    """

    def __init__(self, flow: Dataflow, device: torch.device, *, trained: bool = False) -> None:
        self.device, self.trained = device, trained
        self._root = flow.root
        self._written = {id(attribute(flow.root, str(node.target))) for node in flow.written}
        self._memo: dict[int, Any] = {}  # of the copies of what is written: two names of one memory stay so
        self._tensors: dict[int, torch.Tensor] = {}  # by the id of the graph's own
        self._modules: dict[int, nn.Module] = {}

    def inputs(self, inputs: Any) -> Any:
        """Copies of inputs, one for each placeholder.

        Raises:
            CostError: SK324 when the graph does not take them, or they have no data.
        """
        values = _placeholders(self._root, inputs)
        values = pytree.tree_map_only(torch.Generator, torch.Generator.clone_state, values)
        found = pytree.tree_map_only(torch.Tensor, self._placed, copy_tensors(values))
        return pytree.tree_map(lambda own, given: self._asking(own, given), found, values)

    def attribute(self, target: str) -> Any:
        """The private version of an attribute of the graph: a tensor, the body of a higher-order op, a constant."""
        value = attribute(self._root, target)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, torch.Generator):
            return value.clone_state()
        return self.module(target) if isinstance(value, nn.Module) else value

    def module(self, target: str) -> nn.Module:
        """Return a copy of a module with the same parameters and its own buffers."""
        module: Any = attribute(self._root, target)
        if id(module) not in self._modules:
            memo: dict[int, Any] = {
                id(p): nn.Parameter(self._tensor(p), self.trained and p.requires_grad) for p in module.parameters()
            }
            made: nn.Module = copy.deepcopy(module, memo).to(self.device)
            for graph_module in (m for m in made.modules() if isinstance(m, fx.GraphModule)):
                for node in graph_module.graph.nodes:
                    node.args, node.kwargs = self.moved(node.args), self.moved(node.kwargs)
                graph_module.recompile()
            self._modules[id(module)] = made
        return self._modules[id(module)]

    def tensors(self) -> list[torch.Tensor]:
        """Return the attributes that were read, and the parameters and buffers of the modules."""
        held = [t for module in self._modules.values() for t in (*module.parameters(), *module.buffers())]
        return [*self._tensors.values(), *held]

    def moved(self, tree: Any) -> Any:
        """Return a node's arguments with the graph's devices replaced by this one."""
        return pytree.tree_map_only(torch.device, lambda d: d if d.type == "meta" else self.device, tree)

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._tensors:
            own = tensor.detach()
            own = copy.deepcopy(own, self._memo) if id(tensor) in self._written else own
            self._tensors[id(tensor)] = self._asking(self._placed(own), tensor)
        return self._tensors[id(tensor)]

    def _asking(self, own: Any, given: Any) -> Any:
        """Make a private value require grad where the given one does, if it is to be trained."""
        if self.trained and isinstance(given, torch.Tensor) and given.requires_grad:
            own.requires_grad_()
        return own

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            raise unfit_inputs_error(f"a tensor of shape {list(tensor.shape)} lies on meta and has no data")
        return tensor.to(self.device)


def measuring_device(device: torch.device | str) -> torch.device:
    """Return a CPU or CUDA device of this machine.

    Raises:
        CostError: SK321 if it does not exist or cannot be timed.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise _no_device(f"{device!s:.100}", str(error)) from error
    if found.type not in ("cpu", "cuda"):
        raise _no_device(str(found), "only CPUs and CUDA devices can be timed")
    count = torch.cuda.device_count() if found.type == "cuda" else 1
    if (found.index or 0) >= count:
        raise _no_device(str(found), f"this machine has {count or 'no'} CUDA devices")
    return torch.device("cuda", found.index or 0) if found.type == "cuda" else torch.device("cpu")


def _no_device(name: str, reason: str) -> CostError:
    return CostError("SK321", f"the graph cannot be measured on {name!r}: {reason}", 'Measure on "cpu".')


def _placeholders(gm: fx.GraphModule, inputs: Any) -> list[Any]:
    """Return the values of the graph's placeholders."""
    args = () if isinstance(inputs, Mapping) else (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    kwargs = inputs if isinstance(inputs, Mapping) else {}
    if not isinstance(args, (tuple, list)):
        raise unfit_inputs_error(f"a {type(inputs).__name__} is neither a tuple, a dict nor a tensor")
    try:
        return bind_inputs(gm, args, kwargs)
    except Exception as error:
        raise unfit_inputs_error(str(error)) from error


def unfit_inputs_error(reason: str, *nodes: Node) -> CostError:
    """Return the error for inputs that the graph does not run on."""
    return CostError(
        "SK324", f"the graph cannot be measured on these inputs: {reason}", "Give inputs like those of capture.", nodes
    )
