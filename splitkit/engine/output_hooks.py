"""Hooks on the outputs of the model's modules, which the parts of a captured graph compute but do not call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any, cast

from torch import fx, nn
from torch.fx import Node

from splitkit.checks import shown
from splitkit.engine.module_names import unique_name
from splitkit.errors import PlanError, listed
from splitkit.graph.dataflow import calls_around
from splitkit.graph.node_selection import no_module
from splitkit.plans.parts import PartKey


class OutputHook(nn.Module):
    """A node of a part that calls a hook."""

    def __init__(self, hook: Callable[[Any], Any]) -> None:
        super().__init__()
        self.hook = hook

    def forward(self, output: Any) -> Any:
        """Return what the hook returns or, if that is ``None``, the output itself."""
        result = self.hook(output)
        return output if result is None else result


@dataclass(frozen=True)
class HookHandle:
    """Removes a hook that `splitkit.Split.register_forward_hook` has set.

    Attributes:
        nodes: the nodes that call the hook, each with the module whose graph it is in.
    """

    nodes: tuple[tuple[fx.GraphModule, Node], ...]

    def remove(self) -> None:
        """Remove the hook; a second call changes nothing."""
        for module, node in self.nodes:
            if node in set(module.graph.nodes):
                node.replace_all_uses_with(cast(Node, node.args[0]))
                module.graph.erase_node(node)
                module.delete_submodule(str(node.target))
                module.recompile()


def hook_outputs(
    modules: Mapping[PartKey, fx.GraphModule],
    copies: Mapping[PartKey, Mapping[Node, Node]],
    nodes: Iterable[Node],
    path: str,
    hook: Callable[[Any], Any],
) -> HookHandle:
    """Let parts call ``hook(output)`` where they have computed the output of a module; see `splitkit.Split`.

    Args:
        modules: part (and the parent) -> its module; modified in place.
        copies: part (and the parent) -> the nodes that it computes -> their copies.
        nodes: the nodes of the original graph.
        path: the name of the module in the model.
        hook: the hook.

    Raises:
        PolicyError: SK304 if no node was captured in a call of this module.
        PlanError: SK221 if the call has several outputs or none, several parts compute its output, or the hook does not
            take one argument.
    """
    _check_arguments(path, hook)
    made = []
    for output in _outputs_of_calls([*nodes], path):
        keys = [key for key, copied in copies.items() if output in copied]
        if len(keys) != 1:
            where = f"parts {listed([*map(repr, keys)], 4)} each compute" if keys else "no part computes"
            raise _refused(path, f"{where} its output {output.name}", [output])
        made.append((modules[keys[0]], copies[keys[0]][output]))
    return HookHandle(tuple((module, _inserted(module, node, path, hook)) for module, node in made))


def _check_arguments(path: str, hook: Callable[[Any], Any]) -> None:
    try:
        signature(hook).bind(None)
    except TypeError as error:
        reason = f"a hook on {path!r} is called with the output of the module alone, but {shown(hook)}: {error}"
        remedy = "Give a function of the output, and not of (module, args, output): lambda output: ..."
        raise PlanError("SK221", reason, remedy) from None
    except ValueError:
        return  # functions of torch do not tell what they take


def _inserted(module: fx.GraphModule, node: Node, path: str, hook: Callable[[Any], Any]) -> Node:
    name = unique_name(f"hook_{path.replace('.', '_')}", dict(module.named_children()))
    module.add_submodule(name, OutputHook(hook))
    with module.graph.inserting_after(node):
        made = module.graph.call_module(name, (node,))
    made.meta.update(node.meta)
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
    module.recompile()
    return made


def _outputs_of_calls(nodes: list[Node], path: str) -> Iterable[Node]:
    """Yield the one node of each call of a module whose value is read outside of the call."""
    calls: dict[str, dict[Node, None]] = {}
    known: dict[str, None] = {}
    for node in nodes:
        if node.op.startswith("call_"):
            for key, module in calls_around(node).items():
                known[module] = None
                if module == path:
                    calls.setdefault(key, {})[node] = None
    if not calls:
        raise no_module(f"no node of the graph was captured in a module {path!r}", path, known)
    for inside in calls.values():
        outputs = [node for node in inside if not inside.keys() >= node.users.keys()]
        if len(outputs) != 1:
            found = (
                f"several of its values ({listed([n.name for n in outputs], 4)})" if outputs else "none of its values"
            )
            raise _refused(path, f"{found} are read outside of it", outputs)
        yield outputs[0]


def _refused(path: str, why: str, nodes: list[Node]) -> PlanError:
    return PlanError(
        "SK221",
        f"no hook can be put on the module {path!r} of the model: {why}",
        "Put the hook on a module in it, or around it, that has one output.",
        nodes,
    )
