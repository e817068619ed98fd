"""What the target of one node does: which memory it writes or passes on, and whether it is random or acts outside.

Everything errs on one side: what may happen is reported, what is reported need not happen. ATen schemas give most of
the answer; `splitkit.optables` corrects the ones that lie and knows the Python functions, methods and modules.
"""

from __future__ import annotations

import builtins
import inspect
import logging
import math
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import Node

from splitkit import optables as tables

_UNKNOWN: Any = object()  # an argument that is not there: it may be anything


@dataclass(frozen=True)
class Effects:
    """What one node may do.

    Attributes:
        writes: argument nodes whose storage may be written.
        aliases: argument nodes that an output may share storage with.
        reads_state: parameters and buffers of a called module.
        writes_state: those of them that may be written.
        random: draws from a random generator; the order and number of such calls matter.
        impure: visible outside (print, hooks, unknown code); keeps its order among its like.
        check: only raises: must run, in any order among checks.
        known: ``False`` if nothing is known about the target, so that everything is assumed.
    """

    writes: tuple[Node, ...] = ()
    aliases: tuple[Node, ...] = ()
    reads_state: tuple[torch.Tensor, ...] = ()
    writes_state: tuple[torch.Tensor, ...] = ()
    random: bool = False
    impure: bool = False
    check: bool = False
    known: bool = True


PURE = Effects()


@dataclass(frozen=True)
class _Facts:
    """What is known about a callable without looking at a call; slots are (position or -1, name)."""

    name: str = ""
    names: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    positional: int = 0
    defaults: Mapping[str, object] = field(default_factory=dict)
    writes: tuple[tuple[int, str], ...] = ()
    aliases: tuple[tuple[int, str], ...] = ()
    everything: bool = False  # an output may alias any argument
    random: bool = False
    impure: bool = False
    check: bool = False
    rule: Callable[[_Call, Effects], Effects] | None = None
    yields_tuple: bool = False

    @property
    def plain(self) -> bool:
        return not (
            self.writes or self.aliases or self.everything or self.random or self.impure or self.check or self.rule
        )


def _nodes(value: object) -> tuple[Node, ...]:
    """The nodes inside an argument, each once."""
    if isinstance(value, Node):
        return (value,)
    if isinstance(value, (tuple, list)):
        return tuple(dict.fromkeys(n for v in value for n in _nodes(v)))
    if isinstance(value, dict):
        return _nodes(tuple(value.values()))
    return _nodes((value.start, value.stop, value.step)) if isinstance(value, slice) else ()


def _first(node: Node) -> tuple[Node, ...]:
    return _nodes(node.args[0]) if node.args else tuple(node.all_input_nodes)


def _at(node: Node, slots: Iterable[tuple[int, str]]) -> tuple[Node, ...]:
    return _nodes([node.args[i] if 0 <= i < len(node.args) else node.kwargs.get(name) for i, name in slots])


class _Call:
    """The arguments of a node by parameter name, defaults included."""

    def __init__(self, node: Node, facts: _Facts) -> None:
        self.node, self.facts = node, facts

    def get(self, *names: str, default: object = _UNKNOWN) -> object:
        facts, node = self.facts, self.node
        for name in names:
            if name in node.kwargs:
                return node.kwargs[name]
            if name in facts.names:
                i = facts.names.index(name)
                return node.args[i] if i < len(node.args) else facts.defaults.get(name, _UNKNOWN)
        return default

    def nodes(self, *names: str) -> tuple[Node, ...]:
        return _nodes([self.get(name, default=None) for name in names])


def _may(value: object) -> bool:
    return value is _UNKNOWN or isinstance(value, Node) or bool(value)


def _may_not(value: object) -> bool:
    return value is _UNKNOWN or isinstance(value, Node) or not value


# ---------------------------------------------------------------- rules that look at arguments


def _dropout(call: _Call, effects: Effects) -> Effects:
    p, train, first = call.get("p"), call.get("train", "training"), _first(call.node)
    active = _may(p) and _may(train)
    inplace = call.facts.name.endswith("_") or _may(call.get("inplace", default=False))
    # 1d and 3d unsqueeze their input in place, whatever the mode
    written = inplace and (_may(train) or call.facts.name.endswith("d"))
    # eval mode and p=0 return the input itself, whatever the schema says
    returns_input = inplace or _may_not(p) or _may_not(train)
    out = call.nodes("out")
    return Effects((*out, *(first if written else ())), (*out, *(first if returns_input else ())), random=active)


