"""Write the parts and their parent as new fx graphs; the input graph is not modified."""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn
from torch.fx import Node
from torch.utils.checkpoint import checkpoint

from splitkit import _torch
from splitkit.engine.codegen.part_modules import add_parts, build_module, carry_hooks, share_whole_modules
from splitkit.engine.codegen.restore_modes import restore_modes_on_error
from splitkit.engine.codegen.writer import LeanGraph, Writer
from splitkit.engine.subgraphs import SegmentGraph, SegmentStateOps, Subgraph, with_empty_segments
from splitkit.graph.ambient import SETTINGS, Setting
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.ops.functions import may_change_modes
from splitkit.graph.scope import CALLERS, NEUTRAL, Scope, region_attributes, region_kind
from splitkit.graph.storages import Lookup, parameters_and_buffers
from splitkit.plans.parts import PARENT, PartKey
from splitkit.plans.record import Plan


@dataclass(frozen=True)
class Emitted:
    """The result of `emit`.

    Attributes:
        module: the parent, which runs like the original.
        parts: the module of each part, in the order in which the parent calls them.
        attributes: name of a part (``""`` for the parent) -> its attribute names -> their names in the original.
        copies: part (or `PARENT`) -> the original nodes that it computes -> their copies.
    """

    module: fx.GraphModule
    parts: Mapping[PartKey, fx.GraphModule]
    attributes: Mapping[str, Mapping[str, str]]
    copies: Mapping[PartKey, Mapping[Node, Node]]

    def qualified_names(self) -> dict[str, str]:
        """Return the name of every parameter and buffer of the parent -> its original name."""
        names: dict[str, str] = {}
        for part, attributes in self.attributes.items():
            find = Lookup(self.module.get_submodule(part))
            prefix = f"{part}." if part else ""
            for name, original in attributes.items():
                value = find(name)
                if isinstance(value, nn.Module):  # a called module, or the body of a higher-order op
                    names |= {f"{prefix}{name}.{n}": f"{original}.{n}" for n in parameters_and_buffers(value)}
                elif isinstance(value, torch.Tensor):
                    names[f"{prefix}{name}"] = original
        return names


def emit(
    flow: Dataflow,
    plan: Plan,
    steps: tuple[Subgraph | Node, ...],
    style: Style,
    lazy: bool = False,
    segments: Mapping[PartKey, SegmentStateOps] = MappingProxyType({}),
) -> Emitted:
    """Build one module per part, and the parent that calls them.

    The parent keeps the signature of the original (pytrees unless the style is flat, defaults, keyword arguments).
    Every node keeps its meta, and the modules get ``gm.meta`` and ``training``. Parameters, buffers and called modules
    are shared with the original.

    Args:
        flow: facts about the graph.
        plan: a complete plan.
        steps: the result of `splitkit.engine.subgraphs.extract_subgraphs`.
        style: options for names and return values.
        lazy: generate the code of each module at its first call.
        segments: the state ops of parts that keep them where they are; for all parts or for none.
    """
    if segments:
        plan, steps = with_empty_segments(plan, steps, segments)
    subgraphs = [s for s in steps if isinstance(s, Subgraph)]
    own = [str(s.target) for s in steps if isinstance(s, Node) and s.op in ("get_attr", "call_module")]
    taken = {target.split(".")[0] for target in (*own, *region_attributes(flow.scope))}
    names = module_names([s.key for s in subgraphs], taken, style)
    parts: dict[PartKey, fx.GraphModule] = {}
    attributes: dict[str, Mapping[str, str]] = {}
    copies: dict[PartKey, Mapping[Node, Node]] = {}
    bases: dict[int, str] = {}
    whole, kind = _modules_to_share(flow), "GraphModule" if style.like_torch else type(flow.root).__name__
    for sub in subgraphs:
        graph, env, read = _write_part(sub, flow, style, segments.get(sub.key), bases)
        parts[sub.key] = build_module(flow.root, graph, read, kind, lazy, is_part=True)
        attributes[names[sub.key]] = share_whole_modules(parts[sub.key], flow.root, read, whole)
        copies[sub.key] = {n: env[n] for n in sub.nodes}
    parent = _Parent(flow, plan, style, names, NEUTRAL if segments else flow.final)
    parent.write(steps)
    if segments:  # a part ends in the grad mode in which the next one begins
        restore_modes_on_error(parent.graph, always=True)
    copies[PARENT] = parent.copies
    read = {name: name for name in parent.attributes}
    module = build_module(flow.root, parent.graph, read, kind, lazy)
    attributes[""] = share_whole_modules(module, flow.root, read, whole)
    add_parts(module, {names[key]: part for key, part in parts.items()})
    module.meta = {**_torch.meta_of(flow.root), "partition_names": set(names.values())}
    if not style.flat:  # hooks expect the arguments and results of the original
        carry_hooks(flow.root, module)
    return Emitted(module, parts, attributes, copies)


