"""Completion scripts: as shtab makes them from the command line that there is, and working in bash."""

from __future__ import annotations

import subprocess

import pytest
from storedcompletions import script

from splitkit.cli.completions import SHELLS, completion_script


@pytest.mark.parametrize("shell", SHELLS)
def test_stored_scripts_are_of_this_command_line(shell, call):
    """If not: ``python tests/tools/storedcompletions.py``."""
    assert completion_script(shell) == script(shell)
    assert call("completion", shell) == (0, completion_script(shell), "")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("splitkit pla", "plan"),
        ("splitkit plan gpt2 --stag", "--stages"),
        ("splitkit plan gpt2 --what fwd", "fwd-bwd"),
        ("splitkit completion z", "zsh"),
    ],
)
def test_bash_completes(words, offered, tmp_path):
    (tmp_path / "completion").write_text(completion_script("bash"))
    count = len(words.split())
    line = f"source completion; COMP_WORDS=({words}); COMP_CWORD={count - 1}; _shtab_splitkit; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [offered], done.stderr
