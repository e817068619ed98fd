"""Refuse models that cannot be captured as a joint graph, where the graph would compute something else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx, nn

from splitkit.errors import CaptureError
from splitkit.frontends import aot
from splitkit.frontends.capture.first_call import outputs_of_call
from splitkit.frontends.joint.joint_signature import JointSignature
from splitkit.frontends.joint.train_step import Loss
from splitkit.graph.losses import GIVE, loss_of, no_loss
from splitkit.graph.storages import storage_key


def check_model(model: nn.Module, loss: object) -> None:
    """Refuse models whose joint graph would differ from the model."""
    if isinstance(loss, nn.Module) and {*loss.parameters()} - {*model.parameters()}:
        raise CaptureError("SK401", "the loss has parameters of its own", "Make the loss a submodule of the model.")
    # torch decomposes an RNN without the dropout between its layers (`_rnn_helper`: 2.11, 2.13, 2.15)
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase) and module.training and module.dropout and module.num_layers > 1:
            raise CaptureError(
                "SK401",
                f"torch loses the dropout between the layers of {name or 'the model'}, an {type(module).__name__}",
                "Set its dropout to 0, or write one module per layer with torch.nn.Dropout between them.",
                [name],
            )


def check_graph(model: nn.Module, graph: fx.Graph, signature: JointSignature) -> None:
    """Refuse a joint graph whose loss is not a real scalar, or whose inputs are not all plain tensors."""
    outputs: Any = graph.output_node().args[0]
    value = outputs[signature.loss].meta["val"]
    if tuple(value.shape) and value.numel() != 1:
        raise no_scalar_error(model, f"has the shape {tuple(value.shape)}")
    if value.is_complex():
        raise no_scalar_error(model, "is complex")
    if pieces := [n.name for n in graph.find_nodes(op="placeholder") if aot.is_piece(n)]:
        raise CaptureError(
            "SK401",
            f"{type(model).__name__} has tensor subclasses, which a joint graph takes apart",
            "Train it with splitkit.apply or splitkit.backend, which put them back together.",
            pieces,
        )
    known = {*signature.parameters, *signature.buffers, *signature.inputs, *signature.tangents}
    if others := [n.name for n in graph.find_nodes(op="placeholder") if n.name not in known]:
        raise _shared_memory_error(model, others)
    if not signature.tangents:
        raise CaptureError(
            "SK401",
            f"the loss of {type(model).__name__} does not depend on any parameter or input that requires grad",
            "Call requires_grad_(), or give a loss that depends on the parameters.",
        )


def check_inputs(model: nn.Module, signature: JointSignature, leaves: list[Any]) -> None:
    """Refuse writes to an input that is given twice: a write to one would not reach the other in the graph."""
    memory = Counter(storage_key(leaf) for leaf in leaves if isinstance(leaf, Tensor))
    inputs = [name for name in signature.updates.values() if name in signature.inputs]
    if twice := [name for name in inputs if memory[storage_key(leaves[signature.inputs[name]])] > 1]:
        raise _shared_memory_error(model, twice)


def checked_loss(
    output: Any, loss: Loss | None, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor:
    """Return the loss in an output of a model, by ``loss`` or, without one, by `loss_of`; refuse an output without."""
    value = loss_of(output) if loss is None else loss(output)
    if value is None:
        raise no_loss_error(model, args, kwargs)
    return value


def no_loss_error(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CaptureError:
    """Return the error for a model that returns no loss, with a list of its outputs if it runs."""
    try:
        reason = no_loss(outputs_of_call(model, args, kwargs))
    except Exception:  # the model itself may fail
        reason = "the model returns no loss"
    reason = f"{type(model).__name__} cannot be captured with its gradients: {reason}"
    remedy = f"Give one: capture_joint(model, ..., {GIVE}) or --loss cross_entropy; or return it as `loss`."
    return CaptureError("SK401", reason, remedy)


def no_scalar_error(model: nn.Module, what: str) -> CaptureError:
    """Return the error for a loss that is not a real scalar tensor."""
    return CaptureError(
        "SK401",
        f"the loss of {type(model).__name__} {what}",
        "Use capture_joint(..., loss=lambda output: ...) with a function that returns a real scalar tensor.",
    )


def _shared_memory_error(model: nn.Module, inputs: list[str]) -> CaptureError:
    return CaptureError(
        "SK401",
        f"{type(model).__name__} writes to inputs that share memory",
        "Give inputs that do not share memory, or train it with splitkit.apply or splitkit.backend.",
        inputs,
    )
