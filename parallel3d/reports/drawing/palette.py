"""Colours: one for each kind of action, a shade for each of a rank's stages; the same in terminals and pictures."""

from __future__ import annotations

from parallel3d.pipeline.schedules.actions import Kind

# Told apart by people who see fewer colours too, and all light enough for dark letters.
_COLOURS = {Kind.F: "#62a8ea", Kind.B: "#f2a93b", Kind.I: "#e58fbc", Kind.W: "#4cc29a"}
_OTHER = "#b3bac5"
LETTERS = "#0f1720"
"""Names on boxes."""

MEANINGS = {Kind.F: "forward", Kind.B: "backward", Kind.I: "backward, input part", Kind.W: "backward, weight part"}

THEMES = {
    "light": {
        "paper": "#ffffff",
        "ink": "#1b2430",
        "muted": "#5c6878",
        "grid": "#d5dbe3",
        "row": "#edf0f4",
        "critical": "#d0203a",
    },
    "dark": {
        "paper": "#11161d",
        "ink": "#e8ecf1",
        "muted": "#9aa7b6",
        "grid": "#2a333f",
        "row": "#1a212b",
        "critical": "#ff5c74",
    },
}

_LIGHTEST = 0.62
"""How much white is in the last stage's shade."""
_CUBE = (0, 95, 135, 175, 215, 255)
"""The steps of red, green and blue in a terminal's 256 colours."""


def shade(kind: Kind, place: int, stages: int) -> str:
    """The colour of an action of the rank's stage number `place` of so many: the first is the strongest."""
    part = _LIGHTEST * place / (stages - 1) if stages > 1 else 0.0
    mixed = (round(value + (255 - value) * part) for value in _rgb(_COLOURS.get(kind, _OTHER)))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def on_terminal(background: str, letters: str, exact: bool) -> str:
    """What makes a terminal write so; `exact` if it knows more than 256 colours."""
    if exact:
        (r, g, b), (x, y, z) = _rgb(background), _rgb(letters)
        return f"\x1b[48;2;{r};{g};{b};38;2;{x};{y};{z}m"
    return f"\x1b[48;5;{_nearest(background)};38;5;{_nearest(letters)}m"


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _nearest(colour: str) -> int:
    red, green, blue = (min(range(6), key=lambda step: abs(_CUBE[step] - value)) for value in _rgb(colour))
    return 16 + 36 * red + 6 * green + blue
