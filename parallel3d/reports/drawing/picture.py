"""A picture of lanes, time to scale: where every box, line and word is. How it becomes a file is told elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from parallel3d.pipeline.schedules.actions import Action, Kind
from parallel3d.reports.drawing.lanes import Lane, Span, end_of, width_of_a_unit
from parallel3d.reports.drawing.palette import MEANINGS, shade
from parallel3d.reports.drawing.words import number, round_steps

MONO_WIDTH = 0.61
"""A letter's width in the fonts for names, as a part of their size."""
_SANS_WIDTH = 0.56
_NAME_SIZES = (12, 11, 10, 9)
"""All names have the largest of these that fits all boxes. In boxes that are too small for the last, there is none."""
_AROUND_NAME = 10
_NARROWEST, _WIDEST = 560, 4000
_MARGIN, _LANE, _PITCH, _PANEL_TITLE = 24, 28, 34, 24
_HEADLINES = _MARGIN + 54
"""Title and subtitle end here."""
_BETWEEN_TICKS = 44


class Box(NamedTuple):
    """An action."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    name: str
    size: int
    """Of the name; 0 where it does not fit."""
    title: str
    """Shown when the pointer rests on it."""
    is_critical: bool


class Rect(NamedTuple):
    """A surface; `fill` is a colour, or the name of one in the theme."""

    x: float
    y: float
    width: float
    height: float
    fill: str


class Line(NamedTuple):
    """A thin line in a colour of the theme."""

    x1: float
    y1: float
    x2: float
    y2: float
    colour: str


class Text(NamedTuple):
    """Words; `y` is where they stand on."""

    x: float
    y: float
    text: str
    size: int
    colour: str = "ink"
    anchor: Literal["start", "middle", "end"] = "start"
    is_bold: bool = False


@dataclass(frozen=True, slots=True)
class Picture:
    """In pixels; what comes first is beneath."""

    title: str
    width: float
    height: float
    rects: tuple[Rect, ...]
    lines: tuple[Line, ...]
    boxes: tuple[Box, ...]
    path: tuple[Line, ...]
    """From rank to rank along the critical path."""
    texts: tuple[Text, ...]


def draw(
    planned: Sequence[Lane],
    measured: Sequence[Lane] | None = None,
    *,
    title: str = "",
    subtitle: str = "",
    critical: Sequence[Action] = (),
) -> Picture:
    """The planned lanes, and the measured ones beneath them on the same axis: both are in the same unit of time.

    `critical` are actions of the planned lanes, each waiting for the one before it.
    """
    return _Drawing(planned, measured, title, subtitle, critical).picture()


class _Drawing:
    def __init__(
        self,
        planned: Sequence[Lane],
        measured: Sequence[Lane] | None,
        title: str,
        subtitle: str,
        critical: Sequence[Action],
    ) -> None:
        self.panels = [planned] if measured is None else [planned, measured]
        self.title, self.subtitle, self.critical = title, subtitle, critical
        self.lanes = [lane for panel in self.panels for lane in panel]
        self.stages = max((lane.num_stages for lane in self.lanes), default=1)
        self.end = end_of(self.lanes)
        wanted = self.end * self._unit(_NAME_SIZES[0], _AROUND_NAME)
        labels = max((len(lane.label) for lane in self.lanes), default=0)
        self.left = _MARGIN + labels * 13 * _SANS_WIDTH + 14
        self.plot = min(max(wanted, _NARROWEST), _WIDEST)
        self.size = self._size_of_names()
        self.legend = list(_legend(self.panels, self.stages))
        self.width = max(
            self.left + self.plot + _MARGIN,
            2 * _MARGIN + len(title) * 20 * _SANS_WIDTH * 1.05,
            2 * _MARGIN + len(subtitle) * 13 * _SANS_WIDTH,
        )
        self.legend_rows = self._wrap_legend()
        self.top = _HEADLINES + 26 * len(self.legend_rows) + 8
        self.bottom = self.top + sum(self._panel_height(panel) for panel in self.panels)

    def picture(self) -> Picture:
        rects: list[Rect] = [Rect(0, 0, self.width, self.bottom + 54, "paper")]
        boxes: list[Box] = []
        texts = [
            Text(_MARGIN, _MARGIN + 16, self.title, 20, is_bold=True),
            Text(_MARGIN, _MARGIN + 38, self.subtitle, 13, "muted"),
        ]
        for row, entries in enumerate(self.legend_rows):
            self._place_legend(entries, _HEADLINES + 26 * row, rects, texts)
        ys = self._place_lanes(rects, boxes, texts)
        lines = list(self._axis(texts))
        return Picture(
            self.title,
            self.width,
            self.bottom + 54,
            tuple(rects),
            tuple(lines),
            tuple(boxes),
            tuple(self._critical_path(ys)),
            tuple(texts),
        )

    def _size_of_names(self) -> int:
        scale = self.plot / self.end if self.end else 0.0
        return next((size for size in _NAME_SIZES if self._unit(size, 4) <= scale * 1.001), _NAME_SIZES[-1])

    def _unit(self, size: int, around: float) -> float:
        """How wide a unit of time has to be for names of that size."""
        return width_of_a_unit(self.lanes, size * MONO_WIDTH, around)

    def x(self, time: float) -> float:
        return self.left + (self.plot * time / self.end if self.end else 0.0)

    def _panel_height(self, panel: Sequence[Lane]) -> float:
        return len(panel) * _PITCH + (_PANEL_TITLE if len(self.panels) > 1 else 0) + 4

    def _place_lanes(self, rects: list[Rect], boxes: list[Box], texts: list[Text]) -> list[float]:
        """Adds them; where the planned ones are."""
        ys: list[float] = []
        y = self.top
        critical = set(self.critical)
        for index, panel in enumerate(self.panels):
            if len(self.panels) > 1:
                texts.append(Text(_MARGIN, y + 14, ("planned", "measured")[index], 13, is_bold=True))
                y += _PANEL_TITLE
            for lane in panel:
                rects.append(Rect(self.left, y, self.plot, _LANE, "row"))
                texts.append(Text(self.left - 12, y + _LANE / 2 + 4.5, lane.label, 13, "ink", "end"))
                boxes += (self._box(lane, span, y, not index and span.action in critical) for span in lane.visible())
                ys.append(y)
                y += _PITCH
            y += 4
        return ys

    def _box(self, lane: Lane, span: Span, y: float, is_critical: bool) -> Box:
        left, right = self.x(span.start), self.x(span.end)
        gap = min(1.5, (right - left) / 8)
        name, kind = str(span.action), span.action.kind
        fill = shade(kind, lane.place_of_stage(span.action.stage), self.stages)
        size = self.size if len(name) * self.size * MONO_WIDTH <= right - left - gap - 2 else 0
        times = f"{number(span.start)} to {number(span.end)}"
        title = f"{name}: {MEANINGS.get(kind, kind)}, stage {span.action.stage}, {lane.label}, {times}"
        return Box(left, y, right - left - gap, _LANE, fill, name, size, title, is_critical)

    def _axis(self, texts: list[Text]) -> Iterator[Line]:
        y = self.bottom
        for time in round_steps(self.end, self.plot / _BETWEEN_TICKS):
            yield Line(self.x(time), self.top, self.x(time), y + 5, "grid")
            texts.append(Text(self.x(time), y + 19, number(time), 11, "muted", "middle"))
        yield Line(self.left, y, self.left + self.plot, y, "muted")
        texts.append(Text(self.left + self.plot / 2, y + 38, "time units", 12, "muted", "middle"))

    def _critical_path(self, ys: Sequence[float]) -> Iterator[Line]:
        spans = {
            span.action: (self.x(span.start), self.x(span.end), y + _LANE / 2)
            for lane, y in zip(self.panels[0], ys, strict=False)
            for span in lane.visible()
        }
        places = [spans[action] for action in self.critical if action in spans]
        for (_, end, y1), (start, _, y2) in pairwise(places):
            if y1 != y2:
                yield Line(end, y1, start, y2, "critical")

    def _wrap_legend(self) -> list[list[tuple[tuple[str, ...], str, float]]]:
        rows: list[list[tuple[tuple[str, ...], str, float]]] = [[]]
        x = float(_MARGIN)
        for colours, text in self.legend:
            width = len(colours) * 18 + 8 + _width(text) * 12 + 18
            if rows[-1] and x + width > self.width - _MARGIN + 18:
                rows.append([])
                x = float(_MARGIN)
            rows[-1].append((colours, text, x))
            x += width
        return rows

    def _place_legend(
        self, entries: list[tuple[tuple[str, ...], str, float]], y: float, rects: list[Rect], texts: list[Text]
    ) -> None:
        for colours, text, x in entries:
            rects += (Rect(x + 18 * index, y, 15, 15, colour) for index, colour in enumerate(colours))
            texts.append(Text(x + 18 * len(colours) + 5, y + 12, text, 12, "muted"))


def _width(text: str) -> float:
    """About; in sizes of the font, which is not known."""
    return sum(0.36 if letter in "fijlrt,.:-' " else 0.62 for letter in text)


def _legend(panels: Sequence[Sequence[Lane]], stages: int) -> Iterator[tuple[tuple[str, ...], str]]:
    """The kinds that there are, with a shade for each of a rank's stages."""
    there = {span.action.kind for panel in panels for lane in panel for span in lane.visible()}
    for kind in (kind for kind in Kind if kind in there):
        text = f"{kind} {MEANINGS[kind]}" if kind in MEANINGS else str(kind)
        yield tuple(shade(kind, place, stages) for place in range(min(stages, 8))), text
    if stages > 1:
        yield (), "shades: stages of a rank, first to last"
    yield ("row",), "idle"
