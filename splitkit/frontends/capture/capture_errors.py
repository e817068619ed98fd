"""Explain why a model cannot be captured: the line of the user's code, the construct, and the remedy."""

from __future__ import annotations

import linecache
import sysconfig
import traceback
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
from torch import nn

from splitkit.errors import CaptureError, SplitError
from splitkit.frontends.quantized import diagnose_packed
from splitkit.graph import fake_runs

_TORCH = Path(torch.__file__).parent
# splitkit.testing is left out: it has models, whose lines are shown.
_OURS = (Path(__file__).parents[1], Path(fake_runs.__file__).parent)
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
        "Return tensors, tuples and dicts of them, or objects that copy.copy can copy.",
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
_TRAINING = (
    "To train it as it is, use splitkit.apply(model, policy, *inputs) or torch.compile with splitkit.backend(policy), "
    "which also accept models with graph breaks."
)


def capture_error(model: nn.Module, how: str, error: Exception, helps: str = "", runs: bool = True) -> SplitError:
    """Return the SK401 for ``error``, which capturing ``model`` by ``how`` raised.

    Args:
        model: the model.
        how: the way of capture: ``"export"``, ``"symbolic_trace"`` or ``"dynamo"``.
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
    hints = [helps or _torchscript_remedy(model) or own, logs, _TRAINING if trains else ""]
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
