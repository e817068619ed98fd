"""Restore the caller's modes if an op raises inside a region, as a ``with`` block does.

The nodes of a graph are calls, one after the other. An exception would leave autocast on, or gradients off, for the
caller; so the code of a graph with such nodes is wrapped in a ``try`` statement::

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

The nodes stay unchanged; `fx.Interpreter`, which runs nodes and not code, restores nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from splitkit import _torch
from splitkit.graph.ambient import DETERMINISTIC, FORWARD_GRAD, GRAD, HOOKS, region_targets, setting_targets
from splitkit.graph.scope import is_state_op

Body = list[str]
_OPEN_VMAP, _CLOSE_VMAP = (tuple((target, False) for target in both) for both in (_torch.OPEN_VMAP, _torch.CLOSE_VMAP))
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
"""Setting -> the code that reads its value and the code that restores it; all names are known to every graph."""


def restore_modes_on_error(graph: fx.Graph, always: bool = False) -> None:
    """Let the code of a graph that changes ambient state restore that state if an op raises.

    Args:
        graph: the graph; the caller recompiles its module.
        always: restore the grad mode even if only the parts that the graph calls set it.
    """

    def restoring(before: Callable[[Body], Body] | None) -> Callable[[Body], Body]:
        if isinstance(before, _Restoring):
            return replace(before, always=always or before.always)
        return _Restoring(before, always)

    if always or any(is_state_op(node) or node.target in _torch.OPEN_VMAP for node in graph.nodes):
        graph.on_generate_code(restoring)


@dataclass(frozen=True)
class _Restoring:
    """Rewrites the body of a graph's code. It reads no nodes, so that it survives copies and edits."""

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
    """Return a prefix that no name in the code has."""
    text = "\n".join(lines)
    while f"{base}_" in text:
        base = f"{base}_"
    return base


@dataclass
class _Regions:
    """The regions and settings found in the code.

    Attributes:
        base: the prefix of the names of flags.
        settings: the settings that are written.
        opened: the regions in order: the flag, and the code that closes the region.
    """

    base: str
    settings: list[str] = field(default_factory=list)
    opened: list[tuple[str, str]] = field(default_factory=list)
    _enters: Mapping[str, bool] = field(default_factory=lambda: _names((*region_targets(enters=True), *_OPEN_VMAP)))
    _exits: Mapping[str, bool] = field(default_factory=lambda: _names((*region_targets(enters=False), *_CLOSE_VMAP)))
    _setters: Mapping[str, str] = field(default_factory=lambda: _names(setting_targets()))
    _waiting: dict[str, list[int]] = field(default_factory=dict)  # handle, or "" -> the indices of open regions

    def read(self, line: str) -> str:
        """Return the line, with an assignment to a flag if it opens or closes a region."""
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
    """Return the names that functions may have in code -> what is known about them."""
    found = {}
    for target, known in targets:
        name = _torch.qualified_name(target)
        found[name] = found[re.sub(r"\W", "_", name)] = known
    return found


def _found(function: str, known: Mapping[str, Any]) -> Any:
    """Return what is known about a function; fx appends a number to names that are taken."""
    return known.get(function, known.get(re.sub(r"_\d+$", "", function)))
