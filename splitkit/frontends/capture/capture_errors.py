"""Explain why a model cannot be captured: the line of the user's code, the construct, and the remedy."""

from __future__ import annotations

import linecache
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import fx, nn
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode

from splitkit import _torch
from splitkit._torch import pytree
from splitkit.errors import CaptureError, SplitError, listed
from splitkit.frontends.capture.first_call import are_real, outputs_of_call
from splitkit.graph.storages import attribute, parameters_and_buffers

_TORCH = Path(torch.__file__).parent
# splitkit.testing is left out: it has models, whose lines are shown.
_OURS = tuple(path for path in Path(__file__).parents[2].iterdir() if path.name != "testing")
_PYTHON, _SITE = Path(traceback.__file__).parent, Path(sysconfig.get_path("purelib"))  # lines of Python itself

# Pieces of torch's messages in lower case (2.11, 2.13, 2.15), the construct that causes them, and the remedy.
_INSTEAD_OF_DATA = (
    "Rebind the name (z = y instead of z.data = y); to change a parameter, buffer or input in place, write "
    "p.copy_(y) under torch.no_grad()."
)
_CONSTRUCTS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("failed to mutate tensor data attribute", "set_ on a graph input"),
        "the model assigns to .data of a tensor",
        _INSTEAD_OF_DATA,
    ),
    (
        (
            "data-dependent",
            "data dependent",
            "datadependent",
            "dynamicoutputshape",
            "unbacked",
            "guardondatadependent",
            "control flow",
            ".item()",
        ),
        "Python code branches on a value that depends on the data",
        "Write the choice with torch.cond or torch.where; state bounds of a size with torch._check; or compute it "
        "outside the model and pass it in.",
    ),
    (
        ("one of the outputs with type", "unsupported output", "not supported output", "in output, which"),
        "the model returns something that is not a tensor",
        "Return tensors, tuples and dicts of them, or objects that pickle can take apart (__reduce_ex__).",
    ),
    (
        ("one of the inputs with type", "not a supported input", "input type", "pytree_register_constant"),
        "an input is not a tensor",
        "Pass tensors, numbers, or tuples and dicts of them; register other types with torch.utils._pytree.",
    ),
    (
        ("traceerror", "symbolic tracing", "symbolically traced", "proxy object", "proxy' object", "not 'proxy'"),
        "Python code reads a value that symbolic_trace does not know",
        "Compute it with operations of torch, or outside the model and pass it in.",
    ),
    (
        ("constraints violated", "dynamic_shapes", "specialized", "was inferred to be a constant"),
        "a size cannot vary",
        "",  # capture(..., dynamic=False) was tried if the caller asked for another
    ),
)
_LOGS = "TORCH_LOGS=graph_breaks shows details."
_UNTRIED = (
    "Call the model once on real inputs, before it is moved to meta or fake tensors; a capture on real inputs says "
    "what else helps."
)
_TRAINING = (
    "To train it as it is, use splitkit.apply(model, policy, *inputs) or torch.compile with splitkit.backend(policy), "
    "which also accept models with graph breaks."
)


def capture_error(model: nn.Module, how: str, error: Exception, helps: str = "", runs: bool = True) -> SplitError:
    """Return the SK401 for ``error``, which capturing ``model`` by ``how`` raised.

    Args:
        model: the model.
        how: the way of capture: ``"export"``, ``"symbolic_trace"``, ``"dynamo"`` or ``"AOTAutograd"``.
        error: what the capture raised.
        helps: a remedy that was tried and works.
        runs: whether the model runs without capture, as far as is known.
    """
    if isinstance(error, SplitError):
        return error
    packed = diagnose_packed(model, how)
    construct, remedy = packed or _diagnose(f"{type(error).__name__}: {error}")
    lines = _lines(error)
    reason = f"{type(model).__name__} could not be captured by {how}"
    reason += f": {construct}" if construct else ""
    reason += _at_lines(lines)
    reason += f"\n  torch says: {first_line(error)}"
    own = "" if lines and lines[0].installed and not packed else remedy  # users cannot change the code of a package
    trains = runs and not packed and any(p.requires_grad for p in model.parameters())
    logs = _LOGS if how == "dynamo" and not packed else ""
    untried = "" if are_real(model, ()) else _UNTRIED
    hints = [helps or _torchscript_remedy(model) or own or untried, logs, _TRAINING if trains else ""]
    return CaptureError("SK401", reason, " ".join(h for h in hints if h))


