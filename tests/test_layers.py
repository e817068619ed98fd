"""Imports go down only: the floors of the architecture."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import splitkit

PACKAGE = Path(splitkit.__file__).parent

FLOORS: list[set[str]] = [
    {"errors", "units", "svg", "ranges", "collector", "files", "brief"},
    {
        "_torch",
        "ops",
        "states",
        "scope",
        "classes",
        "effects",
        "symbols",
        "dataflow",
        "standins",
        "fakes",
    },  # facts about a graph; torch.fx read-only
    {
        "costs",
        "kernels",
        "layouts",
        "measure",
        "livebytes",
        "sharing",
        "temporaries",
        "buffers",
        "simulate",
        "memory",
        "memoryplot",
        "memorychecks",
        "estimator",
        "halves",
        "frontierplot",
        "peaks",
        "savings",
        "savedvalues",
        "backward_order",
        "tags",
        "plan",
        "planfile",
        "policy",
        "order",
        "rewrite",
        "local",
        "pipelineorder",
        "torch_schedules",
        "stagecosts",
        "schedule",
        "schedulerun",
        "scheduletrace",
        "schedulememory",
        "scheduleplot",
        "activations",
        "backwardprobe",
        "stageline",
        "linebuilder",
        "plancosts",
    },  # prices and plans; no fx surgery
    {
        "complete",
        "cut",
        "names",
        "ties",
        "overlaps",
        "modules",
        "assemble",
        "scoped",
        "verbatim",
        "writer",
        "emit",
        "partgraph",
        "summary",
        "split",
        "frames",
        "flatten",
        "mirror",
        "inline",
        "pair",
        "dedupe",
    },  # the engine
    {"solvers"},  # pure: numpy and scipy, no torch
    {"policies"},  # floors 0-2 and 4 only: never the engine
    {
        "capture",
        "capture_errors",
        "tracing",
        "regions",
        "blocks",
        "functions",
        "applied",
        "gradflags",
        "firstcall",
        "outputs",
        "joint",
        "jointchecks",
        "jointsignature",
        "frontier",
        "trainstep",
        "tokens",
        "quietlogs",
        "aot",
        "afterwards",
        "backends",
        "inductor",
    },  # doors to torch.export, fx, Dynamo and AOTAutograd
    set(),  # runtime
    {
        "trial",
        "compare",
        "report",
        "console",
        "factory",
        "models",
        "sweep",
        "sweeprows",
        "testing",
        "cli",
        "__main__",
    },  # looking
]
FLOOR = {module: floor for floor, modules in enumerate(FLOORS) for module in modules}
ENGINE = 3
ONLY = {4: set(), 5: {0, 1, 2, 4, 5}}
"""What a floor may import besides itself, where that is less than everything below."""

FILES = sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(path: Path):
    """(top-level module of splitkit that is imported, line)."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "splitkit":
            names = [node.module.split(".")[1]] if "." in node.module else [a.name for a in node.names]
            yield from ((name, node.lineno) for name in names)
        elif isinstance(node, ast.Import):
            yield from ((a.name.split(".")[1], node.lineno) for a in node.names if a.name.startswith("splitkit."))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down_only(path):
    module = module_of(path)
    if module == "__init__":  # the front door
        return
    own = FLOOR[module]
    for name, line in imports(path):
        if name == "__version__":
            continue
        floor = FLOOR[name]
        allowed = {own} | ONLY.get(own, set(range(own)))
        assert floor in allowed, f"{path.name}:{line}: {module} (floor {own}) imports {name} (floor {floor})"


def test_every_module_has_a_floor():
    assert {module_of(p) for p in FILES} - {"__init__"} == set(FLOOR)


def test_no_module_of_a_floor_imports_in_a_circle():
    graph: dict[str, set[str]] = {}
    for path in FILES:
        module = module_of(path)
        if module != "__init__":
            graph.setdefault(module, set()).update(n for n, _ in imports(path) if n in FLOOR and n != module)
    # planfile and plan know each other: a file is a plan's own format, loaded when one is written or read.
    graph["plan"].discard("planfile")
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"circle: {' -> '.join([*path, module])}"
        if module not in done:
            for other in sorted(graph.get(module, ())):
                visit(other, (*path, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())


@pytest.mark.parametrize("path", [p for p in FILES if module_of(p) == "solvers"], ids=lambda p: p.name)
def test_solvers_are_pure(path):
    tree = ast.parse(path.read_text())
    names = {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
    plain = "__future__ collections dataclasses functools heapq importlib itertools math sys time types typing"
    assert names <= {*plain.split(), "numpy", "scipy", "splitkit"}


PRIVATE_DOORS = {
    "_torch",
    "capture",
    "capture_errors",
    "tracing",
    "regions",
    "blocks",
    "functions",
    "applied",
    "ops",
    "costs",
    "assemble",
    "writer",
    "trial",
    "aot",
    "tokens",
    "quietlogs",
    "afterwards",
    "backends",
    "inductor",
    "standins",
    "fakes",
    "simulate",
    "livebytes",
    "torch_schedules",
}
"""Where private torch names may stand; each use has the versions it was checked on beside it."""


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_private_torch_names_stand_in_few_modules(path):
    tree = ast.parse(path.read_text())
    private = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            private += [f"{node.module}.{a.name}" for a in node.names if _private(f"{node.module}.{a.name}")]
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            text = ast.unparse(node)
            private += [text] if text.startswith("torch.") else []
    assert not private or module_of(path) in PRIVATE_DOORS, f"{path.name} uses {private}"


def _private(name: str) -> bool:
    return any(atom.startswith("_") for atom in name.split("."))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_each_module_opens_with_one_sentence_and_stays_small(path):
    text = path.read_text()
    doc = ast.get_docstring(ast.parse(text))
    assert doc and doc.splitlines()[0].rstrip().endswith((".", "?", ":")), f"{path.name} does not say what it is"
    assert text.count("\n") <= 330, f"{path.name} has {text.count(chr(10))} lines"