def _modules_to_share(flow: Dataflow) -> set[str]:
    """Return the modules that a part calls while another part reads an attribute of them that changes."""
    owners = {str(n.target).rpartition(".")[0] for n in flow.written}
    owners &= {str(n.target) for n in flow.scope if n.op == "call_module"} if owners else owners
    return owners | flow.bindings.whole


def _write_part(
    sub: Subgraph, flow: Dataflow, style: Style, segment: SegmentStateOps | None, bases: dict[int, str]
) -> tuple[fx.Graph, dict[Node, Node], dict[str, str]]:
    """Write the graph of a part: its inputs, the attributes that it reads, its nodes in their scopes, its output.

    Returns:
        The graph, node -> its copy there, and the names of its attributes -> their names in the original.
    """
    writer = Writer(LeanGraph(), style.original_node_names, bases)
    env: dict[Node, Node] = {}
    for number, value in enumerate(sub.inputs):
        name = value.name if style.original_input_names else f"arg_{number}"
        env[value] = writer.placeholder(name, value.type)
        env[value].meta.update(value.meta)
    in_time = flow.bindings.reads  # opaque code may rebind these: they are read in graph order, not first
    read = [n for n in sub.nodes if n.op == "get_attr" and n not in in_time]
    called = [str(n.target) for n in sub.nodes if n.op == "call_module"]
    renamed = flat_names(called) if style.like_torch else {}

    def copy(node: Node) -> None:
        env[node] = writer.copy(node, value_of, renamed.get(str(node.target)) if node.op == "call_module" else None)

    value_of = env.__getitem__
    computed = [n for n in sub.nodes if n.op != "get_attr" or n in in_time]
    if segment:
        of_regions = _write_segment(SegmentGraph(segment, writer.graph), flow, read, computed, copy)
    else:
        of_regions = _write_scoped(ScopedGraph(writer), flow, read, computed, copy)
    values = tuple(map(value_of, sub.outputs))
    single = len(values) == 1 and not style.tuple_return
    output = writer.append("output", "output", (values[0] if single else values,), "output")
    _describe(output, sub.outputs, single)
    targets = [*(str(n.target) for n in sub.nodes if n.op == "get_attr"), *called, *of_regions]
    return writer.graph, env, {renamed.get(target, target): target for target in targets}


def _write_scoped(
    scoped: ScopedGraph, flow: Dataflow, read: list[Node], computed: list[Node], copy: Callable[[Node], None]
) -> Iterable[str]:
    """Write the nodes in their scopes; return the names of the attributes that regions need."""
    for node in read:
        copy(node)
    for node in computed:
        if node.op != "get_attr":
            scoped.move_to(flow.scope[node])
        copy(node)
        if may_change_modes(node, flow.effects[node]):
            scoped.opaque_ran()
    scoped.move_to(NEUTRAL)
    if any(flow.effects[node].ambient for node in computed):
        restore_modes_on_error(scoped.graph)
    return scoped.attributes


def _write_segment(
    segment_graph: SegmentGraph, flow: Dataflow, read: list[Node], computed: list[Node], copy: Callable[[Node], None]
) -> Iterable[str]:
    """Write the nodes and state ops of a segment; return no names, since these state ops need no attributes."""
    segment_graph.begin()
    for node in read:
        copy(node)
    for node in sorted((*computed, *segment_graph.segment.state_ops), key=flow.index.__getitem__):
        if node in flow.scope:
            copy(node)
        else:
            segment_graph.pass_by(node)
    segment_graph.end()
    restore_modes_on_error(segment_graph.graph)
    return ()


