"""Loads stages from disk: each rank builds and fills its own stages, and never holds the whole model.

::

    manifest.json               the plan, the parent's graph, the values at each border, the names of tensors
    stage-0.json                the graph of a stage
    stage-0.safetensors         its weights, buffers and constants
    model.safetensors.index.json
    digests.json                the size and checksum of each file

`splitkit.runtime.folder.save` writes such a folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import torch
from torch import fx, nn

from splitkit._torch import attributes_of, codegen_of, pytree
from splitkit.engine import graph_data
from splitkit.engine.graph_data import dtype_of, name_of_dtype
from splitkit.engine.json_fields import WRITE_AGAIN, JsonField
from splitkit.engine.staged_step import StageGraphs
from splitkit.errors import FileError
from splitkit.graph.caches import ENCODER_CACHES
from splitkit.graph.size_expressions import Expression, is_known, symbols_in
from splitkit.graph.storages import attribute, fills_its_range, parameters_and_buffers
from splitkit.pipeline.inseparable_nodes import SCALARS
from splitkit.plans import plan_file
from splitkit.plans.parts import PartKey
from splitkit.plans.record import Plan
from splitkit.runtime.devices.accelerators import replace_tensors, tables_of
from splitkit.runtime.folder.checkpoint_folder import DIGESTS, read_data, require_intact, stored_digests
from splitkit.runtime.folder.checkpoint_weights import Weights, require_captured
from splitkit.runtime.folder.tensorfiles import stored_tensors
from splitkit.runtime.ranks.border_values import BorderValue, laid_out, memory_order
from splitkit.runtime.ranks.planned_stage import BorderSlots, PlannedStage, StageTask
from splitkit.runtime.ranks.stage_chain import Chain, ChainFacts, StageParts, stage_of_calls
from splitkit.short_repr import brief

MANIFEST = "manifest.json"
EXAMPLE = "example.safetensors"
KIND = "splitkit stages"
SCHEMA = 3
"""Of the manifest; a folder of another schema is refused."""
_NONE = torch.empty(0)  # reading a weight into this shape is refused


@dataclass(frozen=True)
class StageFolder(StageParts):
    """The stages of a folder, which `splitkit.runtime.pipeline` runs like a `splitkit.engine.split.Split`.

    In ``module``, only loaded stages have children that are not empty; the plan places no nodes.

    Attributes:
        path: the folder.
        manifest: the manifest's data.
        weights: the source of parameters and saved buffers; ``None`` for the folder itself.
        tensors: number in the manifest -> tensor, for loaded tensors.
        encoder_caches: stage -> the graph that computes its keys and values of an encoder's output, for loaded stages
            of a decoder that have some.
    """

    parts: dict[PartKey, nn.Module]
    path: Path
    manifest: JsonField
    weights: Weights | None
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    encoder_caches: dict[int, fx.GraphModule] = field(default_factory=dict)

    __repr__ = brief

    @cached_property
    def chain(self) -> Chain:
        """The chain of the stages, checked against the manifest's facts."""
        facts = decode_facts(self.manifest["facts"])
        chain = Chain(self, stage_of_calls(self), facts)
        wanted = self.module.graph.output_node().all_input_nodes
        crossing = {n.name for stage in range(chain.stages - 1) for n in chain.border(stage, wanted)}
        inputs = [str(n.target) for n in self.module.graph.find_nodes(op="placeholder")]
        if not crossing <= facts.values.keys() or inputs != list(facts.inputs) or len(facts.draws) != chain.stages:
            raise self.manifest["facts"].damaged("about the parent's graph")
        return chain

    @cached_property
    def named(self) -> list[tuple[list[str], bool]]:
        """Number in the manifest -> the names of the tensor in the model, and whether it is in the state dict."""
        found = []
        for row in self.manifest["tensors"].items():
            names = [name.text() for name in row["names"].items()]
            if not names:
                raise row["names"].damaged("a list of names")
            found.append((names, row["saved"].flag()))
        return found

    def load(self, stages: Iterable[int], device: torch.device | str = "cpu") -> None:
        """Build stages and fill their tensors. Stages that are loaded already stay as they are, and if one cannot be
        loaded, none is.

        Args:
            stages: the numbers of the stages.
            device: the device of their tensors.

        Raises:
            FileError: SK504, SK505 for files that cannot be read, are damaged or belong to another folder; SK507 for
                weights that are missing or have another shape; SK508 for ops or classes that this process does not
                have.
        """
        fresh, made = dict[int, torch.Tensor](), dict[int, nn.Module]()

        def tensor_of(number: JsonField) -> torch.Tensor:
            index = number.whole(below=len(self.manifest["tensors"].value))
            if index in self.tensors:
                return self.tensors[index]
            if index not in fresh:
                fresh[index] = self._empty(index, torch.device(device))
            return fresh[index]

        owned, caches = dict[str, torch.Tensor](), dict[int, fx.GraphModule]()
        for stage in stages:
            if self.chain.keys[stage] in self.parts or stage in made:
                continue
            data = self._stage(stage)
            made[stage] = decode_part(data, tensor_of)
            self._forget_unsaved(getattr(made[stage], "held", made[stage]), data["tensors"])
            owned |= {name: tensor_of(self.manifest["parent"]["tensors"][name]) for name in self.chain.own(stage)}
            if ENCODER_CACHES in data.value:
                caches[stage] = graph_data.decode_graph(data[ENCODER_CACHES], tensor_of)
        self._fill(fresh)
        if self.chain.stages - 1 in made:
            graph_data.form_outputs(self.module, self.manifest["parent"])
        self.tensors.update(fresh)
        self.encoder_caches.update(caches)
        on_meta = {id(attribute(self.module, name)): tensor for name, tensor in owned.items()}
        replace_tensors(tables_of(self.module), on_meta)
        for stage, part in made.items():
            key = self.chain.keys[stage]
            self.parts[key] = part
            self.module.add_module(self.names[key], part)

    def fill(self, whole: nn.Module) -> None:
        """Fill the unsplit model with the parameters and saved buffers of the stages.

        Raises:
            FileError: SK507 if they are not those of this model.
        """
        held, place = parameters_and_buffers(whole), self.weights or Weights.at(self.path)
        found = [names for names, saved in self.named if saved]
        place.read([(names, next((held[name] for name in names if name in held), _NONE)) for names in found])

    def read(self, wanted: Sequence[tuple[Sequence[str], torch.Tensor]]) -> None:
        """Fill tensors of the model that was split, whether a stage reads them or not.

        Args:
            wanted: pairs of the names that a tensor has in the model, and the tensor.

        Raises:
            FileError: SK507 if neither the folder nor its weights have them.
        """
        place = self.weights or Weights.at(self.path)
        first = {name: names for names, _ in self.named for name in names}
        place.read([(list(dict.fromkeys([*first.get(names[0], ()), *names])), tensor) for names, tensor in wanted])

    def read_unsaved(self, wanted: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Fill buffers that no state dict has, and return those whose values the folder has.

        Args:
            wanted: name in the model that was split -> buffer.
        """
        place = Weights.at(self.path)
        found = {name: buffer for name, buffer in wanted.items() if name in place.files}
        place.read([([name], buffer) for name, buffer in found.items()])
        return found

    def example(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the saved positional and keyword inputs of one microbatch.

        Raises:
            FileError: SK504 if none were saved.
        """
        rows = self.manifest["example"]
        if rows.value is None:
            raise FileError(
                "SK504",
                f"{self.path} has no example inputs",
                "Save it with save_stages(..., inputs=(args, kwargs)), with inputs that are not on meta.",
            )
        require_intact(self.path, stored_digests(self.path, WRITE_AGAIN), [EXAMPLE], WRITE_AGAIN)
        stored = stored_tensors(self.path / EXAMPLE)
        found: list[Any] = []
        for i, row in enumerate(rows.items()):
            if row.value is not None:
                found.append(graph_data.decode_argument(row["value"], {}))
            elif str(i) in stored:
                tensor = torch.empty(stored[str(i)].shape, dtype=stored[str(i)].dtype)
                stored[str(i)].read_into(tensor)
                found.append(tensor)
            else:
                raise row.damaged(f"in {EXAMPLE}")
        info = getattr(codegen_of(self.module.graph), "pytree_info", None)
        return (tuple(found), {}) if info is None else pytree.tree_unflatten(found, info.in_spec)

    def _stage(self, stage: int) -> JsonField:
        row = [*self.manifest["stages"].items()][stage]
        name = row["file"].text()
        if Path(name).name != name:
            raise row["file"].damaged("the name of a file in this folder")
        require_intact(self.path, stored_digests(self.path, WRITE_AGAIN), [name], WRITE_AGAIN)
        return JsonField(name, "", read_data(self.path / name, WRITE_AGAIN))

    def _row(self, index: int) -> JsonField:
        tensors = self.manifest["tensors"]
        return JsonField(tensors.file, f"tensors[{index}]", tensors.value[index])

    def _empty(self, index: int, device: torch.device) -> torch.Tensor:
        """Make an uninitialized tensor as the manifest describes it."""
        row = self._row(index)
        like, strides = like_of(row), row["strides"]
        steps = like.stride() if strides.value is None else tuple(strides.sizes())
        if len(steps) != like.dim() or not fills_its_range(like.shape, steps):
            raise strides.damaged("null or the strides of a dense tensor")
        made = torch.empty_strided(like.shape, steps, dtype=like.dtype, device=device)
        grad = _grad_of(row, like)
        return nn.Parameter(made, grad) if row["parameter"].flag() else made.requires_grad_(grad)

    def _fill(self, fresh: Mapping[int, torch.Tensor]) -> None:
        """Read tensors: those in a state dict of the model from the given weights, the others from the folder."""
        given, own = list[Any](), list[Any]()
        for index, tensor in fresh.items():
            names, saved = self.named[index]
            (given if self.weights is not None and saved else own).append((names, tensor))
        if self.weights is not None:
            groups = [names for names, saved in self.named if saved]
            known = {n for names in groups for n in names} | {n.text() for n in self.manifest["unread"].items()}
            remedy = "Name the weights of the model that was split, or leave these tensors out of the files."
            self.weights.require_known(groups, known, remedy)
            self.weights.read(given)
        if own:
            Weights.at(self.path).read(own)

    def _forget_unsaved(self, module: nn.Module, numbers: JsonField) -> None:
        """Mark buffers as non-persistent that the model's state dict lacks."""
        for name, number in numbers.fields():
            if not self.named[number.whole()][1]:
                owner, _, last = name.rpartition(".")
                attributes_of(module.get_submodule(owner)).unsaved.add(last)


def open_stages(
    folder: str | os.PathLike[str],
    weights: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
) -> StageFolder:
    """Open stages that `save_stages` wrote. No tensor is read yet, and no code from the folder is run.

    Args:
        folder: the folder.
        weights: a folder of ``safetensors`` in Hugging Face's layout, or of ``torch.distributed.checkpoint``, from
            which parameters and saved buffers are read by name; by default the folder's own weights.
        dtype: converts floating-point values of safetensors in ``weights`` to this dtype, which must be the dtype of
            the model; by default, a different dtype in the files is refused.

    Raises:
        FileError: SK503 for another schema, SK504 if a file cannot be read, SK505 if one is damaged, SK507 for a
            ``dtype`` in which the model was not captured.
    """
    path = Path(folder)
    manifest = JsonField(MANIFEST, "", read_data(path / MANIFEST, WRITE_AGAIN))
    if manifest["kind"].value != KIND:
        raise manifest["kind"].damaged(repr(KIND))
    if manifest["schema"].value != SCHEMA:
        raise FileError(
            "SK503",
            f"{path / MANIFEST} has schema {manifest['schema'].value!r}, this splitkit reads {SCHEMA}",
            "Split again with this version, or use the version of splitkit that wrote it.",
        )
    digests = stored_digests(path, WRITE_AGAIN)
    if not digests:
        raise FileError("SK505", f"{path} is damaged: it has no {DIGESTS}", WRITE_AGAIN)
    require_intact(path, digests, [MANIFEST], WRITE_AGAIN)
    require_captured(dtype, [dtype_of(row["dtype"]) for row in manifest["tensors"].items()])
    plan = _plan(manifest["plan"])
    keys = list(plan.parts)
    rows = [(keys[row["part"].whole(len(keys))], row["name"].text()) for row in manifest["stages"].items()]
    empty = {name: nn.Module() for _, name in rows}
    parent = manifest["parent"]
    module = graph_data.decode_graph(parent, lambda number: _meta(manifest, number), empty)
    return StageFolder(
        module,
        plan,
        {},
        dict(rows),
        {name: original.text() for name, original in manifest["qualified_names"].fields()},
        tuple(tuple(name.text() for name in group.items()) for group in manifest["shared"].items()),
        path,
        manifest,
        None if weights is None else Weights.at(weights, convert=dtype is not None),
    )


def _meta(manifest: JsonField, number: JsonField) -> torch.Tensor:
    row = [*manifest["tensors"].items()][number.whole(len(manifest["tensors"].value))]
    like = like_of(row)
    return nn.Parameter(like, row["requires_grad"].flag()) if row["parameter"].flag() else like


def _plan(data: JsonField) -> Plan:
    try:
        return Plan({}, plan_file.parts_in_data(data.value), str(data["note"].value))
    except FileError as error:
        raise FileError("SK505", f"{data.file} is damaged: {error.reason}", WRITE_AGAIN, error.nodes) from error


# Encodes data as JSON by the fields of dataclasses, and decodes it by their types: the facts about the split graph that
# a pipeline needs (`ChainFacts`), and what a stage of a training step does besides running its graphs (`StageTask`).


def encode_data(value: Any) -> Any:
    """Encode plain data, types of numbers, tensors on ``meta``, and containers and dataclasses of these."""
    if isinstance(value, torch.Tensor):
        head = {"dtype": name_of_dtype(value.dtype), "shape": list(value.shape), "order": list(memory_order(value))}
        return {**head, "requires_grad": value.requires_grad}
    if isinstance(value, type):
        return value.__name__
    if is_dataclass(value):
        return {each.name: encode_data(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): encode_data(item) for key, item in value.items()}
    if isinstance(value, frozenset):
        return sorted(value)
    return [encode_data(item) for item in value] if isinstance(value, list | tuple) else value


def decode_data(kind: Any, data: JsonField) -> Any:
    """Decode what `encode_data` has encoded, as a value of this type.

    Raises:
        FileError: SK505 for damaged data.
    """
    made, inner = get_origin(kind), get_args(kind)
    if kind == Expression:
        return _decode_size(data)
    if kind in _PLAIN:
        return _PLAIN[kind](data)
    if type(None) in inner:
        return None if data.value is None else decode_data(inner[0], data)
    if is_dataclass(kind):
        found = kind(**{name: decode_data(hint, data[name]) for name, hint in get_type_hints(kind).items()})  # type: ignore[operator]
        _require_sound(found, data)
        return found
    if made is Mapping:
        if inner[0] is int and not all(name.isdecimal() for name, _ in data.fields()):
            raise data.damaged("values by number")
        return {inner[0](name): decode_data(inner[1], item) for name, item in data.fields()}
    items = list(data.items())
    if made is tuple and inner[-1] is not Ellipsis:
        if len(items) != len(inner):
            raise data.damaged(f"a list of {len(inner)}")
        return tuple(map(decode_data, inner, items))
    found = [decode_data(inner[0], item) for item in items]
    return frozenset(found) if made is frozenset else tuple(found)


def like_of(data: JsonField) -> torch.Tensor:
    """Return a tensor on ``meta`` with the encoded shape, dtype and order of dimensions."""
    like = torch.empty(data["shape"].sizes(), dtype=dtype_of(data["dtype"]), device="meta")
    order = tuple(data["order"].sizes()) if "order" in data.value else ()
    if order and sorted(order) != list(range(like.dim())):
        raise data["order"].damaged("the dimensions of the shape, each once")
    return laid_out(like, order)


def _grad_of(data: JsonField, like: torch.Tensor) -> bool:
    """Return whether an encoded tensor requires a gradient."""
    grad = data["requires_grad"].flag()
    if grad and not like.is_floating_point() and not like.is_complex():
        raise data["requires_grad"].damaged("false, for it is not a float")
    return grad


def _scalar_of(data: JsonField) -> type:
    for kind in SCALARS:
        if kind.__name__ == data.value:
            return kind
    raise data.damaged("null, bool, int or float")


_PLAIN: Mapping[Any, Callable[[JsonField], Any]] = {
    bool: JsonField.flag,
    int: JsonField.whole,
    str: JsonField.text,
    object: lambda data: data.value,
    type: _scalar_of,
    torch.Tensor: lambda data: (like := like_of(data)).requires_grad_(_grad_of(data, like)),
}


def _require_sound(found: Any, data: JsonField) -> None:
    """Refuse fields that do not fit each other."""
    if isinstance(found, BorderValue):
        if found.order and sorted(found.order) != list(range(found.like.dim())):
            raise data["order"].damaged("the dimensions of the shape, each once")
        if found.shape and len(found.shape) != found.like.dim():
            raise data["shape"].damaged("a size for each dimension")
    if isinstance(found, BorderSlots):
        count = len(found.activations)
        if len(found.slot_of) != len(found.gradients) or any(slot >= count for slot in found.slot_of):
            raise data["slot_of"].damaged("a slot for each gradient")


def _decode_size(data: JsonField) -> Expression:
    if isinstance(data.value, str):
        return data.text()
    if isinstance(data.value, list):
        name, *arguments = data.items() if data.value else [data]
        return (name.text(), *map(_decode_size, arguments))
    if not isinstance(data.value, int) or isinstance(data.value, bool):
        raise data.damaged("a size")
    return data.value


def encode_facts(chain: Chain) -> dict[str, Any]:
    """Encode the facts of a chain; of its values the outputs and what crosses a border.

    Raises:
        PipelineError: SK801 for a value that cannot be sent.
    """
    wanted = chain.split.module.graph.output_node().all_input_nodes
    crossing = dict.fromkeys(n for stage in range(chain.stages - 1) for n in chain.border(stage, wanted))
    outputs = dict.fromkeys(n for n in wanted if n in chain.stage_of and not chain.value(n).unsendable)
    values = {node.name: chain.value(node).sent(True) for node in {**crossing, **outputs}}
    found: dict[str, Any] = encode_data(replace(chain.facts, values=values))
    return found


def decode_facts(data: JsonField) -> ChainFacts:
    """Decode the facts of a chain.

    Raises:
        FileError: SK505 for damaged data.
    """
    facts: ChainFacts = decode_data(ChainFacts, data)
    shapes = [shape for _, shape in data["sizes"]["inputs"].fields()]
    shapes += [value["shape"] for _, value in data["values"].fields()]
    sized = [size for shape in shapes for size in shape.items()]
    for item in (*sized, *(size for _, size in data["sizes"]["computed"].fields())):
        size = _decode_size(item)
        if not is_known(size) or not facts.sizes.captured.keys() >= set(symbols_in(size)):
            raise item.damaged("an expression of known symbols and functions")
    return facts


def encode_part(part: nn.Module, number_of: Callable[[torch.Tensor], int]) -> dict[str, Any]:
    """Encode a part: a graph, or the graphs of a stage of a training step.

    Args:
        part: the module of a stage.
        number_of: returns the number of a tensor.

    Raises:
        FileError: SK506 if something cannot be represented.
    """
    if not isinstance(part, PlannedStage):
        assert isinstance(part, fx.GraphModule)
        return graph_data.encode_graph(part, number_of)
    return {
        "training": part.training,
        "modules": {half: graph_data.encode_graph(graph, number_of) for half, graph in part.graphs.each().items()},
        "tensors": {name: number_of(tensor) for name, tensor in parameters_and_buffers(part.held).items()},
        "values": {name: list(getattr(part.graphs, name)) for name in _values_of_stages()},
        "task": encode_data(part.task),
    }


def decode_part(data: JsonField, tensor_of: Callable[[JsonField], torch.Tensor]) -> nn.Module:
    """Decode a part.

    Raises:
        FileError: SK505 for damaged data, SK508 for ops that this process does not have.
    """
    if "task" not in data.value:
        return graph_data.decode_graph(data, tensor_of)
    graphs, values = data["modules"], data["values"]
    made = StageGraphs(
        forward=graph_data.decode_graph(graphs["forward"], tensor_of),
        backward=graph_data.decode_graph(graphs["backward"], tensor_of),
        weight=graph_data.decode_graph(graphs["weight"], tensor_of) if "weight" in graphs.value else None,
        **{name: decode_data(hint, values[name]) for name, hint in _values_of_stages().items()},
    )
    held = {name: tensor_of(number) for name, number in data["tensors"].fields()}
    return PlannedStage(made, decode_data(StageTask, data["task"]), held).train(data["training"].flag())


def _values_of_stages() -> dict[str, Any]:
    """Return the names of the fields of `StageGraphs` that are no graphs, with their types."""
    return {name: hint for name, hint in get_type_hints(StageGraphs).items() if get_origin(hint) is tuple}
