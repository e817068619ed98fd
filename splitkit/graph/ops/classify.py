"""Classify a node by the kind of its target; the graphs inside a node are followed node by node."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import fx, nn
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket  # 2.11, 2.13, 2.15
from torch.fx import Node

from splitkit._torch import operator_in
from splitkit.graph.ops import op_tables
from splitkit.graph.ops.declared import declared_facts, declared_module
from splitkit.graph.ops.facts import (
    PURE,
    Described,
    Effects,
    distinct_tensors,
    first_argument,
    replace_effects,
    union_effects,
    unknown_effects,
)
from splitkit.graph.ops.fast_path import quick_effects
from splitkit.graph.ops.functions import is_python, is_restored, named_effects, python_effects
from splitkit.graph.ops.schemas import overloads_of, packet_facts, schema_facts
from splitkit.graph.ops.tuples import (
    ModuleEffects,
    body_modules,
    container_effects,
    find_attribute,
    is_changed,
    is_stock,
    module_tensors,
    settled_effects,
    stock_inside,
)
from splitkit.graph.ops.value_kinds import Memo, foreign_effects, operand_effects
from splitkit.graph.scope import is_state_op
from splitkit.graph.storages import value_of


def effects_of(node: Node, root: nn.Module, memo: Memo | None = None) -> Effects:
    """Return the effects that a node may have on memory, on random generators and on the outside world.

    Args:
        node: a node of any graph; it is not changed.
        root: the module that its ``call_module`` and ``get_attr`` targets belong to.
        memo: a cache of answers; with one for all nodes of a graph, the total time is linear.
    """
    memo = Memo() if memo is None else memo
    if node.op in ("placeholder", "get_attr", "output"):
        return PURE
    if node.op == "call_module":
        return _call_module(node, root, memo)
    if (quick := quick_effects(node, root, memo)) is not None:
        return quick
    target: Any = operator_in(node.target)
    if (declared := declared_facts(target)) is not None:
        return declared.of(node)
    if isinstance(target, Described):
        return target.effects(node)
    if isinstance(target, OpOverload):
        return schema_facts(target).of(node)
    if isinstance(target, HigherOrderOperator):
        return _higher_order(node, root, memo)
    if isinstance(target, OpOverloadPacket):
        facts = packet_facts(target, bool(node.kwargs)) or tuple(map(schema_facts, overloads_of(target)))
        return union_effects(f.of(node) for f in facts)
    if (found := container_effects(node, root, memo.tuples)) is not None:
        return found
    if node.op == "call_method" and (found := foreign_effects(node, root, memo)) is not None:
        return found
    if not is_python(node):
        return named_effects(node)
    found = operand_effects(node, root, memo)
    return python_effects(node) if found is None else found


def _call_module(node: Node, root: nn.Module, memo: Memo) -> Effects:
    m = find_attribute(root, node.target)
    if not isinstance(m, nn.Module):
        return unknown_effects(node)
    if (declared := declared_module(node, m)) is not None:
        return declared
    if (settled := settled_effects(node, m)) is not None:
        if value_of(node) is None:
            memo.single[node], memo.tuples[node] = True, False
        return settled
    inside = _inside(m, memo)
    if inside is None:
        return unknown_effects(node, module_tensors(m))
    args = tuple(node.all_input_nodes) if isinstance(m, fx.GraphModule) else first_argument(node)
    return replace_effects(
        inside.effects,
        writes=args if inside.writes else (),
        aliases=args if inside.aliases else (),
        reads_state=distinct_tensors(inside.effects.reads_state + module_tensors(m)),
    )


def _higher_order(node: Node, root: nn.Module, memo: Memo) -> Effects:
    """Return the effects of a higher-order operator: what its bodies do to their arguments, it does to its own."""
    name: str = cast(Any, node.target).name()
    inner = [declared_facts(a) or schema_facts(a) for a in node.args if isinstance(a, OpOverload)]
    found = body_modules(node, root)
    operands = tuple(n for n in node.all_input_nodes if n not in found)
    if name == "print":
        return Effects(impure=True)
    if name == "flat_apply" and op_tables.LOOKUP in node.args:
        return PURE
    if inner:  # auto_functionalized clones what its op writes; with_effects does not
        writes = any(f.writes for f in inner) and not name.startswith("auto_functionalized")
        return Effects(
            operands if writes else (),
            operands,
            random=any(f.random for f in inner),
            impure=name == "with_effects" or any(f.impure for f in inner),
        )
    inside = _all_inside(found.values(), memo)
    if not inside:
        return unknown_effects(node, tuple(t for b in found.values() for t in module_tensors(b)))
    # loops return what they were given when they run zero times
    aliases = name not in op_tables.WRAPPERS or any(i.aliases for i in inside)
    return replace_effects(
        union_effects(i.effects for i in inside),
        writes=operands if any(i.writes for i in inside) else (),
        aliases=operands if aliases else (),
    )


def _inside(m: nn.Module, memo: Memo) -> ModuleEffects | None:
    """Return the effects of calling a module; ``None`` if they are unknown."""
    if m not in memo.modules:
        memo.modules[m] = _look_inside(m, memo)
    return memo.modules[m]


def _look_inside(m: nn.Module, memo: Memo) -> ModuleEffects | None:
    if type(m).__module__ == "torch.export._unlift":  # what export puts in front of a graph to check its inputs
        return ModuleEffects(Effects(check=True))
    if isinstance(m, fx.GraphModule):
        return None if is_changed(m) else _Walk(m, memo).run()
    children = _all_inside(m.children(), memo) if is_stock(m) else None
    return None if children is None else stock_inside(m, children)


def _all_inside(modules: Iterable[nn.Module], memo: Memo) -> list[ModuleEffects] | None:
    """Return the effects of each module; ``None`` if those of one are unknown."""
    found = []
    for m in modules:
        inside = _inside(m, memo)
        if inside is None:
            return None
        found.append(inside)
    return found


class _Walk:
    """Walks through a graph and tracks which nodes share memory with its inputs and its state."""

    def __init__(self, gm: fx.GraphModule, memo: Memo) -> None:
        self.gm, self.memo = gm, memo
        self.inputs: set[Node] = set()
        self.state: dict[Node, tuple[torch.Tensor, ...]] = {}
        self.found: list[Effects] = []
        self.writes = False

    def run(self) -> ModuleEffects:
        outputs: tuple[Node, ...] = ()
        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                self.inputs.add(node)
            elif node.op == "get_attr":
                self.attribute(node)
            elif node.op == "output":
                outputs = tuple(node.all_input_nodes)
            elif not is_state_op(node):
                self.call(node)
        if not is_restored(self.gm.graph):
            self.found.append(Effects(impure=True, ambient=True))
        total = union_effects(self.found)
        if any(o in self.state for o in outputs):  # its state escapes under another name: nothing here can say so
            total = replace_effects(total, impure=True, known=False, writes_state=total.reads_state)
        return ModuleEffects(total, self.writes, any(o in self.inputs for o in outputs))

    def attribute(self, node: Node) -> None:
        value = find_attribute(self.gm, node.target)
        if isinstance(value, torch.Tensor):
            self.state[node] = (value,)
            self.found.append(Effects(reads_state=(value,)))

    def call(self, node: Node) -> None:
        e = effects_of(node, self.gm, self.memo)
        if e is PURE:
            return
        self.writes = self.writes or any(w in self.inputs for w in e.writes)
        touched = tuple(t for w in e.writes for t in self.state.get(w, ()))
        self.found.append(replace_effects(e, writes=(), aliases=(), writes_state=e.writes_state + touched))
        if any(a in self.inputs for a in e.aliases):
            self.inputs.add(node)
        if kept := distinct_tensors(t for a in e.aliases for t in self.state.get(a, ())):
            self.state[node] = kept
