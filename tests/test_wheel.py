"""The built wheel outside the repository runs the demonstration and the commands of the first page."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Build the wheel; return a folder with its content."""
    built = tmp_path_factory.mktemp("built")
    build = ["uv", "build", "--wheel", "-q", "-o", built] if shutil.which("uv") else None
    build = build or [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", built]
    done = subprocess.run([*build, ROOT], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no wheel can be built here: {done.stderr[-200:]}")
    (wheel,) = built.glob("raylt-*.whl")
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run(installed, folder, *arguments):
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": str(installed), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_runs_the_demonstration(installed, tmp_path):
    file = run(installed, tmp_path, "-c", "import raylt; print(raylt.__file__)").strip()
    assert Path(file) == installed / "raylt/__init__.py"
    summary = json.loads(run(installed, tmp_path, "-m", "raylt", "run", "--fleet", "local", "--format", "json"))
    assert summary["method"] == "sfd"
    assert summary["accuracy"]["last"] > 0.6


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_has_what_the_first_page_needs(installed, tmp_path):
    for kind in ("example", "study", "method", "cluster"):
        run(installed, tmp_path, "-m", "raylt", "new", kind)
    run(installed, tmp_path, "eight_shops.py", "shops", "--most", "3")
    run(installed, tmp_path, "-m", "raylt", "study", "my_study.yaml", "--dry-run")
    assert (tmp_path / "cluster/raylt/cli/main.py").is_file()
    assert "sfd/cifar10" in run(installed, tmp_path, "-m", "raylt", "recipes")
