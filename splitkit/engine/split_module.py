"""Torch's ``split_module``, by this engine: same signature, same names, same code of parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import fx, nn
from torch.fx import Node

from splitkit import _torch
from splitkit._gc import collector_of_new_objects
from splitkit.engine.complete import check, complete
from splitkit.engine.cut import cut
from splitkit.engine.emit import Emitted, emit
from splitkit.engine.kept_state import runs_of
from splitkit.engine.names import Style
from splitkit.engine.split import PIPELINING, decide, watch_memory
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

    Parameters and buffers stay in the parent and are passed in; called modules move into their part as ``a_b``. What
    differs from torch: ``split_callback`` may be anything that `split` takes and is called once a node; parts run in
    the order of their first node as far as data and effects allow, whatever ``keep_original_order`` says. All
    differences: ``docs/split_module.md``.

    Args:
        m: the graph; it is left as it is.
        root_m: ignored, as in torch; the attributes of ``m`` are used.
        split_callback: node -> part id, any hashable; ``None`` leaves a node in the parent.
        qualname_map: filled with names of moved modules -> their original names.
        keep_original_order: the parent reads attributes where they are first needed; and where each part is one
            consecutive run of the graph, grad-mode and autocast ops stay where they stand.
        keep_original_node_name: nodes keep their names, else they get those that fx gives to new nodes.
        keep_original_input_name: name the inputs of parts after their values, else ``arg_0`` ...
        partition_affix: ``submod_<affix>_<id>``. With ``"pp"``, the affix of ``torch.distributed.pipelining``, the
            parent takes and returns bare values as torch's does: no pytrees, an exported model gives a flat tuple.
        tuple_return: parts with one output return a tuple.
        check_inputs: as in `split`; with ``partition_affix="pp"`` there is no check, as nobody calls the parent.
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
    with collector_of_new_objects():
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
    whole = complete(flow, decide(flow, asked, None, "error"), "hoist")
    check(flow, whole)
    units = cut(flow, whole, as_met=True)
    runs = runs_of(flow, whole, labels) if labels else {}
    emitted = emit(flow, whole, units, style, _torch.wants_lazy_code(), runs)
    if check_inputs:
        watch_memory(flow, units, emitted)  # not what inputs are: the parent would no longer be torch's
    return emitted


def _recorded(policy: PolicyLike, labels: dict[Node, PartKey]) -> PolicyLike:
    """A callback that notes its answers, also those for state ops, which a plan has no use for."""
    if isinstance(policy, (Policy, Plan, Mapping, type)) or not callable(policy):
        return policy
    return lambda node: labels.setdefault(node, policy(node))
