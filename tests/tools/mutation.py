"""Do the tests notice small bugs in a package? ``python tests/tools/mutation.py --package graph --count 30`` tries.

It plants one bug at a time (`mutants.py`) in functions drawn by seed, and runs the tests that call the function, which
one run of all tests told (`called.py`), the short ones of the package first. All this happens in a copy of the tree:
whatever ends the run, no bug stays behind. A process that has imported everything and collected the tests forks for
each bug and swaps the code of the changed functions, so that no bug waits for an import; processes that tests start
read the changed file instead.

Not planted: bugs at module level (tables, defaults, fields), which need a fresh import.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib
import os
import pkgutil
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from called import Called, recorded

HERE = Path(__file__).resolve().parents[2]
CALLED = Path(tempfile.gettempdir()) / f"splitkit-called-{os.getuid()}.json"
EXAMPLES = ["graph_zoo", "models", "specimens"]
"""Files of `splitkit.testing` that make examples: a bug there makes another example, and no wrong result."""

CAUGHT, SURVIVED, ENDLESS, LATE = "caught", "SURVIVED", "endless", "campaign"
"""What came of a bug: a test of the default tier failed, none failed, one did not end, only a campaign failed."""


@dataclass(frozen=True)
class Verdict:
    """One bug, and what came of it."""

    file: str
    line: int
    function: str
    kind: str
    diff: str
    outcome: str
    tests: int
    seconds: float

    def __str__(self) -> str:
        where = f"{self.file}:{self.line} {self.function}"
        return f"{self.outcome:<8} {where} ({self.kind}; {self.tests} tests, {self.seconds:.1f} s)"


class Campaign:
    """A pytest plugin that runs collected tests against bugs instead of once.

    Args:
        packages: folders of ``splitkit/``, or "top" for the files beside them.
        count: how many bugs in each.
        seed: which.
        each: seconds of processor time that the tests of one bug may take without it.
        calls: ``{test: (its seconds, functions that it calls)}``, without a bug.
        only: where given, the files (or ``file:function``) that get bugs, by a piece of their path.
    """

    def __init__(
        self, packages: list[str], count: int, seed: int, each: float, calls: dict[str, Called], only: str = ""
    ) -> None:
        self.packages, self.count, self.seed = packages, count, seed
        self.each, self.calls, self.only = each, calls, only
        self.verdicts: dict[str, list[Verdict]] = {package: [] for package in packages}
        self.failed = False

    def pytest_configure(self, config: Any) -> None:
        from hypothesis import Phase, settings

        settings.register_profile("mutation", database=None, phases=[Phase.explicit, Phase.generate])
        settings.load_profile("mutation")  # a caught bug need not be made smaller

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.failed = self.failed or report.failed

    def pytest_runtestloop(self, session: Any) -> bool:
        import splitkit

        self.root = Path(splitkit.__file__).parent
        assert self.root.parent == HERE, "this is not the splitkit of the copy"
        for package in self.packages:
            for module in pkgutil.walk_packages([str(self.root / package)], f"splitkit.{package}."):
                if not module.name.endswith("__main__"):
                    importlib.import_module(module.name)
        gc.unfreeze()  # `gc.get_objects` lists no frozen ones
        items = [item for item in session.items if item.nodeid in self.calls]
        for package in self.packages:
            for file, mutant in self.drawn(package):
                verdict = self._verdict(package, file, mutant, items)
                self.verdicts[package].append(verdict)
                print(verdict, flush=True)
                if verdict.outcome == SURVIVED:
                    print("    " + verdict.diff.replace("\n", "\n    "), flush=True)
        return True

    def drawn(self, package: str) -> Iterator[tuple[Path, Any]]:
        """Bugs in functions drawn by seed, each function once before any is drawn again."""
        from mutants import changes, planted

        dice = random.Random(f"{self.seed}/{package}")
        files = sorted(self.root.glob("*.py") if package == "top" else (self.root / package).rglob("*.py"))
        sources = {file: file.read_text() for file in files if file.stem not in {"__init__", "__main__", *EXAMPLES}}
        every = [
            (file, function, found)
            for file, source in sources.items()
            for function, found in changes(source).items()
            if found and self.only in f"{file}:{function}"
        ]
        drawn = 0
        while every and drawn < self.count:
            dice.shuffle(every)
            for file, _, found in every:
                dice.shuffle(found)
                mutant = None
                while found and mutant is None:
                    mutant = planted(sources[file], found.pop())
                if mutant is not None and drawn < self.count:
                    drawn += 1
                    yield file, mutant
            every = [one for one in every if one[2]]

    def _verdict(self, package: str, file: Path, mutant: Any, items: list[Any]) -> Verdict:
        name = str(file.relative_to(self.root))
        calling = [item for item in items if f"{name}:{mutant.change.function}" in self.calls[item.nodeid][1]]
        tiers = [
            self._chosen(package, [item for item in calling if bool(item.get_closest_marker("campaign")) is campaign])
            for campaign in (False, True)
        ]
        original = file.read_text()
        began = time.monotonic()
        outcome, asked = SURVIVED, 0
        self._write(file, mutant.source)
        try:
            for caught, chosen in zip((CAUGHT, LATE), tiers, strict=True):
                if outcome == SURVIVED and chosen:
                    asked += len(chosen)
                    tried = functools.partial(self._tried, file, (original, mutant.source), chosen)
                    seconds = sum(self.calls[item.nodeid][0] for item in chosen)
                    outcome = _outcome(self._fork(tried), 30 + 10 * seconds, caught)
        finally:
            self._write(file, original)
        change = mutant.change
        return Verdict(
            name, mutant.line, change.function, change.kind, mutant.diff, outcome, asked, time.monotonic() - began
        )

    def _chosen(self, package: str, items: list[Any]) -> list[Any]:
        """The short ones first, by file; a test of another package has its turn as if it took three times as long."""
        foreign = {item: f"tests/{package}/" not in item.nodeid for item in items}
        seconds, chosen = 0.0, []
        for item in sorted(items, key=lambda item: self.calls[item.nodeid][0] * (3 if foreign[item] else 1)):
            seconds += self.calls[item.nodeid][0]
            if not chosen or seconds <= self.each:
                chosen.append(item)
        files = list(dict.fromkeys(item.path for item in chosen))
        return sorted(chosen, key=lambda item: files.index(item.path))  # whose tests share what they set up

    def _tried(self, file: Path, sources: tuple[str, str], items: list[Any]) -> int:
        _swap(file, *sources)
        for item, then in zip_longest(items, items[1:]):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=then)
            if self.failed:
                return 1
        return 0

    def _fork(self, work: Callable[[], int]) -> int:
        """A process of a group of its own that does the work and ends with its number; 1 when a test fails."""
        sys.stdout.flush()
        child = os.fork()
        if child:
            return child
        code = 2
        try:
            os.setpgid(0, 0)
            for number in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            code = work()
        finally:
            sys.stdout.flush()
            os._exit(code)

    _written = 0

    def _write(self, file: Path, source: str) -> None:
        """Write a file with a time of its own, so that no process takes an older compilation for it."""
        file.write_text(source)
        self._written += 1
        then = time.time() - 10**6 + 2 * self._written
        os.utime(file, (then, then))


def _swap(file: Path, before: str, after: str) -> None:
    """Give all functions of a file the code that they have in another source."""
    old, new = (_codes(compile(source, str(file), "exec")) for source in (before, after))
    other = dict(zip(old, new, strict=True)) if [c.co_qualname for c in old] == [c.co_qualname for c in new] else {}
    by_name = {code.co_qualname: code for code in new}  # where the bug took a lambda away, names that are there once
    for function in [o for o in gc.get_objects() if type(o) is FunctionType]:  # `isinstance` asks dead proxies
        code = function.__code__
        if code.co_filename == str(file):
            found = other.get(code) or by_name.get(code.co_qualname)
            if found is not None and found.co_freevars == code.co_freevars:
                function.__code__ = found


def _codes(code: CodeType) -> list[CodeType]:
    """Code of all functions in a file or function, however deep."""
    return [f for const in code.co_consts if isinstance(const, CodeType) for f in (const, *_codes(const))]


def _outcome(child: int, seconds: float, caught: str) -> str:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child, signal.SIGKILL)  # what its tests started
            return SURVIVED if status == 0 else caught
        time.sleep(0.02)
    for process in [*_below(child), child]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    os.waitpid(child, 0)
    return ENDLESS


def _below(process: int) -> list[int]:
    """What a process started, and what they started; some have groups of their own."""
    started = [
        int(word) for file in Path(f"/proc/{process}/task").glob("*/children") for word in file.read_text().split()
    ]
    return [*started, *(one for child in started for one in _below(child))]


def table(verdicts: Iterable[Verdict]) -> str:
    counts = Counter(v.outcome for v in verdicts)
    caught = counts[CAUGHT] + counts[ENDLESS]
    return (
        f"{sum(counts.values())} planted, {caught} caught ({counts[ENDLESS]} by time), "
        f"{counts[LATE]} more by campaigns, {counts[SURVIVED]} survived"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", required=True, nargs="+", help='folders of splitkit, "top" for the files beside')
    parser.add_argument("--count", type=int, default=30, help="bugs in each package")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", type=float, default=40, help="CPU seconds for the tests of one bug, without it")
    parser.add_argument("--only", default="", help="a piece of path:function that gets bugs")
    parser.add_argument("--tests", nargs="*", help="test files, instead of all")
    parser.add_argument(
        "--campaigns", action="store_true", help="also campaigns, for what the default tier lets through"
    )
    parser.add_argument(
        "--called", type=Path, default=CALLED, help="what tests call: kept, and made anew for test files that changed"
    )
    told = parser.parse_args()
    if os.environ.get("SPLITKIT_MUTATION_COPY") != str(HERE):
        sys.exit(_in_a_copy(sys.argv[1:]))
    import pytest

    files = [Path(file).resolve() for file in told.tests or sorted((HERE / "tests").rglob("test_*.py"))]
    calls = recorded(told.called, told.campaigns, files)
    of_packages = {
        test: called
        for test, called in calls.items()
        if any(name.startswith(tuple(f"{p}/" for p in told.package)) or "/" not in name for name in called[1])
    }
    campaign = Campaign(told.package, told.count, told.seed, told.each, of_packages, told.only)
    tier = ["-m", ""] if told.campaigns else []
    code = pytest.main(["-q", "-s", *tier, *sorted({test.split("::")[0] for test in of_packages})], plugins=[campaign])
    if code:
        raise SystemExit(f"pytest ended with {code}")
    for package, verdicts in campaign.verdicts.items():
        print(f"{package}: {table(verdicts)}")


def _in_a_copy(words: list[str]) -> int:
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=HERE, capture_output=True, text=True, check=True
    )
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        for name in names.stdout.splitlines():
            if (HERE / name).is_file():
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(HERE / name, Path(folder) / name)
        copy = str(Path(folder).resolve())
        environment = os.environ | {"PYTHONPATH": copy, "SPLITKIT_MUTATION_COPY": copy, "OMP_NUM_THREADS": "1"}
        return subprocess.run([sys.executable, "tests/tools/mutation.py", *words], cwd=copy, env=environment).returncode


if __name__ == "__main__":
    main()
