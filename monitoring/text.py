"""Text of unknown origin, made harmless to terminals, logs and XML."""

from __future__ import annotations


def printable(text: str, *, instead: str = "?", keep: str = "") -> str:
    """The text with every unprintable character replaced, except those in `keep`."""
    return "".join(each if each in keep or each.isprintable() else instead for each in text)


def escaped(text: str) -> str:
    """The text itself if it is printable; otherwise as printable ASCII, with backslash escapes."""
    if text.isprintable():
        return text
    ascii_text = text.encode("ascii", "backslashreplace").decode()  # leaves ASCII's own control characters
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in ascii_text)
