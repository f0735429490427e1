"""Who may import whom: each package only what stands above it, and the configuration no torch at all."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import ROOT

ALLOWED = {
    "monitoring": {"monitoring"},
    "runtime": {"runtime", "monitoring"},
    "process_groups": {"process_groups", "runtime", "monitoring"},
    "parallel3d": {"parallel3d", "process_groups", "runtime", "monitoring"},
}
NOT_SHIPPED = {"tests", "bench", "examples"}


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import hides where it leads"
            assert node.module is not None
            yield node.lineno, node.module


def files(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found
    return found


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_what_stands_above_it(package):
    forbidden = (set(ALLOWED) | NOT_SHIPPED) - ALLOWED[package]
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files(package)
        for line, name in imports(path)
        if name.partition(".")[0] in forbidden
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "package",
    [
        "monitoring",
        "runtime",
        "parallel3d/config",
        "parallel3d/cli",
        "parallel3d/reports/drawing",
        "parallel3d/pipeline/simulation",
        "parallel3d/pipeline/schedules",
        "process_groups/topology.py",
        *(f"process_groups/strategies/{name}.py" for name in ("program", "algorithms")),
    ],
)
def test_no_torch_is_imported_where_none_is_needed(package):
    path = ROOT / package
    for file in [path] if path.is_file() else files(package):
        for line, name in imports(file):
            assert name.partition(".")[0] != "torch", f"{file}:{line}"


@pytest.mark.parametrize(
    "statement",
    [
        "import parallel3d",
        "import parallel3d.config",
        "import parallel3d.cli.main",
        "import parallel3d.pipeline.simulation",
        "import parallel3d.reports.drawing.page",
        "import parallel3d.pipeline.schedules.layer_split",
        "import parallel3d.pipeline.schedules.build",
        "from parallel3d import RunConfig, ConfigError, PeerLost, run, start",
        "import parallel3d.cli.run, parallel3d.cli.run_text",
        "import parallel3d.cli.verify, monitoring.verify",
        "import parallel3d.cli.report, parallel3d.reports.text, parallel3d.reports.run_reader, parallel3d.reports.html",
        "import runtime.logs; from parallel3d import logger",
        "import process_groups.topology",
        "import process_groups.strategies.algorithms",
        "import runtime.launch.launch, monitoring.prometheus.run_metrics",
        "import parallel3d.cli.serve_gradients, parallel3d.cli.join, monitoring.prometheus.gradient_server_metrics",
        "from runtime.gradient_server import server; from runtime.gradient_server.client import worker",
        "from runtime.gradient_server.wire import auth, link, messages",
    ],
)
def test_torch_is_not_loaded_by_the_way_either(statement):
    source = f"{statement}; import sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert (done.stdout, done.stderr) == ("False\n", "")
