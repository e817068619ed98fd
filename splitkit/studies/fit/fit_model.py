"""Makes the model that should fit, on ``meta``: from a transformers configuration, an example or a user's factory."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from splitkit._torch import pytree
from splitkit.checks import shown
from splitkit.errors import CaptureError, FileError, PolicyError
from splitkit.hardware.device_specs import Device, find_device
from splitkit.runtime.folder.checkpoint_weights import Weights, converted, without_ignored
from splitkit.testing import models
from splitkit.testing.config_files import checkpoint_beside, is_config
from splitkit.testing.config_models import config_at, config_dtype, config_model
from splitkit.units import read_size

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""The dtypes in which a model may compute."""
NARROW: Mapping[str, int] = {"float8": 8, "int4": 4}
"""Formats of the weights only -> bits a value; the model computes in bfloat16, or its own 16 bits."""


@dataclass(frozen=True, eq=False)
class FitModel:
    """A model without weights.

    Attributes:
        name: how the user named it.
        model: the module, on ``meta``.
        config: its transformers configuration, if it has one.
        example: positional and keyword inputs of a user's model; ``None`` if the inputs follow from the configuration.
        bits: bits a value of the weights; ``None``: as the model has them.
        stored: identity of memory -> its bytes in a quantized checkpoint; empty for any other.
        cast: the dtype to which a user's model and its inputs were cast, ``""`` if they were not.
    """

    name: str
    model: nn.Module
    config: Any
    example: tuple[tuple[Any, ...], dict[str, Any]] | None
    bits: int | None
    stored: Mapping[int, int] = field(default_factory=dict)
    cast: str = ""

    def in_mode(self, training: bool) -> nn.Module:
        """Return the model in training or evaluation mode; an exported program keeps its own."""
        with suppress(NotImplementedError):
            self.model.train(training)
        return self.model

    @cached_property
    def blocks(self) -> list[ModelBlock]:
        """Its blocks, in the order in which they are defined."""
        return blocks_of(self.model, self.stored)

    @property
    def context(self) -> int | None:
        """The most tokens of a sequence that the model is made for, if the configuration says so."""
        if self.config is None:
            return None
        names = ("max_target_positions", "max_position_embeddings", "n_positions", "max_seq_len")
        text = self.config.get_text_config(decoder=True)
        found = [value for name in names if isinstance(value := getattr(text, name, None), int)]
        return found[0] if found else None

    @property
    def longest(self) -> int | None:
        """The most tokens that the model runs with: its context if it has an embedding of each position."""
        context = self.context
        tokens = {id(table.weight) for table in _token_tables(self.model)}
        tables = [one for one in self.model.modules() if isinstance(one, nn.Embedding) and id(one.weight) not in tokens]
        if context is not None and any(context <= table.num_embeddings <= context + 2 for table in tables):
            return context
        return None


def _token_tables(model: nn.Module) -> list[Any]:
    """Return the embeddings of tokens, of which there may be as many as positions (Mistral 7B: 32,768 of both)."""
    found = []
    for module in model.modules():
        with suppress(AttributeError, NotImplementedError):
            table = getattr(module, "get_input_embeddings", lambda: None)()
            found += [table] if isinstance(table, nn.Embedding) else []
    return found


