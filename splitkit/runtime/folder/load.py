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
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from splitkit._torch import attributes_of, codegen_of, pytree
from splitkit.engine import graph_data
from splitkit.engine.graph_data import dtype_of, name_of_dtype
from splitkit.engine.json_fields import WRITE_AGAIN, JsonField
from splitkit.engine.staged_step import StageGraphs
from splitkit.errors import FileError, listed
from splitkit.graph.caches import ENCODER_CACHES
from splitkit.graph.size_expressions import Expression, is_known, symbols_in
from splitkit.graph.storages import parameters_and_buffers
from splitkit.pipeline.inseparable_nodes import SCALARS
from splitkit.plans import plan_file
from splitkit.plans.parts import PartKey
from splitkit.plans.record import Plan
from splitkit.runtime.folder.checkpoint_folder import DIGESTS, require_intact, stored_digests
from splitkit.runtime.folder.checkpoint_weights import Weights, require_captured
from splitkit.runtime.folder.tensorfiles import fills_its_range, stored_tensors
from splitkit.runtime.ranks.border_values import BorderValue, GraphSizes, Sizes, laid_out, memory_order
from splitkit.runtime.ranks.planned_stage import BorderSlots, PlannedStage, StageTask
from splitkit.runtime.ranks.stage_chain import Chain, ChainFacts, stage_of_calls
from splitkit.short_repr import brief

MANIFEST = "manifest.json"
EXAMPLE = "example.safetensors"
KIND = "splitkit stages"
SCHEMA = 2
"""Of the manifest; a folder of another schema is refused."""
_NONE = torch.empty(0)  # reading a weight into this shape is refused


@dataclass(frozen=True)
class StageFolder:
    """The stages of a folder, which `splitkit.runtime.pipeline` runs like a `splitkit.engine.split.Split`.

    Attributes:
        path: the folder.
        manifest: the manifest's data.
        weights: the source of parameters and saved buffers; ``None`` for the folder itself.
        module: the parent, whose children are empty except for loaded stages.
        plan: the parts' records; it places no nodes.
        names: part -> the name of its module in the parent, in the order of execution.
        qualified_names: name of every parameter and buffer in ``module`` -> its name in the original.
        shared: groups of names in ``module``, each group naming one Parameter that several parts have.
        parts: part -> its module, for loaded parts.
        tensors: number in the manifest -> tensor, for loaded tensors.
        encoder_caches: stage -> the graph that computes its keys and values of an encoder's output, for loaded stages
            of a decoder that have some.
    """

    path: Path
    manifest: JsonField
    weights: Weights | None
    module: fx.GraphModule
    plan: Plan
    names: Mapping[PartKey, str]
    qualified_names: Mapping[str, str]
    shared: tuple[tuple[str, ...], ...]
    parts: dict[PartKey, nn.Module] = field(default_factory=dict)
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
        for name, tensor in owned.items():
            self._give(name, tensor)
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
        rows = [self._row(index) for index in range(len(self.manifest["tensors"].value))]
        found = [[name.text() for name in row["names"].items()] for row in rows if row["saved"].flag()]
        place.read([(names, next((held[name] for name in names if name in held), _NONE)) for names in found])

    def read(self, wanted: Sequence[tuple[Sequence[str], torch.Tensor]]) -> None:
        """Fill tensors of the model that was split, whether a stage reads them or not.

        Args:
            wanted: pairs of the names that a tensor has in the model, and the tensor.

        Raises:
            FileError: SK507 if neither the folder nor its weights have them.
        """
        place = self.weights or Weights.at(self.path)
        rows = [[name.text() for name in row["names"].items()] for row in self.manifest["tensors"].items()]
        first = {name: names for names in rows for name in names}
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
        name = _plain(row["file"])
        require_intact(self.path, stored_digests(self.path, WRITE_AGAIN), [name], WRITE_AGAIN)
        return JsonField(name, "", _read(self.path / name))

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
        grad = row["requires_grad"].flag()
        if grad and not like.is_floating_point() and not like.is_complex():
            raise row["requires_grad"].damaged("false, for it is not a float")
        return nn.Parameter(made, grad) if row["parameter"].flag() else made.requires_grad_(grad)

    def _fill(self, fresh: Mapping[int, torch.Tensor]) -> None:
        """Read tensors: those in a state dict of the model from the given weights, the others from the folder."""
        given, own = list[Any](), list[Any]()
        for index, tensor in fresh.items():
            row = self._row(index)
            names = [name.text() for name in row["names"].items()]
            (given if self.weights is not None and row["saved"].flag() else own).append((names, tensor))
        if self.weights is not None:
            self._require_known(self.weights)
            self.weights.read(given)
        if own:
            Weights.at(self.path).read(own)

    def _require_known(self, weights: Weights) -> None:
        """Refuse weights with names that the model lacks: they are those of another model.

        Raises:
            FileError: SK507.
        """
        rows = [row for row in self.manifest["tensors"].items() if row["saved"].flag()]
        groups = [[name.text() for name in row["names"].items()] for row in rows]
        known = {name for names in groups for name in names} | {n.text() for n in self.manifest["unread"].items()}
        if over := weights.unexpected(groups, known):
            raise FileError(
                "SK507",
                f"{weights.place} has {listed(over, 3)}, which the model that was split does not have",
                "Name the weights of the model that was split, or leave these tensors out of the files.",
                over,
            )

    def _forget_unsaved(self, module: nn.Module, numbers: JsonField) -> None:
        """Mark buffers as non-persistent that the model's state dict lacks."""
        for name, number in numbers.fields():
            if not self._row(number.whole())["saved"].flag():
                owner, _, last = name.rpartition(".")
                attributes_of(module.get_submodule(owner)).unsaved.add(last)

    def _give(self, name: str, tensor: torch.Tensor) -> None:
        """Replace a tensor of the parent, which is on ``meta``."""
        owner, _, last = name.rpartition(".")
        held = attributes_of(self.module.get_submodule(owner))
        table: dict[str, Any] = held.parameters if last in held.parameters else held.buffers
        table[last] = tensor


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
    manifest = JsonField(MANIFEST, "", _read(path / MANIFEST))
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
        path,
        manifest,
        None if weights is None else Weights.at(weights, convert=dtype is not None),
        module,
        plan,
        dict(rows),
        {name: original.text() for name, original in manifest["qualified_names"].fields()},
        tuple(tuple(name.text() for name in group.items()) for group in manifest["shared"].items()),
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


