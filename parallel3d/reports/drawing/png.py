"""A picture as PNG, light. matplotlib is loaded when it is drawn."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from parallel3d.reports.drawing.palette import LETTERS, THEMES
from parallel3d.reports.drawing.picture import Picture, Rect

_PIXELS_AN_INCH, _POINTS_AN_INCH = 100, 72
_SHARPNESS = 2
_LARGEST = 60_000
"""matplotlib draws fewer than 2^16 pixels each way."""


def can_draw_png() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def write_png(picture: Picture, path: Path) -> None:
    """Two pixels for each of the picture, so that it is sharp."""
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch, Rectangle

    theme = THEMES["light"]
    figure = Figure(figsize=(picture.width / _PIXELS_AN_INCH, picture.height / _PIXELS_AN_INCH))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, picture.width)
    axes.set_ylim(picture.height, 0)
    axes.axis("off")

    def fill(rect: Rect, colour: str, above: int) -> None:
        style = f"round,pad=0,rounding_size={min(3.0, rect.width / 4)}"
        place, width, height = (rect.x, rect.y), rect.width, rect.height
        axes.add_patch(
            FancyBboxPatch(place, width, height, boxstyle=style, linewidth=0, facecolor=colour, zorder=above)
        )

    def points(pixels: float) -> float:
        return pixels * _POINTS_AN_INCH / _PIXELS_AN_INCH

    axes.add_patch(Rectangle((0, 0), picture.width, picture.height, linewidth=0, facecolor=theme["paper"], zorder=0))
    for rect in picture.rects[1:]:
        fill(rect, theme.get(rect.fill, rect.fill), 1)
    for line in picture.lines:
        axes.plot([line.x1, line.x2], [line.y1, line.y2], color=theme[line.colour], linewidth=points(1), zorder=2)
    for box in picture.boxes:
        fill(Rect(box.x, box.y, box.width, box.height, box.fill), box.fill, 3)
        if box.size:
            x, y = box.x + box.width / 2, box.y + box.height / 2 + box.size * 0.35
            axes.text(
                x, y, box.name, fontsize=points(box.size), family="monospace", color=LETTERS, ha="center", zorder=4
            )
    ends = {"start": "left", "middle": "center", "end": "right"}
    for text in picture.texts:
        axes.text(
            text.x,
            text.y,
            text.text.replace("$", r"\$"),  # not a formula
            fontsize=points(text.size),
            color=theme[text.colour],
            ha=ends[text.anchor],
            weight="bold" if text.is_bold else "normal",
        )
    sharpness = min(_SHARPNESS, _LARGEST / picture.width, _LARGEST / picture.height)
    figure.savefig(path, format="png", dpi=_PIXELS_AN_INCH * sharpness)
