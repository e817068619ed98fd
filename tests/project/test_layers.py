"""Imports go to lower layers only and form no cycle, private names of torch are in few files, and files stay small."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from package_layers import FORBIDDEN, LAYER, PUBLIC_FILES, READERS_OF_PUBLIC_FILES, SourceTree, package_of, table

import splitkit
import splitkit.policies

SOURCES = SourceTree(Path(splitkit.__file__).parent)
FILES = SOURCES.files


@pytest.fixture(autouse=True, scope="module")
def _no_trees_are_kept():
    yield
    SOURCES.forget()


def test_imports_go_to_the_own_package_or_a_lower_layer():
    assert_none(wrong for file in FILES for wrong in _wrong_imports(SOURCES, file))


def assert_none(wrong: Iterable[str]) -> None:
    """Fail with all lines, which pytest would shorten."""
    lines = [*wrong]
    assert not lines, "\n".join(lines)


def _wrong_imports(sources: SourceTree, file: str) -> Iterator[str]:
    own = package_of(file)
    for other, line in sources.imports(file):
        if file in PUBLIC_FILES or (own, other) in READERS_OF_PUBLIC_FILES:
            continue
        package = package_of(other)
        if other in PUBLIC_FILES:
            yield f"{file}:{line} imports a public file"
        if package != own and LAYER[package] >= LAYER[own]:
            yield f"{file}:{line} ({own}) imports {other} ({package})"
        if package in FORBIDDEN.get(own, ()):
            yield f"{file}:{line}: {own} must not import {package}"


def test_every_package_has_a_layer_and_a_docstring():
    assert {package_of(file) for file in FILES} <= set(LAYER)
    for file in FILES:
        if Path(file).name == "__init__.py" and file != "__init__.py":
            assert len(ast.get_docstring(SOURCES.tree(file)) or "") > 40, f"{file} does not say what its package is for"


def test_no_files_import_in_a_cycle():
    assert SOURCES.cycles() == []


def test_cycles_and_bad_imports_would_be_seen(tmp_path):
    """A cycle through a function and TYPE_CHECKING, and an import of a higher layer, in a package of three files."""
    folder = tmp_path / "sources"
    (folder / "graph").mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "graph" / "a.py").write_text("def f():\n    from sources.graph import b\n")
    (folder / "graph" / "b.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from sources.graph.a import f\nimport sources.cli.c\n"
    )
    (folder / "cli").mkdir()
    (folder / "cli" / "c.py").touch()
    found = SourceTree(folder)
    assert [*_wrong_imports(found, "graph/b.py")] == ["graph/b.py:4 (graph) imports cli/c.py (cli)"]
    assert found.cycles() == [["graph/a.py", "graph/b.py"]]
    assert dict(found.imports("graph/b.py")) == {"graph/a.py": 3, "cli/c.py": 4}
    assert table(found)[-1] == "4 files, 6 lines, 1 imports between packages, 1 cycles"


def test_solvers_are_pure():
    plain = (
        "__future__ collections dataclasses fractions functools heapq importlib itertools math sys time types typing"
    )
    allowed, solvers = {*plain.split(), "numpy", "scipy", "splitkit"}, [f for f in FILES if package_of(f) == "solvers"]
    assert solvers
    imported = {file: sorted(_imported_packages(SOURCES.nodes(file)) - allowed) for file in solvers}
    assert_none(f"{file} imports {names}" for file, names in imported.items() if names)


def _imported_packages(nodes: list[ast.AST]) -> set[str]:
    names = {a.name.split(".")[0] for n in nodes if isinstance(n, ast.Import) for a in n.names}
    return names | {n.module.split(".")[0] for n in nodes if isinstance(n, ast.ImportFrom) and n.module}


PRIVATE_PACKAGES = ("_torch.py", "frontends/", "graph/ops/", "memory/storage_watch.py")
PRIVATE_ENGINE = (
    "engine/codegen/writer.py",
    "engine/codegen/source_code.py",
    "engine/codegen/part_modules.py",
)
"""Where private torch names may stand; each use has the versions it was checked on beside it."""

_OWN = ("self", "cls", "argparse", "os")
_NAMEDTUPLE = ("_replace", "_asdict", "_fields")


def test_private_torch_names_stand_in_few_files():
    others = [file for file in FILES if not file.startswith((*PRIVATE_PACKAGES, *PRIVATE_ENGINE))]
    assert_none(f"{file}: {name}" for file in others for name in _private_names(SOURCES.nodes(file)))


def _private_names(nodes: list[ast.AST]) -> list[str]:
    return [name for node in nodes for name in _private_imports(node)] + _private_attributes(nodes)


def _private_imports(node: ast.AST) -> list[str]:
    if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "torch":
        return []
    names = [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in names if any(atom.startswith("_") for atom in name.split("."))]


def _private_attributes(nodes: list[ast.AST]) -> list[str]:
    """Attributes with a leading underscore, on whatever object, that the file does not define itself."""
    attributes = [n for n in nodes if isinstance(n, ast.Attribute)]
    own = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    own |= {n.attr for n in attributes if isinstance(n.value, ast.Name) and n.value.id in _OWN}
    own |= {n.target.id for n in nodes if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    hidden = [n for n in attributes if n.attr.startswith("_") and not n.attr.startswith("__")]
    return [ast.unparse(n) for n in hidden if n.attr not in own and n.attr not in _NAMEDTUPLE]


def test_a_private_attribute_of_an_object_would_be_seen():
    assert _private_attributes([*ast.walk(ast.parse("def f(node):\n    return node._erased"))]) == ["node._erased"]


def test_each_file_opens_with_one_sentence_and_stays_small():
    docs = {file: (ast.get_docstring(SOURCES.tree(file)) or "").split("\n")[0].rstrip() for file in FILES}
    assert [file for file, first in docs.items() if not first.endswith((".", "?", ":"))] == [], (
        "do not say what they are"
    )
    assert {file: lines for file in FILES if (lines := SOURCES.lines(file)) > 800} == {}


def test_each_number_of_a_module_says_what_it_is():
    """A comment beside or above it, or a docstring below: what it limits or counts, its unit, what was measured."""
    assert_none(
        f"{file}: {name}"
        for file in FILES
        for name in _bare_numbers(SOURCES.tree(file), (SOURCES.root / file).read_text("utf-8").splitlines())
    )


def _bare_numbers(tree: ast.Module, lines: list[str]) -> Iterator[str]:
    for node, then in pairwise([*tree.body, None]):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not _is_number(node.value):
            continue
        texts = [line for line in lines[node.lineno - 1 : node.end_lineno] if "#" in line]
        above = lines[node.lineno - 2].startswith("#") if node.lineno > 1 else False
        below = (
            isinstance(then, ast.Expr) and isinstance(then.value, ast.Constant) and isinstance(then.value.value, str)
        )
        if not (texts or above or below):
            yield ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)


def _is_number(value: ast.expr | None) -> bool:
    """Whether an expression is a number, or a tuple of numbers, and nothing that must be looked up."""
    if isinstance(value, ast.Tuple):
        return all(map(_is_number, value.elts))
    inner = [*ast.walk(value)] if value else []
    constants = [n.value for n in inner if isinstance(n, ast.Constant)]
    operators = (ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)
    return bool(constants) and all(
        isinstance(n, operators) or (isinstance(n, ast.Constant) and type(n.value) in (int, float)) for n in inner
    )


def test_a_number_that_says_nothing_would_be_seen():
    lines = ["A = 2**4", "B = 3  # bytes", "C = -1.5", '"""Seconds."""', "# of work", "D, E = 1, 2", "F, G = 1, (2, 3)"]
    lines += ["H: float = 1 / 3", "I = True", "J = (1, 'x')"]
    assert [*_bare_numbers(ast.parse("\n".join(lines)), lines)] == ["A", "(F, G)", "H"]


def test_a_file_of_policies_is_one_policy():
    files = [file for file in FILES if file.startswith("policies/") and not file.endswith("__init__.py")]
    assert files
    assert_none(wrong for file in files for wrong in _not_one_policy(file))


def _not_one_policy(file: str) -> Iterator[str]:
    classes = [n for n in SOURCES.tree(file).body if isinstance(n, ast.ClassDef) and not n.name.startswith("_")]
    names = [node.name for node in classes]
    if hidden := set(names) - set(splitkit.policies.__all__):
        yield f"{file} has classes that `splitkit.policies` does not list: {sorted(hidden)}"
    if len(names) != 1:
        yield f"{file} has the public classes {names}"
    elif not any(isinstance(node, ast.FunctionDef) and node.name == "assign" for node in classes[0].body):
        yield f"{file}: {names[0]} has no method `assign`"


SAME_NAMES = {
    "load": "the weights of a split are loaded, and so is an example model of `splitkit.testing.models`",
    "run": "each command of the command line has one, and the parser calls it",
    "fit": "`splitkit.fit` fits a model to devices, and `splitkit.costs.links.fit` a link to measured times",
    "main": "the entry points of the package and the command line",
}
"""Functions that share a name, and why."""

NAMED_BY_USERS = ("cli/commands/", "policies/")
"""Packages whose files are named after what users write: a verb of the command line, or a policy."""


def defined(kind: type[ast.FunctionDef] | type[ast.ClassDef]) -> Counter[str]:
    """Count how often each public name of this kind is defined at the top level of a file; overloads are one."""
    nodes = (node for file in FILES for node in SOURCES.tree(file).body if isinstance(node, kind))
    overload = "Name(id='overload', ctx=Load())"
    once = (node for node in nodes if overload not in map(ast.dump, node.decorator_list))
    return Counter(node.name for node in once if not node.name.startswith("_"))


def repeated(names: Counter[str]) -> set[str]:
    return {name for name, count in names.items() if count > 1}


SAME_CLASSES = {"Pipeline": "the policy plans what the class of `splitkit.runtime` runs"}
"""Classes that share a name, and why."""


def test_a_public_class_name_has_one_meaning():
    assert repeated(defined(ast.ClassDef)) == set(SAME_CLASSES)


def test_a_public_function_name_has_one_meaning():
    assert repeated(defined(ast.FunctionDef)) == set(SAME_NAMES)


def test_a_file_name_has_one_meaning():
    names = Counter(Path(file).stem for file in FILES if not file.startswith(NAMED_BY_USERS))
    assert repeated(names) == {"__init__"}


def test_a_repeated_name_would_be_seen():
    assert repeated(Counter(["check", "plan", "check"])) == {"check"}


REGISTRIES = {
    "graph/ambient.py": "regions and settings, to which users add with register_region",
    "graph/ops/declared.py": "what users declare of their ops, and quick verdicts that a declaration forgets",
    "pipeline/schedules.py": "pipeline schedules, to which users add with register_schedule",
}
"""Files whose module-level state may change, and what it is."""


def test_no_state_outlives_a_call():
    """No function changes a container or a name of its module, but in the registries."""
    others = [file for file in FILES if file not in REGISTRIES]
    assert {
        file: names for file in others if (names := _changed_globals(SOURCES.tree(file), SOURCES.nodes(file)))
    } == {}


_CHANGES = {
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "remove",
    "setdefault", "update",
}  # fmt: skip


def _changed_globals(tree: ast.Module, nodes: list[ast.AST]) -> list[str]:
    """What functions change of the names that the module binds at its top level."""
    top = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    found = []
    for function in (n for n in nodes if isinstance(n, ast.FunctionDef)):
        inner = [*ast.walk(function)]
        local = {a.arg for a in inner if isinstance(a, ast.arg)}
        local |= {n.id for n in inner if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        for node in inner:
            if isinstance(node, ast.Global):
                found += [f"global {name} in {function.name}" for name in node.names]
            held = None
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
                held = node.func.value
            elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
                held = node.value
            if isinstance(held, ast.Name) and held.id in top - local:
                found.append(f"{held.id} in {function.name}")
    return found


def test_state_that_outlives_a_call_would_be_seen():
    code = "SEEN = {}\ndef f(x):\n    SEEN[x] = 1\ndef g(SEEN):\n    SEEN.clear()\ndef h():\n    global N\n    N = 1\n"
    tree = ast.parse(code)
    assert _changed_globals(tree, [*ast.walk(tree)]) == ["SEEN in f", "global N in h"]