def _plain(data: JsonField) -> str:
    if Path(data.text()).name != data.text():
        raise data.damaged("the name of a file in this folder")
    return data.text()


def _read(path: Path) -> dict[str, Any]:
    try:
        return plan_file.read_json(path)
    except FileError as error:
        code = "SK504" if error.code == "SK504" else "SK505"
        raise FileError(code, error.reason, WRITE_AGAIN) from error


# Encodes the facts about the split graph that a pipeline needs (`ChainFacts`) as JSON data, and decodes them.


def encode_facts(chain: Chain) -> dict[str, Any]:
    """Encode the facts of a chain; of its values only those that cross a border, and the outputs.

    Raises:
        PipelineError: SK801 for a value that cannot be sent.
    """
    facts = chain.facts
    wanted = chain.split.module.graph.output_node().all_input_nodes
    crossing = dict.fromkeys(n for stage in range(chain.stages - 1) for n in chain.border(stage, wanted))
    outputs = dict.fromkeys(n for n in wanted if n in chain.stage_of and not chain.value(n).unsendable)
    return {
        "values": {node.name: _encode_value(chain.value(node).sent(True)) for node in {**crossing, **outputs}},
        "inputs": {name: None if like is None else _encode_like(like) for name, like in facts.inputs.items()},
        "draws": list(facts.draws),
        "writes": list(facts.writes),
        "identity": dict(facts.identity),
        **({"sizes": encode_sizes(facts.sizes)} if facts.sizes.inputs else {}),
        "captured": sorted(facts.captured),
        **({"costly": facts.costly} if facts.costly is not None else {}),
        **({"constants": dict(facts.constants)} if facts.constants else {}),
    }


def decode_facts(data: JsonField) -> ChainFacts:
    """Decode the facts of a chain.

    Raises:
        FileError: SK505 for damaged data.
    """
    inputs = {name: None if like.value is None else like_of(like) for name, like in data["inputs"].fields()}
    sizes = decode_sizes(data["sizes"]) if "sizes" in data.value else GraphSizes()
    return ChainFacts(
        {name: _decode_value(value, sizes.captured) for name, value in data["values"].fields()},
        inputs,
        tuple(item.flag() for item in data["draws"].items()),
        tuple(item.text() for item in data["writes"].items()),
        {name: value.text() for name, value in data["identity"].fields()},
        sizes,
        frozenset(item.text() for item in data["captured"].items()),
        data["costly"].whole() if "costly" in data.value else None,
        {name: value.value for name, value in data["constants"].fields()} if "constants" in data.value else {},
    )