def _native_dropout(call: _Call, effects: Effects) -> Effects:
    train = call.get("train")
    return replace(effects, random=train is None or _may(train))  # p=0 still draws


def _rnn(call: _Call, effects: Effects) -> Effects:
    random = _may(call.get("dropout")) and _may(call.get("train"))
    state = call.nodes("dropout_state") if random else ()  # cudnn keeps its generator in a tensor
    return replace(effects, random=random, writes=(*effects.writes, *state))


def _rrelu(call: _Call, effects: Effects) -> Effects:
    return replace(effects, random=_may(call.get("training")))


def _attention(call: _Call, effects: Effects) -> Effects:
    return replace(effects, random=_may(call.get("dropout_p")) and _may(call.get("training", default=True)))


def _running_stats(call: _Call, effects: Effects) -> Effects:
    running = call.nodes("running_mean", "running_var")
    others = tuple(n for n in effects.writes if n not in running)
    training = _may(call.get("training", "train", "use_input_stats"))
    return replace(effects, writes=(*others, *running) if training else others)


def _embedding(call: _Call, effects: Effects) -> Effects:
    # with a max_norm the rows that are looked up are renormalized in place (embedding_bag takes its two in any order)
    if call.get("max_norm", default=None) is None:
        return effects
    return replace(effects, writes=(*effects.writes, *call.nodes("weight", "input")))


def _random_samples(call: _Call, effects: Effects) -> Effects:
    return replace(effects, random=call.node.kwargs.get("_random_samples") is None)


def _einsum(call: _Call, effects: Effects) -> Effects:
    equation, *operands = call.node.args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    several = isinstance(equation, str) and len(operands) > 1
    return effects if several else replace(effects, aliases=tuple(call.node.all_input_nodes))  # of one: a view


def _always_random(call: _Call, effects: Effects) -> Effects:
    return replace(effects, random=True)


def _rule(name: str, names: Iterable[str]) -> Callable[[_Call, Effects], Effects] | None:
    names = set(names)
    if name in tables.DROPOUTS:
        return _dropout
    if name == "native_dropout":
        return _native_dropout
    if name in tables.RNNS:
        return _rnn
    if name in tables.RRELUS:
        return _rrelu
    if "dropout_p" in names:
        return _attention
    if "running_mean" in names and not any(w in name for w in ("backward", "functional", "no_update", "no_training")):
        return _running_stats
    if "max_norm" in names and name in ("embedding", "embedding_bag"):
        return _embedding
    if name.startswith("fractional_max_pool") and "random_samples" not in names:
        return _random_samples
    if name == "einsum":
        return _einsum
    return _always_random if name == "gumbel_softmax" else None


# ---------------------------------------------------------------- operators with a schema


def _tagged_random(op: OpOverload) -> bool:
    if torch.Tag.nondeterministic_seeded in op.tags:
        return True
    return any("Generator" in str(a.type) for a in op._schema.arguments)


@cache
def _packet_random(namespace: str, name: str) -> bool:
    """Is any overload of the op, or of the op without its trailing underscore, random?"""
    if name in tables.RANDOM:
        return True
    for candidate in {name, name.rstrip("_")}:
        packet = getattr(getattr(torch.ops, namespace), candidate, None)
        if isinstance(packet, OpOverloadPacket) and any(map(_tagged_random, _members(packet))):
            return True
    return False


def _shared(argument: Any, returns: Iterable[Any]) -> bool:
    """May a return share memory with the argument? Lists of tensors carry no alias set: they match any."""
    info = argument.alias_info
    if info is None:
        return False
    mine = info.before_set | info.after_set
    for r in returns:
        theirs = r.alias_info and r.alias_info.before_set | r.alias_info.after_set
        if r.alias_info is not None and (not mine or not theirs or "*" in mine | theirs or mine & theirs):
            return True
    return False


