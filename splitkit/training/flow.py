"""The dataflow of joint graphs: which nodes belong to forward, to backward, or may run in both."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.fx import Node

from splitkit import _torch
from splitkit.checks import shown
from splitkit.errors import GraphError, PolicyError
from splitkit.graph.dataflow import Dataflow, module_path
from splitkit.graph.fake_runs import values_again
from splitkit.graph.joint_marks import is_marked_backward, mark_of
from splitkit.graph.node_values import storage_bytes, storage_nbytes
from splitkit.graph.storages import attribute, plain_size, shares_memory, storage_key, tensors, value_of
from splitkit.memory.kernels.kernel_results import Bytes, ResultAliases, as_seen, storages_of
from splitkit.memory.kernels.strides import kernel_strides
from splitkit.memory.kernels.temporaries import Temporaries, may_decompose
from splitkit.memory.measurement import measure_memory
from splitkit.plans.parts import Part, PartKey
from splitkit.plans.record import Plan
from splitkit.plans.rewrite import prune, rematerialize
from splitkit.short_repr import brief
from splitkit.units import size

FORWARD = "forward"
BACKWARD = "backward"
"""The two parts of a plan for a joint graph."""


@dataclass(frozen=True)
class JointFlow(Dataflow):
    """Facts about a joint graph.

    Attributes:
        backward_inputs: the inputs of backward in order, gradients of outputs first. All other inputs are forward's.
        forward_outputs: the number of outputs that are forward's; the others are backward's.
        updated: inputs that hold another value when backward runs, because the graph writes to them, or AOTAutograd
            does after forward.
        input_gradients: the outputs of backward that are gradients of inputs of the model, not of its parameters.
    """

    backward_inputs: tuple[Node, ...]
    forward_outputs: int
    updated: tuple[Node, ...]
    input_gradients: tuple[Node, ...] = ()

    __repr__ = brief

    @classmethod
    def of(
        cls,
        flow: Dataflow,
        backward_inputs: Iterable[Node],
        forward_outputs: int,
        updated: Iterable[Node],
        input_gradients: Iterable[Node] = (),
    ) -> JointFlow:
        """Make the facts of a joint graph: nodes that read an updated input may run only once."""
        written = (w for e in flow.effects.values() for w in e.writes if w.op == "placeholder")
        updated = tuple(dict.fromkeys([*updated, *written]))
        known = {field.name: getattr(flow, field.name) for field in fields(Dataflow)}
        known["once"] = MappingProxyType({**_readers_of_memory(flow, updated), **flow.once})
        return cls(
            **known,
            backward_inputs=tuple(backward_inputs),
            forward_outputs=forward_outputs,
            updated=updated,
            input_gradients=tuple(input_gradients),
        )

    @property
    def outputs(self) -> tuple[object, ...]:
        """The outputs of forward, nodes or constants."""
        return tuple(self.graph.output_node().args[0][: self.forward_outputs])  # type: ignore[index, arg-type]

    @property
    def gradients(self) -> tuple[object, ...]:
        """The outputs of backward, nodes or ``None``."""
        return tuple(self.graph.output_node().args[0][self.forward_outputs :])  # type: ignore[index, arg-type]

    @cached_property
    def save_all(self) -> Plan:
        """The plan of `save_all_plan`."""
        late, needed = _after_tangents(self), _needed_by_forward(self)
        places: dict[Node, tuple[str, ...]] = {}
        for node in reversed(self.nodes):
            readers = {places[self.producer(user)] for user in _readers(self, node)}
            if node in late:
                places[node] = (BACKWARD,)
            elif node in needed or is_size(node) or (FORWARD,) in readers:
                places[node] = (FORWARD,)
            else:
                left = is_marked_backward(node) or (mark_of(node) is None and readers)
                places[node] = (BACKWARD,) if left else (FORWARD,)
        return Plan({n: places[n] for n in self.nodes}, {FORWARD: Part(FORWARD), BACKWARD: Part(BACKWARD)})

    @cached_property
    def storages(self) -> JointStorages:
        """The storages that nodes make and share."""
        return JointStorages.of(self)


def _readers_of_memory(flow: Dataflow, inputs: Collection[Node]) -> dict[Node, str]:
    """Return the nodes that read these inputs or views of them, with the reason why they may run only once."""
    shared, found = set(inputs), dict[Node, str]()
    for node in flow.index:
        if node.op != "output" and any(read in shared for read in node.all_input_nodes):
            found[node] = "it reads an input that is updated before backward runs"
            if any(alias in shared for alias in flow.effects[node].aliases):
                shared.add(node)
    return found


def as_joint(policy: object, flow: Dataflow) -> JointFlow:
    """Return the facts of a joint graph for ``policy``; raise SK302 if the graph is not joint."""
    if isinstance(flow, JointFlow):
        return flow
    raise PolicyError(
        "SK302",
        f"{type(policy).__name__} splits forward from backward, and this is not a joint graph",
        "Use it with splitkit.capture_joint(model, *inputs).split(policy), partition_fn, backend or apply; "
        "on the command line with `splitkit plan MODEL --what fwd-bwd`.",
    )


def save_all_plan(flow: JointFlow) -> Plan:
    """Return the plan with every node where eager autograd runs it: save all, recompute nothing.

    Backward has the nodes that depend on the gradient of an output, and those that AOTAutograd traced during backward
    unless forward needs them. Sizes belong to forward: saving an int is cheaper than saving the tensor it measures.
    """
    return flow.save_all


def _readers(flow: JointFlow, node: Node) -> Iterator[Node]:
    """Yield the placeable nodes that read ``node`` or a member of its tuple."""
    for user in node.users:
        if user in flow.followers:
            yield from _readers(flow, user)
        elif flow.is_placeable(user):
            yield user


def _after_tangents(flow: JointFlow) -> set[Node]:
    """Return the nodes that depend on an input of backward, or write memory in backward."""
    late = set(flow.backward_inputs)
    for node in flow.index:
        writes = node in flow.effects and bool(flow.effects[node].writes)
        late_write = is_pinned(node) or (writes and mark_of(node) == "is_backward")
        if node.op != "output" and (late_write or any(read in late for read in node.all_input_nodes)):
            late.add(node)
    return late


def _needed_by_forward(flow: JointFlow) -> set[Node]:
    stack = [*output_nodes(flow.outputs)]
    stack += [n for n in flow.once if mark_of(n) == "is_forward"]
    stack += [n for n in flow.nodes if mark_of(n) == "must_be_in_forward"]
    needed: set[Node] = set()
    while stack:
        node = stack.pop()
        if node not in needed:
            needed |= {node, flow.producer(node)}
            stack += node.all_input_nodes
    return needed


def recompute(flow: JointFlow, plan: Plan, keep: Collection[Node]) -> Plan:
    """Let backward recompute what it reads from forward, down to inputs, ``keep`` and nodes that may run only once."""
    sizes = [n for n in flow.nodes if is_size(n)]
    return prune(flow, rematerialize(flow, plan, BACKWARD, [*keep, *sizes]))


def with_inputs(flow: JointFlow, plan: Plan, nodes: Iterable[Node]) -> Plan:
    """Return the plan in which forward also computes what ``nodes`` need, where only backward did."""
    added: dict[Node, tuple[PartKey, ...]] = {}
    stack = [read for node in nodes for read in flow.inputs(node)]
    while stack:
        node = stack.pop()
        if node not in added and FORWARD not in plan.get(node, (FORWARD,)):
            added[node] = (FORWARD, *plan[node])
            stack += flow.inputs(node)
    return plan.place(added)


def unrepeatable(flow: JointFlow) -> Mapping[Node, str]:
    """Return forward's nodes that backward may not recompute -> the reason.

    These are random ops without an RNG state of their own, collectives, effects, readers of updated inputs, and sizes,
    for which backward would need the tensor.
    """
    sizes = {n: "it is a size" for n in flow.nodes if is_size(n)}
    plan = save_all_plan(flow)
    return {n: why for n, why in {**sizes, **flow.once}.items() if plan.home(n) == FORWARD}


def is_size(node: Node) -> bool:
    """Return whether a node yields a symbolic number, which AOTAutograd passes to backward apart from tensors."""
    return isinstance(value_of(node), torch.SymInt | torch.SymFloat | torch.SymBool)


def is_pinned(node: Node) -> bool:
    """Return whether AOTAutograd says that only backward may run the node."""
    return mark_of(node) == "must_be_in_backward"


def output_nodes(values: Iterable[object]) -> Iterator[Node]:
    """Yield the nodes among outputs; the others are constants."""
    return (value for value in values if isinstance(value, Node))


# Number the storages of a joint graph, once for all questions of what is alive, saved or recomputed.


STATIC = -1
"""The slot of storages that the caller holds throughout: parameters, inputs, and views of them."""


@dataclass(frozen=True, eq=False)
class JointStorages:
    """Which node makes which storage, and which nodes yield it again, as kernels do. It does not depend on the plan.

    A *slot* is a pair of a node and a storage that its value lies in. A storage is known by the slot of its maker, its
    *root*. Slots of one storage are distinct because the halves may hold two copies of it: a view that backward takes
    from forward lies in forward's copy, while the base that backward recomputes lies in its own.

    Attributes:
        index: node -> position in the graph, by which nodes are known below.
        slots: node -> its slots, numbered over all nodes.
        source: slot -> the slot of the same storage at an input of the node; `STATIC` if the storage is the caller's;
            the slot itself if the node makes the storage.
        root: slot -> the slot of the storage's maker, or `STATIC`.
        maker: slot -> the node that yields it.
        sizes: slot -> its bytes if the node makes it, perhaps symbolic; else 0.
        nbytes: the same as plain numbers, as seen at capture.
    """

    index: Mapping[Node, int]
    slots: tuple[tuple[int, ...], ...]
    source: tuple[int, ...]
    root: tuple[int, ...]
    maker: NDArray[np.int64]
    sizes: tuple[Bytes, ...]
    nbytes: tuple[int, ...]

    @classmethod
    def of(cls, flow: Dataflow) -> JointStorages:
        """Number the storages of a graph, which must not be edited afterwards."""
        found = _Numbering(flow)
        for node in flow.graph.nodes:
            found.add(node)
        return cls(
            flow.index,
            tuple(tuple(keys.values()) for keys in found.keys.values()),
            tuple(found.source),
            tuple(found.root),
            np.array(found.maker, np.int64),
            tuple(found.sizes),
            tuple(found.nbytes),
        )

    @cached_property
    def made(self) -> list[tuple[int, ...]]:
        """Node -> its slots, without those that are `STATIC`."""
        return [tuple(s for s in slots if self.source[s] != STATIC) for slots in self.slots]

    def under(self, node: Node) -> tuple[int, ...]:
        """Return the storages that a node's value lies in, each once, without the caller's."""
        return tuple(dict.fromkeys(self.root[slot] for slot in self.made[self.index[node]]))


class _Numbering:
    """The slots of the nodes so far; ``keys`` maps a node to storage key -> slot."""

    def __init__(self, flow: Dataflow) -> None:
        self.keys: dict[Node, dict[Hashable, int]] = {}
        self.source: list[int] = []
        self.root: list[int] = []
        self.maker: list[int] = []
        self.sizes: list[Bytes] = []
        self.nbytes: list[int] = []
        self._flow, self._again, self._strides_found = flow, _values_again(flow), kernel_strides(flow.root, {})
        self._temporaries = Temporaries({})

    def add(self, node: Node) -> None:
        """Number the storages of a node's value."""
        root = self._flow.root
        value = None if node.op == "output" else self._again.get(node, value_of(node))
        if node.op == "get_attr" and value is None:
            value = attribute(root, str(node.target))
        read = {r: self.keys[r] for r in node.all_input_nodes}
        results = storages_of(root, node, list(tensors(value)), read, self._aliases(node))
        self.keys[node] = {p.key: self._slot(node, len(self.keys), p.nbytes, p.held, p.tensor) for p in results}

    def _slot(self, node: Node, position: int, nbytes: Bytes, held: int | None, tensor: torch.Tensor) -> int:
        number = len(self.source)
        makes = held is None and node.op not in ("placeholder", "get_attr")
        source = number if makes else STATIC if held is None or self.source[held] == STATIC else held
        self.source.append(source)
        self.root.append(source if source in (number, STATIC) else self.root[source])
        self.maker.append(position)
        self.sizes.append(nbytes if makes else 0)
        self.nbytes.append(as_seen(nbytes, tensor) if makes else 0)
        return number

    def _aliases(self, node: Node) -> ResultAliases:
        """Return which arguments' memory the results of a composite op share, found by running it on fake tensors."""
        if not isinstance(node.target, _torch.OpOverload) or not may_decompose(node.target):
            return None
        regions = self._flow.scope[node].autocast
        return self._temporaries(self._flow.root, node, regions, self._strides_found).aliases


