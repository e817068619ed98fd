"""What to say when a model cannot be captured: the line of the user's code, the construct, the way out."""

from __future__ import annotations

import linecache
import sysconfig
import traceback
from pathlib import Path
from types import FrameType

import torch
from torch import nn

from splitkit.errors import CaptureError, SplitError

_TORCH = Path(torch.__file__).parent
_HERE = Path(__file__).parent
_PYTHON, _SITE = Path(traceback.__file__).parent, Path(sysconfig.get_path("purelib"))  # contextlib is nobody's line

# Words of torch's messages (2.11, 2.13, 2.15; lower case) -> the construct, and what to do about it.
_CONSTRUCTS: tuple[tuple[tuple[str, ...], str, str], ...] = (
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
_OTHER_WAY = {
    "dynamo": "TORCH_LOGS=graph_breaks says more; splitkit.backend also takes models that fall into several graphs.",
}


def capture_error(model: nn.Module, how: str, error: Exception, helps: str = "") -> SplitError:
    """The SK401 for ``error``, which capturing ``model`` by ``how`` raised; ``helps`` is what was seen to help."""
    if isinstance(error, SplitError):
        return error
    construct, remedy = _diagnose(f"{type(error).__name__}: {error}")
    where = _users_line(error)
    reason = f"{type(model).__name__} could not be captured by {how}"
    reason += f": {construct}" if construct else ""
    reason += f"\n  at {where}" if where else ""
    reason += f"\n  torch says: {first_line(error)}"
    hints = [helps or _of_script(model) or remedy, _OTHER_WAY.get(how, "")]
    return CaptureError("SK401", reason, " ".join(h for h in hints if h))


def _of_script(model: nn.Module) -> str:
    """What to do about a part that is TorchScript; nothing if there is none."""
    names = (name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule))
    name = next(names, "")
    return (
        f"Its part {name} is TorchScript: give the module that was scripted; or train the model with splitkit.apply or "
        "splitkit.backend, which run that part as it is and divide the rest."
        if name
        else ""
    )


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


def line_here() -> str:
    """``at file:line: source`` on a line of its own: the user's code that is running now."""
    lines = (_users_source(frame, number) for frame, number in traceback.walk_stack(None))
    where = next(filter(None, lines), "")
    return f"\n  at {where}" if where else ""


def _users_line(error: BaseException) -> str:
    """``file:line: source`` of the deepest frame that is neither torch's nor ours, over the chain of causes."""
    found = ""
    current: BaseException | None = error
    while current is not None:
        for frame, number in traceback.walk_tb(current.__traceback__):
            found = _users_source(frame, number) or found
        if found:
            return found
        current = current.__cause__ or current.__context__
    return found


def _users_source(frame: FrameType, number: int) -> str:
    """``file:line: source`` of a frame; nothing for torch's and ours."""
    name = frame.f_code.co_filename
    if name.startswith("<") or Path(name).is_relative_to(_TORCH) or Path(name).is_relative_to(_HERE):
        return ""
    if Path(name).is_relative_to(_PYTHON) and not Path(name).is_relative_to(_SITE):
        return ""
    return f"{name}:{number}: {linecache.getline(name, number).strip()}"


def first_line(error: BaseException) -> str:
    """``KeyError: 'x'``."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
