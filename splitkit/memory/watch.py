"""Which storages are alive when, in a run that a dispatch mode watches.

A storage is what takes memory; views share one. It is known by a weak reference, whose callback says when it dies:
torch keeps the Python object of a storage as long as the storage itself, and nothing is held here that the run gives
up (so does ``torch.distributed._tools.mem_tracker``).
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode  # 2.11, 2.13, 2.15

from splitkit import _torch
from splitkit._torch import plain_tensors, pytree
from splitkit.errors import GraphError
from splitkit.memory.kernels import bytes_made_by

BEFORE = -1
"""The op that made what was there before the run."""
HELD = 2**62
"""The death of what is still there after the run."""


@dataclass(slots=True)
class Life:
    """Some memory, and when it was there.

    Attributes:
        nbytes: its bytes.
        made: the op that made it, or what it is.
        device: where it lies.
        born: the index of the op that made it, -1 if it was there before.
        died: the index of the first op after which it is no longer there.
    """

    nbytes: int
    made: str
    device: str
    born: int
    died: int = HELD


@dataclass(slots=True)
class _Memory:
    """Memory that some storages share: several, if one was made of another's (``torch.from_numpy``)."""

    life: Life
    storages: int = 0


@dataclass(slots=True)
class _Storage:
    """What is known of a storage. ``alive`` has the callback that says when it dies."""

    alive: weakref.ref[torch.UntypedStorage]
    place: Hashable
    nbytes: int


class StorageWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every op, and lists the lives of the storages that ops read or make.

    Attributes:
        ops: the ops that have run.
        lives: memory in the order in which it was first seen; one that is resized ends a life and begins another.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[str] = []
        self.lives: list[Life] = []
        self._storages: dict[int, _Storage] = {}  # by id
        self._memory: dict[Hashable, _Memory] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let ``torch.compile`` run its code and show the ops of that; it would run the original code instead."""
        return True

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what runs inside; what dies later is still alive in `lives`."""
        _wake_dispatch()
        try:
            with self, _resizes_seen_by(self):
                yield
        finally:
            self._storages.clear()  # and with them the callbacks
            self._memory.clear()

    def see(self, value: Any, made: str, born: int = BEFORE, taken: int = 0) -> None:
        """Take notice of the storages of a tensor: new ones, and those that have another size by now.

        Args:
            value: the tensor.
            made: the op that made it, or what it is.
            born: the index of that op.
            taken: bytes that a kernel would take for it, if it is a fake that shows fewer.
        """
        for tensor in plain_tensors(value):
            storage = _storage_of(tensor)
            if storage is not None:
                self.see_storage(storage, str(tensor.device), made, born, taken)

    def see_storage(self, storage: torch.UntypedStorage, device: str, made: str, born: int, taken: int = 0) -> None:
        """The same for a storage."""
        place, nbytes = _place(storage)
        known = self._storages.get(id(storage))
        if known is None:
            known = _Storage(weakref.ref(storage, partial(self._died, id(storage))), place, nbytes)
            self._storages[id(storage)] = known
            self._take(place, Life(max(nbytes, taken), made, device, born))
        elif (known.place, known.nbytes) != (place, nbytes):
            old = self._give_up(known.place)
            known.place, known.nbytes = place, nbytes
            self._take(place, Life(nbytes, old.made, device, len(self.ops)))

    def done(self, op: str) -> None:
        """An op has run."""
        self.ops.append(op)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "namespace", "") == "prim":  # a fake tensor is asked for its device
            return func(*args, **kwargs)
        given = _tensors((args, kwargs))
        if any(map(_wraps, given)):
            return NotImplemented  # its own ops come next, on what it wraps
        if _is_composite(func, given):  # as in inference mode
            with self:  # OpOverload.decompose would take another one in Python for some, such as dropout
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        if func not in _LIFTS:
            for tensor in given:
                self.see(tensor, "outside")
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            taken = bytes_made_by(func, args, kwargs, tensor) if isinstance(tensor, _torch.FakeTensor) else 0
            self.see(tensor, str(func), len(self.ops), _known_size(taken))
        for tensor in given:
            self.see(tensor, str(func), len(self.ops))
        self.done(str(func))
        return result

    def _take(self, place: Hashable, life: Life) -> None:
        if place not in self._memory:
            self._memory[place] = _Memory(life)
            self.lives.append(life)
        memory = self._memory[place]
        memory.storages += 1
        memory.life.nbytes = max(memory.life.nbytes, life.nbytes)

    def _give_up(self, place: Hashable) -> Life:
        memory = self._memory[place]
        memory.storages -= 1
        if not memory.storages:
            memory.life.died = len(self.ops)
            del self._memory[place]
        return memory.life

    def _died(self, key: int, _: object) -> None:
        self._give_up(self._storages.pop(key).place)


