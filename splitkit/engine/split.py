"""Split a graph by a policy: plan, complete, check, cut, emit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import fx, nn
from torch.fx import Node

from splitkit._gc import collector_of_new_objects
from splitkit.brief import brief, few
from splitkit.costs import Costs, default, unit
from splitkit.engine.complete import check, complete
from splitkit.engine.cut import Subgraph, cut
from splitkit.engine.emit import Emitted, emit
from splitkit.engine.inputkinds import input_kinds
from splitkit.engine.names import Style
from splitkit.engine.overlaps import overlap_check
from splitkit.engine.replacing import replace_child, require_replaceable
from splitkit.errors import CycleError, PolicyError
from splitkit.graph.dataflow import Dataflow, analyze
from splitkit.graph.storages import Lookup
from splitkit.plans.order import part_order
from splitkit.plans.parts import HOST, PartKey
from splitkit.plans.policy import Policy, PolicyLike, as_plan
from splitkit.plans.record import Plan
from splitkit.plans.rewrite import condense, refine
from splitkit.shown import Shown

if TYPE_CHECKING:
    from networkx import DiGraph

OnCycle = Literal["error", "refine", "merge"]
PIPELINING = "pp"
"""The affix by which ``torch.distributed.pipelining`` asks for its stages, and by which it finds them afterwards.

It runs the graph of the parent itself, and all who call its ``Pipe`` read values out of a flat tuple.
"""
_WAYS_OUT: Mapping[str, Callable[[Dataflow, Plan], Plan]] = {"refine": refine, "merge": condense}


@dataclass(frozen=True)
class Split(Shown):
    """A graph that was split. Calling it runs it like the original.

    In a notebook it draws itself, and `view` is a page to steer: see `splitkit.Plan`, whose options it takes.

    Attributes:
        module: the parent; its children are the parts.
        plan: the complete plan: a place for every node.
        flow: the facts about the original graph.
        subgraphs: part -> what it computes, takes and gives, in the order of execution.
        parts: part -> its module, in the order of execution.
        qualified_names: name of every parameter and buffer in `module` -> its name in the original.
        copies: part (and `HOST`) -> the original nodes that it computes -> their copies.
    """

    module: fx.GraphModule
    plan: Plan
    flow: Dataflow
    subgraphs: Mapping[PartKey, Subgraph]
    parts: Mapping[PartKey, fx.GraphModule]
    qualified_names: Mapping[str, str]
    copies: Mapping[PartKey, Mapping[Node, Node]]

    __repr__ = brief

    def __str__(self) -> str:
        """A line, and one for each of the first parts: what it computes, holds, takes and gives."""
        from splitkit.engine.summary import line_of

        own = sum(self.flow.is_placeable(n) for n in self.copies[HOST])
        note = f": {self.plan.note}" if self.plan.note else ""
        head = f"Split into {len(self.parts)} parts{f', {own} ops in the host' if own else ''}{note}"
        lines = (line_of(self.names[key], sub, self.flow, self.plan) for key, sub in self.subgraphs.items())
        return "\n".join([head, *few(lines, "parts")])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the parts in order; takes and returns what the original does."""
        return self.module(*args, **kwargs)

    @cached_property
    def locations(self) -> Mapping[str, tuple[str, ...]]:
        """The inverse of `qualified_names`: a name in the original -> its names in `module`."""
        where: dict[str, tuple[str, ...]] = {}
        for name, original in self.qualified_names.items():
            where[original] = (*where.get(original, ()), name)
        return where

    @cached_property
    def shared(self) -> tuple[tuple[str, ...], ...]:
        """Groups of names in `module` that are one Parameter in several parts.

        In one process autograd sums its gradients; across processes their gradients must be all-reduced.
        """
        groups: dict[int, dict[str, str]] = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            owner = name.split(".")[0]
            groups.setdefault(id(parameter), {})[name] = owner if owner in self.names.values() else ""
        return tuple(tuple(names) for names in groups.values() if len(set(names.values())) > 1)

    def __post_init__(self) -> None:
        _ = self.names  # while the children of the parent are the parts: users may replace them

    @cached_property
    def names(self) -> Mapping[PartKey, str]:
        """Part -> what its module is called in the parent."""
        names = {id(child): name for name, child in self.module.named_children()}
        return {key: names[id(part)] for key, part in self.parts.items()}

    def replace(self, part: PartKey, module: nn.Module) -> None:
        """Let the parent call ``module`` instead of a part: a wrapper, ``DistributedDataParallel``, a compiled engine.

        `module` and `qualified_names` are changed in place: a parameter or buffer of the part that ``module`` holds,
        under whatever name, goes by its new name, and the check for inputs that share memory (SK212) looks there. What
        ``module`` does not hold is not compared any more. ``parts`` keeps the part that `split` made.

        Args:
            part: the key of the part.
            module: takes and returns what the part does.

        Raises:
            PlanError: SK216 if there is no such part, or ``module`` is no module.
        """
        require_replaceable(part, module, self.names)
        names = cast(dict[str, str], self.qualified_names)
        replace_child(self.module, self.names[part], module, names, self.names.values())
        self.__dict__.pop("locations", None)
        self.__dict__.pop("shared", None)

    def to_networkx(self) -> DiGraph[Any]:
        """The parts as a graph without cycles; nodes that the host computes itself are in it too, as ``fx.Node``::

            part 0 ──(relu, 4096 bytes)──> part 1 ──> part 2

        Attributes of an edge: ``values`` (the names of what is handed on), ``bytes`` (of these, as far as sizes are
        known) and ``effect``: true where nothing is handed on, and one has to wait for what the other does to memory,
        random numbers or the outside world. Attributes of a node: ``kind`` (``"part"``, or the op of a node of the
        host), ``name`` (of the module, or the node), ``nodes`` (how many it computes), ``device``, and what it takes
        from the inputs and attributes of the parent and gives to the output: ``inputs``, ``input_bytes``, ``outputs``
        and ``output_bytes``.
        """
        from splitkit.engine.partgraph import part_graph

        return part_graph(self.flow, self.plan, self.subgraphs, self.names, self.copies[HOST])

    def __deepcopy__(self, memo: dict[int, Any]) -> Split:
        """A split with modules of its own; plan and facts are about the same original graph."""
        module = copy.deepcopy(self.module, memo)
        parts = {key: cast(fx.GraphModule, module.get_submodule(name)) for key, name in self.names.items()}
        copies: dict[PartKey, Mapping[Node, Node]] = {}
        for key, made in self.copies.items():
            by_name = {n.name: n for n in (module if key is HOST else parts[key]).graph.nodes}
            copies[key] = {node: by_name[copied.name] for node, copied in made.items()}
        return replace(self, module=module, parts=parts, copies=copies)


