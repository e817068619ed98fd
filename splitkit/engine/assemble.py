"""Modules around emitted graphs: attributes under the right names, hooks, training flags."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import fx, nn

from splitkit import _torch
from splitkit.engine.names import Style
from splitkit.engine.partmodules import Child, EagerParent, EagerPart, LazyParent, LazyPart, bare_part
from splitkit.graph.storages import attribute


def module_of(
    original: nn.Module,
    graph: fx.Graph,
    attributes: Mapping[str, str],
    style: Style,
    lazy: bool = False,
    *,
    is_part: bool = False,
    parts: Collection[str] = (),
) -> fx.GraphModule:
    """A GraphModule with the original's attributes; its code is made once, or on the first call.

    Args:
        original: the module whose attributes it takes.
        graph: its graph.
        attributes: its attribute names -> the original's.
        style: names and returns.
        lazy: leave the code to be made when it is first needed.
        is_part: it is called often, by a parent.
        parts: names of modules that will be added later.
    """
    name = "GraphModule" if style.like_torch else type(original).__name__
    if is_part and not attributes:
        return bare_part(lazy, graph, name, original.training)
    module = _class_of(lazy, is_part)(_root(original, attributes, parts), graph, class_name=name)
    for own, source in attributes.items():
        _like_original(module, own, original, source)
    return module


def keep_whole(
    module: fx.GraphModule, original: nn.Module, attributes: Mapping[str, str], whole: Collection[str]
) -> Mapping[str, str]:
    """Put some of the original's modules in whole where only a buffer of them is read, so that ``module.double()``
    does not make two of it; gives the attributes of the module as they are then.
    """
    owners = {name.rpartition(".")[0] for name, source in attributes.items() if source == name} & set(whole)
    if not owners:
        return attributes
    for owner in owners:
        *path, last = owner.split(".")
        setattr(module.get_submodule(".".join(path)), last, original.get_submodule(owner))
    others = {name: source for name, source in attributes.items() if name.rpartition(".")[0] not in owners}
    return {**others, **{owner: owner for owner in sorted(owners)}}


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


def _root(original: nn.Module, attributes: Mapping[str, str], parts: Collection[str]) -> nn.Module:
    """What GraphModule copies references from: the original's attributes, some under other names."""
    root = nn.Module()
    root.training = original.training
    for name, source in attributes.items():
        top = name.split(".")[0]
        # Not registered, so that nothing of the original changes owner.
        root.__dict__[top] = getattr(original, top) if name == source else attribute(original, source)
    root.__dict__.update(dict.fromkeys(parts, nn.Module()))
    return root


def _like_original(module: nn.Module, name: str, root: nn.Module, original: str) -> None:
    """Give the owner of an attribute its training flag, and a buffer its persistence, as in the original.

    A constant that capture lifted is a plain attribute there, which GraphModule has made a buffer.
    """
    *path, last = name.split(".")
    *where, field = original.split(".")
    owner, model = module.get_submodule(".".join(path)), root.get_submodule(".".join(where))
    if owner is not model and not isinstance(owner, fx.GraphModule):
        owner.training = model.training
    its, mine = _torch.attributes_of(model), _torch.attributes_of(owner)
    if owner is not model and last in mine.buffers and (field not in its.buffers or field in its.unsaved):
        mine.unsaved.add(last)


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