def fit_model(model: object, dtype: str | None, sizes: Mapping[str, int] | None = None) -> FitModel:
    """Return the model on ``meta``.

    Args:
        model: a path of a configuration, a configuration, a module, an example's name or ``place:factory``.
        dtype: one of `DTYPES` or `NARROW`; ``None``: the dtype that the configuration names, or the factory makes.
        sizes: arguments of the example or factory.

    Raises:
        PolicyError: SK302 for an unknown dtype.
        CaptureError: SK401 if the model cannot be made, SK402 or SK403 as for `splitkit.testing.models.load`.
        FileError: SK504 if the configuration cannot be read; else as `stored_bytes`.
    """
    if dtype is not None and dtype not in DTYPES and dtype not in NARROW:
        raise PolicyError("SK302", f"fit: dtype is {dtype!r}", f"Use one of {', '.join((*DTYPES, *NARROW))}.")
    bits = None if dtype is None else NARROW.get(dtype)
    configured = not isinstance(model, str) or is_config(model)
    if configured and sizes:
        raise PolicyError("SK302", f"fit: sizes={dict(sizes)} of a configuration", "Give tokens and requests instead.")
    if isinstance(model, nn.Module):
        return FitModel(type(model).__name__, _cast(_copied(model), dtype), model.config, None, bits)
    if isinstance(model, str | os.PathLike) and is_config(os.fspath(model)):
        path = os.fspath(model)
        return _from_config(path, config_at(path), dtype, checkpoint_beside(path))
    if hasattr(model, "model_type"):
        return _from_config(str(model.model_type), model, dtype)
    if not isinstance(model, str):
        raise PolicyError(
            "SK302", f"fit: the model is a {type(model).__name__}", "Give a path of a config.json, or place:factory."
        )
    with torch.device("meta"), torch.random.fork_rng():
        made = models.load(model, **(sizes or {}))
    found = _cast(_moved(made.model), dtype)
    inputs = pytree.tree_map_only(torch.Tensor, lambda one: _in(dtype, one.to("meta")), (made.args, made.kwargs))
    cast = dtype if dtype in DTYPES else None
    return FitModel(model, found, getattr(found, "config", None), inputs, bits, cast=cast or "")


def _copied(model: nn.Module) -> nn.Module:
    """Return a copy of a user's module, which must be on ``meta`` and have a configuration that tells its inputs."""
    real = next((name for name, tensor in model.named_parameters() if not tensor.is_meta), None)
    if real is not None or not hasattr(model, "config"):
        found = "has no config" if real is None else f"has real weights, such as {real}"
        remedy = "Give its config.json, a model of transformers made under torch.device('meta'), or place:factory."
        raise PolicyError("SK302", f"fit: the {type(model).__name__} {found}", remedy)
    return copy.deepcopy(model)


def _cast(model: nn.Module, dtype: str | None) -> nn.Module:
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = _in(dtype, tensor.data)
    return model


