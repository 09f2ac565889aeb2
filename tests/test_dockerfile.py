"""The parts of the Dockerfile that can be checked without building an image."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "Dockerfile").read_text()


def copied() -> list[str]:
    """Return the files and folders of the repository that the image gets."""
    return [source for line in re.findall(r"^COPY (.*) \S+$", TEXT, re.M) for source in line.split()]


def test_what_it_copies_is_there_and_in_its_context():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    assert sorted(copied()) == sorted(line[1:] for line in ignored if line.startswith("!"))
    assert all((ROOT / source).exists() for source in copied())


def test_it_runs_as_a_user_without_rights_on_a_python_that_raylt_takes():
    assert re.search(r"^USER raylt$", TEXT, re.M)
    (minor,) = re.findall(r"^FROM python:3\.(\d+)-slim$", TEXT, re.M)
    assert 11 <= int(minor) <= 14
    assert TEXT.rstrip().endswith('ENTRYPOINT ["raylt"]')


@pytest.mark.slow
def test_the_package_builds_from_these_files_alone(tmp_path):
    if not shutil.which("uv"):
        pytest.skip("needs uv")
    for source in copied():
        path = ROOT / source
        if path.is_dir():
            shutil.copytree(path, tmp_path / "context" / source, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (tmp_path / "context").mkdir(exist_ok=True)
            shutil.copy(path, tmp_path / "context" / source)
    done = subprocess.run(
        ["uv", "build", "--wheel", "-q", "-o", tmp_path / "out", tmp_path / "context"], capture_output=True, text=True
    )
    if done.returncode and "hatchling" in done.stderr and "download" in done.stderr.lower():
        pytest.skip("hatchling cannot be fetched here")
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "out").glob("raylt-*.whl"))
