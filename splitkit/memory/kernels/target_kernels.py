"""Run attention and recurrent layers on fake tensors as on another device: what autograd keeps depends on the kernel.

Torch chooses the kernel by the device of the tensors, so a graph from the CPU or from ``meta`` shows the wrong one::

    attention, 2,048 tokens        keeps besides query, key and value
    flash (half precision)         the result, 4 bytes a row and head for the softmax, the state of the dropout
    memory-efficient (float32)     the same
    math (meta; CPU with dropout)  the matrix of scores, several times

Here the device of the plan chooses: ``"cpu"``, or the compute capability of a CUDA device, ``"sm90"``. The kernel's own
op runs then, whose fake results and saved tensors torch defines. The rules are those of torch 2.13
(``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``, ``attention.cpp``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from splitkit import _torch
from splitkit.graph.node_values import op_name
from splitkit.memory.storage_watch import OpsSeen

CPU = "cpu"
_GROUPED_EFFICIENT = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)
"""Whether the memory-efficient kernel takes fewer heads of keys and values than of queries."""


class TargetKernels(TorchFunctionMode):
    """Within it, attention and recurrent layers on fake tensors run as on a device with these kernels.

    Args:
        kernels: `splitkit.costs.Device.kernels`; ``None`` for the kernels of the tensors' own device.
    """

    def __init__(self, kernels: str | None) -> None:
        super().__init__()
        self._kernels = kernels

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = _RUNS.get(func) if self._kernels else None
        return func(*args, **(kwargs or {})) if run is None else run(self._kernels, func, *args, **(kwargs or {}))


def own_kernels(tensors: Iterable[Tensor]) -> str | None:
    """Return the kernels of the device of tensors, the CPU's on ``meta``; ``None`` where torch chooses."""
    return CPU if {t.device.type for t in tensors} <= {CPU, "meta"} else None


def inexact(target: object, kernels: str | None) -> str:
    """Return why the bytes that a node saves are an upper bound, as far as its kernel is the reason; else ``""``.

    Args:
        target: the op, function or module that the node calls.
        kernels: as for `TargetKernels`.
    """
    if kernels in (None, CPU) or not (isinstance(target, nn.RNNBase) or op_name(target) in _RECURRENT):
        return ""
    return "cuDNN does not say how much it reserves; counted is what its steps save one by one"


