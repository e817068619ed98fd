"""A dispatch mode that records which storages are alive when during a run.

A weak reference to each storage tells by its callback when the storage dies: torch keeps the Python object of a storage
alive as long as the storage itself, so nothing is held here that the run frees. The technique is that of
``torch.distributed._tools.mem_tracker``.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode  # 2.11, 2.13, 2.15

from splitkit import _torch
from splitkit._torch import plain_tensors, pytree
from splitkit.errors import GraphError
from splitkit.graph.storages import tensors
from splitkit.memory.kernels.kernel_results import bytes_made_by

BEFORE = -1
"""The op that made the memory which existed before the run."""
HELD = 2**62
"""The death of memory that is still alive after the run."""


@dataclass(slots=True)
class StorageLifetime:
    """A block of memory and the ops during which it was alive.

    Attributes:
        nbytes: its bytes.
        made: its origin: the op that made it, or a description such as ``"input"``.
        device: the device that holds it.
        born: the index of the op that made it, -1 if it existed before.
        died: the index of the first op after which it is gone.
    """

    nbytes: int
    made: str
    device: str
    born: int
    died: int = HELD


@dataclass(slots=True)
class _Memory:
    """Memory, and the number of live storages on it: several after ``torch.from_numpy`` of one array."""

    life: StorageLifetime
    storages: int = 0


@dataclass(slots=True)
class _Storage:
    """A live storage; the callback of ``alive`` reports its death."""

    alive: weakref.ref[torch.UntypedStorage]
    place: Hashable
    nbytes: int


class StorageWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every op and the lifetimes of the storages that ops read or make.

    Attributes:
        ops: the ops that have run.
        lives: the lifetimes in the order in which memory was first seen; resizing ends one and begins another.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[str] = []
        self.lives: list[StorageLifetime] = []
        self._storages: dict[int, _Storage] = {}  # by id
        self._memory: dict[Hashable, _Memory] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let ``torch.compile`` run compiled code under this mode, where by default it runs the original code."""
        return True

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the ops that run inside; storages that die later count as alive at the end."""
        _wake_dispatch()
        try:
            with self, _resizes_seen_by(self), _inductor_buffers_seen_by(self):
                yield
        finally:
            self._storages.clear()  # drops the weak references, and with them the callbacks
            self._memory.clear()

    def see(self, value: Any, made: str, born: int = BEFORE, taken: int = 0) -> None:
        """Record the storages of a tensor that are new, or have changed their size.

        Args:
            value: the tensor.
            made: the op that made it, or a description of its origin.
            born: the index of that op.
            taken: for a fake tensor, the bytes that a kernel would allocate, if these are more than it shows.
        """
        for tensor in plain_tensors(value):
            storage = _storage_of(tensor)
            if storage is not None:
                self.see_storage(storage, str(tensor.device), made, born, taken)

    def see_storage(self, storage: torch.UntypedStorage, device: str, made: str, born: int, taken: int = 0) -> None:
        """Record a storage that is new, or has changed its size; arguments as for `see`."""
        place, nbytes = _place(storage)
        known = self._storages.get(id(storage))
        if known is None:
            known = _Storage(weakref.ref(storage, partial(self._died, id(storage))), place, nbytes)
            self._storages[id(storage)] = known
            self._take(place, StorageLifetime(max(nbytes, taken), made, device, born))
        elif (known.place, known.nbytes) != (place, nbytes):
            old = self._give_up(known.place)
            known.place, known.nbytes = place, nbytes
            self._take(place, StorageLifetime(nbytes, old.made, device, len(self.ops)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "namespace", "") == "prim":  # ops of fake tensors, such as a query of the device
            return func(*args, **kwargs)
        given = list(tensors((args, kwargs)))
        if any(map(_wraps, given)):
            return NotImplemented  # a wrapper: its ops on the wrapped tensors come next
        if _is_composite(func, given):  # inference mode hands composite ops to modes undecomposed
            with self:  # not OpOverload.decompose, which prefers Python decompositions that differ (dropout)
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        if func not in _LIFTS:
            for tensor in given:
                self.see(tensor, "outside")
        result = func(*args, **kwargs)
        for tensor in tensors(result):
            taken = bytes_made_by(func, args, kwargs, tensor) if isinstance(tensor, _torch.FakeTensor) else 0
            self.see(tensor, str(func), len(self.ops), _known_size(taken))
        for tensor in given:
            self.see(tensor, str(func), len(self.ops))
        self.ops.append(str(func))
        return result

    def _take(self, place: Hashable, life: StorageLifetime) -> None:
        if place not in self._memory:
            self._memory[place] = _Memory(life)
            self.lives.append(life)
        memory = self._memory[place]
        memory.storages += 1
        memory.life.nbytes = max(memory.life.nbytes, life.nbytes)

    def _give_up(self, place: Hashable) -> StorageLifetime:
        memory = self._memory[place]
        memory.storages -= 1
        if not memory.storages:
            memory.life.died = len(self.ops)
            del self._memory[place]
        return memory.life

    def _died(self, key: int, _: object) -> None:
        self._give_up(self._storages.pop(key).place)


class FakesOfReals(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Converts each real tensor to one fake tensor inside a fake mode, for code that reaches tensors of its own.

    The fake mode itself would convert a real tensor anew for each op, so that a write in place would look like new
    memory.

    Args:
        mode: the fake mode.
    """

    supports_higher_order_operators = True

    def __init__(self, mode: _torch.FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode
        # id -> (the real tensor, held so that the id stays its own; its fake)
        self._fakes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _LIFTS:  # a lifted constant stays real: the fake mode then knows its value
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._fake, (args, kwargs))
        return func(*args, **(kwargs or {}))

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return tensor  # a fake already, or a subclass, whose own ops come next
        if id(tensor) not in self._fakes:
            self._fakes[id(tensor)] = tensor, self._mode.from_tensor(tensor)
        return self._fakes[id(tensor)][1]