@cache
def _schema_facts(op: OpOverload) -> _Facts:
    schema, namespace = op._schema, op.namespace
    name = schema.name.split("::")[-1]
    key = name if namespace == "aten" else f"{namespace}::{name}"
    slots = [((-1 if a.kwarg_only else i), a.name) for i, a in enumerate(schema.arguments)]
    writes = {s for s, a in zip(slots, schema.arguments, strict=True) if a.alias_info and a.alias_info.is_write}
    aliases = {s for s, a in zip(slots, schema.arguments, strict=True) if _shared(a, schema.returns)}
    writes |= {slots[i] for i in tables.LIES_WRITE.get(key, ())}
    lies = tables.LIES.get(key, ())
    aliases |= {s for i, s in enumerate(slots) if i in lies}
    tag = getattr(torch.Tag, "maybe_aliasing_or_mutating", None)
    collective = namespace in tables.COLLECTIVES
    rule = _rule(name, [a.name for a in schema.arguments])
    # a rule knows why an op is tagged (dropout: returns its input in eval mode; batch_norm: its running statistics)
    everything = lies is tables.ALL or (tag in op.tags and rule is None) or namespace == "c10d"
    if namespace == "c10d":  # its schemas declare no write at all: allreduce_(Tensor[] tensors, ...)
        writes = set(slots)
    check = "_assert" in name or name.startswith(("sym_constrain", "_async_error"))
    return _Facts(
        name,
        tuple(a.name for a in schema.arguments),
        tuple(str(a.type) for a in schema.arguments),
        sum(not a.kwarg_only for a in schema.arguments),
        {a.name: a.default_value for a in schema.arguments if a.has_default_value()},
        tuple(sorted(writes)),
        tuple(sorted(aliases)),
        everything,
        _packet_random(namespace, name),
        collective or (not schema.returns and not writes and not check) or namespace == "profiler",
        check,
        rule,
        len(schema.returns) > 1 or any("List[" in str(r.type) for r in schema.returns),
    )


def _apply(node: Node, facts: _Facts) -> Effects:
    if facts.plain:
        return PURE
    aliases = tuple(node.all_input_nodes) if facts.everything else _at(node, facts.aliases)
    effects = Effects(_at(node, facts.writes), aliases, random=facts.random, impure=facts.impure, check=facts.check)
    return facts.rule(_Call(node, facts), effects) if facts.rule else effects


@cache
def _registered() -> frozenset[str]:
    # TorchScript's own overloads (aten::sort.int on lists) bear the same names but take no tensors
    return frozenset(torch._C._dispatch_get_all_op_names())


@cache
def _overloads(name: str) -> tuple[_Facts, ...]:
    """The facts of the functional and in-place overloads of ``aten::name``; empty if there is no such op."""
    packet = getattr(torch.ops.aten, name, None) if name in _BITS or not name.startswith("__") else None
    return _packet_facts(packet) if isinstance(packet, OpOverloadPacket) else ()


_BITS = frozenset(f"__{i}{op}__" for i in ("", "i") for op in ("and", "or", "xor", "lshift", "rshift"))


def _members(packet: Any) -> list[OpOverload]:
    return [getattr(packet, o) for o in packet.overloads()]


@cache
def _packet_facts(packet: OpOverloadPacket) -> tuple[_Facts, ...]:
    registered = _registered()
    return tuple(_schema_facts(op) for op in _members(packet) if _key(op) in registered and not _is_out(op))


def _key(op: OpOverload) -> str:
    schema = op._schema
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name


def _is_out(op: OpOverload) -> bool:
    return any(a.is_out for a in op._schema.arguments)


def _fits(node: Node, facts: _Facts) -> bool:
    """Could this call mean this overload? Only plain contradictions say no."""
    given = dict(zip(facts.names[: facts.positional], node.args, strict=False))
    if len(node.args) > facts.positional or not (node.kwargs.keys() <= {*facts.names, "out", "inplace"}):
        return False
    given.update(node.kwargs)
    for name, kind in zip(facts.names, facts.types, strict=True):
        value = given.get(name, _UNKNOWN)
        if value is _UNKNOWN:
            if name not in facts.defaults:
                return False
        elif isinstance(value, (bool, int, float)):
            if kind in ("Tensor", "Optional[Tensor]", "List[Tensor]"):
                return False
        elif isinstance(value, (tuple, list)) and "List[" not in kind:
            return False
    return True


