"""The readers of other tools, in an environment of their own (see ``readers.py``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from readers import READERS

pytestmark = pytest.mark.campaign


@pytest.mark.parametrize("name", list(READERS))
def test_it_reads_exports(name):
    """``SPLITKIT_READERS`` names the Python of that environment."""
    python = os.environ.get("SPLITKIT_READERS", sys.executable)
    script = Path(__file__).with_name("readers.py")
    run = subprocess.run([python, str(script), name], capture_output=True, text=True, check=False)
    found = next(json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"reader"'))
    if "missing" in found:
        pytest.skip(found["missing"])
    assert "ran" in found, found
