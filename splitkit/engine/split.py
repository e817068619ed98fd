"""Split a graph by a policy: plan, complete, check, cut, emit."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import signature
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal, cast

from torch import fx, nn
from torch.fx import Node

from splitkit import _torch
from splitkit._gc import collector_for_new_objects
from splitkit.checks import is_word, shown
from splitkit.costs import Costs, default, unit
from splitkit.costs.named import priced
from splitkit.costs.recorded import record_of
from splitkit.costs.roofline import decomposed_attention
from splitkit.engine.codegen.emit import Style, emit, unique_name
from splitkit.engine.complete import check_plan, complete_plan
from splitkit.engine.overlap_checks import add_overlap_check, keeps_order, rename_checked_attributes
from splitkit.engine.subgraphs import Subgraph, extract_subgraphs, part_graph, part_summary, segments_of
from splitkit.errors import CycleError, PlanError, PolicyError, listed
from splitkit.graph.dataflow import Assumed, Dataflow, analyze, assumed_tensors, calls_around
from splitkit.graph.input_overlap import refuse_objects
from splitkit.graph.joint_marks import is_joint
from splitkit.graph.node_selection import no_module
from splitkit.graph.storages import parameters_and_buffers
from splitkit.memory.kernels.target_kernels import CPU
from splitkit.pipeline.purpose import request_of
from splitkit.plans.part_order import part_order
from splitkit.plans.parts import PARENT, PartKey, PlanRequest
from splitkit.plans.plan_file import policy_text
from splitkit.plans.policy import Policy, PolicyLike, as_plan
from splitkit.plans.record import Plan, ShownPlan
from splitkit.plans.rewrite import condense, refine
from splitkit.prices import kernels_of
from splitkit.short_repr import brief, few

if TYPE_CHECKING:
    from networkx import DiGraph


OnCycle = Literal["error", "refine", "merge"]
PIPELINING = "pp"
"""The affix with which ``torch.distributed.pipelining`` calls ``split_module``, and by which it finds the stages later.

