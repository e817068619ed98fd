"""A replacement for torch's ``split_module`` with the same signature, the same names and the same code of parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import fx, nn
from torch.fx import Node

from splitkit import _torch
from splitkit._gc import collector_for_new_objects
from splitkit.engine.codegen.emit import Emitted, emit
from splitkit.engine.complete import check_plan, complete_plan
from splitkit.engine.module_names import Style
from splitkit.engine.overlap_checks import add_overlap_check
from splitkit.engine.split import PIPELINING, decide, qualified_names
from splitkit.engine.subgraphs import extract_subgraphs, segments_of
from splitkit.graph.dataflow import analyze
from splitkit.plans.parts import PartKey
from splitkit.plans.policy import Policy, PolicyLike
from splitkit.plans.record import Plan


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
        emitted = _emitted(m, split_callback, style, check_inputs and not style.flat)
    if qualname_map is not None:
        for part, attributes in emitted.attributes.items():
            qualname_map |= {f"{part}.{name}": original for name, original in attributes.items() if part}
    return emitted.module


def _emitted(
    m: fx.GraphModule, split_callback: PolicyLike | Callable[[Node], PartKey], style: Style, check_inputs: bool
) -> Emitted:
    flow = analyze(m)
    labels: dict[Node, PartKey] = {}
    asked = _recorded(split_callback, labels) if style.late_attributes else split_callback
    whole = complete_plan(flow, decide(flow, asked, None, "error"), "hoist")
    check_plan(flow, whole)
    steps = extract_subgraphs(flow, whole, as_met=True)
    segments = segments_of(flow, whole, labels) if labels else {}
    emitted = emit(flow, whole, steps, style, _torch.wants_lazy_code(), segments)
    if check_inputs:
        # No `add_object_check`: the parent should have the nodes that torch's has.
        add_overlap_check(flow, steps, emitted, qualified_names)
    return emitted


def _recorded(policy: PolicyLike, labels: dict[Node, PartKey]) -> PolicyLike:
    """Return a callback that records its answers in ``labels``, also those for state ops, which a plan ignores."""
    if isinstance(policy, (Policy, Plan, Mapping, type)) or not callable(policy):
        return policy
    return lambda node: labels.setdefault(node, policy(node))
