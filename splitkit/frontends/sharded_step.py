"""Trace the training step of a model whose parameters are sharded over ranks: the program of one rank.

Parameters that are ``DTensor`` enter the graph as this rank's pieces, and the model sees tensors that are sharded as
they are. What ``DTensor`` then does between the ranks becomes nodes: collectives of torch's functional kind::

    up.weight, a piece  ──▶  DTensor.from_local  ──▶  the model  ──▶  mm, all_reduce("tp=2"), wait_tensor, ...

The backward of ``from_local`` returns gradients sharded like the parameters. Collectives name the dimension of the mesh
whose ranks take part, and not the process group, whose name differs between ranks.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.fx import traceback

from splitkit._torch import name_group, pytree, ranks_of_group, rename
from splitkit.engine.codegen.emit import numbered_names
from splitkit.errors import CaptureError
from splitkit.graph.losses import loss_of
from splitkit.graph.shards import collective_group, full_tensor, is_sharded, local_tensor, mesh_groups, sharded_as
from splitkit.graph.storages import parameters_and_buffers

NO_TENSOR = "the loss is not a tensor"
NO_LOSS = "the model returns no loss"
"""Texts of the errors raised during capture, by which the caller recognises them."""


def loss_in(output: Any, loss: Any) -> Tensor:
    """Return the loss of a model's output, by a function or, without one, by `loss_of`, where Dynamo traces."""
    found = loss_of(output) if loss is None else loss(output)
    if not isinstance(found, Tensor):
        raise TypeError(NO_LOSS if loss is None else NO_TENSOR)
    return found


def has_shards(model: nn.Module) -> bool:
    """Whether a parameter or buffer of a model is sharded."""
    return any(map(is_sharded, parameters_and_buffers(model).values()))


