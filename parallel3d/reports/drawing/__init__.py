"""Pictures of schedules: a grid for terminals, SVG, PNG and a page. All are drawn from the same lanes. No torch."""

from parallel3d.reports.drawing.lanes import Lane, Span, lanes_of
from parallel3d.reports.drawing.picture import Picture, draw

__all__ = ["Lane", "Picture", "Span", "draw", "lanes_of"]
