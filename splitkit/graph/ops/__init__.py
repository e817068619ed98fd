"""Classify what one node does: which memory it writes or shares, whether it is random or acts on the outside world.

Errors are on the safe side: every effect that is possible is reported, and a reported effect need not happen. ATen
schemas give most of the answer. `op_tables` corrects the schemas that are wrong, and knows the Python functions,
methods and modules. Each module imports only those above it::

    op_tables        what names alone say
    facts            the effects of a node (Effects), what is known about a callable (Facts)
    ambient_calls    which names say that a call changes the state in which later nodes run
    argument_rules   effects that depend on the arguments: dropout in eval mode draws no random numbers
    schemas          operators with a schema
    functions        functions and methods without a schema
    module_effects   modules of torch.nn
    tuples           whether a node yields a tuple
    containers       lists, dicts and iterators
    value_kinds      whether a value is a tensor, an array or an object
    non_tensors      methods and operators of arrays and objects
    metadata_reads   nodes that read sizes only, and views
    declared         declarations of users
    memo             answers about one graph
    fast_path        one lookup for targets that only compute
    classify         everything together, with the graphs inside a node
"""

from __future__ import annotations

from splitkit.graph.ops.classify import effects_of
from splitkit.graph.ops.declared import declare
from splitkit.graph.ops.facts import PURE, Effects
from splitkit.graph.ops.tuples import is_tuple
from splitkit.graph.ops.value_kinds import Memo, base_of_view, sizes_only

__all__ = ["PURE", "Effects", "Memo", "base_of_view", "declare", "effects_of", "is_tuple", "sizes_only"]
