"""Modules around emitted graphs: attributes under the right names, hooks, training flags."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import fx, nn

from splitkit.effects import attribute
from splitkit.names import Style, unique


def module_of(
    original: nn.Module, graph: fx.Graph, style: Style, parts: Collection[str] = ()
) -> tuple[fx.GraphModule, Mapping[str, str]]:
    """A GraphModule with the original's attributes, its code made once; and its attribute names -> the original's.

    ``parts`` are names of modules that will be added later.
    """
    attributes: dict[str, str] = {}
    for node in graph.nodes:
        if node.op in ("get_attr", "call_module") and node.target not in parts:
            source = str(node.target)
            if style.flat_names:
                node.target = _flat(source, attributes)
            attributes[node.target] = source
    module = fx.GraphModule(_root(original, attributes, parts), graph, class_name=type(original).__name__)
    for name, source in attributes.items():
        _like_original(module, name, original, source)
    return module, attributes


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


def _flat(original: str, taken: Mapping[str, str]) -> str:
    """``a.b`` as ``a_b``, with a suffix where that name already stands for something else."""
    flat = original.replace(".", "_")
    if taken.get(flat, original) == original:
        return flat
    known = next((name for name, target in taken.items() if target == original), None)
    return known or unique(flat, taken)


def _like_original(module: nn.Module, name: str, root: nn.Module, original: str) -> None:
    """Give the owner of an attribute its training flag, and a buffer its persistence, as in the original."""
    *path, last = name.split(".")
    *where, field = original.split(".")
    owner, model = module.get_submodule(".".join(path)), root.get_submodule(".".join(where))
    if owner is not model and not isinstance(owner, fx.GraphModule):
        owner.training = model.training
    if owner is not model and field in model._non_persistent_buffers_set:
        owner._non_persistent_buffers_set.add(last)


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
