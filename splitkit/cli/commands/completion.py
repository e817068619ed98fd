"""``splitkit completion``: prints a script that completes commands and options in a shell."""

from __future__ import annotations

from argparse import Namespace

from splitkit.cli.completions import completion_script
from splitkit.cli.outcome import Outcome


def run(args: Namespace) -> Outcome:
    """Run ``splitkit completion``."""
    script = completion_script(args.shell)
    return Outcome({"command": "completion", "shell": args.shell, "script": script}, [script.rstrip("\n")])
