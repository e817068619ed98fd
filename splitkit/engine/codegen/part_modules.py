"""GraphModules that are cheap to build, with code generated at once or at the first call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from threading import RLock
from typing import Any, NamedTuple, cast

import torch
from torch import fx, nn
from torch.fx import Node
from torch.fx.node import map_aggregate

from splitkit import _torch
from splitkit._torch import HigherOrderOperator, OpOverload, OpOverloadPacket, attributes_of
from splitkit.engine.codegen.writer import LeanGraph, Writer
from splitkit.engine.function_names import function_of, name_of_function
from splitkit.errors import FileError, GraphError
from splitkit.graph.storages import Lookup

# Keep parameters and buffers shared between modules in operations where ``nn.Module`` would separate them.


Table = dict[str, Any]  # the parameters or the buffers of one module, by name
Tie = list[tuple[Table, str, str]]  # the places of one tensor: table, key, and qualified name


def ties_of(module: nn.Module, recurse: bool = True, every_name: bool = False) -> list[Tie]:
    """Return the places of each tensor that a module and its children hold in several places.

    Args:
        module: the module to search.
        recurse: search its children too.
        every_name: count a child that has two names twice.
    """
    found: dict[int, Tie] = {}
    modules = module.named_modules(remove_duplicate=not every_name) if recurse else [("", module)]
    for path, owner in modules:
        held = attributes_of(owner)
        for table in (held.parameters, held.buffers):  # torch replaces the entries one by one
            for key, tensor in table.items():
                if tensor is not None:
                    found.setdefault(id(tensor), []).append((table, key, f"{path}.{key}".lstrip(".")))
    return [places for places in found.values() if len(places) > 1]


class Tied(nn.Module):
    """A module that converts, materializes and loads a shared tensor once, for all of its places.

    ``to_empty()`` of a module on ``meta`` and ``load_state_dict(assign=True)`` make a new Parameter in each module that
    holds one. A whole model may hold a weight once that it uses twice, but each of its parts holds the weight.
    """

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Any:  # 2.11, 2.13, 2.15
        ties = ties_of(self, recurse)
        for _, *others in ties:
            for table, key, _name in others:
                table[key] = None  # `_apply` skips None
        try:
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            for (table, key, _name), *others in ties:
                for other, name, _ in others:
                    other[name] = table[key]

    def _load_from_state_dict(  # 2.11, 2.13, 2.15
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if local_metadata.get("assign_to_params_buffers", False):
            for tie in ties_of(self, every_name=True):
                names = [prefix + name for _, _, name in tie]
                missing_keys += _assign_to_all_names(state_dict, names, tie[0][0][tie[0][1]])
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def _assign_to_all_names(state_dict: dict[str, Any], names: list[str], now: torch.Tensor | None) -> Iterable[str]:
    """Give all names of one tensor the last value that is given for any of them; return the names that had none."""
    given = [name for name in names if name in state_dict]
    if not given:
        return ()
    new = state_dict[given[-1]]
    if isinstance(now, nn.Parameter) and isinstance(new, torch.Tensor) and not isinstance(new, nn.Parameter):
        new = nn.Parameter(new, requires_grad=now.requires_grad)
    state_dict.update(dict.fromkeys(names, new))
    return [name for name in names if name not in given]


_MAKING_CODE = RLock()


def call_part(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Do what ``nn.Module.__call__`` does, which fx replaces while it traces.

    ``GraphModule.__call__`` also prints the line of the graph where an error arose; the parent of the part does that.
    """
    return nn.Module.__call__(self, *args, **kwargs)


class ChildDescriptor:
    """A descriptor that finds a child without the failed lookups before ``nn.Module.__getattr__``.

    It is not a data descriptor, so that what users put in the module's ``__dict__`` comes first.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, module: nn.Module | None, kind: type | None = None) -> Any:
        if module is None:
            return self
        try:
            return module._modules[self.name]
        except KeyError:
            raise AttributeError(f"{type(module).__name__!r} object has no attribute {self.name!r}") from None


class _PickledByNodes(Tied):
    """Pickles the nodes of its graph; see `reduce_module`."""

    def __reduce__(self) -> Any:
        """Return the reduction for pickle."""
        kind: type[fx.GraphModule] = EagerPart if isinstance(self, (EagerPart, LazyPart)) else EagerParent
        return reduce_module(cast(fx.GraphModule, self), kind)


def pickle_by_nodes(gm: fx.GraphModule) -> fx.GraphModule:
    """Let pickle save the nodes of a module of torch's own class, and return it; see `reduce_module`."""
    kind: Any = type(gm)  # each GraphModule has a class of its own
    if kind.__reduce__ is fx.GraphModule.__reduce__:
        kind.__reduce__ = lambda gm: reduce_module(gm, fx.GraphModule)
    return gm