def attention(kernels: str, run: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Return ``scaled_dot_product_attention(*args, **kwargs)``, computed by the kernel that torch chooses on a device.

    Args:
        kernels: the device's.
        run: the function or op that was called, which chooses by the device of the tensors.
        args: its arguments.
        kwargs: its keyword arguments.
    """
    call = _Attention(*args, **kwargs)
    if kernels == CPU and call.query.device.type == CPU:
        return run(*args, **kwargs)
    call = _Attention(**{name: _cast(value) for name, value in vars(call).items()})
    backend = call.on_cpu() if kernels == CPU else call.on_cuda(int(kernels.removeprefix("sm")))
    if backend is SDPBackend.MATH:
        with sdpa_kernel(backend):
            return run(**vars(call))
    return call.fused(backend, kernels == CPU)


@dataclass(frozen=True)
class _Attention:
    """A call of ``scaled_dot_product_attention``."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def _inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    @property
    def _trains(self) -> bool:
        return torch.is_grad_enabled() and any(t.requires_grad for t in self._inputs)

    def on_cpu(self) -> SDPBackend:
        """Return what torch chooses on the CPU, found by a call on fake tensors that lie there."""
        with _torch.without_tracing(), OpsSeen() as seen:
            there: dict[str, Any] = {n: _on_cpu(v) if isinstance(v, Tensor) else v for n, v in vars(self).items()}
            functional.scaled_dot_product_attention(**there)
        fused = any("flash" in op_name(op) for op in seen.ops)
        return SDPBackend.FLASH_ATTENTION if fused else SDPBackend.MATH

    def on_cuda(self, capability: int) -> SDPBackend:
        """Return what torch chooses on CUDA: the first kernel in its order that can compute the call."""
        half = self.query.dtype == torch.float16 or (self.query.dtype == torch.bfloat16 and capability >= 80)
        allowed: Any = torch.backends.cuda  # untyped
        if not self._has_kernels():
            return SDPBackend.MATH
        if allowed.cudnn_sdp_enabled() and half and capability // 10 in (9, 10) and self._suits_cudnn():
            return SDPBackend.CUDNN_ATTENTION
        if allowed.flash_sdp_enabled() and half and capability >= 80 and self._suits_flash(capability):
            return SDPBackend.FLASH_ATTENTION
        step = 8 if half else 4 if capability >= 80 else 1  # elements between the addresses that it can load from
        aligned = self.query.shape[-1] % step == self.value.shape[-1] % step == 0
        single = self.query.dtype == torch.float32
        grouped = self.enable_gqa and not _GROUPED_EFFICIENT
        efficient = allowed.mem_efficient_sdp_enabled() and (half or single) and aligned and not grouped
        return SDPBackend.EFFICIENT_ATTENTION if efficient else SDPBackend.MATH

    def _has_kernels(self) -> bool:
        """Return whether shapes and strides are such as all fused kernels need."""
        shapes = [t.shape for t in self._inputs]
        if any(len(s) != 4 or s[0] != shapes[0][0] or 0 in s for s in shapes) or shapes[0][-1] != shapes[1][-1]:
            return False
        heads = {s[1] for s in (shapes[1:] if self.enable_gqa else shapes)}
        return len(heads) == 1 and all(t.stride(-1) == 1 or t.shape[-1] == 1 for t in self._inputs)

    def _suits_cudnn(self) -> bool:
        width, wide, mask = self.query.shape[-1], self.value.shape[-1], self.attn_mask
        drops = self.dropout_p > 0
        return (
            not (mask is not None and mask.requires_grad)
            and (self.dropout_p * 16).is_integer()
            and self.key.shape[-2] != 1
            and not (drops and self.query.shape[-2] == 1)
            and width % 8 == wide % 8 == 0
            and (max(width, wide) <= 128 or (width, wide) == (192, 128))
        )

    def _suits_flash(self, capability: int) -> bool:
        width, length = self.query.shape[-1], self.query.shape[-2]
        # On these devices, backward of wide heads needs more shared memory than there is.
        small = self._trains and capability in (*range(86, 90), 120, 121)
        fits = not small or width <= 192 or (width > 224 and not self.dropout_p)
        square = not self.is_causal or length == self.key.shape[-2]
        return self.attn_mask is None and width == self.value.shape[-1] <= 256 and fits and square

    def fused(self, backend: SDPBackend, on_cpu: bool) -> Tensor:
        """Return the result of a fused kernel."""
        mask, options, width = self._added(), {"scale": self.scale}, self.value.shape[-1]
        drop = (self.dropout_p, self.is_causal)
        made: Any
        if on_cpu:
            made = _op("flash_attention_for_cpu")(*self._inputs, *drop, attn_mask=mask, **options)
        elif backend is SDPBackend.FLASH_ATTENTION:
            options["scale"] = self.scale or width**-0.5
            padded = [functional.pad(t, (0, -width % 8)) if width % 8 else t for t in self._inputs]
            made = _op("flash_attention")(*padded, *drop, **options)
        else:
            efficient = backend is SDPBackend.EFFICIENT_ATTENTION
            if mask is not None:
                mask = _aligned(mask) if efficient else mask
                mask = mask.expand(*self.query.shape[:-1], self.key.shape[-2])
            op = _op("efficient_attention" if efficient else "cudnn_attention")
            made = op(*self._inputs, mask, self._trains, *drop, **options)
        result: Tensor = made[0]
        return result if result.shape[-1] == width else result[..., :width]

    def _added(self) -> Tensor | None:
        """Return the mask as numbers to add to the scores, which the kernels read."""
        mask = self.attn_mask
        if mask is None or mask.dtype != torch.bool:
            return mask
        return torch.zeros_like(mask, dtype=self.query.dtype).masked_fill_(mask.logical_not(), -inf)


def _op(name: str) -> Any:
    return getattr(torch.ops.aten, f"_scaled_dot_product_{name}")


def _cast(given: Any) -> Any:
    """Return an argument as autocast passes it to attention."""
    if not isinstance(given, Tensor) or not given.is_floating_point() or given.dtype == torch.float64:
        return given
    device = given.device.type
    active = device in ("cpu", "cuda") and torch.is_autocast_enabled(device)
    return given.to(torch.get_autocast_dtype(device)) if active else given


def _aligned(mask: Tensor) -> Tensor:
    """Return a mask as the memory-efficient kernel reads it: its rows start at multiples of 8 elements."""
    if mask.stride(-1) == 1 and not any(step % 8 for step in mask.stride()[:-1]):
        return mask
    length = mask.shape[-1]
    return functional.pad(mask, (0, 8 - length % 8))[..., :length]


def _on_cpu(tensor: Tensor) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=CPU)
    return made.requires_grad_(tensor.requires_grad)


