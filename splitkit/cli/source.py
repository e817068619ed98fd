"""Determines which model a command works on, and reads and writes the record of it in a plan file.

Neither imports torch nor runs code of the model: a plan file may come from anywhere.
"""

from __future__ import annotations

import os
import shlex
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from splitkit.checks import is_whole
from splitkit.cli import factories
from splitkit.cli.mesh import ranks_of_mesh, read_mesh
from splitkit.errors import FileError, SplitError, UsageError, nearest
from splitkit.testing.config_files import checkpoint_beside, is_config
from splitkit.testing.factory import LOSSES
from splitkit.testing.models import NAMES, SIZES

RESERVED = ("name", "seed", "spec")
"""Names that sizes cannot have: `splitkit.testing.models` has parameters of these names."""


@dataclass(frozen=True)
class Source:
    """How to make the model again and capture it.

    Attributes:
        spec: the name of an example, or ``place:factory``.
        sizes: the arguments of the example or the factory.
        how: the way of capture.
        dynamic: whether the sizes of inputs may vary.
        seed: the seed of the weights and inputs.
        mode: ``"eval"``, or ``"train"`` to leave the model as the factory made it.
        loss: the loss of a model that returns none, as `splitkit.testing.factory.with_loss` takes it.
        mesh: the ranks that share each stage, as `splitkit.cli.mesh.read_mesh` takes them.
    """

    spec: str
    sizes: Mapping[str, int]
    how: str = "export"
    dynamic: bool = False
    seed: int = 0
    mode: str = "train"
    loss: str | None = None
    mesh: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data, without a loss or mesh that nobody has given."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def source_record(source: Source, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the record of a model for a file or folder at ``path``, with the factory's file relative to it."""
    place = Path(source.spec.rpartition(":")[0])
    found = source.to_dict()
    if place.suffix == ".py":
        found["file"] = os.path.relpath(place, _folder(path))
    return found


def _folder(path: str | os.PathLike[str]) -> Path:
    """Return a folder itself, or the folder of a file."""
    given = Path(path)
    return given if given.is_dir() else given.parent


def require_inputs(source: Source, command: str) -> None:
    """Refuse to run one step of generation, whose inputs are caches, by a command for models with inputs of their own.

    Raises:
        UsageError: SK601.
    """
    if source.how == "decoder":
        reason = f"the graph is one step of generation, and splitkit {command} has no caches to run it with"
        raise UsageError("SK601", reason, "Run it with: splitkit generate; or plan without --how decoder.")


def from_args(spec: str, args: Namespace) -> Source:
    """Return the model that the command line names."""
    return with_options(Source(spec, {}), args)


def with_options(source: Source, args: Namespace) -> Source:
    """Return ``source`` with the options of the command line in place of its own.

    Raises:
        UsageError: SK402 and SK602 for a bad model name, SK601 for sizes and options that do not fit.
    """
    given = {
        name: value
        for name in ("how", "dynamic", "seed", "loss", "mesh")
        if (value := getattr(args, name, None)) is not None
    }
    if args.eval:
        given["mode"] = "eval"
    sizes = dict(source.sizes)
    for some in args.size or ():
        sizes |= some
    made = replace(source, sizes=sizes, **given)
    _check(made, plans=getattr(args, "target", None) == source.spec)
    return made


def _check(source: Source, plans: bool) -> None:
    factories.check_model_name(source.spec, plans)
    if source.loss is not None:
        if source.how != "export":
            raise UsageError("SK601", f"--loss does not work with --how {source.how}", "Leave one of them out.")
        factories.check_loss(source.loss)
    known = SIZES.get(source.spec)
    for name in source.sizes:
        if known is not None and name not in known:
            remedy = nearest(name, known, f"Its sizes are {', '.join(known)}.")
            raise UsageError("SK601", f"{source.spec} has no size {name!r}", remedy)
        if name in RESERVED:
            raise UsageError("SK601", f"a size cannot be called {name!r}", "Give the factory another parameter.")
    if source.dynamic and source.how != "export":
        raise UsageError("SK601", f"--dynamic does not work with --how {source.how}", "Use --how export.")


def next_command(
    source: Source,
    plan: str | None,
    ranks: int = 0,
    schedule: str = "",
    microbatches: int | None = None,
    tokens: bool = True,
) -> str | None:
    """Return the command that runs a plan file and compares it with the unsplit model, or generates with it.

    There is none without a file.

    Args:
        source: the model that the plan was made for.
        plan: the plan file.
        ranks: the number of processes, for a plan that trains as a pipeline.
        schedule: the schedule of that pipeline.
        microbatches: the microbatches of its step; by default not said.
        tokens: whether the model reads tokens, and not speech.
    """
    if plan is None or plan.startswith("/dev/") or (source.mesh is not None and not ranks):
        return None
    asks = ["--prompt-ids", "1,2,3"] if tokens else ["--requests", "requests.jsonl"]
    words = ["splitkit", "generate" if source.how == "decoder" else "train" if ranks else "run", plan]
    words += options_of_own_code(source)
    if source.how == "decoder" and (weights := checkpoint_beside(source.spec)):
        own = shlex.join(["splitkit", "split", plan, "-o", "stages"])
        return own + " && " + shlex.join([*words[:2], "stages", "--weights", weights, *asks])
    if source.how == "decoder":
        return shlex.join([*words, *asks])
    if ranks:
        words += ["--nproc", str(ranks * ranks_of_mesh(source.mesh)), "--schedule", schedule]
        words += [] if microbatches is None else ["--microbatches", str(microbatches)]
    return shlex.join([*words, "--check"])


