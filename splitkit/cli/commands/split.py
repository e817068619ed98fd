"""``splitkit split``: splits a model, and shows or writes the code of the parts."""

from __future__ import annotations

import os
import shutil
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

import splitkit as sk
from splitkit import files
from splitkit.cli import source
from splitkit.cli.commands.train import split_as_planned
from splitkit.cli.common import (
    CapturedModel,
    decoded,
    plan_file,
    planned_by,
    prepare_step,
    save_stage_folder,
    stages_of_file,
    versions,
)
from splitkit.cli.mesh import require_one_rank
from splitkit.cli.outcome import Outcome
from splitkit.engine.staged_step import StagedStep
from splitkit.errors import FileError, UsageError

if TYPE_CHECKING:
    from torch import nn

    from splitkit.engine.split import Split
    from splitkit.runtime.ranks.stage_chain import StageSource


KIND = "splitkit split"
LISTS = ("split.json", "manifest.json")
PARTS = ("submod_*.py", "stage_*.py", "stage-*.json", "stage-*.safetensors")


def run(args: Namespace) -> Outcome:
    """Run ``splitkit split``."""
    if args.force and not args.output:
        raise UsageError("SK601", "--force needs -o DIR", "Name the folder to write.")
    file = plan_file(args)
    if file is not None and stages_of_file(file):
        return _split_step(args, file)
    work, plan, costs = planned_by(args, file)
    with work.clock.step("split", "splitting"):
        split = sk.split(work.gm, plan)
    data = {"command": "split", "model": work.source.to_dict(), **describe(split)}
    if args.output:
        data["no_stages"] = _write(Path(args.output), split, split, work, {**data, "kind": KIND, **versions()})
    table = sk.report(work.gm, split.plan, costs).table()
    data |= {"code": split.module.code, "seconds": work.clock.seconds, "folder": args.output}
    lacks = f"; no stages to train: {data['no_stages']}" if args.output and data["no_stages"] else ""
    written = ["", f"wrote {args.output} ({len(split.parts)} parts{lacks})"] if args.output else []
    return Outcome(data, [table, "", split.module.code.strip(), *written])


def _split_step(args: Namespace, file: dict[str, Any]) -> Outcome:
    """Divide a training step into the stages of a plan file."""
    from splitkit.runtime.ranks.planned_chain import chain_of_step

    wanted = source.from_plan(args.target, file, args)
    require_one_rank(wanted.mesh, "split")
    work = prepare_step(wanted)
    with work.clock.step("split", "dividing the step"):
        step = split_as_planned(work, decoded(work.gm.graph, args.target, file))
        assert isinstance(step, StagedStep), "the file has stages"
        parts = chain_of_step(step).split
    names, stages = part_module_names(parts), [str(stage) for stage in step.stages]
    rows = [
        {"part": i, "module": name, "stage": text}
        for i, (name, text) in enumerate(zip(names.values(), stages, strict=True))
    ]
    data: dict[str, Any] = {"command": "split", "model": work.source.to_dict(), "note": step.plan.note, "parts": rows}
    data |= {"qualified_names": dict(parts.qualified_names), "shared": [list(group) for group in parts.shared]}
    if args.output:
        data["no_stages"] = _write(Path(args.output), step, parts, work, {**data, "kind": KIND, **versions()})
    data |= {"code": parts.module.code, "seconds": work.clock.seconds, "folder": args.output}
    written = ["", f"wrote {args.output} ({len(stages)} parts)"] if args.output else []
    return Outcome(data, [str(step), "", parts.module.code.strip(), *written])


def describe(split: Split) -> dict[str, Any]:
    """Return the parts of a split in order, and its names with those of the original model, as data."""
    names = part_module_names(split)
    parts = [
        {
            "part": key if isinstance(key, str | int) else str(key),
            "module": names[part],
            "nodes": len(split.subgraphs[key].nodes),
            "inputs": [named_value(v) for v in split.subgraphs[key].inputs],
            "outputs": [named_value(v) for v in split.subgraphs[key].outputs],
        }
        for key, part in split.parts.items()
    ]
    return {
        "note": split.plan.note,
        "parts": parts,
        "qualified_names": dict(split.qualified_names),
        "shared": [list(group) for group in split.shared],
    }


