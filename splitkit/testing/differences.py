"""The differences of two tensors or objects: how large they are, and whether rounding explains them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from splitkit import _torch
from splitkit._torch import pytree
from splitkit.errors import GraphError
from splitkit.frontends.input_copies import copies_with_leaves
from splitkit.frontends.module_state import made_by_hooks, write_back
from splitkit.frontends.output_classes import held_values, named_leaves
from splitkit.graph.ambient import SETTINGS
from splitkit.graph.losses import loss_of, named_loss
from splitkit.graph.storages import parameters_and_buffers, require_made, storage_key

GRADIENT_TOLERANCE = 1e-4
"""Largest difference of a gradient, relative to its own largest entry, that counts as rounding, since summing the same
terms in another order rounds differently."""

NOISE = 3e-7
"""Allowed difference of a gradient that would be zero without rounding (the key bias of attention, a bias before batch
norm), relative to the largest gradient of the model. Such a gradient has no scale of its own. Measured in float32 on
small batches: it is up to 6e-7 and differs by up to 2e-7. The allowance holds for gradients up to ten times this."""

_MISSING = object()


@dataclass(frozen=True)
class Difference:
    """One tensor of the reference compared with the same tensor of the candidate.

    Attributes:
        name: ``output[0]``, ``gradient of transformer.wte.weight``, ``buffer running_mean`` ...
        largest: largest absolute difference; ``inf`` if one tensor is missing, has another shape, dtype or
            ``requires_grad``, or is infinite or NaN in other places.
        scale: largest finite absolute entry of the reference.
        bitwise: whether every bit is equal.
    """

    name: str
    largest: float
    scale: float
    bitwise: bool

    @property
    def relative(self) -> float:
        """``largest`` divided by ``scale``."""
        return self.largest / self.scale if self.scale else self.largest


def is_rounding(d: Difference, tolerance: float, noise: float) -> bool:
    """Return whether a tensor differs by no more than ``tolerance`` of its scale, or than ``noise`` if it is tiny."""
    return d.bitwise or d.largest <= max(tolerance * d.scale, noise if d.scale <= 10 * noise else 0.0)


def differences(first: Mapping[str, Any], second: Mapping[str, Any], title: str) -> tuple[Difference, ...]:
    """Return the differences of tensors or objects of the same names; ``title`` makes their names of these."""
    names = dict.fromkeys([*first, *second])
    return tuple(measure_difference(title.format(n), first.get(n, _MISSING), second.get(n, _MISSING)) for n in names)


def measure_difference(name: str, a: Any, b: Any) -> Difference:
    """Return the difference of two tensors or objects; it is infinite if they are of different kinds."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        equal = _equal(a, b)
        return Difference(name, 0.0 if equal else math.inf, 0.0, equal)
    (where, x), (elsewhere, y) = layout_and_entries(a.detach()), layout_and_entries(b.detach())
    kinds = [(t.layout, t.dtype, t.device, t.requires_grad) for t in (a, b)]
    if kinds[0] != kinds[1] or where != elsewhere:
        return Difference(name, math.inf, 0.0, False)
    wide = torch.complex128 if x.is_complex() else torch.float64
    x, y = x.to(wide), y.to(wide)
    equal = bitwise(a, b)
    # infinities of equal sign and NaNs at the same place count as no difference
    same = (x == y) | (x.isnan() & y.isnan())
    apart = (x - y).abs().nan_to_num(math.inf, math.inf).masked_fill(same, 0.0)
    scale = x.abs().masked_fill(~x.isfinite(), 0.0)
    return Difference(name, _largest(apart) if not equal else 0.0, _largest(scale), equal)


def _largest(x: Tensor) -> float:
    return float(x.max()) if x.numel() else 0.0


def _equal(a: Any, b: Any) -> bool:
    """Return whether two objects are equal. NaN equals NaN; objects that cannot be compared differ."""
    if a is b or type(a) is not type(b):
        return a is b
    try:
        if isinstance(a, np.ndarray):
            same = np.array_equal(a, b) if a.dtype.hasobject else a.tobytes() == b.tobytes()
            return bool(same and a.dtype == b.dtype and a.shape == b.shape)
        return bool(a == b or (a != a and b != b))
    except Exception:
        return False


