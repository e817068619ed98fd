"""The memory of an optimizer besides weights and gradients, found by stepping the real one on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from splitkit.checks import shown
from splitkit.errors import PolicyError
from splitkit.graph.byte_sizes import storage_nbytes
from splitkit.graph.symbols import plain_size, value_of
from splitkit.memory.measurement import measure_memory
from splitkit.training.flow import JointFlow

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

_BY_NAME: dict[str, Callable[..., torch.optim.Optimizer]] = {
    kind.__name__.lower(): kind
    for kind in (
        *(torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop),
        *(torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adadelta, torch.optim.Rprop),
    )
} | {"momentum": partial(torch.optim.SGD, momentum=0.9)}


@dataclass(frozen=True)
class OptimizerMemory:
    """The bytes that training takes besides forward and backward.

    Attributes:
        gradients: bytes of the gradients of trained parameters.
        state: bytes that the optimizer holds between its steps.
        temporary: further bytes that it takes while it steps.
    """

    gradients: int
    state: int
    temporary: int


def check_optimizer(owner: object, optimizer: object) -> None:
    """Raise SK302 unless ``optimizer`` is ``None``, a known name or a function that makes one."""
    known = optimizer is None or callable(optimizer)
    if not known and not (isinstance(optimizer, str) and optimizer in _BY_NAME):
        raise PolicyError(
            "SK302",
            f"{type(owner).__name__} has optimizer={shown(optimizer)}",
            f"Name one of {', '.join(_BY_NAME)}, or give a function of the parameters: "
            "lambda params: torch.optim.AdamW(params, foreach=False).",
        )


def optimizer_memory(flow: JointFlow, optimizer: str | MakeOptimizer | None) -> OptimizerMemory:
    """Return what training the parameters of a joint graph takes besides the step in the graph.

    A parameter here is an input that gets a gradient. The optimizer is made for parameters of the same shapes and
    dtypes on the meta device, and steps twice: its second step finds its state there, as all later ones do. On CUDA a
    named optimizer uses its ``foreach`` implementation, which is torch's default there.

    Args:
        flow: facts about the joint graph.
        optimizer: its name, a function from parameters to an optimizer, or ``None``.

    Raises:
        PolicyError: SK302 for an optimizer that cannot step on the meta device.
    """
    trained = _trained(flow)
    gradients = sum(plain_size(storage_nbytes(tensor), {}) for tensor in trained)
    if optimizer is None or not trained:
        return OptimizerMemory(gradients, 0, 0)
    on_cpu = all(tensor.device.type == "cpu" for tensor in trained)
    parameters = [_like(tensor) for tensor in trained]
    try:
        made = _made(optimizer, parameters, foreach=not on_cpu)
        made.step()
        measured = measure_memory(made.step)
    except Exception as error:
        raise PolicyError(
            "SK302",
            f"the optimizer {shown(optimizer)} cannot step on the meta device: {type(error).__name__}: {error}",
            f"Name one of {', '.join(_BY_NAME)}, or leave it out of Budget(card=...).",
        ) from error
    counted = (
        ("cpu", "meta") if on_cpu else ("meta",)
    )  # on CUDA the step counters, a scalar each, stay on the CPU and are not counted
    state = sum(t.untyped_storage().nbytes() for t in _state(made) if t.device.type in counted)
    peak = sum(measured.by_device.get(device, 0) for device in counted)
    held = sum(t.untyped_storage().nbytes() for p in parameters for t in (p, p.grad) if t is not None)
    return OptimizerMemory(gradients, state, max(0, peak - held - state))


def _trained(flow: JointFlow) -> list[Tensor]:
    """Return the inputs that get a gradient: backward returns one, or ``None``, for each input of forward in order."""
    primals = [n for n in flow.graph.find_nodes(op="placeholder") if n not in flow.backward_inputs]
    pairs = zip(primals, flow.gradients, strict=False)
    values = (value_of(primal) for primal, gradient in pairs if isinstance(gradient, Node))
    return [value for value in values if isinstance(value, Tensor)]


def _like(tensor: Tensor) -> nn.Parameter:
    shape = [plain_size(size, {}) for size in tensor.shape]
    parameter = nn.Parameter(torch.empty(shape, dtype=tensor.dtype, device="meta"))
    parameter.grad = torch.empty_like(parameter)
    return parameter


def _made(optimizer: str | MakeOptimizer, parameters: list[nn.Parameter], foreach: bool) -> torch.optim.Optimizer:
    if isinstance(optimizer, str):
        return _BY_NAME[optimizer](parameters, lr=1e-3, foreach=foreach)
    return optimizer(parameters)


def _state(optimizer: torch.optim.Optimizer) -> Sequence[Tensor]:
    held: Iterable[Any] = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in held if isinstance(value, Tensor)]
