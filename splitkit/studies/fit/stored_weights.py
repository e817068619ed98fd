"""Finds the bytes of a quantized checkpoint's weights: in the headers of its files, or by its configuration.

The files tell the bytes of any format. What a configuration tells are the layouts of some formats, as their publishers
write them: the bits of a value, and the block of rows and columns that shares a scale.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from torch import Tensor, nn

from splitkit.errors import CaptureError, FileError
from splitkit.runtime.folder.checkpoint_names import converted, without_ignored
from splitkit.runtime.folder.checkpoint_weights import Weights
from splitkit.studies.fit.blocks import blocks_of, memory_key

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
    inside = _Modules(dict(model.named_modules()), [block.name for block in blocks_of(model)])
    found, others, lost = dict[int, int](), dict[str, int](), list[str]()
    renamed = {name: target for target, made in converted(sizes, weights.place).items() for name in made.names}
    for name, nbytes in sizes.items():
        names = (name, renamed.get(name, name), f"{getattr(model, 'base_model_prefix', '')}.{name}")
        own = next((state[n] for n in names if n in state), None)
        module = next((m for m in map(inside.module_of, names) if m is not None), None)
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


@dataclass(frozen=True)
class _Modules:
    """The modules of a model by name, and the blocks that they are in."""

    known: Mapping[str, nn.Module]
    blocks: Sequence[str]

    def module_of(self, name: str) -> str | None:
        """Return the innermost module in a block whose name begins this one; ``None`` if there is none."""
        while "." in name:
            name = name.rpartition(".")[0]
            if name in self.known:
                inside = any(f"{name}.".startswith(f"{block}." if block else "") for block in self.blocks)
                return name if inside else None
        return "" if "" in self.blocks else None


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
