"""Memory budgets that a model states itself, for torch's partitioner: no policy of splitkit's obeys them."""

from __future__ import annotations

from torch import fx

from splitkit.errors import PolicyError


def refuse_region_budgets(joint: fx.GraphModule) -> None:
    """Refuse (SK305) a graph of which torch's partitioner would save a share that the model states itself.

    ``torch.autograd.graph.region_activation_memory_budget`` and the marker before it write it on nodes; 1.0 asks for
    nothing.
    """
    graphs = (module.graph for module in joint.modules() if isinstance(module, fx.GraphModule))
    for node in (node for graph in graphs for node in graph.nodes):
        custom = node.meta.get("custom")
        asked = custom.get("_region_activation_memory_budget") if isinstance(custom, dict) else None  # 2.13, 2.15
        asked = node.meta.get("memory_budget") if asked is None else asked  # 2.11, 2.13, 2.15
        if isinstance(asked, float) and asked < 1:
            raise PolicyError(
                "SK305",
                f"the model asks for an activation memory budget of {asked} itself "
                f"(torch.autograd.graph.region_activation_memory_budget, at {node.name}), and a policy was given",
                "Say it in one place: take it out of the model and plan with splitkit.policies."
                f"Budget({asked}, of='saved'), or let torch obey it: joint.partition(...), torch.compile(model).",
                [node],
            )
