"""Capture what a decoder computes once from an encoder's output: its keys and values for each layer."""

from __future__ import annotations

from torch import fx

from splitkit.engine.reduced_graph import reduce_to
from splitkit.graph.caches import ENCODER_CACHES, given_caches, updated_caches


def note_encoder_caches(gm: fx.GraphModule, whole: fx.GraphModule) -> None:
    """Note in ``gm.meta`` the graph that computes the caches which the graph of a step returns as it is given them.

    Args:
        gm: the graph of a step with all caches as inputs.
        whole: the graph of the same step without those caches among the inputs; it is reduced, in place, to the nodes
            that compute them.
    """
    given = {*given_caches(whole)}
    wanted = tuple(node for node in updated_caches(whole) if given.isdisjoint(node.all_input_nodes))
    reduce_to(whole.graph, wanted)
    # plain arguments and results, and no check of the model's arguments
    whole.graph.set_codegen(fx.graph.CodeGen())
    gm.meta[ENCODER_CACHES] = fx.GraphModule(whole, whole.graph)
