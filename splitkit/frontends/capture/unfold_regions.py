"""Inline the bodies that export hides behind region ops, as nodes between an enter and an exit.

Export turns a ``with torch.no_grad():`` block into one call of a higher-order op with the block as its body, so that a
model under autocast is a graph of three nodes with nothing to split::

    wrap_with_autocast(cpu, bf16, True, False, body, x)   ==>   enter_autocast(cpu, bf16, True, False)
                                                                ... the nodes of body ...
                                                                exit_autocast(enter)
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.fx import Node

from splitkit import _torch
from splitkit.engine.codegen.emit import numbered_names
from splitkit.engine.codegen.part_modules import build_module, carry_hooks
from splitkit.engine.codegen.restore_modes import restore_modes_on_error
from splitkit.graph.dataflow import require_order
from splitkit.graph.scope import is_state_op

# torch.ops.higher_order has no stubs; 2.11, 2.13, 2.15.
WRAP_GRAD: Any = torch.ops.higher_order.wrap_with_set_grad_enabled
WRAP_AUTOCAST: Any = torch.ops.higher_order.wrap_with_autocast

# Op -> number of its arguments that are settings; the body follows them.
_SETTINGS = {WRAP_GRAD: 1, WRAP_AUTOCAST: 4}


def is_wrapped(node: Node) -> bool:
    """Return whether ``node`` runs a body under another grad mode or autocast."""
    return node.op == "call_function" and node.target in (WRAP_GRAD, WRAP_AUTOCAST)


def note_hidden_nodes(gm: fx.GraphModule) -> str:
    """Return a note on nodes that a policy does not see, with how to show them; empty if it sees all nodes."""
    wrapped = [node for node in gm.graph.nodes if is_wrapped(node)]
    if not wrapped:
        return ""
    opened = inlined(gm)
    hidden = sum(n.op.startswith("call_") and not is_state_op(n) for n in opened.graph.nodes)
    hidden -= sum(n.op.startswith("call_") and not is_wrapped(n) for n in gm.graph.nodes)
    return f"{hidden} nodes are hidden in {len(wrapped)} blocks; splitkit.capture(gm) shows them"


def inlined(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of ``gm`` with every wrapped region replaced by its nodes; ``gm`` and the bodies are not changed.

    Parameters, buffers and called modules are shared with ``gm``, not copied.
    """
    require_order(gm.graph)
    graph, env = fx.Graph(), dict[Node, Node]()
    graph.set_codegen(_torch.codegen_of(gm.graph))
    for node in gm.graph.nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
    names = (str(node.target) for node in graph.nodes if node.op in ("get_attr", "call_module"))
    made = build_module(gm, graph, {name: name for name in names}, type(gm).__name__)
    made.meta = dict(_torch.meta_of(gm))
    carry_hooks(gm, made)
    return inline_regions(made)


def inline_regions(gm: fx.GraphModule) -> fx.GraphModule:
    """Replace every wrapped region of ``gm`` by its nodes, between enter and exit nodes; regions may nest.

    ``gm`` is changed in place, the bodies are not. The nodes of a body keep their meta. At the end of a region the grad
    mode becomes what ``torch.is_grad_enabled()`` returned before the region, which is also right when the caller runs
    the whole graph under ``no_grad``.

    Returns:
        ``gm``.
    """
    changed = False
    while wrapped := [node for node in gm.graph.nodes if is_wrapped(node)]:  # bodies may contain wrapped regions
        changed = True
        for node in wrapped:
            _inline(gm, node)
    if changed:
        gm.graph.lint()
        restore_modes_on_error(gm.graph)
        gm.recompile()
    return gm


def restore_by_value(graph: fx.Graph) -> None:
    """Let the end of an outermost grad-mode block restore the caller's mode, in graphs without marks. In place.

    Dynamo records both ends of a block as constants, with grad mode on outside of all blocks. A node that sets the mode
    of before a block is taken for the end of the block. So ``enable_grad`` inside ``no_grad`` counts as the end of one
    ``no_grad`` block and the beginning of another, which makes a difference only for a caller under ``no_grad``.
    """
    modes = [True]  # of the open blocks; the first is the mode at capture
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
    with gm.graph.inserting_before(node):
        result = _copy_body(gm, body, operands, _region(gm.graph, node, settings))
    _replace(node, result)
    gm.graph.erase_node(node)
    _drop_body(gm, reference)


def _copy_body(
    gm: fx.GraphModule, body: fx.GraphModule, operands: list[Any], region: AbstractContextManager[None]
) -> Any:
    """Copy the nodes of ``body`` to the insertion point of ``gm``, and return the body's output in nodes of ``gm``."""
    env: dict[Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), operands, strict=True))
    inner = [node for node in body.graph.nodes if node.op not in ("placeholder", "output")]
    for node in inner:  # attributes are the same in any region
        if node.op == "get_attr":
            env[node] = gm.graph.node_copy(node)
            env[node].target = _adopt(gm, body, node.target)
    computed = [node for node in inner if node.op != "get_attr"]
    if computed:
        with region:
            for node in computed:
                env[node] = gm.graph.node_copy(node, env.__getitem__)
                if node.op == "call_module":
                    env[node].target = _adopt(gm, body, node.target)
    return fx.map_arg(body.graph.output_node().args[0], env.__getitem__)


@contextmanager
def _region(graph: fx.Graph, node: Node, settings: tuple[Any, ...]) -> Iterator[None]:
    """Write the nodes that begin the region of ``node`` and, at the end of the block, the nodes that end it."""
    if node.target is WRAP_GRAD:
        before = _state_op(graph, node, torch.is_grad_enabled)
        _state_op(graph, node, _torch.SET_GRAD, *settings)
        yield
        _state_op(graph, node, _torch.SET_GRAD, before)
    else:
        enter = _state_op(graph, node, _torch.ENTER_AUTOCAST, *settings)
        yield
        _state_op(graph, node, _torch.EXIT_AUTOCAST, enter)


def _state_op(graph: fx.Graph, node: Node, target: Any, *args: Any) -> Node:
    """Return a new state op with the module path and stack trace of the region ``node``; it has no value."""
    made = graph.call_function(target, args)
    made.meta = {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}
    return made


def _adopt(gm: fx.GraphModule, body: nn.Module, target: str) -> str:
    """Give ``gm`` the attribute ``target`` of ``body`` under a free name, and return the name."""
    value = operator.attrgetter(target)(body)
    name = next(n for n in numbered_names(target.replace(".", "_")) if getattr(gm, n, value) is value)
    setattr(gm, name, value)
    return name


def _replace(node: Node, result: Any) -> None:
    """Let the users of ``node`` use ``result``, and users of an item of ``node`` that item of ``result``."""
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
    """Replace ``node`` by ``value``, which may be a tuple or a constant, in the arguments of its users."""
    for user in list(node.users):
        user.args = fx.map_arg(user.args, lambda n: value if n is node else n)
        user.kwargs = fx.map_arg(user.kwargs, lambda n: value if n is node else n)


def _drop_body(gm: fx.GraphModule, reference: Node) -> None:
    """Erase ``reference`` if it has no users, and the body that it names if no other node names it."""
    target = str(reference.target)
    if not reference.users:
        gm.graph.erase_node(reference)
    if not any(node.op in ("get_attr", "call_module") and node.target == target for node in gm.graph.nodes):
        gm.delete_submodule(target)