def _torchscript_remedy(model: nn.Module) -> str:
    """Return the remedy for a submodule that is TorchScript; empty if there is none."""
    names = (name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule))
    name = next(names, "")
    return f"Its part {name} is TorchScript: give the module that was scripted." if name else ""


def came_from_torch(error: SplitError) -> bool:
    """Return whether torch, and not splitkit, refused a capture."""
    cause = error.__cause__
    return isinstance(cause, Exception) and not isinstance(cause, SplitError)


def require_module(model: object) -> None:
    """Raise SK401 for anything but a module that torch can trace."""
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        program = isinstance(model, torch.export.ExportedProgram)
        remedy = "Give its module: program.module()." if program else "Give a torch.nn.Module; wrap a function in one."
        raise CaptureError("SK401", f"{what} is not a module", remedy)
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError(
            "SK401",
            f"the model is TorchScript ({type(model).__name__}), whose ops no tracer of torch sees",
            "Give the module that was scripted or traced, before torch.jit.script or torch.jit.trace.",
        )


def _diagnose(text: str) -> tuple[str, str]:
    text = text.lower()
    for words, construct, remedy in _CONSTRUCTS:
        if any(word in text for word in words):
            return construct, remedy
    return "", ""


def lost_hook_error(what: str, accept: str = "splitkit.capture_joint and splitkit.apply accept") -> CaptureError:
    """Return the SK405 for a hook that may change gradients and that no graph can hold; ``accept``: who holds it."""
    return CaptureError(
        "SK405",
        f"{what}, which torch.export loses: gradients would differ{user_line()}",
        "Remove the hook before the capture and hook a parameter instead (parameters keep their hooks), or write it as "
        f"a torch.autograd.Function; {accept} the model as it is.",
    )


def lost_data_error(name: str = "data") -> CaptureError:
    """Return the SK410 for an assignment to ``.data`` or another attribute of a tensor, with the line that runs now."""
    return CaptureError(
        "SK410",
        f"the model assigns to .{name} of a tensor, which tracing loses{user_line()}",
        _INSTEAD_OF_DATA,
    )


def user_line() -> str:
    """Return ``at file:line: source`` of the user's code that is running now, on a line of its own."""
    lines = (_line(frame, number) for frame, number in traceback.walk_stack(None))
    where = next(filter(None, lines), None)
    return f"\n  at {where}" if where else ""


class _Line(NamedTuple):
    """A line of code; printed as ``file:line: source``."""

    file: str
    number: int
    of_module: bool

    @property
    def installed(self) -> bool:
        """Whether the line belongs to an installed package, and not to the user's own code."""
        return not {"site-packages", "dist-packages"}.isdisjoint(Path(self.file).parts)

    @property
    def source(self) -> str:
        """The code on the line."""
        return linecache.getline(self.file, self.number).strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.number}: {self.source}"


def _lines(error: BaseException) -> list[_Line]:
    """Return the lines that an error comes from, following the chain of causes.

    These are the deepest line outside of torch and splitkit, the line of the module that called it, and the line of the
    user's own code that called that.
    """
    current: BaseException | None = error
    while current is not None:
        found = [line for frame, number in traceback.walk_tb(current.__traceback__) if (line := _line(frame, number))]
        if found:
            of_module = next((line for line in reversed(found) if line.of_module), found[-1])
            own = next((line for line in reversed(found) if not line.installed), of_module)
            return list(dict.fromkeys(sorted((found[-1], of_module, own), key=found.index, reverse=True)))
        current = current.__cause__ or current.__context__
    return []


def _line(frame: FrameType, number: int) -> _Line | None:
    """Return the line that a frame was at; ``None`` for frames of torch, splitkit and the standard library."""
    name = frame.f_code.co_filename
    if name.startswith("<") or any(map(Path(name).is_relative_to, (_TORCH, *_OURS))):
        return None
    if Path(name).is_relative_to(_PYTHON) and not Path(name).is_relative_to(_SITE):
        return None
    return _Line(name, number, isinstance(frame.f_locals.get("self"), nn.Module))


def raised_at(error: BaseException) -> str:
    """Return the lines of the user's code that an error comes from, each as ``at file:line: source``."""
    return _at_lines(_lines(error))


