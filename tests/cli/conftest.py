"""Fixtures of the command line's tests."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import SMALL, Outcome

from raylt.cli import main as cli
from raylt.cli import options


@pytest.fixture
def raylt(monkeypatch, capsys, tmp_path):
    """Return a function that runs a command in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    for console in (options.out, options.err):  # the consoles have already read the width of the terminal
        monkeypatch.setattr(console, "_width", 200)
    threads = torch.get_num_threads()

    def call(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["raylt", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        code = ended.value.code
        assert isinstance(code, int)
        return Outcome(code, *capsys.readouterr())

    yield call
    torch.set_num_threads(threads)  # a run sets the number of threads to 1


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> tuple[Path, Outcome]:
    """Do a run of two rounds in another process; return its folder and its output."""
    out = tmp_path_factory.mktemp("runs")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "raylt",
            "run",
            *SMALL,
            "method=fedprox",
            "method.mu=1e-2",
            "--fleet",
            "local",
            "--format",
            "json",
            "--out",
            str(out),
            "--name",
            "one",
        ],
        capture_output=True,
        text=True,
        cwd=out,
    )
    return out / "one", Outcome(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def npz(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "x_train": rng.integers(0, 256, (40, 8, 8), dtype=np.uint8),
        "y_train": np.arange(40) % 2,
        "x_test": rng.integers(0, 256, (6, 8, 8), dtype=np.uint8),
        "y_test": np.arange(6) % 2,
        "class_names": np.array(["a", "b"]),
    }

    def write(*without: str) -> Path:
        path = tmp_path / "arrays.npz"
        np.savez(path, **{key: value for key, value in arrays.items() if key not in without})
        return path

    return write
