"""Writes the stages of a split into a folder, from which each rank loads its own (`stagefolder`)."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from splitkit import files
from splitkit.engine import graphdata, values
from splitkit.engine.split import Split
from splitkit.errors import FileError
from splitkit.graph.signature import bound
from splitkit.graph.storages import attribute, parameters_and_buffers, storage_key
from splitkit.runtime import factsdata
from splitkit.runtime.chain import Chain, chain_of
from splitkit.runtime.stagefolder import EXAMPLE, KIND, MANIFEST, SCHEMA
from splitkit.runtime.tensorfiles import dtype_name, is_dense, write
from splitkit.runtime.weights import INDEX

_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


def save_stages(
    split: Split,
    folder: str | os.PathLike[str],
    *,
    inputs: tuple[Sequence[Any], Mapping[str, Any]] | None = None,
    record: Mapping[str, Any] | None = None,
) -> None:
    """Write the stages of a split, so that each rank loads its own and none captures the model.

    The folder holds ``manifest.json`` (the plan, what goes over each border, the names of tensors), ``stage-K.json``
    (the graph of a stage), ``stage-K.safetensors`` (its weights, buffers and constants; what several stages read is in
    the first of them) and an index of these as Hugging Face writes it. All of it is data: no code, nothing pickled.
    Tensors on ``meta`` are left out; `open_stages` is told then where weights are. The manifest is written last, and
    a folder without it is refused: one that was there goes first.

    Args:
        split: captured by ``torch.export``, with the inputs of one microbatch.
        folder: made if it is not there.
        inputs: positional and keyword inputs of one microbatch, to be kept as an example.
        record: more fields for the manifest.

    Raises:
        PipelineError: SK801 for a split that cannot run on several ranks.
        FileError: SK504 where the folder cannot be written, SK506 for what is not data.
    """
    chain = chain_of(split)
    tensors = _Tensors(split)
    programs = [graphdata.encode(part, tensors.number) for part in split.parts.values()]
    parent = graphdata.encode(split.module, tensors.number, tuple(split.names.values()))
    tensors.require_apart(chain.facts.writes)
    texts = [json.dumps(program) + "\n" for program in programs]
    held = tensors.by_stage(chain, programs, parent)
    example = None if inputs is None else bound(split.module, *inputs)
    manifest = {
        "schema": SCHEMA,
        "kind": KIND,
        "torch": torch.__version__,
        **(record or {}),
        "plan": split.plan.to_dict(),
        "facts": factsdata.encode(chain),
        "parent": parent,
        "stages": _stages(split, texts),
        "qualified_names": dict(split.qualified_names),
        "shared": [list(group) for group in split.shared],
        "tensors": tensors.rows,
        "example": None if example is None else _example(example),
    }
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
        _clear(place)
        for stage, text in enumerate(texts):
            files.write(place / f"stage-{stage}.json", text)
            write(place / f"stage-{stage}.safetensors", held[stage])
        if example is not None:
            write(place / EXAMPLE, {str(i): v for i, v in enumerate(example) if isinstance(v, torch.Tensor)})
        files.write(place / INDEX, json.dumps(_index(held), indent=1) + "\n")
        files.write(place / MANIFEST, json.dumps(manifest) + "\n")
    except OSError as error:
        raise files.refusal(folder, error) from error


class _Tensors:
    """The tensors that stages read, by number.

    Attributes:
        rows: number -> what the manifest says of it.
    """

    def __init__(self, split: Split) -> None:
        root = split.flow.root
        read = [str(node.target) for node in split.flow.graph.find_nodes(op="get_attr")]
        self._names: dict[int, dict[str, None]] = {}
        for name, tensor in {**{n: attribute(root, n) for n in read}, **parameters_and_buffers(root)}.items():
            self._names.setdefault(id(tensor), {})[name] = None
        for name, tensor in parameters_and_buffers(split.module).items():  # of a copy, or made anew since
            self._names.setdefault(id(tensor), {})[split.qualified_names.get(name, name)] = None
        self._saved = set(root.state_dict())
        self._numbers: dict[int, int] = {}
        self._held: list[torch.Tensor] = []
        self.rows: list[dict[str, Any]] = []

    def number(self, tensor: torch.Tensor) -> int:
        """The number of a tensor; the same for one that several stages read."""
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
                    "dtype": values.name_of_dtype(tensor.dtype),
                    "shape": list(tensor.shape),
                    "strides": _strides(tensor),
                    "parameter": isinstance(tensor, nn.Parameter),
                    "requires_grad": tensor.requires_grad,
                    "saved": any(name in self._saved for name in names),
                }
            )
        return self._numbers[id(tensor)]

    def require_apart(self, written: Sequence[str]) -> None:
        """Refuse tensors that share memory where one of them changes: read from a file, they would not."""
        first: dict[object, int] = {}
        for number, tensor in enumerate(self._held):
            other = first.setdefault(storage_key(tensor), number) if tensor.numel() else number
            a, b = self.rows[other], self.rows[number]
            if other != number and any(row["requires_grad"] or {*row["names"]} & {*written} for row in (a, b)):
                names = [a["names"][0], b["names"][0]]
                raise FileError("SK506", f"{names[0]} and {names[1]} share memory", "Clone one of them.", names)

    def by_stage(self, chain: Chain, programs: Sequence[Any], parent: Any) -> list[dict[str, torch.Tensor]]:
        """Stage -> the tensors of its file, by name: those that no stage before it reads."""
        found: list[dict[str, torch.Tensor]] = []
        seen: set[int] = set()
        for stage, program in enumerate(programs):
            numbers = [*_numbers(program), *(parent["tensors"][name] for name in chain.own(stage))]
            own = [n for n in dict.fromkeys(numbers) if n not in seen and not self._held[n].is_meta]
            seen.update(own)
            found.append({self.rows[n]["names"][0]: self._held[n] for n in own})
        return found


def _numbers(program: Mapping[str, Any]) -> list[int]:
    """Of the tensors of a graph, and of the graphs in it."""
    return [*program["tensors"].values(), *(n for inner in program["modules"].values() for n in _numbers(inner))]


def _strides(tensor: torch.Tensor) -> list[int] | None:
    """Those of a tensor that is dense and lies otherwise than most: channels last. Kernels go by them."""
    strides = list(tensor.stride())
    usual = strides == list(torch.empty(tensor.shape, device="meta").stride())
    return None if usual or not is_dense(tensor.shape, strides) else strides


def _stages(split: Split, texts: Sequence[str]) -> list[dict[str, Any]]:
    keys = list(split.plan.parts)
    return [
        {
            "part": keys.index(key),
            "name": name,
            "file": f"stage-{stage}.json",
            "sha256": hashlib.sha256(texts[stage].encode()).hexdigest(),
        }
        for stage, (key, name) in enumerate(split.names.items())
    ]


def _example(example: Sequence[Any]) -> list[Any]:
    """The inputs that are no tensors, which have a file."""
    return [None if isinstance(v, torch.Tensor) else {"value": values.encode(v, "an input")} for v in example]


def _index(held: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, Any]:
    total = sum(t.numel() * t.element_size() for tensors in held for t in tensors.values())
    where = {name: f"stage-{stage}.safetensors" for stage, tensors in enumerate(held) for name in tensors}
    return {"metadata": {"total_size": total}, "weight_map": where}


def _clear(folder: Path) -> None:
    """Remove the stages of an earlier split, its manifest first."""
    (folder / MANIFEST).unlink(missing_ok=True)
    for pattern in ("stage-*.json", "stage-*.safetensors", INDEX, EXAMPLE):
        for file in folder.glob(pattern):
            file.unlink()
