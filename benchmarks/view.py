"""Size and speed of the page in headless Chromium: of a training graph, and of one with 20,000 ops.

    python benchmarks/view.py              # two minutes; --large takes the second one, too: five more
    python benchmarks/view.py --json

A row a page: its bytes, milliseconds to mount it and to lay it out with all modules open, and frames a second while it
is moved with all of them open. The aims: a training graph of 2,400 ops in 250 kB, 300 ms, 100 ms and 30 frames a
second; 20,000 ops mounted in 1,000 ms. Chromium draws without a GPU here. There is no peer: FxGraphDrawer's dot did not
end on the first of these graphs in 240 seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from small_nets import loss_or_sum

import splitkit as sk
from splitkit.testing import models
from splitkit.view.tables import table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
from browser import Browser

MOUNT = """(() => { const options = splitkit.options; splitkit.destroy(); const start = performance.now();
  const data = JSON.parse(document.getElementById("splitkit-data").textContent);
  window.splitkit = show(document.body, data, options); splitkit.paint();
  return performance.now() - start; })()"""
OPEN = """(() => { splitkit.data.rows.forEach((row, i) => splitkit.open.add(i)); splitkit.folded = false;
  const start = performance.now(); splitkit.layout(); return performance.now() - start; })()"""
PAN = """new Promise(done => { let frames = 0; const start = performance.now(); splitkit.zoom = 0.5;
  const next = () => { splitkit.y -= 15; splitkit.paint(); frames++;
    const past = performance.now() - start; past < 2000 ? requestAnimationFrame(next) : done(1000 * frames / past); };
  requestAnimationFrame(next); })"""


def measured(layers: int, browser: Browser, folder: Path) -> dict[str, Any]:
    """A row: the joint graph of a GPT-2 of so many layers, forward and backward."""
    example = models.build("gpt2", layers=layers, width=64, heads=4, seq=16, vocab=100)
    joint = sk.capture_joint(example.model, *example.args, **example.kwargs, loss=loss_or_sum)
    costs = sk.costs.roofline(joint.graph_module, "a100")
    path = folder / f"{layers}.html"
    joint.split(sk.policies.SaveAll(), costs).to_html(path, costs=costs, title=f"GPT-2, {layers} layers")
    browser.open(path)
    row = {"ops": browser.value("splitkit.ops.count"), "bytes": path.stat().st_size}
    row["mount ms"] = min(browser.value(MOUNT) for _ in range(3))
    row["open ms"] = browser.value(OPEN)
    row["frames"] = browser.value(PAN)
    assert browser.faults() == [] and browser.requests() == []
    return row


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--large", action="store_true", help="20,000 ops as well")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Browser() as browser:
        rows = [measured(layers, browser, Path(folder)) for layers in ([16, 135] if args.large else [16])]
    if args.json:
        print(json.dumps({"rows": rows}))
        return
    titles = tuple(rows[0])
    Console(width=120).print(table(titles, [tuple(f"{row[t]:,.0f}" for t in titles) for row in rows], titles))


if __name__ == "__main__":
    main()
