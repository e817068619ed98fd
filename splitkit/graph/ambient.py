"""Register the targets that open, close and set ambient state.

Graphs contain two kinds of such state::

    handle = enter(settings)      region: exit restores      disable()       setting: a value is overwritten,
    y = f(x)                      what its enter saw         y = f(x)        by whatever comes next
    exit(handle)                                             enable()

Everything else that changes the state in which later nodes run has no entry here: a default dtype, streams, the levels
of ``vmap``, ``grad`` and dual numbers (whose tensors die with their level). It is an effect that no node may move
across (`splitkit.graph.shared_memory.AMBIENT`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from splitkit import _torch
from splitkit.errors import GraphError

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""A target with its arguments."""


@dataclass(frozen=True)
class Setting:
    """A value that calls overwrite.

    Attributes:
        name: the name of the value, in `splitkit.graph.scope.Scope` and in messages.
        get: target without arguments that returns the value in force.
        set: target that restores a value that ``get`` returned.
        writers: other target that writes a value -> function from its arguments to that value.
        write: function from a constant value to the call that writes it.
    """

    name: str
    get: Any
    set: Any
    writers: Mapping[Any, Callable[..., Any]]
    write: Callable[[Any], Call]


@dataclass(frozen=True)
class Region:
    """A pair of targets that open and close a kind of region.

    Attributes:
        name: what messages call the kind.
        enter: target that opens a region.
        exit: target that closes a region and restores the state that ``enter`` saw.
        key: function from the enter node to the state that the region changes; regions of one key restore each other's.
        sets: function from the enter node to the settings that entering changes and leaving restores.
        handle: whether ``exit`` takes the result of ``enter``; if not, an exit closes the innermost region of its kind.
    """

    name: str
    enter: Any
    exit: Any
    key: Callable[[Node], Hashable]
    sets: Callable[[Node], Mapping[str, Any]] = lambda node: {}
    handle: bool = True


def _plain(name: str, get: Any, set_: Any) -> Setting:
    return Setting(name, get, set_, {}, lambda value: (set_, (value,), {}))


GRAD = _plain("grad mode", torch.is_grad_enabled, _torch.SET_GRAD)
FORWARD_GRAD = _plain("forward-mode gradients", _torch.IS_FWD_GRAD, _torch.SET_FWD_GRAD)
HOOKS = Setting(
    "saved-tensors hooks",
    _torch.HOOKS_MESSAGE,
    _torch.set_hooks_message,
    {_torch.FORBID_HOOKS: lambda error_message: error_message, _torch.ALLOW_HOOKS: lambda: None},
    lambda message: (_torch.ALLOW_HOOKS, (), {}) if message is None else (_torch.FORBID_HOOKS, (message,), {}),
)
DETERMINISTIC = Setting(
    "deterministic algorithms",
    _torch.deterministic,
    _torch.set_deterministic,
    {_torch.SET_DETERMINISTIC: lambda mode, *, warn_only=False: (mode, warn_only)},
    lambda value: (_torch.SET_DETERMINISTIC, (value[0],), {"warn_only": value[1]}),
)
SETTINGS: Mapping[str, Setting] = {s.name: s for s in (GRAD, FORWARD_GRAD, HOOKS, DETERMINISTIC)}
"""Name -> setting."""


def _first(node: Node) -> Any:
    return next(iter([*node.args, *node.kwargs.values()]), None)


def _inference(node: Node) -> Mapping[str, Any]:
    # c10::InferenceMode(on) also sets both kinds of gradients to `not on`
    return dict.fromkeys((GRAD.name, FORWARD_GRAD.name), not _first(node))


# By the id of the target: hashing an operator is slow, and some targets have no hash.
_BY_ENTER: dict[int, Region] = {}
_BY_EXIT: dict[int, tuple[Region, ...]] = {}
_BY_GET: dict[int, Setting] = {}
_BY_SET: dict[int, tuple[Setting, Callable[..., Any]]] = {}
TARGETS: dict[int, Any] = {}
"""Id -> target, for every registered target; holding the target keeps its id from being reused."""


def is_state_op(node: Node) -> bool:
    """Whether ``node`` only changes the ambient state, or only saves it for a later change."""
    if id(node.target) not in TARGETS or node.op != "call_function":
        return False
    setting = read_by(node)  # `before = is_grad_enabled(); ...; set_grad_enabled(before)`
    setters = [_BY_SET.get(id(user.target), (None,))[0] for user in node.users]
    return setting is None or (bool(setters) and all(setter is setting for setter in setters))


def opened_by(node: Node) -> Region | None:
    """Return the kind of region that ``node`` opens, if it opens one."""
    return _BY_ENTER.get(id(node.target))


def closed_by(node: Node) -> tuple[Region, ...]:
    """Return the kinds of region that ``node`` may close."""
    return _BY_EXIT.get(id(node.target), ())


def read_by(node: Node) -> Setting | None:
    """Return the setting whose value ``node`` yields, if it yields one."""
    return _BY_GET.get(id(node.target))


