"""Replace the module of a part, and update parameter names and the input check (SK212) accordingly."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx, nn

from splitkit.engine.overlap_checks import rename_checked_attributes
from splitkit.errors import PlanError, listed
from splitkit.graph.storages import parameters_and_buffers
from splitkit.plans.parts import PartKey


def replace_child(
    parent: fx.GraphModule, name: str, module: nn.Module, qualified_names: dict[str, str], parts: Collection[str]
) -> None:
    """Let a parent call another module instead of a part; see `splitkit.engine.split.Split.replace`.

    Args:
        parent: the parent; modified in place.
        name: the name of the child.
        module: the module that replaces it.
        qualified_names: name of a parameter or buffer in the parent -> its original name; modified in place.
        parts: the names of all parts.
    """
    renamed = _renamed(f"{name}.", parent.get_submodule(name), module)
    moved = [old for old in qualified_names if old.startswith(f"{name}.")]
    originals = {old: qualified_names.pop(old) for old in moved}
    qualified_names |= {renamed[old]: original for old, original in originals.items() if old in renamed}
    parent.set_submodule(name, module)
    if rename_checked_attributes(parent.graph, lambda old: renamed.get(old, old), parts):
        parent.recompile()


def require_replaceable(part: PartKey, module: object, known: Collection[PartKey]) -> None:
    """Raise SK216 unless ``part`` is known and ``module`` may take its place."""
    if part not in known:
        raise PlanError(
            "SK216", f"the split has no part {part!r}", f"Its parts are {listed([*map(repr, known)], 8)}.", [part]
        )
    if not isinstance(module, nn.Module):
        raise PlanError(
            "SK216",
            f"part {part!r} would be replaced by a {type(module).__name__}, which is not a module",
            "Pass a torch.nn.Module, for example one whose forward calls the object.",
            [part],
        )


def _renamed(prefix: str, before: nn.Module, now: nn.Module) -> dict[str, str]:
    """Return the names of parameters and buffers in the old module -> their names in the new one, if it has them."""
    known = {id(tensor): name for name, tensor in parameters_and_buffers(now).items()}
    kept = {name: known.get(id(tensor)) for name, tensor in parameters_and_buffers(before).items()}
    return {f"{prefix}{name}": f"{prefix}{new}" for name, new in kept.items() if new is not None}
