"""``python ranks.py SCRIPT RANKS ARGS...``: imports a script once, and runs its ``main`` in a process for each rank.

``ARGS -- ARGS -- ...`` are several runs, one after another, each after a line that says ``{"next": its ARGS}``; as
RANKS, ``2,4`` is each of them on two ranks and on four.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import traceback
from itertools import pairwise
from pathlib import Path


def main() -> None:
    script, counts, words = sys.argv[1], [int(count) for count in sys.argv[2].split(",")], sys.argv[3:]
    starts = [0, *(number + 1 for number, word in enumerate(words) if word == "--"), len(words) + 1]
    runs = [words[start : end - 1] for start, end in pairwise(starts)]
    sys.argv = sys.argv[:1] + runs[0]
    sys.path.insert(0, str(Path(script).parent))
    spec = importlib.util.spec_from_file_location("script", script)
    module = importlib.util.module_from_spec(spec)
    sys.modules["script"] = module
    spec.loader.exec_module(module)
    getattr(module, "prepare", lambda: None)()  # what all ranks do alike
    for args in runs:
        if len(runs) > 1:
            print(json.dumps({"next": args}), flush=True)
        sys.argv = sys.argv[:1] + args
        for count in counts:
            start(module, count)


def start(module: object, count: int) -> None:
    """One run; what its ranks write is written when all have ended."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"WORLD_SIZE": str(count), "SPLITKIT_STORE": f"file://{folder}/store"}
        children = {}
        for rank in range(count):
            child = os.fork()
            if not child:
                os.environ["RANK"] = str(rank)
                run(module, Path(folder), rank)
            children[child] = rank
        for _ in range(count):
            child, status = os.wait()
            rank = children[child]
            out, error = ((Path(folder) / f"{rank}.{kind}").read_text() for kind in ("out", "err"))
            print(out, end="")
            print(json.dumps({"rank": rank, "code": os.waitstatus_to_exitcode(status), "error": error}), flush=True)


def run(module: object, folder: Path, rank: int) -> None:
    """The process of a rank; it writes to files of its own."""
    for number, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{rank}.{kind}", os.O_WRONLY | os.O_CREAT), number)
    code = 1
    try:
        module.main()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
