"""Build modules around emitted graphs, with their attributes, hooks and training flags."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

import torch
from torch import fx, nn

from splitkit import _torch
from splitkit.engine.codegen.part_modules import (
    ChildDescriptor,
    EagerParent,
    EagerPart,
    LazyParent,
    LazyPart,
    bare_container,
    bare_module,
    stands_alone,
)
from splitkit.engine.module_names import Style
from splitkit.graph.storages import Lookup


def build_module(
    original: nn.Module,
    graph: fx.Graph,
    attributes: Mapping[str, str],
    style: Style,
    lazy: bool = False,
    *,
    is_part: bool = False,
) -> fx.GraphModule:
    """Return a GraphModule that shares attributes with the original.

    Args:
        original: the module whose attributes it shares.
        graph: its graph.
        attributes: names of its attributes -> their names in the original.
        style: options for names and return values.
        lazy: generate the code when it is first needed, instead of now.
        is_part: whether it is a part, which a parent calls, so that calls should be fast.
    """
    name = "GraphModule" if style.like_torch else type(original).__name__
    module = bare_module(_class_of(lazy, is_part), graph, name, original.training)
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


def _class_of(lazy: bool, is_part: bool) -> type[fx.GraphModule]:
    if is_part:
        return LazyPart if lazy else EagerPart
    return LazyParent if lazy else EagerParent


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
