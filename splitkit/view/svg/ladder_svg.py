"""Draws the ladder as a still picture.

Forward runs down the left and backward up the right. Equal layers are folded into one box, ribbons are saved values,
and dashed lines are the borders of stages, with the bytes that cross them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from splitkit.units import duration, measure, size
from splitkit.view.data.joint_ladder import HalvesView
from splitkit.view.data.ladder import LadderView
from splitkit.view.data.staged_ladder import StagedView
from splitkit.view.svg.drawing import BAD, INK, MUTED, RIBBON, Drawing, colour, ink_on, mixed, shortened, stacked, width
from splitkit.view.svg.timeline import TimelineDrawing

ROW, GAP, BOX, RIBBONS, LEFT, TOP = 24, 9, 214, 176, 150, 46  # pixels
_MOST = 80
"""The most boxes in a column, where stages allow; neighbours are drawn as one box beyond. A box is 33 pixels high."""
_LINES = 240
"""The most lines between boxes, those with the most bytes: more cannot be told apart."""


@dataclass(frozen=True)
class Item:
    """A box: the rows ``start`` to ``end - 1``, all of one stage."""

    start: int
    end: int
    stage: int
    y: float


class Column(NamedTuple):
    """A column of boxes.

    Attributes:
        times: the name of its seconds in the data.
        sign: what stands before the name of each box.
        x: the left edge of its boxes.
        heading: what stands above it.
    """

    times: str
    sign: str
    x: float
    heading: str


@dataclass(frozen=True)
class LadderDrawing:
    """A ladder that is drawn as SVG.

    Attributes:
        data: what `splitkit.view.data.ladder.LadderView.still` returns.
        saved: (start, end) -> bytes that the rows ``start`` to ``end - 1`` save for backward; by default what the data
            say of each row.
    """

    data: Mapping[str, Any]
    saved: Callable[[int, int], int] | None = None

    @property
    def borders(self) -> list[int]:
        """The first row of each stage, and the number of rows."""
        found: list[int] = self.data["borders"]
        return found

    @cached_property
    def items(self) -> list[Item]:
        """The boxes: one per run of equal rows of a stage; where these are still too many, neighbours are merged."""
        rows = self.data["rows"]
        runs = [
            (stage, own[0], own[-1] + 1)
            for stage, (start, end) in enumerate(pairwise(self.borders))
            for own in (list(run) for _, run in groupby(range(start, end), key=lambda row: rows[row]["kind"]))
        ]
        several = -(-len(runs) // _MOST)  # how many neighbours become one box
        found: list[Item] = []
        for stage, group in groupby(runs, key=lambda run: run[0]):
            own = list(group)
            for at in range(0, len(own), several):
                some = own[at : at + several]
                found.append(Item(some[0][1], some[-1][2], stage, TOP + len(found) * (ROW + GAP)))
        return found

    @cached_property
    def _item_of(self) -> list[int]:
        return [number for number, item in enumerate(self.items) for _ in range(item.start, item.end)]

    @property
    def _trains(self) -> bool:
        return bool(self.data["trains"])

    @property
    def _columns(self) -> list[Column]:
        """The columns of boxes, from the left."""
        late = Column("backward", "∇ ", LEFT + BOX + RIBBONS, "backward ↑")
        return [Column("forward", "", LEFT, "forward ↓"), *([late] if self._trains else [])]

    @property
    def _between(self) -> list[tuple[str, str]]:
        """The name in the data, and the heading, of the values between each two columns."""
        return [("saved", "saved for backward (bytes)")] if self._trains else []

    @property
    def _right(self) -> float:
        """The right edge of the boxes."""
        return self._columns[-1].x + BOX

    def to_svg(self) -> str:
        """Return the picture."""
        draw = Drawing(self._right + 20 + max([width(text, 10, True) for text in self._border_texts], default=0) + 14)
        bottom = self.items[-1].y + ROW + GAP
        title = f"{self.data['title']}{' · ' if self.data['title'] else ''}{self._heading}"
        draw.text(8, 16, title, bold=True, size=12, room=draw.width - 16)
        self._bands(draw)
        self._headings(draw)
        self._draw_borders(draw)
        for (what, _), column in zip(self._between, self._columns, strict=False):
            self._ribbons(draw, what, column.x + BOX)
        self._arrows(draw)
        for item in self.items:
            self._box(draw, item)
        if entries := self._legend():
            draw.legend(8, bottom + 12, entries, draw.width - 16)
            bottom += 20
        columns = "forward, backward, saved values" if self._trains else "forward"
        return draw.to_svg(bottom + 4, f"{title}: {columns} and borders")

    @property
    def _heading(self) -> str:
        """What the title says of the picture."""
        stages = len(self.borders) - 1
        return f"{stages} stage{'s' if stages > 1 else ''}"

    def _legend(self) -> list[tuple[str, str]]:
        """The colours and what they mean, where the picture does not say so itself."""
        found = [(RIBBON, "line: read by the box, ribbon: saved for backward, as wide as its bytes")]
        if any(self._crosses(a, b) for a, b, _ in self._merged("saved")):
            found.append((INK, "made in one stage, saved in another"))
        if any(self._is_rerun(item.stage) for item in self.items):
            found.append((colour(0), "hatched: runs again in backward"))
        return found if self._trains else []

    def _is_rerun(self, stage: int) -> bool:
        """Whether backward runs a stage again: a stage without a backward never."""
        again = self.data.get("rerun")
        return bool(again and again[stage] and self.data["stages"]["backward"][stage])

    def _seconds(self, item: Item, column: str) -> float:
        """The seconds of an item in forward or backward, with the second forward."""
        columns = ("forward", "backward") if column == "backward" and self._is_rerun(item.stage) else (column,)
        return float(sum(sum(self.data["times"][c][item.start : item.end]) for c in columns))

    def _fill(self, item: Item, late: bool) -> str:
        """The colour of a box, in backward if ``late``."""
        return colour(item.stage)

    def _is_empty(self, item: Item, column: str) -> bool:
        """Whether nothing runs there; such a box is pale."""
        return False

    def _hatched(self, item: Item) -> float:
        """The pixels of a backward box that stand for the time of what forward has computed before."""
        span = slice(item.start, item.end)
        if "again" not in self.data["times"]:  # the whole forward runs again, or nothing does
            share = self._seconds(item, "forward") / (self._seconds(item, "backward") or 1)
            return BOX * share if self._is_rerun(item.stage) else 0.0
        if not any(self.data["counts"]["again"][span]):
            return 0.0
        again, whole = (sum(self.data["times"][column][span]) for column in ("again", "backward"))
        return max(BOX * min(1.0, again / whole if whole else 0.0), 4)

    def _time(self, seconds: float) -> str:
        return duration(seconds, self.data["unit"])

    def _bands(self, draw: Drawing) -> None:
        for stage, (start, end) in enumerate(pairwise(self.borders)):
            top, last = self.items[self._item_of[start]].y - GAP / 2, self.items[self._item_of[end - 1]]
            high, fill = last.y + ROW + GAP / 2 - top, colour(stage)
            draw.rect(0, top, self._right + 14, high, mixed(fill, 0.12))
            draw.rect(0, top, 5, high, fill)
            lines = self._about(stage)
            for number, (text, ink) in enumerate(lines[: max(1, int((high - 6) / 14))]):
                tooltip = "\n".join(line for line, _ in lines)
                draw.text(
                    12,
                    top + 15 + 14 * number,
                    text,
                    ink,
                    bold=not number,
                    room=LEFT - 34,
                    title=tooltip,
                    size=10 if number else 12,
                )

    def _headings(self, draw: Drawing) -> None:
        what = measure(self.data["unit"])
        columns = [(column.x + BOX / 2, f"{column.heading} ({what})") for column in self._columns]
        gaps = [column.x + BOX + RIBBONS / 2 for column in self._columns]
        columns += [(middle, text) for middle, (_, text) in zip(gaps, self._between, strict=False)]
        for middle, text in columns:
            draw.text(middle, TOP - 12, text, MUTED, "middle", bold=True, size=10)

    def _about(self, stage: int) -> list[tuple[str, str]]:
        """Return the lines beside a stage and their colours, the most important first: a low stage has room for few."""
        of = {name: column[stage] for name, column in self.data["stages"].items()}
        device, limit = self.data["devices"][stage], self.data["memory"]
        peak = of["fixed"] + of["saved"] + of["temporary"]
        held = [f"{size(peak)} with 1", "microbatch"] if self._trains else [f"peak {size(peak)}"]
        return [
            (f"stage {self.data['parts'][stage]}{f' {device}' if device else ''}", INK),
            (self._time(of["forward"] + of["backward"] + of.get("weight", 0.0)), MUTED),
            *([("recomputed", MUTED)] if self._is_rerun(stage) and self._trains else []),
            *((line, BAD if limit and peak > limit else MUTED) for line in held),
        ]

    def _name(self, item: Item) -> str:
        rows = self.data["rows"][item.start : item.end]
        if len(rows) == 1:
            return str(rows[0]["name"])
        last = str(rows[-1]["name"])
        same = len({row["kind"] for row in rows}) == 1
        return f"{rows[0]['name']} … {last.rpartition('.')[2] if same else last} ×{len(rows)}"

    def _box(self, draw: Drawing, item: Item) -> None:
        name = self._name(item)
        saved = f", saved {size(self._saved_in(item))}" if self._trains else ""
        ops = sum(row["ops"] for row in self.data["rows"][item.start : item.end])
        for column, sign, x, _ in self._columns:
            fill = self._fill(item, column == "backward")
            time = self._time(self._seconds(item, column))
            if self._is_empty(item, column):
                fill, time = mixed(fill, 0.3), ""
            draw.rect(x, item.y, BOX, ROW, fill, f"{name}\n{ops} ops, {column} {time}{saved}", round_=4)
            if column == "backward" and (hatched := self._hatched(item)):
                draw.path(stripes(x, item.y, hatched, ROW), "#ffffff", 1.5, opacity=0.4)
            draw.text(x + BOX - 8, item.y + 16, time, ink_on(fill), "end")
            shown = shortened(name, BOX - 24 - width(time) - width(sign), end=True)
            draw.text(x + 8, item.y + 16, sign + shown, ink_on(fill), title="" if shown == name else name)

    def _saved_in(self, item: Item) -> int:
        if self.saved is not None:
            return self.saved(item.start, item.end)
        return sum(int(nbytes) for row, _, nbytes in self.data["saved"] if item.start <= row < item.end)

    def _merged(self, what: str) -> list[tuple[int, int, int]]:
        """Sum edges or saved values of rows by box: (box, box, bytes), the largest first."""
        found: dict[tuple[int, int], int] = {}
        for a, b, nbytes in self.data[what]:
            key = self._item_of[a], self._item_of[b]
            found[key] = found.get(key, 0) + nbytes
        return sorted(((a, b, nbytes) for (a, b), nbytes in found.items()), key=lambda one: (-one[2], one))[:_LINES]

    def _crosses(self, a: int, b: int) -> bool:
        return self.items[a].stage != self.items[b].stage

    def _ribbons(self, draw: Drawing, what: str, left: float) -> None:
        """Draw what lies between a column that ends at ``left`` and the next one."""
        merged = self._merged(what)
        most, right = max((nbytes for *_, nbytes in merged), default=0) or 1, left + RIBBONS
        for a, b, nbytes in reversed(merged):  # the small ones first, so that large ribbons lie above
            y, end = self.items[a].y + ROW / 2, self.items[b].y + ROW / 2
            crosses = self._crosses(a, b)
            d = f"M{left},{y} C{left + 66},{y} {right - 66},{end} {right},{end}"
            tooltip = f"{self._name(self.items[a])} → ∇ {self._name(self.items[b])}: {size(nbytes)}"
            ink, opacity = (INK, 0.75) if crosses else (RIBBON, 0.55)
            draw.path(d, ink, max(1, 14 * nbytes / most), tooltip, opacity=opacity)
        for a, b, nbytes in merged:
            if nbytes >= most / (50 if self._crosses(a, b) else 16):
                y = (self.items[a].y + self.items[b].y) / 2 + ROW / 2 + 4
                draw.text((left + right) / 2, y, size(nbytes), INK, "middle", bold=True, size=10, spare=True, halo=True)

    def _arrows(self, draw: Drawing) -> None:
        merged = [one for one in self._merged("edges") if one[0] != one[1]]
        most = max((nbytes for *_, nbytes in merged), default=0) or 1
        columns: list[tuple[float, float, int]] = [(LEFT, LEFT + BOX / 2, -1)]
        if self._trains:
            late = self._columns[1].x
            columns.append((late + BOX, late + BOX / 2, 1))
        farthest = max((b - a for a, b, _ in merged), default=1)
        for a, b, nbytes in merged:
            wide, far = 1 + 2 * (nbytes / most) ** 0.5, b - a
            tooltip = f"{self._name(self.items[a])} → {self._name(self.items[b])}: {size(nbytes)}"
            top, bottom = self.items[a].y + ROW / 2, self.items[b].y + ROW / 2
            for edge, middle, side in columns:
                if far == 1:
                    draw.path(f"M{middle},{top + ROW / 2} L{middle},{bottom - ROW / 2}", RIBBON, wide, tooltip)
                else:
                    out = edge + side * (4 + 18 * far / farthest)
                    draw.path(
                        f"M{edge},{top} C{out},{top} {out},{bottom} {edge},{bottom}", RIBBON, wide, tooltip, opacity=0.6
                    )

    @property
    def _border_texts(self) -> list[str]:
        up = self.data["up"]
        return [
            f"▼ {size(self.data['down'][row])}" + (f"  ▲ {size(up[row])}" if self._trains else "")
            for row in self.borders[1:-1]
        ]

    def _draw_borders(self, draw: Drawing) -> None:
        for row, text in zip(self.borders[1:-1], self._border_texts, strict=True):
            y = self.items[self._item_of[row]].y - GAP / 2
            draw.line((0, y), (self._right + 14, y), INK, 1.3, dashes="6 4")
            draw.text(self._right + 20, y + 4, text, INK, size=10, bold=True)


def stripes(x: float, y: float, wide: float, high: float) -> str:
    """Return a path of slanted lines inside a rectangle."""
    lines = []
    at = x - high
    while at < x + wide:
        start, end = max(at, x), min(at + high, x + wide)
        lines.append(f"M{start:g},{y + high - (start - at):g} L{end:g},{y + high - (end - at):g}")
        at += 7
    return " ".join(lines)


def ladder_svg(ladder: LadderView) -> str:
    """Return the still picture of a ladder."""
    return LadderDrawing(ladder.still(), ladder.saved_bytes).to_svg()


# Draws forward and backward of a training step as a still picture: the ladder, with the border between its halves.


_FORWARD, _BACKWARD = 0, 1  # numbers of colours
_EDGE = 12  # pixels by which a band is wider than its boxes on each side


@dataclass(frozen=True)
class HalvesDrawing(LadderDrawing):
    """A ladder of forward and backward; ``data`` is what `splitkit.view.data.joint_ladder.HalvesView.still` returns."""

    @property
    def _heading(self) -> str:
        again = f", {len(self.data['again'])} ops computed again" if self.data["again"] else ""
        return f"{size(self.data['bytes'])} saved for backward{again}"

    @property
    def _border_texts(self) -> list[str]:
        return []  # its only border lies between the halves, in the middle

    def _fill(self, item: Item, late: bool) -> str:
        return colour(_BACKWARD if late else _FORWARD)

    def _bands(self, draw: Drawing) -> None:
        high = self.items[-1].y + ROW + GAP - TOP + GAP
        for x, number in ((LEFT, _FORWARD), (self._right - BOX, _BACKWARD)):
            draw.rect(x - _EDGE, TOP - GAP, BOX + 2 * _EDGE, high, mixed(colour(number), 0.12))
        middle = LEFT + BOX + RIBBONS / 2
        draw.line((middle, TOP - GAP), (middle, TOP - GAP + high), INK, 1.3, dashes="6 4")

    def _legend(self) -> list[tuple[str, str]]:
        return [(colour(_BACKWARD), "hatched: computed again in backward")] if self.data["again"] else []


def halves_svg(halves: HalvesView) -> str:
    """Return the still picture of the chosen division of a step."""
    return HalvesDrawing(halves.still()).to_svg()


# Draws a training step in stages as a still picture: the ladder of its stages, and its simulated step below.


@dataclass(frozen=True)
class StagedDrawing(LadderDrawing):
    """A ladder of the stages of a training step; ``data`` is what `StagedView.still` returns."""

    @property
    def _divided(self) -> bool:
        return bool(self.data["divided"])

    @property
    def _columns(self) -> list[Column]:
        step = BOX + RIBBONS
        found = [Column("forward", "", LEFT, "forward ↓")]
        if not self._divided:
            return [*found, Column("backward", "∇ ", LEFT + step, "backward ↑")]
        early = Column("backward", "∇x ", LEFT + step, "gradients of inputs ↑")
        return [*found, early, Column("weight", "∇w ", LEFT + 2 * step, "gradients of weights")]

    @property
    def _between(self) -> list[tuple[str, str]]:
        waits = [("waits", "waits for the weight part (bytes)")] if self._divided else []
        return [("saved", "saved for backward (bytes)"), *waits]

    @property
    def _heading(self) -> str:
        again = sum(self.data["counts"]["again"])
        host = self.data["host"]
        return (
            f"{super()._heading}, {size(host + sum(b for *_, b in self.data['saved']))} saved"
            f"{f', {size(host)} of it on the host' if host else ''}{f', {again} ops computed again' if again else ''}"
        )

    def _about(self, stage: int) -> list[tuple[str, str]]:
        """Return the lines beside a stage: what its parts take, what it saves, and what waits."""
        again, waiting = (self.data["stages"][name][stage] for name in ("again", "waiting"))
        more = [f"{again:.0f} ops again"] if again else []
        more += [f"{size(waiting)} waits"] if waiting else []
        return [*super()._about(stage), *((line, MUTED) for line in more)]

    def _is_empty(self, item: Item, column: str) -> bool:
        return not any(self.data["counts"][column][item.start : item.end])

    def _legend(self) -> list[tuple[str, str]]:
        found = [(RIBBON, "line: read by the box, ribbon: held until its end, as wide as its bytes")]
        if any(self.data["counts"]["again"]):
            found.append((colour(0), "hatched: computed again in backward"))
        found.append((INK, "▼ activations, ▲ gradients that cross"))
        return found


def staged_svg(view: StagedView) -> str:
    """Return the still picture of a training step in stages."""
    ladder = StagedDrawing(view.still()).to_svg()
    return ladder if view.run is None else stacked([ladder, TimelineDrawing(view.run, view.memory).to_svg()])
