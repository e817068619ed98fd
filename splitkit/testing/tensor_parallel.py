"""Shard models of transformers over a dimension of a mesh (tensor parallelism), as ``--mesh tp=2`` asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from splitkit.errors import CaptureError

_STYLES: Mapping[str, tuple[bool, Any, Any]] = {  # style -> whether columns are divided, placements of input and output
    "colwise": (True, Replicate(), Shard(-1)),
    "colwise_rep": (True, Replicate(), Replicate()),
    "colwise_gather_output": (True, Replicate(), Replicate()),
    "rowwise": (False, Shard(-1), Replicate()),
    "rowwise_rep": (False, Replicate(), Replicate()),
}
_EXPERTS = "moe_tp_experts"
_GPT2 = {  # of Conv1D; a rank's columns of c_attn would not be heads, so attention sees all of them
    "h.*.attn.c_attn": "colwise_gather_output",
    "h.*.attn.c_proj": "rowwise_rep",
    "h.*.mlp.c_fc": "colwise",
    "h.*.mlp.c_proj": "rowwise",
}


def shard_model(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a model over a mesh of one dimension, in place, by the plan that transformers has for it, or GPT-2's.

    Experts stay whole, and so does what the plan does not name.

    Raises:
        CaptureError: SK401 if there is no plan for the model or for this mesh, or if it shards in a way that torch's
            `parallelize_module` does not know.
    """
    plan = _plan_of(model)
    if not plan:
        raise _unknown(model, "transformers has no plan to shard it")
    if mesh.ndim > 1:
        raise _unknown(model, f"its plan is for one dimension, and the mesh has {mesh.ndim}")
    _require_heads(model, mesh.size())
    whole = [path for path, style in plan.items() if style == _EXPERTS]
    for path, style in plan.items():
        if path.startswith(tuple(whole)):
            continue
        if style not in _STYLES:
            raise _unknown(model, f"its plan shards {path} as {style!r}")
        _shard(model, path, style, mesh)


def _plan_of(model: Any) -> dict[str, str]:
    """Return path, with ``*`` for a number -> the style of transformers."""
    config, base = getattr(model, "config", None), getattr(model, "base_model_prefix", "")
    prefix = f"{base}." if hasattr(model, base) and base else ""
    plan = _GPT2 if getattr(config, "model_type", "") == "gpt2" else getattr(config, "base_model_tp_plan", None)
    own = getattr(type(model), "_tp_plan", None) or {}
    return {f"{prefix}{path}": style for path, style in (plan or {}).items()} | dict(own if plan else {})


def _require_heads(model: Any, ranks: int) -> None:
    config = model.config
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % ranks:
            raise CaptureError(
                "SK401",
                f"{type(model).__name__} has {heads} {name}, which {ranks} ranks cannot share",
                f"Choose a number of ranks that divides {heads}.",
            )


def _shard(model: nn.Module, path: str, style: str, mesh: DeviceMesh) -> None:
    """Shard the modules at a path."""
    columns, given, made = _STYLES[style]
    named = path.split(".")
    for name, module in model.named_modules():
        words = name.split(".")
        if len(words) != len(named) or any(a not in ("*", b) for a, b in zip(named, words, strict=True)):
            continue
        if isinstance(module, nn.Linear):
            one = (ColwiseParallel if columns else RowwiseParallel)(input_layouts=given, output_layouts=made)
            parallelize_module(module, mesh, one, src_data_rank=None)
        elif type(module).__name__ == "Conv1D":
            _shard_conv1d(module, mesh, columns, given, made)
        else:
            raise _unknown(model, f"{name} is a {type(module).__name__}, which {style!r} cannot shard")


def _shard_conv1d(module: nn.Module, mesh: DeviceMesh, columns: bool, given: Any, made: Any) -> None:
    """Shard transformers' ``Conv1D``, which computes ``x @ weight + bias``, by the columns or rows of its weight."""
    placed = {"weight": Shard(1 if columns else 0), "bias": Shard(0) if columns else Replicate()}
    wanted = Replicate() if columns else Shard(-1)

    def pieces(name: str, owner: nn.Module, mesh: DeviceMesh) -> None:
        for key, where in placed.items():
            tensor = getattr(owner, key)
            piece = distribute_tensor(tensor.detach(), mesh, [where], src_data_rank=None)
            owner.register_parameter(key, nn.Parameter(piece, tensor.requires_grad))

    def enter(owner: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return DTensor.from_local(inputs[0], mesh, [given], run_check=False).redistribute(placements=[wanted])

    def leave(owner: nn.Module, result: Any, mesh: DeviceMesh) -> Any:
        return result.redistribute(placements=[made]).to_local()

    distribute_module(module, mesh, pieces, enter, leave)


def _unknown(model: nn.Module, reason: str) -> CaptureError:
    remedy = "Give a factory that takes the mesh and returns a sharded model: def make(mesh), FILE.py:make."
    return CaptureError("SK401", f"{type(model).__name__} cannot be sharded: {reason}", remedy)