# Run a module once, forward and backward, from a known state; keep the results and restore the state.


_AUTOCAST_DEVICES = ("cpu", "cuda")

Saved = Mapping[str, tuple[Tensor, Tensor]]
"""Name of a parameter, buffer or other tensor of a module -> the tensor, and a copy of what it held before the run."""


@dataclass(frozen=True)
class Trial:
    """The results of a run.

    Attributes:
        outputs: path of a leaf of the output -> the leaf.
        structure: pytree specifications of the output and of objects inside it.
        shared: path of a leaf -> names of the inputs, parameters and buffers that it shares memory with.
        gradients: name of a parameter or input -> its gradient, where there is one.
        changed: name -> value after the run, for parameters, buffers and inputs that the run wrote to.
        state: name -> value after the run, for all parameters, buffers and inputs.
        ambient: the RNG state, settings (grad mode ...) and autocast state after the run.
        loss: the model's own loss (`splitkit.graph.losses`), or the value that backward started from.
        loss_is_models: whether the loss is the model's own.
        no_backward: why backward from the weighted sum of the outputs failed; empty if it did not.
    """

    outputs: Mapping[str, Any]
    structure: list[Any]
    shared: Mapping[str, frozenset[str]]
    gradients: Mapping[str, Tensor]
    changed: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    ambient: Mapping[str, Any]
    loss: float | None
    loss_is_models: bool
    no_backward: str = ""


def trial(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    seed: int,
    loss: Callable[[Any], Tensor] | None,
    names: Mapping[str, str],
) -> Trial:
    """Run ``module`` on copies of the inputs; ``names`` maps its parameters and buffers to names in the results."""
    held, inputs = parameters_and_buffers(module), TrialInputs((args, kwargs))
    require_made(held)
    if lacking := [name for name, tensor in {**held, **inputs.values}.items() if tensor.is_meta]:
        remedy = "Make the model and its inputs outside of torch.device('meta'), then capture and split again."
        raise GraphError("SK112", f"{lacking[0]} is on meta and has no data to compare", remedy, lacking)
    with untouched(module) as saved, torch.random.fork_rng():
        torch.manual_seed(seed)
        ambient = _ambient()
        output = module(*inputs.rebuilt[0], **inputs.rebuilt[1])
        # Backward of the sum must not depend on a state that forward left changed; it is compared on its own.
        left = _ambient()
        _set_ambient(ambient)
        leaves, structure = flattened_output(output)
        outputs = {name: snapshot(leaf) for name, leaf in leaves.items()}
        titles = {n: f"value of {names.get(n, n)}" for n in saved}
        shared = _shared(leaves, {titles[n]: t for n, (t, _) in saved.items()} | inputs.passed)
        own = loss_of(output) if loss is None else None
        named = named_loss(output) if loss is None else None
        value = loss(output) if loss else _weighted_sum(leaves) if named is None else named
        no_backward = _backward(value, is_ours=named is None and loss is None)
        gradients = {} if no_backward else _gradients(saved, inputs.asked, names)
        now = dict(named_tensors(module))
        tensors = {titles[n]: now.get(n, t) for n, (t, _) in saved.items()} | inputs.passed
        before = {titles[n]: value for n, (_, value) in saved.items()} | inputs.values
        changed = {name: t.detach().clone() for name, t in tensors.items() if not bitwise(before[name], t)}
        # an input that only the model makes require grad counts as it was given
        tensors |= {name: t.detach() for name, t in inputs.passed.items() if t.is_leaf}
    shown = value if own is None else own
    number = None if shown is None else float(shown.detach())
    state = {**tensors, **changed}
    return Trial(outputs, structure, shared, gradients, changed, state, left, number, own is not None, no_backward)