def _values_again(flow: Dataflow) -> Mapping[Node, Any]:
    """Return values that show which share memory, if the graph's do not; none if it cannot run on fake tensors."""
    try:
        return {} if shares_memory(flow.root) else values_again(flow.root)
    except GraphError:
        return {}


# The memory of an optimizer besides weights and gradients, found by stepping the real one on the meta device.


MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

_BY_NAME: dict[str, Callable[..., torch.optim.Optimizer]] = {
    kind.__name__.lower(): kind
    for kind in (
        *(torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop),
        *(torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adadelta, torch.optim.Rprop),
    )
} | {"momentum": partial(torch.optim.SGD, momentum=0.9)}


@dataclass(frozen=True)
class OptimizerMemory:
    """The bytes that training takes besides forward and backward.

    Attributes:
        gradients: bytes of the gradients of trained parameters.
        state: bytes that the optimizer holds between its steps.
        temporary: further bytes that it takes while it steps.
    """

    gradients: int
    state: int
    temporary: int


def check_optimizer(owner: object, optimizer: object) -> None:
    """Raise SK302 unless ``optimizer`` is ``None``, a known name or a function that makes one."""
    known = optimizer is None or callable(optimizer)
    if not known and not (isinstance(optimizer, str) and optimizer in _BY_NAME):
        raise PolicyError(
            "SK302",
            f"{type(owner).__name__} has optimizer={shown(optimizer)}",
            f"Name one of {', '.join(_BY_NAME)}, or give a function of the parameters: "
            "lambda params: torch.optim.AdamW(params, foreach=False).",
        )


