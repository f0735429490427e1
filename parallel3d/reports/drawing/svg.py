"""A picture as SVG: by hand, small, and dark where the reader's screen is."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape, quoteattr

from parallel3d.reports.drawing.palette import LETTERS, THEMES
from parallel3d.reports.drawing.picture import Box, Line, Picture, Rect, Text

SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def to_svg(picture: Picture) -> str:
    """A whole file. Every box is a group `box`, those of the critical path also `critical`."""
    width, height = _short(picture.width), _short(picture.height)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="p3d" role="img" aria-label={quoteattr(picture.title)} '
        f'width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
    )
    return "\n".join((head, f"<style>{_style()}</style>", *_elements(picture), "</svg>")) + "\n"


def _elements(picture: Picture) -> Iterator[str]:
    yield from map(_rect, picture.rects)
    yield from map(_line, picture.lines)
    yield from map(_box, picture.boxes)
    if picture.path:
        yield '<g class="path">'
        yield from map(_line, picture.path)
        yield "</g>"
    yield from map(_text, picture.texts)


def _style() -> str:
    def theme(name: str) -> str:
        colours = THEMES[name]
        rules = (
            f".p3d rect.{role},.p3d text.{role}{{fill:{colour}}}.p3d line.{role}{{stroke:{colour}}}"
            for role, colour in colours.items()
        )
        return f"{''.join(rules)}.p3d .critical rect{{stroke:{colours['critical']};stroke-width:2}}"

    return (
        f".p3d{{font-family:{SANS}}}.p3d .box text{{font-family:{MONO};fill:{LETTERS};text-anchor:middle}}"
        f".p3d .path line{{stroke-width:1.5;stroke-dasharray:3 2}}"
        f"{theme('light')}@media (prefers-color-scheme:dark){{{theme('dark')}}}"
    )


def _box(box: Box) -> str:
    name = ""
    if box.size:
        x, y = box.x + box.width / 2, box.y + box.height / 2 + box.size * 0.35
        name = f'<text x="{_short(x)}" y="{_short(y)}" font-size="{box.size}">{escape(box.name)}</text>'
    kind = "box critical" if box.is_critical else "box"
    area = _area(box.x, box.y, box.width, box.height)
    return f'<g class="{kind}"><title>{escape(box.title)}</title><rect {area} rx="3" fill="{box.fill}"/>{name}</g>'


def _rect(rect: Rect) -> str:
    fill = f'fill="{rect.fill}"' if rect.fill.startswith("#") else f'class="{rect.fill}"'
    rounded = "" if rect.fill == "paper" else ' rx="3"'
    return f"<rect {_area(rect.x, rect.y, rect.width, rect.height)}{rounded} {fill}/>"


def _line(line: Line) -> str:
    ends = f'x1="{_short(line.x1)}" y1="{_short(line.y1)}" x2="{_short(line.x2)}" y2="{_short(line.y2)}"'
    return f'<line class="{line.colour}" {ends}/>'


def _text(text: Text) -> str:
    anchor = "" if text.anchor == "start" else f' text-anchor="{text.anchor}"'
    bold = ' font-weight="600"' if text.is_bold else ""
    place = f'x="{_short(text.x)}" y="{_short(text.y)}" font-size="{text.size}"'
    return f'<text class="{text.colour}" {place}{anchor}{bold}>{escape(text.text)}</text>'


def _area(x: float, y: float, width: float, height: float) -> str:
    return f'x="{_short(x)}" y="{_short(y)}" width="{_short(width)}" height="{_short(height)}"'


def _short(value: float) -> str:
    """A hundredth of a pixel is enough."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
