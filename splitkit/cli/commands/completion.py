"""``splitkit completion``: prints a script that completes commands and options in a shell, which shtab makes."""

from __future__ import annotations

from argparse import Namespace

from splitkit.cli.outcome import Outcome

FILES = ("FILE", "PATH", "DIR", "FOLDER", "MODEL", "PLAN", "TRACE", "CONFIG", "a.json", "b.json")
"""Words in the metavar of an argument that names a file."""


def run(args: Namespace) -> Outcome:
    """Run ``splitkit completion``."""
    script = completion_script(args.shell)
    return Outcome({"shell": args.shell, "script": script}, [script.rstrip("\n")])


def completion_script(shell: str) -> str:
    """Return the script for a shell, from the parser of the command line."""
    import shtab

    from splitkit.cli.parser import make_parser

    parser = make_parser()
    for action in parser.every_argument():
        if isinstance(action.metavar, str) and any(word in action.metavar for word in FILES):
            vars(action)["complete"] = shtab.FILE
    return shtab.complete(parser, shell)