It runs the graph of the parent itself, and the callers of its ``Pipe`` read values from a flat tuple.
"""
_WAYS_OUT: Mapping[str, Callable[[Dataflow, Plan], Plan]] = {"refine": refine, "merge": condense}


@dataclass(frozen=True)
class Split(ShownPlan):
    """A graph that was split into parts. Calling it runs it like the original.

    A notebook shows it as a picture; `view` is an interactive page.

    Attributes:
        module: the parent; its children are the parts.
        plan: the complete plan: a place for every node.
        flow: the facts about the original graph.
        subgraphs: part -> its nodes, inputs and outputs, in the order of execution.
        parts: part -> its module, in the order of execution.
        qualified_names: name of every parameter and buffer in `module` -> its name in the original.
        copies: part (and `PARENT`) -> the original nodes that it computes -> their copies.
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
        """Return a header line and a line for each of the first parts: its ops, parameters, inputs and outputs."""
        own = sum(self.flow.is_placeable(n) for n in self.copies[PARENT])
        note = f": {self.plan.note}" if self.plan.note else ""
        head = f"Split into {len(self.parts)} parts{f', {own} ops in the parent' if own else ''}{note}"
        lines = (part_summary(self.names[key], sub, self.flow, self.plan) for key, sub in self.subgraphs.items())
        return "\n".join([head, *few(lines, "parts")])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the parts in order, with the arguments and results of the original."""
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
        """Groups of names in `module` that stand for one Parameter in several parts.

        In one process autograd sums the gradients of such a group; across processes they must be all-reduced.
        """
        groups: dict[int, dict[str, str]] = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            owner = name.split(".")[0]
            groups.setdefault(id(parameter), {})[name] = owner if owner in self.names.values() else ""
        return tuple(tuple(names) for names in groups.values() if len(set(names.values())) > 1)

    def __post_init__(self) -> None:
        _ = self.names  # computed now, because users may replace the children of the parent later

    @cached_property
    def names(self) -> Mapping[PartKey, str]:
        """Part -> the name of its module in the parent."""
        names = {id(child): name for name, child in self.module.named_children()}
        return {key: names[id(part)] for key, part in self.parts.items()}

    def replace(self, part: PartKey, module: nn.Module) -> None:
        """Let the parent call ``module`` instead of a part: a wrapper, ``DistributedDataParallel``, a compiled engine.

        `module` and `qualified_names` are modified in place. A parameter or buffer of the part that ``module`` holds,
        under whatever name, gets its new name, and the check for inputs that share memory (SK212) reads it there; it
        no longer compares those that ``module`` does not hold. ``parts`` keeps the part that `split` made.

        Args:
            part: the key of the part.
            module: a module with the inputs and outputs of the part.

        Raises:
            PlanError: SK216 if there is no such part, or ``module`` is not a module.
        """
        if part not in self.names:
            known = listed([*map(repr, self.names)], 8)
            raise PlanError("SK216", f"the split has no part {part!r}", f"Its parts are {known}.", [part])
        if not isinstance(module, nn.Module):
            raise PlanError(
                "SK216",
                f"part {part!r} would be replaced by a {type(module).__name__}, which is not a module",
                "Pass a torch.nn.Module, for example one whose forward calls the object.",
                [part],
            )
        name, names = self.names[part], cast(dict[str, str], self.qualified_names)
        renamed = _renamed(f"{name}.", self.module.get_submodule(name), module)
        originals = {old: names.pop(old) for old in [*names] if old.startswith(f"{name}.")}
        names |= {renamed[old]: original for old, original in originals.items() if old in renamed}
        self.module.set_submodule(name, module)
        if rename_checked_attributes(self.module.graph, lambda old: renamed.get(old, old), self.names.values()):
            self.module.recompile()
        self.__dict__.pop("locations", None)
        self.__dict__.pop("shared", None)

    def register_forward_hook(self, path: str, hook: Callable[[Any], Any]) -> HookHandle:
        """Call ``hook(output)`` at each call of a module of the model, where a part has computed its output.

        The parts of a captured graph hold the parameters of the model's modules and do not call the modules, so that a
        hook on ``model.h[3]``, or on a module of that name in a part, never runs. This one does::

            handle = split.register_forward_hook("h.3", lambda output: seen.append(output.detach()))

        If the hook returns a value, that value takes the place of the output. The hook is set in the part that computes
        the output (`parts` is modified in place), so parts that run on other ranks or devices keep it.

        Args:
            path: the name of the module in the model, as in ``model.named_modules()``.
            hook: takes the output of the module: the value that is read outside of it.

        Returns:
            A handle; ``handle.remove()`` removes the hook.

        Raises:
            PolicyError: SK304 if the graph has no node of such a module.
            PlanError: SK221 if several values of the module, or none, are read outside of it, several parts compute its
                output, or the hook does not take one argument.
        """
        _check_arguments(path, hook)
        modules, made = {PARENT: self.module, **self.parts}, []
        for output in _outputs_of_calls([*self.flow.index], path):
            keys = [key for key, copied in self.copies.items() if output in copied]
            if len(keys) != 1:
                where = f"parts {listed([*map(repr, keys)], 4)} each compute" if keys else "no part computes"
                raise _refused(path, f"{where} its output {output.name}", [output])
            made.append((modules[keys[0]], self.copies[keys[0]][output]))
        return HookHandle(tuple((module, _inserted(module, node, path, hook)) for module, node in made))

    def to_networkx(self) -> DiGraph[Any]:
        """Return the parts as an acyclic graph; nodes that the parent computes itself are vertices too, as
        ``fx.Node``::

            part 0 ──(relu, 4096 bytes)──> part 1 ──> part 2

        An edge has the attributes ``values`` (names of the values that are passed), ``bytes`` (their size, as far as
        it is known) and ``effect``, which is true if no value is passed and the reader only waits for an effect on
        memory, random numbers or the outside world. A vertex has the attributes ``kind`` (``"part"``, or the op of a
        node of the parent), ``name`` (of the module or node), ``nodes`` (how many it computes) and ``device``. Its
        ``inputs`` and ``input_bytes`` describe the values from inputs and attributes of the parent, its ``outputs`` and
        ``output_bytes`` those for the output.
        """
        return part_graph(self.flow, self.plan, self.subgraphs, self.names, self.copies[PARENT])

    def __deepcopy__(self, memo: dict[int, Any]) -> Split:
        """Return a split with copied modules; its plan and facts refer to the same original graph."""
        module = copy.deepcopy(self.module, memo)
        parts = {key: cast(fx.GraphModule, module.get_submodule(name)) for key, name in self.names.items()}
        copies: dict[PartKey, Mapping[Node, Node]] = {}
        for key, made in self.copies.items():
            by_name = {n.name: n for n in (module if key is PARENT else parts[key]).graph.nodes}
            copies[key] = {node: by_name[copied.name] for node, copied in made.items()}
        return replace(self, module=module, parts=parts, copies=copies)


def plan(gm: fx.GraphModule, policy: PolicyLike, costs: Costs | None = None, *, on_cycle: OnCycle = "error") -> Plan:
    """Return a plan, which says which part computes which node, after checking that it can be carried out.

    Args:
        gm: the graph; it is not modified.
        policy: a policy, a plan, a mapping of nodes or names to parts, or a function from a node to its part.
        costs: prices; FLOPs by default, or one unit a node where the graph has no ``meta["val"]``.
        on_cycle: as in `split`.

    Raises:
        SplitError: the policy refuses (see `splitkit.policies`), or the plan breaks a rule (`PlanError`).
    """
    flow = analyze(gm)
    decided = decide(flow, policy, costs, on_cycle)
    whole = complete_plan(flow, decided)
    check_plan(flow, whole)
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
        parameters: with ``"own"``, each part holds the parameters and buffers that it reads under their original
            names. (A buffer that is written and that several parts read stays in the parent, so that it remains one
            buffer.) With ``"hoist"``, the parent holds all of them and passes them in.
        lazy: generate the code of each module at its first call; most of the time of a split goes into this code.
        on_cycle: what to do if parts depend on each other in a cycle: raise an ``"error"``, ``"refine"`` the parts so
            that one is visited several times, or ``"merge"`` the parts of the cycle.
        check_inputs: let the parent refuse a call (SK212) in which inputs share memory that its parts would use in a
            different order than the graph. Only a split that writes an input, parameter or buffer and changes the order
            has this check, as the first call in the parent; it takes about 1 us for each tensor that it compares.

    Raises:
        GraphError: the graph cannot be analysed (SK1xx).
        PlanError: the plan breaks a rule: copies of a node that may run only once (SK202), a cycle of parts (SK203) ...
        PolicyError: the policy refuses (SK3xx).
    """
    _check_choice("parameters", parameters, ("own", "hoist"))
    with collector_for_new_objects():
        flow = analyze(gm)
        whole = complete_plan(flow, decide(flow, policy, costs, on_cycle), parameters)
        check_plan(flow, whole)
        steps = extract_subgraphs(flow, whole)
        emitted = emit(flow, whole, steps, Style(), lazy)
        if check_inputs:
            add_object_check(flow, whole, steps, emitted.module)
            add_overlap_check(flow, steps, emitted)
    subgraphs = {s.key: s for s in steps if isinstance(s, Subgraph)}
    return Split(emitted.module, whole, flow, subgraphs, emitted.parts, emitted.qualified_names(), emitted.copies)