def _union(effects: Iterable[Effects]) -> Effects:
    whole = PURE
    for e in effects:
        whole = Effects(
            tuple(dict.fromkeys(whole.writes + e.writes)),
            tuple(dict.fromkeys(whole.aliases + e.aliases)),
            whole.reads_state + e.reads_state,
            whole.writes_state + e.writes_state,
            whole.random or e.random,
            whole.impure or e.impure,
            whole.check or e.check,
            whole.known and e.known,
        )
    return whole


def _unknown(node: Node, state: tuple[torch.Tensor, ...] = ()) -> Effects:
    reads = tuple(node.all_input_nodes)
    return Effects(reads, reads, state, state, random=True, impure=True, known=False)


# ---------------------------------------------------------------- functions and methods by name

_ALIAS, _ALIAS_ALL, _WRITE, _OUTSIDE = "alias", "alias all", "write", "outside"
_OBJECTS: dict[Any, str] = {
    **{v: "" for m in (operator, math) for k, v in vars(m).items() if callable(v) and not k.startswith("__")},
    **{getattr(operator, k): _WRITE for k in dir(operator) if f"__{k}__" in tables.IN_PLACE_METHODS or k == "imatmul"},
    **dict.fromkeys((operator.setitem, operator.delitem, operator.iconcat), _WRITE),
    **dict.fromkeys((operator.getitem, operator.pos, getattr, next, iter, enumerate, reversed, sorted), _ALIAS),
    **dict.fromkeys((tuple, list, dict, zip, max, min, operator.concat, set, frozenset), _ALIAS_ALL),
    **dict.fromkeys((print, setattr, delattr, warnings.warn, input, open), _OUTSIDE),
    **dict.fromkeys((torch.device, torch.Size, torch.finfo, torch.iinfo, slice), ""),
    **{getattr(builtins, k): "" for k in tables.PURE_BUILTINS},
}
for _opaque_factory in (operator.call, operator.attrgetter, operator.itemgetter, operator.methodcaller):
    del _OBJECTS[_opaque_factory]


@cache
def _torch_name(target: Any) -> str | None:
    """The name of a function or method that torch itself defines."""
    if isinstance(target, str):
        return target
    owner = getattr(target, "__objclass__", None)
    if owner is not None:
        return str(target.__name__) if issubclass(torch.Tensor, owner) else None
    name, module = getattr(target, "__name__", None), getattr(target, "__module__", None)
    return name if isinstance(name, str) and module in tables.TORCH_MODULES and not isinstance(target, type) else None


@cache
def _signature_facts(target: Any, name: str) -> _Facts | None:
    """Parameter names and defaults of a Python function, with the rule that goes with them."""
    if not inspect.isfunction(target):
        return None
    parameters = inspect.signature(target).parameters
    names = tuple(parameters)
    defaults = {k: p.default for k, p in parameters.items() if p.default is not p.empty}
    return _Facts(name, names, defaults=defaults, rule=_rule(name, names))


def _function(node: Node, name: str) -> Effects:
    """A torch function or method by its name."""
    first = _first(node)
    if name in tables.CHECKS:
        return Effects(check=True)
    if name in tables.GENERATOR_STATE:
        return Effects(random=True, impure=True)
    if name in tables.IMPURE:
        return Effects(impure=True)
    if name in ("backward", "register_hook", "register_post_accumulate_grad_hook", "apply_", "map_", "map2_"):
        return _unknown(node)
    facts = _signature_facts(node.target, name)
    overloads = _overloads(name)
    if facts is not None and facts.rule:
        effects = facts.rule(_Call(node, facts), PURE)
    elif name in tables.IN_PLACE_METHODS:
        effects = Effects(first, first)
    elif name in tables.ALIASING:
        effects = Effects(aliases=first)
    elif name in tables.FUNCTIONS:
        effects = PURE
    elif overloads:
        if any(f.rule for f in overloads):
            overloads = tuple(f for f in overloads if _fits(node, f)) or overloads
        effects = _union(_apply(node, f) for f in overloads if not f.plain)
    else:
        return _unknown(node)
    if name in ("retain_grad", "requires_grad_"):
        effects = replace(effects, impure=True)
    inplace = _Call(node, facts or _Facts()).get("inplace", default=False)
    if (inplace is not False and _may(inplace)) and not (facts and facts.rule is _dropout):
        effects = _union((effects, Effects(first, first)))
    if out := _nodes(node.kwargs.get("out")):
        effects = _union((effects, Effects(out, out)))
    return effects


