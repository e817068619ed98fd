"""Finds the tensors of a model in a checkpoint whose names differ: ties, the prefix of a base model, fused experts.

::

    model                              files
    lm_head.weight                     transformer.wte.weight        tied: one of its names is enough
    transformer.h.0.ln_1.weight        h.0.ln_1.weight               saved from the base model
    layers.0.mlp.experts.down_proj     layers.0.block_sparse_moe.experts.{0..7}.w2.weight
    model.language_model.norm.weight   language_model.model.norm.weight                     names of a part of LLaVA

Which names differ is known to transformers (``conversion_mapping`` of 5.23; no other version was run), by the
``model_type`` in the folder's ``config.json``. Experts that a file has one by one are read straight into their place in
the fused tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from splitkit.errors import FileError, listed
from splitkit.plans.plan_file import read_json

CONFIG = "config.json"
_LATER = "Load it with transformers, and save the model with save_pretrained(folder, save_original_format=False)."


@dataclass(frozen=True)
class Sources:
    """The tensors in files of which a tensor of the model consists.

    Attributes:
        rows: the names in files; the rows are concatenated.
        stacked: whether the tensors of a row are stacked along a new first dimension; a row is one tensor otherwise.
        dim: the dimension of the model's tensor along which rows are concatenated.
        trouble: why the tensor cannot be read, if it cannot.
    """

    rows: tuple[tuple[str, ...], ...]
    stacked: bool = False
    dim: int = 0
    trouble: str = ""

    @property
    def names(self) -> list[str]:
        """All names in files."""
        return [name for row in self.rows for name in row]


def sources_of(
    groups: Sequence[Sequence[str]], stored: Collection[str], renamed: Callable[[], Mapping[str, Sources]]
) -> Mapping[str, Sources]:
    """Return name in the model -> its sources; also for names in files that the model does not have.

    Args:
        groups: for each tensor that is wanted, the names that it has in the model.
        stored: the names in the files.
        renamed: returns `converted` of these names; called only if names differ.
    """
    found: Mapping[str, Sources] = {name: Sources(((name,),)) for name in stored}
    if all(any(name in found for name in names) for names in groups):
        return found
    other = renamed()
    wanted = {name for names in groups for name in names}
    # A file may have the names of the model already: then nothing is renamed.
    if len(wanted & other.keys()) > len(wanted & found.keys()):
        found = other
    return found if wanted & found.keys() else _prefixed(wanted, found)


def without_ignored(names: Sequence[str], place: Path) -> list[str]:
    """Leave out the names in files that transformers, too, leaves out for the model in ``config.json``."""
    transformers = _imported("transformers") if names else None
    kinds = (_config(place).get("architectures") or []) if transformers is not None else []
    patterns: list[str] = []
    for kind in kinds:
        # Patterns that authors of models in transformers set (as in 5.23, the only version that was run).
        patterns += getattr(getattr(transformers, str(kind), None), "_keys_to_ignore_on_load_unexpected", None) or ()
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns)]


def _prefixed(wanted: Collection[str], found: Mapping[str, Sources]) -> dict[str, Sources]:
    """Add or remove the prefix of a base model, if that is what all names lack or have too much."""
    for prefix in sorted({name.split(".")[0] + "." for name in wanted}):
        inside = {name for name in wanted if name.startswith(prefix)}
        if inside and all(name.removeprefix(prefix) in found for name in inside):
            return {prefix + name: sources for name, sources in found.items()}
    for prefix in sorted({name.split(".")[0] + "." for name in found}):
        if wanted and all(prefix + name in found for name in wanted):
            return {name.removeprefix(prefix): sources for name, sources in found.items()}
    return dict(found)


def converted(stored: Collection[str], place: Path) -> dict[str, Sources]:
    """Rename as transformers does for the model in ``config.json``, if the folder has one."""
    steps = _steps(place)
    converters = [step for step in steps if hasattr(step, "operations")]
    plain = [step for step in steps if not hasattr(step, "operations")]
    found: dict[str, Sources] = {}
    merged: dict[str, tuple[Any, dict[str, list[str]]]] = {}
    for name in sorted(stored, key=_natural):
        target = name
        for step in plain:
            target, _ = step.rename_source_key(target)
        for step in converters:
            target, pattern = step.rename_source_key(target)
            if pattern is not None:
                merged.setdefault(target, (step, {}))[1].setdefault(pattern, []).append(name)
                break
        else:
            found[target] = Sources(((name,),))
    return found | {target: _merged(step, rows) for target, (step, rows) in merged.items()}


def _steps(place: Path) -> list[Any]:
    """Return what transformers renames and merges, in its order, for the model in ``config.json``."""
    module, config = _imported("transformers.conversion_mapping"), _config(place)
    kind = config.get("model_type")
    if module is None or not isinstance(kind, str):
        return []
    if any(isinstance(part, dict) and "model_type" in part for part in config.values()):
        # a model of several, such as LLaVA: each of them has names of its own, which only a model tells
        model = _on_meta(place, config)
        if model is not None:
            return list(module.get_model_conversion_mapping(model, add_legacy=False))
    return list(module.get_checkpoint_conversion_mapping(kind) or [])


def _on_meta(place: Path, config: Mapping[str, Any]) -> Any:
    """Return the model in ``config.json`` on ``meta``, or ``None`` if transformers has no such class."""
    transformers = _imported("transformers")
    kind = getattr(transformers, str((config.get("architectures") or [None])[0]), None)
    if kind is None:
        return None
    folder = place if place.is_dir() else place.parent
    with torch.device("meta"):
        # a class of transformers itself: no code of the folder runs
        return kind(transformers.AutoConfig.from_pretrained(folder))


def _merged(step: Any, rows: Mapping[str, list[str]]) -> Sources:
    """Return the sources of a tensor that transformers makes of several by stacking and concatenating."""
    ordered = tuple(tuple(rows[pattern]) for pattern in step.source_patterns if pattern in rows)
    match [(type(op).__name__, getattr(op, "dim", None)) for op in step.operations]:
        case [("MergeModulelist", 0)] if len(step.source_patterns) == 1:
            return Sources(ordered, stacked=True)
        case [("MergeModulelist", 0), ("Concatenate", int(dim))] if len(ordered) == len(step.source_patterns):
            return Sources(ordered, stacked=True, dim=dim)
        case [("Concatenate", int(dim))] if all(len(row) == 1 for row in ordered):
            return Sources(ordered, dim=dim)
        case operations:
            return Sources(ordered, trouble=listed([name for name, _ in operations], 3))


def refuse_trouble(name: str, sources: Sources, place: Path) -> None:
    """Refuse a tensor that transformers computes from its sources in a way that is not known here.

    Raises:
        FileError: SK507.
    """
    if sources.trouble:
        raise FileError(
            "SK507",
            f"{name} is in {place} as {listed(sources.names, 2)}, which transformers converts ({sources.trouble})",
            _LATER,
            [name],
        )


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts expert 2 before expert 10."""
    return [(int(word), "") if word.isdigit() else (0, word) for word in re.split(r"(\d+)", name)]


def _config(place: Path) -> dict[str, Any]:
    folder = place if place.is_dir() else place.parent
    return read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}


def _imported(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        return None
