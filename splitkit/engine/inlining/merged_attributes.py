"""Make a module with the attributes of the original and of the parts that were made from it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx, nn

from splitkit._torch import attributes_of
from splitkit.engine.codegen.part_modules import Container, pickle_by_nodes
from splitkit.engine.module_names import unique_name
from splitkit.graph.storages import attribute


class MergedAttributes:
    """A new GraphModule with the attributes of ``original`` and those that ``modules`` read, under the original names.

    Tensors and called modules are shared; the plain containers that hold them are new. An attribute that was replaced
    or added in one of ``modules`` is taken from there. If two modules have different attributes of one name, the second
    gets a new name.
    """

    def __init__(self, original: fx.GraphModule, modules: Iterable[fx.GraphModule]) -> None:
        self.module = pickle_by_nodes(fx.GraphModule(nn.Module(), fx.Graph(), class_name=type(original).__name__))
        self._own: set[nn.Module] = set()  # new containers, which may be modified
        self._fill(self.module, original)
        self._names: dict[tuple[int, str], str] = {}
        self._taken: dict[str, object] = {}
        self._original = original
        parts = {id(m) for m in modules}
        read = [(m, str(n.target)) for m in modules for n in m.graph.nodes if n.op in ("get_attr", "call_module")]
        for module, target in sorted(read, key=lambda pair: pair[1].count(".")):  # modules before their attributes
            value = attribute(module, target)
            if id(value) not in parts:
                self._names[id(module), target] = self._add(module, target, value)

    def name(self, module: fx.GraphModule, target: str) -> str:
        """Return the name that the attribute ``target`` of ``module`` has in the new module."""
        return self._names[id(module), target]

    def _fill(self, module: nn.Module, original: nn.Module) -> None:
        self._own.add(module)
        module.training = original.training
        held = attributes_of(original)
        for name, parameter in held.parameters.items():
            module.register_parameter(name, parameter)
        for name, buffer in held.buffers.items():
            module.register_buffer(name, buffer, name not in held.unsaved)
        for name, child in held.modules.items():
            if child is not None and type(child) in (nn.Module, Container):
                module.add_module(name, nn.Module())
                self._fill(module.get_submodule(name), child)
            else:
                module.add_module(name, child)

    def _add(self, module: fx.GraphModule, target: str, value: object) -> str:
        differs = target in self._taken and self._taken[target] is not value
        if differs or not self._may_hold(target, value):
            target_here = unique_name(target.replace(".", "_"), self._taken, dir(self.module))
        else:
            target_here = target
        self._taken[target_here] = value
        if _find(self.module, target_here) is not value:
            self._put(target_here, value, _owner(module, target))
        return target_here

    def _may_hold(self, target: str, value: object) -> bool:
        """Whether ``target`` is ``value``, or can be set to it without modifying a shared module."""
        owner: object = self.module
        *path, last = target.split(".")
        for atom in path:
            owner = getattr(owner, atom, None)
            if owner is None:
                return True
        return owner in self._own or getattr(owner, last, None) is value

    def _put(self, target: str, value: object, like: nn.Module) -> None:
        *path, last = target.split(".")
        owner: nn.Module = self.module
        for atom in path:
            if atom not in attributes_of(owner).modules:
                owner.add_module(atom, nn.Module())
                self._own.add(owner.get_submodule(atom))
                owner.get_submodule(atom).training = like.training
            owner = owner.get_submodule(atom)
        held = attributes_of(like)
        if last in held.buffers:
            owner.register_buffer(last, held.buffers[last], last not in held.unsaved)
        else:
            setattr(owner, last, value)


def _owner(module: nn.Module, target: str) -> nn.Module:
    return module.get_submodule(target.rpartition(".")[0])


def _find(module: nn.Module, target: str) -> object:
    found: object = module
    for atom in target.split("."):
        found = getattr(found, atom, None)
    return found
