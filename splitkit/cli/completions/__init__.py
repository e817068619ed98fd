"""Completion scripts for shells, made from the parser by shtab (``python tests/tools/storedcompletions.py``)."""

from __future__ import annotations

from importlib.resources import files

SHELLS = ("bash", "zsh", "fish")


def completion_script(shell: str) -> str:
    """Return the script for one of `SHELLS`."""
    suffix = {"bash": "sh"}.get(shell, shell)
    return files(__name__).joinpath(f"splitkit.{suffix}").read_text(encoding="utf-8")
