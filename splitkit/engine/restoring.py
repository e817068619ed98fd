"""Code that restores the caller's modes when an op raises between the two ends of a region, as a ``with`` block does.

The nodes of a graph are calls, one after the other. An exception would leave autocast on, or gradients off, for whoever
called the graph; so the code of a graph that has such nodes gets a ``try`` around it::

    caller_0 = torch.is_grad_enabled();  open_0 = False
    try:
        _enter_autocast = torch.amp.autocast_mode._enter_autocast(...);  open_0 = True
        linear = ...
        _exit_autocast = torch.amp.autocast_mode._exit_autocast(_enter_autocast);  ...;  open_0 = False
        return linear
    except BaseException:
        if open_0: torch.amp.autocast_mode._exit_autocast(_enter_autocast)
        torch._C._set_grad_enabled(caller_0)
        raise

The graph itself stays what it is; `fx.Interpreter`, which runs nodes and not code, restores nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from splitkit import _torch
from splitkit.graph.ambient import DETERMINISTIC, FORWARD_GRAD, GRAD, HOOKS, region_targets, setting_targets
from splitkit.graph.scope import is_state_op

Body = list[str]
_CALL = re.compile(r"^(\w+)(?: : [^=]+)? = ([\w.]+)\((.*?)\)(?:;|$)")
_HOOKS = "torch._C._autograd._saved_tensors_hooks_"
_CALLERS: Mapping[str, tuple[str, str]] = {
    GRAD.name: ("torch.is_grad_enabled()", "torch._C._set_grad_enabled({0})"),
    FORWARD_GRAD.name: ("torch._C._is_fwd_grad_enabled()", "torch._C._set_fwd_grad_enabled({0})"),
    HOOKS.name: (
        f"{_HOOKS}get_disabled_error_message()",
        f"{_HOOKS}enable() if {{0}} is None else {_HOOKS}disable({{0}})",
    ),
    DETERMINISTIC.name: (
        "(torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())",
        "torch._C._set_deterministic_algorithms({0}[0], warn_only={0}[1])",
    ),
}
"""Setting -> the code that asks for its value, and the code that puts it back; with names that every graph knows."""


def restore_modes_on_error(graph: fx.Graph, always: bool = False) -> None:
    """Let the code of a graph that changes ambient state restore it when an op raises.

    Args:
        graph: the graph; its code is to be made (again).
        always: restore the grad mode even if the graph itself does not set it, but the parts that it calls.
    """
    if always or any(map(is_state_op, graph.nodes)):
        graph.on_generate_code(_with_always if always else _with)


def _with(before: Callable[[Body], Body] | None) -> Callable[[Body], Body]:
    return before if isinstance(before, _Restoring) else _Restoring(before, False)


def _with_always(before: Callable[[Body], Body] | None) -> Callable[[Body], Body]:
    return _Restoring(before.before if isinstance(before, _Restoring) else before, True)


@dataclass(frozen=True)
class _Restoring:
    """Rewrites the body of a graph's code. It reads code, not nodes, so that copies and edits of the graph keep it."""

    before: Callable[[Body], Body] | None
    always: bool

    def __call__(self, body: Body) -> Body:
        lines = "".join(self.before(body) if self.before else body).split("\n")
        found = _Regions(_unused("open", lines))
        inside = [found.read(line) for line in lines]
        settings = [GRAD.name, *found.settings] if self.always else found.settings
        if not found.opened and not settings:
            return ["\n".join(lines)]
        callers = {name: f"{_unused('caller', lines)}_{i}" for i, name in enumerate(dict.fromkeys(settings))}
        head = [f"{variable} = {_CALLERS[name][0]}" for name, variable in callers.items()]
        head += [f"{flag} = False" for flag, _ in found.opened]
        tail = [f"if {flag}: {leave}" for flag, leave in reversed(found.opened) if leave]
        tail += [_CALLERS[name][1].format(variable) for name, variable in callers.items()]
        code = [*head, "try:", *_indented(inside), "except BaseException:", *_indented([*tail, "raise"])]
        return ["\n".join(code) + "\n"]


def _indented(lines: Iterable[str]) -> Iterable[str]:
    return (f"    {line}" for line in lines)


def _unused(base: str, lines: Iterable[str]) -> str:
    """A name that begins no name in the code."""
    text = "\n".join(lines)
    while f"{base}_" in text:
        base = f"{base}_"
    return base


@dataclass
class _Regions:
    """What was found in the code.

    Attributes:
        base: of the names of flags.
        settings: that are written.
        opened: regions in order: flag, and the code that closes the region.
    """

    base: str
    settings: list[str] = field(default_factory=list)
    opened: list[tuple[str, str]] = field(default_factory=list)
    _enters: Mapping[str, bool] = field(default_factory=lambda: _names(region_targets().enters))
    _exits: Mapping[str, bool] = field(default_factory=lambda: _names(region_targets().exits))
    _setters: Mapping[str, str] = field(default_factory=lambda: _names(setting_targets()))
    _waiting: dict[str, list[int]] = field(default_factory=dict)  # handle, or nothing -> the regions that are open

    def read(self, line: str) -> str:
        """The line, with a flag set where it opens or closes a region."""
        call = _CALL.match(line)
        if call is None:
            return line
        variable, function, arguments = call.groups()
        if (setting := _found(function, self._setters)) is not None:
            self.settings.append(setting)
        if (has_handle := _found(function, self._enters)) is not None:
            self._waiting.setdefault(variable if has_handle else "", []).append(len(self.opened))
            self.opened.append((f"{self.base}_{len(self.opened)}", ""))
            return f"{line};  {self.opened[-1][0]} = True"
        if _found(function, self._exits) is not None and self._waiting.get(arguments):
            number = self._waiting[arguments].pop()
            flag = self.opened[number][0]
            self.opened[number] = flag, f"{function}({arguments})"
            return f"{line};  {flag} = False"
        return line


def _names(targets: Iterable[tuple[Any, Any]]) -> dict[str, Any]:
    """What functions may be called in code -> what is known of them."""
    found = {}
    for target, known in targets:
        name = _torch.qualified_name(target)
        found[name] = found[re.sub(r"\W", "_", name)] = known
    return found


def _found(function: str, known: Mapping[str, Any]) -> Any:
    """What is known of a function; fx puts a number behind names that are taken."""
    return known.get(function, known.get(re.sub(r"_\d+$", "", function)))
