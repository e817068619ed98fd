"""What cannot be captured as a joint graph: clear refusals, instead of a graph that computes something else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx, nn

from splitkit.errors import CaptureError
from splitkit.frontends import aot
from splitkit.frontends.firstcall import outputs_of_call
from splitkit.frontends.jointsignature import JointSignature
from splitkit.graph.storages import storage_key
from splitkit.losses import GIVE, no_loss


def check_model(model: nn.Module, loss: object) -> None:
    """Refuse what would be captured otherwise than it runs."""
    if isinstance(loss, nn.Module) and {*loss.parameters()} - {*model.parameters()}:
        raise CaptureError("SK401", "the loss has parameters of its own", "Make it a part of the model.")
    # torch takes an RNN apart without the dropout between its layers (`_rnn_helper`: 2.11, 2.13, 2.15)
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase) and module.training and module.dropout and module.num_layers > 1:
            raise CaptureError(
                "SK401",
                f"torch loses the dropout between the layers of {name or 'the model'}, an {type(module).__name__}",
                "Set its dropout to 0, or write one module a layer with torch.nn.Dropout between them.",
                [name],
            )


def check_graph(model: nn.Module, graph: fx.Graph, signature: JointSignature) -> None:
    """Refuse a joint graph that is none of a scalar loss and plain tensors."""
    outputs: Any = graph.output_node().args[0]
    value = outputs[signature.loss].meta["val"]
    if tuple(value.shape) and value.numel() != 1:
        raise no_scalar(model, f"has the shape {tuple(value.shape)}")
    if value.is_complex():
        raise no_scalar(model, "is complex")
    if pieces := [n.name for n in graph.find_nodes(op="placeholder") if aot.is_piece(n)]:
        raise CaptureError(
            "SK401",
            f"{type(model).__name__} has tensor subclasses, which come apart in a joint graph",
            "Train it with splitkit.apply or splitkit.backend, which put them together again.",
            pieces,
        )
    known = {*signature.parameters, *signature.buffers, *signature.inputs, *signature.tangents}
    if others := [n.name for n in graph.find_nodes(op="placeholder") if n.name not in known]:
        raise _shared(model, others)
    if not signature.tangents:
        raise CaptureError(
            "SK401",
            f"the loss of {type(model).__name__} depends on no parameter or input that requires grad",
            "Call requires_grad_(), or give a loss that depends on the parameters.",
        )


def check_inputs(model: nn.Module, signature: JointSignature, leaves: list[Any]) -> None:
    """A tensor that is given twice is captured as two: a write to one would not reach the other."""
    memory = Counter(storage_key(leaf) for leaf in leaves if isinstance(leaf, Tensor))
    inputs = [name for name in signature.updates.values() if name in signature.inputs]
    if twice := [name for name in inputs if memory[storage_key(leaves[signature.inputs[name]])] > 1]:
        raise _shared(model, twice)


def without_loss(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CaptureError:
    """The error for a model that returns no loss, with what it returns, as far as it runs."""
    try:
        reason = no_loss(outputs_of_call(model, args, kwargs))
    except Exception:  # of the model's own
        reason = "the model returns no loss"
    remedy = f"Give one: capture_joint(model, ..., {GIVE}), or return it as `loss`."
    return CaptureError("SK401", f"{type(model).__name__} cannot be captured with its gradients: {reason}", remedy)


def no_scalar(model: nn.Module, what: str) -> CaptureError:
    """The error for a loss that is no scalar."""
    return CaptureError(
        "SK401",
        f"the loss of {type(model).__name__} {what}",
        "Give capture_joint(..., loss=lambda output: ...) that returns a real scalar tensor.",
    )


def _shared(model: nn.Module, inputs: list[str]) -> CaptureError:
    return CaptureError(
        "SK401",
        f"{type(model).__name__} writes to inputs that share memory",
        "Give inputs that do not, or train it with splitkit.apply or splitkit.backend.",
        inputs,
    )
