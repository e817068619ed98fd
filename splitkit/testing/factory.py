"""Load a model from a user's function: find it in a file or module, call it, and check its result."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from splitkit.errors import CaptureError, listed, message_line, near
from splitkit.short_repr import brief

if TYPE_CHECKING:
    from torch import Tensor, nn


_SHOWN = 8  # functions that an error names
RETURN = "Return (module, args), (module, args, kwargs), (module, kwargs) or a splitkit.testing.models.Example."


@dataclass(frozen=True)
class Example:
    """A model in training mode, and inputs that make it return a loss.

    Attributes:
        model: the module.
        args: positional inputs.
        kwargs: keyword inputs.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    __repr__ = brief


def made_by(spec: str, sizes: Mapping[str, int], mesh: Any = None) -> Example:
    """Return what the factory ``place:name`` makes when it is called with ``sizes``, and with ``mesh`` if it takes one.

    Raises:
        CaptureError: SK402 for a package that is not installed; SK403 for a factory that is missing, cannot be called
            with these sizes, or returns something else.
    """
    place, _, name = spec.rpartition(":")
    module = module_at(place)
    factory = _factory(module, place, name)
    given = dict(sizes) | ({"mesh": mesh} if mesh is not None and _takes_mesh(factory) else {})
    _require_fit(spec, factory, given)
    called = f"{name}({', '.join(f'{k}={v}' for k, v in sizes.items())})"
    with _location_noted(getattr(module, "__file__", None) or place, f"in {called}"):
        made = factory(**given)
    return _example(spec, made)


def is_program(spec: str) -> bool:
    """Return whether a text names a file of ``torch.export.save``."""
    return spec.endswith(".pt2")


def saved_program(path: str, sizes: Mapping[str, int]) -> Example:
    """Return the module of an exported program in a file, and the inputs that it was exported with.

    Raises:
        CaptureError: SK403 for a file that is missing or something else, a program without inputs, or for sizes.
    """
    import torch

    if sizes:
        reason = f"{path} has no size {next(iter(sizes))!r}: its inputs are those that it was exported with"
        raise CaptureError("SK403", reason, "Leave the sizes out, or export it with other inputs.")
    try:
        with torch.device("cpu"):  # of what it makes while it loads
            program = torch.export.load(path)
    except Exception as error:  # whatever is wrong with the file
        reason = f"{path} cannot be loaded as an exported program: {message_line(error)}"
        raise CaptureError(
            "SK403",
            reason,
            "Write the file with torch.export.save(program, path). Where its outputs are of a class of transformers, "
            "load it in a factory that imports that class.",
        ) from error
    if program.example_inputs is None:
        raise CaptureError("SK403", f"{path} has no example inputs", RETURN)
    args, kwargs = program.example_inputs
    return Example(program.module(), tuple(args), dict(kwargs))


def functions_in(path: Path) -> list[str]:
    """Return the functions of a Python file that may be factories, without running it.

    These are the functions that return several values, or else all functions that return a value.

    Raises:
        OSError: the file cannot be read.
        SyntaxError: the file is not Python.
        ValueError: the file is not text.
    """
    tree = ast.parse(path.read_bytes(), str(path))
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")]
    returned = {f.name: [n.value for n in ast.walk(f) if isinstance(n, ast.Return) and n.value] for f in functions}
    pairs = [name for name, values in returned.items() if any(isinstance(v, ast.Tuple) for v in values)]
    return pairs or [name for name, values in returned.items() if values]


def functions_listed(names: Sequence[str]) -> str:
    """Return ``its functions: mlp, conv``."""
    return f"its functions: {listed(names, _SHOWN)}" if names else "it has no function that returns something"


