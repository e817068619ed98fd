"""Trace the forward of a model whose parameters are sharded over ranks: one rank's program without gradients.

It is what a rank of tensor parallelism computes when it infers or evaluates. AOTAutograd traces it as it traces the
training step (`splitkit.frontends.sharded_step`), with pieces of parameters as inputs. Here they become attributes
again, which share their memory with the model's, and inputs and outputs take the structure that the model has::

    is_grad_enabled, set_grad_enabled(False), mm, all_reduce("tp=2"), wait_tensor, ..., set_grad_enabled(before)

What autograd would make of it is wrong, as nothing sums gradients over ranks where ``DTensor`` does: they are off.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import Node

from splitkit import _torch
from splitkit._torch import pytree
from splitkit.frontends import aot
from splitkit.frontends.capture.first_call import tables_restored
from splitkit.frontends.sharded_step import ShardedStep
from splitkit.graph.shards import PIECES, full_tensor, is_sharded
from splitkit.graph.storages import parameters_and_buffers

_ROOT = "L['self'].model"
"""The path of the model in the graphs of `ShardedStep`."""
TENSOR = object()
"""A tensor among the leaves of an output."""


class ShardedForward(ShardedStep):
    """A model with sharded parameters, as a function of this rank's pieces that returns whole tensors.

    Attributes:
        structure: the pytree specification of the output, as of the last call.
        leaves: the leaves of the output, of which `TENSOR` stands for tensors.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, None)
        self.requires_grad_(False)
        self.structure: Any = None
        self.leaves: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> list[Tensor]:  # type: ignore[override]
        """Return the tensors of the model's output on these inputs."""
        with torch.no_grad():
            leaves, self.structure = pytree.tree_flatten(self.output(args, kwargs))
            self.leaves = [TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            return [full_tensor(leaf) for leaf in leaves if isinstance(leaf, Tensor)]


def forward_of_shards(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> fx.GraphModule:
    """Return the graph of a model's forward on this rank.

    Args:
        model: a module with sharded parameters; it is not changed.
        args: example inputs, whose sizes are fixed.
        kwargs: example keyword inputs.
    """
    step = ShardedForward(model)
    with tables_restored(step):  # AOTAutograd replaces parameters while it traces
        traced = aot.trace_sharded(step, args, kwargs)
    step.clean(traced.graph)
    return _Writer(step, traced, args, kwargs).module()


class _Writer:
    """Writes a traced forward as the graph of a module."""

    def __init__(
        self, step: ShardedForward, traced: fx.GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self.step, self.traced, self.graph = step, traced.graph, fx.Graph()
        self._made: dict[Node, Any] = {}
        self._held: dict[str, Any] = {step.names()[own]: piece for own, piece in parameters_and_buffers(step).items()}
        self._held |= {str(n.target): getattr(traced, str(n.target)) for n in traced.graph.find_nodes(op="get_attr")}
        self._inputs, self._structure = pytree.tree_flatten_with_path((args, dict(kwargs)))
        self._signature = inspect.signature(step.model.forward)
        self._outer = {"nn_module_stack": {"": ("", type(step.model))}}

    def module(self) -> fx.GraphModule:
        """Return the module, whose parameters and buffers are this rank's pieces."""
        placeholders = self.traced.find_nodes(op="placeholder")
        given = {aot.input_position(node): node for node in placeholders}
        for position, (path, leaf) in enumerate(self._inputs):
            made = self.graph.placeholder(self._name(path))
            made.meta["val"] = leaf
            if (node := given.get(position)) is not None:
                self._put(node, made)
        read = {node for node in placeholders if node.users} | {node for _, node in aot.inputs_of_updates(self.traced)}
        for node in placeholders:
            if node in read and (own := aot.parameter_name(node) or aot.buffer_name(node)) is not None:
                self._put(node, self.graph.get_attr(self.step.names()[own], type_expr=None))
        self._put_calls()
        self._put_output()
        gm = fx.GraphModule(self._held, self.graph, type(self.step.model).__name__)
        whole = parameters_and_buffers(self.step.model)
        gm.meta[PIECES] = frozenset(name for name, tensor in whole.items() if is_sharded(tensor))
        gm.train(self.step.model.training)
        return gm

    def _put(self, node: Node, made: Node) -> None:
        self._made[node] = made
        made.meta.update({key: node.meta[key] for key in ("val", "tensor_meta") if key in node.meta})

    def _name(self, path: Any) -> str:
        """Return the name of an input as torch.export gives it: of the argument, and where in it the input is."""
        (which, first, *inside) = [getattr(key, "idx", getattr(key, "key", getattr(key, "name", key))) for key in path]
        if which == 0:
            kinds = [*self._signature.parameters.values()]
            rest = next((i for i, one in enumerate(kinds) if one.kind is one.VAR_POSITIONAL), len(kinds))
            inside = [first - rest, *inside] if first >= rest else inside
            first = kinds[min(first, rest)].name
        return re.sub(r"\W", "_", "_".join(map(str, (first, *inside))))

    def _put_calls(self) -> None:
        """Copy the nodes that compute, inside a block without gradients."""
        before = self._state_op(torch.is_grad_enabled)
        self._state_op(_torch.SET_GRAD, False)
        for node in self.traced.nodes:
            if node.op in ("call_function", "get_attr"):
                copied = self._made[node] = self.graph.node_copy(node, self._made.__getitem__)
                copied.meta["nn_module_stack"] = dict(_inside(node)) or self._outer["nn_module_stack"]
        outputs: Any = self.traced.output_node().args[0]
        for position, written in aot.inputs_of_updates(self.traced):
            self._state_op(torch.ops.aten.copy_.default, self._made[written], self._made[outputs[position]])
        self._state_op(_torch.SET_GRAD, before)

    def _state_op(self, target: Any, *args: Any) -> Node:
        made = self.graph.call_function(target, args)
        made.meta.update(self._outer)
        if args and isinstance(args[0], Node) and "val" in args[0].meta:  # what is written
            made.meta["val"] = args[0].meta["val"]
        return made

    def _put_output(self) -> None:
        outputs: Any = self.traced.output_node().args[0]
        places = (aot.position_of_output(self.traced, i) for i in count())
        leaves = [self._made[outputs[next(places)]] if leaf is TENSOR else leaf for leaf in self.step.leaves]
        self.graph.output(tuple(leaves))
        arguments = [*self._signature.parameters][: self._structure.child(0).num_children]
        arguments += self._structure.child(1).context
        self.graph.set_codegen(_torch.pytree_codegen(arguments, self._structure, self.step.structure))


def _inside(node: Node) -> Iterator[tuple[str, tuple[str, Any]]]:
    """Yield the modules around a node, with paths as in a captured forward."""
    for key, (path, kind) in node.meta.get("nn_module_stack", {}).items():
        yield key, (path.removeprefix(_ROOT).removeprefix("."), kind)
