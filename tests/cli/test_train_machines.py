"""``splitkit train`` under two torchrun agents on the loopback, as on two machines."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

TINY = ["--size", "layers=1,width=16,heads=2", "--size", "vocab=32,seq=4"]


@pytest.mark.campaign
def test_two_machines_train_one_pipeline(tmp_path, call):
    code, _, _ = call("plan", "gpt2", *TINY, "--stages", "2", "-o", str(tmp_path / "plan.json"))
    assert code == 0
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    words = ["train", "plan.json", "--microbatches", "2", "--steps", "2", "--check", "--json"]
    agents = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node)),
                *("--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)),
                *("-m", "splitkit", *words),
            ],
            cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=True,
        )
        for node in range(2)
    ]  # fmt: skip
    try:
        made = [agent.communicate(timeout=300) for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, 9)
    assert [agent.returncode for agent in agents] == [0, 0], made
    data = json.loads(made[0][0])
    assert data["check"]["same"] and [r["stages"] for r in data["ranks"]] == [[0], [1]] and not made[1][0]