def part_module_names(split: StageSource) -> dict[Any, str]:
    """Return the module of each part -> its name in the parent."""
    parts = set(split.parts.values())
    return {module: name for name, module in split.module.named_children() if module in parts}


def _write(
    folder: Path,
    split: Split | StagedStep,
    source: StageSource,
    work: CapturedModel,
    data: dict[str, Any],
) -> str | None:
    """Write all files into a draft folder next to the target, then move them: the target is never half written.

    Args:
        folder: the target.
        split: what was split.
        source: its parts.
        work: the model.
        data: the data of ``split.json``.

    Returns:
        The reason if there are no stages among the files, else ``None``.
    """
    from splitkit.plans import plan_file

    target = Path(os.path.realpath(folder))  # a symbolic link to a folder stays a link
    try:
        draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise FileError("SK504", f"cannot write {folder}: {error.strerror}", "Name another folder.") from error
    try:
        for part, name in part_module_names(source).items():
            (draft / f"{name}.py").write_text(_readable(part), encoding="utf-8")
        (draft / "parent.py").write_text(source.module.code.lstrip(), encoding="utf-8")
        plan_file.write_json(draft / "split.json", data)
        lacks = save_stage_folder(draft, split, work)
        draft.chmod(0o755)
        _move(draft, target)
        return lacks
    except OSError as error:
        raise FileError("SK504", f"cannot write {folder}: {error.strerror}", "Name another folder.") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _move(draft: Path, target: Path) -> None:
    if not target.exists():
        draft.rename(target)
        return
    _drop_earlier_parts(target)
    for file in sorted(
        draft.iterdir(), key=lambda f: f.name in LISTS
    ):  # the lists of the parts come last: they never name files that are not there yet
        if file.suffix == ".safetensors":
            shutil.move(file, target / file.name)
        else:
            files.write_file(target / file.name, file.read_text(encoding="utf-8"))  # symbolic links stay links


def _drop_earlier_parts(target: Path) -> None:
    """Remove the parts of an earlier split, which would look like parts of this one, and nothing else."""
    if (target / "split.json").is_file():
        (target / "manifest.json").unlink(missing_ok=True)
        for file in (f for pattern in PARTS for f in target.glob(pattern)):
            file.unlink()


def _readable(part: nn.Module) -> str:
    from splitkit.runtime.ranks.planned_stage import graphs_of

    return "\n\n".join(graph.print_readable(print_output=False).lstrip() for graph in graphs_of(part))


# Describes nodes and values as plain data.


def named_value(node: Node) -> dict[str, Any]:
    """Return the name and the type of a node's value."""
    return {"name": node.name, **value_data(node.meta.get("val"))}


def value_data(value: object) -> dict[str, Any]:
    """Return the shape and dtype of a tensor, the ``items`` of a tuple, or the type of anything else."""
    if isinstance(value, torch.Tensor):
        return {"shape": [size_data(s) for s in value.shape], "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, tuple | list):
        return {"shape": None, "dtype": None, "items": [value_data(v) for v in value]}
    return {"shape": None, "dtype": None if value is None else type(value).__name__}


def tensor_text(value: object) -> str:
    """Return ``float32[2, 8, 64]``."""
    if isinstance(value, tuple | list):
        return f"({', '.join(map(tensor_text, value))})"
    data = value_data(value)
    return f"{data['dtype']}{data['shape'] if data['shape'] is not None else ''}"


def size_data(size: int | torch.SymInt) -> int | str:
    """Return a size as a number, or as its symbol if it varies; torch may keep a symbol for a size that is fixed."""
    return int(str(size)) if str(size).isdigit() else str(size)