@cache
def _wake_dispatch() -> None:
    """Run a first op under a mode: it imports ``torch._dynamo``, which leaves its arguments in reference cycles."""
    with StorageWatch():
        torch.empty(0).detach()


_ALLOCATES = "_empty_strided_"
"""The start of the names of the functions by which Inductor's code allocates, one for each device."""

_COMPOSITE: Any = torch._C.DispatchKey.CompositeImplicitAutograd  # and OpOverload._op_dk: 2.11, 2.13, 2.15

# Ops whose argument is a tensor that no op has made: from `torch.tensor`, `torch.as_tensor`, `torch.from_numpy`. Not
# `lift_fresh_copy`, which occurs only in captured graphs, where it reads a constant of the graph.
_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift.default)


@contextmanager
def _resizes_seen_by(watch: StorageWatch) -> Iterator[None]:
    """Record ``UntypedStorage.resize_`` as an op: FSDP allocates and frees with it, past the dispatcher."""
    kind: Any = torch.UntypedStorage
    resize = kind.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        if storage.nbytes() == size:
            return resize(storage, size)
        device = str(storage.device)
        watch.see_storage(storage, device, "outside", BEFORE)
        result = resize(storage, size)
        watch.see_storage(storage, device, "outside", BEFORE)
        watch.ops.append("UntypedStorage.resize_")
        return result

    with patch.object(kind, "resize_", resize_):
        yield


@contextmanager
def _inductor_buffers_seen_by(watch: StorageWatch) -> Iterator[None]:
    """Record each buffer that Inductor's code allocates as an op: its functions go past the dispatcher.

    Generated modules have the functions as globals, taken from torch when they are loaded. While the watch is on, torch
    and the modules loaded before have functions that report to the watch; at the end all modules have the former ones.
    """

    def reporting(name: str, allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate_and_report(*args: Any, **kwargs: Any) -> torch.Tensor:
            buffer = allocate(*args, **kwargs)
            watch.see(buffer, name, len(watch.ops))
            watch.ops.append(name)
            return buffer

        return allocate_and_report

    source: Any = torch._C._dynamo.guards  # and its functions: 2.11, 2.13, 2.15
    former = {name: getattr(source, name) for name in vars(source) if name.startswith(_ALLOCATES)}
    during = {name: reporting(f"inductor.{name[1:]}", function) for name, function in former.items()}
    _exchange(source, former, during)
    try:
        yield
    finally:
        _exchange(source, during, former)


def _exchange(source: Any, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Exchange functions in torch and in Inductor's generated modules, which name them without the underscore."""
    for name, function in new.items():
        setattr(source, name, function)
    cache = sys.modules.get("torch._inductor.codecache")  # PyCodeCache.modules: 2.11, 2.13, 2.15
    for module in cache.PyCodeCache.modules if cache else ():
        for name, function in old.items():
            if vars(module).get(name[1:]) is function:
                setattr(module, name[1:], new[name])


def _is_composite(func: Any, given: list[torch.Tensor]) -> bool:
    """Return whether the dispatcher runs other ops in place of ``func``: not if a device has a kernel of its own."""
    if not isinstance(func, _torch.OpOverload) or not _torch.is_composite(func):
        return False
    name = func.name()  # type: ignore[no-untyped-call]
    keys = {torch._C._dispatch_key_for_device(tensor.device.type) for tensor in given}  # 2.11, 2.13, 2.15
    return not any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys)


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # opaque tensors (mkldnn) and some subclasses have none
        return None


def _wraps(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a subclass that wraps others; fake tensors, with storages on meta, are not."""
    if type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return False
    storage = _storage_of(tensor)
    return storage is None or storage.device.type != "meta"


def _place(storage: torch.UntypedStorage) -> tuple[Hashable, int]:
    """Return a key that identifies the memory of a storage among all live memory, and its bytes."""
    own = id(storage)
    if storage.device.type == "meta":
        return own, _known_size(storage.nbytes())
    try:
        pointer = storage.data_ptr()
    except RuntimeError:  # the storage of a wrapper has no data
        return own, 0
    return ((str(storage.device), pointer) if pointer else own), storage.nbytes()


def _known_size(nbytes: object) -> int:
    try:
        return _torch.size_hint(nbytes)
    except TypeError as error:
        raise GraphError(
            "SK108", f"a fake tensor has {nbytes} bytes: {error}", "Measure the run on real tensors."
        ) from error


class OpsSeen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the ops that the dispatcher sees within.

    Attributes:
        ops: each once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: set[object] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.add(func)
        return func(*args, **(kwargs or {}))