def like_of(data: JsonField) -> torch.Tensor:
    """Return a tensor on ``meta`` with the encoded shape, dtype and order of dimensions."""
    like = torch.empty(data["shape"].sizes(), dtype=dtype_of(data["dtype"]), device="meta")
    return laid_out(like, _order_of(data, like.dim()))


def _order_of(data: JsonField, dims: int) -> tuple[int, ...]:
    order = tuple(data["order"].sizes()) if "order" in data.value else ()
    if order and sorted(order) != list(range(dims)):
        raise data["order"].damaged("the dimensions of the shape, each once")
    return order


def _encode_like(like: torch.Tensor) -> dict[str, Any]:
    order = list(memory_order(like))
    return {"dtype": name_of_dtype(like.dtype), "shape": list(like.shape), **({"order": order} if order else {})}


def _encode_value(value: BorderValue) -> dict[str, Any]:
    scalar = None if value.scalar is None else value.scalar.__name__
    rest = {
        "requires_grad": value.like.requires_grad,
        "written": value.written,
        "scalar": scalar,
        "order": list(value.order),
        **({"sizes": encode_shape(value.shape)} if value.shape else {}),
    }
    return {"name": value.name, **_encode_like(value.like), **rest}


def _decode_value(data: JsonField, captured: Sizes) -> BorderValue:
    scalar = data["scalar"]
    kind = next((kind for kind in SCALARS if kind.__name__ == scalar.value), None)
    if kind is None and scalar.value is not None:
        raise scalar.damaged("null, bool, int or float")
    like, grad = like_of(data), data["requires_grad"].flag()
    if grad and not like.is_floating_point() and not like.is_complex():
        raise data["requires_grad"].damaged("false, for it is not a float")
    shape = decode_shape(data["sizes"], captured) if "sizes" in data.value else ()
    if shape and len(shape) != like.dim():
        raise data["sizes"].damaged("a size for each dimension")
    like = like.requires_grad_(grad)
    return BorderValue(
        data["name"].text(), like, kind, data["written"].flag(), order=_order_of(data, like.dim()), shape=shape
    )


# Encodes the parts of stages as JSON data, and decodes them: a graph, or the graphs of a stage of a training step.


_NAMES = (
    "primals", "received", "sent", "saved", "deferred", "gradients_received", "gradients_sent", "waiting", "offloaded",
)  # fmt: skip
_POSITIONS = ("outputs", "gradients", "weight_gradients")


def encode_part(part: nn.Module, number_of: Callable[[torch.Tensor], int]) -> dict[str, Any]:
    """Encode a part.

    Args:
        part: the module of a stage.
        number_of: returns the number of a tensor.

    Raises:
        FileError: SK506 if something cannot be represented.
    """
    if not isinstance(part, PlannedStage):
        assert isinstance(part, fx.GraphModule)
        return graph_data.encode_graph(part, number_of)
    task = part.task
    return {
        "training": part.training,
        "modules": {half: graph_data.encode_graph(graph, number_of) for half, graph in part.graphs.each().items()},
        "tensors": {name: number_of(tensor) for name, tensor in parameters_and_buffers(part.held).items()},
        "values": {name: list(getattr(part.graphs, name)) for name in (*_NAMES, *_POSITIONS)},
        "task": {
            "inputs": list(task.inputs),
            "updates": [[position, name] for position, name in task.updates.items()],
            "trained": [[position, name] for position, name in task.trained.items()],
            "loss": task.loss,
            "tangents": [{**_encode_like(like), "of_loss": of_loss} for like, of_loss in task.tangents],
            "before": _encode_slots(task.before),
            "after": _encode_slots(task.after),
        },
    }


def decode_part(data: JsonField, tensor_of: Callable[[JsonField], torch.Tensor]) -> nn.Module:
    """Decode a part.

    Raises:
        FileError: SK505 for damaged data, SK508 for ops that this process does not have.
    """
    if "task" not in data.value:
        return graph_data.decode_graph(data, tensor_of)
    task, values, graphs = data["task"], data["values"], data["modules"]
    told: dict[str, Any] = {name: tuple(item.text() for item in values[name].items()) for name in _NAMES}
    told |= {name: tuple(item.whole() for item in values[name].items()) for name in _POSITIONS}
    made = StageGraphs(
        forward=graph_data.decode_graph(graphs["forward"], tensor_of),
        backward=graph_data.decode_graph(graphs["backward"], tensor_of),
        weight=graph_data.decode_graph(graphs["weight"], tensor_of) if "weight" in graphs.value else None,
        **told,
    )
    besides = StageTask(
        tuple(item.text() for item in task["inputs"].items()),
        _decode_pairs(task["updates"]),
        _decode_pairs(task["trained"]),
        None if task["loss"].value is None else task["loss"].whole(),
        [(like_of(item), item["of_loss"].flag()) for item in task["tangents"].items()],
        _decode_slots(task["before"]),
        _decode_slots(task["after"]),
    )
    stage = PlannedStage(made, besides, {name: tensor_of(number) for name, number in data["tensors"].fields()})
    return stage.train(data["training"].flag())