def module_at(place: str) -> ModuleType:
    """Import a module from a path that ends in ``.py`` or by its dotted name.

    Raises:
        CaptureError: SK402 for a package that is not installed, SK403 for a file that does not exist.
    """
    try:
        with _location_noted(place, "which was imported for what it defines"):
            return _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except FileNotFoundError as error:
        if Path(place).is_file():  # the file itself misses another file
            raise
        raise CaptureError("SK403", f"there is no file {place}", "Give the path of a Python file.") from error
    except ModuleNotFoundError as error:
        own = (error.name or "").split(".")[0] == place.split(".")[0]
        remedy = "Install the package that provides it."
        if own:
            remedy = "Run from a directory where it can be imported, install it, or give a file: path/file.py:make."
        raise CaptureError("SK402", f"{place} imports {error.name!r}, which is not installed", remedy) from error


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(path)
    name = f"splitkit_model_{path.stem}"
    description = importlib.util.spec_from_file_location(name, path)
    assert description is not None and description.loader is not None
    module = importlib.util.module_from_spec(description)
    sys.modules[name] = module  # dataclasses and pickle look a class up by its module
    try:
        description.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _factory(module: ModuleType, place: str, name: str) -> Callable[..., Any]:
    from torch import nn

    factory = getattr(module, name, None)
    if isinstance(factory, nn.Module):
        raise CaptureError("SK403", f"{place}:{name} is a module, not a function that makes one", RETURN)
    if callable(factory):
        return factory  # type: ignore[no-any-return]  # a module's attribute may be anything
    try:
        names = functions_in(Path(module.__file__ or ""))
    except (OSError, SyntaxError, ValueError):
        names = []
    others = near(name, names)
    remedy = f"Did you mean {place}:{others[0]}? " if others else "Define a function of that name there; "
    found = "does not exist" if factory is None else f"is a {type(factory).__name__}, not a function"
    known = functions_listed(names)
    remedy += f"{known[0].upper() + known[1:] if others else known}."
    raise CaptureError("SK403", f"the factory {name!r} in {place} {found}", remedy)


def _takes_mesh(factory: Callable[..., Any]) -> bool:
    try:
        return "mesh" in inspect.signature(factory).parameters
    except (TypeError, ValueError):  # some builtins have no signature
        return False


def _require_fit(spec: str, factory: Callable[..., Any], sizes: Mapping[str, Any]) -> None:
    """Refuse sizes that the factory does not accept, and missing ones."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # some builtins have no signature
        return
    try:
        signature.bind(**sizes)
    except TypeError as error:
        needed = [p.name for p in signature.parameters.values() if p.default is p.empty and p.name not in sizes]
        example = "--mesh tp=2" if "mesh" in needed else f"--size {needed[0]}=8" if needed else "--size NAME=N"
        raise CaptureError(
            "SK403",
            f"{spec} cannot be called: {error}",
            f"Its signature is {spec.rpartition(':')[2]}{signature}: give sizes that it takes ({example}) or defaults.",
        ) from error


@contextmanager
def _location_noted(file: str, what: str) -> Iterator[None]:
    """Add a note to errors raised inside, with the line of the user's file."""
    try:
        yield
    except (CaptureError, ModuleNotFoundError):
        raise
    except Exception as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if _same_file(f.filename, file)]
        if isinstance(error, SyntaxError) and error.filename and _same_file(error.filename, file):
            lines.append(error.lineno)
        error.add_note(f"It was raised at {file}{f':{lines[-1]}' if lines else ''}, {what}")
        raise


def _same_file(one: str, other: str) -> bool:
    return Path(one).absolute() == Path(other).absolute()


def _example(spec: str, made: object) -> Example:
    import torch
    from torch import nn

    if isinstance(made, Example):
        return made
    match made:
        case (nn.Module() as model, torch.Tensor() as tensor):
            return Example(model, (tensor,), {})
        case (nn.Module() as model, dict() as kwargs):
            return Example(model, (), dict(kwargs))
        case (nn.Module() as model, tuple() | list() as args):
            return Example(model, tuple(args), {})
        case (nn.Module() as model, tuple() | list() as args, dict() as kwargs):
            return Example(model, tuple(args), dict(kwargs))
        case nn.Module():
            raise CaptureError("SK403", f"{spec} returned {_describe_result(made)} without inputs", RETURN)
    raise CaptureError("SK403", f"{spec} returned {_describe_result(made)}", RETURN)


def _describe_result(made: object) -> str:
    if isinstance(made, (tuple, list)):
        return f"a {type(made).__name__} of ({', '.join(type(item).__name__ for item in made)})"
    return "nothing" if made is None else f"a {type(made).__name__}"


# Give a model that returns predictions a loss, for commands that train; imports torch where it is used.


LOSSES = ("cross_entropy", "mse")
TARGET = "target"
"""The keyword input of an example that goes to the loss and not to the model."""
_WITHOUT = "_splitkit_without_loss"


