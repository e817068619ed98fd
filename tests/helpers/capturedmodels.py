"""Graphs of example models, captured once on a machine: all processes of all runs read them from files.

A capture takes 0.6 to 8 s of processor time, reading one back 0.02 to 0.05 s. The files belong to the versions of torch
and transformers, and to the code that captures.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import cache
from importlib import metadata
from pathlib import Path
from types import FunctionType
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx._graph_pickler import GraphPickler, Options
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional

import splitkit as sk
from splitkit.frontends.joint_capture import Joint
from splitkit.testing import models

T = TypeVar("T")
CAPTURES = {"forward": sk.capture, "joint": sk.capture_joint, "decoder": sk.capture_decoder}
UNUSED = 7 * 86400
"""Seconds after which another version's files are removed."""


def _dispatched(name: str) -> Any:
    return getattr(functional, name)


def _recompiled(make: Callable[..., fx.GraphModule], args: tuple[Any, ...]) -> fx.GraphModule:
    """The pickler leaves a module without code."""
    gm = make(*args)
    gm.recompile()
    return gm


class Pickler(GraphPickler):
    """Torch's pickler of graphs (2.13), for graphs that also say which functions of `nn.functional` they come from."""

    _DISPATCHED: ClassVar = {
        f: name for name, f in vars(functional).items() if "<locals>" in getattr(f, "__qualname__", "")
    }

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, FunctionType) and (name := self._DISPATCHED.get(obj)):
            return _dispatched, (name,)
        made = super().reducer_override(obj)
        return (_recompiled, made) if isinstance(obj, fx.GraphModule) else made


class Captured(NamedTuple):
    """An example and its graph, which share their weights."""

    example: models.Example
    graph: Any


def captured_example(name: str, how: str = "forward", seed: int = 0, **sizes: int) -> Captured:
    """A built-in example and its graph, which are the caller's own."""

    def make() -> Captured:
        example = models.build(name, seed, **sizes)
        return Captured(example, CAPTURES[how](example.model, *example.args, **example.kwargs))

    return stored(f"{name} {how} {seed} {sorted(sizes.items())}", make)


def stored(what: str, make: Callable[[], T]) -> T:
    """Return what the first process that asked for ``what`` made, from torch's seed 0; each call reads it anew."""
    file = folder() / hashlib.sha256(what.encode()).hexdigest()[:16]
    if not file.exists():
        with file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the others wait, and find the file
            if not file.exists():
                with torch.random.fork_rng():
                    torch.manual_seed(0)
                    made = Pickler.dumps(make(), Options(ops_filter=None, node_metadata_key_filter=None))
                part = file.with_suffix(".part")
                part.write_bytes(made)
                part.replace(file)
    found: T = Pickler.loads(file.read_bytes(), FakeTensorMode(shape_env=ShapeEnv()))
    return found


@cache
def folder() -> Path:
    """Of this user, and of this code; nobody else can write into it."""
    root = Path(tempfile.gettempdir()) / f"splitkit-tests-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    assert root.stat().st_uid == os.getuid() and not root.stat().st_mode & 0o022, f"{root} is another user's"
    found = root / _version()
    found.mkdir(exist_ok=True)
    os.utime(found)
    for other in root.iterdir():
        with contextlib.suppress(OSError):  # another process removes it
            if time.time() - other.stat().st_mtime > UNUSED:
                shutil.rmtree(other)
    return found


def _version() -> str:
    package = Path(sk.__file__).parent
    code = hashlib.sha256(f"{torch.__version__} {metadata.version('transformers')} {package}".encode())
    capturing = [package / name for name in ("frontends", "graph", "engine", "testing", "training")]
    for files in (package.glob("*.py"), *(f.rglob("*.py") for f in capturing), Path(__file__).parent.glob("*.py")):
        for file in sorted(files):
            code.update(file.read_bytes())
    return code.hexdigest()[:16]


@cache
def joint_graph(name: str, **sizes: int) -> Joint:
    """The training step of a built-in example. Nobody may change it."""
    joint: Joint = captured_example(name, "joint", **sizes).graph
    AS_CAPTURED.append((joint, picture(joint)))
    return joint


AS_CAPTURED: list[tuple[Joint, tuple[object, ...]]] = []
"""The graphs that `joint_graph` gave away, and what they were then."""


def picture(joint: Joint) -> tuple[object, ...]:
    """The graph as text, the keys of each node's meta, and how often each parameter and buffer was written."""
    model, graph = joint.model, joint.graph_module.graph
    written = [(name, t._version) for held in (model.named_parameters, model.named_buffers) for name, t in held()]
    return str(graph), [sorted(node.meta) for node in graph.nodes], written, [m.training for m in model.modules()]


def changed() -> list[str]:
    """Graphs that are no longer what was captured."""
    return [str(joint) for joint, before in AS_CAPTURED if picture(joint) != before]
