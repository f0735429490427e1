"""What all our HTML pages have in common: a page that needs nothing else, light or dark, its tables, and safe text."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from monitoring.text import printable
from parallel3d.reports.drawing.palette import THEMES
from parallel3d.reports.drawing.svg import SANS


def html_page(title: str, body: str, style: str = "") -> str:
    """Well-formed as XML too. `title` is plain text; `body` and `style` are as they are to be."""
    return f"""<!DOCTYPE html>
<html xmlns="http://www.w3.org/1999/xhtml" lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<meta name="color-scheme" content="light dark"/>
<title>{safe(title)}</title>
<style>{_STYLE}{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def safe(text: str) -> str:
    """Escaped, and without control characters, which XML does not allow and nobody wants to see."""
    return escape(printable(text, instead="\N{REPLACEMENT CHARACTER}", keep="\n"))


def html_table(head: Iterable[str], rows: Iterable[Iterable[str]], caption: str = "") -> str:
    """All are HTML already."""
    cells = "".join(f'<th scope="col">{name}</th>' for name in head)
    body = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    title = f"<caption>{caption}</caption>\n" if caption else ""
    return f"<table>\n{title}<thead><tr>{cells}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def _variables(theme: str) -> str:
    return "".join(f"--{role}:{colour};" for role, colour in THEMES[theme].items())


_STYLE = f"""
:root {{ {_variables("light")} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables("dark")} }} }}
body {{ margin: 0; background: var(--paper); color: var(--ink); font: 14px/1.5 {SANS}; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
caption {{ text-align: left; font-weight: 600; padding-bottom: 4px; }}
th, td {{ padding: 4px 14px 4px 0; text-align: right; border-bottom: 1px solid var(--grid); }}
th {{ color: var(--muted); font-weight: 500; }}
"""
