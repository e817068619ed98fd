"""Reads weights by name from safetensors files in Hugging Face's layout, or from torch's distributed checkpoints.

Only the tensors that are filled are in memory. Files that splitkit wrote are compared with their digests first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch

from splitkit.engine.json_fields import JsonField
from splitkit.errors import FileError, listed
from splitkit.plans.plan_file import read_json
from splitkit.runtime.folder.checkpoint_folder import require_intact, stored_digests
from splitkit.runtime.folder.checkpoint_reader import METADATA, Look, files_of, look_text, read_stored, stored_looks
from splitkit.runtime.folder.tensorfiles import StoredTensor, stored_tensors

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_AGAIN = "Copy the folder again from where it was written, or write it again."
_PREFIXES = ("", "model.")
"""Prefixes of names in torch's checkpoints: none, or the prefix that ``splitkit train --checkpoint`` writes."""
_SAME_MODEL = "Name the weights of the model that was split."


@dataclass(frozen=True)
class Weights:
    """The tensors of a file or folder.

    Attributes:
        place: the file or folder.
        files: name -> its safetensors file; empty for a checkpoint of torch.
        saved: name -> shape and dtype in a checkpoint of torch; empty for safetensors.
        digests: name of a file -> its digest, in a folder that splitkit wrote.
        convert: whether floating-point numbers in safetensors are converted to the dtype of the model.
    """

    place: Path
    files: Mapping[str, Path]
    saved: Mapping[str, Look]
    digests: Mapping[str, str]
    convert: bool = False

    @classmethod
    def at(cls, place: str | os.PathLike[str], convert: bool = False) -> Weights:
        """Open a ``.safetensors`` file or its index, a folder with one of these, or a checkpoint's folder.

        No code is run from any of them. In a folder with several, ``model.safetensors.index.json`` and
        ``model.safetensors`` come first; of others, such as ``model.fp16.safetensors``, one must be named.

        Raises:
            FileError: SK504 if there is none of these, or several, or a file of ``torch.save``; SK505 if it is damaged.
        """
        path = Path(place)
        folder = path if path.is_dir() else path.parent
        digests = stored_digests(folder, _AGAIN)
        written = [name for name in (INDEX, SINGLE, METADATA) if (path / name).is_file()]
        if written == [METADATA]:
            _require_intact(path, digests, [METADATA])
            return cls(path, {}, stored_looks(path), digests)
        _require_intact(folder, digests, [INDEX] if path.is_dir() else [])
        file = path if path.is_file() else _weight_file(path)
        if is_zipfile(file):
            remedy = "Write the tensors again: safetensors.torch.save_file(torch.load(FILE, weights_only=True), NEW)."
            raise FileError("SK504", f"{file} is of torch.save, and weights are read from safetensors", remedy)
        files = _indexed(file) if file.suffix == ".json" else dict.fromkeys(stored_tensors(file), file)
        return cls(path, files, {}, digests, convert)

    def read(
        self, wanted: Sequence[tuple[Sequence[str], torch.Tensor]], after: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        """Fill tensors.

        Args:
            wanted: pairs of the names that a tensor may have, and the tensor.
            after: called with the bytes of each tensor of safetensors that was filled.

        Raises:
            FileError: SK505 for a damaged file; SK507 for a missing name, a tensor of another shape or dtype, or a tied
                weight of which the file has several that differ; nothing was read then, except for the last reason.
        """
        if self.saved:
            found = [(self._name(names), tensor) for names, tensor in wanted]
            for name, tensor in found:
                self.require(name, tensor, *self.saved[name])
            _require_intact(self.place, self.digests, files_of(self.place, dict(found)))
            read_stored(self.place, dict(found))
            return
        sources = sources_of([names for names, _ in wanted], self.files, lambda: self._converted)
        if missing := [names for names, _ in wanted if not _present(names, sources)]:
            raise self.absent(*missing)
        for file in dict.fromkeys(
            self.files[n] for names, _ in wanted for each in _present(names, sources) for n in sources[each].names
        ):
            _require_intact(file.parent, self.digests, [file.name])
        plan = [
            (tensor, [self._pieces(name, sources[name], tensor) for name in _present(names, sources)])
            for names, tensor in wanted
        ]
        for tensor, (first, *ties) in plan:
            for _, stored, view in first:
                stored.read_into(view)
            for tie in ties:
                _require_equal(first, tie)
            after(tensor.numel() * tensor.element_size())

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each tensor of safetensors, by the headers of the files alone.

        Raises:
            FileError: SK504 for a missing file, SK505 for a damaged one, SK507 for one that lacks a tensor.
        """
        return {name: self._stored(name).nbytes for name in self.files}

    def require_known(self, groups: Sequence[Sequence[str]], known: Collection[str], remedy: str) -> None:
        """Refuse names in the files that are none of the model, but for names that transformers leaves out.

        Args:
            groups: for each tensor that is wanted, the names that it has in the model.
            known: the names of all parameters and buffers of the model.
            remedy: the remedy of the refusal.

        Raises:
            FileError: SK507.
        """
        sources = sources_of(groups, self.files, lambda: self._converted)
        over = [name for target, found in sources.items() if target not in known for name in found.names]
        if over := without_ignored(sorted(over), self.place):
            raise FileError(
                "SK507",
                f"{self.place} has {listed(over, 3)}, which the model that was split does not have",
                remedy,
                over,
            )

    @cached_property
    def _headers(self) -> dict[Path, dict[str, StoredTensor]]:
        """The headers of the files, each read once."""
        return {}

    @cached_property
    def _converted(self) -> Mapping[str, Sources]:
        return converted(self.files, self.place)

    def _name(self, names: Sequence[str]) -> str:
        for prefix in _PREFIXES:
            for name in names:
                if prefix + name in self.saved:
                    return prefix + name
        raise self.absent(names)

    def absent(self, *groups: Sequence[str]) -> FileError:
        """Return the refusal of weights that lack tensors, each given by its names."""
        names = groups[0]
        ties = f" (or {', '.join(names[1:])})" if names[1:] else ""
        others = [other[0] for other in groups[1:]]
        return FileError(
            "SK507",
            f"{self.place} has no {names[0]}{ties}" + (f", and no {listed(others, 3)}" if others else ""),
            _SAME_MODEL,
            [*names, *others],
        )

    def require(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Refuse a stored tensor of another shape or dtype.

        Raises:
            FileError: SK507.
        """
        fits = dtype == tensor.dtype
        if self.convert and not self.saved:
            fits = fits or (dtype.is_floating_point and tensor.is_floating_point())
        if shape != tuple(tensor.shape) or not fits:
            theirs, own = look_text(shape, dtype), look_text(tensor.shape, tensor.dtype)
            remedy = _SAME_MODEL
            if shape == tuple(tensor.shape) and dtype.is_floating_point and tensor.is_floating_point():
                converts = "" if self.saved else f", or convert the weights: dtype={tensor.dtype}"
                remedy = f"Capture the model in {dtype}" + converts + "."
            raise FileError("SK507", f"{name} in {self.place} is {theirs}, and the stage reads {own}", remedy, [name])

    def _pieces(self, name: str, sources: Sources, tensor: torch.Tensor) -> list[Piece]:
        """Return what fills a tensor.

        Raises:
            FileError: SK507 for a stored tensor that is missing or does not fit.
        """
        if sources.trouble:
            place, held = self.place, listed(sources.names, 2)
            reason = f"{name} is in {place} as {held}, which transformers converts ({sources.trouble})"
            raise FileError("SK507", reason, _LATER, [name])
        rows = [[(stored, self._stored(stored)) for stored in row] for row in sources.rows]
        views = [tensor.detach()]
        if len(rows) > 1:
            lengths = [(*[len(row)] * sources.stacked, *row[0][1].shape)[sources.dim] for row in rows]
            if sum(lengths) != tensor.shape[sources.dim]:
                self.require(sources.names[0], tensor, rows[0][0][1].shape, rows[0][0][1].dtype)
            views = list(views[0].split(lengths, sources.dim))  # type: ignore[no-untyped-call]
        found: list[Piece] = []
        for row, view in zip(rows, views, strict=True):
            if sources.stacked and len(row) != len(view):
                what = f"{self.place} has {len(row)} tensors for the {len(view)} of {name}"
                raise FileError("SK507", what, _SAME_MODEL, [name])
            found += [(n, s, v) for (n, s), v in zip(row, view if sources.stacked else [view], strict=True)]
        for stored_name, stored, part in found:
            self.require(stored_name, part, stored.shape, stored.dtype)
        return found

    def _stored(self, name: str) -> StoredTensor:
        """Return what a file has under a name."""
        file = self.files[name]
        if file not in self._headers:
            self._headers[file] = stored_tensors(file)
        if name not in self._headers[file]:
            raise self.absent([name])
        return self._headers[file][name]


Piece = tuple[str, StoredTensor, torch.Tensor]
"""A name in a file, what is stored under it, and the view of a tensor that it fills."""


def _require_intact(folder: Path, digests: Mapping[str, str], names: Collection[str]) -> None:
    """Refuse files that differ from their digests; what a user has added to a folder has none."""
    require_intact(folder, digests, [name for name in names if name in digests], _AGAIN)


def _present(names: Sequence[str], sources: Mapping[str, Sources]) -> list[str]:
    return [name for name in names if name in sources]


def _require_equal(first: Sequence[Piece], tie: Sequence[Piece]) -> None:
    """Refuse a file that has a tied weight under two names with different values.

    Raises:
        FileError: SK507.
    """
    for (a, _, view), (b, stored, _) in zip(first, tie, strict=True):
        other = torch.empty(view.shape, dtype=view.dtype)
        stored.read_into(other)
        if not torch.equal(other, view.cpu()):
            raise FileError(
                "SK507",
                f"{a} and {b} differ in {stored.file}, and the model that was split has one tensor for both",
                "Split a model in which the two are not tied (tie_word_embeddings=False).",
                [a, b],
            )


def require_captured(dtype: torch.dtype | None, captured: Collection[torch.dtype]) -> None:
    """Refuse to convert weights to a dtype in which the model was not captured: its graph has dtypes of its own.

    Raises:
        FileError: SK507.
    """
    if dtype is not None and dtype not in captured:
        known = listed(sorted({str(d) for d in captured if d.is_floating_point}), 3) or "no floats"
        raise FileError("SK507", f"the model was captured in {known}, not {dtype}", f"Capture model.to({dtype}).")


def _weight_file(folder: Path) -> Path:
    """Return the file with weights in a folder, or their index.

    Raises:
        FileError: SK504 if there is none, or several.
    """
    indexes = sorted(folder.glob("*.safetensors.index*.json"))  # a variant's: model.safetensors.index.fp16.json
    sharded = {path.name for index in indexes for path in _indexed(index).values()}
    found = [*indexes, *(path for path in sorted(folder.glob("*.safetensors")) if path.name not in sharded)]
    usual = [path for name in (INDEX, SINGLE) for path in found if path.name == name]
    if len(found) > 1 and not usual:
        names = listed([path.name for path in found], 3)
        raise FileError("SK504", f"{folder} holds several weights: {names}", f"Name one: {found[0]}.")
    if not found:
        raise FileError(
            "SK504",
            f"{folder} holds no weights",
            f"Name a folder with {SINGLE}, {INDEX} or a checkpoint of torch.distributed.checkpoint.",
        )
    return (usual or found)[0]


def _indexed(path: Path) -> dict[str, Path]:
    index = JsonField(path.name, "", read_json(path))
    found: dict[str, Path] = {}
    for name, file in index["weight_map"].fields():
        if Path(file.text()).name != file.text():
            raise file.damaged("a file of this folder")
        found[name] = path.parent / file.text()
    return found


# Finds the tensors of a model in a checkpoint whose names differ: ties, the prefix of a base model, fused experts.
#
# ::
#
#     model                              files
#     lm_head.weight                     transformer.wte.weight        tied: one of its names is enough
#     transformer.h.0.ln_1.weight        h.0.ln_1.weight               saved from the base model
#     layers.0.mlp.experts.down_proj     layers.0.block_sparse_moe.experts.{0..7}.w2.weight
#     model.language_model.norm.weight   language_model.model.norm.weight                     names of a part of LLaVA
#
# Which names differ is known to transformers (``conversion_mapping`` of 5.23; no other version was run), by the
# ``model_type`` in the folder's ``config.json``. Experts that a file has one by one are read straight into their place
# in the fused tensor.


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
