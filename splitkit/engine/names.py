"""What parts and their attributes are called."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from dataclasses import dataclass

from splitkit.plans.parts import PartKey


@dataclass(frozen=True)
class Style:
    """How the emitter names and returns. The defaults are splitkit's own.

    Attributes:
        affix: ``submod_<affix>_<key>`` instead of ``submod_<key>``.
        tuple_return: parts with one output return a tuple of one.
        original_input_names: inputs of parts keep the names of their values; else ``arg_0``, ``arg_1`` ...
        original_node_names: nodes keep their names; else they are called by what they call, as fx names new nodes.
        late_attributes: the parent reads its attributes where they are first needed, not all at its beginning.
        like_torch: the other habits of ``torch.fx.passes.split_module``: modules ``a.b`` of parts become ``a_b``,
            members of tuples are called ``getitem``, classes ``GraphModule``, and inputs and outputs of parts are in
            the order in which they are met.
        flat: the parent takes and returns the bare values of its graph, without the pytrees of the original.
    """

    affix: str | None = None
    tuple_return: bool = False
    original_input_names: bool = True
    original_node_names: bool = True
    late_attributes: bool = False
    like_torch: bool = False
    flat: bool = False


def part_names(keys: Iterable[PartKey], taken: Container[str], style: Style) -> dict[PartKey, str]:
    """A module name for each part: ``submod_0``, ``submod_cuda_0_3`` for ``("cuda:0", 3)``; never one in ``taken``."""
    names: dict[PartKey, str] = {}
    used: set[str] = set()
    for key in keys:
        atoms = key if isinstance(key, tuple) else (key,)
        stem = "_".join(["submod", *([_word(style.affix)] if style.affix else []), *(_word(a) for a in atoms)])
        name = stem if stem not in taken and stem not in used else unique(stem, {*used}, taken)
        names[key] = name
        used.add(name)
    return names


def flat_names(targets: Iterable[str]) -> dict[str, str]:
    """``a.b`` -> ``a_b``, with a number where that name already stands for something else."""
    flat: dict[str, str] = {}
    taken: set[str] = set()
    for target in dict.fromkeys(targets):
        name = target.replace(".", "_")
        flat[target] = name if name not in taken else unique(name, taken)
        taken.add(flat[target])
    return flat


def unique(stem: str, *taken: Container[str]) -> str:
    """``stem_1``, ``stem_2`` ...: the first that nobody has."""
    number = 1
    while any(f"{stem}_{number}" in names for names in taken):
        number += 1
    return f"{stem}_{number}"


def _word(atom: object) -> str:
    return re.sub(r"[^0-9A-Za-z_]", "_", str(atom))  # ASCII: Python folds other letters of names