class FakesOfReals(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside a fake mode, gives ops one fake for each real tensor, as opaque code may reach some besides its arguments.

    The fake mode itself makes a new one for each op, so that what is written in place would seem to be new memory.

    Args:
        mode: the fake mode.
    """

    supports_higher_order_operators = True

    def __init__(self, mode: _torch.FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode
        self._fakes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id of the real one, which is held

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _LIFTS:  # of a number that is known
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
    """Have done what the first op under any mode does: it imports ``torch._dynamo``; cycles then hold its arguments."""
    with StorageWatch():
        torch.empty(0).detach()


_COMPOSITE: Any = torch._C.DispatchKey.CompositeImplicitAutograd  # and OpOverload._op_dk: 2.11, 2.13, 2.15

# Ops that are given a tensor which no op has made: `torch.tensor`, `torch.as_tensor`, `torch.from_numpy`. Not
# `lift_fresh_copy`, which stands in captured graphs alone: there it reads a constant of the graph.
_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift.default)


@contextmanager
def _resizes_seen_by(watch: StorageWatch) -> Iterator[None]:
    """``UntypedStorage.resize_`` counts as an op: it allocates and frees (FSDP) without one."""
    kind: Any = torch.UntypedStorage
    before = vars(kind).get("resize_")  # of a run around this one
    resize = kind.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        if storage.nbytes() == size:
            return resize(storage, size)
        device = str(storage.device)
        watch.see_storage(storage, device, "outside", BEFORE)
        result = resize(storage, size)
        watch.see_storage(storage, device, "outside", BEFORE)
        watch.done("UntypedStorage.resize_")
        return result

    kind.resize_ = resize_
    try:
        yield
    finally:
        if before is None:
            del kind.resize_
        else:
            kind.resize_ = before


def _is_composite(func: Any, given: list[torch.Tensor]) -> bool:
    """Whether the dispatcher would run other ops in its place: ``silu_backward`` could, but has kernels of its own."""
    if not isinstance(func, _torch.OpOverload) or not _torch.is_composite(func):
        return False
    name = func.name()  # type: ignore[no-untyped-call]
    keys = {torch._C._dispatch_key_for_device(tensor.device.type) for tensor in given}  # 2.11, 2.13, 2.15
    return not any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # opaque ones (mkldnn), and some subclasses
        return None


def _wraps(tensor: torch.Tensor) -> bool:
    """Whether a subclass stands for other tensors; a fake one, whose storage is on meta, stands for itself."""
    if type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return False
    storage = _storage_of(tensor)
    return storage is None or storage.device.type != "meta"


def _place(storage: torch.UntypedStorage) -> tuple[Hashable, int]:
    """What tells the memory of a storage from all other that is alive, and its bytes."""
    own = id(storage)
    if storage.device.type == "meta":
        return own, _known_size(storage.nbytes())
    try:
        pointer = storage.data_ptr()
    except RuntimeError:  # of a subclass that wraps others
        return own, 0
    return ((str(storage.device), pointer) if pointer else own), storage.nbytes()


def _known_size(nbytes: object) -> int:
    try:
        return _torch.size_hint(nbytes)
    except TypeError as error:
        raise GraphError(
            "SK108", f"a fake tensor has {nbytes} bytes: {error}", "Measure the run on real tensors, not on fake ones."
        ) from error