def _object(node: Node, what: str, root: nn.Module | None) -> Effects:
    first = _first(node)
    if what == _OUTSIDE:
        return Effects(first if node.target is setattr else (), impure=True)
    if what == _WRITE:
        aliases = tuple(node.all_input_nodes) if node.target is operator.setitem else first
        return Effects(first, aliases)
    if what == _ALIAS_ALL or (node.target in (operator.add, operator.mul) and is_tuple(node, root)):
        return Effects(aliases=tuple(node.all_input_nodes))
    return Effects(aliases=first) if what == _ALIAS else PURE


# ---------------------------------------------------------------- graphs inside, and modules


@dataclass(frozen=True)
class _Inside:
    """What a module does, seen from its caller: its own nodes are of no concern."""

    effects: Effects
    writes: bool = False  # its first argument; for a graph, any
    aliases: bool = False


def _lookup(root: nn.Module | None, target: object) -> Any:
    value: Any = root
    for atom in str(target).split("."):
        value = getattr(value, atom, None)
    return value


def _graph(gm: fx.GraphModule) -> _Inside:
    """Follow what aliases the inputs and the state of a graph through it."""
    inputs: set[Node] = set()
    state: dict[Node, tuple[torch.Tensor, ...]] = {}
    outputs: tuple[Node, ...] = ()
    total, written = PURE, False
    for n in gm.graph.nodes:
        if n.op == "placeholder":
            inputs.add(n)
        elif n.op == "get_attr":
            value = _lookup(gm, n.target)
            if isinstance(value, torch.Tensor):
                state[n] = (value,)
                total = _union((total, Effects(reads_state=(value,))))
        elif n.op == "output":
            outputs = tuple(n.all_input_nodes)
        else:
            e = effects_of(n, gm)
            written = written or any(w in inputs for w in e.writes)
            touched = tuple(t for w in e.writes for t in state.get(w, ()))
            if e is not PURE:
                total = _union((total, replace(e, writes=(), aliases=(), writes_state=e.writes_state + touched)))
            if any(a in inputs for a in e.aliases):
                inputs.add(n)
            if kept := tuple(t for a in e.aliases for t in state.get(a, ())):
                state[n] = kept
    if any(o in state for o in outputs):  # its state escapes under another name: nothing here can say so
        total = replace(total, impure=True, known=False, writes_state=total.reads_state)
    return _Inside(total, written, any(o in inputs for o in outputs))


def _state(module: nn.Module) -> tuple[torch.Tensor, ...]:
    return (*module.parameters(), *module.buffers())


def _watched(module: nn.Module) -> bool:
    """Does it do more than its class says: hooks, a parametrization, a forward of its own?"""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, h, None) for h in hooks):
        return True
    return "forward" in vars(module) or "parametrizations" in module._modules


def _module(m: nn.Module) -> _Inside | None:
    """What calling a module does; ``None`` if it is not known."""
    if type(m).__module__ == "torch.export._unlift":  # what export puts in front of a graph to check its inputs
        return _Inside(Effects(check=True))
    if _watched(m):
        return None
    if isinstance(m, fx.GraphModule):
        return _graph(m)
    name, inplace = type(m).__name__, bool(getattr(m, "inplace", False))
    if not type(m).__module__.startswith("torch.nn.modules."):
        return None
    if name in tables.DROPOUT_MODULES:
        p = cast(nn.Dropout, m).p
        active = m.training and p != 0
        return _Inside(Effects(random=active), inplace and (m.training or name.endswith("d")), inplace or not active)
    parts = [_module(c) for c in m.children()]
    if None in parts:
        return None
    inside = cast(list[_Inside], parts)
    effects = _union((_own(m, name), *(p.effects for p in inside)))
    if name == "Sequential":
        reached = True  # does what runs next get the input itself?
        written = False
        for part in inside:
            written, reached = written or (reached and part.writes), reached and part.aliases
        return _Inside(effects, written, reached)
    if name.startswith("Transformer") and name.endswith("Layer"):
        activation = getattr(m, "activation", None)
        if not isinstance(activation, nn.Module) and _torch_name(activation) is None:
            return None
    if name in tables.FRESH_MODULES:
        return _Inside(effects, inplace, inplace)
    return _Inside(effects, any(p.writes for p in inside), True) if name in tables.ALIAS_MODULES else None


