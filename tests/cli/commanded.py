"""One rank of a command, as ``--nproc`` starts it: a JSON line of what the command says."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import sys

from splitkit import cli


def prepare() -> None:
    """Where the ranks meet."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(found.getsockname()[1])}


def main() -> None:
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    if factor := float(os.environ.get("SPOIL_GRADIENTS", "1")) - 1:
        spoil_gradients(1 + factor)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = cli.main([*sys.argv[1:], "--json"])
    if os.environ["RANK"] == "0":
        print(json.dumps({"ended": code, "data": json.loads(said.getvalue())}), flush=True)


def spoil_gradients(factor: float) -> None:
    """Scale the gradients of the pipeline, on this rank."""
    from splitkit.runtime.ranks.pipeline import Pipeline

    make = Pipeline.__init__

    def spoiled(self: Pipeline, *args: object) -> None:
        make(self, *args)
        for parameter in self.parameters():
            parameter.register_hook(lambda grad: grad * factor)

    Pipeline.__init__ = spoiled
