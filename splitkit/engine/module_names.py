"""Names of the modules of parts and of their attributes."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from dataclasses import dataclass

from splitkit.plans.parts import PartKey


@dataclass(frozen=True)
class Style:
    """Options of `emit` for names and return values; `split` uses the defaults.

    Attributes:
        affix: ``submod_<affix>_<key>`` instead of ``submod_<key>``.
        tuple_return: a part with one output returns a tuple with one item.
        original_input_names: inputs of parts have the names of their values; otherwise ``arg_0``, ``arg_1`` ...
        original_node_names: nodes keep their names; otherwise they are named after their targets, as fx names new
            nodes.
        late_attributes: the parent reads its attributes where they are first needed, not all at the start.
        like_torch: the other conventions of ``torch.fx.passes.split_module``: modules ``a.b`` of parts become ``a_b``,
            members of tuples are named ``getitem``, classes ``GraphModule``, and the inputs and outputs of parts are
            in the order of first use.
        flat: the parent takes and returns the bare values of its graph, without the pytrees of the original.
    """

    affix: str | None = None
    tuple_return: bool = False
    original_input_names: bool = True
    original_node_names: bool = True
    late_attributes: bool = False
    like_torch: bool = False
    flat: bool = False


def module_names(keys: Iterable[PartKey], taken: Container[str], style: Style) -> dict[PartKey, str]:
    """Return module names that are not ``taken``: ``submod_0``; ``submod_cuda_0_3`` for ``("cuda:0", 3)``."""
    names: dict[PartKey, str] = {}
    used: set[str] = set()
    for key in keys:
        atoms = key if isinstance(key, tuple) else (key,)
        stem = "_".join(["submod", *([_word(style.affix)] if style.affix else []), *(_word(a) for a in atoms)])
        name = stem if stem not in taken and stem not in used else unique_name(stem, {*used}, taken)
        names[key] = name
        used.add(name)
    return names


def flat_names(targets: Iterable[str]) -> dict[str, str]:
    """Return ``a.b`` -> ``a_b`` for each target, with a number appended if another target has that name."""
    flat: dict[str, str] = {}
    taken: set[str] = set()
    for target in dict.fromkeys(targets):
        name = target.replace(".", "_")
        flat[target] = name if name not in taken else unique_name(name, taken)
        taken.add(flat[target])
    return flat


def unique_name(stem: str, *taken: Container[str]) -> str:
    """Return the first of ``stem_1``, ``stem_2`` ... that is in none of ``taken``."""
    number = 1
    while any(f"{stem}_{number}" in names for names in taken):
        number += 1
    return f"{stem}_{number}"


def _word(atom: object) -> str:
    return re.sub(r"[^0-9A-Za-z_]", "_", str(atom))  # ASCII only: Python normalises other letters in identifiers (NFKC)
