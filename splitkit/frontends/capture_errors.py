"""What to say when a model cannot be captured: the line of the user's code, the construct, the way out."""

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

_TORCH = Path(torch.__file__).parent
_HERE = Path(__file__).parent
_PYTHON, _SITE = Path(traceback.__file__).parent, Path(sysconfig.get_path("purelib"))  # contextlib is nobody's line

# Words of torch's messages (2.11, 2.13, 2.15; lower case) -> the construct, and what to do about it.
_INSTEAD_OF_DATA = (
    "Bind the name anew (z = y instead of z.data = y); to change a parameter, buffer or input in place, write "
    "p.copy_(y) under torch.no_grad()."
)
_CONSTRUCTS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("failed to mutate tensor data attribute", "set_ on a graph input"),
        "the model assigns to .data of a tensor",
        _INSTEAD_OF_DATA,
    ),
    (
        ("data-dependent", "data dependent", "unbacked", "guardondatadependent", "control flow", ".item()"),
        "Python code decides on a value that only the data knows",
        "Write the choice with torch.cond or torch.where; state bounds of a size with torch._check; or compute it "
        "outside the model and pass it in.",
    ),
    (
        ("one of the outputs with type", "unsupported output", "not supported output", "in output, which"),
        "the model returns something that is no tensor",
        "Return tensors, tuples and dicts of them, or objects that copy.copy can copy.",
    ),
    (
        ("unsupported input type", "not a supported input", "input type", "pytree_register_constant"),
        "an input is no tensor",
        "Pass tensors, numbers, or tuples and dicts of them; register other types with torch.utils._pytree.",
    ),
    (
        ("proxy", "symbolically traced"),
        "Python code looks into a value that symbolic_trace does not know",
        "symbolic_trace cannot take it.",
    ),
    (
        ("constraints violated", "dynamic_shapes", "specialized", "was inferred to be a constant"),
        "a size cannot vary",
        "Capture with dynamic=False.",
    ),
)
_LOGS = "TORCH_LOGS=graph_breaks says more."
_TRAINING = (
    "To train it as it is, take splitkit.apply(model, policy, *inputs) or torch.compile with splitkit.backend(policy), "
    "which also take models that fall into several graphs."
)


def capture_error(model: nn.Module, how: str, error: Exception, helps: str = "", runs: bool = True) -> SplitError:
    """The SK401 for ``error``, which capturing ``model`` by ``how`` raised.

    Args:
        helps: what was seen to help.
        runs: whether the model runs without capture, as far as is known.
    """
    if isinstance(error, SplitError):
        return error
    construct, remedy = _diagnose(f"{type(error).__name__}: {error}")
    lines = _lines(error)
    reason = f"{type(model).__name__} could not be captured by {how}"
    reason += f": {construct}" if construct else ""
    reason += "\n  at " + "\n  called at ".join(map(str, lines)) if lines else ""
    reason += f"\n  torch says: {first_line(error)}"
    own = "" if lines and lines[0].installed else remedy  # nobody mends code inside of a package
    trains = runs and any(p.requires_grad for p in model.parameters())
    hints = [helps or _of_script(model) or own, _LOGS if how == "dynamo" else "", _TRAINING if trains else ""]
    return CaptureError("SK401", reason, " ".join(h for h in hints if h))


def _of_script(model: nn.Module) -> str:
    """What to do about a part that is TorchScript; nothing if there is none."""
    names = (name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule))
    name = next(names, "")
    return f"Its part {name} is TorchScript: give the module that was scripted." if name else ""


def came_from_torch(error: SplitError) -> bool:
    """Whether a capture failed for what torch does not take, not for what splitkit refuses."""
    cause = error.__cause__
    return isinstance(cause, Exception) and not isinstance(cause, SplitError)


def require_module(model: object) -> None:
    """Refuse (SK401) what is no module."""
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise CaptureError("SK401", f"{what} is no module", "Give a torch.nn.Module; wrap a function in one.")
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError(
            "SK401",
            f"the model is TorchScript ({type(model).__name__}), whose ops no tracer of torch's sees",
            "Give the module that was scripted or traced, before torch.jit.script or torch.jit.trace.",
        )


def _diagnose(text: str) -> tuple[str, str]:
    text = text.lower()
    for words, construct, remedy in _CONSTRUCTS:
        if any(word in text for word in words):
            return construct, remedy
    return "", ""


def lost_hook(what: str) -> CaptureError:
    """SK405: a hook that may change gradients, and that no graph holds."""
    return CaptureError(
        "SK405",
        f"{what}, which torch.export loses: gradients would be other ones{line_here()}",
        "Take the hook away before the capture and hook a parameter instead (parameters keep their hooks), or write "
        "it as a torch.autograd.Function; splitkit.capture_joint and splitkit.apply take the model as it is.",
    )


def lost_data(name: str = "data") -> CaptureError:
    """The SK410 for an assignment to ``.data``, or to another attribute of a tensor, by the line that runs now."""
    return CaptureError(
        "SK410",
        f"the model assigns to .{name} of a tensor, which tracing loses{line_here()}",
        _INSTEAD_OF_DATA,
    )


def line_here() -> str:
    """``at file:line: source`` on a line of its own: the user's code that is running now."""
    lines = (_line(frame, number) for frame, number in traceback.walk_stack(None))
    where = next(filter(None, lines), None)
    return f"\n  at {where}" if where else ""


class _Line(NamedTuple):
    """A line of code that was running; as text ``file:line: source``."""

    file: str
    number: int
    of_module: bool

    @property
    def installed(self) -> bool:
        """Whether it is of an installed package, and not of the user's own code."""
        return not {"site-packages", "dist-packages"}.isdisjoint(Path(self.file).parts)

    def __str__(self) -> str:
        return f"{self.file}:{self.number}: {linecache.getline(self.file, self.number).strip()}"


def _lines(error: BaseException) -> list[_Line]:
    """Where an error comes from, over the chain of causes: the deepest line that is neither torch's nor ours, the line
    of the module that called that, and the user's own line that called that."""
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
    """The line that a frame was at; nothing for torch's and ours."""
    name = frame.f_code.co_filename
    if name.startswith("<") or Path(name).is_relative_to(_TORCH) or Path(name).is_relative_to(_HERE):
        return None
    if Path(name).is_relative_to(_PYTHON) and not Path(name).is_relative_to(_SITE):
        return None
    return _Line(name, number, isinstance(frame.f_locals.get("self"), nn.Module))


def first_line(error: BaseException) -> str:
    """``KeyError: 'x'``."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
