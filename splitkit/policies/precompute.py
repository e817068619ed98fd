"""The policy `Precompute`: move shapes, masks and the like from backward to forward if that saves memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy

from splitkit.costs import Costs, unit
from splitkit.errors import PolicyError
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.node_selection import Ops, Rule, rule_of
from splitkit.plans.policy import Policy, as_plan
from splitkit.plans.record import Plan
from splitkit.plans.rewrite import prune
from splitkit.policies.save_all import SaveAll
from splitkit.search.recompute.pareto_cuts import CutNetwork, cheapest
from splitkit.training.choices import savings
from splitkit.training.flow import BACKWARD, FORWARD, JointFlow, as_joint, is_pinned, save_all_plan, with_inputs
from splitkit.training.peaks import apply_checkpoints, nodes_with_policy


@dataclass(frozen=True)
class Precompute:
    """Move nodes of backward that do not depend on gradients to forward if that saves memory.

    For example, a mask of a large value is computed in forward and saved in place of the value, if backward needs the
    value for nothing else. The same holds for a value that the base plan recomputes from larger saved values.

    Attributes:
        base: the policy that decides about everything else.
        movable: the ops that may move, or a rule for nodes: then MegEngine's rule decides, see `precompute_listed`.
            By default every node moves that reduces the saved bytes, see `precompute`.
    """

    base: Policy = field(default_factory=SaveAll)
    movable: Ops | None = None

    def __post_init__(self) -> None:
        base: object = self.base
        if not isinstance(base, Policy) or isinstance(base, type):
            remedy = "Give a policy object for a joint graph: Precompute(SaveAll())."
            raise PolicyError("SK302", f"Precompute has base={base!r:.200}, which is not a policy object", remedy)

    def assign(self, flow: Dataflow, costs: Costs) -> Plan:
        """Return a plan with the parts ``"forward"`` and ``"backward"``; SK302 for a graph that is not a joint graph,
        SK304 for a name in ``movable`` that is not an op.
        """
        joint = as_joint(self, flow)
        plan = as_plan(self.base, joint, costs)
        if self.movable is None:
            return precompute(joint, plan)
        return precompute_listed(joint, plan, rule_of(self, self.movable, joint))


def precompute(flow: JointFlow, plan: Plan) -> Plan:
    """Return the plan that saves the fewest bytes without adding a node to this plan's backward.

    It is one minimum cut over the nodes that this plan's backward computes. The result never saves more bytes than the
    plan, and never recomputes more.

    Args:
        flow: facts about the joint graph.
        plan: a plan for it.
    """
    plan = _tagged(flow, plan)
    problem, tied = savings(flow, unit(flow)), _tied_to_checkpoints(flow, plan)
    savable = problem.savable & np.array([flow.producer(value) not in tied for value in problem.values], np.bool_)
    has_saved = np.bincount(problem.maker, problem.savable, len(problem.ops)) > 0
    elsewhere = np.array([BACKWARD not in plan[op] for op in problem.ops], np.bool_)
    cutting = CutNetwork.of(
        replace(problem, savable=savable), problem.nbytes.astype(np.float64), problem.fixed | elsewhere & has_saved
    )
    return cheapest(cutting, 0.0, problem.why).plan(plan.note)


def precompute_listed(flow: JointFlow, plan: Plan, movable: Rule) -> Plan:
    """Return the plan in which forward computes the movable nodes of backward whose inputs are not all *pinned*.

    A value is pinned if backward has it in any case: gradients, the inputs of its other nodes, and values that it
    computes itself. This is the rule of MegEngine's backward graphs (``imperative/src/impl/backward_graph_opt.cpp``),
    in which only ``GetVarShape`` may move; it ignores sizes::

        x, y          values of forward         a    stays: x is pinned by g
        a = shape(x)  movable                   b    moves: y is not pinned; b is saved instead
        b = shape(y)  movable
        g = mul(dy, x)

    A node that depends on a gradient, or on a node of backward that cannot move or is not listed as movable, never
    moves. A recomputed node moves in the same way: its value is then saved. The time is linear in nodes and edges.

    Args:
        flow: facts about the joint graph.
        plan: a plan for it.
        movable: which nodes may move.
    """
    plan = _tagged(flow, plan)
    late = [n for n in flow.nodes if BACKWARD in plan[n]]
    free = _free(flow, plan, movable)
    pinned = set(flow.backward_inputs).union(*(n.all_input_nodes for n in late if n not in free))
    moved: list[Node] = []
    for node in late:
        if node in free and not pinned.issuperset(node.all_input_nodes):
            moved.append(node)
        else:
            pinned.update((node, *(user for user in node.users if user in flow.followers)))
    return prune(flow, with_inputs(flow, plan.place(dict.fromkeys(moved, (FORWARD,))), moved))


def _tagged(flow: JointFlow, plan: Plan) -> Plan:
    """Return the plan with a place for every placeable node, and with the copies that checkpoint tags require."""
    return apply_checkpoints(flow, replace(plan, places={**save_all_plan(flow).places, **plan.places}))


def _tied_to_checkpoints(flow: JointFlow, plan: Plan) -> set[Node]:
    """Return the nodes that must be recomputed, and the nodes that only backward computes from them.

    Saving one of the latter would save a recomputed node in disguise.
    """
    tied = {n for n in nodes_with_policy(flow, CheckpointPolicy.MUST_RECOMPUTE) if BACKWARD in plan[n]}
    for node in flow.nodes:
        if plan[node] == (BACKWARD,) and any(read in tied for read in flow.inputs(node)):
            tied.add(node)
    return tied


def _free(flow: JointFlow, plan: Plan, movable: Rule) -> set[Node]:
    """Return the movable nodes of backward that forward can compute, alone or together with others of them."""
    tied, found = _tied_to_checkpoints(flow, plan), set[Node]()
    tangents = set(flow.backward_inputs)
    for node in flow.nodes:
        before = (*flow.inputs(node), *map(flow.producer, flow.after[node]))
        known = all(FORWARD in plan[b] or b in found for b in before if flow.is_placeable(b))
        fixed = node in tied or node in flow.once or not tangents.isdisjoint(node.all_input_nodes)
        if BACKWARD in plan[node] and known and not fixed and not is_pinned(node) and movable(node):
            found.add(node)
    return found
