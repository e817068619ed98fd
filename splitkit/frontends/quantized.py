"""Explain failed captures of models with weights packed by ``torch.ao.quantization``, which no op tracer accepts."""

from __future__ import annotations

from torch import nn

_PACKED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")  # packages: 2.11, 2.13, 2.15
_FLOAT = "capture the float model before quantize_dynamic or convert"

AS_MODULES = f'Use how="symbolic_trace", which keeps quantized modules whole; or {_FLOAT}.'
"""The remedy where ``symbolic_trace`` was tried and captures the model."""
WITHOUT_SIZES = (
    "Split torch.fx.symbolic_trace(model), which keeps quantized modules whole, by a policy that needs no sizes, such "
    f"as splitkit.policies.ByName; or {_FLOAT}."
)
"""The remedy where only torch's own tracer works: ``quantize_per_tensor`` has no sizes on fake tensors."""
_NO_GRADIENT = (
    "Packed weights have no gradient: capture the float model, or for quantization-aware training the result of "
    "prepare_qat, and convert it after training."
)


def quantized_part(model: nn.Module) -> str | None:
    """Return the name of the first submodule with packed weights, empty for the model itself; ``None`` if none has."""
    return next((name for name, module in model.named_modules() if type(module).__module__.startswith(_PACKED)), None)


def diagnose_packed(model: nn.Module, how: str) -> tuple[str, str] | None:
    """Return (reason, remedy) why ``how`` cannot capture a model with packed weights; ``None`` for other models."""
    name = quantized_part(model)
    if name is None:
        return None
    part = f"its part {name}" if name else "it"
    construct = f"{part} has packed weights (torch.ao.quantization), which only the module itself can read"
    return construct, _NO_GRADIENT if how == "dynamo" else WITHOUT_SIZES