def _own(m: Any, name: str) -> Effects:
    """Random numbers and state of one torch.nn module, its children left out."""
    written: tuple[Any, ...] = ()
    if m.training and name.startswith(("BatchNorm", "SyncBatchNorm", "InstanceNorm")):
        written = tuple(m.buffers(recurse=False))
    elif name in ("Embedding", "EmbeddingBag") and m.max_norm is not None:
        written = (m.weight,)
    drop = (
        m.training and bool(getattr(m, "dropout", 0.0))
        if name in ("LSTM", "GRU", "RNN", "MultiheadAttention")
        else False
    )
    samples = name.startswith("FractionalMaxPool") and m._random_samples is None
    random = drop or samples or (name == "RReLU" and m.training)
    collective = name == "SyncBatchNorm" and m.training
    return Effects(writes_state=written, random=random, impure=collective)


def _call_module(node: Node, root: nn.Module) -> Effects:
    m = _lookup(root, node.target)
    if not isinstance(m, nn.Module):
        return _unknown(node)
    inside = _module(m)
    if inside is None:
        return _unknown(node, _state(m))
    args = tuple(node.all_input_nodes) if isinstance(m, fx.GraphModule) else _first(node)
    return replace(
        inside.effects,
        writes=args if inside.writes else (),
        aliases=args if inside.aliases else (),
        reads_state=_state(m),
    )


def _bodies(node: Node, root: nn.Module | None) -> dict[Node | nn.Module, nn.Module]:
    args: tuple[Any, ...] = node.args
    found: dict[Node | nn.Module, nn.Module] = {a: a for a in args if isinstance(a, nn.Module)}
    for n in node.all_input_nodes:
        if n.op == "get_attr" and isinstance(body := _lookup(root, n.target), nn.Module):
            found[n] = body
    return found


def _higher_order(node: Node, root: nn.Module) -> Effects:
    """An operator over operators: what its bodies do to their arguments, it does to its own."""
    name: str = cast(Any, node.target).name()
    inner = [_schema_facts(a) for a in node.args if isinstance(a, OpOverload)]
    bodies = _bodies(node, root)
    operands = tuple(n for n in node.all_input_nodes if n not in bodies)
    if name == "print":
        return Effects(impure=True)
    if inner:  # auto_functionalized clones what its op writes; with_effects does not
        writes = any(f.writes for f in inner) and not name.startswith("auto_functionalized")
        return Effects(
            operands if writes else (),
            operands,
            random=any(f.random for f in inner),
            impure=name == "with_effects" or any(f.impure for f in inner),
        )
    inside = [_module(b) for b in bodies.values()]
    if not inside or None in inside:
        return _unknown(node, tuple(t for b in bodies.values() for t in _state(b)))
    known = cast(list[_Inside], inside)
    # loops return what they were given when they run zero times
    aliases = name not in tables.WRAPPERS or any(i.aliases for i in known)
    return replace(
        _union(i.effects for i in known),
        writes=operands if any(i.writes for i in known) else (),
        aliases=operands if aliases else (),
    )


# ---------------------------------------------------------------- what users declare


_DECLARED: dict[Any, _Facts] = {}


def declare(
    target: Callable[..., Any] | str | OpOverload | type[nn.Module],
    *,
    writes: tuple[int | str, ...] = (),
    aliases: tuple[int | str, ...] = (),
    random: bool = False,
    impure: bool = False,
) -> None:
    """Say what a function, method, operator or leaf-module type of your own does; it overrides what splitkit knows.

    Args:
        target: a function, the name of a method, an operator overload, or a module class (exactly that class).
        writes: positions or keyword names of the arguments that it writes.
        aliases: positions or keyword names of the arguments that its output may share memory with.
        random: it draws random numbers.
        impure: it acts on the outside world.

    Buffers of a declared module are taken to be written in training mode.
    """

    def slots(items: tuple[int | str, ...]) -> tuple[tuple[int, str], ...]:
        names = _parameters(target)
        return tuple(
            (i, names[i] if i < len(names) else "") if isinstance(i, int) else (names.index(i) if i in names else -1, i)
            for i in items
        )

    _DECLARED[target] = _Facts(writes=slots(writes), aliases=slots(aliases), random=random, impure=impure)


