"""Inlining: the bodies that export hides behind region ops become nodes between an enter and an exit.

Export writes a ``with torch.no_grad():`` block as one call of a higher-order op with the block as its body, so that
a model under autocast is a graph of three nodes and there is nothing to split::

    wrap_with_autocast(cpu, bf16, True, False, body, x)   ==>   enter_autocast(cpu, bf16, True, False)
                                                                ... the nodes of body ...
                                                                exit_autocast(enter)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.fx import Node

from splitkit import _torch
from splitkit.engine.assemble import carry_hooks, module_of
from splitkit.engine.names import Style
from splitkit.engine.restoring import restore_modes_on_error
from splitkit.graph.dataflow import require_order
from splitkit.graph.scope import is_state_op

# torch.ops.higher_order has no stubs; 2.11, 2.13, 2.15.
WRAP_GRAD: Any = torch.ops.higher_order.wrap_with_set_grad_enabled
WRAP_AUTOCAST: Any = torch.ops.higher_order.wrap_with_autocast

# How many arguments of the op are settings; the body follows them.
_SETTINGS = {WRAP_GRAD: 1, WRAP_AUTOCAST: 4}


def is_wrapped(node: Node) -> bool:
    """Whether ``node`` runs a body under another grad mode or autocast."""
    return node.op == "call_function" and node.target in (WRAP_GRAD, WRAP_AUTOCAST)


def hidden_note(gm: fx.GraphModule) -> str:
    """How many nodes a policy does not see, and what shows them; nothing if it sees all."""
    wrapped = [node for node in gm.graph.nodes if is_wrapped(node)]
    if not wrapped:
        return ""
    opened = inlined(gm)
    hidden = sum(n.op.startswith("call_") and not is_state_op(n) for n in opened.graph.nodes)
    hidden -= sum(n.op.startswith("call_") and not is_wrapped(n) for n in gm.graph.nodes)
    return f"{hidden} nodes hide in {len(wrapped)} blocks; splitkit.capture(gm) shows them"


def inlined(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of ``gm`` with every wrapped region replaced by its nodes; ``gm`` and the bodies are left as they are.

    Parameters, buffers and called modules are shared with ``gm``, not copied.
    """
    require_order(gm.graph)
    graph, env = fx.Graph(), dict[Node, Node]()
    graph.set_codegen(_torch.codegen_of(gm.graph))
    for node in gm.graph.nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
    names = (str(node.target) for node in graph.nodes if node.op in ("get_attr", "call_module"))
    made = module_of(gm, graph, {name: name for name in names}, Style())
    made.meta = dict(_torch.meta_of(gm))
    carry_hooks(gm, made)
    return inline_regions(made)


def inline_regions(gm: fx.GraphModule) -> fx.GraphModule:
    """Replace every wrapped region of ``gm`` by its nodes, between enter and exit nodes; regions nest.

    Works in place, so ``gm`` must be the caller's own; the bodies may be shared. The nodes of a body keep their meta.
    Grad mode is put back to what ``torch.is_grad_enabled()`` gave before the region, which is also right when the
    caller runs the whole graph under ``no_grad``.

    Returns:
        ``gm``.
    """
    changed = False
    while wrapped := [node for node in gm.graph.nodes if is_wrapped(node)]:  # bodies may bring wrapped regions along
        changed = True
        for node in wrapped:
            _inline(gm, node)
    if changed:
        gm.graph.lint()
        restore_modes_on_error(gm.graph)
        gm.recompile()
    return gm


def restore_by_value(graph: fx.Graph) -> None:
    """Let the end of an outermost grad-mode block restore what the caller has, where nothing marks blocks. In place.

    Both ends are constants there, as the mode was at capture, which was on. An end is taken to be what sets the mode
    that was set before its beginning; so ``enable_grad`` inside ``no_grad`` counts as the end of one ``no_grad`` block
    and the beginning of another, which differs only for a caller under ``no_grad``.
    """
    modes = [True]  # of the blocks that are open; first what capture had
    before: Node | None = None
    for node in [n for n in graph.nodes if n.target is _torch.SET_GRAD and isinstance(n.args[0], bool)]:
        if len(modes) > 1 and modes[-1] == node.args[0]:
            continue  # `with set_grad_enabled(m)` sets it twice
        if len(modes) > 1 and modes[-2] == node.args[0]:
            modes.pop()
            if len(modes) == 1:
                node.args = (before,)
            continue
        if len(modes) == 1:
            with graph.inserting_before(node):
                before = graph.call_function(torch.is_grad_enabled)
        modes.append(bool(node.args[0]))


