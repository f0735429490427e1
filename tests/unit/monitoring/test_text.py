"""Text of unknown origin, made harmless."""

from __future__ import annotations

from monitoring.text import escaped, printable


def test_unprintable_characters_are_replaced():
    assert printable("a\x1b[2J\nb é") == "a?[2J?b é"
    assert printable("a\x00\nb", instead="·", keep="\n") == "a·\nb"


def test_only_unprintable_text_is_escaped():
    assert escaped("a é") == "a é"
    assert escaped("é\x1b\x7f\n") == "\\xe9\\x1b\\x7f\\n"