def plan(gm: fx.GraphModule, policy: PolicyLike, costs: Costs | None = None, *, on_cycle: OnCycle = "error") -> Plan:
    """Decide which part computes which node, and check that the decision can be carried out.

    Args:
        gm: the graph; it is only read.
        policy: a policy, a plan, a mapping of nodes or names to parts, or a function from a node to its part.
        costs: prices; FLOPs by default, or one unit a node where the graph has no ``meta["val"]``.
        on_cycle: as in `split`.

    Raises:
        SplitError: see `splitkit.policies` for what policies refuse; PlanError when the plan cannot be right.
    """
    flow = analyze(gm)
    decided = decide(flow, policy, costs, on_cycle)
    whole = complete(flow, decided)
    check(flow, whole)
    part_order(flow, whole)
    return decided


def split(
    gm: fx.GraphModule,
    policy: PolicyLike,
    *,
    costs: Costs | None = None,
    parameters: Literal["own", "hoist"] = "own",
    lazy: bool = False,
    on_cycle: OnCycle = "error",
    check_inputs: bool = True,
) -> Split:
    """Split a graph into parts.

    Args:
        gm: the graph; it is left as it is. Parameters, buffers and modules are shared with it, not copied.
        policy: a policy, a plan, a mapping of nodes or names to parts, or a function from a node to its part.
        costs: prices; FLOPs by default, or one unit a node where the graph has no ``meta["val"]``.
        parameters: ``"own"``: each part holds the parameters and buffers it reads under their original names (but a
            buffer that is written and that several parts read stays in the parent, so that it remains one);
            ``"hoist"``: the parent holds all of them and passes them in.
        lazy: make the code of each module when it is first called, which most of the time of a split goes to.
        on_cycle: what to do with parts that depend on each other in a cycle: ``"error"``, ``"refine"`` to visit a
            part several times, or ``"merge"`` to join the parts of a cycle.
        check_inputs: let the parent refuse a call (SK212) in which inputs share memory that its parts would use in
            another order than the graph. Only a split that writes an input, parameter or buffer and changes the order
            has this check, as the first call of the parent; it costs about 1 us for each tensor that it compares.

    Raises:
        GraphError: the graph cannot be analysed (SK1xx).
        PlanError: the plan cannot be right: copies of what may run once (SK202), a cycle of parts (SK203) ...
        PolicyError: the policy refuses (SK3xx).
    """
    _check_choice("parameters", parameters, ("own", "hoist"))
    with collector_of_new_objects():
        flow = analyze(gm)
        whole = complete(flow, decide(flow, policy, costs, on_cycle), parameters)
        check(flow, whole)
        units = cut(flow, whole)
        emitted = emit(flow, whole, units, Style(), lazy)
        if check_inputs:
            watch_kinds(flow, whole, units, emitted)
            watch_memory(flow, units, emitted)
    subgraphs = {u.key: u for u in units if isinstance(u, Subgraph)}
    return Split(emitted.module, whole, flow, subgraphs, emitted.parts, _qualified_names(emitted), emitted.copies)