def _inline(gm: fx.GraphModule, node: Node) -> None:
    count = _SETTINGS[node.target]
    settings, (reference, *operands) = node.args[:count], node.args[count:]
    assert isinstance(reference, Node)
    body = gm.get_submodule(str(reference.target))
    assert isinstance(body, fx.GraphModule)
    around = _grad_region if node.target is WRAP_GRAD else _autocast_region
    with gm.graph.inserting_before(node):
        result = _copy_body(gm, body, operands, partial(around, gm.graph, node, settings))
    _replace(node, result)
    gm.graph.erase_node(node)
    _drop_body(gm, reference)


def _copy_body(
    gm: fx.GraphModule, body: fx.GraphModule, operands: list[Any], around: Callable[[], AbstractContextManager[None]]
) -> Any:
    """Write the nodes of ``body`` at the insertion point of ``gm``; yields what the body returns, in ``gm``'s nodes."""
    env: dict[Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), operands, strict=True))
    inner = [node for node in body.graph.nodes if node.op not in ("placeholder", "output")]
    for node in inner:  # attributes need no region
        if node.op == "get_attr":
            env[node] = gm.graph.node_copy(node)
            env[node].target = _adopt(gm, body, node.target)
    computed = [node for node in inner if node.op != "get_attr"]
    if computed:
        with around():
            for node in computed:
                env[node] = gm.graph.node_copy(node, env.__getitem__)
                if node.op == "call_module":
                    env[node].target = _adopt(gm, body, node.target)
    return fx.map_arg(body.graph.output_node().args[0], env.__getitem__)


@contextmanager
def _grad_region(graph: fx.Graph, node: Node, settings: tuple[Any, ...]) -> Iterator[None]:
    before = _state_op(graph, node, torch.is_grad_enabled)
    _state_op(graph, node, _torch.SET_GRAD, *settings)
    yield
    _state_op(graph, node, _torch.SET_GRAD, before)


@contextmanager
def _autocast_region(graph: fx.Graph, node: Node, settings: tuple[Any, ...]) -> Iterator[None]:
    enter = _state_op(graph, node, _torch.ENTER_AUTOCAST, *settings)
    yield
    _state_op(graph, node, _torch.EXIT_AUTOCAST, enter)


def _state_op(graph: fx.Graph, node: Node, target: Any, *args: Any) -> Node:
    """A state op that belongs to the module which the region ``node`` was written in; it has no value."""
    made = graph.call_function(target, args)
    made.meta = {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}
    return made


def _adopt(gm: fx.GraphModule, body: nn.Module, target: str) -> str:
    """Give ``gm`` the attribute ``target`` of ``body``, under a name that is free; yields the name."""
    value = operator.attrgetter(target)(body)
    base = target.replace(".", "_")
    name, count = base, 0
    while hasattr(gm, name):
        if getattr(gm, name) is value:
            return name
        count += 1
        name = f"{base}_{count}"
    setattr(gm, name, value)
    return name


def _replace(node: Node, result: Any) -> None:
    """Let the users of ``node`` use ``result``: the body's own nodes instead of items of a tuple."""
    for user in list(node.users):
        if user.op == "call_function" and user.target is operator.getitem and isinstance(result, (tuple, list)):
            item = result[user.args[1]]  # type: ignore[index]  # a constant
            if isinstance(item, Node):
                user.replace_all_uses_with(item)
            else:
                _substitute(user, item)
            user.graph.erase_node(user)
    _substitute(node, result)


def _substitute(node: Node, value: Any) -> None:
    """Write ``value``, which may be a tuple or a constant, wherever ``node`` is an argument."""
    for user in list(node.users):
        user.args = fx.map_arg(user.args, lambda n: value if n is node else n)
        user.kwargs = fx.map_arg(user.kwargs, lambda n: value if n is node else n)


def _drop_body(gm: fx.GraphModule, reference: Node) -> None:
    """Erase ``reference`` and, with its last reader, the body it names."""
    target = str(reference.target)
    if not reference.users:
        gm.graph.erase_node(reference)
    if not _named(gm.graph, target):
        gm.delete_submodule(target)


def _named(graph: fx.Graph, target: str) -> bool:
    return any(node.op in ("get_attr", "call_module") and node.target == target for node in graph.nodes)
