"""``splitkit policies``: lists the policies for ``--policy``, without importing torch or their packages."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from splitkit.cli.outcome import Outcome
from splitkit.cli.syntax.policy_spec import Builtin, builtins, installed
from splitkit.view.tables import table


def run(args: Namespace) -> Outcome:
    """Run ``splitkit policies``."""
    rows = [_own(policy) for policy in builtins().values()]
    for name, entry in installed().items():
        brought = f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value
        row = {"name": name, "signature": f"{name}(...)", "doc": f"Brought by {brought}.", "from": entry.value}
        rows.append({**row, "command_line": True})
    cells = [(r["signature"], r["doc"] if r["command_line"] else f"(Python only) {r['doc']}") for r in rows]
    return Outcome({"policies": rows}, [table(("policy", "what it does"), cells)])


def _own(policy: Builtin) -> dict[str, Any]:
    return {
        "name": policy.name,
        "signature": policy.signature,
        "doc": policy.doc,
        "from": "splitkit",
        "command_line": not policy.function,
    }
