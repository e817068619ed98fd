"""Other distributions that install a package called ``splitkit``, and so overwrite files of this one."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution

OWN = "splitkit-torch"
"""The name on the package index, where ``splitkit`` is another project with the same import name and command."""
REMEDY = f"pip uninstall splitkit {OWN}, then install {OWN} again"


def other() -> str | None:
    """Name, version and summary of an installed distribution called ``splitkit``; ``None`` if there is none.

    It is either the other project of that name, or this one as it was called before it became ``splitkit-torch``.
    """
    try:
        found = distribution("splitkit").metadata
    except PackageNotFoundError:
        return None
    return f"splitkit {found['Version']}" + (f": {found['Summary']}" if "Summary" in found else "")
