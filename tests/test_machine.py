"""Systems without features of Linux: macOS has no CPU affinity, Windows has no fcntl."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_runs import make_tiny_run

from raylt import machine
from raylt.core.device import all_threads
from raylt.runs.folder.provenance import read

ROOT = Path(__file__).parents[1]
WITHOUT_FCNTL = "import sys; sys.modules['fcntl'] = None\n"


def test_without_affinity_all_processors_count(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert machine.cores() == [0, 1, 2]
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert machine.cores() == [0]


def test_peak_memory_is_in_bytes_everywhere(monkeypatch):
    linux = machine.peak_memory()
    assert 10**7 < linux < 10**12
    monkeypatch.setattr(sys, "platform", "darwin")
    assert linux / 2048 < machine.peak_memory() < linux / 512


def test_only_one_module_asks_for_the_affinity():
    sources = [path for folder in ("raylt", "actors", "tune") for path in (ROOT / folder).rglob("*.py")]
    asking = [path.name for path in sources if "os.sched_getaffinity" in path.read_text()]
    assert asking == ["machine.py"]


def test_a_whole_run_needs_no_affinity(monkeypatch, tmp_path):
    for name in ("sched_getaffinity", "sched_setaffinity", "posix_fallocate"):
        monkeypatch.delattr(os, name)
    run = make_tiny_run(tmp_path, "fedavg")
    (line,) = read(run.folder)
    assert line["cores"] == os.cpu_count()
    with all_threads():
        pass


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["plan", "doctor"])
def test_commands_about_the_machine_need_no_affinity(setting):
    script = (
        "import os, sys; del os.sched_getaffinity, os.sched_setaffinity\n"
        f"sys.argv = ['raylt', {setting!r}, '--format', 'json']\n"
        "from raylt.cli.main import main; main()"
    )
    environment = {key: value for key, value in os.environ.items() if key != "RAYLT_ADDRESS"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.stdout, done.stderr
    assert json.loads(done.stdout)


def test_windows_is_refused_in_one_sentence_that_names_wsl():
    for script in ("from raylt.cli.main import main", "import raylt.cli.main"):
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_FCNTL + script], capture_output=True, text=True, cwd=ROOT
        )  # fmt: skip
        assert done.returncode == 2
        assert done.stderr.startswith("error [system.unsupported]: ")
        assert "WSL" in done.stderr
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_on_windows_the_library_raises_the_same_error():
    script = WITHOUT_FCNTL + (
        "import raylt\nfrom raylt.errors import RayltError\n"
        "try: raylt.run\nexcept RayltError as error: print(error.code)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "system.unsupported\n", done.stderr
