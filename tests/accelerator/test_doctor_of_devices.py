"""`splitkit doctor --device`, whole: every check on the CPU, and on the simulated accelerator."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import simgpu

from splitkit.cli.selftest.check_runs import FAILED, MEASURED, NOT_RUN, OK, SECONDS


@pytest.mark.campaign
@pytest.mark.parametrize("device", ["cpu", "simgpu:0,simgpu:1"])
def test_the_whole_command(tmp_path, device):
    """Four minutes; all of it on the CPU, and on the simulated accelerator."""
    if simgpu.missing() and device != "cpu":
        pytest.skip(simgpu.missing())
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nif any('splitkit' in word for word in sys.orig_argv):\n    import simgpu\n    simgpu.register()\n"
    )
    path = [str(tmp_path), *sys.path] if device != "cpu" else sys.path
    words = [sys.executable, "-m", "splitkit", "doctor", "--device", device, "-o", str(tmp_path / "found.json")]
    env = os.environ | {"PYTHONPATH": ":".join(path)}
    ended = subprocess.run(words, env=env, capture_output=True)
    found = json.loads((tmp_path / "found.json").read_text())
    failed = [one for one in found["findings"] if one["verdict"] == FAILED]
    assert not failed and ended.returncode == 0, failed
    assert {one["check"] for one in found["findings"]} == SECONDS.keys()
    assert {one["verdict"] for one in found["findings"]} == {OK, MEASURED, NOT_RUN}