class _Parent:
    """The parent graph under construction."""

    def __init__(self, flow: Dataflow, plan: Plan, style: Style, names: Mapping[PartKey, str], final: Scope) -> None:
        self._flow, self._plan, self._style, self._names, self._final = flow, plan, style, names, final
        self.graph = LeanGraph()
        if not style.flat:
            self.graph.set_codegen(_torch.codegen_of(flow.graph))
        self._writer = Writer(self.graph, style.original_node_names)
        self._scoped = ScopedGraph(self._writer)
        self.env: dict[Node, Node] = {}  # value -> the node of the parent that holds it now
        self.copies: dict[Node, Node] = {}

    @property
    def attributes(self) -> dict[str, None]:
        """The names of the attributes that the parent reads itself."""
        own = (str(n.target) for n in self.copies if n.op in ("get_attr", "call_module"))
        return dict.fromkeys([*own, *self._scoped.attributes])

    def write(self, steps: tuple[Subgraph | Node, ...]) -> None:
        """Write the inputs, the attributes, the calls of parts and the parent's own nodes, and the output."""
        own, in_time = [s for s in steps if isinstance(s, Node)], self._flow.bindings.reads
        for node in (n for n in own if n.op == "placeholder"):
            self._copy(node)
        if not self._style.late_attributes:
            for node in (n for n in own if n.op == "get_attr" and n not in in_time):
                self._copy(node)
        for step in steps:
            if isinstance(step, Subgraph):
                self._call(step)
            elif step.op == "output":
                self._scoped.move_to(self._final)
                self._copy(step)
            elif step in in_time:
                self._copy(step)
            elif step.op not in ("placeholder", "get_attr"):
                self._scoped.move_to(self._flow.scope[step])
                self._copy(step)
                self._ran(step)

    def _ran(self, *nodes: Node) -> None:
        if any(may_change_modes(n, self._flow.effects[n]) for n in nodes):
            self._scoped.opaque_ran()

    def _copy(self, node: Node) -> None:
        self.env[node] = self.copies[node] = self._writer.copy(node, self._value)

    def _value(self, node: Node) -> Node:
        if node not in self.env:  # an attribute, which this style reads at its first use
            self._copy(node)
        return self.env[node]

    def _call(self, sub: Subgraph) -> None:
        self._scoped.move_to(NEUTRAL)  # parts open the regions of their nodes themselves
        call = self._call_node(sub, tuple(map(self._value, sub.inputs)))
        self._ran(*sub.nodes)
        single = len(sub.outputs) == 1 and not self._style.tuple_return
        _describe(call, sub.outputs, single)
        if single:
            self.env[sub.outputs[0]] = call
            return
        for position, value in enumerate(sub.outputs):
            name = "getitem" if self._style.like_torch else value.name
            item = self._writer.append("call_function", operator.getitem, (call, position), name)
            item.meta.update(value.meta)
            self.env[value] = item

    def _call_node(self, sub: Subgraph, inputs: tuple[Node, ...]) -> Node:
        name = self._names[sub.key]
        if self._plan.parts[sub.key].call == "plain":
            return self._writer.append("call_module", name, inputs, name)
        body = self.graph.get_attr(name)
        return self.graph.call_function(checkpoint, (body, *inputs), {"use_reentrant": False})


def _describe(node: Node, values: tuple[Node, ...], single: bool) -> None:
    """Set the meta of a call or output node from the values that it carries."""
    if single:
        node.meta.update(values[0].meta)
        return
    metas = [v.meta for v in values]
    for field in ("val", "example_value"):
        if metas and all(field in meta for meta in metas):
            node.meta[field] = tuple(meta[field] for meta in metas)


# A graph under construction that opens and closes regions, and writes settings, as its nodes need them.