def with_loss(example: Example, loss: str) -> Example:
    """Return an example whose model returns ``loss`` of what it returned before.

    The model keeps its parameters and their names; it gets a subclass of its own class. The target is the example's
    keyword input ``target``, unless the model takes it. Without one, ``cross_entropy`` counts the predictions through
    the classes (0, 1, 2 ...), and ``mse`` compares with zeros.

    Args:
        example: the model and its inputs.
        loss: ``"cross_entropy"`` or ``"mse"`` of the predictions; or ``place:function``, which is called with the
            output, and with the target if there is one.

    Raises:
        CaptureError: SK403 for a function that is missing, or a model of which nothing can be derived.
    """
    from torch import fx

    model = example.model
    if isinstance(model, fx.GraphModule):
        reason = "a graph, such as an exported program, cannot be given a loss"
        raise CaptureError("SK403", reason, "Export the model with its loss, or name the function that makes it.")
    kind = vars(type(model)).get(_WITHOUT, type(model))  # a factory may return the same module again
    taken = TARGET in inspect.signature(kind.forward).parameters
    own = _own_loss(loss, not taken and example.kwargs.get(TARGET) is not None) if loss not in LOSSES else None

    @wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        target = None if taken else kwargs.pop(TARGET, None)
        output = kind.forward(self, *args, **kwargs)
        if own is not None:
            return own(output) if target is None else own(output, target)
        return _loss_of(loss, _predictions(output, loss), target)

    if not taken and TARGET in example.kwargs:
        forward.__signature__ = _with_target(inspect.signature(kind.forward))  # type: ignore[attr-defined]
    names = {"forward": forward, _WITHOUT: kind, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    model.__class__ = type(kind.__name__, (kind,), names)
    return example


def _own_loss(spec: str, targeted: bool) -> Callable[..., Any]:
    place, _, name = spec.rpartition(":")
    found = getattr(module_at(place), name, None)
    if not callable(found):
        raise CaptureError("SK403", f"{place} has no function {name!r}", "Define it there: def loss(output): ...")
    try:
        inspect.signature(found).bind(*("output", "target")[: 1 + targeted])
    except TypeError as error:
        reason = f"--loss {spec} is called with {'an output and a target' if targeted else 'the output alone'}: {error}"
        given = 'Return the target from the factory: module, args, {"target": target}; or take the output alone.'
        remedy = "Take both: def loss(output, target): ..." if targeted else given
        raise CaptureError("SK403", reason, remedy) from error
    except ValueError:  # a function of C may not tell what it takes
        pass
    return found  # type: ignore[no-any-return]  # a module's attribute may be anything


def _with_target(signature: inspect.Signature) -> inspect.Signature:
    named = list(signature.parameters.values())
    at = next((i for i, one in enumerate(named) if one.kind is one.VAR_KEYWORD), len(named))
    named.insert(at, inspect.Parameter(TARGET, inspect.Parameter.KEYWORD_ONLY))
    return signature.replace(parameters=named)


def _predictions(output: Any, loss: str) -> Tensor:
    """Return an output that is a tensor, its ``logits``, or its only tensor of floating point."""
    import torch

    from splitkit.graph.losses import tensors_in

    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(named, torch.Tensor):
        return named
    found = [value for _, value in tensors_in(output) if value.is_floating_point()]
    if len(found) != 1:
        reason = f"--loss {loss} needs predictions, and the model returns {len(found)} tensors of floating point"
        raise CaptureError("SK403", reason, "Write your own: --loss FILE.py:FUNCTION, called with the output.")
    return found[0]


def _loss_of(loss: str, predictions: Tensor, target: Tensor | None) -> Tensor:
    import torch
    from torch.nn import functional

    if loss == "mse":
        return functional.mse_loss(predictions, torch.zeros_like(predictions) if target is None else target)
    if predictions.dim() < 2:
        reason = f"--loss cross_entropy needs [batch, classes], and the model returns {list(predictions.shape)}"
        raise CaptureError("SK403", reason, "Use --loss mse, or write your own: --loss FILE.py:FUNCTION.")
    classes_last = predictions.movedim(1, -1) if predictions.dim() > 3 else predictions
    flat = classes_last.reshape(-1, classes_last.shape[-1])
    if target is None:
        target = torch.arange(flat.shape[0], device=flat.device) % flat.shape[1]
    return functional.cross_entropy(flat, target.reshape(-1))
