"""Classify what one node does: which memory it writes or shares, whether it is random or acts on the outside world.

Errors are on the safe side: every effect that is possible is reported, and a reported effect need not happen. ATen
schemas give most of the answer. `op_tables` corrects the schemas that are wrong, and knows the Python functions,
methods and modules. Each module imports only those above it::

    op_tables    what names alone say
    facts        the effects of a node (Effects), what is known about a callable (Facts)
    schemas      operators with a schema, and rules for what depends on arguments: dropout in eval mode draws nothing
    functions    functions and methods without a schema; which names say that a call changes the ambient state
    tuples       whether a node yields a tuple; containers and iterators; modules of torch.nn
    value_kinds  whether a value is a tensor, an array or an object; nodes that read sizes only, and views
    state_scans  splitkit's own ops for states of a decoder
    declared     declarations of users
    fast_path    one lookup for targets that only compute
    classify     everything together, with the graphs inside a node
"""

from __future__ import annotations

from splitkit.graph.ops.classify import effects_of
from splitkit.graph.ops.declared import declare
from splitkit.graph.ops.facts import PURE, Effects
from splitkit.graph.ops.tuples import is_tuple
from splitkit.graph.ops.value_kinds import Memo, base_of_view, sizes_only

__all__ = ["PURE", "Effects", "Memo", "base_of_view", "declare", "effects_of", "is_tuple", "sizes_only"]
