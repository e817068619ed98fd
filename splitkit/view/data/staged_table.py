"""Makes the table of the stages of a training step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitkit.units import duration, size
from splitkit.view.console.tables import table
from splitkit.view.data.staged_ladder import StagedView

if TYPE_CHECKING:
    from rich.table import Table


def table_of_stages(view: StagedView) -> Table:
    """Return a table with a row for each stage: seconds of its parts, and bytes of a microbatch.

    ``fixed`` is weights, gradients and the state of the optimizer; ``held`` is what a microbatch holds from forward to
    backward, with what the stage received and sent.
    """
    unit, columns = view.stages[0].unit, view.still()["stages"]
    split = view.divided
    titles = ["stage", "forward", "input" if split else "backward", *(["weight"] if split else []), "ops again", "held"]
    titles += [*(["waits for weight"] if split else []), "sent", "gradients sent", "temporary", "fixed"]
    rows = []
    for number, costs in enumerate(view.stages):
        stage = view.step.stages[number]
        row = [str(number), duration(costs.forward, unit), duration(costs.backward_input, unit)]
        row += [duration(costs.backward_weight, unit)] if split else []
        row += [f"{columns['again'][number]:.0f}", size(costs.saved_bytes)]
        row += [size(stage.waiting_bytes)] if split else []
        row += [size(stage.sent_bytes), size(stage.gradients_sent_bytes)]
        rows.append([*row, size(costs.temporary_bytes), size(costs.fixed_bytes)])
    return table(titles, rows, titles[1:])
