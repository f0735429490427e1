"""The web page that shows a live or finished run: its routes, and the feed and source they need."""

from monitoring.http.page.feed import Feed
from monitoring.http.page.routes import Source, page_routes

__all__ = ["Feed", "Source", "page_routes"]
