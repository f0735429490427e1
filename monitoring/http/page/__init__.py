"""A page in the browser that shows a run, while it goes on and afterwards: its routes, and what they ask for."""

from monitoring.http.page.feed import Feed
from monitoring.http.page.routes import Source, page_routes

__all__ = ["Feed", "Source", "page_routes"]
