"""What eager autograd keeps of a forward graph for backward: which node saves which storages, found on fake tensors.

The graph runs once, with its parameters requiring grad as the model's do, and with hooks on all that autograd saves.
Nothing real is computed. What a run saves does not depend on where the graph is cut, so that one run serves all plans::

    node        value   autograd saves             storages
    linear      B       x                          x: of the input; the weight is the parameter's own and not counted
    dropout     D       its mask                   M: made inside the op, nobody's value
    relu        R       R                          R

A node that does not run on fakes (a custom op without one, a size that only the data decides), and one that calls
graphs of its own, counts all that it takes, makes, and computes in these graphs; `Activations.estimated` says so.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.fx import Node

from splitkit._gc import collector_at_rest
from splitkit._torch import plain_tensors, pytree
from splitkit.graph.dataflow import Dataflow, root_of
from splitkit.graph.fakecalls import NO_SIZES, StandIn, bodies, hint, hints, rounds
from splitkit.graph.scope import is_state_op
from splitkit.graph.sizes import require_values, value_bytes
from splitkit.graph.storages import one_tensor, storage_key, tensors
from splitkit.graph.symbols import value_of
from splitkit.memory.alone import Unlike
from splitkit.memory.kernels import hinted_bytes
from splitkit.memory.probes import BackwardBytes, Probes
from splitkit.memory.savedcalls import Kept, SavedCalls


@dataclass(frozen=True)
class Activations:
    """What a run with gradients makes and keeps. Storages go by number; parameters and buffers are none of them.

    Attributes:
        nbytes: of each storage. A symbolic size counts as seen at capture.
        values: node -> the storages that its value lies in, inputs of the graph included.
        saved: node -> the storages that autograd keeps for the node's backward, each once; nodes that keep none are
            left out. What no output of the graph depends on is kept by nobody.
        requires: the nodes whose value requires grad: it has a tensor that does.
        inside: node -> what forward and backward of the node take for a while, besides what is saved and yielded.
        estimated: node -> why what it saves was not seen, but estimated from above.
    """

    nbytes: tuple[int, ...]
    values: Mapping[Node, tuple[int, ...]]
    saved: Mapping[Node, tuple[int, ...]]
    requires: frozenset[Node]
    inside: Mapping[Node, BackwardBytes]
    estimated: Mapping[Node, str]

    @property
    def saved_bytes(self) -> int:
        """Bytes of all that autograd keeps, each storage once."""
        return sum(self.nbytes[s] for s in {s for storages in self.saved.values() for s in storages})


def activations(gm: fx.GraphModule | Dataflow) -> Activations:
    """What eager autograd saves for backward, node by node, in one run of a forward graph on fake tensors.

    Regions of autocast and of no grad count as the graph opens them. Integers and masks that are saved count too.

    Args:
        gm: a graph of forward alone, with ``meta["val"]``, as `splitkit.capture` makes it, or facts about it.

    Raises:
        GraphError: SK101 if it is no graph, SK102 if nodes have no ``meta["val"]``.
    """
    root = root_of(gm)
    require_values(root.graph)
    with collector_at_rest(), torch.inference_mode(False):  # in which nothing is saved, whatever it trains later
        try:
            kept = kept_by_calls(root)
        except Unlike:
            kept = kept_in_place(root)
    order = {node: i for i, node in enumerate(root.graph.nodes)}
    saved = {n: tuple(sorted(kept.saved[n])) for n in sorted(kept.saved, key=order.__getitem__) if kept.saved[n]}
    probes = Probes(root, kept.requires)
    inside = {node: found for node in kept.values if (found := probes(node))}
    return Activations(tuple(kept.nbytes), kept.values, saved, frozenset(kept.requires), inside, kept.estimated)


def kept_by_calls(root: fx.GraphModule) -> Kept:
    """What a graph keeps, by its distinct calls: the same as `kept_in_place`, in a fraction of the time.

    Raises:
        Unlike: where a call alone does not show it.
    """
    calls = SavedCalls(root)

    def followed(follow: Any, *fakes: Any) -> Kept:
        with torch.enable_grad():
            kept: Kept = follow(*fakes)
        return kept

    found: Kept = StandIn(calls.run, _given(root), {}, NO_SIZES, ()).run(followed)
    return found


def kept_in_place(root: fx.GraphModule) -> Kept:
    """What a graph keeps, in one run of all of it."""
    run = _AutogradRun(root)

    def watched(call: Any, *fakes: Any) -> None:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(run.pack, _never):
            held = call(*fakes, enable_io_processing=False)
        run.settle()
        del held  # until here: what no output depends on is gone

    StandIn(run.run, _given(root), {}, NO_SIZES, ()).run(watched)
    return run.kept


def _given(root: fx.GraphModule) -> tuple[Any, ...]:
    return tuple(value_of(node) for node in root.graph.find_nodes(op="placeholder"))


_KEPT = "_kept_by_splitkit"


class _Kept:
    """Stands in the graph of autograd for a tensor that a node saves; it lives as long as it is kept."""

    __slots__ = ("__weakref__", "node", "storages")

    def __init__(self, node: Node, storages: tuple[int, ...]) -> None:
        self.node = node
        self.storages = storages


def _never(kept: _Kept) -> torch.Tensor:
    raise NotImplementedError(f"{kept.node.name} reads in forward what it has saved for backward")


class _AutogradRun(fx.Interpreter):
    """Runs a graph inside a fake mode, and notes what its nodes yield and save."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self._gm = gm
        self._now: Node | None = None
        self.kept = Kept()
        self._numbers: dict[Hashable, int] = {}  # by storage; -1 for the caller's
        self._owned: dict[int, torch.Tensor] = {}  # by id of the real parameter or buffer
        self._alive: weakref.WeakSet[_Kept] = weakref.WeakSet()
        self._given: dict[int, Any] = {}  # what was given for several inputs

    def pack(self, tensor: torch.Tensor) -> _Kept:
        """A tensor is saved."""
        assert self._now is not None
        kept = _Kept(self._now, self._storages(tensor))
        self._alive.add(kept)
        return kept

    def _keep_attributes(self, result: Any) -> None:
        """Note what a ``torch.autograd.Function`` keeps as attributes of its context, which no hook sees."""
        for tensor in tensors(result):
            attributes = getattr(tensor.grad_fn, "__dict__", None)  # other nodes of autograd have none
            if attributes and _KEPT not in attributes:
                attributes[_KEPT] = [self.pack(t) for t in tensors(list(attributes.values()))]

    def settle(self) -> None:
        """Take down what is still kept."""
        for kept in self._alive:
            self.kept.saved.setdefault(kept.node, {}).update(dict.fromkeys(kept.storages))

    def run_node(self, n: Node) -> Any:
        """Run ``n`` and note what it yields."""
        if "saved_tensors_hooks" in getattr(n.target, "__name__", ""):
            return None  # it would bar the hooks of this run; autograd saves all the same
        if n.op == "output" or is_state_op(n):
            return super().run_node(n)
        self._now = n
        try:
            result = self._called(n)
        except Exception as error:  # whatever the op raises on fakes
            result = self._estimate(n, str(error).strip().partition("\n")[0] or type(error).__name__)
        if (group := one_tensor(n)) is not None:
            result = self._given.setdefault(group, result)
        self.kept.values[n] = self._storages(result, n)
        self._keep_attributes(result)
        if any(t.requires_grad for t in tensors(result)):
            self.kept.requires.add(n)
        return result

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A fake of the attribute."""
        return self._fake_of(operator.attrgetter(target)(self._gm))

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call the module on fakes of what it owns."""
        module: nn.Module = operator.attrgetter(target)(self._gm)
        owned = dict([*module.named_parameters(), *module.named_buffers()])
        fakes = {name: self._fake_of(value) for name, value in owned.items()}
        return torch.func.functional_call(module, fakes, args, kwargs)

    def _called(self, node: Node) -> Any:
        if bodies(self._gm, node):
            return self._estimate(node, "it calls graphs of its own")
        return super().run_node(node)

    def _estimate(self, node: Node, why: str) -> Any:
        """Stand-ins for what a node yields; it keeps them, and all that it takes, if it takes part in backward."""
        needs = any(n in self.kept.requires for n in node.all_input_nodes) and torch.is_grad_enabled()
        result = pytree.tree_map(lambda leaf: _stand_in(leaf, needs), value_of(node))
        if needs:
            self.kept.estimated[node] = why
            inner = sum(value_bytes(n) for body in bodies(self._gm, node) for n in body.graph.nodes if "call" in n.op)
            taken = [s for n in node.all_input_nodes for s in self.kept.values.get(n, ())]
            kept = [*taken, *self._storages(result)]
            if inner:
                kept.append(self._new(inner * rounds(node)))
            self.kept.saved[node] = dict.fromkeys(kept)
        return result

    def _fake_of(self, value: Any) -> Any:
        """A fake of a parameter, buffer or constant, the same one each time; a graph as it is."""
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self._owned:
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            self._owned[id(value)] = made.requires_grad_(value.requires_grad)
            self._numbers[storage_key(made)] = -1
        return self._owned[id(value)]

    def _storages(self, value: Any, made_by: Node | None = None) -> tuple[int, ...]:
        """The storages of a value but those of parameters and buffers."""
        found: dict[int, None] = {}
        for tensor in (part for t in tensors(value) for part in plain_tensors(t)):
            key = storage_key(tensor)
            if key not in self._numbers:
                shown = hint(tensor.untyped_storage().nbytes())
                self._numbers[key] = self._new(shown if made_by is None else max(shown, hinted_bytes(made_by, tensor)))
            found[self._numbers[key]] = None
        found.pop(-1, None)
        return tuple(found)

    def _new(self, nbytes: int) -> int:
        self.kept.nbytes.append(nbytes)
        return len(self.kept.nbytes) - 1


def _stand_in(leaf: Any, needs_grad: bool) -> Any:
    if isinstance(leaf, torch.Tensor):
        made = torch.empty_strided(hints(leaf.shape), hints(leaf.stride()), dtype=leaf.dtype, device=leaf.device)
        return made.requires_grad_(needs_grad and (made.is_floating_point() or made.is_complex()))
    return hint(leaf) if isinstance(leaf, torch.SymInt) else leaf