def _in(dtype: str | None, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in a dtype of `DTYPES` if it has floats; for other names, as it is."""
    return tensor.to(DTYPES.get(dtype or "", tensor.dtype)) if tensor.is_floating_point() else tensor


def _moved(model: nn.Module) -> nn.Module:
    """Drop the values of weights that a factory made on another device; what is tied stays tied."""
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_meta:
                made = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
                setattr(module, name, moved.setdefault(id(parameter), made))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to("meta"))
    return model


def _from_config(name: str, config: Any, dtype: str | None, files: str = "") -> FitModel:
    own, quantized = config_dtype(config), getattr(config, "quantization_config", None) is not None
    if own == torch.float32 and (dtype in NARROW or (dtype is None and quantized)):
        own = torch.bfloat16
    model = config_model(config, DTYPES.get(dtype or "", own))
    stored = stored_bytes(name, model, config, files) if dtype is None else {}
    return FitModel(name, model, config, None, NARROW.get(dtype or ""), stored)


# Finds the bytes of a quantized checkpoint's weights: in the headers of its files, or by its configuration.
#
# The files tell the bytes of any format. What a configuration tells are the layouts of some formats, as their
# publishers write them: the bits of a value, and the block of rows and columns that shares a scale.


_OWN_FILES = "Put the model's own files beside its configuration, all of them."


def stored_bytes(name: str, model: nn.Module, config: Any, files: str) -> dict[int, int]:
    """Return identity of memory -> bytes of it in a quantized checkpoint; nothing if it is not quantized.

    Args:
        name: how the configuration is called.
        model: its model, on ``meta``.
        config: the configuration.
        files: the folder with its safetensors files, which are asked first; empty if there is none.

    Raises:
        CaptureError: SK401 for a format that is not known here, if there are no files.
        FileError: SK504, SK505 or SK507 for such a format if the files are incomplete, damaged or another model's.
    """
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        return {}
    read = stored if isinstance(stored, dict) else stored.to_dict()
    method, form, formats = str(read.get("quant_method")), read.get("format"), _formats(read)
    if method == "bitsandbytes" and any(tensor.ndim > 2 for _, _, tensor in _matrices(model)):
        formats = None  # old files have each expert as a quantized module, new ones stacks as they are
    try:
        if files:
            return _of_files(model, Weights.at(files))
    except FileError:  # such as a clone without its large files
        if formats is None:
            raise
    if formats is None:
        raise CaptureError(
            "SK401",
            f"{name} says that weights are stored as {method!r}{f' ({form})' if form else ''}, whose size is not known",
            "Put the checkpoint's safetensors files beside it, or give --dtype: bfloat16, float16, float8 or int4.",
        )
    return _of_formats(model, formats, read)


def _of_files(model: nn.Module, weights: Weights) -> dict[int, int]:
    """Return the bytes in files.

    A tensor of a file that is none of the model, such as a scale, belongs to the module with the longest part of its
    name, and its bytes to the weights there of which the files have nothing under their own name.
    """
    sizes, state = weights.sizes(), model.state_dict(keep_vars=True)
    modules, blocks = dict(model.named_modules()), [block.name for block in blocks_of(model)]
    found, others, lost = dict[int, int](), dict[str, int](), list[str]()
    renamed = {name: target for target, made in converted(sizes, weights.place).items() for name in made.names}
    for name, nbytes in sizes.items():
        names = (name, renamed.get(name, name), f"{getattr(model, 'base_model_prefix', '')}.{name}")
        own = next((state[n] for n in names if n in state), None)
        module = next((m for one in names if (m := _module_of(one, modules, blocks)) is not None), None)
        if own is not None:
            found[memory_key(own)] = nbytes
        elif module is not None:
            others[module] = others.get(module, 0) + nbytes
        else:
            lost.append(name)
    if lost := without_ignored(lost, weights.place):
        raise FileError("SK507", f"{weights.place} has {lost[0]}, and the model has not", _OWN_FILES)
    for module, nbytes in sorted(others.items(), reverse=True):  # inner modules first
        held = {memory_key(t): t.nbytes for n, t in state.items() if n.startswith(f"{module}." if module else "")}
        _share(nbytes, {key: own for key, own in held.items() if key not in found} or held, found)
    if missing := [[name] for name, tensor in state.items() if memory_key(tensor) not in found]:
        raise FileError("SK507", weights.absent(*missing).reason, _OWN_FILES, [names[0] for names in missing])
    return found


def _share(nbytes: int, held: Mapping[int, int], found: dict[int, int]) -> None:
    """Add bytes to memories in proportion to what these hold in the model."""
    whole, before, given = sum(held.values()), 0, 0
    for key, own in held.items():
        before += own
        found[key] = found.get(key, 0) + nbytes * before // whole - given
        given = nbytes * before // whole


def _module_of(name: str, modules: Collection[str], blocks: Sequence[str]) -> str | None:
    """Return the innermost module in a block whose name begins this one; ``None`` if there is none."""
    while "." in name:
        name = name.rpartition(".")[0]
        if name in modules:
            inside = any(f"{name}.".startswith(f"{block}." if block else "") for block in blocks)
            return name if inside else None
    return "" if "" in blocks else None


@dataclass(frozen=True)
class _Format:
    """How a matrix is stored.

    Attributes:
        bits: bits of a value.
        rows: the rows that share a scale; ``None`` for all.
        columns: the columns that share it.
        scale: bytes of a scale and its zero point.
        targets: the modules whose matrices are: classes, names, or ``"re:"`` and a pattern.
        column: further bytes of each column.
    """

    bits: float
    rows: int | None
    columns: int | None
    scale: float
    targets: Sequence[str] = ("Linear",)
    column: int = 0

    def nbytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of a matrix, or a stack of them."""
        *stack, rows, columns = shape
        scales = ceil(rows / (self.rows or rows)) * ceil(columns / (self.columns or columns))
        return prod(stack) * (ceil(rows * columns * self.bits / 8) + ceil(scales * self.scale) + self.column * columns)


def _formats(read: Mapping[str, Any]) -> list[_Format] | None:
    """Return the formats of a checkpoint; ``None`` if it has one that is not known here."""
    method, bits, group = read.get("quant_method"), read.get("bits"), read.get("group_size", 128)
    group = group if isinstance(group, int) and group > 0 else None
    if method == "fp8":
        rows, columns = read.get("weight_block_size", (128, 128)) or (None, None)
        return [_Format(8, rows, columns, 4)]
    if method == "fbgemm_fp8":
        return [_Format(8, 1, None, 4)]
    if method == "mxfp4":
        return [_Format(4, 1, 32, 1, (_STACK,))]
    if method in ("gptq", "awq") and bits in (4, 8):
        return [_Format(bits, 1, group, 2 + bits / 8, column=4 if method == "gptq" else 0)]
    if method == "bitsandbytes" and (read.get("load_in_8bit") or read.get("load_in_4bit")):
        twice = 1 + 4 / 256 if read.get("bnb_4bit_use_double_quant") else 4
        return [_Format(8, 1, None, 4) if read.get("load_in_8bit") else _Format(4, 1, 64, twice)]
    if method != "compressed-tensors" or (read.get("sparsity_config") or {}).get("format", "dense") != "dense":
        return None
    groups = (read.get("config_groups") or {}).values()
    made = [_compressed(one, one.get("format") or read.get("format")) for one in groups]
    return [one for one in made if one is not None] if made and None not in made else None


def _compressed(group: Mapping[str, Any], form: str | None) -> _Format | None:
    """Return the format of a group of ``compressed-tensors``."""
    how, targets = group.get("weights") or {}, group.get("targets") or ()
    bits, strategy, size = how.get("num_bits"), how.get("strategy"), how.get("group_size")
    shared = {
        "tensor": (None, None), "channel": (1, None), "group": (1, size), "tensor_group": (1, size),
        "block": how.get("block_structure"),
    }.get(str(strategy))  # fmt: skip
    if shared is None or not isinstance(bits, int):
        return None
    rows, columns = shared
    whole = how.get("symmetric", True)
    if form in ("float-quantized", "int-quantized", "naive-quantized"):
        return _Format(8, rows, columns, 2 if whole else 3, targets)
    if form == "pack-quantized":
        return _Format(32 / (32 // bits), rows, columns, 2 if whole else 2 + bits / 8, targets)
    return _Format(4, rows, columns, 1, targets) if form in ("nvfp4-pack-quantized", "mxfp4-pack-quantized") else None


_STACK = "a stack"
"""A target: the weights of all experts of a layer in one tensor, which are matrices of ``Linear`` in most formats."""


def _of_formats(model: nn.Module, formats: Sequence[_Format], read: Mapping[str, Any]) -> dict[int, int]:
    """Return the bytes of the memories of a model whose matrices have these formats."""
    found = {memory_key(tensor): tensor.nbytes for tensor in model.state_dict(keep_vars=True).values()}
    skipped = _skipped(read)
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not None and read.get("quant_method") != "compressed-tensors" and not read.get("lm_head"):
        tables.append(head)
    kept = {memory_key(table.weight) for table in tables}
    for path, module, tensor in _matrices(model):
        kinds = ["Linear", type(module).__name__, *[_STACK] * (tensor.ndim > 2)]
        used = next((form for form in formats if any(_named(one, path, kinds) for one in form.targets)), None)
        if used is not None and memory_key(tensor) not in kept and not any(_named(one, path) for one in skipped):
            found[memory_key(tensor)] = used.nbytes(tensor.shape)
    return found


def _matrices(model: nn.Module) -> Iterable[tuple[str, nn.Module, Tensor]]:
    """Yield the path of a module, the module, and its matrix or stack of matrices."""
    for path, module in model.named_modules():
        for name, tensor in module.named_parameters(recurse=False):
            linear = name == "weight" and tensor.ndim == 2 and type(module).__name__.endswith(("Linear", "Conv1D"))
            if linear or (tensor.ndim == 3 and tensor.shape[0] > 1 and not hasattr(module, "kernel_size")):
                yield path, module, tensor


def _skipped(read: Mapping[str, Any]) -> list[str]:
    """Return the modules that are not quantized; in transformers' own formats they are patterns or ends of names."""
    if read.get("quant_method") == "compressed-tensors":
        return list(read.get("ignore") or ())
    names = read.get("modules_to_not_convert") or read.get("llm_int8_skip_modules") or ()
    return [f"re:(.*\\.)?(?:{name})(\\.|$)" for name in names]


def _named(wanted: str, path: str, kinds: Sequence[str] = ()) -> bool:
    """Return whether a target names a module, by its kinds or its path, which may lack or have another first part."""
    if wanted.startswith("re:"):
        return any(re.match(wanted[3:], name) for name in (path, path.partition(".")[2]))
    return wanted in kinds or path == wanted or wanted.endswith(f".{path}") or path.endswith(f".{wanted}")


# Divides a model into the blocks between which it may be cut, and says which memory holds the weights of each.


_SCALED = 128
"""Narrow weights have one scale for so many values in a row (4 bits) or for a square of that side (8 bits)."""


@dataclass(frozen=True)
class Weight:
    """The memory of one parameter or buffer; tied weights share one.

    Attributes:
        nbytes: its bytes.
        trained: the bytes of its gradient, 0 if it is not trained.
        narrow: bits -> bytes if it were stored with 8 or 4 bits a value; only for matrices in the
            items of lists: embeddings and heads stay as they are.
    """

    nbytes: int
    trained: int
    narrow: Mapping[int, int]


@dataclass(frozen=True, eq=False)
class ModelBlock:
    """A module that stays whole.

    Attributes:
        name: its dotted path in the model, ``""`` for the model itself.
        module: the module.
        weights: identity of memory -> what it holds.
    """

    name: str
    module: nn.Module
    weights: Mapping[int, Weight]


def blocks_of(model: nn.Module, stored: Mapping[int, int] = MappingProxyType({})) -> list[ModelBlock]:
    """Return the blocks of a model in the order in which they are defined.

    These are the items of the outermost lists of modules (`ModuleList` and `Sequential` of several modules), and the
    modules that stand beside these lists or their parents. A model without such a list is one block. Parameters that
    a parent itself holds belong to its first block.

    Args:
        model: the model.
        stored: identity of memory -> bytes of it if these differ from the model's.
    """
    return [ModelBlock(name, module, _weights(own, listed, stored)) for name, module, own, listed in _found(model, "")]


_Tensors = list[tuple[nn.Module, Tensor]]


def _found(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module, _Tensors, bool]]:
    """Yield path, module and weights of each block below a module, and whether it is the item of a list."""
    if not any(map(_is_list, module.modules())):
        yield path, module, list(_tensors(module, deep=True)), False
        return
    own = list(_tensors(module, deep=False))
    for name, child in module.named_children():
        at = f"{path}.{name}" if path else name
        below = [(at, child, list(_tensors(child, deep=True)), True)] if _is_list(module) else _found(child, at)
        for where, block, tensors, listed in below:
            yield where, block, own + tensors, listed
            own = []


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1


def _tensors(module: nn.Module, deep: bool) -> Iterator[tuple[nn.Module, Tensor]]:
    for owner in module.modules() if deep else (module,):
        held = (*owner.parameters(recurse=False), *owner.buffers(recurse=False))
        yield from ((owner, tensor) for tensor in held)


def _weights(tensors: Iterable[tuple[nn.Module, Tensor]], listed: bool, stored: Mapping[int, int]) -> dict[int, Weight]:
    found: dict[int, Weight] = {}
    for owner, tensor in tensors:
        nbytes = stored.get(memory_key(tensor), tensor.untyped_storage().nbytes())
        trained = tensor.numel() * tensor.element_size() if tensor.requires_grad else 0
        found[memory_key(tensor)] = Weight(nbytes, trained, _narrow(owner, tensor, nbytes) if listed else {})
    return found


def memory_key(tensor: Tensor) -> int:
    """Return the identity of a tensor's memory, while the tensor lives."""
    return id(tensor.untyped_storage())


def _narrow(owner: nn.Module, tensor: Tensor, nbytes: int) -> dict[int, int]:
    """Return the bytes of a matrix, or a stack of them, with 8 bits and 4 bits a value, with scales."""
    values = tensor.numel()
    if tensor.ndim < 2 or isinstance(owner, nn.Embedding) or not tensor.is_floating_point():
        return {}
    rows, columns = tensor.shape[-2:]
    squares = values // (rows * columns) * -(-rows // _SCALED) * -(-columns // _SCALED) if values else 0
    groups = -(-columns // _SCALED) * (values // columns) if values else 0
    eight, four = values + 4 * squares, -(-values // 2) + 2 * groups
    return {bits: wanted for bits, wanted in ((8, eight), (4, four)) if wanted < nbytes}


# Reads the devices that a model should fit: ``2x24GiB``, ``rtx-3090,rtx-4090``, or those of this machine.


MOST_CARDS = 1024
"""The most devices that a model is fitted to."""
_MOST_BYTES = 2**60  # of a device; more is taken for a slip of the pen
_KEPT_FREE = 20
"""One part in so many of a device stays free: for the context of the driver, workspaces and fragmentation."""
_ITEM = re.compile(r"(?:(\d{1,99})x)?(.+)", re.ASCII)

CardList = str | Sequence[str | int | Device] | None
"""Devices as a text (``"2x24GiB"``), as sizes, names and `splitkit.costs.Device`; ``None`` for those present."""


@dataclass(frozen=True)
class Card:
    """One device.

    Attributes:
        name: its name, or its size as it was written.
        memory: bytes of its memory.
    """

    name: str
    memory: int

    @property
    def limit(self) -> int:
        """The bytes that may be used: 95 % of the memory, rounded down to what ``--memory`` says."""
        return read_size(memory_word(self.memory - self.memory // _KEPT_FREE)) or 0


def memory_word(nbytes: int) -> str:
    """Return bytes, rounded down, as ``--memory`` takes them."""
    return f"{nbytes >> 20}MiB" if nbytes >= 2**30 else f"{nbytes >> 10}KiB" if nbytes >= 2**20 else f"{nbytes}B"


def cards_of(devices: CardList) -> tuple[Card, ...]:
    """Return the devices that a text or a sequence names.

    Raises:
        PolicyError: SK302 if it names none, too many, or something that is neither a size nor a count and a name.
        CostError: SK321 if no device has that name.
    """
    if devices is None:
        return present()
    items = devices.split(",") if isinstance(devices, str) else list(devices)
    found = tuple(card for item in items for card in _cards(item))
    _require_few(len(found))
    return found


def _require_few(number: int) -> None:
    if not 1 <= number <= MOST_CARDS:
        raise PolicyError("SK302", f"fit: these are {number} devices", f"Name 1 to {MOST_CARDS} devices.")


def present() -> tuple[Card, ...]:
    """Return the GPUs of this machine; without any, its main memory as one device."""
    if torch.cuda.is_available():
        every = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        return tuple(Card(each.name, each.total_memory) for each in every)
    return (Card("main memory", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),)


def _cards(item: str | int | Device) -> tuple[Card, ...]:
    if isinstance(item, Device):
        return (Card(item.name, item.memory),)
    match = _ITEM.fullmatch(str(item).strip())
    count = int(match[1] or 1) if match else 0
    if match is None or not count:
        raise PolicyError("SK302", f"fit: {shown(item)} names no device", "Write 2x24GiB, or rtx-3090,rtx-4090.")
    _require_few(count)
    nbytes = read_size(match[2])
    if nbytes is not None and not 0 < nbytes <= _MOST_BYTES:
        raise PolicyError("SK302", f"fit: {shown(match[2])} is not a memory size", "Write 2x24GiB.")
    if nbytes is None:
        known = find_device(match[2])
        return (Card(known.name, known.memory),) * count
    if match[2].isdigit() and nbytes < 2**20:
        raise PolicyError("SK302", f"fit: {match[2]} is {nbytes} bytes of memory", "Give the unit: 2x24GiB.")
    return (Card(match[2], nbytes),) * count
