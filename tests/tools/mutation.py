"""Do the tests of a package notice small bugs? ``python tests/tools/mutation.py --package graph --count 30`` tries.

It plants one bug at a time (`mutants.py`) in functions drawn by seed, and runs the package's tests that
call the function. All this happens in a copy of the tree: whatever ends the run, no bug stays behind. A process that
has imported everything and collected the tests forks for each bug and swaps the code of the changed functions, so that
no bug waits for an import; processes that tests start read the changed file instead.

Not planted: bugs at module level (tables, defaults, fields), which need a fresh import.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib
import inspect
import os
import pickle
import pkgutil
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

HERE = Path(__file__).resolve().parents[2]
ALSO = {
    "search": ["policies"],
    "solvers": ["policies/test_stored_plans.py"],
    "training": ["policies/test_stored_plans.py"],
    "testing": ["laws/test_fuzz.py"],
    "policies": ["laws/test_inputs.py"],
}
"""Package -> other tests of it, below ``tests/``: policies ask searches, `test_inputs.py` gives policies bad values."""

EXAMPLES = ["graph_zoo", "models", "specimens", "visible_state"]
"""Files of `splitkit.testing` that make examples: a bug there makes another example, and no wrong result."""

CAUGHT, SURVIVED, ENDLESS, LATE = "caught", "SURVIVED", "endless", "campaign"
"""What came of a bug: a test of the default tier failed, none failed, one did not end, only a campaign failed."""


@dataclass
class Clean:
    """What a test does without a bug.

    Attributes:
        seconds: how long it takes.
        calls: the functions of splitkit that it calls, (file, qualified name).
        campaign: whether it belongs to the campaigns, which are asked about what the default tier lets through.
    """

    seconds: float = 0.0
    calls: set[tuple[str, str]] = field(default_factory=set)
    campaign: bool = False


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
        package: a folder of ``splitkit/``, or "top" for the files beside them.
        count: how many bugs.
        seed: which.
        budget: seconds of processor time that the tests of the package may take without a bug, those that mirror it
            first; what comes after is left out. Campaigns have the same again.
        each: seconds of processor time that the tests of one bug may take without it: those that call the function, and
            again the others of their files.
        only: where given, the files (or ``file:function``) that get bugs, by a piece of their path.
    """

    def __init__(self, package: str, count: int, seed: int, budget: float, each: float, only: str = "") -> None:
        self.package, self.count, self.seed = package, count, seed
        self.budget, self.each, self.only = budget, each, only
        self.verdicts: list[Verdict] = []
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
        for module in pkgutil.walk_packages([str(self.root / self.package)], f"splitkit.{self.package}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
        gc.unfreeze()  # `gc.get_objects` lists no frozen ones
        clean = self._measured(session.items)
        print(
            f"{self.package}: {len(clean)} tests, {sum(c.seconds for c in clean.values()):.0f} s without a bug",
            flush=True,
        )
        for file, mutant in self.drawn():
            verdict = self._verdict(file, mutant, clean)
            self.verdicts.append(verdict)
            print(verdict, flush=True)
            if verdict.outcome == SURVIVED:
                print("    " + verdict.diff.replace("\n", "\n    "), flush=True)
        return True

    def _measured(self, items: list[Any]) -> dict[Any, Clean]:
        """What each test does without a bug, mirrors first, as long as the budget lasts, one test of each file in turn;
        tests that launch ranks are left out, which would start them anew for every bug.
        """
        items = [item for item in items if "launch" not in vars(item.module)]
        mirrors = {f"test_{file.stem}" for file in self.root.glob("*.py")}  # of the files at the top
        own = [item for item in items if f"tests/{self.package}/" in str(item.path) or item.path.stem in mirrors]
        ordered = [*_in_turn(own), *_in_turn([item for item in items if item not in own])]
        late = {i for i, item in enumerate(ordered) if item.get_closest_marker("campaign")}
        read, write = os.pipe()

        def measure() -> int:
            found: list[tuple[int, Clean]] = []
            left = {False: self.budget, True: self.budget}
            for i, item in enumerate(ordered):
                if left[i in late] <= 0:
                    continue
                with _calls(str(self.root)) as clean:
                    passes = self._passes(item)
                clean.campaign = i in late
                left[clean.campaign] -= clean.seconds
                if passes:
                    found.append((i, clean))
                else:
                    print(f"left out, as it fails without a bug: {item.nodeid}", flush=True)
            with os.fdopen(write, "wb") as out:
                pickle.dump(found, out)
            return 0

        child = self._fork(measure, quiet=False)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            data = pipe.read()
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            raise SystemExit("the tests ended their process")
        return {ordered[i]: clean for i, clean in pickle.loads(data)}

    def drawn(self) -> Iterator[tuple[Path, Any]]:
        """Bugs in functions drawn by seed, each function once before any is drawn again."""
        from mutants import changes, planted

        dice = random.Random(f"{self.seed}/{self.package}")
        files = (
            sorted((self.root / self.package).rglob("*.py"))
            if self.package != "top"
            else sorted(self.root.glob("*.py"))
        )
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

    def _verdict(self, file: Path, mutant: Any, clean: dict[Any, Clean]) -> Verdict:
        name = str(file.relative_to(self.root))
        tiers = [
            self._chosen(name, mutant.change.function, {i: c for i, c in clean.items() if c.campaign is campaign})
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
                    outcome = _outcome(self._fork(tried), 30 + 10 * sum(clean[item].seconds for item in chosen), caught)
        finally:
            self._write(file, original)
        change = mutant.change
        return Verdict(
            name, mutant.line, change.function, change.kind, mutant.diff, outcome, asked, time.monotonic() - began
        )

    def _chosen(self, name: str, function: str, clean: dict[Any, Clean]) -> list[Any]:
        """Tests that call the function, the short ones first; then others of the same files, which may start processes
        or have read what another test left in a cache.
        """
        module = f"splitkit.{name.removesuffix('.py').replace('/', '.')}"
        calling = [item for item in clean if (name, function) in clean[item].calls]
        near = {item.path for item in calling} | {item.path for item in clean if module in _imported(item.module)}
        others = [item for item in clean if item.path in near and item not in calling]
        chosen = []
        for items in (calling, others):
            seconds = 0.0
            for item in sorted(items, key=lambda item: clean[item].seconds):
                if not seconds or seconds + clean[item].seconds <= self.each:
                    chosen.append(item)
                    seconds += clean[item].seconds
        return chosen

    def _tried(self, file: Path, sources: tuple[str, str], items: Iterable[Any]) -> int:
        _swap(file, *sources)
        return 0 if all(map(self._passes, items)) else 1

    def _passes(self, item: Any) -> bool:
        self.failed = False
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        return not self.failed

    def _fork(self, work: Callable[[], int], quiet: bool = True) -> int:
        """A process of a group of its own that does the work and ends with its number; 1 when a test fails."""
        sys.stdout.flush()
        child = os.fork()
        if child:
            return child
        code = 2
        try:
            os.setpgid(0, 0)
            if quiet:
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


def _in_turn(items: list[Any]) -> list[Any]:
    """The first test of each file, then the second of each ..."""
    seen: Counter[Path] = Counter()
    turns = []
    for item in items:
        turns.append(seen[item.path])
        seen[item.path] += 1
    return [item for _, item in sorted(zip(turns, items, strict=True), key=lambda pair: pair[0])]


@contextlib.contextmanager
def _calls(package: str) -> Iterator[Clean]:
    seen: dict[int, CodeType] = {}

    def trace(frame: FrameType, event: str, arg: Any) -> None:
        seen[id(frame.f_code)] = frame.f_code

    clean = Clean()
    began = _cpu_seconds()
    threading.settrace(trace)
    sys.settrace(trace)
    try:
        yield clean
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
    clean.seconds = _cpu_seconds() - began
    for code in seen.values():
        if code.co_filename.startswith(package):
            name = code.co_qualname.split(".<locals>")[0]
            clean.calls.add((os.path.relpath(code.co_filename, package), name))


def _cpu_seconds() -> float:
    """Of this process and those that it waited for: what else the machine does counts less than in time that passes."""
    return sum(os.times()[:4])


def _imported(module: Any) -> set[str]:
    """Names of the modules that a test module imports, or that its names come from."""
    found = {getattr(value, "__module__", None) for value in vars(module).values()}
    return {name for name in found if name} | {v.__name__ for v in vars(module).values() if inspect.ismodule(v)}


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
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return ENDLESS


def table(verdicts: Iterable[Verdict]) -> str:
    counts = Counter(v.outcome for v in verdicts)
    caught = counts[CAUGHT] + counts[ENDLESS]
    return (
        f"{sum(counts.values())} planted, {caught} caught ({counts[ENDLESS]} by time), "
        f"{counts[LATE]} more by campaigns, {counts[SURVIVED]} survived"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", required=True)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--budget", type=float, default=200, help="CPU seconds for all tests of the package without a bug"
    )
    parser.add_argument("--each", type=float, default=10, help="CPU seconds for the tests of one bug, without it")
    parser.add_argument("--only", default="", help="a piece of path:function that gets bugs")
    parser.add_argument(
        "--campaigns", action="store_true", help="also campaigns, for what the default tier lets through"
    )
    parser.add_argument("--tests", nargs="*", help="test files, instead of those that belong to the package")
    told = parser.parse_args()
    if os.environ.get("SPLITKIT_MUTATION_COPY") != str(HERE):
        sys.exit(_in_a_copy(sys.argv[1:]))
    import pytest

    campaign = Campaign(told.package, told.count, told.seed, told.budget, told.each, told.only)
    files = told.tests or _tests_of(told.package)
    tier = ["-m", ""] if told.campaigns else []
    code = pytest.main(["-q", "-s", *tier, *files], plugins=[campaign])
    if code:
        raise SystemExit(f"pytest ended with {code}")
    print(f"{told.package}: {table(campaign.verdicts)}")


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


def _tests_of(package: str) -> list[str]:
    """The test files that mirror a package; for the files at the top, also laws and tests of the project."""
    tests = HERE / "tests"
    if package != "top":
        also = [tests / other for other in ALSO.get(package, [])]
        return [str(f) for folder in (tests / package, *also) for f in (sorted(folder.rglob("test_*.py")) or [folder])]
    words = [f"splitkit.{path.stem} import" for path in (HERE / "splitkit").glob("[a-z_]*.py") if path.stem[:2] != "__"]
    also = [path for folder in ("laws", "project") for path in sorted((tests / folder).glob("test_*.py"))]
    asked = [path for path in also if any(word in path.read_text() for word in words)]
    return [str(path) for path in (*sorted((tests / "top").glob("test_*.py")), *asked)]


if __name__ == "__main__":
    main()
