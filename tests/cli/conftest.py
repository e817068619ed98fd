"""What tests of the command line share."""

from __future__ import annotations

import json

import pytest

from splitkit import cli


@pytest.fixture
def call(capsys):
    """Run a command; the exit code, what it printed, what it complained."""

    def run(*words):
        capsys.readouterr()
        code = cli.main([str(w) for w in words])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.fixture
def data(call):
    """Run a command with --json: the exit code and the one object."""

    def run(*words):
        code, out, _ = call(*words, "--json")
        return code, json.loads(out)

    return run