def runs_code(spec: str) -> bool:
    """Whether making a model runs code that its user has written: not for an example or a configuration."""
    return spec not in NAMES and not is_config(spec)


def options_of_own_code(source: Source) -> list[str]:
    """Return the options that let a command with a plan file run the code that its user has written."""
    words = ["--model", source.spec] if runs_code(source.spec) else []
    return [*words, "--loss", source.loss] if source.loss is not None and source.loss not in LOSSES else words


def from_plan(path: str, data: Mapping[str, Any], args: Namespace) -> Source:
    """Return the model of a plan file: the recorded one, or that of ``--model``.

    A plan file may come from anywhere, so a factory is never called only because the file names it: the user must name
    it too. A factory's file that is not in the current folder is looked for next to the plan.

    Raises:
        UsageError: SK601 if ``--model`` must be given.
        FileError: SK501 if the record is damaged.
    """
    record = data.get("model")
    if record is None:
        if args.model is None:
            raise UsageError("SK601", f"{path} does not say which model it is for", "Pass --model MODEL.")
        return from_args(args.model, args)
    found = recorded(path, record)
    spec = _found(args.model or found.spec, path, found.spec, record.get("file"))
    if args.model is None and runs_code(found.spec):
        raise UsageError("SK601", f"this plan was made for {found.spec!r}", f"Pass --model {spec} to run that code.")
    require_loss_of_plan(found, args)
    return with_options(replace(found, spec=spec), args)


def require_loss_of_plan(found: Source, args: Namespace) -> None:
    """Refuse a loss that a plan or a folder of stages was not made with, and to run one's code unless it is named.

    Raises:
        UsageError: SK601.
    """
    given = args.loss
    if given is None and found.loss is not None and found.loss not in LOSSES:
        raise UsageError(
            "SK601", f"this plan was made with the loss {found.loss!r}", f"Pass --loss {found.loss} to run that code."
        )
    if given is not None and Path(given).name != Path(found.loss or "").name:  # a path may be relative to elsewhere
        made = f"with the loss {found.loss!r}" if found.loss else "without --loss"
        raise UsageError("SK601", f"{args.target} was made {made}, and its graph has no other", "Plan again with it.")


def _found(spec: str, path: str, own: str, file: object) -> str:
    """Find a factory's file that is not in the current folder: where the plan says it is, or next to the plan.

    Args:
        spec: the factory to find.
        path: the path of the plan, or of a folder of stages.
        own: the factory that the plan was made with.
        file: the path of its file in the plan's record, relative to the plan.
    """
    place, _, name = spec.rpartition(":")
    if not place.endswith(".py") or Path(place).is_file():
        return spec
    besides = [_folder(path) / place, Path(path).parent / place]
    if spec == own and isinstance(file, str) and file.isprintable() and file.endswith(".py"):
        besides.insert(0, _folder(path) / file)
    there = next((p for p in besides if p.is_file()), None)
    return spec if there is None else f"{os.path.relpath(there)}:{name}"


def recorded(path: str, record: Any) -> Source:
    """Return the model that a file records.

    Raises:
        FileError: SK501 if the record is damaged.
    """
    if not isinstance(record, dict) or not isinstance(record.get("spec"), str):
        raise _damaged(path, "model")
    source = Source(**{"sizes": {}} | {k: v for k, v in record.items() if k in Source.__dataclass_fields__})
    sizes = source.sizes
    sound = {
        "spec": source.spec.isprintable(),
        "sizes": isinstance(sizes, dict) and all(k.isidentifier() and _natural(v) for k, v in sizes.items()),
        "how": source.how in ("export", "symbolic_trace", "decoder"),
        "dynamic": isinstance(source.dynamic, bool),
        "seed": _natural(source.seed),
        "mode": source.mode in ("train", "eval"),
        "loss": source.loss is None or (isinstance(source.loss, str) and source.loss.isprintable()),
        "mesh": source.mesh is None or (isinstance(source.mesh, str) and _is_mesh(source.mesh)),
    }
    for field, fine in sound.items():
        if not fine:
            raise _damaged(path, f"model.{field}")
    return source


def _is_mesh(text: str) -> bool:
    try:
        return bool(read_mesh(text))
    except SplitError:
        return False


def _natural(value: object) -> bool:
    return is_whole(value) and value < 10**18


def _damaged(path: str, field: str) -> FileError:
    return FileError("SK501", f"{path} is damaged: its field {field!r} makes no sense", "Plan again.", [field])
