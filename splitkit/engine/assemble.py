"""Modules around emitted graphs: attributes under the right names, hooks, training flags."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

import torch
from torch import fx, nn

from splitkit import _torch
from splitkit.engine.names import Style
from splitkit.engine.partmodules import (
    Child,
    EagerParent,
    EagerPart,
    LazyParent,
    LazyPart,
    bare_container,
    bare_module,
    stands_alone,
)
from splitkit.graph.storages import Lookup


def module_of(
    original: nn.Module,
    graph: fx.Graph,
    attributes: Mapping[str, str],
    style: Style,
    lazy: bool = False,
    *,
    is_part: bool = False,
) -> fx.GraphModule:
    """A GraphModule with the original's attributes; its code is made once, or on the first call.

    Args:
        original: the module whose attributes it takes.
        graph: its graph.
        attributes: its attribute names -> the original's.
        style: names and returns.
        lazy: leave the code to be made when it is first needed.
        is_part: it is called often, by a parent.
    """
    name = "GraphModule" if style.like_torch else type(original).__name__
    module = bare_module(_class_of(lazy, is_part), graph, name, original.training)
    installer = _Installer(module, original)  # after the code is made: fx would make that of graphs inside it again
    for own, source in attributes.items():
        installer.put(own, source)
    return module


def keep_whole(
    module: fx.GraphModule, original: nn.Module, attributes: Mapping[str, str], whole: Collection[str]
) -> Mapping[str, str]:
    """Put some of the original's modules in whole where only a buffer of them is read, so that ``module.double()``
    does not make two of it; gives the attributes of the module as they are then.
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
    """The outermost of the modules ``whole`` that holds an attribute."""
    atoms = name.split(".")
    owners = (".".join(atoms[:end]) for end in range(1, len(atoms))) if whole else ()
    return next((owner for owner in owners if owner in whole), None)


def _class_of(lazy: bool, is_part: bool) -> type[fx.GraphModule]:
    if is_part:
        return LazyPart if lazy else EagerPart
    return LazyParent if lazy else EagerParent


def add_parts(module: fx.GraphModule, parts: Mapping[str, fx.GraphModule]) -> None:
    """Make the parts the first children of their parent: after its code is made, which would make theirs again."""
    others = {name: child for name, child in module.named_children() if name not in parts}
    for name in others:
        delattr(module, name)
    for name, child in {**parts, **others}.items():
        module.add_module(name, child)
    for name in parts:
        setattr(type(module), name, Child(name))  # a GraphModule has a class of its own


class _Installer:
    """Puts attributes of the original under their names in a module, with all modules on the way.

    In the end the module is as ``GraphModule(root, graph)`` makes it, in a fraction of the time: each module on the way
    is looked up once, and tensors go into their tables directly.
    """

    def __init__(self, module: nn.Module, original: nn.Module) -> None:
        self._find = Lookup(original)
        self._owners: dict[str, nn.Module | None] = {"": module}  # None: the original's own, which holds all below

    def put(self, name: str, source: str) -> None:
        """Put what the original has as ``source`` under ``name``."""
        path, _, last = name.rpartition(".")
        owner = self._owners[path] if path in self._owners else self._owner(path)
        if owner is None:
            return
        value = self._find(source)
        if isinstance(value, nn.Module):
            self._owners[name] = None
        table = _table_for(owner, value)
        if table is None or hasattr(type(owner), last) or last in owner.__dict__:
            _put_publicly(owner, last, value)
        else:
            table[last] = value
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            self._keep_persistence(owner, last, source)

    def _owner(self, path: str) -> nn.Module | None:
        """The module at a path, a new one if there is none."""
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
        """Leave a buffer out of the state dict where the original does; a constant that capture lifted is no buffer
        there, but a plain attribute.
        """
        path, _, field = source.rpartition(".")
        model = self._find.owner(path)
        its = _torch.attributes_of(model) if isinstance(model, nn.Module) else None
        if its is None or field not in its.buffers or field in its.unsaved:
            _torch.attributes_of(owner).unsaved.add(name)


def _table_for(owner: nn.Module, value: object) -> dict[str, Any] | None:
    """The table of a module that a value belongs to; ``None`` if it is a plain attribute."""
    tables = _torch.attributes_of(owner)
    if isinstance(value, nn.Parameter):
        return tables.parameters
    if isinstance(value, torch.Tensor):
        return tables.buffers
    return tables.modules if isinstance(value, nn.Module) else None


def _put_publicly(owner: nn.Module, name: str, value: Any) -> None:
    """As a user would, with torch's objections to names that a module has a use for."""
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        owner.register_buffer(name, value)
    else:
        setattr(owner, name, value)


class _SeenByOriginal:
    """A hook of the original that is called for the parent and still sees the original."""

    def __init__(self, hook: Callable[..., Any], original: nn.Module) -> None:
        self.hook = hook
        self.original = original

    def __call__(self, module: nn.Module, *rest: Any) -> Any:
        return self.hook(self.original, *rest)


def carry_hooks(root: fx.GraphModule, module: fx.GraphModule) -> None:
    """Hooks of the original (checks of its inputs, say) are called for the parent."""
    # nn.Module keeps its hooks in private tables and lists them nowhere (2.11, 2.13, 2.15).
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
