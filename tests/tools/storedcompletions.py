"""The completion scripts as they are stored; ``python tests/tools/storedcompletions.py`` stores them anew after a
change of the command line.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import shtab

import splitkit.cli.completions as completions
from splitkit.cli.completions import SHELLS
from splitkit.cli.parser import make_parser

FILES = ("FILE", "PATH", "DIR", "FOLDER", "MODEL", "PLAN", "TRACE", "CONFIG", "a.json", "b.json")
"""Words in the metavar of an argument that names a file."""


def parsers(parser):
    """A parser and those of its commands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for own in action.choices.values():
                yield from parsers(own)


def script(shell: str) -> str:
    """The script that shtab makes now."""
    parser = make_parser()
    for own in parsers(parser):
        for action in own._actions:
            if isinstance(action.metavar, str) and any(word in action.metavar for word in FILES):
                action.complete = shtab.FILE
    return shtab.complete(parser, shell).rstrip("\n") + "\n"


if __name__ == "__main__":
    for shell in SHELLS:
        suffix = {"bash": "sh"}.get(shell, shell)
        Path(completions.__file__).with_name(f"splitkit.{suffix}").write_text(script(shell))