def construct_of(error: BaseException) -> str:
    """Return why an error was raised, in plain words where they are known, and the lines that it comes from."""
    return (_diagnose(type(error).__name__)[0] or first_line(error)) + raised_at(error)


def source_of(error: BaseException) -> str:
    """Return the line of the user's code that an error comes from: ``folder/file.py:12: source``; empty if unknown."""
    line = next(iter(_lines(error)), None)
    return "" if line is None else f"{'/'.join(Path(line.file).parts[-2:])}:{line.number}: {line.source}"


def _at_lines(lines: list[_Line]) -> str:
    return "\n  at " + "\n  called at ".join(map(str, lines)) if lines else ""


def first_line(error: BaseException) -> str:
    """Return the class and the first line of an error: ``KeyError: 'x'``."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


# Describe the error that a model raises on its example inputs: which submodule raised it, and with which inputs.


_SHOWN = 6  # inputs, and values of one input, that a text names


def describe_failure(model: nn.Module, error: BaseException, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return ``RuntimeError: mat1 and mat2 ..., in its part fc, a Linear, called with float32[3, 9]``.

    Args:
        model: the model that was called.
        error: the error that the call raised.
        args: the positional example inputs.
        kwargs: the keyword example inputs.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = {id(module): name for name, module in model.named_modules()}
    for frame in reversed(frames):  # the innermost named submodule; nn.Module._call_impl: 2.11, 2.13, 2.15
        module = frame.f_locals.get("self")
        if frame.f_code.co_name == "_call_impl" and names.get(id(module)):
            given = frame.f_locals.get("args", ()), frame.f_locals.get("kwargs", {})
            part = (
                f", in its part {names[id(module)]}, a {type(module).__name__}, called with {describe_inputs(*given)}"
            )
            return f"{first_line(error)}{part}"
    return f"{first_line(error)}, called with {describe_inputs(args, kwargs)}"


def failed_run_error(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CaptureError | None:
    """Return the SK401 for a model that raises on its example inputs, with its error as cause; ``None`` if it runs.

    The model is called on copies of the inputs, and its state is restored.
    """
    try:
        outputs_of_call(model, args, kwargs)
    except CaptureError as error:  # what the model calls has said already what is wrong
        return error
    except Exception as error:
        what = (
            f"{type(model).__name__} does not run on the example inputs: {describe_failure(model, error, args, kwargs)}"
        )
        refusal = CaptureError("SK401", what + raised_at(error), "Give example inputs that model(...) accepts.")
        refusal.__cause__ = error
        return refusal
    return None


def describe_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return dtypes and shapes of the tensors among inputs: ``float32[3, 9], mask=bool[3]``."""
    texts = [_describe_value(value) for value in args] + [f"{name}={_describe_value(v)}" for name, v in kwargs.items()]
    return listed(texts, _SHOWN) or "no inputs"


def _describe_value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    leaves = pytree.tree_leaves(value)
    if len(leaves) == 1 and leaves[0] is value:
        return repr(value)[:40]
    inner = ", ".join(map(_describe_value, leaves[:_SHOWN])) + (", ..." if len(leaves) > _SHOWN else "")
    return f"{type(value).__name__}({inner})"


# Explain failed captures of models with weights packed by ``torch.ao.quantization``, which no op tracer accepts.


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


# Export ``no_grad``, ``inference_mode`` and autocast blocks as plain nodes, not as hidden bodies.
#
# The last two passes of torch.export turn such blocks into higher-order ops, and lose a ``no_grad`` inside autocast or
# around ``torch.cond``; these passes are skipped. For a grad-mode block, tracing records constants: the modes at
# capture. Each such node is marked with what recorded it, so that the end of a block can restore the mode of the
# caller::
#
#     with torch.no_grad():   set(False)  begin           prev = is_grad_enabled(); set(False)
#         y = f(x)            y = f(x)              ==>    y = f(x)
#     z = g(y)                set(True)   end             set(prev)
#
# All names below are private to torch; checked on 2.11, 2.13 and 2.15.


_MARK = "splitkit_block"
_LOCK = threading.RLock()  # torch.export is not thread-safe either


