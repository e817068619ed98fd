"""One rank: runs the script of docs/training.md as it stands there."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main() -> None:
    (script,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "training.md").read_text(), re.S | re.M)
    port, text, folder = sys.argv[1:]
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    sys.argv = ["train.py", text, folder]
    said = list[str]()
    exec(compile(script, "docs/training.md", "exec"), {"print": lambda text, **_: said.append(text)})
    print(json.dumps({"said": said}), flush=True)
