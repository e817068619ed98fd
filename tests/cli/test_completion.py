"""Completion scripts work in bash, and name the commands and options of the command line in every shell."""

from __future__ import annotations

import subprocess

import pytest

from splitkit.cli.commands.completion import completion_script
from splitkit.cli.parser import SHELLS


@pytest.mark.parametrize("shell", SHELLS)
def test_the_command_prints_a_script(shell, call):
    code, script, error = call("completion", shell)
    assert (code, error) == (0, "") and script == completion_script(shell).rstrip("\n") + "\n"
    assert all(word in script for word in ("synthesize", "fwd-bwd", "microbatches"))


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
