"""What docs/explain.md shows runs as shown."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from splitkit.cli.parser import make_parser

PAGE = (Path(__file__).parents[3] / "docs" / "explain.md").read_text()


def test_the_python_block_runs(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    exec(block, {})
    said = capsys.readouterr().out
    for words in ("is the slowest", "planned again with", "layer_norm_2 is layer_norm", "Better in", "The peak is"):
        assert words in said


def test_the_commands_are_understood():
    commands = re.findall(r"^splitkit (.*)$", PAGE, re.M)
    assert len(commands) == 7
    for command in commands:
        make_parser().parse_args(shlex.split(command))
