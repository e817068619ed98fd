"""A bar that grows with time, for a search of which only the end is known."""

from __future__ import annotations

from rich.progress import BarColumn, Task
from rich.progress_bar import ProgressBar


class TimeBar(BarColumn):
    """The seconds that have passed of a task, of its total."""

    def render(self, task: Task) -> ProgressBar:
        """The bar; full, not longer, where it takes longer."""
        bar = super().render(task)
        bar.completed = min(task.elapsed or 0.0, bar.total or 0.0)
        return bar