def _decode_pairs(data: JsonField) -> dict[int, str]:
    found: dict[int, str] = {}
    for item in data.items():
        pair = list(item.items())
        if len(pair) != 2:
            raise item.damaged("a position and a name")
        found[pair[0].whole()] = pair[1].text()
    return found


def _encode_slots(slots: BorderSlots | None) -> dict[str, Any] | None:
    if slots is None:
        return None
    return {
        "activations": [_encode_value(value) for value in slots.activations],
        "gradients": [_encode_value(value) for value in slots.gradients],
        "slot_of": list(slots.slot_of),
    }


def _decode_slots(data: JsonField) -> BorderSlots | None:
    if data.value is None:
        return None
    activations, gradients = (
        tuple(_decode_value(item, {}) for item in data[name].items()) for name in ("activations", "gradients")
    )
    slots = tuple(item.whole(below=len(activations)) for item in data["slot_of"].items())
    if len(slots) != len(gradients):
        raise data["slot_of"].damaged("a slot for each gradient")
    return BorderSlots(activations, gradients, slots)


# Encodes the symbolic sizes of a graph as JSON data, and decodes them.


def encode_sizes(sizes: GraphSizes) -> dict[str, Any]:
    """Encode the symbolic sizes of a graph."""
    return {
        "inputs": {name: encode_shape(shape) for name, shape in sizes.inputs.items()},
        "captured": dict(sizes.captured),
        "ranges": {symbol: list(limits) for symbol, limits in sizes.ranges.items()},
        "guards": encode_shape(sizes.guards),
        "computed": {name: _encode(size) for name, size in sizes.computed.items()},
        "squares": sorted(sizes.squares),
    }


def decode_sizes(data: JsonField) -> GraphSizes:
    """Decode the symbolic sizes of a graph.

    Raises:
        FileError: SK505 for damaged data.
    """
    captured = {symbol: size.whole() for symbol, size in data["captured"].fields()}
    return GraphSizes(
        {name: decode_shape(shape, captured) for name, shape in data["inputs"].fields()},
        captured,
        {symbol: _limits(limits) for symbol, limits in data["ranges"].fields()},
        tuple(map(_decode, data["guards"].items())),
        {name: _known(size, captured) for name, size in data["computed"].fields()},
        # folders that older versions wrote do not say it
        frozenset(item.text() for item in data["squares"].items()) if "squares" in data.value else frozenset(),
    )


def encode_shape(shape: Sequence[Expression]) -> list[Any]:
    """Encode expressions: numbers, names of symbols, and lists of a function and its arguments."""
    return [_encode(size) for size in shape]


def decode_shape(data: JsonField, captured: Sizes) -> tuple[Expression, ...]:
    """Decode expressions that can be evaluated.

    Args:
        data: what `encode_shape` returned.
        captured: symbol -> its size at capture.

    Raises:
        FileError: SK505 for damaged data.
    """
    return tuple(_known(size, captured) for size in data.items())


def _encode(size: Expression) -> Any:
    return [size[0], *map(_encode, size[1:])] if isinstance(size, tuple) else size


def _known(data: JsonField, captured: Sizes) -> Expression:
    found = _decode(data)
    if not is_known(found) or not captured.keys() >= set(symbols_in(found)):
        raise data.damaged("an expression of known symbols and functions")
    return found


def _decode(data: JsonField) -> Expression:
    if isinstance(data.value, str):
        return data.text()
    if isinstance(data.value, list):
        name, *arguments = data.items() if data.value else [data]
        return (name.text(), *map(_decode, arguments))
    if not isinstance(data.value, int) or isinstance(data.value, bool):
        raise data.damaged("a size")
    return data.value


def _limits(data: JsonField) -> tuple[int, int | None]:
    limits = list(data.items())
    if len(limits) != 2:
        raise data.damaged("a least and a largest size")
    low, high = limits
    return low.whole(), None if high.value is None else high.whole()
