"""Checks the names of models and losses, and suggests what to write instead.

Suggestions come from file names and source code: torch is not imported, and no code of the model runs.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from splitkit.errors import CaptureError, UsageError, near, nearest
from splitkit.testing.config_files import is_config
from splitkit.testing.factory import LOSSES, functions_in, functions_listed, is_program
from splitkit.testing.models import NAMES

EXAMPLE = "my_model.py:make"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)


def check_model_name(spec: str, plans: bool) -> None:
    """Refuse a text that names no model.

    Args:
        spec: the text on the command line.
        plans: whether the command accepts a plan file as well.

    Raises:
        UsageError: SK402 for an unknown example, SK602 for a file or module without a function.
        CaptureError: SK403 for a file that does not exist.
    """
    if is_config(spec) or (is_program(spec) and Path(spec).is_file()):
        return
    place, colon, name = spec.rpartition(":")
    if not colon:
        _check_word(spec, plans)
    elif not place or not name:
        missing = "file or module" if not place else "function"
        raise UsageError("SK602", f"{spec!r} names no {missing}", _instead(place, name))
    elif (path := Path(place)).is_dir() and not (path / "__init__.py").is_file():
        raise UsageError("SK602", f"{place} is a folder", _of_folder(path))
    elif place.endswith(".py") and not path.is_file():
        raise CaptureError("SK403", f"there is no file {place}", _of_missing(path))
    elif ".py:" in place:
        raise UsageError("SK602", f"{spec!r} has two colons", f"Write {place}.")
    elif path.is_file() and path.suffix != ".py":
        raise UsageError("SK602", f"{place} is not a Python file", f"Name a file that ends in .py: {EXAMPLE}.")


def check_loss(loss: str) -> None:
    """Refuse a ``--loss`` that is neither known nor a function that its file may define.

    Raises:
        UsageError: SK601 for another word.
        CaptureError: SK403 for a file or function that does not exist.
    """
    if loss in LOSSES:
        return
    place, _, name = loss.rpartition(":")
    if not place or not name:
        choices = f"Use {', '.join(LOSSES)}, or a function of the output: --loss my_model.py:loss."
        raise UsageError("SK601", f"--loss {loss} is not known", nearest(loss, LOSSES, choices))
    require_factory(loss, "loss")


def require_factory(spec: str, what: str = "factory") -> None:
    """Refuse a function that its file does not define, without running the file.

    Args:
        spec: ``path.py:function``; anything else is accepted.
        what: what the function is for.

    Raises:
        CaptureError: SK403.
    """
    place, colon, name = spec.rpartition(":")
    path = Path(place)
    if not colon or path.suffix != ".py":
        return
    check_model_name(spec, plans=False)
    try:
        tree = ast.parse(path.read_bytes(), str(path))
        names = (
            functions_in(path) if what == "factory" else [n.name for n in tree.body if isinstance(n, ast.FunctionDef)]
        )
    except (OSError, SyntaxError, ValueError) as error:
        raise CaptureError("SK403", f"{place} cannot be read as Python: {error}", "Correct the file.") from error
    if _may_define(tree, name):
        return
    other = near(name, names)
    remedy = f"Did you mean {place}:{other[0]}? " if other else "Define a function of that name there; "
    raise CaptureError("SK403", f"the {what} {name!r} in {place} does not exist", remedy + functions_listed(names))


def _may_define(tree: ast.Module, name: str) -> bool:
    """Return whether a module may have an attribute of this name: it is written somewhere, or made in ways unseen."""
    for node in ast.walk(tree):
        written = getattr(node, "id", None), getattr(node, "name", None), getattr(node, "asname", None)
        if name in written or (isinstance(node, ast.alias) and (node.name == "*" or node.name.split(".")[0] == name)):
            return True
        if getattr(node, "id", None) in ("globals", "exec", "setattr", "vars") or written[1] == "__getattr__":
            return True
    return False


def _check_word(spec: str, plans: bool) -> None:
    """Refuse a name without a colon that is not an example."""
    if spec in NAMES:
        return
    path = Path(spec)
    if path.suffix == ".json":
        raise UsageError(
            "SK602", f"{spec} is not a model", "Pass a model; to run a plan, use `splitkit run PLAN.json`."
        )
    if is_program(spec):
        raise CaptureError("SK403", f"there is no file {spec}", "Name a file of torch.export.save.")
    if path.suffix == ".py" or (path.is_file() and path.suffix != ""):
        lack = " but no function in it" if path.is_file() else " that does not exist, and no function in it"
        raise UsageError("SK602", f"{spec} names a file{lack}", _of_file(path, plans))
    if not near(spec, NAMES) and path.is_dir():
        raise UsageError("SK602", f"{spec} is a folder", _of_folder(path))
    if _HUB_NAME.fullmatch(spec) and not path.exists():
        folder = path.name
        raise UsageError(
            "SK402",
            f"there is no folder {spec}, and splitkit downloads no model",
            f"If it is one of the Hugging Face Hub: hf download {spec} config.json --local-dir {folder}, "
            f"then name {folder}.",
        )
    choices = f"Choose one of {', '.join(NAMES)}; or name {EXAMPLE}, or a folder with the config.json of transformers."
    remedy = nearest(spec, NAMES, choices)
    if path.with_suffix(".py").is_file():
        remedy = f"Did you mean {_such_as(path.with_suffix('.py'))}? {choices}"
    elif plans and path.is_file():
        remedy = f"The name of a plan file must end in .json: rename it to {spec}.json. {choices}"
    elif plans and path.with_name(f"{path.name}.json").is_file():
        remedy = f"Did you mean {spec}.json? {choices}"
    raise UsageError("SK402", f"there is no example model {spec!r}", remedy)


def _instead(place: str, name: str) -> str:
    if place.endswith(".py"):
        return _of_file(Path(place), plans=False)
    return f"Write {place or 'my_model.py'}:{name or 'make'}."


def _of_file(path: Path, plans: bool) -> str:
    """Return what to write for a file without a function."""
    if not path.is_file():
        return _of_missing(path)
    if path.suffix != ".py":
        known = "; plans end in .json" if plans else ""
        return f"A model is a function in a file that ends in .py: {EXAMPLE}{known}."
    try:
        names = functions_in(path)
    except (SyntaxError, ValueError) as error:
        return f"Write {path}:FUNCTION, and fix the file: {error}."
    if not names:
        return f"Define a function in it that returns (module, inputs), such as make, and write {path}:make."
    return f"Write {path}:FUNCTION, such as {path}:{names[0]}; {functions_listed(names)}."


def _of_missing(path: Path) -> str:
    found = near(path.name, _python_files(path.parent))
    return f"Did you mean {_such_as(path.with_name(found[0]))}?" if found else f"Name a file that exists: {EXAMPLE}."


def _of_folder(path: Path) -> str:
    if (path / "manifest.json").is_file():
        ranks = len([*path.glob("stage-*.json")])
        train, generate = f"splitkit train {path} --nproc {ranks}", f"splitkit generate {path} --prompt-ids 1,2,3"
        return f"It holds the stages of a split: train them with `{train}`, or, for a step of generation, `{generate}`."
    found = _python_files(path)
    return f"Write {_such_as(path / found[0])}." if found else f"Name a Python file and a function: {EXAMPLE}."


def _such_as(path: Path) -> str:
    """Return ``my_model.py:make``, with a function of the file."""
    try:
        names = functions_in(path)
    except (OSError, SyntaxError, ValueError):
        names = []
    return f"{path}:{names[0] if names else 'FUNCTION'}"


def _python_files(folder: Path) -> list[str]:
    try:
        return sorted(p.name for p in folder.iterdir() if p.suffix == ".py")
    except OSError:
        return []
