"""Put another module in the place of a part, and let names and the check of inputs follow."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx, nn

from splitkit.engine.overlaps import rename_watched
from splitkit.errors import PlanError, listed
from splitkit.graph.storages import parameters_and_buffers
from splitkit.plans.parts import PartKey


def replace_child(
    parent: fx.GraphModule, name: str, module: nn.Module, qualified_names: dict[str, str], parts: Collection[str]
) -> None:
    """Let a parent call another module; see `splitkit.engine.split.Split.replace`.

    Args:
        parent: changed in place.
        name: of the child.
        module: what takes its place.
        qualified_names: name of a parameter or buffer in the parent -> its original name; changed in place.
        parts: the names of all parts.
    """
    renamed = _renamed(f"{name}.", parent.get_submodule(name), module)
    moved = [old for old in qualified_names if old.startswith(f"{name}.")]
    originals = {old: qualified_names.pop(old) for old in moved}
    qualified_names |= {renamed[old]: original for old, original in originals.items() if old in renamed}
    parent.set_submodule(name, module)
    if rename_watched(parent.graph, lambda old: renamed.get(old, old), parts):
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
            f"part {part!r} would be replaced by an object of the class {type(module).__name__}, which is no module",
            "Give a torch.nn.Module, one whose forward calls it, say.",
            [part],
        )


def _renamed(prefix: str, before: nn.Module, now: nn.Module) -> dict[str, str]:
    """Names of the parameters and buffers of the module that was there -> their names in the one that is there now."""
    known = {id(tensor): name for name, tensor in parameters_and_buffers(now).items()}
    kept = {name: known.get(id(tensor)) for name, tensor in parameters_and_buffers(before).items()}
    return {f"{prefix}{name}": f"{prefix}{new}" for name, new in kept.items() if new is not None}