def decide(flow: Dataflow, policy: PolicyLike, costs: Costs | None, on_cycle: OnCycle) -> Plan:
    """Return the plan that a policy, or an object in its place, makes; handle cycles as ``on_cycle`` says."""
    _check_choice("on_cycle", on_cycle, ("error", *_WAYS_OUT))
    if costs is None and not isinstance(policy, Policy):
        decided = as_plan(policy, flow, unit(flow))  # only policies look at prices
    else:
        costs = default(flow) if costs is None else costs
        decided = with_origin(as_plan(policy, flow, costs), policy, flow, costs)
    if on_cycle == "error":
        return decided
    try:
        part_order(flow, complete_plan(flow, decided))
    except CycleError:
        way_out = _WAYS_OUT[on_cycle](flow, decided)
        what = "visits" if on_cycle == "refine" else "parts"
        return replace(way_out, note=f"{decided.note}, {on_cycle}d to {len(way_out.parts)} {what}".lstrip(", "))
    return decided


def with_origin(plan: Plan, policy: object, flow: Dataflow, costs: Costs) -> Plan:
    """Return the plan with a record of the policy, its request and its prices; a plan that has them keeps them."""
    if not plan.policy and (text := policy_text(policy)):
        plan = replace(plan, policy=text)
    if plan.request == PlanRequest() and isinstance(policy, Policy):
        request = request_of(policy, costs, joint=is_joint(flow.graph))
        if plan.claim is not None and plan.claim.objective == "tokens":
            request = replace(request, tokens=int(plan.claim.value))
        plan = replace(plan, request=request)
    if plan.prices is not None:
        return plan
    price = getattr(policy, "price", None)
    used = priced(flow, costs, price if is_word(price, "fused") else None)
    elsewhere = is_joint(flow.graph) and kernels_of(used) not in (None, CPU)
    if elsewhere and any(decomposed_attention(flow.graph)):
        plan = replace(plan, note=f"{plan.note}. {_SCORES}" if plan.note else _SCORES)
    return replace(plan, prices=record_of(used, flow))


