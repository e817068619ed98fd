"""What the target of one node does: which memory it writes or passes on, and whether it is random or acts outside.

Everything errs on one side: what may happen is reported, what is reported need not happen. ATen schemas give most of
the answer; `tables` corrects the ones that lie and knows the Python functions, methods and modules. The modules stand
on one another in this order::

    tables     what names say
    facts      the answer for a node (Effects), what is known of a callable (Facts)
    ambient    which names say that a call changes the state in which later nodes run
    rules      where the answer depends on the arguments: dropout in eval mode draws nothing
    schema     operators
    names      functions and methods
    modules    torch.nn
    tuples     does a node yield a tuple?
    containers lists, dicts and iterators
    kinds      is a value a tensor, an array or an object?
    foreign    what is no tensor: arrays, objects
    sizes      which arguments are asked for their size only
    views      which only take a reference, and read nothing
    declared   what users say
    memo       what has been found out about a graph
    quick      targets that do nothing but compute, remembered
    classify   all of it, with the graphs inside a node
"""

from __future__ import annotations

from splitkit.graph.ops.classify import effects_of
from splitkit.graph.ops.declared import declare
from splitkit.graph.ops.facts import PURE, Effects
from splitkit.graph.ops.memo import Memo
from splitkit.graph.ops.sizes import sizes_only
from splitkit.graph.ops.tuples import is_tuple
from splitkit.graph.ops.views import base_of_view

__all__ = ["PURE", "Effects", "Memo", "base_of_view", "declare", "effects_of", "is_tuple", "sizes_only"]
