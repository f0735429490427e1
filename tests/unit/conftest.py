"""What several configuration tests share: an empty current folder, and cases read from text files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from parallel3d.config import load_config
from runtime.errors import ConfigError

CASES = Path(__file__).parent / "config"
Refused = Callable[..., str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def refused(here: Path) -> Refused:
    """The whole error that `run.yaml` with this text gives."""

    def refused(text: str = "", environ: dict[str, str] | None = None, **options: Any) -> str:
        (here / "run.yaml").write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError) as error:
            load_config("run.yaml", environ=environ or {}, **options)
        return str(error.value)

    return refused


class Refusal(NamedTuple):
    """A case of a refusals file, which has blocks of `===`, the text, `--->`, the error."""

    world_size: int | None
    text: str
    error: str


def read_refusals(name: str) -> list[Refusal]:
    cases = []
    for block in (CASES / name).read_text(encoding="utf-8").split("\n===")[1:]:
        head, _, rest = block.partition("\n")
        text, _, error = rest.partition("\n--->\n")
        cases.append(Refusal(int(head.split()[-1]) if head else None, text, error.rstrip("\n")))
    return cases


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for fixture in ("value_refusal", "yaml_refusal"):
        if fixture in metafunc.fixturenames:
            metafunc.parametrize(fixture, read_refusals(f"config_{fixture}s.txt"), ids=lambda case: case.text[:40])