class ScopedGraph:
    """A graph under construction that moves to the ambient state of each node.

    ``attributes`` are the names of the attributes that regions read, such as the hooks of saved tensors. An example::

        want: a, grad off     enter a; before = is_grad_enabled(); set(False)
        want: a, grad off     -
        want: a, b            set(before); enter b
        want: b               exit b; exit a; enter b           regions close in the order in which they nest
    """

    def __init__(self, writer: Writer) -> None:
        self.graph, self._writer = writer.graph, writer
        self.attributes: dict[str, None] = {}
        self._scope = NEUTRAL
        self._open: list[tuple[Node, Node, dict[str, Any]]] = []  # (enter, its copy, settings before it)
        self._settings: dict[str, Any] = dict.fromkeys(SETTINGS, CALLERS)  # the settings in force
        self._callers: dict[str, Node] = {}  # setting -> the node that yields the caller's value
        self._first: Node | None = None  # the first state op; before it, the caller's state is in force

    def move_to(self, want: Scope) -> None:
        """Close and open regions and write settings until the state is ``want``."""
        if want is self._scope or want == self._scope:
            return
        # Regions nest, so only the common prefix of those that are open can stay open.
        same = 0
        while same < min(len(self._open), len(want.regions)) and self._open[same][0] is want.regions[same]:
            same += 1
        while len(self._open) > same:
            self._close()
        opening = want.regions[same:]
        # Settings come first because some regions refuse to open under a wrong setting; not those that they set
        # themselves.
        self._write(want, {name for enter in opening for name in region_kind(enter).sets(enter)})
        for enter in opening:
            self._enter(enter)
        self._write(want)
        self._scope = want

    def opaque_ran(self) -> None:
        """Take the settings that opaque code, which has just run, has left as the caller's from here on."""
        set_here = [setting for name, setting in SETTINGS.items() if self._settings[name] is not CALLERS]
        self._callers = {setting.name: self._asked(setting) for setting in set_here}
        self._first = None

    def _enter(self, enter: Node) -> None:
        handle = self._append(self.graph.node_copy(enter, self._attribute))
        self._open.append((enter, handle, dict(self._settings)))
        self._settings |= region_kind(enter).sets(enter)

    def _attribute(self, node: Node) -> Node:
        """Copy an input of a region; it is an attribute, which every graph can read."""
        self.attributes[str(node.target)] = None
        return self.graph.node_copy(node)

    def _close(self) -> None:
        enter, handle, before = self._open.pop()
        kind = region_kind(enter)
        self._append(self.graph.call_function(kind.exit, (handle,) if kind.handle else ()))
        self._settings |= {name: before[name] for name in kind.sets(enter)}

    def _write(self, want: Scope, but: Container[str] = ()) -> None:
        for name, setting in SETTINGS.items():
            value = want.value(name)
            if name not in but and self._settings[name] != value:
                self._append(self._written(setting, value))
                self._settings[name] = value

    def _written(self, setting: Setting, value: Any) -> Node:
        if value is not CALLERS:
            return self._writer.call(*setting.write(value))
        return self._writer.call(setting.set, (self._asked(setting),))

    def _asked(self, setting: Setting) -> Node:
        """Return the node that yields the caller's value of a setting."""
        if setting.name not in self._callers:
            assert self._first is not None, "the caller's state needs no state op"
            with self.graph.inserting_before(self._first):
                self._callers[setting.name] = self.graph.call_function(setting.get)
        return self._callers[setting.name]

    def _append(self, state_op: Node) -> Node:
        if self._first is None:
            self._first = state_op
            restore_modes_on_error(self.graph)
        return state_op


# Names of the modules of parts and of their attributes.


@dataclass(frozen=True)
class Style:
    """Options of `emit` for names and return values; `split` uses the defaults.

    Attributes:
        affix: ``submod_<affix>_<key>`` instead of ``submod_<key>``.
        tuple_return: a part with one output returns a tuple with one item.
        original_input_names: inputs of parts have the names of their values; otherwise ``arg_0``, ``arg_1`` ...
        original_node_names: nodes keep their names; otherwise they are named after their targets, as fx names new
            nodes.
        late_attributes: the parent reads its attributes where they are first needed, not all at the start.
        like_torch: the other conventions of ``torch.fx.passes.split_module``: modules ``a.b`` of parts become ``a_b``,
            members of tuples are named ``getitem``, classes ``GraphModule``, and the inputs and outputs of parts are
            in the order of first use.
        flat: the parent takes and returns the bare values of its graph, without the pytrees of the original.
    """

    affix: str | None = None
    tuple_return: bool = False
    original_input_names: bool = True
    original_node_names: bool = True
    late_attributes: bool = False
    like_torch: bool = False
    flat: bool = False


def module_names(keys: Iterable[PartKey], taken: Container[str], style: Style) -> dict[PartKey, str]:
    """Return module names that are not ``taken``: ``submod_0``; ``submod_cuda_0_3`` for ``("cuda:0", 3)``."""
    names: dict[PartKey, str] = {}
    used: set[str] = set()
    for key in keys:
        atoms = key if isinstance(key, tuple) else (key,)
        stem = "_".join(["submod", *([_word(style.affix)] if style.affix else []), *(_word(a) for a in atoms)])
        names[key] = unique_name(stem, used, taken)
        used.add(names[key])
    return names


def flat_names(targets: Iterable[str]) -> dict[str, str]:
    """Return ``a.b`` -> ``a_b`` for each target, with a number appended if another target has that name."""
    flat: dict[str, str] = {}
    taken: set[str] = set()
    for target in dict.fromkeys(targets):
        flat[target] = unique_name(target.replace(".", "_"), taken)
        taken.add(flat[target])
    return flat


def unique_name(stem: str, *taken: Container[str]) -> str:
    """Return the first of `numbered_names` that is in none of ``taken``."""
    return next(name for name in numbered_names(stem) if not any(name in known for known in taken))


def numbered_names(stem: str) -> Iterator[str]:
    """Yield ``stem``, ``stem_1``, ``stem_2`` ..."""
    yield stem
    yield from (f"{stem}_{number}" for number in itertools.count(1))


def _word(atom: object) -> str:
    return re.sub(r"[^0-9A-Za-z_]", "_", str(atom))  # ASCII only: Python normalises other letters in identifiers (NFKC)
