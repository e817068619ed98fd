"""Which functions of splitkit each test calls, for `mutation.py`: a pytest plugin, and what processes of tests import.

With ``SPLITKIT_CALLED`` set to a file, each process appends a line there for the first call of a function in a test.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

HERE = Path(__file__).resolve().parents[2]
FAILED = "failed"
"""In place of a function, of a test that fails without a bug."""
Called = tuple[float, frozenset[str]]
"""Seconds of processor time of a test, and the functions that it calls, as ``file:qualified name``."""
PACKAGE = f"{HERE / 'splitkit'}{os.sep}"


class Recorder:
    """Writes down calls of this process and of those that it starts, by the test that runs."""

    def __init__(self, file: str) -> None:
        self._out = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._seen: dict[int, CodeType] = {}
        self._foreign: dict[int, CodeType] = {}
        os.register_at_fork(after_in_child=self._seen.clear)
        threading.settrace(self._trace)
        sys.settrace(self._trace)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if id(code) in self._foreign or id(code) in self._seen:
            return
        if code.co_filename.startswith(PACKAGE):
            self._seen[id(code)] = code
            if test := os.environ.get("PYTEST_CURRENT_TEST"):
                name = code.co_qualname.split(".<locals>")[0]
                line = f"{test.rpartition(' (')[0]}\t{code.co_filename.removeprefix(PACKAGE)}:{name}\n"
                os.write(self._out, line.encode())
        elif code.co_filename.startswith(os.sep):  # a file, which keeps its functions
            self._foreign[id(code)] = code

    def pytest_runtest_logstart(self) -> None:
        self._seen.clear()
        sys.settrace(self._trace)  # a test may have ended it

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            os.write(self._out, f"{report.nodeid}\t{FAILED}\n".encode())


def pytest_configure(config: Any) -> None:
    config.pluginmanager.register(RECORDER)


def recorded(store: Path, campaigns: bool, files: list[Path]) -> dict[str, Called]:
    """What each test of some files calls.

    Only files that changed since the last time are run; the others are read from ``store``.
    """
    known: dict[str, Any] = json.loads(store.read_text()) if store.exists() else {"functions": [], "files": {}}
    names = {str(file.relative_to(HERE)): hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in files}
    keys = {name: f"{name} {'campaigns ' if campaigns else ''}{digest}" for name, digest in names.items()}
    missing = [name for name, key in keys.items() if key not in known["files"]]
    if missing:
        print(f"running {len(missing)} test files without a bug", flush=True)
        number = {function: i for i, function in enumerate(known["functions"])}
        stale = {keys[name].rpartition(" ")[0] for name in missing}
        ran = {key: tests for key, tests in known["files"].items() if key.rpartition(" ")[0] not in stale}
        ran |= {keys[name]: {} for name in missing}
        for test, (seconds, calls) in _run(missing, campaigns).items():
            calling = sorted(number.setdefault(function, len(number)) for function in calls)
            ran[keys[test.partition("::")[0]]][test] = (round(seconds, 3), calling)
        known = {"functions": [*number], "files": ran}
        store.write_text(json.dumps(known))
    tests = [(test, called) for key in keys.values() for test, called in known["files"][key].items()]
    return {test: (seconds, frozenset(known["functions"][i] for i in calling)) for test, (seconds, calling) in tests}


def _run(names: list[str], campaigns: bool) -> dict[str, tuple[float, set[str]]]:
    folder = Path(tempfile.mkdtemp(prefix="called-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "sitecustomize.py").write_text("import called\n")
    paths = [str(folder), str(HERE), str(HERE / "tests" / "tools"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "SPLITKIT_CALLED": str(folder / "calls")}
    words = ["-q", "-p", "called", f"--times={folder / 'times'}", *(["-m", ""] if campaigns else []), *names]
    subprocess.run([sys.executable, "-m", "pytest", *words], cwd=HERE, env=environment)
    seconds: dict[str, float] = defaultdict(float)
    for test, _, spent in map(json.loads, (folder / "times").read_text().splitlines()):
        seconds[test] += spent
    calls: dict[str, set[str]] = defaultdict(set)
    with (folder / "calls").open() as lines:
        for line in lines:
            test, _, function = line.rstrip("\n").partition("\t")
            calls[test].add(sys.intern(function))
    failed = [test for test, called in calls.items() if FAILED in called]
    if failed:
        print("left out, as they fail without a bug:", *failed, sep="\n", flush=True)
    return {test: (spent, calls[test]) for test, spent in seconds.items() if test not in failed}


if "SPLITKIT_CALLED" in os.environ:
    RECORDER = Recorder(os.environ["SPLITKIT_CALLED"])