def _backward(value: object, is_ours: bool) -> str:
    """Run backward, and return why it fails from our own sum of outputs.

    Such a failure is not an error of the model: nobody may need gradients of all of its outputs, and in eval mode it
    may overwrite state that these gradients need.
    """
    try:
        if isinstance(value, Tensor) and value.requires_grad:
            value.backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if not is_ours:
            raise
        return str(error).splitlines()[0]
    return ""


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters, buffers and tensors that are plain attributes, under each of their names."""
    yield from parameters_and_buffers(module).items()
    for path, owner in module.named_modules(remove_duplicate=False):
        again = made_by_hooks(owner)
        plain = ((n, value) for n, value in vars(owner).items() if isinstance(value, Tensor) and n not in again)
        yield from ((f"{path}.{name}" if path else name, value) for name, value in plain)


def names_in(original: nn.Module, other: nn.Module, renamed: Mapping[str, str]) -> dict[str, str]:
    """Return name in ``other`` -> name in ``original`` of the same tensor, else the renamed or the same name.

    A tensor with several names (tied weights) goes by its first name.
    """
    first: dict[Tensor, str] = {}
    canonical: dict[str, str] = {}
    for name, tensor in named_tensors(original):
        canonical[name] = first.setdefault(tensor, name)
    return {n: first.get(t) or canonical.get(renamed.get(n, n), renamed.get(n, n)) for n, t in named_tensors(other)}


def layout_and_entries(tensor: Tensor) -> tuple[object, Tensor]:
    """Return the positions of the entries of a tensor of any layout, and the entries as a strided tensor."""
    if tensor.is_nested:
        parts = tensor.unbind()
        return [p.shape for p in parts], torch.cat([p.reshape(-1) for p in parts])
    if tensor.layout == torch.sparse_coo:
        whole = tensor.coalesce()
        return (tensor.shape, whole.indices().tolist()), whole.values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return (tensor.shape, tensor.crow_indices().tolist(), tensor.col_indices().tolist()), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return (tensor.shape, tensor.ccol_indices().tolist(), tensor.row_indices().tolist()), tensor.values()
    return tensor.shape, tensor.to_dense() if tensor.is_mkldnn else tensor.resolve_conj().resolve_neg()


def bitwise(a: Tensor, b: Tensor) -> bool:
    """Return whether all bits are equal, so that equal NaNs are equal."""
    if a.dtype != b.dtype or a.layout != b.layout:
        return False
    (where, x), (elsewhere, y) = layout_and_entries(a.detach()), layout_and_entries(b.detach())
    if where != elsewhere:
        return False
    flat = (t.contiguous().reshape(-1).view(torch.uint8) for t in (x, y))
    return torch.equal(*flat)


class TrialInputs:
    """Copies of the inputs, which overlap in memory as the inputs do.

    A copy that requires grad is passed on as a non-leaf, so that models which write to their inputs still run.

    Attributes:
        asked: name -> tensor that receives a gradient; inputs that only the model makes require grad are left out.
        passed: name -> tensor that the model sees.
        values: name -> the caller's own tensor, with the value before the run.
        rebuilt: the copies in the original structure.
    """

    def __init__(self, inputs: Any) -> None:
        flat, spec = pytree.tree_flatten_with_path(inputs)
        self.asked: dict[str, Tensor] = {}
        self.passed: dict[str, Tensor] = {}
        self.values: dict[str, Tensor] = {}
        rebuilt: list[Any] = []
        copies = copies_with_leaves(value for _, value in flat if isinstance(value, Tensor))
        for path, value in flat:
            if isinstance(value, Tensor):
                name = f"input {pytree.keystr(path)}"
                self.values[name] = value
                if value.requires_grad:
                    self.asked[name] = copies[id(value)].leaf
                value = self.passed[name] = copies[id(value)].given
            else:
                value = _copied(value)
            rebuilt.append(value)
        self.rebuilt = pytree.tree_unflatten(rebuilt, spec)


def _copied(value: Any) -> Any:
    """Return a copy of an array or object among the inputs, which a run may change; itself if it cannot be copied."""
    try:
        return copy.deepcopy(value)
    except Exception:  # classes of users may raise anything
        return value


@contextmanager
def casting_anew() -> Iterator[None]:
    """Turn autocast's cache of casts off inside the block, also for code that turns it on."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with patch.object(torch, "set_autocast_cache_enabled", lambda enabled: None):
            yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextmanager
def untouched(module: nn.Module) -> Iterator[Saved]:
    """Save all tensors of the module, remove their gradients, and restore everything at the end."""
    tensors = dict(named_tensors(module))
    values = {t: t.detach().clone() for t in tensors.values()}
    gradients = {t: t.grad for t in values if t.is_leaf}
    ambient = _ambient()
    for leaf in gradients:
        leaf.grad = None
    try:
        yield {name: (t, values[t]) for name, t in tensors.items()}
    finally:
        _set_ambient(ambient)
        for name, tensor in tensors.items():
            path, _, last = name.rpartition(".")
            owner = module.get_submodule(path)
            if getattr(owner, last, None) is not tensor:  # rebound
                setattr(owner, last, tensor)
        with torch.no_grad():
            for tensor, value in values.items():
                if tensor in gradients and tensor.grad_fn is not None and not _torch.is_view(tensor):
                    tensor.detach_()  # a buffer that the model wrote a differentiable value into
                if not bitwise(tensor, value):
                    write_back(tensor, value)
        for leaf, gradient in gradients.items():
            leaf.grad = gradient


def _ambient() -> dict[str, Any]:
    """Return the global state that a graph may leave changed for its caller."""
    state: dict[str, Any] = {"random state": torch.get_rng_state().numpy().tobytes()}
    if torch.cuda.is_available():
        for number, cuda in enumerate(torch.cuda.get_rng_state_all()):
            state[f"random state of cuda:{number}"] = cuda.numpy().tobytes()
    state |= {name: setting.get() for name, setting in SETTINGS.items()}
    state["default dtype"] = torch.get_default_dtype()
    for device in _AUTOCAST_DEVICES:
        state[f"autocast on {device}"] = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
    return state


def _set_ambient(state: Mapping[str, Any]) -> None:
    """Restore the global state except the RNG state."""
    torch.set_default_dtype(state["default dtype"])
    for name, setting in SETTINGS.items():
        setting.set(state[name])
    for device in _AUTOCAST_DEVICES:
        enabled, dtype = state[f"autocast on {device}"]
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def flattened_output(output: Any, path: str = "") -> tuple[dict[str, Any], list[Any]]:
    """Return path -> leaf of an output, and its pytree specs; objects that pytree does not know are flattened too."""
    flat, spec = named_leaves(output)
    leaves, structure = dict[str, Any](), list[Any]([spec])
    for where, leaf in flat:
        held = held_values(leaf)
        if held is None:
            leaves[path + where] = leaf
            continue
        inner, specs = flattened_output(held, path + where)
        leaves |= inner
        structure += [type(leaf), *specs]
    return leaves, structure


def snapshot(leaf: Any) -> Any:
    """Return a copy of a tensor or array, whose memory may be restored after the run; other leaves as they are."""
    if isinstance(leaf, Tensor):
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _shared(leaves: Mapping[str, Any], held: Mapping[str, Tensor]) -> dict[str, frozenset[str]]:
    """Return path of a leaf -> names of the tensors in ``held`` that share its memory.

    Outputs that share memory with each other are not compared: a plan with copies may give each its own memory.
    """
    holders: dict[Any, set[str]] = {}
    for name, tensor in held.items():
        holders.setdefault(storage_key(tensor), set()).add(name)
    tensors = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, Tensor)}
    return {name: frozenset(holders.get(storage_key(leaf), ())) for name, leaf in tensors.items()}


def _weighted_sum(leaves: Mapping[str, Any]) -> Tensor | None:
    """Return a scalar in which each entry of an output has its own weight, so that gradients do not cancel."""
    total: Tensor | None = None
    for leaf in leaves.values():
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            _, value = layout_and_entries(leaf)
            real = torch.view_as_real(value) if value.is_complex() else value
            # cos(0), cos(1), ... differ for all entries and do not sum to a regular value
            wide = real.float() if real.dtype.itemsize < 4 else real
            weights = torch.cos(torch.arange(real.numel(), dtype=wide.dtype, device=real.device))
            term = (wide.flatten() * weights).sum()
            total = term if total is None else total + term
    return total


def _gradients(saved: Saved, inputs: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Return name -> gradient; a parameter with several names counts once."""
    tensors = {**inputs, **{names.get(n, n): t for n, (t, _) in saved.items()}}
    found = {name: t.grad for name, t in tensors.items() if t.is_leaf and t.requires_grad}
    return {name: gradient for name, gradient in found.items() if gradient is not None}
