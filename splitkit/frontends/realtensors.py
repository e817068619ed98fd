"""Code of users that runs while torch traces, on real tensors all the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes  # 2.11, 2.13, 2.15


@contextmanager
def on_real_tensors(joint: fx.GraphModule) -> Iterator[None]:
    """Within, tensors are real ones, so that costs can be measured, and the sizes that they are given are no guards."""
    values = (n.meta.get("val") for n in joint.graph.find_nodes(op="placeholder"))
    symbol = next((s for v in values for s in (getattr(v, "shape", ()) or [v]) if isinstance(s, torch.SymInt)), None)
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        if symbol is not None:
            stack.enter_context(symbol.node.shape_env.suppress_guards())  # 2.11, 2.13, 2.15
        yield
