"""Writes the stages of a split to a folder, from which each rank loads its own (`splitkit.runtime.folder.load`)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from splitkit import files
from splitkit.engine import graph_data
from splitkit.engine.split import Split
from splitkit.engine.staged_step import StagedStep
from splitkit.errors import FileError
from splitkit.graph.caches import ENCODER_CACHES, runs_outside
from splitkit.graph.call_signature import bind_inputs
from splitkit.graph.storages import (
    attribute,
    fills_its_range,
    kept_values,
    known_value,
    parameters_and_buffers,
    storage_key,
)
from splitkit.runtime.folder.checkpoint_folder import DIGESTS, digest_of_file
from splitkit.runtime.folder.checkpoint_weights import INDEX
from splitkit.runtime.folder.load import EXAMPLE, KIND, MANIFEST, SCHEMA, encode_facts, encode_part
from splitkit.runtime.folder.tensorfiles import dtype_name, write_tensors
from splitkit.runtime.generation.decoder import DecoderChain
from splitkit.runtime.generation.encoder_caches import encoder_caches_of
from splitkit.runtime.ranks.planned_chain import captured_model, chain_of_any
from splitkit.runtime.ranks.stage_chain import Chain, StageSource

UNREAD = "in-no-stage.safetensors"
"""The file of the weights that a decoder's first rank needs besides its stage's weights."""
_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


def save_stages(
    split: Split | StagedStep,
    folder: str | os.PathLike[str],
    *,
    inputs: tuple[Sequence[Any], Mapping[str, Any]] | None = None,
    record: Mapping[str, Any] | None = None,
) -> None:
    """Write the stages of a split, so that each rank can load its own without capturing the model.

    The folder holds ``manifest.json`` (the plan, the values at each border, the names of tensors), ``stage-K.json``
    (the graph of a stage), ``stage-K.safetensors`` (its weights, buffers and constants; a tensor that several stages
    read is in the file of the first), an index of these in Hugging Face's format, and ``digests.json`` (the size and
    checksum of each file, by which damage is found). All of it is data: no code, nothing pickled. Tensors on ``meta``
    are left out; `open_stages` then needs ``weights``. Buffers that are in no state dict are written all the same, if
    `splitkit.capture` knew their values. Of a decoder with an encoder or images, the weights that no stage reads are
    written too, for what runs whole on the first rank. The digests are deleted first and the new ones are written
    last, so that an incomplete folder is refused.

    Args:
        split: captured by ``torch.export``, with the inputs of one microbatch; or the stages of a training step.
        folder: the folder, created if necessary.
        inputs: positional and keyword inputs of one microbatch, to save as an example; not saved if one is on ``meta``.
        record: additional fields for the manifest.

    Raises:
        PipelineError: SK801 for a split that cannot run on several ranks.
        FileError: SK504 if the folder cannot be written, SK506 for tensors or values that cannot be saved as data.
    """
    chain = chain_of_any(split)
    source = chain.split
    tensors = _Tensors(source)
    programs = [encode_part(part, tensors.number) for part in source.parts.values()]
    if isinstance(split, Split) and ENCODER_CACHES in split.flow.root.meta:
        decoder = DecoderChain.of(chain)
        for stage, program in enumerate(programs):
            if names := decoder.constants(stage):
                caches = encoder_caches_of(split.flow.root, names)
                program[ENCODER_CACHES] = graph_data.encode_graph(caches, tensors.number)
    parent = graph_data.encode_graph(source.module, tensors.number, tuple(source.names.values()))
    tensors.require_apart(chain.facts.writes)
    texts = [json.dumps(program) + "\n" for program in programs]
    held = tensors.by_stage(chain, programs, parent)
    unread = tensors.unread_data() if isinstance(split, Split) and runs_outside(split.flow.root) else {}
    example = None if inputs is None else bind_inputs(source.module, *inputs)
    if example is not None and any(isinstance(v, torch.Tensor) and v.is_meta for v in example):
        example = None
    manifest = {
        "schema": SCHEMA,
        "kind": KIND,
        "torch": torch.__version__,
        **(record or {}),
        "plan": source.plan.to_dict(),
        "facts": encode_facts(chain),
        "parent": parent,
        "stages": _stages(source),
        "qualified_names": dict(source.qualified_names),
        "shared": [list(group) for group in source.shared],
        "tensors": tensors.rows,
        "unread": tensors.unread(),
        "example": None if example is None else _example(example),
    }
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
        # the stages of an earlier split go, its digests and manifest first
        (place / DIGESTS).unlink(missing_ok=True)
        for file in _written(place):
            file.unlink()
        for stage, text in enumerate(texts):
            files.write_file(place / f"stage-{stage}.json", text)
            write_tensors(place / f"stage-{stage}.safetensors", held[stage])
        if example is not None:
            write_tensors(place / EXAMPLE, {str(i): v for i, v in enumerate(example) if isinstance(v, torch.Tensor)})
        if unread:
            write_tensors(place / UNREAD, unread)
        files.write_file(place / INDEX, json.dumps(_index(held, unread), indent=1) + "\n")
        files.write_file(place / MANIFEST, json.dumps(manifest) + "\n")
        digests = {file.name: digest_of_file(file) for file in _written(place)}
        files.write_file(place / DIGESTS, json.dumps(digests, indent=1) + "\n")
    except OSError as error:
        reason = f"cannot write {error.filename or folder}: {error.strerror or error}"
        raise FileError("SK504", reason, "Name another folder.") from error


class _Tensors:
    """The numbered tensors that stages read.

    Attributes:
        rows: number -> the tensor's entry in the manifest.
    """

    def __init__(self, source: StageSource) -> None:
        root = captured_model(source)
        assert root is not None, "stages of a folder are on disk already"
        self._root = root
        nodes = root.graph.find_nodes(op="get_attr") if isinstance(root, fx.GraphModule) else ()
        read = [str(node.target) for node in nodes]
        self._names: dict[int, dict[str, None]] = {}
        for name, tensor in {**{n: attribute(root, n) for n in read}, **parameters_and_buffers(root)}.items():
            self._names.setdefault(id(tensor), {})[name] = None
        for name, tensor in parameters_and_buffers(source.module).items():  # tensors of copies, or new ones
            self._names.setdefault(id(tensor), {})[source.qualified_names.get(name, name)] = None
        self._saved = set(root.state_dict())
        self._numbers: dict[int, int] = {}
        self._held: list[torch.Tensor] = []
        self.rows: list[dict[str, Any]] = []

    def number(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor, the same for all stages that read it."""
        if id(tensor) not in self._numbers:
            number = self._numbers[id(tensor)] = len(self.rows)
            names = list(self._names.get(id(tensor), {f"constant_{number}": None}))
            if type(tensor) not in _PLAIN:
                kind = type(tensor).__name__
                raise FileError("SK506", f"{names[0]} is a {kind}", "Split a model of plain tensors.", names[:1])
            dtype_name(names[0], tensor)
            self._held.append(tensor)
            self.rows.append(
                {
                    "names": names,
                    "dtype": graph_data.name_of_dtype(tensor.dtype),
                    "shape": list(tensor.shape),
                    "strides": _strides(tensor),
                    "parameter": isinstance(tensor, nn.Parameter),
                    "requires_grad": tensor.requires_grad,
                    "saved": any(name in self._saved for name in names),
                }
            )
        return self._numbers[id(tensor)]

    def unread(self) -> list[str]:
        """Return the names in the state dict of the model that no stage reads, which a checkpoint may have."""
        return sorted(self._saved - self._read())

    def unread_data(self) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers with data that no stage reads; a tied one once."""
        read = self._read()
        real = {name: held for name, held in parameters_and_buffers(self._root).items() if not held.is_meta}
        unread = {name: held for name, held in {**real, **kept_values(self._root)}.items() if name not in read}
        first = {id(tensor): name for name, tensor in reversed(unread.items())}
        return {name: unread[name] for name in first.values()}

    def _read(self) -> set[str]:
        """Return the names of the tensors that stages read."""
        return {name for row in self.rows for name in row["names"]}

    def require_apart(self, written: Sequence[str]) -> None:
        """Refuse tensors that share memory if one of them changes: read from a file, they would no longer share it."""
        first: dict[object, int] = {}
        for number, tensor in enumerate(self._held):
            other = first.setdefault(storage_key(tensor), number) if tensor.numel() else number
            a, b = self.rows[other], self.rows[number]
            if other != number and any(row["requires_grad"] or {*row["names"]} & {*written} for row in (a, b)):
                names = [a["names"][0], b["names"][0]]
                raise FileError("SK506", f"{names[0]} and {names[1]} share memory", "Clone one of them.", names)

    def by_stage(self, chain: Chain, programs: Sequence[Any], parent: Any) -> list[dict[str, torch.Tensor]]:
        """Return stage -> the tensors of its file by name: those that no earlier stage reads."""
        found: list[dict[str, torch.Tensor]] = []
        seen: set[int] = set()
        for stage, program in enumerate(programs):
            numbers = [*_numbers(program), *(parent["tensors"][name] for name in chain.own(stage))]
            own = {n: self._data(n) for n in dict.fromkeys(numbers) if n not in seen}
            found.append({self.rows[n]["names"][0]: data for n, data in own.items() if data is not None})
            seen.update(own)
        return found

    def _data(self, number: int) -> torch.Tensor | None:
        """Return a tensor with data; on ``meta``, only tensors that need no checkpoint (`known_value`) have any."""
        held = self._held[number]
        if not held.is_meta:
            return held
        return known_value(self._root, self.rows[number]["names"], held)


def _numbers(program: Mapping[str, Any]) -> list[int]:
    """Return the numbers of the tensors of a graph, of its nested graphs, and of the graph of its encoder caches."""
    inner = [*program["modules"].values(), *([program[ENCODER_CACHES]] if ENCODER_CACHES in program else [])]
    return [*program["tensors"].values(), *(n for graph in inner for n in _numbers(graph))]


def _strides(tensor: torch.Tensor) -> list[int] | None:
    """Return the strides of a dense tensor in an unusual layout, such as channels last; kernels depend on them."""
    strides = list(tensor.stride())
    usual = strides == list(torch.empty(tensor.shape, device="meta").stride())
    return None if usual or not fills_its_range(tensor.shape, strides) else strides


def _stages(split: StageSource) -> list[dict[str, Any]]:
    keys = list(split.plan.parts)
    return [
        {"part": keys.index(key), "name": name, "file": f"stage-{stage}.json"}
        for stage, (key, name) in enumerate(split.names.items())
    ]


def _example(example: Sequence[Any]) -> list[Any]:
    """Encode the inputs that are not tensors; tensors go to a file of their own."""
    return [
        None if isinstance(v, torch.Tensor) else {"value": graph_data.encode_argument(v, "an input")} for v in example
    ]


def _index(held: Sequence[Mapping[str, torch.Tensor]], unread: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    total = sum(t.numel() * t.element_size() for tensors in (*held, unread) for t in tensors.values())
    where = {name: f"stage-{stage}.safetensors" for stage, tensors in enumerate(held) for name in tensors}
    where |= dict.fromkeys(unread, UNREAD)
    return {"metadata": {"total_size": total}, "weight_map": where}


def _written(folder: Path) -> list[Path]:
    """Return the files in a folder that are named like the files of a split, the manifest first."""
    patterns = (MANIFEST, "stage-*.json", "stage-*.safetensors", INDEX, EXAMPLE, UNREAD)
    return [file for pattern in patterns for file in sorted(folder.glob(pattern))]