_SCORES = "Attention counts as a CPU computes it, and one kernel of the device keeps less"


def _check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        *others, last = map(repr, known)
        raise PolicyError("SK302", f"{name}={value!r} is not known", f"Use {', '.join(others)} or {last}.")


def _renamed(prefix: str, before: nn.Module, now: nn.Module) -> dict[str, str]:
    """Return the names of parameters and buffers in the old module -> their names in the new one, if it has them."""
    known = {id(tensor): name for name, tensor in parameters_and_buffers(now).items()}
    kept = {name: known.get(id(tensor)) for name, tensor in parameters_and_buffers(before).items()}
    return {f"{prefix}{name}": f"{prefix}{new}" for name, new in kept.items() if new is not None}


# Check at each call of a split that its inputs are tensors, where the order of its parts relies on that.


def _keys(assumed: Assumed) -> list[tuple[bool, object]]:
    """Return the path of a value up to the first key that JSON cannot hold; the check searches from there."""
    return [*takewhile(lambda step: isinstance(step[1], int | str) and not isinstance(step[1], bool), assumed.path)]


def add_object_check(flow: Dataflow, plan: Plan, steps: Sequence[Subgraph | Node], module: fx.GraphModule) -> None:
    """Let the parent refuse inputs that are not tensors (SK219), if the order of its parts relies on tensors.

    Args:
        flow: facts about the graph.
        plan: the complete plan.
        steps: the parts and the parent's own nodes, in the order in which the parent runs them.
        module: the parent; the check is inserted after its inputs.
    """
    assumed = assumed_tensors(flow)
    if not assumed or (keeps_order(flow, steps) and _runs_once(plan, assumed.values())):
        return
    wanted, graph = {str(n.target): found for n, found in assumed.items()}, module.graph
    inputs = [n for n in graph.find_nodes(op="placeholder") if str(n.target) in wanted]
    table = [(str(n.target), [(_keys(a), a.by[0].name, a.no_array) for a in wanted[str(n.target)]]) for n in inputs]
    with graph.inserting_before(next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr"))):
        graph.call_function(refuse_objects, (inputs, json.dumps(table)))
    module.recompile()


def _runs_once(plan: Plan, assumed: Iterable[tuple[Assumed, ...]]) -> bool:
    """Whether each node that assumes a tensor runs exactly once. If it is an object, its method may have effects."""
    return all(len(plan.places[node]) == 1 for all_ in assumed for a in all_ for node in a.by)


# Hooks on the outputs of the model's modules, which the parts of a captured graph compute but do not call.


class OutputHook(nn.Module):
    """A node of a part that calls a hook."""

    def __init__(self, hook: Callable[[Any], Any]) -> None:
        super().__init__()
        self.hook = hook

    def forward(self, output: Any) -> Any:
        """Return what the hook returns or, if that is ``None``, the output itself."""
        result = self.hook(output)
        return output if result is None else result


@dataclass(frozen=True)
class HookHandle:
    """Removes a hook that `splitkit.engine.split.Split.register_forward_hook` has set.

    Attributes:
        nodes: the nodes that call the hook, each with the module whose graph it is in.
    """

    nodes: tuple[tuple[fx.GraphModule, Node], ...]

    def remove(self) -> None:
        """Remove the hook; a second call changes nothing."""
        for module, node in self.nodes:
            if node in set(module.graph.nodes):
                node.replace_all_uses_with(cast(Node, node.args[0]))
                module.graph.erase_node(node)
                module.delete_submodule(str(node.target))
                module.recompile()


def _check_arguments(path: str, hook: Callable[[Any], Any]) -> None:
    try:
        signature(hook).bind(None)
    except TypeError as error:
        reason = f"a hook on {path!r} is called with the output of the module alone, but {shown(hook)}: {error}"
        remedy = "Give a function of the output, and not of (module, args, output): lambda output: ..."
        raise PlanError("SK221", reason, remedy) from None
    except ValueError:
        return  # functions of torch do not tell what they take


def _inserted(module: fx.GraphModule, node: Node, path: str, hook: Callable[[Any], Any]) -> Node:
    name = unique_name(f"hook_{path.replace('.', '_')}", dict(module.named_children()))
    module.add_submodule(name, OutputHook(hook))
    with module.graph.inserting_after(node):
        made = module.graph.call_module(name, (node,))
    made.meta.update(node.meta)
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
    module.recompile()
    return made


def _outputs_of_calls(nodes: list[Node], path: str) -> Iterable[Node]:
    """Yield the one node of each call of a module whose value is read outside of the call."""
    calls: dict[str, dict[Node, None]] = {}
    known: dict[str, None] = {}
    for node in nodes:
        if node.op.startswith("call_"):
            for key, module in calls_around(node).items():
                known[module] = None
                if module == path:
                    calls.setdefault(key, {})[node] = None
    if not calls:
        raise no_module(f"no node of the graph was captured in a module {path!r}", path, known)
    for inside in calls.values():
        outputs = [node for node in inside if not inside.keys() >= node.users.keys()]
        if len(outputs) != 1:
            found = (
                f"several of its values ({listed([n.name for n in outputs], 4)})" if outputs else "none of its values"
            )
            raise _refused(path, f"{found} are read outside of it", outputs)
        yield outputs[0]


def _refused(path: str, why: str, nodes: list[Node]) -> PlanError:
    return PlanError(
        "SK221",
        f"no hook can be put on the module {path!r} of the model: {why}",
        "Put the hook on a module in it, or around it, that has one output.",
        nodes,
    )


# A replacement for torch's ``split_module`` with the same signature, the same names and the same code of parts.


def split_module(
    m: fx.GraphModule,
    root_m: nn.Module | None,
    split_callback: PolicyLike | Callable[[Node], PartKey],
    qualname_map: dict[str, str] | None = None,
    keep_original_order: bool = False,
    keep_original_node_name: bool = False,
    keep_original_input_name: bool = True,
    *,
    partition_affix: str | None = None,
    tuple_return: bool = False,
    check_inputs: bool = True,
) -> fx.GraphModule:
    """Split a graph with the signature of ``torch.fx.passes.split_module.split_module``.

    Parameters and buffers stay in the parent and are passed in; called modules move into their part as ``a_b``. Two
    things differ from torch. ``split_callback`` may be any policy that `split` takes, and is called once per node.
    Parts run in the order of their first nodes as far as data and effects allow, whatever ``keep_original_order``
    says. ``docs/split_module.md`` lists all differences.

    Args:
        m: the graph; it is not modified.
        root_m: ignored, as in torch; the attributes of ``m`` are used.
        split_callback: returns the part of a node, any hashable; ``None`` leaves the node in the parent.
        qualname_map: filled with names of moved modules -> their original names.
        keep_original_order: the parent reads attributes where they are first needed; and if each part is a segment of
            the graph, grad-mode and autocast ops stay where they are.
        keep_original_node_name: nodes keep their names; otherwise they get those that fx gives to new nodes.
        keep_original_input_name: name the inputs of parts after their values; otherwise ``arg_0`` ...
        partition_affix: part of the module names, ``submod_<affix>_<id>``. With ``"pp"``, the affix of
            ``torch.distributed.pipelining``, the parent takes and returns bare values as torch's does, without pytrees:
            an exported model returns a flat tuple.
        tuple_return: parts with one output return a tuple.
        check_inputs: as in `split`; with ``partition_affix="pp"`` there is no check, because the parent is never
            called.
    """
    style = Style(
        partition_affix,
        tuple_return,
        keep_original_input_name,
        keep_original_node_name,
        late_attributes=keep_original_order,
        like_torch=True,
        flat=partition_affix == PIPELINING,
    )
    with collector_for_new_objects():
        flow, labels = analyze(m), dict[Node, PartKey]()
        asked = _recorded(split_callback, labels) if keep_original_order else split_callback
        whole = complete_plan(flow, decide(flow, asked, None, "error"), "hoist")
        check_plan(flow, whole)
        steps = extract_subgraphs(flow, whole, as_met=True)
        segments = segments_of(flow, whole, labels) if labels else {}
        emitted = emit(flow, whole, steps, style, _torch.wants_lazy_code(), segments)
        if check_inputs and not style.flat:
            # No `add_object_check`: the parent should have the nodes that torch's has.
            add_overlap_check(flow, steps, emitted)
    if qualname_map is not None:
        for part, attributes in emitted.attributes.items():
            qualname_map |= {f"{part}.{name}": original for name, original in attributes.items() if part}
    return emitted.module


def _recorded(policy: PolicyLike, labels: dict[Node, PartKey]) -> PolicyLike:
    """Return a callback that records its answers in ``labels``, also those for state ops, which a plan ignores."""
    if isinstance(policy, (Policy, Plan, Mapping, type)) or not callable(policy):
        return policy
    return lambda node: labels.setdefault(node, policy(node))