def refuse_fsdp(model: nn.Module) -> None:
    """Raise SK401 if ``fully_shard`` was called on a module of a model; nothing is imported to find out."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    if managed := [name or "the model" for name, module in model.named_modules() if isinstance(module, kind)]:
        raise CaptureError(
            "SK401",
            f"{managed[0]} is managed by FSDP, whose hooks gather parameters outside of any graph",
            "Capture the plain model, and shard its stages afterwards: Pipeline.shard().",
            managed,
        )


def refuse_sharded_inputs(inputs: Any) -> None:
    """Raise SK401 for an input that is sharded over ranks: in a graph, inputs are whole."""
    if any(map(is_sharded, pytree.tree_leaves(inputs))):
        raise CaptureError(
            "SK401",
            "an input is sharded over ranks, and a graph of one rank's program takes whole inputs",
            "Give the whole tensor, as all ranks do: x.full_tensor().",
        )


class ShardedStep(nn.Module):
    """A model with sharded parameters and its loss, as a function of this rank's pieces.

    Attributes:
        loss: a function of the model's output; ``None`` for the loss that the model returns.
        copies: whether to return a copy of the loss, as `splitkit.frontends.joint_capture.TrainingStep`.
    """

    def __init__(self, model: nn.Module, loss: Any) -> None:
        super().__init__()
        self._model = (model,)  # not a submodule: its parameters are not the inputs of the graph
        self.loss, self.copies, self.training = loss, False, model.training
        self._names: dict[str, str] = {}
        saved = model.state_dict(keep_vars=True).keys()
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            own = f"tensor_{len(self._names)}"
            self._names[own] = name
            piece = local_tensor(tensor).detach()
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(own, nn.Parameter(piece, tensor.requires_grad))
            else:
                self.register_buffer(own, piece, persistent=name in saved)

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self._model[0]

    def names(self) -> dict[str, str]:
        """Return the name of each piece in the step -> the name of the tensor in the model."""
        return dict(self._names)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss of the model on these inputs."""
        loss = full_tensor(loss_in(self.output(args, kwargs), self.loss))
        return loss.clone() if self.copies else loss

    def output(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the model makes of inputs where its tensors are the pieces."""
        whole = parameters_and_buffers(self.model)
        tensors = {name: sharded_as(getattr(self, own), whole[name]) for own, name in self._names.items()}
        with _paths_noted(self.model):
            return torch.func.functional_call(self.model, tensors, args, kwargs)

    def clean(self, graph: fx.Graph) -> None:
        """Let collectives name dimensions of the mesh, and come where what they read is made.

        ``from_local`` takes a view of each piece at the beginning of the graph, and reduces all gradients at its end:
        stages could divide neither. Nodes read the pieces themselves, and collectives follow what they read at once.
        """
        for piece in graph.find_nodes(op="placeholder"):
            for node in [n for n in piece.users if n.target is torch.ops.aten.view.default]:
                if node.meta["val"].shape == piece.meta["val"].shape:
                    node.replace_all_uses_with(piece)
                    graph.erase_node(node)
        names = self._named_groups()
        for node in graph.nodes:
            if getattr(node.target, "namespace", "") == "_c10d_functional":
                node.args = tuple(names.get(ranks_of_group(a), a) if isinstance(a, str) else a for a in node.args)
        for node in list(graph.nodes):
            if collective_group(node) is not None:
                _at_once(node)
        rename(_names_on_any_rank(graph))

    def _named_groups(self) -> dict[tuple[int, ...], str]:
        """Return the ranks along each dimension of the meshes -> the name by which graphs call them from now on."""
        found = dict[tuple[int, ...], str]()
        for dimension, group in mesh_groups(parameters_and_buffers(self.model).values()).items():
            ranks, name = tuple(dist.get_process_group_ranks(group)), str(dimension)
            if not (known := ranks_of_group(name)):
                name_group(name, group)
            elif known != ranks:
                raise CaptureError(
                    "SK401",
                    f"a captured model is sharded over other ranks that are called {name}, too",
                    "Give the dimensions of each mesh names of their own: mesh_dim_names.",
                )
            found[ranks] = name
        return found


def _names_on_any_rank(graph: fx.Graph) -> dict[fx.Node, str]:
    """Return node -> its name numbered anew: each rank takes another piece of a split, and torch drops the rest."""
    taken = {node.name for node in graph.nodes if node.op != "call_function"}
    names, found = dict[str, Iterator[str]](), dict[fx.Node, str]()
    for node in (n for n in graph.nodes if n.op == "call_function"):
        stem = re.sub(r"_\d+$", "", node.name)
        found[node] = next(n for n in names.setdefault(stem, numbered_names(stem)) if n not in taken)
        taken.add(found[node])
    return found


def _at_once(node: fx.Node) -> None:
    """Move a collective, and what waits for it, right behind the last node that it reads."""
    last = max(node.all_input_nodes)
    if last.op != "placeholder":
        last.append(node)
        for waiting in [n for n in node.users if n.target is torch.ops._c10d_functional.wait_tensor.default]:
            node.append(waiting)


@contextmanager
def _paths_noted(model: nn.Module) -> Iterator[None]:
    """Give the nodes that are traced inside the block the path of their module, as Dynamo does."""
    meta: dict[str, Any] = traceback.current_meta  # 2.11, 2.13, 2.15
    stack: list[dict[str, Any]] = []

    def enter(name: str, module: nn.Module) -> None:
        inside = {name: (f"L['self'].model.{name}".rstrip("."), type(module))}
        stack.append((stack[-1] if stack else {}) | inside)
        meta["nn_module_stack"] = stack[-1]

    def leave(module: nn.Module) -> None:
        stack.pop()
        meta["nn_module_stack"] = stack[-1] if stack else {}

    with patch.dict(meta), ExitStack() as hooks:
        for name, module in model.named_modules():
            entered = module.register_forward_pre_hook(lambda m, given, n=name: enter(n, m), prepend=True)
            hooks.enter_context(entered)
            hooks.enter_context(module.register_forward_hook(lambda m, given, output: leave(m)))
        yield
