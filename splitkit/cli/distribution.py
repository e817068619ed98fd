"""Finds another distribution that installs a package or a command called ``splitkit``, and so hides this one."""

from __future__ import annotations

import re
import shutil
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

OWN = "splitkit-torch"
"""The name on PyPI, where ``splitkit`` is another project with the same import name and command."""
REMEDY = f"pip uninstall splitkit {OWN}, then install {OWN} again"


def other() -> str | None:
    """Return name, version and summary of an installed distribution called ``splitkit``, or ``None``.

    It is either the other project, or this one from before it was renamed to ``splitkit-torch``.
    """
    try:
        found = distribution("splitkit").metadata
    except PackageNotFoundError:
        return None
    return f"splitkit {found['Version']}" + (f": {found['Summary']}" if "Summary" in found else "")


def installed_command() -> tuple[str, str] | None:
    """Return the file of the command ``splitkit`` on the path, and the module that it starts; ``None`` if unknown."""
    file = shutil.which("splitkit")
    try:
        starts = re.search(rb"^from (\S+) import ", Path(file or "").read_bytes(), re.M)
    except OSError:
        return None
    return None if file is None or starts is None else (file, starts[1].decode("ascii", "replace"))
