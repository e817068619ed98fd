"""Reads and writes orders as torch's schedule CSV: a row per rank, a cell per action (``_load_csv``, torchtitan).

::

    0F0,0F1,0B0,0B1          rank 0, format="compute_only"
    1F0,1B0,1F1,1B1          rank 1

    0F0,0SEND_F0,0RECV_B0,0B0          rank 0, format="compute_comms": with messages
    1RECV_F0,1F0,1B0,1SEND_B0          rank 1
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path

from splitkit.errors import FileError, ScheduleError
from splitkit.files import PathLike, save_text
from splitkit.pipeline.message_order import MessageOrder, is_message
from splitkit.pipeline.order import ACTION, OTHER_CELL, PipelineOrder, action_of

_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_REMEDY = "Write stage, F, B, I or W, and microbatch: 3F0; or leave the cell empty for idle time."


def order_to_csv(order: PipelineOrder) -> str:
    """Return an order as torch writes it; each row ends with ``\\r\\n``.

    A `MessageOrder` is written as with ``format="compute_comms"``, all others as with ``format="compute_only"``: the
    reader of the file then places the messages, as torch does by default.
    """
    text = io.StringIO()
    csv.writer(text).writerows(order.cells if isinstance(order, MessageOrder) else order.ranks)
    return text.getvalue()


def order_from_csv(text: str, name: str = "custom") -> PipelineOrder:
    """Read an order that torch wrote with ``format="compute_only"`` or ``"compute_comms"``, or that a person wrote.

    An empty row is a rank that does nothing; an empty cell is idle time. In an overlapped pair
    ``(0F3;3B1)OVERLAP_F_B`` the first action runs first, as in torch. If there are sends and receives, the result is a
    `MessageOrder` with all cells as they are; otherwise torch places the messages, and inserts what shards parameters
    or reduces gradients.

    Raises:
        ScheduleError: SK331 for a cell that is not an action, named by row and column, and for an order that deadlocks,
            by its actions or by its messages.
    """
    lines = csv.reader(io.StringIO(text, newline=""))
    try:
        rows = tuple(tuple(_row(number, cells)) for number, cells in enumerate(lines, 1))
    except csv.Error as error:
        raise ScheduleError("SK331", f"{name} is not CSV: row {lines.line_num}: {error}", _REMEDY) from error
    actions = tuple(tuple(action_of(cell) for cell in row if ACTION.fullmatch(cell)) for row in rows)
    if any(is_message(cell) for row in rows for cell in row):
        return MessageOrder(name, actions, rows)
    return PipelineOrder(name, actions)


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


def _row(number: int, cells: list[str]) -> Iterator[str]:
    """Yield the actions of a row; a cell that pairs actions yields each of them."""
    for column, cell in enumerate(cells, 1):
        word = cell.strip()
        pair = _PAIR.fullmatch(word)
        for one in pair[1].split(";") if pair else [word] if word else []:
            if not ACTION.fullmatch(one.strip()) and (pair or not OTHER_CELL.fullmatch(one)):
                raise ScheduleError("SK331", f"row {number}, column {column}: {cell!r:.80} is not an action", _REMEDY)
            yield one.strip()
