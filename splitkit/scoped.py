"""A graph under construction that keeps track of the ambient state: regions are opened, closed and set by need."""

from __future__ import annotations

import torch
from torch import fx
from torch.fx import Node

from splitkit import _torch
from splitkit.scope import NEUTRAL, Scope, region_kind


class ScopedGraph:
    """A graph under construction that moves to the ambient state which each node wants."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.env: dict[Node, Node] = {}
        self._scope = NEUTRAL
        self._open: list[tuple[Node, Node, bool | None]] = []  # (enter, its copy, grad mode before it)
        self._grad: bool | None = None  # the grad mode in force; None: the caller's
        self._callers_grad: Node | None = None

    def copy(self, node: Node, scope: Scope) -> Node:
        """Append a copy of ``node`` under ``scope``."""
        self.move_to(scope)
        self.env[node] = self.graph.node_copy(node, self.env.__getitem__)
        return self.env[node]

    def move_to(self, want: Scope) -> None:
        """Close and open regions and set grad mode until the state is ``want``."""
        if want == self._scope:
            return
        if self._callers_grad is None:
            self._callers_grad = self.graph.call_function(torch.is_grad_enabled)
        have = [enter for enter, _, _ in self._open]
        same = 0
        while same < min(len(have), len(want.regions)) and have[same] is want.regions[same]:
            same += 1
        while len(self._open) > same:
            self._close()
        for enter in want.regions[same:]:
            self._enter(enter)
        if self._grad != want.grad:
            self.graph.call_function(_torch.SET_GRAD, (self._callers_grad if want.grad is None else want.grad,))
            self._grad = want.grad
        self._scope = want

    def _enter(self, enter: Node) -> None:
        self._open.append((enter, self.graph.node_copy(enter), self._grad))
        grad = region_kind(enter).grad(enter)
        self._grad = self._grad if grad is None else grad

    def _close(self) -> None:
        enter, handle, grad_before = self._open.pop()
        kind = region_kind(enter)
        self.graph.call_function(kind.exit, (handle,))
        if kind.grad(enter) is not None:
            self._grad = grad_before

    def finish(self, final: Scope) -> None:
        """Leave the ambient state as ``final``; drop what was saved in vain."""
        self.move_to(final)
        if self._callers_grad is not None and not self._callers_grad.users:
            self.graph.erase_node(self._callers_grad)