def written_by(node: Node) -> tuple[Setting, Any]:
    """Return the setting that ``node`` overwrites, and its new value: a constant or a node.

    Raises:
        GraphError: SK103 if the node's arguments do not fit the setting.
    """
    setting, value = _BY_SET[id(node.target)]
    try:
        return setting, value(*node.args, **node.kwargs)
    except TypeError as error:
        reason = f"{node.name} sets the {setting.name} in an unknown way: {error}"
        raise GraphError("SK103", reason, "Call it with the arguments that it takes.", [node]) from error


def register_region(
    name: str,
    enter: Callable[..., Any],
    exit: Callable[..., Any],
    *,
    state: Hashable = None,
    grad: bool | None = None,
    handle: bool = True,
) -> None:
    """Declare that two functions or operators of your own open and close a region, as ``with`` blocks do.

    Nodes that call them are then treated like those of autocast: no part computes them, and each part that has nodes
    from inside a region enters the region before these nodes and leaves it after them::

        splitkit.extend.register_region("scaled", enter_scale, exit_scale)

        old = enter_scale(2.0) ─┐             part 0: enter_scale(2.0), mm, exit_scale
        mm                      │   split ==>
        relu                    │             part 1: enter_scale(2.0), relu, exit_scale
        exit_scale(old)        ─┘

    A graph contains such nodes if you write them, or if your tracer treats the functions as leaves; a tracer that runs
    them (``torch.export``) leaves no trace of the region. Registering the same pair again changes nothing.

    Args:
        name: the name of this kind of region in messages.
        enter: opens a region. Its arguments must be constants or attributes of the graph.
        exit: takes only the result of ``enter``, and restores the state that ``enter`` saw.
        state: a name for the state that the region changes, if other kinds of region change the same state; such kinds
            restore each other's.
        grad: the grad mode that ``enter`` sets and ``exit`` restores, if they do. Neither may change any other state
            that splitkit knows (autocast, inference mode, ...).
        handle: whether ``exit`` takes the result of ``enter``. If not, ``exit`` takes no arguments and closes the
            innermost region.

    Raises:
        GraphError: SK105 if one of the two is not callable, both are the same, or one already has another meaning.
    """
    key: Hashable = ("registered", name if state is None else state)
    sets: Mapping[str, Any] = {} if grad is None else {GRAD.name: grad}
    known = _BY_ENTER.get(id(enter))
    if known is not None and (known.name, known.exit, known.handle) == (name, exit, handle):
        return
    _refuse_unfit(name, enter, exit, handle)
    _add_region(Region(name, enter, exit, lambda node: key, lambda node: sets, handle))


def _refuse_unfit(name: str, enter: Any, exit: Any, handle: bool) -> None:
    remedy = "Give two functions or operators that have no other meaning."
    for what in (enter, exit):
        if not callable(what):
            raise GraphError("SK105", f"region {name!r}: {what!r} cannot be called", remedy)
        shared = _BY_EXIT.get(id(what), ()) if what is exit else ()  # several kinds may have one exit
        free = all(id(target) not in TARGETS for target in _torch.spellings(what))
        if not free and [kind.handle for kind in shared[:1]] != [handle]:
            raise GraphError("SK105", f"region {name!r}: {what} opens, closes or sets something already", remedy)
    if enter is exit:
        raise GraphError("SK105", f"region {name!r}: it is opened and closed by the same function", remedy)


def _add_region(region: Region) -> None:
    for target in _torch.spellings(region.enter):
        _BY_ENTER[id(target)] = region
        TARGETS[id(target)] = target
    for target in _torch.spellings(region.exit):
        _BY_EXIT[id(target)] = (*_BY_EXIT.get(id(target), ()), region)
        TARGETS[id(target)] = target


def _add_setting(setting: Setting) -> None:
    writers = {setting.set: lambda value: value, **setting.writers}
    _BY_GET[id(setting.get)] = setting
    _BY_SET.update({id(target): (setting, value) for target, value in writers.items()})
    TARGETS.update({id(target): target for target in (setting.get, *writers)})


def region_targets(enters: bool) -> tuple[tuple[Any, bool], ...]:
    """Return the targets that open regions, or those that close them, each with whether its region has a handle."""
    if enters:
        return tuple((TARGETS[i], kind.handle) for i, kind in _BY_ENTER.items())
    return tuple((TARGETS[i], kinds[0].handle) for i, kinds in _BY_EXIT.items())


def setting_targets() -> tuple[tuple[Any, str], ...]:
    """Return the targets that overwrite a setting, each with the name of the setting."""
    return tuple((TARGETS[i], setting.name) for i, (setting, _) in _BY_SET.items())


for _setting in SETTINGS.values():
    _add_setting(_setting)
for _region in (
    Region("autocast", _torch.ENTER_AUTOCAST, _torch.EXIT_AUTOCAST, lambda n: ("autocast", _first(n))),
    Region("inference_mode", _torch.ENTER_INFERENCE, _torch.EXIT_INFERENCE, lambda n: "inference_mode", _inference),
    Region("record_function", _torch.ENTER_RECORD, _torch.EXIT_RECORD, lambda n: n),
    Region("record_function", _torch.ENTER_OLD_RECORD, _torch.EXIT_RECORD, lambda n: n),
    Region("saved_tensors_hooks", _torch.PUSH_HOOKS, _torch.POP_HOOKS, lambda n: n, handle=False),
):
    _add_region(_region)
