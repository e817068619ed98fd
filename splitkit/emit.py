"""Write the parts and their parent as fx graphs. The only place where graphs are built; the input graph is not."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx
from torch.fx import Node
from torch.utils.checkpoint import checkpoint

from splitkit import _torch
from splitkit.assemble import carry_hooks, module_of
from splitkit.cut import Subgraph
from splitkit.dataflow import Dataflow
from splitkit.names import Style, part_names
from splitkit.plan import HOST, PartKey, Plan
from splitkit.scope import NEUTRAL
from splitkit.scoped import ScopedGraph


@dataclass(frozen=True)
class Emitted:
    """What `emit` makes.

    Attributes:
        module: the parent, which runs like the original.
        parts: the module of each part, in the order in which the parent calls them.
        attributes: for each part (and ``""`` for the parent), its attribute names -> their names in the original.
        copies: for each part (and `HOST`), the original nodes that it computes -> their copies.
    """

    module: fx.GraphModule
    parts: Mapping[PartKey, fx.GraphModule]
    attributes: Mapping[str, Mapping[str, str]]
    copies: Mapping[PartKey, Mapping[Node, Node]]


def emit(flow: Dataflow, plan: Plan, units: tuple[Subgraph | Node, ...], style: Style) -> Emitted:
    """Build one module a part, and the parent that calls them.

    The parent keeps the signature of the original (pytree codegen, defaults, keyword arguments), every node keeps its
    meta, and ``gm.meta`` and ``training`` are carried over. Parameters, buffers and called modules are the original's
    objects, not copies.
    """
    subgraphs = [u for u in units if isinstance(u, Subgraph)]
    taken = {str(u.target).split(".")[0] for u in units if isinstance(u, Node) and u.op in ("get_attr", "call_module")}
    names = part_names([s.key for s in subgraphs], taken, style)
    parts: dict[PartKey, fx.GraphModule] = {}
    attributes: dict[str, Mapping[str, str]] = {}
    copies: dict[PartKey, Mapping[Node, Node]] = {}
    for sub in subgraphs:
        env, graph = _emit_part(sub, flow, style)
        parts[sub.key], attributes[names[sub.key]] = module_of(flow.root, graph, style)
        copies[sub.key] = {n: env[n] for n in sub.nodes}
    scoped = ScopedGraph()
    scoped.graph.set_codegen(_torch.codegen_of(flow.graph))
    for node in (u for u in units if isinstance(u, Node) and u.op == "placeholder"):
        scoped.copy(node, NEUTRAL)
    for unit in units:
        if isinstance(unit, Subgraph):
            _call_part(scoped, unit, names[unit.key], plan.parts[unit.key].call == "checkpoint", style)
        elif unit.op == "get_attr":
            scoped.env[unit] = scoped.graph.node_copy(unit)
        elif unit.op == "output":
            scoped.finish(flow.final)
            scoped.copy(unit, flow.final)
        elif unit.op != "placeholder":
            scoped.copy(unit, flow.scope[unit])
    copies[HOST] = {u: scoped.env[u] for u in units if isinstance(u, Node)}
    module, attributes[""] = module_of(flow.root, scoped.graph, Style(), names.values())
    for sub in subgraphs:  # after the parent's code is made, which would make theirs a second time
        module.add_module(names[sub.key], parts[sub.key])
    module.meta = {**_torch.meta_of(flow.root), "partition_names": set(names.values())}
    carry_hooks(flow.root, module)
    return Emitted(module, parts, attributes, copies)


def _emit_part(sub: Subgraph, flow: Dataflow, style: Style) -> tuple[Mapping[Node, Node], fx.Graph]:
    scoped = ScopedGraph()
    for number, value in enumerate(sub.inputs):
        name = value.name if style.original_input_names else f"arg_{number}"
        name = "self_" if name == "self" else name
        scoped.env[value] = scoped.graph.placeholder(name, type_expr=value.type)
        scoped.env[value].meta = dict(value.meta)
    for node in sub.nodes:
        if node.op == "get_attr":
            scoped.env[node] = scoped.graph.node_copy(node)
        else:
            scoped.copy(node, flow.scope[node])
    scoped.finish(NEUTRAL)
    values = tuple(scoped.env[v] for v in sub.outputs)
    output = scoped.graph.output(values[0] if len(values) == 1 and not style.tuple_return else values)
    _describe(output, sub.outputs, single=len(values) == 1 and not style.tuple_return)
    return scoped.env, scoped.graph


def _call_part(scoped: ScopedGraph, sub: Subgraph, name: str, checkpointed: bool, style: Style) -> None:
    scoped.move_to(NEUTRAL)  # a part opens the regions of its nodes itself
    inputs = tuple(scoped.env[v] for v in sub.inputs)
    if checkpointed:
        body = scoped.graph.get_attr(name)
        call = scoped.graph.call_function(checkpoint, (body, *inputs), {"use_reentrant": False})
    else:
        call = scoped.graph.call_module(name, inputs)
    single = len(sub.outputs) == 1 and not style.tuple_return
    _describe(call, sub.outputs, single)
    if single:
        scoped.env[sub.outputs[0]] = call
        return
    for position, value in enumerate(sub.outputs):
        name = "getitem" if style.flat_names else value.name
        item = scoped.graph.create_node("call_function", operator.getitem, (call, position), name=name)
        item.meta = dict(value.meta)
        scoped.env[value] = item


def _describe(node: Node, values: tuple[Node, ...], single: bool) -> None:
    """Give a call or output the meta of the values that it carries."""
    if single:
        node.meta = dict(values[0].meta)
        return
    for field in ("val", "example_value"):
        if values and all(field in v.meta for v in values):
            node.meta[field] = tuple(v.meta[field] for v in values)
