"""Runs a command of splitkit in this process, and returns what it prints."""

from __future__ import annotations

import io
import json
import shlex
from contextlib import redirect_stderr, redirect_stdout

from splitkit import cli
from splitkit.errors import UsageError


def printed(words):
    """Run a command, and return what it printed; raises the error that it printed, as one of the family."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = cli.main([*shlex.split(words), "--json"])
    found = json.loads(out.getvalue() or err.getvalue())
    if code:
        raise UsageError(found["error"]["code"], found["error"]["reason"], found["error"]["remedy"])
    return found
