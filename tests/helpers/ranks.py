"""A process that has imported what scripts need, and forks one for each script, which forks one for each rank.

Each line of its input says as JSON what `launch` of ``launch.py`` is asked: ``words`` are ``SCRIPT RANKS ARGS...``. The
script's ``prepare`` runs once, its ``main`` in the process of each rank. ``ARGS -- ARGS -- ...`` are several runs, one
after another, each after a line that says ``{"next": its ARGS}``, or all of them at once with ``at_once``; as RANKS,
``2,4`` is each of them on two ranks and on four.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import sys
import tempfile
import traceback
from functools import partial
from itertools import pairwise
from pathlib import Path


def serve() -> None:
    """Run a script for each line, and say how it ended, and how many seconds of processor time it took."""
    imported()
    gc.collect()
    gc.freeze()  # the forks need not look at it
    for line in sys.stdin:
        child = os.fork()
        if not child:
            told = json.loads(line)
            os.environ.clear()
            os.environ |= told["environment"]
            os.chdir(told["at"])
            sys.argv = ["ranks.py", *told["words"]]
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            ended(partial(main, told["at_once"]), Path(told["folder"]) / "out", Path(told["folder"]) / "err")
        _, status, used = os.wait4(child, 0)
        print(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, flush=True)


def imported() -> None:
    """What most scripts import, or have torch import when they capture a model."""
    import torch
    from torch import nn
    from transformers.models.gpt2 import modeling_gpt2  # noqa: F401

    import splitkit as sk
    import splitkit.cli.commands.train
    import splitkit.runtime.ranks.pipeline
    import splitkit.testing.pipeline_check

    torch.set_num_threads(1)
    sk.split(sk.capture(nn.ReLU(), torch.ones(2)), sk.policies.Stages(1))


def main(at_once: bool) -> None:
    """The process of a script."""
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
    gc.collect()
    gc.freeze()  # what no rank need look at, or copy because it did
    if at_once:
        together(module, runs, counts)
        return
    for args in runs:
        if len(runs) > 1:
            print(json.dumps({"next": args}), flush=True)
        several(module, args, counts)


def several(module: object, args: list[str], counts: list[int]) -> None:
    """A run on each number of ranks."""
    sys.argv = sys.argv[:1] + args
    for count in counts:
        start(module, count)


def together(module: object, runs: list[list[str]], counts: list[int]) -> None:
    """All runs at the same time, for those that mostly wait; what each wrote is written in their order."""
    with tempfile.TemporaryDirectory() as folder:
        files, children = [Path(folder) / str(number) for number in range(len(runs))], []
        for args, path in zip(runs, files, strict=True):
            children.append(os.fork())
            if not children[-1]:
                ended(partial(several, module, args, counts), path)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        for args, path in zip(runs, files, strict=True):
            print(json.dumps({"next": args}), path.read_text(), sep="\n", end="", flush=True)
        assert not any(codes), codes


def start(module: object, count: int) -> None:
    """One run; what its ranks write is written when all have ended."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"WORLD_SIZE": str(count), "SPLITKIT_STORE": f"file://{folder}/store"}
        children = {}
        for rank in range(count):
            child = os.fork()
            if not child:
                os.environ["RANK"] = str(rank)
                ended(module.main, Path(folder) / f"{rank}.out", Path(folder) / f"{rank}.err")
            children[child] = rank
        for _ in range(count):
            child, status = os.wait()
            rank = children[child]
            out, error = ((Path(folder) / f"{rank}.{kind}").read_text() for kind in ("out", "err"))
            print(out, end="")
            print(json.dumps({"rank": rank, "code": os.waitstatus_to_exitcode(status), "error": error}), flush=True)


def ended(body: object, *files: Path) -> None:
    """Run the body of a process that was forked, which writes to files of its own, and end it."""
    for number, path in enumerate(files, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    import torch

    code = 1
    try:
        torch.set_num_threads(1)  # puts torch's pool of threads in order, which two threads at once do not after a fork
        body()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
