"""What README.md and docs/ show is sound: their YAML is valid, their Python compiles, their links lead somewhere."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

import pytest

from parallel3d.config import load_config
from tests.support.processes import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


def test_the_yaml_is_valid(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_module.py").touch()  # which pages name; whatever it has is looked at later
    found = [text for page in PAGES for text in blocks(page, "yaml")]
    assert any("strategy_table" in text for text in found)
    for text in found:
        (tmp_path / "run.yaml").write_text(text)
        load_config(tmp_path / "run.yaml", environ={})


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_the_python_compiles(page):
    for text in blocks(page, "python"):
        if not text.startswith(">>>"):
            compile(textwrap.dedent(text), str(page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def anchors(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not target.startswith("http"):
            name, _, anchor = target.partition("#")
            linked = page.parent / name if name else page
            assert linked.exists(), target
            assert not anchor or anchor in anchors(linked), target


@pytest.mark.parametrize("page", [ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda path: path.name)
def test_named_files_exist(page):
    ours = "monitoring|runtime|process_groups|parallel3d|tests|bench"
    for name in re.findall(rf"`((?:{ours})/[\w/]+\.py)`", page.read_text()):
        assert (ROOT / name).is_file(), name
