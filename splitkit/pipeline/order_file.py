"""Reads and writes orders as torch's schedule CSV: a row per rank, a cell per action (``_load_csv``, torchtitan).

::

    0F0,0F1,0B0,0B1          rank 0
    1F0,1B0,1F1,1B1          rank 1
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path

from splitkit.errors import FileError, ScheduleError
from splitkit.files import PathLike, save_text
from splitkit.pipeline.action import Action
from splitkit.pipeline.order import ACTION, OTHER_CELL, PipelineOrder, action_of

_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_REMEDY = "Write stage, F, B, I or W, and microbatch: 3F0; or leave the cell empty for idle time."


def order_to_csv(order: PipelineOrder) -> str:
    """Return an order as torch writes it with ``format="compute_only"``; each row ends with ``\\r\\n``.

    Sends and receives are left out; the reader of the file derives them again, as torch does by default.
    """
    text = io.StringIO()
    csv.writer(text).writerows(order.ranks)
    return text.getvalue()


def order_from_csv(text: str, name: str = "custom") -> PipelineOrder:
    """Read an order that torch wrote with ``format="compute_only"`` or ``"compute_comms"``, or that a person wrote.

    An empty row is a rank that does nothing; an empty cell is idle time. In an overlapped pair
    ``(0F3;3B1)OVERLAP_F_B`` the first action runs first, as in torch. Cells that communicate, shard or reduce gradients
    are left out: torch inserts them again.

    Raises:
        ScheduleError: SK331 for a cell that is no action, named by row and column, and for an order that deadlocks.
    """
    rows = csv.reader(io.StringIO(text, newline=""))
    try:
        return PipelineOrder(name, tuple(tuple(_row(number, cells)) for number, cells in enumerate(rows, 1)))
    except csv.Error as error:
        raise ScheduleError("SK331", f"{name} is no CSV: row {rows.line_num}: {error}", _REMEDY) from error


def save_order(order: PipelineOrder, path: PathLike) -> None:
    """Write an order to a file: see `order_to_csv`.

    Raises:
        FileError: SK504 if the file cannot be written.
    """
    save_text(path, order_to_csv(order))


def load_order(path: PathLike) -> PipelineOrder:
    """Read an order from a file, and name it after the file: see `order_from_csv`.

    Raises:
        FileError: SK504 if the file cannot be read.
        ScheduleError: SK331 if it holds no order.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}"
        raise FileError("SK504", reason, "Name a CSV file with a row of actions for each rank.") from error
    return order_from_csv(text, Path(path).name)


def _row(number: int, cells: list[str]) -> Iterator[Action]:
    for column, cell in enumerate(cells, 1):
        word = cell.strip()
        pair = _PAIR.fullmatch(word)
        for one in pair[1].split(";") if pair else [word] if word else []:
            if ACTION.fullmatch(one.strip()):
                yield action_of(one.strip())
            elif pair or not OTHER_CELL.fullmatch(one):
                raise ScheduleError("SK331", f"row {number}, column {column}: {cell!r:.80} is no action", _REMEDY)
