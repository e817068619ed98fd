"""Which tuned constants of the solvers matter: each halved and doubled alone, on the searches of `solver_cases`.

A search counts steps, and the clock is stopped here, so that a constant that changes nothing leaves plan and bound as
they are, to the last bit. Tolerances (below 1e-5) and sizes of numbers (above 2**40) are left alone. Of 64 constants,
61 changed no plan and no bound, and the others changed a plan by at most 4.5 %. ``--json`` for machines.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import pkgutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from placement import own_stdout
from rich.console import Console
from rich.table import Table
from solver_cases import Outcome, cases, without_clock
from solver_components import compared

import splitkit.search
import splitkit.solvers

FACTORS = (0.5, 2.0)
LEAST, MOST = 1e-5, 2.0**40
SEARCHES = {
    "splitkit.search.device_search": ("t5: 3 devices, unequal links",),
    "splitkit.search.memory_": ("t5: memory budget 0.4", "unet: memory budget 0.4"),
    "splitkit.search.recompute": ("gpt2: recompute 0.4", "gpt2: recompute least"),
    "splitkit.search.replica_": ("t5: 6 devices, pcie4, 1f1b, replicas",),
    "splitkit.search": ("t5: 6 stages, pcie4, 1f1b", "t5: 4 stages, nvlink4, 1f1b, least memory"),
    "splitkit.solvers.line": ("t5: 6 stages, pcie4, 1f1b", "unet: 8 stages on 4 ranks, pcie4"),
    "splitkit.solvers.placement.latency_solver": (
        "latency: OperatorGraphs_bert_l-3_inference",
        "latency: OperatorGraphs_resnet50_inference",
    ),
    "splitkit.solvers.placement.set_solver": ("noncontiguous: OperatorGraphs_bert_l-3_training",),
    "splitkit.solvers.placement.unequal_solver": ("t5: 3 devices, unequal links",),
    "splitkit.solvers.recompute": ("gpt2: recompute 0.4", "t5: recompute 0.6"),
    "splitkit.solvers": ("contiguous: OperatorGraphs_bert_l-3_training", "t5: 6 stages, pcie4, 1f1b"),
}
"""Beginning of a module's name -> the searches that its constants are tried on; the longest name that fits counts."""


@dataclass(frozen=True)
class Constant:
    """A number at the top level of a module.

    Attributes:
        module: where it is assigned.
        name: to this name.
        place: of a tuple; ``None`` for a number alone.
        value: as it is in the source.
    """

    module: str
    name: str
    place: int | None
    value: float

    def __str__(self) -> str:
        at = "" if self.place is None else f"[{self.place}]"
        return f"{self.module.removeprefix('splitkit.')}.{self.name}{at} = {self.value}"

    def scaled(self, factor: float) -> Any:
        """What stands for it, times the factor; whole numbers stay whole and positive."""
        whole = getattr(sys.modules[self.module], self.name)
        other = max(1, int(self.value * factor)) if isinstance(self.value, int) else self.value * factor
        if self.place is None:
            return other
        return tuple(other if place == self.place else value for place, value in enumerate(whole))

    @contextmanager
    def replaced(self, factor: float) -> Iterator[None]:
        """The constant scaled, in every module that has imported it."""
        own, other = getattr(sys.modules[self.module], self.name), self.scaled(factor)
        with ExitStack() as stack:
            for name, module in list(sys.modules.items()):
                if name.startswith("splitkit.") and vars(module).get(self.name) is own:
                    stack.enter_context(patch.object(module, self.name, other))
            yield


def constants() -> list[Constant]:
    """All numbers that modules of the solvers assign to names in capitals."""
    found = []
    for package in (splitkit.search, splitkit.solvers):
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            module = importlib.import_module(info.name)
            assert module.__file__
            tree = ast.parse(Path(module.__file__).read_text("utf-8"))
            names = [name for node in tree.body for name in _assigned(node)]
            for name in names:
                value = getattr(module, name)
                numbers = [(None, value)] if not isinstance(value, tuple) else list(enumerate(value))
                found += [Constant(info.name, name, place, number) for place, number in numbers if _tuned(number)]
    return found


def _assigned(node: ast.stmt) -> list[str]:
    if not isinstance(node, ast.Assign):
        return []
    names = [target.id for target in ast.walk(node.targets[0]) if isinstance(target, ast.Name)]
    return [name for name in names if name.strip("_").isupper()]


def _tuned(number: Any) -> bool:
    return type(number) in (int, float) and LEAST < number < MOST


def searches(module: str) -> Sequence[str]:
    """The searches for the constants of a module."""
    return SEARCHES[max((package for package in SEARCHES if module.startswith(package)), key=len)]


def rows(only: str, seconds: float) -> Iterator[dict[str, Any]]:
    """One for each constant, factor and search."""
    known, whole = cases(), dict[str, tuple[Outcome, float]]()

    def found(search: str) -> tuple[Outcome, float]:
        start = time.process_time()
        with without_clock():
            return known[search](seconds), time.process_time() - start

    for constant in constants():
        for search in searches(constant.module) if only in str(constant) else ():
            if search not in whole:
                known[search](0.01)  # capture the model
                whole[search] = found(search)
            for factor in FACTORS:
                before, took = whole[search]
                with constant.replaced(factor):
                    try:
                        after, other = found(search)
                    except Exception as error:  # a number out of range may fail in any way
                        print(f"{constant} times {factor}: {error!r}", file=sys.stderr)
                        after, other = None, took
                worse = compared(before, after)
                yield {"constant": str(constant), "factor": factor, "search": search, **worse,
                       "time": other / took}  # fmt: skip


def main() -> None:
    """Run and print what changes something."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="constants whose text contains this")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each search (1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    args = parser.parse_args()
    out = own_stdout()
    table = Table("constant", "times", "search", "plan worse by", "bound worse by", "time")
    for row in rows(args.only, args.seconds):
        if args.json:
            print(json.dumps(row), file=out, flush=True)
        elif row["plan"] or row["bound"]:
            table.add_row(row["constant"], f"{row['factor']:g}", row["search"], f"{row['plan']:.2%}",
                          f"{row['bound']:.2%}", f"{row['time']:.2f}")  # fmt: skip
    if not args.json:
        Console(width=200, file=out).print(table)


if __name__ == "__main__":
    main()
