"""Tells what a move does and what it costs, in a sentence."""

from __future__ import annotations

from splitkit.studies.explanation.stage_moves import StageMove
from splitkit.units import duration, size
from splitkit.view.data.report import part_title

_NAMED = 3


def move_text(move: StageMove, unit: str) -> str:
    """Return ``move add_7 (h.3) from stage 0 to stage 1: slowest stage +2.1 us (+0.4 %), 3 MiB more cross``."""
    way = f"from stage {part_title(move.source)} to {part_title(move.target)}"
    return f"move {moved_nodes(move)} {way}: {price_text(move, unit)}"


def moved_nodes(move: StageMove) -> str:
    """Return the nodes that move: by name if they are few, else by module."""
    if len(move.nodes) <= _NAMED:
        return f"{', '.join(move.nodes)} ({move.modules})"
    return f"{len(move.nodes)} nodes ({move.modules})"


def price_text(move: StageMove, unit: str) -> str:
    """Return what a move adds to the slowest stage, the step, the traffic and the fullest device."""
    before, after = move.before, move.after
    words = [_time("slowest stage", after.value, before.value, unit)]
    if after.step is not None and before.step is not None:
        words.append(_time("step", after.step, before.step, unit))
    crossing = after.traffic - before.traffic
    words.append(
        f"{size(abs(crossing))} {'more' if crossing > 0 else 'fewer'} cross" if crossing else "the same bytes cross"
    )
    if len(after.peaks) == len(before.peaks) and before.peaks:
        peak = max(after.peaks) - max(before.peaks)
        words.append(f"the fullest device holds {size(abs(peak))} {'more' if peak > 0 else 'less'}" if peak else "")
    if move.excess:
        words.append(f"and a device lacks {size(move.excess)}, so it does not fit")
    return ", ".join(filter(None, words)) + "."


def _time(what: str, now: float, before: float, unit: str) -> str:
    if now == before:
        return f"{what} unchanged"
    share = f" ({(now / before - 1) * 100:+.2f} %)" if before else ""
    sign = "+" if now > before else "-"
    return f"{what} {sign}{duration(abs(now - before), unit)}{share}"
