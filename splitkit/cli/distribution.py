"""Finds another distribution that installs a package called ``splitkit`` and so overwrites files of this one."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution

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