def optimizer_memory(flow: JointFlow, optimizer: str | MakeOptimizer | None) -> OptimizerMemory:
    """Return what training the parameters of a joint graph takes besides the step in the graph.

    A parameter here is an input that gets a gradient. The optimizer is made for parameters of the same shapes and
    dtypes on the meta device, and steps twice: its second step finds its state there, as all later ones do. On CUDA a
    named optimizer uses its ``foreach`` implementation, which is torch's default there.

    Args:
        flow: facts about the joint graph.
        optimizer: its name, a function from parameters to an optimizer, or ``None``.

    Raises:
        PolicyError: SK302 for an optimizer that cannot step on the meta device.
    """
    trained = _trained(flow)
    gradients = sum(plain_size(storage_nbytes(tensor), {}) for tensor in trained)
    if optimizer is None or not trained:
        return OptimizerMemory(gradients, 0, 0)
    on_cpu = all(tensor.device.type == "cpu" for tensor in trained)
    try:
        with _torch.without_modes():  # the fake tensors of a compilation refuse the steps of foreach implementations
            parameters = [_like(tensor) for tensor in trained]
            made = _made(optimizer, parameters, foreach=not on_cpu)
            made.step()
            measured = measure_memory(made.step)
    except Exception as error:
        raise PolicyError(
            "SK302",
            f"the optimizer {shown(optimizer)} cannot step on the meta device: {type(error).__name__}: {error}",
            f"Name one of {', '.join(_BY_NAME)}, or leave it out of Budget(card=...).",
        ) from error
    counted = (
        ("cpu", "meta") if on_cpu else ("meta",)
    )  # on CUDA the step counters, a scalar each, stay on the CPU and are not counted
    state = sum(t.untyped_storage().nbytes() for t in _state(made) if t.device.type in counted)
    peak = sum(measured.by_device.get(device, 0) for device in counted)
    held = sum(t.untyped_storage().nbytes() for p in parameters for t in (p, p.grad) if t is not None)
    return OptimizerMemory(gradients, state, max(0, peak - held - state))