def reduce_module(module: fx.GraphModule, kind: type[fx.GraphModule]) -> Any:
    """Return the reduction for pickle, which restores a ``kind``: nodes, attributes, and the hooks that stand alone.

    Fx saves the code and traces it again. Whatever reads no input would run at that moment, and never again: a write to
    a buffer, ``torch.rand(3)``, the beginning of an autocast region.
    """
    for inner in module.modules():  # bodies of higher-order ops
        if isinstance(inner, fx.GraphModule):
            pickle_by_nodes(inner)
    dropped = ("_hooks", "_with_kwargs", "_always_called")
    body = {
        name: type(value)() if name.endswith(dropped) else value
        for name, value in module.__dict__.items()
        if name not in ("_graph", "_code", "forward")
    }
    checks = [hook for hook in module._forward_pre_hooks.values() if stands_alone(hook)]
    return _restored, (kind, type(module).__name__, body, graph_as_data(module.graph), checks)


def _restored(
    kind: type[fx.GraphModule], name: str, body: dict[str, Any], data: GraphData, checks: list[Callable[..., Any]]
) -> fx.GraphModule:
    module = bare_module(kind, graph_of_data(data), name, body["training"])
    module.__dict__.update(body)
    for check in checks:
        cast(Any, check).watch(module)
        module._register_deepcopy_hook(cast(Any, check).watch)  # 2.11, 2.13, 2.15
    return pickle_by_nodes(module)


def stands_alone(hook: object) -> bool:
    """Whether a hook is independent of the module it is called for; such a hook has ``watch``, which registers it."""
    return hasattr(hook, "watch")


class EagerParent(_PickledByNodes, fx.GraphModule):
    """A parent whose code is generated when it is built."""


class EagerPart(_PickledByNodes, fx.GraphModule):
    """A part whose code is generated when it is built."""

    def recompile(self) -> Any:
        """Generate the code again after the graph was edited."""
        code = super().recompile()
        type(self).__call__ = call_part  # type: ignore[method-assign]  # replaces GraphModule's
        return code


class _Unmade:
    """A ``forward`` whose code is not generated yet. It is not a data descriptor: an instance may have its own."""

    def __get__(self, module: Any, kind: type | None = None) -> Any:
        if module is None:
            return self
        module.real_recompile()
        return module.forward


class _Lazy(_PickledByNodes, _torch.LazyGraphModule):  # type: ignore[misc]
    """A GraphModule whose code is generated when its ``forward`` is first accessed.

    Torch's own class generates the code inside the first call and then calls the module once more, so that hooks fire
    twice and Dynamo meets a function that it must not trace.
    """

    # TorchScript would compile the property, which takes a lock (torch 2.11, 2.13, 2.15).
    __jit_unused_properties__ = (*fx.GraphModule.__jit_unused_properties__, "code")
    _lazy_forward = forward = _Unmade()  # torch compares the two to see whether code is missing (2.11, 2.13, 2.15)

    def real_recompile(self) -> None:
        """Generate the code unless it exists. The lock is needed: two threads would confuse fx's table of names."""
        with _MAKING_CODE:
            super().real_recompile()


class LazyPart(_Lazy):
    """A part whose code is generated at its first call."""

    def _real_recompile(self) -> Any:  # 2.11, 2.13, 2.15
        code = super()._real_recompile()
        type(self).__call__ = call_part  # type: ignore[method-assign]
        return code


