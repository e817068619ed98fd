"""Run whole graphs on fake tensors to find the value of every node, without computing anything."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.fx import Node

from splitkit import _torch
from splitkit._torch import FakeTensor, FakeTensorMode, attributes_of, fake_mode, pytree
from splitkit.errors import GraphError, message_line
from splitkit.graph.call_signature import bind_inputs
from splitkit.graph.dataflow import require_graph
from splitkit.graph.storages import parameters_and_buffers, require_made, storage_key


def propagate(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> None:
    """Set ``meta["val"]`` on every node of a graph: its sizes, dtype and device, and which values share memory.

    The graph runs on fake tensors: nothing real is computed, and no parameter, buffer or input is touched. If the run
    fails, no node has changed.

    Args:
        gm: the graph module, called as ``gm(*args, **kwargs)``.
        args: example inputs.
        kwargs: example keyword inputs.

    Raises:
        GraphError: SK101 if ``gm`` is not a graph module, SK109 if it does not run on fake tensors of these inputs.
    """
    require_graph(gm)
    require_made(parameters_and_buffers(gm))
    try:
        names = (str(node.target).lstrip("*") for node in gm.graph.find_nodes(op="placeholder"))
        set_values(gm, dict(zip(names, bind_inputs(gm, args, kwargs), strict=True)))
    except Exception as error:
        raise GraphError(
            "SK109",
            f"the graph does not run on fake tensors of these inputs: {message_line(error)}",
            "Give inputs that gm(*args, **kwargs) accepts; register fake kernels for custom ops.",
        ) from error


def set_values(gm: fx.GraphModule, inputs: Mapping[str, Any]) -> None:
    """Set ``meta["val"]`` of all nodes, or of none if the run fails; ``inputs`` are real values by placeholder name."""
    mode = fake_mode()
    values: list[Any] = []
    for node in gm.graph.find_nodes(op="placeholder"):
        name = str(node.target)
        values += inputs[name[1:]] if name.startswith("*") and name[1] != "*" else [inputs[name.lstrip("*")]]
    fakes = pytree.tree_map_only(torch.Tensor, mode.from_tensor, values)
    for node, value in _run(gm, mode, fakes, Values).items():
        node.meta["val"] = value


def values_again(gm: fx.GraphModule, kind: Callable[..., Values] | None = None) -> Mapping[Node, Any]:
    """Return new values of all nodes, computed from the ``meta["val"]`` of the placeholders; the graph's are kept.

    This is for graphs whose values do not show which nodes share memory: ``make_fx`` records such graphs from a real
    run, and a pass that replaces a node by an equal one leaves such graphs.

    Args:
        gm: the graph.
        kind: the interpreter that runs it, `Values` or a subclass.

    Raises:
        GraphError: SK109 if the graph does not run on fakes.
    """
    mode = fake_mode()
    storages: dict[Hashable, torch.UntypedStorage] = {}

    def fake(value: torch.Tensor) -> torch.Tensor:
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        shared = storages.setdefault(storage_key(value), made.untyped_storage())
        if shared is not made.untyped_storage():  # a tied weight, or a view of another input
            made.set_(shared, value.storage_offset(), value.shape, value.stride())
        return made

    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    with mode:
        fakes = pytree.tree_map_only(torch.Tensor, fake, values)
    try:
        with _torch.levels_closed():  # the graph may end inside a vmap
            return _run(gm, mode, fakes, kind or Values)
    except Exception as error:
        raise GraphError(
            "SK109",
            "the values of the graph do not show which of them share memory, and it does not run on fake tensors: "
            f"{message_line(error)}",
            "Capture with splitkit.capture, or make_fx(..., tracing_mode='fake'); register fakes of custom ops.",
        ) from error


def rebinds(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a run binds another tensor to the name of a parameter or buffer, or does not run on fakes.

    ``self.mean = self.mean + 1`` does that; ``self.mean += 1`` writes to the existing tensor.
    """
    mode = fake_mode()
    with mode, torch.random.fork_rng():
        state = {id(t): mode.from_tensor(t) for t in (*module.parameters(), *module.buffers())}
        try:
            copied = copy.deepcopy(module, dict[int, Any](state))
            owned = [(held, dict(held)) for m in copied.modules() for held in attributes_of(m)[:2]]
            inputs, named = pytree.tree_map_only(torch.Tensor, mode.from_tensor, (args, dict(kwargs)))
            copied(*inputs, **named)
        except Exception:  # whatever it is: the caller then refuses the module
            return True
    return any(held.get(name) is not value for held, before in owned for name, value in before.items())


def _run(gm: fx.GraphModule, mode: FakeTensorMode, fakes: list[Any], kind: Callable[..., Values]) -> Mapping[Node, Any]:
    interpreter = kind(gm, mode)
    with mode, torch.no_grad():
        interpreter.run(*fakes, enable_io_processing=False)
    return interpreter.values


class Values(fx.Interpreter):
    """Interpreter on fakes of the parameters and buffers, so that for example BatchNorm counts no batch."""

    def __init__(self, gm: fx.GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.mode = mode
        self.values: dict[Node, Any] = {}

    def run_node(self, n: Node) -> Any:
        """Run ``n`` and note its value."""
        result = super().run_node(n)
        if n.op == "get_attr":
            self.values[n] = result
        elif n.op != "output":  # detached, as a later in-place op may change the shape of this tensor
            self.values[n] = pytree.tree_map_only(FakeTensor, torch.Tensor.detach, result)
        return result

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return a fake of the attribute."""
        value = operator.attrgetter(target)(self.module)
        return self.mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call the module with fakes of its parameters and buffers."""
        module = self.fetch_attr(target)
        owned = dict([*module.named_parameters(), *module.named_buffers()])
        fakes: dict[str, torch.Tensor] = {name: self.mode.from_tensor(value) for name, value in owned.items()}
        return torch.func.functional_call(module, fakes, args, kwargs)