@contextmanager
def blocks_as_nodes(flags: GradFlags) -> Iterator[None]:
    """Let torch.export keep blocks as nodes, marked for `restore_callers_grad`.

    Calls of ``requires_grad_``, which tracing loses, go to ``flags``; a hook on a gradient is refused (SK405).
    """
    writer: list[str] = []  # what is setting grad mode at the moment, outermost first
    me = threading.get_ident()  # grad modes of other threads do not matter

    def marked(how: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != me:
                return original(self, *args, **kwargs)
            writer.append(how)
            try:
                return original(self, *args, **kwargs)
            finally:
                writer.pop()

        return call

    traced = PreDispatchTorchFunctionMode.__torch_function__

    def trace(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in HOOKS:
            raise lost_hook_error("the model hooks the gradient of a tensor")
        if func in DATA_SETTERS:
            raise lost_data_error()
        if flags.sets_flag(func, args, kwargs):
            flags.set(args[0], mode.tracer)
        result = traced(mode, func, types, args, kwargs)
        # The outermost writer counts: `no_grad.__enter__` may call `set_grad_enabled.__init__`, which is marked too.
        if func is _torch.SET_GRAD and writer:
            next(iter(reversed(mode.tracer.graph.nodes))).meta[_MARK] = writer[0]
        return result

    with _LOCK, ExitStack() as stack:
        for name in ("replace_set_grad_with_hop_pass", "replace_autocast_with_hop_pass"):
            stack.enter_context(patch(f"torch._export.passes.{name}.{name}", lambda gm, signature: (gm, signature)))
        stack.enter_context(patch.object(PreDispatchTorchFunctionMode, "__torch_function__", trace))
        for kind, method, how in _WRITERS:
            stack.enter_context(patch.object(kind, method, marked(how, getattr(kind, method))))
        stack.enter_context(patch.multiple(torch.inference_mode, **_inference_methods(me)))
        yield


class ReentrantCheckpoint:
    """Marks the nodes of a reentrant checkpoint while `blocks_as_nodes` is open.

    Args:
        wants: whether an argument of the checkpoint requires grad; otherwise no gradient reaches its inside.
    """

    def __init__(self, wants: bool) -> None:
        self.wants = wants

    def __enter__(self) -> None:
        self.before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(self.wants)

    def __exit__(self, *why: object) -> None:
        torch._C._set_grad_enabled(self.before)


# `with set_grad_enabled(m)` sets the mode when it is constructed, and again when it is entered.
_WRITERS: tuple[tuple[Any, str, str], ...] = (
    (torch.no_grad, "__enter__", "begin"),
    (torch.enable_grad, "__enter__", "begin"),
    (torch.set_grad_enabled, "__init__", "make"),
    (torch.set_grad_enabled, "__enter__", "begin made"),
    *((kind, "__exit__", "end") for kind in (torch.no_grad, torch.enable_grad, torch.set_grad_enabled)),
    (ReentrantCheckpoint, "__enter__", "begin checkpoint"),
    (ReentrantCheckpoint, "__exit__", "end checkpoint"),
)


def _inference_methods(me: int) -> dict[str, Any]:
    """Return methods of ``inference_mode`` that also set a grad mode, since tracing records no inference mode."""
    begin, end = torch.inference_mode.__enter__, torch.inference_mode.__exit__

    def enter(self: Any) -> None:
        if threading.get_ident() == me:
            self._splitkit_block = torch.no_grad() if self.mode else torch.enable_grad()
            self._splitkit_block.__enter__()
        begin(self)

    def leave(self: Any, *why: Any) -> None:
        end(self, *why)
        if threading.get_ident() == me:
            self._splitkit_block.__exit__(*why)

    return {"__enter__": enter, "__exit__": leave}


def restore_callers_grad(graph: fx.Graph) -> None:
    """Let the end of each marked block restore the mode before it; for an outermost block, the caller's mode. In place.

    Calls of ``torch.set_grad_enabled(mode)`` outside of a ``with`` stay as they are: they set the mode for good. A
    reentrant checkpoint computes no gradient where its caller computes none, so ``enable_grad`` inside it means the
    caller's mode, and a mode set inside it ends with it.
    """
    nodes = [n for n in graph.nodes if n.target is _torch.SET_GRAD]
    if not any(_MARK in n.meta for n in nodes):
        return
    with graph.inserting_before(nodes[0]):
        callers = graph.call_function(torch.is_grad_enabled)
    modes = _GradModes(callers)
    for node in nodes:
        how = node.meta.pop(_MARK, None)
        # An end that sets the mode of a checkpoint which changed nothing needs no node.
        before = modes.now
        node.args = (modes.after(how, bool(node.args[0])),)
        if how in ("begin checkpoint", "end checkpoint") and before is modes.now:
            graph.erase_node(node)
    if not callers.users:
        graph.erase_node(callers)


class _GradModes:
    """The grad mode along a graph: a constant, or the node that reads the caller's mode.

    Attributes:
        now: the mode after the last node.
    """

    def __init__(self, callers: Node) -> None:
        self.now: bool | Node = callers
        self._before: list[bool | Node] = []  # the mode before each open block
        self._made: list[bool | Node] = []  # the mode before each `set_grad_enabled` that is not entered yet
        self._on: list[bool | Node] = [True]  # what "on" means: in a checkpoint, the mode of its caller

    def after(self, how: str | None, mode: bool) -> bool | Node:
        """Return the mode after a node that sets ``mode``, where ``how`` is the mark of the node."""
        if how in ("end", "end checkpoint") and self._before:
            if how == "end checkpoint":
                self._on.pop()
            self.now = self._before.pop()
            return self.now
        if how in ("begin", "begin checkpoint"):
            self._before.append(self.now)
        elif how == "make":
            self._made.append(self.now)
        elif how == "begin made" and self._made:
            self._before.append(self._made.pop())
        if how == "begin checkpoint":
            self._on.append(mode and self.now)
        # off is off everywhere; on is at most what the innermost checkpoint allows
        self.now = mode and self._on[-1]
        return self.now


# Tell calls of ``requires_grad_`` inside a model that change no gradient from those that do.
#
# Tracing loses the call. No parameter misses a gradient for that reason unless the tensor was detached from one::
#
#     x.requires_grad_()                       an input, or made of inputs and frozen weights: nothing is lost
#     h = self.linear(x).detach()
#     h.requires_grad_()                       cut off from a parameter that trains: refused
#     self.scale.requires_grad_()              a parameter or buffer: refused


SETTERS = (torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
DATA_SETTERS = (torch.Tensor.data.__set__,)  # type: ignore[attr-defined]
HOOKS = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)


class GradFlags:
    """Calls of ``requires_grad_`` that a model makes while it is traced."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.where = ""  # the line of the first call

    def sets_flag(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> bool:
        """Return whether a call makes a tensor require grad that did not."""
        if func not in SETTERS or not isinstance(args[0], torch.Tensor) or args[0].requires_grad:
            return False
        return bool(args[1] if len(args) > 1 else (kwargs or {}).get("requires_grad", True))

    def set(self, tensor: torch.Tensor, tracer: Any) -> None:
        """Raise if the call changes gradients where it may not; else record its line."""
        self.where = self.where or user_line()
        # A gradient is missing only where the tensor comes from a parameter that trains, or is one.
        held = (t for t in parameters_and_buffers(self.model).values() if t in tracer.tensor_tracker)
        own = {tracer.tensor_tracker[t].proxy.node: t for t in held}
        if tensor not in tracer.tensor_tracker:
            return  # created in the model, from no input
        node = tracer.tensor_tracker[tensor].proxy.node
        if node in own or any(n in own and own[n].requires_grad for n in _before(node)):
            raise self._refusal()

    def check(self, gm: fx.GraphModule) -> None:
        """Refuse a graph with an output that requires grad in the model and not in the graph."""
        if not self.where:
            return
        trained = {n for n in gm.graph.nodes if _trains(gm, n)}
        for node in gm.graph.output_node().all_input_nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and value.is_floating_point() and trained.isdisjoint(_before(node)):
                raise self._refusal()

    def _refusal(self) -> CaptureError:
        return CaptureError(
            "SK401",
            f"the model calls requires_grad_ on a tensor, which torch.export drops: its gradient would be missing"
            f"{self.where}",
            "Make that tensor an input or a parameter. To run the graph without gradients, capture "
            "torch.export.export(model, args, kwargs).",
        )


def _before(node: Node) -> set[Node]:
    """Return the node and all nodes that it depends on."""
    found, left = {node}, [node]
    while left:
        for other in left.pop().all_input_nodes:
            if other not in found:
                found.add(other)
                left.append(other)
    return found


def _trains(gm: fx.GraphModule, node: Node) -> bool:
    value = attribute(gm, str(node.target)) if node.op == "get_attr" else None
    value = node.meta.get("val") if node.op == "placeholder" else value
    return isinstance(value, torch.Tensor) and value.requires_grad
