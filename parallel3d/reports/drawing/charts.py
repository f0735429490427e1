"""Curves over a run's steps as SVG: a line, or layers one on top of the other. Colours come from the page's style."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from parallel3d.reports.drawing.frame import safe

_WIDTH, _HEIGHT = 640, 220
_LEFT, _BOTTOM, _TOP, _RIGHT = 62, 26, 12, 12
_MOST_POINTS = 1000  # more than the picture has pixels

Points = Sequence[tuple[int, float]]
"""Steps and values."""


class _Plane:
    """Where a step and a value stand in the picture."""

    def __init__(self, first: int, last: int, low: float, high: float) -> None:
        self._first, self._last = first, last
        self.ticks = nice_ticks(low, high)
        self._low, self._high = min(low, self.ticks[0]), max(high, self.ticks[-1])

    def x(self, step: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (step - self._first) / ((self._last - self._first) or 1)

    def y(self, value: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (self._high - value) / ((self._high - self._low) or 1.0)

    def at(self, step: int, value: float) -> str:
        return f"{self.x(step):.1f},{self.y(value):.1f}"

    def grid(self) -> str:
        lines = "".join(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{self.y(tick):.1f}" y2="{self.y(tick):.1f}"/>'
            f'<text x="{_LEFT - 8}" y="{self.y(tick) + 4:.1f}" text-anchor="end">{tick:,.6g}</text>'
            for tick in self.ticks
        )
        ends = ((self._first, "start", f"step {self._first:,}"), (self._last, "end", f"{self._last:,}"))
        steps = "".join(
            f'<text x="{self.x(step):.1f}" y="{_HEIGHT - 6}" text-anchor="{anchor}">{label}</text>'
            for step, anchor, label in ends
        )
        return f'<g class="grid">{lines}{steps}</g>'


def line_chart(title: str, unit: str, points: Points) -> str:
    """Empty where there is nothing to draw a line between."""
    finite = [(step, value) for step, value in points if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    shown, values = _thinned(finite), [value for _, value in finite]
    plane = _Plane(finite[0][0], finite[-1][0], min(values), max(values))
    curve = f'<polyline class="curve" points="{" ".join(plane.at(*point) for point in shown)}"/>'
    return _figure(title, unit, plane.grid() + curve)


def stacked_chart(
    title: str, unit: str, steps: Sequence[int], layers: Mapping[str, tuple[str, Sequence[float]]]
) -> str:
    """`layers`: a colour and a value a step, from the lowest up; those that are always 0 are left out."""
    if len(steps) < 2:
        return ""
    places = [place for place, _ in _thinned([(place, 0.0) for place in range(len(steps))])]
    below = [0.0] * len(places)
    areas = []
    for name, (colour, values) in layers.items():
        above = [low + values[place] for low, place in zip(below, places, strict=True)]
        if above != below:
            areas.append((name, colour, below, above))
        below = above
    plane = _Plane(steps[0], steps[-1], 0.0, max(below))
    drawn = "".join(
        f'<polygon fill="{colour}" points="{_area(plane, [steps[place] for place in places], low, high)}">'
        f"<title>{safe(name)}</title></polygon>"
        for name, colour, low, high in areas
    )
    return _figure(title, unit, drawn + plane.grid())


def _area(plane: _Plane, steps: Sequence[int], low: Sequence[float], high: Sequence[float]) -> str:
    there = [plane.at(step, value) for step, value in zip(steps, high, strict=True)]
    back = [plane.at(step, value) for step, value in zip(steps, low, strict=True)]
    return " ".join(there + back[::-1])


def _thinned(points: Points) -> Points:
    every = -(-len(points) // _MOST_POINTS)
    return [*points[:-1:every], points[-1]]


def _figure(title: str, unit: str, drawn: str) -> str:
    return (
        f'<figure><figcaption>{safe(title)} <span class="unit">{safe(unit)}</span></figcaption>'
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{safe(title)} over steps" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}">{drawn}</svg></figure>'
    )


def nice_ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers between the two, in steps of 1, 2 or 5 times a power of ten; at least one."""
    rough = (high - low) / about
    if not 0 < rough < math.inf:
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((power * factor for factor in (1, 2, 5, 10) if power * factor >= rough), rough)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [number * step for number in range(first, last + 1)] or [low]