def _recurrent(kernels: str, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a recurrent layer: on the CPU as there, else step by step, as an upper bound of what cuDNN keeps."""
    if kernels != CPU:
        with _torch.without_onednn():
            return run(*args, **kwargs)
    with _Results(kernels):
        is_lstm = run in (torch.lstm, torch.ops.aten.lstm.input)
        return _lstm_by_layers(*args) if is_lstm and _suits_onednn(*args) else run(*args, **kwargs)


def _suits_onednn(x: Tensor, states: Any, weights: Sequence[Tensor], biased: Any, *args: Any) -> bool:
    """Return whether oneDNN computes an LSTM on the CPU: in these dtypes, and without projections."""
    enabled: Any = torch.backends.mkldnn.enabled
    plain = enabled and isinstance(states, list | tuple) and x.dtype in (torch.float32, torch.bfloat16)
    return plain and len(weights) == args[0] * (1 + args[3]) * (4 if biased else 2)


def _lstm_by_layers(
    x: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    biased: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of ``torch.lstm``, one oneDNN kernel for each layer and direction, as on the CPU."""
    made = x.transpose(0, 1) if batch_first else x
    ends: list[Any] = []
    for layer in range(layers):
        both = []
        for back in range(1 + bidirectional):
            i, each = layer * (1 + bidirectional) + back, 4 if biased else 2
            own = list(weights[i * each : (i + 1) * each])
            own += [torch.zeros_like(weight) for weight in own[: 4 - each]]
            options = (bool(back), (), 2, own[1].shape[1], layers, biased, bidirectional, False, train)
            start = states[0][i], states[1][i]
            out, *end, _ = torch.ops.aten.mkldnn_rnn_layer(made.contiguous(), *own, *start, *options)
            both.append(out)
            ends.append(end)
        made = torch.cat(both, -1) if bidirectional else both[0]
        made = functional.dropout(made, dropout) if dropout and train and layer < layers - 1 else made
    hidden, cells = (torch.stack(each) for each in zip(*ends, strict=True))
    return made.transpose(0, 1) if batch_first else made, hidden, cells


def _norm(kernels: str, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a norm, which saves a mean and a deviation for each row or channel."""
    with _Results(kernels):
        return run(*args, **kwargs)


class _Results(_torch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Corrects fake results: the bytes of the workspace of oneDNN's LSTM, and the dtype of the statistics of norms."""

    def __init__(self, kernels: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kernels = kernels

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if op_name(func) in ("native_layer_norm", "native_group_norm", "native_batch_norm"):
            weights = [arg.dtype for arg in args[1:3] if isinstance(arg, Tensor)]
            single = self._kernels != CPU and args[0].dtype.itemsize == 2
            dtype = torch.float32 if single else (weights or [args[0].dtype])[0]
            unread = op_name(func) == "native_batch_norm" and not args[5]  # in eval mode it reads those of training
            return (made[0], *(one.new_empty(0) if unread else one.to(dtype) for one in made[1:]))
        if func is not torch.ops.aten.mkldnn_rnn_layer.default:
            return made
        steps, batch, features = args[0].shape
        return (*made[:3], made[3].new_empty(lstm_workspace(steps, batch, features, args[5].shape[-1])))


def lstm_workspace(steps: int, batch: int, features: int, hidden: int) -> int:
    """Return the bytes that oneDNN keeps of one layer and direction of an LSTM in float32; at most, in bfloat16.

    These are gates and cells of each step, and states between the steps, each from a new page
    (``set_workspace_sizes`` in oneDNN's ``rnn_utils.hpp``).
    """
    wide, states = _leading(max(features, hidden)), 2 * (steps + 1) * batch
    rows = steps * batch
    elements = (rows * _leading(4 * hidden), rows * _leading(hidden), *[states * wide] * 3, *[states * hidden] * 2)
    return sum(-(-4 * n // _PAGE) * _PAGE for n in elements)


_PAGE = 4096  # bytes


def _leading(size: int) -> int:
    """Return the elements between rows: whole cache lines, and no multiple of 256, which would share cache sets."""
    lines = -(-size // 16) * 16
    return lines + 16 if lines % 256 == 0 else lines


_NORMS = ("layer_norm", "group_norm", "batch_norm")
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_RUNS: Mapping[Any, Callable[..., Any]] = {
    functional.scaled_dot_product_attention: attention,
    torch.ops.aten.scaled_dot_product_attention.default: attention,
    **{getattr(place, name): _norm for name in _NORMS for place in (functional, torch)},
    **{getattr(torch.ops.aten, name).default: _norm for name in _NORMS},
    **{getattr(torch, name): _recurrent for name in _RECURRENT},
    **{getattr(getattr(torch.ops.aten, name), kind): _recurrent for name in _RECURRENT for kind in ("input", "data")},
}
