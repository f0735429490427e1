"""A user's file that hides one of our packages is named before anything runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT


def run_beside(folder: Path, *, path: Path = ROOT) -> tuple[int, str, str]:
    """A script in this folder, which Python puts first on the import path."""
    script = folder / "script.py"
    script.write_text("import parallel3d\nprint(parallel3d.run.__module__)\n")
    environment = {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=30)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("runtime.py", "runtime"),
        ("monitoring/__init__.py", "monitoring"),
        ("process_groups.py", "process_groups"),
        ("process_groups/__init__.py", "process_groups"),
    ],
)
def test_a_users_file_is_refused_and_named(tmp_path, file, name):
    hiding = tmp_path / file
    hiding.parent.mkdir(exist_ok=True)
    hiding.write_text("raise AssertionError('must not run')\n")
    code, out, err = run_beside(tmp_path)
    assert (code, out) == (1, "")
    assert err.endswith(
        f"ImportError: {hiding} hides parallel3d's own package '{name}' ({ROOT / name}).\n"
        f"Rename that file or folder, or take {hiding.parent} off the import path (sys.path).\n"
    )


def test_our_own_are_accepted(tmp_path):
    assert run_beside(tmp_path) == (0, "runtime.loop\n", "")


def test_our_own_are_accepted_through_a_link(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(ROOT, target_is_directory=True)
    assert run_beside(tmp_path, path=link) == (0, "runtime.loop\n", "")


def test_a_folder_without_python_files_hides_nothing(tmp_path):
    """Python itself prefers a real package anywhere on the path."""
    (tmp_path / "monitoring").mkdir()
    (tmp_path / "monitoring" / "dashboard.json").write_text("{}")
    assert run_beside(tmp_path) == (0, "runtime.loop\n", "")
