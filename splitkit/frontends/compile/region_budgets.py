"""Refuse models that set memory budgets for torch's partitioner, which no splitkit policy obeys."""

from __future__ import annotations

from torch import fx

from splitkit.errors import PolicyError


def refuse_region_budgets(joint: fx.GraphModule) -> None:
    """Raise SK305 for a graph in which the model itself sets an activation memory budget for torch's partitioner.

    ``torch.autograd.graph.region_activation_memory_budget`` (2.13, 2.15) and the older ``memory_budget`` set it in the
    meta of nodes; 1.0 means no limit.
    """
    graphs = (module.graph for module in joint.modules() if isinstance(module, fx.GraphModule))
    for node in (node for graph in graphs for node in graph.nodes):
        custom = node.meta.get("custom")
        asked = custom.get("_region_activation_memory_budget") if isinstance(custom, dict) else None  # 2.13, 2.15
        asked = node.meta.get("memory_budget") if asked is None else asked  # 2.11, 2.13, 2.15
        if isinstance(asked, float) and asked < 1:
            raise PolicyError(
                "SK305",
                f"the model itself sets an activation memory budget of {asked} "
                f"(torch.autograd.graph.region_activation_memory_budget, at {node.name}), and a policy was given",
                "Set it in one place: remove it from the model and plan with splitkit.policies."
                f"Budget({asked}, of='saved'), or let torch obey it: joint.partition(...), torch.compile(model).",
                [node],
            )