class LazyParent(_Lazy):
    """A parent whose code, with that of its parts, is generated at its first call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the parts."""
        if isinstance(type(self).forward, _Unmade):  # a test that Dynamo can trace
            self.real_recompile()  # installs fx's __call__, which prints the line where an error arose
            return self(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def _real_recompile(self) -> Any:  # 2.11, 2.13, 2.15
        code = super()._real_recompile()
        for part in self.children():
            if isinstance(part, _Lazy):  # Dynamo cannot generate code while it traces
                part.real_recompile()
        return code


def bare_module(kind: type[fx.GraphModule], graph: fx.Graph, name: str, training: bool) -> fx.GraphModule:
    """Return a GraphModule without the attributes that its graph reads, in half of the constructor's time.

    The constructor sets some thirty fields, each through ``nn.Module.__setattr__``. This function copies them from a
    module that the constructor has made.
    """
    module = kind.__new__(kind)
    _fill(module, kind, _graph=graph, training=training)
    type(module).__name__ = name
    graph.owning_module = module
    module.recompile()
    return module


class Container(nn.Module):
    """Holds attributes that a graph reads under dotted names. No graph calls it, so that a hook on it never runs."""

    def register_forward_hook(self, *args: Any, **options: Any) -> Any:
        """Register a hook, and warn."""
        _warn_of_hook()
        return super().register_forward_hook(*args, **options)

    def register_forward_pre_hook(self, *args: Any, **options: Any) -> Any:
        """Register a hook, and warn."""
        _warn_of_hook()
        return super().register_forward_pre_hook(*args, **options)


def _warn_of_hook() -> None:
    warnings.warn(
        "this module only holds parameters and buffers of a part, which computes without calling it: the hook never "
        "runs. split.register_forward_hook(path, hook) sets one on the output of a module of the model.",
        stacklevel=3,
    )


def bare_container(training: bool) -> nn.Module:
    """Return an empty module to hold attributes."""
    module = Container.__new__(Container)
    _fill(module, Container, training=training)
    return module


@cache
def _fields_of(kind: type[nn.Module]) -> tuple[Mapping[str, Any], tuple[tuple[str, Callable[[], Any]], ...]]:
    """Return the fields that the constructor sets, and the classes of those that are empty containers."""
    made = kind({}, fx.Graph()) if issubclass(kind, fx.GraphModule) else kind()
    fields = dict(made.__dict__)
    return fields, tuple((name, type(v)) for name, v in fields.items() if isinstance(v, (dict, list, set)) and not v)


def _fill(module: nn.Module, kind: Any, **values: Any) -> None:
    fields, containers = _fields_of(kind)
    filled = module.__dict__
    filled.update(fields)
    for name, make in containers:
        filled[name] = make()
    filled.update(values)


# Describe the nodes of a graph by what pickle can save.
#
# Pickle saves functions and classes by their names, but no ops: they are named here, and looked up when they are
# loaded.


class GraphData(NamedTuple):
    """A graph for pickle.

    Attributes:
        nodes: op, target, arguments, keyword arguments, name and type of each node.
        codegen: the generator of its code, with the signature.
    """

    nodes: list[tuple[Any, ...]]
    codegen: Any


@dataclass(frozen=True)
class _Read:
    """Stands for a node among arguments."""

    name: str


@dataclass(frozen=True)
class _Op:
    """Stands for an op, and is loaded as that op."""

    name: str

    def __reduce__(self) -> Any:
        return _op_of, (self.name,)


def graph_as_data(graph: fx.Graph) -> GraphData:
    """Return a graph as data for pickle; the meta of nodes, which has fake tensors, is left out.

    Raises:
        GraphError: SK107 for an op that cannot be found by its name.
    """
    nodes = []
    for node in graph.nodes:
        told = map_aggregate((node.target, node.args, dict(node.kwargs)), lambda value: _told(node, value))  # noqa: B023
        nodes.append((node.op, *told, node.name, node.type))
    return GraphData(nodes, _torch.codegen_of(graph))


def graph_of_data(data: GraphData) -> fx.Graph:
    """Return the graph that `graph_as_data` has described."""
    graph, found = LeanGraph(), dict[str, Node]()
    writer = Writer(graph)
    for op, target, args, kwargs, name, kind in data.nodes:
        args, kwargs = map_aggregate(
            (args, kwargs), lambda value: found[value.name] if isinstance(value, _Read) else value
        )
        found[name] = writer.append(op, target, args, name, kwargs)
        found[name].type = kind
    graph.set_codegen(data.codegen)
    return graph


def _told(node: Node, value: Any) -> Any:
    if isinstance(value, Node):
        return _Read(value.name)
    if isinstance(value, OpOverloadPacket):
        return _Op(f"packet.{value}")
    if not isinstance(value, (OpOverload, HigherOrderOperator)):
        return value
    if (name := name_of_function(value)) is None:
        raise GraphError(
            "SK107",
            f"{node.name} calls {value}, which cannot be found by its name when the pickle is loaded",
            "Save the plan (plan.save) and the weights (module.state_dict), and split again; or copy with "
            "copy.deepcopy.",
            [node],
        )
    return _Op(name)


def _op_of(name: str) -> Any:
    kind, _, rest = name.partition(".")
    space, _, packet = rest.partition(".")
    found = getattr(getattr(torch.ops, space), packet, None) if kind == "packet" else function_of(name)
    if found is None:
        raise FileError(
            "SK508",
            f"the pickled graph calls {rest}, which this process does not know",
            "Import the package that defines it before the pickle is loaded.",
        )
    return found


# Build modules around emitted graphs, with their attributes, hooks and training flags.


def build_module(
    original: nn.Module,
    graph: fx.Graph,
    attributes: Mapping[str, str],
    name: str,
    lazy: bool = False,
    *,
    is_part: bool = False,
) -> fx.GraphModule:
    """Return a GraphModule that shares attributes with the original.

    Args:
        original: the module whose attributes it shares.
        graph: its graph.
        attributes: names of its attributes -> their names in the original.
        name: the name of its class.
        lazy: generate the code when it is first needed, instead of now.
        is_part: whether it is a part, which a parent calls, so that calls should be fast.
    """
    eager, late = (EagerPart, LazyPart) if is_part else (EagerParent, LazyParent)
    module = bare_module(late if lazy else eager, graph, name, original.training)
    # after `recompile`, which would also recompile the graph modules among the attributes
    installer = _Installer(module, original)
    for own, source in attributes.items():
        installer.put(own, source)
    return module


def share_whole_modules(
    module: fx.GraphModule, original: nn.Module, attributes: Mapping[str, str], whole: Collection[str]
) -> Mapping[str, str]:
    """Share a whole submodule of the original where a part reads only a buffer of it; return the new attribute names.

    A part that reads ``bn.running_mean`` otherwise gets a container ``bn`` of its own. If another part calls the
    original ``bn``, ``module.double()`` would then replace the buffer twice, and the parts would no longer share it.
    """
    inside = {n: o for n, source in attributes.items() if source == n and (o := _owner(n, whole)) is not None}
    owners = {*inside.values()}
    if not owners:
        return attributes
    for owner in owners:
        *path, last = owner.split(".")
        setattr(module.get_submodule(".".join(path)), last, original.get_submodule(owner))
    others = {name: source for name, source in attributes.items() if name not in inside}
    return {**others, **{owner: owner for owner in sorted(owners)}}


def _owner(name: str, whole: Collection[str]) -> str | None:
    """Return the outermost of the modules ``whole`` that holds an attribute."""
    atoms = name.split(".")
    owners = (".".join(atoms[:end]) for end in range(1, len(atoms))) if whole else ()
    return next((owner for owner in owners if owner in whole), None)


def add_parts(module: fx.GraphModule, parts: Mapping[str, fx.GraphModule]) -> None:
    """Make the parts the first children of their parent, after its `recompile`, which would recompile them."""
    others = {name: child for name, child in module.named_children() if name not in parts}
    for name in others:
        delattr(module, name)
    for name, child in {**parts, **others}.items():
        module.add_module(name, child)
    for name in parts:
        setattr(type(module), name, ChildDescriptor(name))  # a GraphModule has a class of its own


class _Installer:
    """Sets attributes of the original on a module, with the containers that their dotted names need.

    The result is the same as that of ``GraphModule(root, graph)``, in a fraction of the time: each container is looked
    up once, and tensors are written directly into the private tables of ``nn.Module`` (torch 2.11, 2.13, 2.15).
    """

    def __init__(self, module: nn.Module, original: nn.Module) -> None:
        self._find = Lookup(original)
        self._owners: dict[str, nn.Module | None] = {"": module}  # None: shared
        self._tables: dict[str, _torch.Attributes] = {}

    def put(self, name: str, source: str) -> None:
        """Set the attribute ``name`` to the attribute ``source`` of the original."""
        path, _, last = name.rpartition(".")
        owner = self._owners[path] if path in self._owners else self._owner(path)
        if owner is None:
            return
        value = self._find(source)
        is_module = isinstance(value, nn.Module)
        if is_module:
            self._owners[name] = None
        table = self._table_for(path, owner, value)
        if table is None or hasattr(type(owner), last) or last in owner.__dict__:
            _put_publicly(owner, last, value)
        else:
            table[last] = value
        if not is_module and isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            self._keep_persistence(owner, last, source)

    def _table_for(self, path: str, owner: nn.Module, value: object) -> dict[str, Any] | None:
        """Return the table of a module for a value; ``None`` if the value is a plain attribute."""
        if (tables := self._tables.get(path)) is None:
            tables = self._tables[path] = _torch.attributes_of(owner)
        if isinstance(value, nn.Module):  # tested first, because isinstance(value, nn.Parameter) takes 1 us
            return tables.modules
        if isinstance(value, nn.Parameter):
            return tables.parameters
        return tables.buffers if isinstance(value, torch.Tensor) else None

    def _owner(self, path: str) -> nn.Module | None:
        """Return the container at a path; make it if it is missing. ``None`` within a module of the original."""
        if path in self._owners:
            return self._owners[path]
        above, _, last = path.rpartition(".")
        owner, made = self._owner(above), None
        if owner is not None:
            made = bare_container(getattr(self._find.owner(path), "training", True))
            if hasattr(type(owner), last) or last in owner.__dict__:
                _put_publicly(owner, last, made)
            else:
                _torch.attributes_of(owner).modules[last] = made
        self._owners[path] = made
        return made

    def _keep_persistence(self, owner: nn.Module, name: str, source: str) -> None:
        """Leave a buffer out of the state dict if the original does.

        A constant that capture lifted is a plain attribute there, hence not in the state dict either.
        """
        path, _, field = source.rpartition(".")
        model = self._find.owner(path)
        its = _torch.attributes_of(model) if isinstance(model, nn.Module) else None
        if its is None or field not in its.buffers or field in its.unsaved:
            _torch.attributes_of(owner).unsaved.add(name)


def _put_publicly(owner: nn.Module, name: str, value: Any) -> None:
    """Set an attribute as a user would; torch raises for names that ``nn.Module`` uses itself."""
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        owner.register_buffer(name, value)
    else:
        setattr(owner, name, value)


class _SeenByOriginal:
    """A hook of the original that runs for the parent and still receives the original."""

    def __init__(self, hook: Callable[..., Any], original: nn.Module) -> None:
        self.hook = hook
        self.original = original

    def __call__(self, module: nn.Module, *rest: Any) -> Any:
        return self.hook(self.original, *rest)


def carry_hooks(root: fx.GraphModule, module: fx.GraphModule) -> None:
    """Register the hooks of the original, such as input checks, on the parent."""
    # nn.Module keeps its hooks in private tables and has no method that lists them (torch 2.11, 2.13, 2.15).
    for hook_id, before in root._forward_pre_hooks.items():
        if stands_alone(before):
            cast(Any, before).watch(module)
            continue
        with_kwargs = hook_id in root._forward_pre_hooks_with_kwargs
        module.register_forward_pre_hook(_SeenByOriginal(before, root), with_kwargs=with_kwargs)
    for hook_id, after in root._forward_hooks.items():
        module.register_forward_hook(
            _SeenByOriginal(after, root),
            with_kwargs=hook_id in root._forward_hooks_with_kwargs,
            always_call=hook_id in root._forward_hooks_always_called,
        )
    for backward in root._backward_hooks.values():
        module.register_full_backward_hook(_SeenByOriginal(backward, root))
    for backward in root._backward_pre_hooks.values():
        module.register_full_backward_pre_hook(_SeenByOriginal(backward, root))
    for on_copy in root._deepcopy_hooks:
        module._register_deepcopy_hook(on_copy)