def _trained(flow: JointFlow) -> list[Tensor]:
    """Return the inputs that get a gradient: backward returns one, or ``None``, for each input of forward in order."""
    primals = [n for n in flow.graph.find_nodes(op="placeholder") if n not in flow.backward_inputs]
    pairs = zip(primals, flow.gradients, strict=False)
    values = (value_of(primal) for primal, gradient in pairs if isinstance(gradient, Node))
    return [value for value in values if isinstance(value, Tensor)]


def _like(tensor: Tensor) -> nn.Parameter:
    shape = [plain_size(size, {}) for size in tensor.shape]
    parameter = nn.Parameter(torch.empty(shape, dtype=tensor.dtype, device="meta"))
    parameter.grad = torch.empty_like(parameter)
    return parameter


def _made(optimizer: str | MakeOptimizer, parameters: list[nn.Parameter], foreach: bool) -> torch.optim.Optimizer:
    if isinstance(optimizer, str):
        return _BY_NAME[optimizer](parameters, lr=1e-3, foreach=foreach)
    return optimizer(parameters)


def _state(optimizer: torch.optim.Optimizer) -> Sequence[Tensor]:
    held: Iterable[Any] = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in held if isinstance(value, Tensor)]


# Describe the values that forward saves for backward by module and op.


@dataclass(frozen=True)
class SavedValue:
    """A value that forward saves for backward.

    Attributes:
        name: the name of the node that makes it.
        module: the innermost module that computes it, ``""`` for the model itself.
        op: the op that computes it, such as ``"softmax"``; ``"input"`` for inputs and parameters.
        nbytes: the bytes of its storage; 0 for inputs, parameters and views of them.
    """

    name: str
    module: str
    op: str
    nbytes: int

    @classmethod
    def of(cls, node: Node, held: Collection[object]) -> SavedValue:
        """Describe a node of forward; storages in ``held`` are the caller's."""
        if node.op in ("placeholder", "get_attr"):
            return cls(node.name, "", "input", 0)
        own = [t for t in tensors(value_of(node)) if storage_key(t) not in held]
        return cls(node.name, module_path(node), op_of(node), sum(map(storage_bytes, own)))

    def __str__(self) -> str:
        return f"{self.label} ({size(self.nbytes)})"

    @property
    def label(self) -> str:
        """Module and op: ``"transformer.h.0.attn: softmax"``."""
        return f"{self.module or 'the model'}: {self.op}"


def op_of(node: Node) -> str:
    """Return the short name of the op that computes a node; for a member of a tuple, of the tuple's op."""
    target: Any = node.target
    if getattr(target, "__name__", "") == "getitem" and node.args and isinstance(node.args[0], Node):
        return op_of(node.args[0])
    packet = getattr(target, "overloadpacket", target)
    return str(getattr(packet, "__name__", packet)).strip("_")
