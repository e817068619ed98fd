"""``splitkit split``: cut the graph, show or write the code of the parts."""

from __future__ import annotations

import os
import shutil
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import splitkit as sk
from splitkit import files
from splitkit.cli.outcome import Outcome
from splitkit.cli.work import planned, versions
from splitkit.errors import FileError, UsageError

if TYPE_CHECKING:
    from torch import fx

    from splitkit.engine.split import Split

KIND = "splitkit split"


def run(args: Namespace) -> Outcome:
    """See the module."""
    if args.force and not args.output:
        raise UsageError("SK601", "--force goes with -o DIR", "Name the folder to write.")
    work, plan, costs = planned(args)
    with work.clock.step("split", "splitting"):
        split = sk.split(work.gm, plan)
    data = {"command": "split", "model": work.source.to_dict(), **describe(split)}
    if args.output:
        _write(Path(args.output), split, {**data, "kind": KIND, **versions()})
    table = sk.report(work.gm, split.plan, costs).table()
    data |= {"code": split.module.code, "seconds": work.clock.seconds, "folder": args.output}
    written = ["", f"wrote {args.output} ({len(split.parts)} parts)"] if args.output else []
    return Outcome(data, [table, "", split.module.code.strip(), *written])


def describe(split: Split) -> dict[str, Any]:
    """The parts of a split in order, and how its names relate to the original's."""
    from splitkit.cli.describe import named_value

    names = part_names(split)
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


def part_names(split: Split) -> dict[Any, str]:
    """The module of each part -> its name in the parent."""
    parts = set(split.parts.values())
    return {module: name for name, module in split.module.named_children() if module in parts}


def _write(folder: Path, split: Split, data: dict[str, Any]) -> None:
    """All files are made in a folder beside the target first, then moved: whole or not at all."""
    from splitkit.plans import file as planfile

    target = Path(os.path.realpath(folder))  # a link to a folder stays one
    try:
        draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise FileError("SK504", f"cannot write {folder}: {error.strerror}", "Name another folder.") from error
    try:
        for part, name in part_names(split).items():
            (draft / f"{name}.py").write_text(_readable(part), encoding="utf-8")
        (draft / "parent.py").write_text(split.module.code.lstrip(), encoding="utf-8")
        planfile.write(draft / "split.json", data)
        draft.chmod(0o755)
        _move(draft, target)
    except OSError as error:
        raise FileError("SK504", f"cannot write {folder}: {error.strerror}", "Name another folder.") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _move(draft: Path, target: Path) -> None:
    if not target.exists():
        draft.rename(target)
        return
    _drop_earlier_parts(target)
    for file in sorted(draft.iterdir(), key=lambda f: f.name == "split.json"):  # the list of the parts comes last
        files.write(target / file.name, file.read_text(encoding="utf-8"))  # links among them stay links


def _drop_earlier_parts(target: Path) -> None:
    """Parts of an earlier split that would look like parts of this one; nothing else is removed."""
    if (target / "split.json").is_file():
        for file in target.glob("submod_*.py"):
            file.unlink()


def _readable(part: fx.GraphModule) -> str:
    return part.print_readable(print_output=False).lstrip()