def decide(flow: Dataflow, policy: PolicyLike, costs: Costs | None, on_cycle: OnCycle) -> Plan:
    """The plan of whatever says which part computes which node, cycles dealt with as asked."""
    _check_choice("on_cycle", on_cycle, ("error", *_WAYS_OUT))
    if costs is None:
        costs = default(flow) if isinstance(policy, Policy) else unit(flow)  # only policies look at prices
    decided = as_plan(policy, flow, costs)
    if on_cycle == "error":
        return decided
    try:
        part_order(flow, complete(flow, decided))
    except CycleError:
        way_out = _WAYS_OUT[on_cycle](flow, decided)
        what = "visits" if on_cycle == "refine" else "parts"
        return replace(way_out, note=f"{decided.note}, {on_cycle}d to {len(way_out.parts)} {what}".lstrip(", "))
    return decided


def _check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        *others, last = map(repr, known)
        raise PolicyError("SK302", f"{name}={value!r} is not known", f"Use {', '.join(others)} or {last}.")


def watch_kinds(flow: Dataflow, plan: Plan, units: tuple[Subgraph | Node, ...], emitted: Emitted) -> None:
    """Let the parent refuse objects among its inputs, where its parts rely on tensors."""
    if kinds := input_kinds(flow, plan, units):
        kinds.write(emitted.module)


def watch_memory(flow: Dataflow, units: tuple[Subgraph | Node, ...], emitted: Emitted) -> None:
    """Let the parent refuse inputs that share memory, if its parts would use it in another order than the graph."""
    if check := overlap_check(flow, units, lambda: _qualified_names(emitted)):
        check.write(emitted.module, {name for name in emitted.attributes if name})


def _qualified_names(emitted: Emitted) -> dict[str, str]:
    """Every parameter and buffer of the split module -> its original name."""
    names: dict[str, str] = {}
    for part, attributes in emitted.attributes.items():
        find = Lookup(emitted.module.get_submodule(part))
        prefix = f"{part}." if part else ""
        for name, original in attributes.items():
            value = find(name)
            if isinstance(value, nn.Module):  # a called module, or the body of a higher-order op
                inner = [n for n, _ in value.named_parameters(remove_duplicate=False)]
                inner += [n for n, _ in value.named_buffers(remove_duplicate=False)]
                names |= {f"{prefix}{name}.{n}": f"{original}.{n}" for n in inner}
            elif isinstance(value, torch.Tensor):
                names[f"{prefix}{name}"] = original
    return names