def _parameters(target: Any) -> tuple[str, ...]:
    if isinstance(target, OpOverload):
        return tuple(a.name for a in target._schema.arguments)
    if isinstance(target, type):
        return tuple(inspect.signature(cast(Any, target).forward).parameters)[1:]
    try:
        return tuple(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return ()


def _declared(node: Node, root: nn.Module) -> Effects | None:
    target: Any = node.target
    state: tuple[torch.Tensor, ...] = ()
    written: tuple[torch.Tensor, ...] = ()
    if node.op == "call_module":
        m = _lookup(root, target)
        target = type(m)
        if target in _DECLARED and not isinstance(m, fx.GraphModule):
            state = _state(m)
            written = tuple(m.buffers()) if m.training else ()
    facts = _DECLARED.get(target)
    return facts if facts is None else replace(_apply(node, facts), reads_state=state, writes_state=written)


# ---------------------------------------------------------------- the two questions


def effects_of(node: Node, root: nn.Module) -> Effects:
    """What a node may do to memory, to random generators and to the outside world.

    Args:
        node: a node of any graph; it is only read.
        root: the module that its ``call_module`` and ``get_attr`` targets belong to.
    """
    if node.op in ("placeholder", "get_attr", "output"):
        return PURE
    target: Any = node.target
    if _DECLARED and (declared := _declared(node, root)) is not None:
        return declared
    if node.op == "call_module":
        return _call_module(node, root)
    if isinstance(target, OpOverload):
        return _apply(node, _schema_facts(target))
    if isinstance(target, HigherOrderOperator):
        return _higher_order(node, root)
    if isinstance(target, OpOverloadPacket):
        facts = _packet_facts(target) or tuple(map(_schema_facts, _members(target)))
        return _union(_apply(node, f) for f in facts)
    try:
        what = _OBJECTS.get(target) if node.op == "call_function" else None
        name = _torch_name(target)
    except TypeError:  # not hashable
        return _unknown(node)
    if what is not None:
        return _object(node, what, root)
    if isinstance(getattr(target, "__self__", None), logging.Logger):
        return Effects(impure=True)
    return _unknown(node) if name is None else _function(node, name)


def is_tuple(node: Node, root: nn.Module | None = None) -> bool | None:
    """Does a node yield a tuple or list (``True``), a single value (``False``), or is that unknown (``None``)?

    ``meta["val"]`` or ``meta["example_value"]`` decides where there is one.
    """
    value = node.meta.get("val", node.meta.get("example_value"))
    if value is not None:
        return isinstance(value, (tuple, list))
    target: Any = node.target
    if node.op == "output":
        return _argument_is_tuple(node.args[0], root)
    if node.op in ("get_attr", "call_module"):
        found = _lookup(root, target)
        if node.op == "call_module":
            return _module_yields_tuple(found)
        return isinstance(found, (tuple, list)) if found is not None else None
    if node.op == "placeholder":
        return None
    if isinstance(target, OpOverload):
        return _schema_facts(target).yields_tuple
    if isinstance(target, HigherOrderOperator):
        answers = {_module_yields_tuple(b) for b in _bodies(node, root).values()}
        return answers.pop() if len(answers) == 1 else None
    if target is operator.getitem:
        return _item_is_tuple(node, root)
    if isinstance(target, OpOverloadPacket):
        return _overloads_yield_tuple(node, _packet_facts(target))
    try:
        what = _OBJECTS.get(target) if node.op == "call_function" else None
        name = _torch_name(target)
    except TypeError:
        return None
    if what is not None:
        return _object_yields_tuple(node, root)
    return None if name is None else _function_yields_tuple(node, name)


def _argument_is_tuple(value: object, root: nn.Module | None) -> bool | None:
    return is_tuple(value, root) if isinstance(value, Node) else isinstance(value, (tuple, list))


def _object_yields_tuple(node: Node, root: nn.Module | None) -> bool | None:
    target: Any = node.target
    if target in (tuple, list, zip, divmod, torch.Size, sorted, enumerate, dict, set, frozenset):
        return True
    if target is getattr:
        name = node.args[1] if len(node.args) > 1 else None
        return True if name == "shape" else False if name in tables.SINGLE_ATTRIBUTES else None
    if target in (operator.add, operator.mul, operator.concat, operator.iadd, operator.imul):
        return any(_argument_is_tuple(a, root) for a in node.args)
    return None if target in (next, iter, reversed, max, min) else False


def _item_is_tuple(node: Node, root: nn.Module | None) -> bool | None:
    source, index = node.args[0], node.args[1]
    if not isinstance(source, Node):
        return None
    whole = is_tuple(source, root)
    if not whole:
        return whole
    if isinstance(index, slice):
        return True
    if source.op == "call_module":  # LSTM yields (output, (h, c)); a graph may nest as it likes
        found = _lookup(root, source.target)
        return index in (1, -1) if isinstance(found, nn.LSTM) else None if isinstance(found, fx.GraphModule) else False
    if isinstance(source.target, OpOverload):
        returns = source.target._schema.returns
        kinds = ["List[" in str(r.type) for r in returns]
        return (
            kinds[index] if len(kinds) > 1 and isinstance(index, int) and -len(kinds) <= index < len(kinds) else False
        )
    # torch's functions and methods yield flat tuples; anything else may nest
    return False if source.op in ("call_function", "call_method") and _torch_name(source.target) else None


def _function_yields_tuple(node: Node, name: str) -> bool | None:
    def flag(key: str, position: int, default: object = False) -> object:
        return node.kwargs.get(key, node.args[position] if 0 <= position < len(node.args) else default)

    if "return_indices" in node.kwargs or name in tables.RETURN_INDICES:
        value = flag("return_indices", tables.RETURN_INDICES.get(name, -1))
        return None if isinstance(value, Node) else bool(value)
    if name == "unique" or name == "unique_consecutive":
        first = 2 if name == "unique" else 1
        flags = [flag("return_inverse", first), flag("return_counts", first + 1)]
        return None if any(isinstance(f, Node) for f in flags) else any(flags)
    if node.target is F.embedding_bag:  # not torch.embedding_bag
        return False
    if name == "nonzero":
        return bool(node.kwargs.get("as_tuple", False))
    if name in ("tolist", "lu"):
        return True if name == "lu" else None
    if name in ("where", "size", "stride") and len(node.args) + len(node.kwargs) == 1:
        return True
    if name in tables.FUNCTIONS:
        return tables.FUNCTIONS[name]
    if name in ("__iter__", "unbind"):
        return True
    if name in ("meshgrid", "broadcast_tensors", "align_tensors"):
        return True
    if name.startswith("atleast_"):
        return len(node.args) > 1 or isinstance(node.args[0], (tuple, list))
    if name in tables.ALIASING or name in tables.IN_PLACE_METHODS or name in tables.CHECKS:
        return False
    return _overloads_yield_tuple(node, _overloads(name))


def _overloads_yield_tuple(node: Node, overloads: tuple[_Facts, ...]) -> bool | None:
    fitting = tuple(f for f in overloads if _fits(node, f)) or overloads
    answers = {f.yields_tuple for f in fitting}
    if len(answers) > 1:  # a node is more often a tensor than a number: torch.max(x, y)
        tensors = {
            f.yields_tuple
            for f in fitting
            if all("Tensor" in k for k, a in zip(f.types, node.args, strict=False) if isinstance(a, Node))
        }
        answers = tensors or answers
    return answers.pop() if len(answers) == 1 else None


def _module_yields_tuple(m: object) -> bool | None:
    if isinstance(m, fx.GraphModule):
        return next((is_tuple(n, m) for n in m.graph.nodes if n.op == "output"), None)
    if not isinstance(m, nn.Module) or not type(m).__module__.startswith("torch.nn.modules.") or _watched(m):
        return None
    name = type(m).__name__
    if name == "Sequential":
        return _module_yields_tuple(m[-1]) if isinstance(m, nn.Sequential) and len(m) else None
    if name in tables.TUPLE_MODULES or getattr(m, "return_indices", False):
        return True
    known = name in tables.FRESH_MODULES or name in tables.DROPOUT_MODULES or name in tables.ALIAS_MODULES
    return False if known and name != "Identity" else None
