"""A run folder in which a file cannot be opened, or is a folder: each command says so in one line."""

import os
import shutil
from pathlib import Path

import pytest

FILES = (
    "identity.json",
    "config.yaml",
    "split.json",
    "outline.json",
    "metrics.jsonl",
    "provenance.jsonl",
    "summary.json",
    "model.safetensors",
    ".lock",
    "checkpoints",
    "confusions",
)
QUICKLY = {"split.json", "metrics.jsonl", "checkpoints"}
COMMANDS = (
    ("ls", "."),
    ("verify", "run"),
    ("follow", "run"),
    ("compare", "run"),
    ("report", "run"),
    ("plot", "clients", "run"),
    ("export", "run"),
    ("resume", "run", "--fleet", "local"),
    ("stop", "run"),
)


@pytest.fixture
def run(finished, raylt):
    return Path(shutil.copytree(finished[0], "run"))


def exchanged(path):
    """Replace a file by a folder, or a folder by a file."""
    if path.is_dir():
        shutil.rmtree(path)
        path.write_text("x")
    else:
        path.unlink(missing_ok=True)
        path.mkdir()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICKLY else pytest.mark.slow) for name in FILES]
)
@pytest.mark.parametrize("what", ["denied", "exchanged"])
def test_every_command_ends_with_a_line(raylt, run, monkeypatch, name, what):
    if what == "exchanged":
        exchanged(run / name)
    else:
        real = os.open

        def denied(path, *arguments, **how):
            if os.path.basename(os.fsdecode(path)) == name:
                raise PermissionError(13, "Permission denied", path)
            return real(path, *arguments, **how)

        monkeypatch.setattr(os, "open", denied)
    for command in COMMANDS:
        code, out, err = raylt(*command)
        assert code in (0, 1, 2), command
        assert "command.failed" not in err, (command, err)
        assert "Traceback" not in out + err, (command, err)
        errors = [line for line in err.splitlines() if line.startswith("error")]
        assert len(errors) <= 1, (command, err)
        assert errors or out, command
