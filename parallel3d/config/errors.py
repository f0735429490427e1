"""Configuration problems as values: where, what was found, which rule, what to do instead."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from monitoring.text import escaped
from runtime.errors import ConfigError

_LONGEST_SHOWN = 60
# A megabyte of nonsense would give a hundred thousand.
MOST_PROBLEMS = 1000


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value was given: line and column of a file, or an override (`--set parallel.pp`); "" when unknown."""

    source: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}:{self.column}"

    @property
    def reading_order(self) -> tuple[bool, int, int]:
        """Sorts places of the file from top to bottom, then overrides."""
        return self.line is None, self.line or 0, self.column or 0


@dataclass(frozen=True, slots=True)
class Problem:
    """One error: its place, the key (`path`) and value (`found`), the message, the remedy."""

    place: Place
    path: str
    found: str | None
    message: str
    remedy: str

    def __str__(self) -> str:
        margin = f"{self.place}  " if self.place.source else ""
        subject = self.path if self.found is None else f"{self.path} = {self.found}"
        first = f"{margin}{subject}: {self.message}" if subject else f"{margin}{self.message}"
        return f"{first}\n{' ' * len(margin)}{self.remedy}" if self.remedy else first

    def to_json(self) -> dict[str, Any]:
        """Plain values for `--json`; `file` is the override's name where there is no file."""
        return {
            "file": self.place.source,
            "line": self.place.line,
            "column": self.place.column,
            "path": self.path,
            "found": self.found,
            "message": self.message,
            "remedy": self.remedy,
        }


class ConfigProblems(ConfigError):
    """A ConfigError with its problems as values, in reading order."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(problems, key=lambda problem: problem.place.reading_order))
        super().__init__(self.problems)

    def __str__(self) -> str:
        return "\n".join(map(str, self.problems))


def problem_of_key(key: str, value: Any, message: str, remedy: str = "") -> ConfigProblems:
    """A problem found when a value is used: its place is filled in later (`planning.preflight.placing`)."""
    return ConfigProblems([Problem(Place(""), key, show(value), message, remedy)])


def raise_if_too_many(problems: Sequence[Problem], source: str) -> None:
    """Raise what was found so far once there are more than `MOST_PROBLEMS`."""
    if len(problems) > MOST_PROBLEMS:
        last = Problem(Place(source), "", None, f"more than {MOST_PROBLEMS} problems.", "The others are not shown.")
        raise ConfigProblems([*problems[:MOST_PROBLEMS], last])


def show(value: Any) -> str:
    """A value as the user would write it, shortened, with nothing a terminal would act on."""
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = object.__repr__(value)
    text = escaped(text)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 1]}…"


def dotted(path: Sequence[str | int]) -> str:
    """`("parallel", "order", 3)` as `parallel.order[3]`; keys with dots or other such characters are quoted."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            plain = part.replace("_", "").replace("-", "").isalnum() and part.isprintable()
            text += f"{'.' if text else ''}{part if plain and len(part) <= _LONGEST_SHOWN else show(part)}"
    return text


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that is closest to a misspelled word, if any is close."""
    by_lower_case = {choice.lower(): choice for choice in choices}
    # difflib is quadratic, and long words are no misspellings.
    close = difflib.get_close_matches(word[:_LONGEST_SHOWN].lower(), by_lower_case, n=1)
    return by_lower_case[close[0]] if close else None


def enumerate_words(words: Sequence[str], last: str = "or") -> str:
    """`a`, `a or b`, `a, b or c`."""
    return f" {last} ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
