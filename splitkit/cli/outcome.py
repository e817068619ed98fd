"""What a command returns: data for ``--json``, text for people, an exit code, and files and pages to write."""

from __future__ import annotations

import math
import os
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from splitkit import files
from splitkit.errors import FileError, SplitError, UsageError
from splitkit.files import suffix_of
from splitkit.units import size

if TYPE_CHECKING:
    from rich.console import RenderableType

    from splitkit.plans.record import Plan

Lines: TypeAlias = "list[RenderableType]"
"""What a command prints: strings and rich tables."""


@dataclass(frozen=True)
class Outcome:
    """The result of a command, which `splitkit.cli.main` prints.

    Attributes:
        data: what ``--json`` prints, after the name of the command.
        text: strings and rich tables for people.
        code: the exit code.
        files: path -> text, or data to write as JSON, before anything is printed.
        quiet: whether to print nothing, because another process does.
    """

    data: Mapping[str, Any]
    text: Sequence[RenderableType]
    code: int = 0
    files: Mapping[str, Mapping[str, Any] | str] = field(default_factory=dict)
    quiet: bool = False


def jsonable(value: Any) -> Any:
    """Return data with ``None`` in place of infinities and NaNs, which JSON lacks."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): jsonable(v) for k, v in value.items()}
    return [jsonable(v) for v in value] if isinstance(value, list | tuple) else value


def seconds_text(value: float) -> str:
    """Return ``12.3 ms`` for 0.0123."""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


# Checks the output files of a command before it starts, and writes them at its end.


STDOUT = "/dev/stdout"
FOR_PERFETTO = "(for https://ui.perfetto.dev or chrome://tracing)"


def check_outputs(args: Namespace) -> None:
    """Refuse outputs that cannot be written or would overwrite an input, before torch is imported.

    Replaces ``-`` in ``args`` by `STDOUT`.

    Raises:
        FileError: SK504 if an output cannot be written.
        UsageError: SK603 if two outputs, or an output and an input, are the same file.
    """
    wanted = {}
    for option in ("output", "trace", "order", "view"):
        path = getattr(args, option, None)
        if path is None:
            continue
        if path == "-" and args.command != "split":
            path = STDOUT
            setattr(args, option, path)
        wanted["-o" if option == "output" else f"--{option}"] = path
    for option, path in wanted.items():
        if any(_same(path, source) for source in _inputs(args)):
            raise UsageError("SK603", f"{option} {path} would overwrite what this command reads", "Name another file.")
        _require_page(option, path, args.command)
    for (one, path), (other, again) in combinations(wanted.items(), 2):
        if _same(path, again):  # the second would overwrite the first
            raise UsageError("SK603", f"{one} and {other} both name {path}", "Name two files.")
    if args.command == "split":
        if args.output is not None:
            _require_folder(args.output, args.force)
        return
    for option, path in wanted.items():
        if args.json and files.descriptor(path) == 1:
            raise UsageError(
                "SK603", f"{option} {path} and --json both print to standard output", f"Give {option} a file."
            )
        try:
            files.require_writable(path)
        except (OSError, ValueError) as error:
            raise files.refusal(path, error) from error


def _require_page(option: str, path: str, command: str) -> None:
    """Refuse a page whose name says that it is a picture of a kind that the command does not write."""
    draws = command == "view" and option == "-o"
    suffix = files.suffix_of(path)
    if (draws or option == "--view") and suffix in files.PICTURES and not (draws and suffix == ".svg"):
        still = "page.svg for a still picture" if draws else "draw a plan file: splitkit view PLAN.json -o page.svg"
        raise UsageError(
            "SK601", f"{option} writes a page, and {path} is not the name of one", f"Name it page.html; or {still}."
        )


def _inputs(args: Namespace) -> Iterator[str]:
    """Yield the texts in the arguments that may name an input file: the model, a plan, devices."""
    for name in ("model", "target", "devices", "costs", "beside", "measured", "from_file"):
        given = getattr(args, name, None)
        for text in given if isinstance(given, list) else [given] if given else []:
            yield text
            yield text.rpartition(":")[0]  # my.py:make, devices.toml:mine
            yield text.partition(":")[2].rpartition(":")[0]  # roofline:devices.toml:mine


def _same(one: str, other: str) -> bool:
    """Return whether two names are the same regular file, which need not exist yet."""
    try:
        if Path(one).exists() and Path(other).exists():
            return Path(one).is_file() and Path(one).samefile(other)
        return bool(one and other) and os.path.realpath(one) == os.path.realpath(other)
    except (OSError, ValueError):
        return False


def _require_folder(folder: str, force: bool) -> None:
    """Refuse a folder that `splitkit split` cannot fill."""
    path = Path(folder)
    if not folder:
        raise FileError("SK504", "cannot write '': the name is empty", "Name a folder, such as parts.")
    if path.exists() and not path.is_dir():
        raise FileError("SK504", f"{folder} is a file", "Name a folder: each part is written to a file in it.")
    if path.is_dir() and any(path.iterdir()) and not force:
        raise FileError("SK504", f"the folder {folder} is not empty", "Name another folder, or pass --force.")
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FileError("SK504", f"there is no folder {target.parent}", "Create it first.")
    try:
        files.require_room(target if target.is_dir() else target.parent)
    except OSError as error:
        raise FileError("SK504", f"cannot write {folder}: {error.strerror}", "Name another folder.") from error


def write_outputs(wanted: Mapping[str, Mapping[str, Any] | str]) -> bool:
    """Write texts, and data as JSON, each file whole or not at all; return whether one is standard output."""
    if not wanted:
        return False
    from splitkit.plans import plan_file  # imports torch

    for path, data in wanted.items():
        if isinstance(data, str):
            files.save_text(path, data)
        else:
            plan_file.write_json(path, data)
    return any(files.descriptor(path) == 1 for path in wanted)


# Makes the pages that ``splitkit view`` and ``--view`` write.
#
# The renderers import torch, so they are imported where they are used.


def drawn(path: str, shown: object, fields: Mapping[str, Any] | None = None, **options: Any) -> str:
    """Return the interactive page of an object, or its still picture for a file that ends in ``.svg``."""
    from splitkit.view.renderers import html, svg

    return svg(shown, **options) if suffix_of(path) == ".svg" else html(shown, fields=fields, **options)


def plan_page(plan: Plan, **options: Any) -> str:
    """Return the interactive page of a plan; if it cannot be drawn, a still page with the reason."""
    from splitkit.view.renderers import fallback_html, picture_html, pictured

    picture = pictured(plan, **options)
    try:
        return picture_html(picture)
    except SplitError as error:
        return fallback_html(picture, error)


def still_pages(title: str, shown: Mapping[str, object]) -> str:
    """Return one page of still pictures.

    Args:
        title: the title of the page.
        shown: heading -> the object to draw below it.
    """
    from splitkit.view.page.html import still_page
    from splitkit.view.renderers import pictured

    return still_page(title, "".join(pictured(one).inside(heading) for heading, one in shown.items()))


def wrote(path: str, text: str) -> str:
    """Return the line that reports a written page."""
    return f"wrote {path} ({size(len(text.encode()))}); open it in a browser"
