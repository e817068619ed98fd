"""Draws what a capture that failed had reached, and where it stopped."""

from __future__ import annotations

from splitkit._torch import target_name
from splitkit.costs import flops
from splitkit.engine.split import plan
from splitkit.errors import CaptureError, SplitError
from splitkit.graph.dataflow import analyze, module_path
from splitkit.view.data.joint_ladder import source_line
from splitkit.view.data.ladder import LadderView
from splitkit.view.page import page
from splitkit.view.page.html import fragment, still_page
from splitkit.view.svg.drawing import escaped
from splitkit.view.tables import table


def capture_failure_html(error: CaptureError, title: str = "") -> str:
    """Return a page of ``error.reached`` with the place and the reason where the capture stopped.

    It is the page of a plan of one stage. Where the graph has no sizes, as under ``symbolic_trace``, it is a table of
    the nodes.

    Args:
        error: what `splitkit.capture` raised; its ``reached`` is a graph module.
        title: the title of the page.
    """
    gm = error.reached
    assert gm is not None
    nodes = [node for node in gm.graph.nodes if node.op != "output"]
    try:
        whole, costs = plan(gm, lambda node: 0), flops(gm)
        data = LadderView(analyze(gm), whole, costs, title, optimizer=None).to_dict()
    except SplitError:
        rows = [(node.name, target_name(node), module_path(node), source_line(node)) for node in nodes]
        reached = table(("node", "op", "module", "line"), rows, title="reached, in order")
        return still_page(title, fragment(f'<pre style="white-space:pre-wrap">{escaped(str(error))}</pre>', [reached]))
    last = max(data["ops"]["row"], default=0)
    stopped = {"row": last, "node": nodes[-1].name, "at": error.stopped_at, "why": str(error)}
    return page(data | {"note": "", "stopped": stopped})
