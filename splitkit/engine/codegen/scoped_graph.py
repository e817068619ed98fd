"""A graph under construction that opens and closes regions, and writes settings, as its nodes need them."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from torch.fx import Node

from splitkit.engine.codegen.restore_modes import restore_modes_on_error
from splitkit.engine.codegen.writer import Writer
from splitkit.graph.ambient import SETTINGS, Setting
from splitkit.graph.scope import CALLERS, NEUTRAL, Scope, region_kind


class ScopedGraph:
    """A graph under construction that moves to the ambient state of each node.

    ``attributes`` are the names of the attributes that regions read, such as the hooks of saved tensors. An example::

        want: a, grad off     enter a; before = is_grad_enabled(); set(False)
        want: a, grad off     -
        want: a, b            set(before); enter b
        want: b               exit b; exit a; enter b           regions close in the order in which they nest
    """

    def __init__(self, writer: Writer) -> None:
        self.graph, self._writer = writer.graph, writer
        self.attributes: dict[str, None] = {}
        self._scope = NEUTRAL
        self._open: list[tuple[Node, Node, dict[str, Any]]] = []  # (enter, its copy, settings before it)
        self._settings: dict[str, Any] = dict.fromkeys(SETTINGS, CALLERS)  # the settings in force
        self._callers: dict[str, Node] = {}  # setting -> the node that yields the caller's value
        self._first: Node | None = None  # the first state op; before it, the caller's state is in force

    def move_to(self, want: Scope) -> None:
        """Close and open regions and write settings until the state is ``want``."""
        if want is self._scope or want == self._scope:
            return
        # Regions nest, so only the common prefix of those that are open can stay open.
        same = 0
        while same < min(len(self._open), len(want.regions)) and self._open[same][0] is want.regions[same]:
            same += 1
        while len(self._open) > same:
            self._close()
        opening = want.regions[same:]
        # Settings come first because some regions refuse to open under a wrong setting; not those that they set
        # themselves.
        self._write(want, {name for enter in opening for name in region_kind(enter).sets(enter)})
        for enter in opening:
            self._enter(enter)
        self._write(want)
        self._scope = want

    def finish(self, final: Scope) -> None:
        """Leave the ambient state as ``final``."""
        self.move_to(final)

    def opaque_ran(self) -> None:
        """Take the settings that opaque code, which has just run, has left as the caller's from here on."""
        set_here = [setting for name, setting in SETTINGS.items() if self._settings[name] is not CALLERS]
        self._callers = {setting.name: self._asked(setting) for setting in set_here}
        self._first = None

    def _enter(self, enter: Node) -> None:
        handle = self._append(self.graph.node_copy(enter, self._attribute))
        self._open.append((enter, handle, dict(self._settings)))
        self._settings |= region_kind(enter).sets(enter)

    def _attribute(self, node: Node) -> Node:
        """Copy an input of a region; it is an attribute, which every graph can read."""
        self.attributes[str(node.target)] = None
        return self.graph.node_copy(node)

    def _close(self) -> None:
        enter, handle, before = self._open.pop()
        kind = region_kind(enter)
        self._append(self.graph.call_function(kind.exit, (handle,) if kind.handle else ()))
        self._settings |= {name: before[name] for name in kind.sets(enter)}

    def _write(self, want: Scope, but: Container[str] = ()) -> None:
        for name, setting in SETTINGS.items():
            value = want.value(name)
            if name not in but and self._settings[name] != value:
                self._append(self._written(setting, value))
                self._settings[name] = value

    def _written(self, setting: Setting, value: Any) -> Node:
        if value is not CALLERS:
            target, args, kwargs = setting.write(value)
            return self.graph.call_function(target, args, kwargs) if kwargs else self._writer.call(target, args)
        return self._writer.call(setting.set, (self._asked(setting),))

    def _asked(self, setting: Setting) -> Node:
        """Return the node that yields the caller's value of a setting."""
        if setting.name not in self._callers:
            assert self._first is not None, "the caller's state needs no state op"
            with self.graph.inserting_before(self._first):
                self._callers[setting.name] = self.graph.call_function(setting.get)
        return self._callers[setting.name]

    def _append(self, state_op: Node) -> Node:
        if self._first is None:
            self._first = state_op
            restore_modes_on_error(self.graph)
        return state_op
